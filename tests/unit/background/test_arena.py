"""Protects the shared memory of trainer and saver: both see the same bytes, and running out of memory raises.

A slot that overlaps another one, a mark that is set before its bytes, or a page that is missing when it is written
would publish a wrong checkpoint or kill a training run.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from ckstore.background import arena as arena_module
from ckstore.background.arena import DATA_OFFSET, FREE, STAGED, STAGING, UNIT_NBYTES, Arena, units_of
from ckstore.config import MIB
from ckstore.errors import CapacityError, MalformedError
from support.saver_harness import links


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


def mappings():
    """Return the lines of this process's memory map that belong to an arena."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "ckstore-arena" in line]


def descriptors():
    """Return how many arena descriptors this process has open. Descriptors of other kinds vary with other threads."""
    return sum("ckstore-arena" in link for link in links())


def test_growth_keeps_bytes_and_old_views(arena):
    slot = arena.slots[0]
    slot.reserve(100)
    other = Arena.attach(os.dup(arena.fd))
    view = slot.view(0, 5)
    view[:] = b"early"
    assert other.slots[0].nbytes == slot.nbytes == UNIT_NBYTES

    slot.reserve(3 * UNIT_NBYTES + 1)
    slot.view(3 * UNIT_NBYTES, 4)[:] = b"late"
    other.slots[0].refresh()

    assert other.slots[0].nbytes == slot.nbytes == 4 * UNIT_NBYTES
    assert bytes(other.slots[0].view(3 * UNIT_NBYTES, 4)) == b"late"
    view[:] = b"still"
    assert bytes(other.slots[0].view(0, 5)) == bytes(slot.view(0, 5)) == b"still"
    other.close()


