"""Protects the trainer's side of two generations: what is kept stays as it is, and makes way where memory is short."""

from __future__ import annotations

import os

import pytest
from pretend import slow, state

import ckstore
from ckstore import Policy
from ckstore.config import MIB
from ckstore.errors import CapacityError
from ckstore.saver.arena import Slot


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
    second.is_pinned = True
    assert not dock.give_back_all_but(first)
    second.is_pinned = False
    assert dock.give_back_all_but(first) >= 40 * MIB
    assert dock.nbytes == first.nbytes_taken


def test_a_waiting_state_is_replaced_without_a_wait_beside_a_kept_one(policy_store, savers):
    store = policy_store(base_cache="memory", on_busy="replace", arena_nbytes_max=110 * MIB)
    store.prewarm(state(0, 40 * MIB))
    savers[0].is_keeping = True
    store.commit_async(state(0, 40 * MIB), 0).result()
    slow(savers)
    for step in (1, 2, 3):
        store.commit_async(state(step, 40 * MIB), step)
    assert not {"forget", "release"} & set(savers[0].calls)
    savers[0].finish(2)
    savers[0].finish(4)
    store.wait()
