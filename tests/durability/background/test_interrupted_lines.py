"""Ctrl-C before each line of what the trainer's thread does in a background commit, one commit a line.

Whatever it hits: the call raises it, the next commit works, and what is published of a step is the state of that step.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from support import interrupts
from support.fake_saver import OwnerOfAll
from support.interrupts import SOURCE, STEPS, TRACED, check_seen, commit_and_guard, filled, guard, interrupt_each_line

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.mark.parametrize("threads", [1, 2])
def test_where_all_is_copied_before_the_call_returns(witnesses, folder, threads):
    with ckstore.open(folder, policy=ckstore.Policy(staging_threads=threads)) as store:
        places = interrupt_each_line(store)
    assert {place.partition(":")[0] for place in places} >= {"handover.py", "state.py", "copying.py", "workers.py"}
    check_seen(places)


@pytest.mark.parametrize("is_checked", [False, True])
def test_where_all_is_copied_behind_a_guard(witnesses, folder, is_checked):
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=is_checked)) as store:
        store._guarded = OwnerOfAll()
        places = interrupt_each_line(store, commit_and_guard, after=guard)
    assert len(places) > 150
    check_seen(places)


def test_where_the_state_that_waits_is_replaced(witnesses, folder):
    def fill(store, state, step):
        witnesses[-1].is_quick = False
        store.commit_async(filled(state, step), step)
        store.commit_async(filled(state, step + 1), step + 1)

    def replace(store, state, step):
        store.commit_async(filled(state, step), step)

    def end(store, state, step):
        witnesses[-1].is_quick = True
        witnesses[-1].finish_staged()

    with ckstore.open(folder, policy=ckstore.Policy(on_busy="replace")) as store:
        places = interrupt_each_line(store, replace, fill, end)
        assert len(witnesses[-1].aborted) > len(places) // 2
    check_seen(places)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("guarded", [False, True])
def test_with_a_saver_that_is_a_process(folder, tell, monkeypatch, guarded):
    ours = {str(SOURCE / "saver" / name) for name in ("client.py", "tickets.py", "messages.py")}
    monkeypatch.setattr(interrupts, "TRACED", TRACED | ours)
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=guarded, compression="none")) as store:
        if guarded:
            store._guarded = OwnerOfAll()
        places = interrupt_each_line(store, commit_and_guard, after=guard, stride=3)
        assert store._handover._saver.pid
    with ckstore.open(folder) as store:
        steps = store.steps()
        for step in steps:
            assert np.all(store.restore(step)["w"] == step % 251), step
        assert {index * STEPS + 7 for index in range(len(places))} <= set(steps)
    tell(f"Ctrl-C at {len(places)} lines: {len(steps)} checkpoints, each of its own step")