def test_slot_never_shrinks(arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    before = os.fstat(arena.fd).st_size
    slot.reserve(10)
    assert slot.nbytes == 2 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_size == before


def test_growing_slots_do_not_overlap(arena):
    first, second = arena.slots
    for units in (1, 2, 4):
        for slot, pattern in ((first, 0x11), (second, 0x22)):
            slot.reserve(units * UNIT_NBYTES)
            np.asarray(slot.view(0, slot.nbytes))[:] = pattern
            slot.start(units, slot.nbytes)
            slot.mark(0, pattern)
    assert (np.asarray(first.view(0, first.nbytes)) == 0x11).all()
    assert (np.asarray(second.view(0, second.nbytes)) == 0x22).all()
    assert list(first.marks) == list(second.marks) == [1, 0, 0, 0]
    assert first.nbytes == second.nbytes == 4 * UNIT_NBYTES


def test_new_ticket_clears_staged_marks(arena):
    slot = arena.slots[1]
    assert (slot.state, slot.ticket) == (FREE, 0)
    slot.reserve(4 * UNIT_NBYTES)
    slot.start(1, 4 * UNIT_NBYTES)
    slot.mark(0, 4 * UNIT_NBYTES)
    slot.state = STAGED
    slot.start(2, 3 * UNIT_NBYTES + 1)
    assert (slot.state, slot.ticket) == (STAGING, 2)
    assert not slot.marks.any()


@pytest.mark.parametrize(("nbytes", "units"), [(0, 0), (1, 1), (UNIT_NBYTES, 1), (UNIT_NBYTES + 1, 2)])
def test_every_byte_belongs_to_a_unit(nbytes, units):
    assert units_of(nbytes) == units


def test_range_is_staged_when_all_units_are(arena):
    slot = arena.slots[0]
    slot.reserve(4 * UNIT_NBYTES)
    slot.start(1, 4 * UNIT_NBYTES)
    slot.mark(UNIT_NBYTES + 5, 1)
    assert slot.is_staged(UNIT_NBYTES, 2 * UNIT_NBYTES)
    assert not slot.is_staged(UNIT_NBYTES - 1, 2 * UNIT_NBYTES)
    assert not slot.is_staged(UNIT_NBYTES, 2 * UNIT_NBYTES + 1)


def test_data_starts_huge_page_aligned_after_marks(arena):
    slot = arena.slots[0]
    slot.reserve(1)
    assert slot.address % 4096 == 0
    assert DATA_OFFSET % (2 * MIB) == 0


def test_arena_takes_memory_only_when_populated(arena):
    slot = arena.slots[0]
    slot.reserve(64 * MIB)
    assert os.fstat(arena.fd).st_blocks * 512 < MIB
    assert not slot.is_populated(0, 64 * MIB)
    slot.populate(5, 8 * MIB - 5)
    assert slot.is_populated(0, 8 * MIB)
    assert not slot.is_populated(0, 8 * MIB + 1)
    assert 8 * MIB <= os.fstat(arena.fd).st_blocks * 512 < 9 * MIB


def test_growth_keeps_populated_memory(arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    slot.reserve(4 * UNIT_NBYTES)
    blocks = os.fstat(arena.fd).st_blocks
    assert arena.nbytes_taken == slot.nbytes_taken == 2 * UNIT_NBYTES
    slot.populate(0, 2 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks == blocks
    slot.populate(0, 3 * UNIT_NBYTES)
    assert arena.nbytes_taken == 3 * UNIT_NBYTES


@pytest.mark.parametrize("problem", [errno.ENOMEM, errno.EFAULT])
def test_failed_populate_raises_without_signal(arena, monkeypatch, problem):
    def refuse(*_):
        ctypes.set_errno(problem)
        return -1

    slot = arena.slots[0]
    slot.reserve(UNIT_NBYTES)
    monkeypatch.setattr(arena_module.libc, "madvise", refuse)
    with pytest.raises(CapacityError, match="use commit, which needs no second copy") as caught:
        slot.populate(0, 1)
    assert caught.value.errno == problem
    assert not slot.is_populated(0, 1)


def test_kernel_without_populate_uses_fallocate(arena, monkeypatch):
    def is_unknown(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    slot = arena.slots[0]
    slot.reserve(UNIT_NBYTES)
    monkeypatch.setattr(arena_module.libc, "madvise", is_unknown)
    slot.populate(0, UNIT_NBYTES)
    assert slot.is_populated(0, UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= UNIT_NBYTES


def test_slot_larger_than_its_marks_is_refused(arena):
    with pytest.raises(CapacityError):
        arena.slots[0].reserve(1 << 45)


def test_slot_beyond_the_file_is_refused(arena):
    arena.slots[0].reserve(UNIT_NBYTES)
    other = Arena.attach(os.dup(arena.fd))
    field = np.flatnonzero(arena.facts == UNIT_NBYTES)
    arena.facts[field] = 1000 * UNIT_NBYTES
    with pytest.raises(MalformedError, match="the capacity of a slot exceeds the arena"):
        other.slots[0].refresh()
    assert other.slots[0].nbytes == UNIT_NBYTES
    other.close()


@pytest.mark.parametrize("content", [b"", b"\0" * (4 * MIB), b"ckarena1" + b"\xff" * (4 * MIB)])
def test_descriptor_of_other_file_is_refused(content):
    fd = os.memfd_create("something-else")
    try:
        os.write(fd, content)
        with pytest.raises(MalformedError, match="is not an arena"):
            Arena.attach(fd)
    finally:
        os.close(fd)


def test_dropping_the_last_view_frees_the_arena():
    gc.collect()
    descriptors_before, mappings_before = descriptors(), len(mappings())
    for _ in range(5):
        made = Arena.create(UNIT_NBYTES, slot_count=2)
        made.slots[0].reserve(2 * UNIT_NBYTES)
        view = made.slots[0].view(0, 3)
        made.close()
        made.close()
        assert len(mappings()) > mappings_before
        view[:] = b"end"
        del view, made
        gc.collect()
        assert len(mappings()) == mappings_before
    assert descriptors() == descriptors_before


def test_freed_memory_can_be_populated_again(arena):
    slot = arena.slots[0]
    slot.reserve(4 * UNIT_NBYTES)
    slot.populate(0, 3 * UNIT_NBYTES)
    slot.view(0, 5)[:] = b"bytes"
    before = os.fstat(arena.fd).st_blocks * 512
    assert slot.give_back() == 3 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_blocks * 512 == before - 3 * UNIT_NBYTES
    assert (slot.nbytes_taken, slot.is_populated(0, 1), slot.give_back()) == (0, False, 0)
    assert slot.nbytes_wanting(2 * UNIT_NBYTES) == 2 * UNIT_NBYTES
    slot.populate(0, 1)
    assert bytes(slot.view(0, 5)) == bytes(5)
    assert slot.nbytes_taken == UNIT_NBYTES


def test_growth_counts_memory_once(arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(UNIT_NBYTES, UNIT_NBYTES)
    slot.reserve(9 * UNIT_NBYTES)
    assert slot.nbytes_taken == UNIT_NBYTES
    assert slot.nbytes_wanting(3 * UNIT_NBYTES) == 2 * UNIT_NBYTES
    slot.populate(0, 3 * UNIT_NBYTES)
    assert slot.nbytes_taken == 3 * UNIT_NBYTES


def test_ctrl_c_while_freeing_leaves_consistent_accounting(arena, monkeypatch):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    punch = arena_module.libc.fallocate

    class Interrupted:
        def __getattr__(self, name):
            return getattr(ctypes.CDLL(None), name)

        def fallocate(self, *place):
            assert punch(*place) == 0
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "libc", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            slot.give_back()
    assert not slot.is_populated(0, 2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 2 * UNIT_NBYTES


def test_slot_without_memory_for_marks_is_refused(arena, monkeypatch):
    slot = arena.slots[0]

    def refuse(*_):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(arena_module.libc, "madvise", refuse)
        with pytest.raises(CapacityError):
            slot.reserve(2 * UNIT_NBYTES)
    assert slot.nbytes == 0
    slot.reserve(2 * UNIT_NBYTES)
    other = Arena.attach(os.dup(arena.fd))
    assert other.slots[0].nbytes == slot.nbytes == 2 * UNIT_NBYTES
    other.close()


def test_closing_idle_arena_frees_it_despite_slot_objects(arena):
    slot = arena.slots[0]
    slot.reserve(UNIT_NBYTES)
    before = len(mappings())
    arena.close(is_idle=True)
    # The slot's memory and its page of facts each keep the whole memfd alive.
    assert len(mappings()) == before - 2
    assert slot.nbytes == 0
