"""Ctrl-C before each line of the trainer's code in a background commit, one commit per line.

At each line: the call raises KeyboardInterrupt, the next commit works, and a published step has the state of that step.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import saver_of
from ckstore.background.commits import BackgroundCommits
from ckstore.errors import SaverError
from support.fake_saver import OwnerOfAll, guard_with
from support.interrupts import STEPS, check_rounds, commit_and_guard, filled, guard, interrupt_each_line

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.timeout(300)]

LINES_MIN = 400
"""A commit runs more lines than this; a deep run interrupts all of them."""


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("threads", [1, 2])
def test_interrupted_commit_stages_own_state_or_none(recording_savers, folder, sample, threads):
    with ckstore.open(folder, policy=ckstore.Policy(staging_threads=threads)) as store:
        rounds = interrupt_each_line(store, sample, parts=16)
    check_rounds(rounds)
    assert len(set(rounds.places)) > LINES_MIN or not sample.is_whole


@pytest.mark.deep
def test_commit_that_is_not_aborted_is_detected(recording_savers, folder, sample, monkeypatch):
    # A negative control: here the commit after it, which was not interrupted, raises.
    monkeypatch.setattr(BackgroundCommits, "give_up", lambda *_: None)
    with ckstore.open(folder) as store, pytest.raises(SaverError, match="was interrupted"):
        interrupt_each_line(store, sample, parts=16)


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("is_checked", [False, True])
def test_interrupted_guarded_commit_stages_own_state(recording_savers, folder, sample, is_checked):
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=is_checked)) as store:
        guard_with(store, OwnerOfAll())
        rounds = interrupt_each_line(store, sample, commit_and_guard, after=guard, parts=20)
    check_rounds(rounds)
    assert len(set(rounds.places)) > LINES_MIN or not sample.is_whole


@pytest.mark.deep
def test_interrupted_replacement_stages_own_state(recording_savers, folder, sample):
    def fill(store, state, step):
        recording_savers[-1].is_quick = False
        store.commit_async(filled(state, step), step)
        store.commit_async(filled(state, step + 1), step + 1)

    def replace(store, state, step):
        store.commit_async(filled(state, step), step)

    def end(store, state, step):
        recording_savers[-1].is_quick = True
        recording_savers[-1].finish_staged()

    with ckstore.open(folder, policy=ckstore.Policy(on_busy="replace")) as store:
        rounds = interrupt_each_line(store, sample, replace, fill, end, parts=24)
        assert len(recording_savers[-1].aborted) > rounds.count // 2
    check_rounds(rounds)
    assert len(set(rounds.places)) > LINES_MIN or not sample.is_whole


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("guarded", [False, True])
def test_interrupted_commit_publishes_own_state(folder, sample, note, guarded):
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=guarded, compression="none", saver_nice=0)) as store:
        if guarded:
            guard_with(store, OwnerOfAll())
        rounds = interrupt_each_line(store, sample, commit_and_guard, after=guard, parts=20, every=3)
        assert saver_of(store).pid
    with ckstore.open(folder) as store:
        steps = store.steps()
        for step in steps:
            assert np.all(store.restore(step)["w"] == step % 251), step
    assert {index * STEPS + 7 for index in range(rounds.count)} <= set(steps)
    published = sum(step % STEPS == 5 for step in steps) - (rounds.count - len(rounds.places))
    note(f"Ctrl-C at {len(rounds.places)} lines: {published} commits were published nevertheless, each as it was")
    assert 0 < published < len(rounds.places)
