"""Protects two generations in the arena: the last state stays where it was staged, as base of the next one."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from pretend import slow, state
from rig import SECONDS_MAX, Desk, until

import ckstore
from ckstore import Policy
from ckstore.bases import Bases
from ckstore.config import MIB
from ckstore.errors import CapacityError, MalformedError
from ckstore.ids import ChunkId
from ckstore.saver import messages
from ckstore.saver.arena import FREE, UNIT_NBYTES, Slot
from ckstore.saver.tickets import Callbacks, Tickets

KEEPING = Policy(base_cache="memory", threads=2, saver_nice=0)
COUNT = 4 * MIB
"""Elements of four chunks of fp32."""

SLOT_NBYTES = 4 * COUNT + 2 * UNIT_NBYTES
"""What a slot with them takes: samples and the head have units of their own."""


def drifting(step, count=COUNT):
    """Return values that change a little with each step, everywhere."""
    values = np.random.default_rng(0).normal(size=count).astype(np.float32)
    return values * np.float32(1 + step * 2**-16)


@pytest.fixture
def keeping_store(folder):
    with ckstore.open(folder, policy=KEEPING) as opened:
        yield opened


# The whole way


def test_the_last_state_stays_where_it_was_staged_and_two_slots_are_enough(keeping_store):
    store = keeping_store
    taken = []
    for step in range(7):
        receipt = store.commit_async({"w": drifting(step)}, step).result()
        assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (0, 0), "nothing is copied"
        assert receipt.chunks_delta in ((0,) if step == 0 else (0, 4))
        taken.append(store.arena_nbytes)
    assert 2 * 4 * COUNT <= taken[1] == taken[-1] <= 2 * SLOT_NBYTES
    for step in range(7):
        assert np.array_equal(store.restore(step)["w"], drifting(step))
    assert not store.verify("decode").damage


def test_the_same_is_stored_as_when_bases_are_read_back(keeping_store, folder):
    ours, others = [], []
    with ckstore.open(folder.with_name("other"), policy=Policy(threads=2, saver_nice=0)) as other:
        for step in range(5):
            state = {"w": drifting(step), "frozen": drifting(0), "small": [np.arange(step + 9)] * 3}
            ours.append(keeping_store.commit_async(state, step).result())
            others.append(other.commit_async(state, step).result())
    assert [each.bytes_written for each in ours] == [each.bytes_written for each in others]
    assert [each.chunks_delta for each in ours] == [each.chunks_delta for each in others]
    assert sum(each.chunks_delta for each in ours) >= 4


def test_what_does_not_change_moves_on_to_the_newer_slot(keeping_store):
    frozen = drifting(0)
    for step in range(4):
        receipt = keeping_store.commit_async({"frozen": frozen, "w": drifting(step + 1)}, step).result()
        assert receipt.bytes_bases == receipt.bytes_bases_peak == 0
        assert receipt.bytes_bases_staged == 8 * COUNT or step > 1
    assert keeping_store.arena_nbytes <= 2 * (SLOT_NBYTES + 4 * COUNT), "two states of two tensors"


def test_bases_come_out_of_the_arena_and_not_off_the_disk(keeping_store, folder):
    keeping_store.commit_async({"w": drifting(0)}, 0).result()
    # Of what it wrote nothing can be read any more; a base that is read back would be told as damaged.
    for pack in (folder / "packs").rglob("*.ckpack"):
        pack.write_bytes(b"x" * pack.stat().st_size)
    receipt = keeping_store.commit_async({"w": drifting(1)}, 1).result()
    assert receipt.chunks_delta == 4
    assert not receipt.warnings


def test_a_commit_of_this_process_takes_the_slot_back(keeping_store):
    store = keeping_store
    for step in range(0, 6, 2):
        store.commit_async({"w": drifting(step)}, step).result()
        store.commit({"w": drifting(step + 1)}, step + 1)
        store._handover._sweep()
        assert [slot.state for slot in store._handover._dock.arena.slots] == [FREE] * 3
    assert store.arena_nbytes <= SLOT_NBYTES
    assert store.steps() == list(range(6))


def test_a_policy_that_keeps_nothing_any_more_gives_the_slot_back(keeping_store):
    store = keeping_store
    store.commit_async({"w": drifting(0)}, 0).result()
    receipt = store.commit_async({"w": drifting(1)}, 1, policy=Policy(saver_nice=0)).result()
    assert receipt.bytes_bases_staged == 0
    until(lambda: not store._handover._kept or store._handover._sweep(), "both slots")
    assert not store._handover._kept


@pytest.mark.parametrize("on_busy", ["wait", "replace", "skip"])
def test_states_that_come_too_fast_are_stored_right_beside_one_that_is_kept(folder, on_busy):
    policy = Policy(base_cache="memory", on_busy=on_busy, saver_nice=0)
    with ckstore.open(folder, policy=policy) as store:
        pendings = [store.commit_async({"w": drifting(step)}, step) for step in range(12)]
        store.wait()
        assert store.arena_nbytes <= 3 * SLOT_NBYTES
        kept = store.steps()
        assert 11 in kept or on_busy == "skip"
        assert all(np.array_equal(store.restore(step)["w"], drifting(step)) for step in kept)
        assert [pending.step for pending in pendings if pending.error_or_none() is None] == kept or on_busy == "skip"


def test_a_saver_that_dies_while_it_keeps_a_slot_fails_nothing(keeping_store, caplog):
    store = keeping_store
    store.commit_async({"w": drifting(0)}, 0).result()
    saver = store._handover._saver
    os.kill(saver.pid, signal.SIGKILL)
    until(lambda: not saver.is_alive, "its end")
    assert "before the commit was acknowledged" not in caplog.text
    receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in (1, 2, 3)]
    assert any(receipt.bytes_bases_staged for receipt in receipts)
    assert store.arena_nbytes <= 2 * SLOT_NBYTES, "the slot was taken back"
    assert np.array_equal(store.restore(0)["w"], drifting(0))


def test_going_back_to_an_earlier_checkpoint_codes_against_that_one(keeping_store):
    store = keeping_store
    for step in range(3):
        store.commit_async({"w": drifting(step)}, step).result()
    store.rewind("seq:0")
    store.commit_async({"w": drifting(1)}, 9).result()
    store.commit_async({"w": drifting(2)}, 10).result()
    assert np.array_equal(store.restore(10)["w"], drifting(2))
    assert not store.verify("decode").damage


# The trainer's side, with a saver that is none


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


def test_where_a_second_state_finds_no_room_the_kept_one_makes_way(policy_store, savers):
    store = policy_store(base_cache="memory", arena_nbytes_max=150 * MIB)
    store.prewarm(state(0))
    savers[0].is_keeping = True
    store.commit_async(state(0, 60 * MIB), 0).result()
    assert savers[0].kept == [True]
    # It has grown: both together would pass the bound.
    store.commit_async(state(1, 120 * MIB), 1).result()
    assert savers[0].kept == [True, False]
    assert "release" in savers[0].calls
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


# The saver's side


def test_the_saver_gives_a_slot_back_when_the_next_ticket_has_ended(address):
    desk = Desk(address, slot_count=2)
    try:
        first = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_keep=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        assert first.events == ["began", "done", "kept"]
        assert not desk.saver.is_busy
        second = desk.begin({"w": drifting(1)}, 1, slot=1, policy=KEEPING, may_keep=True).stage().finish()
        assert second.kept.wait(SECONDS_MAX)
        assert first.events[-1] == "free"
        assert second.receipt.chunks_delta == 4
        assert desk.saver.release_lease(SECONDS_MAX)
        assert second.events[-1] == "free"
    finally:
        desk.close()


def test_what_may_not_be_kept_is_given_back_at_once(desk):
    handed = desk.begin({"w": drifting(0)}, 0, policy=KEEPING).stage().finish()
    assert handed.wait().bytes_bases == 4 * COUNT
    assert "kept" not in handed.events


def test_a_slot_that_is_kept_cannot_be_begun_again(desk):
    handed = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_keep=True).stage().finish()
    assert handed.kept.wait(SECONDS_MAX)
    saver = desk.saver
    desk.begin({"w": drifting(1)}, 1, policy=KEEPING, may_keep=True)
    until(lambda: not saver.is_alive, "its end")


def test_a_ticket_that_fails_leaves_what_was_kept_in_its_place(address):
    desk = Desk(address, slot_count=2)
    try:
        first = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_keep=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        second = desk.begin({"w": drifting(1)}, 1, slot=1, policy=KEEPING, may_keep=True).stage(1)
        desk.saver.abort(second.number)
        assert desk.saver.wait(second.free, SECONDS_MAX, "give it up")
        assert "free" not in first.events
        third = desk.begin({"w": drifting(2)}, 2, slot=1, policy=KEEPING, may_keep=True).stage().finish()
        assert third.kept.wait(SECONDS_MAX)
        assert third.receipt.chunks_delta == 4
        assert first.events[-1] == "free"
    finally:
        desk.close()


def test_a_slot_is_kept_once_and_ends_free():
    tickets, told = Tickets(), []
    note = [lambda *facts, name=name: told.append(name) for name in ("done", "failed", "free", "kept")]
    assert tickets.add(1, Callbacks(*note[:3], on_kept=note[3]))
    tickets.take(messages.Kept(1))
    assert len(tickets) == 0
    tickets.take(messages.SlotFree(1))
    assert told == ["kept", "free"]
    with pytest.raises(MalformedError, match="not given"):
        tickets.take(messages.Kept(1))
    assert len(tickets) == 0


# What is held


def held_by(tickets, nbytes=100):
    """Return bases that hold one chunk in the slot of each of these tickets; None: on the heap."""
    bases = Bases()
    for number, ticket in enumerate(tickets):
        bases.hold(ChunkId(bytes([number]) * 32), memoryview(bytes(nbytes)), ticket=ticket)
    bases._held, bases._held_nbytes = bases._drafts, bases._drafts_nbytes
    bases._drafts, bases._drafts_nbytes = {}, 0
    return bases


def test_the_older_slot_is_left_when_the_newer_one_holds_something():
    bases = held_by([1, 2, None])
    assert (bases.held_nbytes, bases.staged_nbytes) == (100, 200)
    bases.leave_slots(2)
    assert bases.tickets == {2}
    assert (bases.held_nbytes, bases.staged_nbytes) == (200, 100)
    assert all(bases.held(ChunkId(bytes([number]) * 32)) == bytes(100) for number in range(3))


def test_the_older_slot_stays_while_the_newer_one_holds_nothing():
    bases = held_by([1, 1])
    bases.leave_slots(2)
    assert bases.tickets == {1}
    bases.leave_slots(None)
    assert bases.tickets == frozenset()
    assert bases.held(ChunkId(bytes(32))) is None


def test_leaving_a_slot_keeps_the_bound():
    bases = held_by([1, 1, 2])
    bases._nbytes_max = 150
    bases.leave_slots(2)
    assert bases.held_nbytes == 100
    assert bases.tickets == {2}


def test_bytes_in_a_slot_that_have_changed_are_no_base():
    memory = bytearray(100)
    bases = Bases()
    bases.hold(ChunkId(bytes(32)), memoryview(memory), ticket=1)
    assert bases.held(ChunkId(bytes(32))) == bytes(100)
    memory[50] = 1
    assert bases.held(ChunkId(bytes(32))) is None
