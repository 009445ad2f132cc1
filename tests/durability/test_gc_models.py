"""Protects the protocol of collections and replacements: every interleaving of the model, and models that must break.

The state counts are part of what is expected: a model that visits fewer states has gone blind.
"""

from __future__ import annotations

import pytest

from support import gc_model
from support.gc_rules import PackRules, ReplaceRules


@pytest.mark.parametrize(("rules", "states", "is_safe"), [row[1:] for row in gc_model.EXPECTED], ids=lambda value: "")
def test_model_is_safe_exactly_where_the_protocol_is_whole(rules, states, is_safe):
    found, trace = gc_model.search(rules)
    assert (found, trace is None) == (states, is_safe)
    if trace is not None:
        assert len(trace) > 3, "a violation is a story with several steps"


def test_whole_protocol_and_its_ablations_are_all_searched():
    names = [name for name, *_ in gc_model.EXPECTED]
    assert sum(is_safe for *_, is_safe in gc_model.EXPECTED) == 10
    assert len(set(names)) == len(names) == 28
    assert gc_model.EXPECTED[0][1] == PackRules()
    assert any(rules == ReplaceRules() for _, rules, _, _ in gc_model.EXPECTED)


def test_table_prints_that_all_is_as_expected(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gc_model.py", "--trace"])
    assert gc_model.main() == 0
    said = capsys.readouterr().out
    assert said.count("VIOLATION") == 18
    assert "as expected" in said
    assert "collector 0: now at: purge" in said, "a trace tells how a variant breaks"
