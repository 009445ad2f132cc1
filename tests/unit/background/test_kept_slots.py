"""Protects the trainer's side of two generations: what is kept stays as it is, and makes way where memory is short."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import ckstore
from ckstore import Policy, handed
from ckstore.config import MIB
from ckstore.errors import CapacityError
from ckstore.latch import Latch
from ckstore.outstanding import Outstanding
from ckstore.saver.arena import FREE, STAGED, UNIT_NBYTES, Slot
from ckstore.staging import dock
from support.fake_saver import slow, state


@pytest.fixture
def policy_store(savers, folder):
    opened = []

    def open_with(**options):
        opened.append(ckstore.open(folder, policy=Policy(**options)))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


def test_only_what_a_policy_allows_is_kept(policy_store, savers):
    def is_kept(**options):
        store = policy_store(**options)
        store.commit_async(state(0, 40 * MIB), 0).result()
        return savers[-1].kept[-1]

    assert is_kept(base_cache="memory")
    assert not is_kept()
    assert not is_kept(base_cache="memory", base_cache_nbytes_max=39 * MIB)
    assert is_kept(base_cache="memory", base_cache_nbytes_max=60 * MIB)
    assert not is_kept(base_cache="memory", arena_nbytes_max=60 * MIB)
    assert is_kept(base_cache="memory", arena_nbytes_max=120 * MIB)
    assert not is_kept(base_cache="memory", arena_nbytes_max=120 * MIB, on_busy="replace"), "one more may wait"
    assert is_kept(base_cache="memory", arena_nbytes_max=180 * MIB, on_busy="replace")
    assert not is_kept(base_cache="memory", compression="none")
    assert not is_kept(base_cache="memory", delta=False)


def test_a_kept_slot_is_not_written_to_before_it_is_given_back(policy_store, savers):
    store = policy_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].is_keeping = True
    for step in range(3):
        store.commit_async(state(step), step).result()
        if step:
            assert savers[0].content(step) == [state(step - 1)["w"].tobytes()], "it lies as it was"
            savers[0].free(step)
    slots = [savers[0].begun[ticket][0].index for ticket in (1, 2, 3)]
    assert slots[0] == slots[2] != slots[1]


def test_a_kept_slot_keeps_nobody_waiting(policy_store, savers):
    store = policy_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].is_keeping = True
    store.commit_async(state(0), 0).result()
    store.wait()
    slow(savers)
    first = store.commit_async(state(1), 1)
    assert not first.is_done
    savers[0].finish(2)
    assert first.result().step == 1
    store.close()
    assert savers[0].calls[-1] == "quit"


def test_prewarm_takes_the_memory_of_both_generations(policy_store, savers):
    store = policy_store(base_cache="memory")
    store.prewarm(state(0, 40 * MIB))
    nbytes = store.arena_nbytes
    assert nbytes >= 2 * 40 * MIB
    savers[0].is_keeping = True
    store.commit_async(state(0, 40 * MIB), 0).result()
    store.commit_async(state(1, 40 * MIB), 1).result()
    assert store.arena_nbytes == nbytes


def test_prewarm_makes_do_with_the_memory_of_one(policy_store, savers, monkeypatch):
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if slot.index:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    store = policy_store(base_cache="memory")
    store.prewarm(state(0, 40 * MIB))
    store.commit_async(state(0, 40 * MIB), 0).result()
    assert savers[0].kept == [False]
    assert savers[0].head(1).policy.base_cache == "none", "nor is there memory for a copy on the saver's heap"


def test_prewarm_beside_what_lies_there_takes_no_third_state(policy_store, savers):
    store = policy_store(base_cache="memory", arena_nbytes_max=110 * MIB)
    values = state(0, 40 * MIB)
    store.prewarm(values)
    savers[0].is_keeping = True
    nbytes = store.arena_nbytes
    for step in range(3):
        store.commit_async(values, step).result()
        store.prewarm(values)
    assert store.arena_nbytes == nbytes
    assert savers[0].kept == [True] * 3


def test_where_a_second_state_finds_no_room_the_kept_one_makes_way(policy_store, savers):
    store = policy_store(base_cache="memory", arena_nbytes_max=150 * MIB)
    store.prewarm(state(0))
    savers[0].is_keeping = True
    store.commit_async(state(0, 60 * MIB), 0).result()
    assert savers[0].kept == [True]
    # It has grown: both together would pass the bound.
    store.commit_async(state(1, 120 * MIB), 1).result()
    assert savers[0].kept == [True, False]
    assert "forget" in savers[0].calls
    assert "release" not in savers[0].calls, "the lease stays, and what is known of the run"
    assert store.arena_nbytes <= 150 * MIB
    assert savers[0].begun[2][0] is savers[0].begun[1][0], "it has the memory that there was"


def test_memory_that_ran_short_while_copying_is_not_asked_for_twice(policy_store, savers, monkeypatch):
    store = policy_store(base_cache="memory")
    store.prewarm(state(0))
    savers[0].is_keeping = True
    store.commit_async(state(0, 40 * MIB), 0).result()
    populate, free = Slot.populate, 70 * MIB

    def refuse(slot, offset, nbytes):
        others = sum(each.nbytes_taken for each in store._handover._dock.arena.slots)
        if not slot.is_populated(offset, nbytes) and others + nbytes > free:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    with pytest.raises(CapacityError, match="no memory"):
        store.commit_async(state(1, 40 * MIB), 1)
    assert store.commit_async(state(2, 40 * MIB), 2).result().step == 2
    assert savers[0].kept[-1] is False
    assert savers[0].content(3) == [state(2, 40 * MIB)["w"].tobytes()]


@pytest.mark.parametrize("base_cache", ["none", "memory"])
def test_a_state_that_grew_is_committed_with_the_memory_that_there_is(policy_store, savers, monkeypatch, base_cache):
    store = policy_store(base_cache=base_cache)
    store.prewarm(state(0))
    savers[0].is_keeping = True
    arena, take = store._handover._dock.arena, Slot._take_memory

    def taken():
        return os.fstat(arena.fd).st_blocks * 512

    def take_what_is_left(slot, begin, nbytes):
        if taken() + nbytes > 78 * MIB:
            raise CapacityError("no memory")
        take(slot, begin, nbytes)

    monkeypatch.setattr(Slot, "_take_memory", take_what_is_left)
    assert store.commit_async(state(0, 40 * MIB), 0).result().step == 0
    if base_cache == "memory":
        with pytest.raises(CapacityError, match="no memory"):
            store.commit_async(state(1, 60 * MIB), 1)
    for step in range(2, 5):
        assert store.commit_async(state(step, 60 * MIB), step).result().step == step
        assert savers[0].content(max(savers[0].begun)) == [state(step, 60 * MIB)["w"].tobytes()]
    assert 60 * MIB <= store.arena_nbytes <= taken() <= 78 * MIB


def test_pages_that_devices_copy_to_are_not_given_back(policy_store, savers):
    store = policy_store(arena_nbytes_max=150 * MIB, base_cache="memory")
    store.prewarm(state(0, 40 * MIB))
    dock = store._handover._dock
    first, second, _ = dock.free_slots()
    assert first.nbytes_taken
    assert second.nbytes_taken
    second.release_devices = lambda: False
    assert not dock.give_back_all_but(first)
    assert not dock.give_back_all_but(first), "nor when it is asked for again"
    second.release_devices = lambda: True
    assert dock.give_back_all_but(first) >= 40 * MIB
    assert second.release_devices is None, "whoever needs it tells devices anew"
    assert dock.nbytes == first.nbytes_taken


def test_a_waiting_state_is_replaced_without_a_wait_beside_a_kept_one(policy_store, savers):
    store = policy_store(base_cache="memory", on_busy="replace", arena_nbytes_max=150 * MIB)
    store.prewarm(state(0, 40 * MIB))
    savers[0].is_keeping = True
    store.commit_async(state(0, 40 * MIB), 0).result()
    slow(savers)
    for step in (1, 2, 3):
        store.commit_async(state(step, 40 * MIB), step)
    assert savers[0].kept == [True] * 4
    assert not {"forget", "release"} & set(savers[0].calls)
    savers[0].finish(2)
    savers[0].finish(4)
    store.wait()


def test_a_waiting_state_is_replaced_without_a_wait_where_there_is_no_room_for_a_kept_one(policy_store, savers):
    store = policy_store(base_cache="memory", on_busy="replace", arena_nbytes_max=110 * MIB)
    store.prewarm(state(0, 40 * MIB))
    savers[0].is_keeping = True
    store.commit_async(state(0, 40 * MIB), 0).result()
    slow(savers)
    for step in (1, 2, 3):
        store.commit_async(state(step, 40 * MIB), step)
    assert savers[0].kept == [False] * 4
    assert not {"forget", "release"} & set(savers[0].calls)
    savers[0].finish(2)
    savers[0].finish(4)
    store.wait()


def test_prewarm_makes_room_as_a_commit_does(policy_store):
    store = policy_store(base_cache="memory", arena_nbytes_max=150 * MIB)
    store.prewarm(state(0, 50 * MIB))
    store.prewarm(state(0, 100 * MIB))
    assert 100 * MIB <= store.arena_nbytes <= 150 * MIB
    assert store.commit_async(state(1, 100 * MIB), 1).result().step == 1


def test_what_prewarm_could_not_have_as_a_whole_it_gives_back(policy_store, monkeypatch):
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if slot.index and offset:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    store = policy_store(base_cache="memory")
    store.prewarm(state(0, 100 * MIB))
    slots = store._handover._dock.arena.slots
    assert [slot.nbytes_taken > 0 for slot in slots] == [True, False, False]


def test_ctrl_c_in_prewarm_leaves_no_thread_that_populates(policy_store, monkeypatch):
    populate, left = Slot.populate, []
    begun, heard, awaits, go_on = (threading.Event() for _ in range(4))

    def hang(slot, offset, nbytes):
        begun.set()
        assert go_on.wait(60)
        populate(slot, offset, nbytes)
        left.append(offset)

    class Ended(Latch):
        """Tells when whoever was interrupted waits for what had begun: no other wait of it has an end."""

        def wait(self, timeout=None):
            if timeout is not None:
                awaits.set()
            return super().wait(timeout)

    def hear(number, frame):
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def interrupt():
        begun.wait(60)
        # A signal right before a thread begins to sleep does not wake it: Python looks at signals between steps.
        while not heard.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)
        awaits.wait(60)
        go_on.set()

    monkeypatch.setattr(Slot, "populate", hang)
    monkeypatch.setattr(dock, "Latch", Ended)
    store = policy_store(staging_threads=1)
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, hear)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.prewarm(state(0, 200 * MIB))
        count = len(left)
    finally:
        for event in (heard, begun, awaits, go_on):
            event.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    time.sleep(0.2)
    assert len(left) == count == 1, "what had begun was waited for, and nothing else has begun"


def test_a_saver_that_has_not_heard_is_asked_again(policy_store, savers, monkeypatch):
    monkeypatch.setattr(handed, "ASK_AGAIN_SECONDS", 0.05)
    store = policy_store(base_cache="memory", arena_nbytes_max=150 * MIB)
    store.prewarm(state(0))
    saver = savers[0]
    saver.is_keeping = True
    store.commit_async(state(0, 60 * MIB), 0).result()
    hear, asked = saver.forget_kept, []

    def forget():
        asked.append(None)
        if len(asked) == 3:
            hear()

    saver.forget_kept = forget
    assert store.commit_async(state(1, 120 * MIB), 1).result().step == 1
    assert len(asked) == 3


def test_a_saver_is_told_when_memory_runs_short_for_it_has_some_too(policy_store, savers, monkeypatch):
    store = policy_store()

    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if nbytes >= UNIT_NBYTES:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    with pytest.raises(CapacityError):
        store.commit_async(state(0, 40 * MIB), 0)
    assert "forget" in savers[0].calls


@pytest.mark.parametrize("line", range(4))
def test_ctrl_c_in_the_middle_of_a_sweep_loses_no_slot(line):
    interrupts = iter([index == line for index in range(20)])

    class Careless(list):
        """Is interrupted right before or after what it does."""

        def remove(self, item):
            if next(interrupts):
                raise KeyboardInterrupt
            super().remove(item)
            if next(interrupts):
                raise KeyboardInterrupt

    over = SimpleNamespace(is_over=True, freed=threading.Event(), slot=SimpleNamespace(state=STAGED))
    over.freed.set()
    lying = Outstanding(None)
    lying.going, lying.kept = Careless([over]), Careless()
    with pytest.raises(KeyboardInterrupt):
        lying.sweep()
    lying.sweep()
    assert (lying.going, lying.kept, over.slot.state) == ([], [], FREE)
