"""Protects ``on_busy``: what happens to a new state while an earlier one is being written."""

from __future__ import annotations

import pytest

from ckstore.errors import SaverError
from support.fake_saver import slow, state
from support.guarded_memory import attach_owner

pytestmark = pytest.mark.usefixtures("no_threads_left")


def test_skip_drops_the_state_and_logs_it(open_fake_store, savers, caplog):
    store = open_fake_store(on_busy="skip")
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    second = store.commit_async(state(2), 2)
    assert "step 2 is skipped: step 1 is still being written" in caplog.text
    assert second.is_skipped
    assert second.is_done
    assert not second.is_staged
    assert not second.wait_staged()
    with pytest.raises(SaverError, match="step 2 was skipped"):
        second.result()
    saver.finish(1)
    third = store.commit_async(state(3), 3)
    assert not third.is_skipped
    assert list(saver.begun) == [1, 2]
    saver.finish(2)


def test_replace_keeps_one_waiting_state(open_fake_store, savers, caplog):
    store = open_fake_store(on_busy="replace")
    store.prewarm(state(0))
    saver = slow(savers)
    pendings = [store.commit_async(state(step), step) for step in (1, 2, 3, 4)]
    assert saver.aborted == [2, 3]
    assert [each.is_skipped for each in pendings] == [False, True, True, False]
    assert [room.index for room, _, _ in saver.begun.values()] == [0, 1, 1, 1]
    assert saver.parents == [(None, 0), (None, 1), (None, 1), (None, 1)]
    assert "step 3 replaces that of step 2" in caplog.text
    with pytest.raises(SaverError, match="step 2 was skipped: that of step 1"):
        pendings[1].result()
    saver.finish(1)
    saver.finish(4)
    store.wait()
    assert pendings[3].result().step == 4
    store.commit_async(state(5), 5)
    assert saver.parents[-1] == (104, 0)
    saver.finish(5)


@pytest.mark.parametrize("ask", [lambda pending: pending.wait_staged(), lambda pending: pending.is_staged])
def test_replace_waits_for_a_state_reported_as_staged(open_fake_store, savers, ask):
    store = open_fake_store(on_busy="replace")
    store.prewarm(state(0))
    saver = slow(savers)
    pendings = [store.commit_async(state(step), step) for step in (1, 2)]
    assert ask(pendings[1])
    saver.on_wait = lambda doing: saver.finish(1)
    pendings.append(store.commit_async(state(3), 3))
    assert pendings[0].is_done
    assert saver.aborted == []
    saver.finish(2)
    assert pendings[1].result().step == 2
    # is_staged was never reported for the third state.
    pendings.append(store.commit_async(state(4), 4))
    store.commit_async(state(5), 5)
    assert saver.aborted == [4]
    assert pendings[3].is_skipped
    saver.finish(3)
    saver.finish(5)


@pytest.mark.parametrize("on_busy", ["skip", "replace"])
def test_next_commit_finishes_the_guard_check(open_fake_store, savers, on_busy):
    store = open_fake_store(on_busy=on_busy, debug_guard=True)
    tensors = state(1)
    owner = attach_owner(store, tensors["w"])
    store.prewarm(tensors)
    saver = slow(savers)
    pending = store.commit_async(tensors, 1)
    assert not pending.is_staged
    store.commit_async(state(2), 2)
    assert pending.is_staged
    saver.finish(1)
    del owner
