"""Encoding and writing begin with the first staged chunk, and nothing is published that is not whole."""

from __future__ import annotations

import threading
import time

import pytest

import ckstore
from ckstore import forms
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import SaverError
from ckstore.saver.arena import STAGED, UNIT_NBYTES, Arena
from ckstore.saver.head import Head, SampleRow, StorageRow
from ckstore.saver.state import Board, GatedLease, Ticket, places_to_sample
from ckstore.tree import TensorNode
from support.saver_desk import SECONDS_MAX, Desk, equal, noise, packs_nbytes, restored, until

PLAIN = Policy(compression="none")


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_encoding_and_writing_begin_with_the_first_staged_chunk(desk, address, compression):
    state = noise(3, 64 * MIB)

    def sample(captured):
        # What the trainer stages first: the samples that decide how chunks are coded.
        for storage, offset, nbytes, width in places_to_sample(captured.storages, Limits()):
            out = memoryview(bytearray(forms.SAMPLE_NBYTES))
            taken = forms.sample_of(captured.storages[storage].read(offset, offset + nbytes), width, out)
            yield (storage, offset, nbytes, width), bytes(out[:taken])

    samples = None if compression == "none" else sample
    handed = desk.begin(state, 1, policy=Policy(compression=compression), sample=samples)
    assert not handed.events
    half = 8 + (1 if samples else 0)
    handed.stage(half)
    # Two blocks of eight MiB can be full, and are on disk, when no byte of the second half is staged.
    until(lambda: packs_nbytes(address) > 15 * MIB, "the first half on disk")
    assert not handed.ended.is_set()
    handed.stage().finish()
    receipt = handed.wait()
    assert receipt.chunks_new == 16
    assert equal(restored(address), state)


def test_without_samples_a_coded_commit_still_ends_well(desk, address):
    state = noise(3, 16 * MIB)
    handed = desk.begin(state, 1).stage(2)
    assert not handed.ended.wait(0.2)
    handed.stage().finish()
    handed.wait()
    assert equal(restored(address), state)


def test_nothing_is_published_before_the_trainer_says_that_all_is_staged(desk, address):
    # All bytes are there, but a guard may still find that they changed underneath.
    handed = desk.begin(noise(4), 1).stage()
    assert handed.began.wait(SECONDS_MAX)
    assert not handed.ended.wait(0.5)
    with ckstore.open(address) as store:
        assert store.steps() == []
    desk.saver.abort(handed.number)
    with pytest.raises(SaverError):
        handed.wait()
    with ckstore.open(address) as store:
        assert store.steps() == []


def test_aborted_ticket_stops_in_the_middle_and_leaves_no_pack(desk, address):
    handed = desk.begin(noise(5, 64 * MIB), 1, policy=PLAIN).stage(8)
    until(lambda: packs_nbytes(address) > 15 * MIB, "the first half on disk")
    desk.saver.abort(handed.number)
    with pytest.raises(SaverError, match="given up by the trainer"):
        handed.wait()
    assert handed.events == ["began", "failed", "free"]
    assert packs_nbytes(address) == 0
    assert desk.commit(noise(6), 2).seq == 0


def test_two_slots_are_written_one_after_the_other(address):
    desk = Desk(address, slot_count=2)
    try:
        first = desk.begin(noise(1), 1, slot=0).stage(1)
        second = desk.begin(noise(2), 2, slot=1, parent_ticket=1).stage().finish()
        assert second.began.wait(SECONDS_MAX)
        assert not second.ended.is_set()
        first.stage().finish()
        assert (first.wait().seq, second.wait().seq) == (0, 1)
        with ckstore.open(address) as store:
            assert [(info.step, info.parent) for info in store.log()] == [(2, 0), (1, None)]
    finally:
        desk.close()


def test_waiting_ticket_can_be_replaced_before_its_turn(address):
    desk = Desk(address, slot_count=2)
    try:
        first = desk.begin(noise(1), 1, slot=0).stage(1)
        second = desk.begin(noise(2), 2, slot=1).stage().finish()
        desk.saver.abort(second.number)
        first.stage().finish().wait()
        with pytest.raises(SaverError):
            second.wait()
        assert desk.commit(noise(3), 3, slot=1).seq == 1
        with ckstore.open(address) as store:
            assert store.steps() == [1, 3]
    finally:
        desk.close()


def test_slot_that_grows_is_mapped_anew(desk, address):
    for step, nbytes in enumerate((MIB, 24 * MIB, 2 * MIB, 48 * MIB)):
        state = noise(step, nbytes)
        desk.commit(state, step)
        assert equal(restored(address, step), state)


# In one process, without a saver


