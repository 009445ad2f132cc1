"""Protects the protocol of collections and replacements: model checks of every interleaving, and of broken variants.

The number of visited states is part of the expectation: a model that visits fewer states checks less.
"""

from __future__ import annotations

import pytest

from support import gc_model
from support.gc_rules import PackRules, ReplaceRules

STATES_LARGE = 100_000
"""Models with more states than this take seconds, and are deep tests."""
SMALL = [row for row in gc_model.EXPECTED if row[2] <= STATES_LARGE]
LARGE = [row for row in gc_model.EXPECTED if row[2] > STATES_LARGE]


def check(rules, states, is_safe):
    found, trace = gc_model.search(rules)
    assert (found, trace is None) == (states, is_safe)
    if trace is not None:
        assert len(trace) > 3, "a violation takes several steps"


@pytest.mark.parametrize(("rules", "states", "is_safe"), [row[1:] for row in SMALL], ids=[row[0] for row in SMALL])
def test_model_is_safe_only_with_full_protocol(rules, states, is_safe):
    check(rules, states, is_safe)


@pytest.mark.deep(parts=6)
@pytest.mark.parametrize(("rules", "states", "is_safe"), [row[1:] for row in LARGE], ids=[row[0] for row in LARGE])
def test_large_model_is_safe_only_with_full_protocol(rules, states, is_safe):
    check(rules, states, is_safe)


def test_every_variant_is_searched():
    names = [name for name, *_ in gc_model.EXPECTED]
    assert sum(is_safe for *_, is_safe in gc_model.EXPECTED) == 12
    assert len(set(names)) == len(names) == 34
    assert len(SMALL) == 32
    assert gc_model.EXPECTED[0][1] == PackRules()
    assert any(rules == ReplaceRules() for _, rules, _, _ in gc_model.EXPECTED)


def test_table_shows_traces_and_unexpected_rows(capsys, monkeypatch):
    rows = {name: (name, *facts) for name, *facts in gc_model.EXPECTED}
    broken = rows["without recheck before purge"]
    monkeypatch.setattr("sys.argv", ["gc_model.py", "--trace"])
    monkeypatch.setattr(gc_model, "EXPECTED", [rows["full protocol: 2 writers, 1 collector"], broken])
    assert gc_model.main() == 0
    said = capsys.readouterr().out
    assert said.count("VIOLATION") == 1
    assert "as expected" in said
    assert "collector 0: now at: purge" in said, "a trace tells how a variant breaks"
    monkeypatch.setattr(gc_model, "EXPECTED", [(*broken[:2], broken[2] + 1, False), (*broken[:3], True)])
    assert gc_model.main() == 1
    said = capsys.readouterr().out
    assert "expected VIOLATION in 651 states" in said
    assert "expected safe in 650 states" in said
    assert "2 of 2 rows differ" in said
