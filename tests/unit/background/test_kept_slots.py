"""Protects slots that keep bases on the trainer's side: they do not change, and are freed when memory is short."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from ckstore import Policy
from ckstore.background.arena import UNIT_NBYTES, Slot
from ckstore.background.staging import StagingArea
from ckstore.config import MIB, Limits
from ckstore.errors import CapacityError
from support.ctrl_c import ctrl_c
from support.fake_saver import slow, state


def test_policy_decides_whether_a_slot_is_kept(open_fake_store, savers):
    def is_kept(**options):
        store = open_fake_store(**options)
        store.commit_async(state(0, 20 * MIB), 0).result()
        return savers[-1].kept[-1]

    assert is_kept(base_cache="memory")
    assert not is_kept()
    assert not is_kept(base_cache="memory", base_cache_nbytes_max=19 * MIB)
    assert is_kept(base_cache="memory", base_cache_nbytes_max=30 * MIB)
    assert not is_kept(base_cache="memory", arena_nbytes_max=30 * MIB)
    assert is_kept(base_cache="memory", arena_nbytes_max=60 * MIB)
    assert not is_kept(base_cache="memory", arena_nbytes_max=60 * MIB, on_busy="replace"), "one more may wait"
    assert is_kept(base_cache="memory", arena_nbytes_max=90 * MIB, on_busy="replace")
    assert not is_kept(base_cache="memory", compression="none")
    assert not is_kept(base_cache="memory", delta=False)


def test_kept_slot_is_not_written_until_returned(open_fake_store, savers):
    store = open_fake_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].retains_slots = True
    for step in range(3):
        store.commit_async(state(step), step).result()
        if step:
            assert savers[0].content(step) == [state(step - 1)["w"].tobytes()], "the kept slot is unchanged"
            savers[0].free(step)
    slots = [savers[0].begun[ticket][0].index for ticket in (1, 2, 3)]
    assert slots[0] == slots[2] != slots[1]


def test_kept_slot_delays_no_commit(open_fake_store, savers):
    store = open_fake_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].retains_slots = True
    store.commit_async(state(0), 0).result()
    store.wait()
    slow(savers)
    first = store.commit_async(state(1), 1)
    assert not first.is_done
    savers[0].finish(2)
    assert first.result().step == 1
    store.close()
    assert savers[0].calls[-1] == "quit"


def test_prewarm_takes_memory_of_both_slots(open_fake_store, savers):
    store = open_fake_store(base_cache="memory")
    store.prewarm(state(0, 20 * MIB))
    nbytes = store.arena_nbytes
    assert nbytes >= 2 * 20 * MIB
    savers[0].retains_slots = True
    store.commit_async(state(0, 20 * MIB), 0).result()
    store.commit_async(state(1, 20 * MIB), 1).result()
    assert store.arena_nbytes == nbytes


def test_prewarm_accepts_memory_of_one_slot(open_fake_store, savers, monkeypatch):
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if slot.index:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    store = open_fake_store(base_cache="memory")
    store.prewarm(state(0, 20 * MIB))
    store.commit_async(state(0, 20 * MIB), 0).result()
    assert savers[0].kept == [False]
    assert savers[0].head(1).policy.base_cache == "none", "a copy on the saver's heap would not fit either"


def test_prewarm_takes_no_third_slot(open_fake_store, savers):
    store = open_fake_store(base_cache="memory")
    values = state(0, 20 * MIB)
    store.prewarm(values)
    savers[0].retains_slots = True
    nbytes = store.arena_nbytes
    for step in range(3):
        store.commit_async(values, step).result()
        if step:
            savers[0].free(step)
        store.prewarm(values)
    assert store.arena_nbytes == nbytes
    assert savers[0].kept == [True] * 3


def test_kept_slot_is_freed_for_a_second_state(open_fake_store, savers):
    store = open_fake_store(base_cache="memory", arena_nbytes_max=76 * MIB)
    store.prewarm(state(0))
    savers[0].retains_slots = True
    store.commit_async(state(0, 30 * MIB), 0).result()
    assert savers[0].kept == [True]
    # It has grown: both together would exceed the bound.
    store.commit_async(state(1, 60 * MIB), 1).result()
    assert savers[0].kept == [True, False]
    assert "forget" in savers[0].calls
    assert "release" not in savers[0].calls, "the lease and the chunk index stay"
    assert store.arena_nbytes <= 76 * MIB
    assert savers[0].begun[2][0] is savers[0].begun[1][0], "it reuses the kept slot"


def test_memory_shortage_while_copying_is_remembered(open_fake_store, savers, monkeypatch):
    store = open_fake_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].retains_slots = True
    store.commit_async(state(0, 20 * MIB), 0).result()
    populate, free = Slot.populate, 48 * MIB

    def refuse(slot, offset, nbytes):
        if not slot.is_populated(offset, nbytes) and store.arena_nbytes + nbytes > free:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    with pytest.raises(CapacityError, match="no memory"):
        store.commit_async(state(1, 20 * MIB), 1)
    assert store.commit_async(state(2, 20 * MIB), 2).result().step == 2
    assert savers[0].kept[-1] is False
    assert savers[0].content(3) == [state(2, 20 * MIB)["w"].tobytes()]


@pytest.mark.parametrize("base_cache", ["none", "memory"])
def test_grown_state_uses_the_kept_memory(open_fake_store, savers, monkeypatch, base_cache):
    store = open_fake_store(base_cache=base_cache)
    store.prewarm(state(0))
    savers[0].retains_slots = True
    populate = Slot.populate

    def nbytes_taken():
        return os.fstat(savers[0].arena.fd).st_blocks * 512

    def take_what_is_left(slot, offset, nbytes):
        for begin in range(offset - offset % UNIT_NBYTES, offset + nbytes, UNIT_NBYTES):
            if not slot.is_populated(begin, 1) and nbytes_taken() + UNIT_NBYTES > 46 * MIB:
                raise CapacityError("no memory")
            populate(slot, begin, 1)

    monkeypatch.setattr(Slot, "populate", take_what_is_left)
    assert store.commit_async(state(0, 20 * MIB), 0).result().step == 0
    if base_cache == "memory":
        with pytest.raises(CapacityError, match="no memory"):
            store.commit_async(state(1, 30 * MIB), 1)
    for step in range(2, 5):
        assert store.commit_async(state(step, 30 * MIB), step).result().step == step
        assert savers[0].content(max(savers[0].begun)) == [state(step, 30 * MIB)["w"].tobytes()]
    assert 30 * MIB <= store.arena_nbytes <= nbytes_taken() <= 46 * MIB


def test_pages_pinned_for_devices_are_not_freed():
    dock = StagingArea(Limits())
    dock.prewarm(20 * MIB, Policy(base_cache="memory"))
    first, second, _ = dock.free_slots()
    assert first.nbytes_taken
    assert second.nbytes_taken
    second.unpin_pages = lambda: False
    assert not dock.release_all_but(first)
    assert not dock.release_all_but(first), "a second call frees nothing either"
    second.unpin_pages = lambda: True
    assert dock.release_all_but(first) >= 20 * MIB
    assert second.unpin_pages is None, "the next user pins the pages again"
    assert dock.nbytes == first.nbytes_taken
    dock.close(is_waited=True)


def test_replace_does_not_wait_with_a_kept_slot(open_fake_store, savers):
    store = open_fake_store(base_cache="memory", on_busy="replace", arena_nbytes_max=84 * MIB)
    store.prewarm(state(0, 20 * MIB))
    savers[0].retains_slots = True
    store.commit_async(state(0, 20 * MIB), 0).result()
    slow(savers)
    for step in (1, 2, 3):
        store.commit_async(state(step, 20 * MIB), step)
    assert savers[0].kept == [True] * 4
    assert not {"forget", "release"} & set(savers[0].calls)
    savers[0].finish(2)
    savers[0].finish(4)
    store.wait()


def test_replace_does_not_wait_without_room_for_kept_slot(open_fake_store, savers):
    store = open_fake_store(base_cache="memory", on_busy="replace", arena_nbytes_max=60 * MIB)
    store.prewarm(state(0, 20 * MIB))
    savers[0].retains_slots = True
    store.commit_async(state(0, 20 * MIB), 0).result()
    slow(savers)
    for step in (1, 2, 3):
        store.commit_async(state(step, 20 * MIB), step)
    assert savers[0].kept == [False] * 4
    assert not {"forget", "release"} & set(savers[0].calls)
    savers[0].finish(2)
    savers[0].finish(4)
    store.wait()


def test_prewarm_frees_room_as_a_commit_does(open_fake_store):
    store = open_fake_store(base_cache="memory", arena_nbytes_max=76 * MIB)
    store.prewarm(state(0, 26 * MIB))
    store.prewarm(state(0, 52 * MIB))
    assert 52 * MIB <= store.arena_nbytes <= 76 * MIB
    assert store.commit_async(state(1, 52 * MIB), 1).result().step == 1


def test_failed_prewarm_frees_its_memory(open_fake_store, monkeypatch):
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if slot.index and offset:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    store = open_fake_store(base_cache="memory")
    # More than one populate call takes.
    store.prewarm(state(0, 72 * MIB))
    assert 72 * MIB <= store.arena_nbytes <= 84 * MIB, "the memory of one state"


def test_interrupted_prewarm_leaves_no_thread(open_fake_store, monkeypatch):
    populate, left = Slot.populate, []
    begun, go_on = threading.Event(), threading.Event()

    def hang(slot, offset, nbytes):
        begun.set()
        assert go_on.wait(60)
        populate(slot, offset, min(nbytes, UNIT_NBYTES))
        left.append(offset)

    monkeypatch.setattr(Slot, "populate", hang)
    store = open_fake_store(staging_threads=1)
    with ctrl_c() as interrupt:

        def interrupt_and_go_on():
            begun.wait(60)
            interrupt.send()
            # Longer than raising takes in a thread that does not wait.
            time.sleep(0.1)
            go_on.set()

        thread = threading.Thread(target=interrupt_and_go_on)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                store.prewarm({"w": np.empty(150 * MIB, np.uint8)})
            assert left == [0], "the running populate was awaited"
        finally:
            thread.join()
    store.close()
    assert left == [0], "no other populate began"


def test_unanswered_free_request_is_resent(open_fake_store, savers):
    store = open_fake_store(base_cache="memory", arena_nbytes_max=76 * MIB)
    store.prewarm(state(0))
    saver = savers[0]
    saver.retains_slots, saver.patience = True, 0.05
    store.commit_async(state(0, 30 * MIB), 0).result()
    hear, asked = saver.release_retained, []

    def forget():
        asked.append(None)
        if len(asked) == 3:
            hear()

    saver.release_retained = forget
    assert store.commit_async(state(1, 60 * MIB), 1).result().step == 1
    assert len(asked) == 3


def test_memory_shortage_is_reported_to_the_saver(open_fake_store, savers, monkeypatch):
    store = open_fake_store()

    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if nbytes >= UNIT_NBYTES:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    with pytest.raises(CapacityError):
        store.commit_async(state(0, 20 * MIB), 0)
    assert "forget" in savers[0].calls
