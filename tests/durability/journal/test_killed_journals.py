"""A run with a journal, killed at random moments, resumes at most two steps behind and ends with the same bits.

Trainers, savers and both are killed. The next trainer restores the newest state into new objects. Its bits are those of
a run that was never killed; no step with a receipt is missing, nor one that ``wait_staged`` promised, unless a saver
was killed; then it trains on. Afterwards steps with receipts are restored from the history, and the store is verified.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support.killed_journals import BEHIND_MAX, Run, results_of
from support.strace_sweep import fast_folder

RUNS = 60
"""Some strikes come after the end of their run, so there are a few more than 200 kills."""


@pytest.fixture
def base(tmp_path):
    with fast_folder(tmp_path) as folder:
        yield folder


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_killed_run_resumes_at_most_two_steps_behind(base, sample, note):
    first = sample.seed(0)
    results = results_of([Run(first + number) for number in sample.part(range(RUNS), parts=RUNS)], base, lanes=2)
    bad = [result for result in results if result["problems"]]
    assert not bad, "\n".join(f"{result['run']}: {result['problems']}" for result in bad) + bad[0]["output"]
    kills = Counter(kill for result in results for kill in result["kills"])
    behind = max((steps for result in results for steps in result["behind"]), default=0)
    note(f"killed journals: seed {first}, {len(results)} runs, kills {dict(kills)}, at most {behind} steps behind")
    assert kills
    assert behind <= BEHIND_MAX
    if sample.is_whole:
        assert kills.total() >= 200
        assert len(kills) >= 6


@pytest.mark.deep(parts=4)
def test_a_missing_protection_is_found(base):
    texts = {"cuts records": "has a receipt", "forgets promises": "was promised"}
    for result in results_of([Run(0, fault) for fault in texts], base, lanes=2):
        text = texts[result["run"]["fault"]]
        assert any(text in problem for problem in result["problems"]), result
