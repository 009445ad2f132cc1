"""Protects commits during another one: with another niceness, or without room for a second state in the arena."""

from __future__ import annotations

import threading
from functools import partial

import pytest

import ckstore
from ckstore.config import MIB
from ckstore.errors import CapacityError
from support.fake_saver import slow, state
from support.saver_harness import SECONDS_MAX, until


@pytest.fixture
def replacing(open_fake_store):
    """Return a function that opens a store with ``on_busy="replace"`` and the given further options."""
    return partial(open_fake_store, on_busy="replace")


def test_other_priority_does_not_wait_for_the_writer(replacing, savers):
    store = replacing()
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(0), 0)
    # The last commit before the end uses the store's policy, whatever the others had.
    pending = store.commit_async(state(1), 1, policy=ckstore.Policy(on_busy="replace", saver_nice=5))
    assert pending.wait_staged(SECONDS_MAX)
    assert (len(savers), "quit" in saver.calls) == (1, False)


def test_next_commit_gets_its_priority(replacing, savers):
    store = replacing()
    store.commit_async(state(0), 0).result()
    store.wait()
    store.commit_async(state(1), 1, policy=ckstore.Policy(on_busy="replace", saver_nice=5)).result()
    assert [saver.options["nice"] for saver in savers] == [19, 5]


def test_state_without_room_waits_for_the_other(replacing, savers, caplog):
    store = replacing(arena_nbytes_max=30 * MIB)
    store.prewarm(state(0, 20 * MIB))
    saver = slow(savers)
    store.commit_async(state(0, 20 * MIB), 0)
    pendings = []
    thread = threading.Thread(target=lambda: pendings.append(store.commit_async(state(1, 20 * MIB), 1)), daemon=True)
    thread.start()
    until(lambda: "no memory for a second staged state" in caplog.text, "the log record of the wait")
    thread.join(0.1)
    assert not pendings, "it must wait for room"
    saver.finish(1)
    thread.join(SECONDS_MAX)
    assert pendings[0].wait_staged(SECONDS_MAX)
    assert caplog.text.count("no memory for a second staged state: the next commit waits until step 0 is written") == 1


def test_state_larger_than_the_arena_is_refused(replacing, savers):
    store = replacing(arena_nbytes_max=30 * MIB)
    store.prewarm(state(0, 20 * MIB))
    saver = slow(savers)
    pending = store.commit_async(state(0, 20 * MIB), 0)
    with pytest.raises(CapacityError, match="the policy allows"):
        store.commit_async(state(1, 40 * MIB), 1)
    assert not pending.is_done, "waiting would not help"
    saver.finish(1)
