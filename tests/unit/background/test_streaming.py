"""Protects streaming: encoding and writing begin with the first staged chunk, and only whole states are published."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.background import protocol
from ckstore.background.staged_head import StorageRow, places_to_sample
from ckstore.codec import chunk_codec
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import SaverError
from support.saver_harness import equal, noise, packs_nbytes, restored, until

PLAIN = Policy(compression="none")


def steps(address):
    with ckstore.open(address) as store:
        return store.steps()


def samples_of(captured):
    """Yield what the trainer stages first: samples that decide how chunks are coded."""
    for storage, offset, nbytes, width in places_to_sample(captured.storages, Limits()):
        out = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        taken = chunk_codec.sample_of(captured.storages[storage].read(offset, offset + nbytes), width, out)
        yield (storage, offset, nbytes, width), bytes(out[:taken])


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_encoding_begins_with_the_first_staged_chunk(served, address, compression):
    state = noise(3, 32 * MIB)
    samples = None if compression == "none" else samples_of
    begun = served.begin(state, 1, policy=Policy(compression=compression), sample=samples)
    if compression == "none":
        # Some threads already wait, each for its own chunk.
        begun.stage(units=1)
        served.hear(protocol.Progress, ticket=1, stage="write")
        served.settle()
    begun.stage(units=4 + bool(samples))
    # A block of 8 MiB is full and on disk before any byte of the second half is staged.
    until(lambda: packs_nbytes(address) > 7 * MIB, "the first part on disk")
    assert begun.events == ["Began"]
    assert begun.stage().finish().wait().chunks_new == 8
    assert equal(restored(address), state)


def test_rounded_weights_are_written_before_masters_arrive(served, address):
    """Excerpts identify whose masters they are. These are staged separately, before the rest."""
    source = np.random.default_rng(5)
    first = source.integers(0, 1 << 32, 4 * MIB, np.uint32)
    weights = source.standard_normal(2 * MIB).astype(np.float32)
    state = {"first": first, "weights": weights, "rounded": weights.astype(np.float16)}

    def samples_and_excerpts_of(captured):
        yield from samples_of(captured)
        for index, storage in enumerate(captured.storages):
            if storage.is_float:
                # The two are sampled at different places. What is read of them must be the same.
                begin, end = storage.nbytes // (4 * storage.element_width), 4 * (storage.nbytes // 5)
                yield (index, begin, end - begin, 0), bytes(storage.read(begin, end))

    begun = served.begin(state, 1, policy=Policy(compression="fast"), sample=samples_and_excerpts_of)
    begun.stage(units=begun.staged_units + 4)
    until(lambda: packs_nbytes(address) > 7 * MIB, "the first part on disk")
    assert begun.events == ["Began"]
    assert begun.stage().finish().wait().chunks_derived > 0
    assert equal(restored(address), state)


def test_commit_without_samples_succeeds(served, address):
    state = noise(3, 16 * MIB)
    begun = served.begin(state, 1).stage(units=2)
    begun.hear(protocol.Began)
    served.settle()
    assert begun.events == ["Began"]
    begun.stage().finish().wait()
    assert equal(restored(address), state)


def test_nothing_is_published_before_staged(served, address):
    # All bytes are there, but a guard may still find a change.
    begun = served.begin(noise(4), 1).stage()
    served.hear(protocol.Progress, ticket=1, stage="publish")
    for _ in range(50):
        served.settle()
    assert begun.events == ["Began"]
    assert steps(address) == []
    begun.abort()
    with pytest.raises(SaverError):
        begun.wait()
    assert steps(address) == []


def test_staged_message_needs_a_staged_slot(served, address):
    state = noise(5)
    begun = served.begin(state, 1)
    begun.hear(protocol.Began)
    served.say(protocol.Staged(1))
    served.settle()
    begun.stage().finish().wait()
    assert equal(restored(address), state)


def test_aborted_ticket_leaves_no_pack(served, address):
    begun = served.begin(noise(5, 32 * MIB), 1, policy=PLAIN).stage(units=4)
    until(lambda: packs_nbytes(address) > 7 * MIB, "the first part on disk")
    begun.abort()
    with pytest.raises(SaverError, match="given up by the trainer"):
        begun.wait()
    assert begun.events == ["Began", "Failed", "SlotFree"]
    assert packs_nbytes(address) == 0
    assert served.commit(noise(6), 2).seq == 0


def test_slots_are_written_in_sequence(served, address):
    first = served.begin(noise(1), 1).stage(units=1)
    second = served.begin(noise(2), 2, slot=1, parent_ticket=1).stage().finish()
    second.hear(protocol.Began)
    served.settle()
    assert second.events == ["Began"]
    first.stage().finish()
    assert (first.wait().seq, second.wait().seq) == (0, 1)
    with ckstore.open(address) as store:
        assert [(info.step, info.parent) for info in store.log()] == [(2, 0), (1, None)]


def test_waiting_ticket_can_be_replaced(served, address):
    first = served.begin(noise(1), 1).stage(units=1)
    second = served.begin(noise(2), 2, slot=1).stage().finish().abort()
    with pytest.raises(SaverError):
        second.wait()
    assert "Done" not in first.events, "an abort does not wait for its turn"
    third = served.begin(noise(3), 3, slot=1)
    first.stage().finish().wait()
    assert third.stage().finish().wait().seq == 1
    assert steps(address) == [1, 3]


def test_ticket_after_replaced_one_takes_its_parent(served, address):
    first = served.begin(noise(1), 1).stage(units=1)
    second = served.begin(noise(2), 2, slot=1, parent_ticket=first.number).abort()
    second.hear(protocol.SlotFree)
    third = served.begin(noise(3), 3, slot=1, parent_ticket=second.number)
    for each in (first, third):
        each.stage().finish().wait()
    with ckstore.open(address) as store:
        assert [(info.step, info.parent) for info in store.log()] == [(3, 0), (1, None)]


def test_grown_slot_is_remapped(served, address):
    for step, nbytes in enumerate((MIB, 24 * MIB, 2 * MIB, 48 * MIB)):
        state = noise(step, nbytes)
        served.commit(state, step)
        assert equal(restored(address, step), state)


def test_sampled_places_equal_those_of_a_commit():
    shapes = [StorageRow(0, nbytes, 4, True) for nbytes in (100, 5 * MIB, 200 * MIB)]
    places = places_to_sample(shapes, Limits())
    assert {place[0] for place in places if place[2] > 256 << 10} == {1, 2}
    assert sum(place[0] == 2 for place in places) == 8