def ticket_of(arena, *, samples=(), nbytes=2 * UNIT_NBYTES):
    arena.slots[0].reserve(nbytes + UNIT_NBYTES)
    arena.slots[0].start(1, nbytes + UNIT_NBYTES)
    row = StorageRow(UNIT_NBYTES, nbytes, 4, True)
    head = Head(1, {}, [], Policy(), [], TensorNode(0), [], [row], samples)
    board = Board()
    return Ticket(1, arena.slots[0], head, board), board


@pytest.fixture
def arena():
    made = Arena.create(slot_count=1)
    yield made
    made.close()


def in_thread(step):
    results = []

    def run():
        try:
            results.append(step())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_reader_waits_for_its_range_and_for_no_other(arena):
    ticket, board = ticket_of(arena)
    storage = ticket.storages[0]
    arena.slots[0].view(UNIT_NBYTES, 4)[:] = b"abcd"
    thread, results = in_thread(lambda: bytes(storage.read(0, 4)))
    time.sleep(0.1)
    assert not results
    arena.slots[0].marks[1] = 1
    board.tell()
    thread.join(SECONDS_MAX)
    assert results == [b"abcd"]
    assert storage.read(0, 0).nbytes == 0
    assert storage.read(0, 4).readonly


def test_reader_raises_when_the_trainer_dies_before_its_range_came(arena):
    ticket, board = ticket_of(arena)
    thread, results = in_thread(lambda: ticket.storages[0].read(0, 4))
    board.tell_gone()
    thread.join(SECONDS_MAX)
    assert isinstance(results[0], SaverError)
    assert "trainer died" in str(results[0])


@pytest.mark.parametrize("has_lease", [True, False])
def test_ticket_outlives_its_trainer_only_if_it_is_whole_and_the_lease_was_held(arena, has_lease):
    ticket, board = ticket_of(arena)
    ticket.has_lease = has_lease
    arena.slots[0].marks[:] = 1
    board.tell_gone()
    assert ticket.is_given_up, "the trainer has not said that all is staged"
    arena.slots[0].state = STAGED
    assert ticket.is_given_up is not has_lease
    arena.slots[0].start(2, UNIT_NBYTES)
    arena.slots[0].state = STAGED
    assert ticket.is_given_up, "the slot is another ticket's"


def test_reader_looks_at_marks_until_the_trainer_has_said_that_all_is_staged(arena):
    ticket, _ = ticket_of(arena)
    slot = arena.slots[0]
    ticket.note_staged()
    assert not ticket.is_staged(0, 4), "a message that says so is not believed where the slot says otherwise"
    slot.marks[:] = 1
    slot.state = STAGED
    ticket.note_staged()
    slot.marks[:] = 0
    assert ticket.is_staged(0, 3 * UNIT_NBYTES), "no mark is looked at any more"
    slot.view(UNIT_NBYTES, 2)[:] = b"ab"
    assert bytes(ticket.storages[0].read(0, 3)) == b"ab\0"


def test_sample_that_is_staged_apart_stands_in_for_its_chunk(arena):
    row = SampleRow(0, 0, UNIT_NBYTES, 4, 0, 8)
    excerpt = SampleRow(0, UNIT_NBYTES, 16, 0, 100, 16)
    ticket, _ = ticket_of(arena, samples=[row, excerpt])
    storage, slot = ticket.storages[0], arena.slots[0]
    slot.view(0, 8)[:] = b"a sample"
    slot.view(100, 16)[:] = b"these 16 bytes.."
    slot.marks[0] = 1
    assert storage.sample(0, UNIT_NBYTES, 4) == b"a sample"
    assert storage.sample(0, UNIT_NBYTES, 2) is None
    assert bytes(storage.read(UNIT_NBYTES + 6, UNIT_NBYTES + 8)) == b"16"
    slot.marks[:] = 1
    assert storage.sample(0, UNIT_NBYTES, 4) == b"a sample", "in one piece, when the chunk is there too"
    assert bytes(storage.read(UNIT_NBYTES, UNIT_NBYTES + 2)) == b"\0\0"


def test_gate_is_asked_before_the_lease_is_looked_at(backend, clock):
    with ckstore.open(backend):
        lease = GatedLease(backend, "main", clock)
        lease.take()
        asked = []
        lease.gate = lambda: asked.append(True)
        lease.check()
        assert asked == [True]
        lease.release()


def test_places_to_sample_are_those_that_a_commit_samples():
    shapes = [StorageRow(0, nbytes, 4, True) for nbytes in (100, 5 * MIB, 200 * MIB)]
    places = places_to_sample(shapes, Limits())
    assert {place[0] for place in places if place[2] > 256 << 10} == {1, 2}
    assert sum(place[0] == 2 for place in places) == 8
