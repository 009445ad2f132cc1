"""Protects how an arena's memory is taken: on huge pages where they can be had soon, and on others otherwise.

What takes a huge page for granted would end training on a system without, or have it wait for one.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from pathlib import Path

import pytest

from ckstore.config import MIB, Limits, Policy
from ckstore.saver import arena as arena_module
from ckstore.saver import shared_pages
from ckstore.saver.arena import UNIT_NBYTES, Arena
from ckstore.saver.shared_pages import HUGE_PAGE_NBYTES, Mapping
from ckstore.staging.dock import Dock

COLLAPSE = 25
A_UNIT = UNIT_NBYTES // HUGE_PAGE_NBYTES


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


class System:
    """The system as it is, but for what becomes of asking for huge pages; notes where it was asked for them."""

    def __init__(self, problem=0):
        self.problem = problem
        self.asked = []
        self._real = shared_pages.libc

    def __getattr__(self, name):
        return getattr(self._real, name)

    def madvise(self, address, nbytes, advice):
        if advice != COLLAPSE:
            return self._real.madvise(address, nbytes, advice)
        self.asked.append(address)
        if self.problem:
            ctypes.set_errno(self.problem)
            return -1
        return self._real.madvise(address, nbytes, advice)


class Clock:
    """Goes on by so many seconds whenever somebody looks."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def monotonic(self):
        self.now += self.seconds
        return self.now


def with_system(monkeypatch, system, seconds=0.0):
    monkeypatch.setattr(shared_pages, "libc", system)
    monkeypatch.setattr(shared_pages, "SYSTEM_CLOCK", Clock(seconds))
    return system


def has_huge_pages():
    """Return whether this system gives a huge page to a memfd that asks for one, without anything of ckstore's."""
    fd = os.memfd_create("probe", os.MFD_CLOEXEC)
    os.ftruncate(fd, 3 * HUGE_PAGE_NBYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address = libc.mmap(None, 3 * HUGE_PAGE_NBYTES, 3, 1, fd, 0)
    # Where addresses begin on one, a page of the file may not.
    inside = ctypes.c_void_p(address + -address % HUGE_PAGE_NBYTES)
    offset = inside.value - address
    os.close(fd)
    if offset:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(3 * HUGE_PAGE_NBYTES))
        fd = os.memfd_create("probe", os.MFD_CLOEXEC)
        os.ftruncate(fd, HUGE_PAGE_NBYTES)
        libc.mmap(inside, HUGE_PAGE_NBYTES, 3, 1 | 16, fd, 0)
        os.close(fd)
    ctypes.memset(inside, 0, 1)
    found = libc.madvise(inside, ctypes.c_size_t(HUGE_PAGE_NBYTES), COLLAPSE) == 0
    libc.munmap(inside, ctypes.c_size_t(HUGE_PAGE_NBYTES))
    return found


def nbytes_huge():
    """Return how much of the arenas that this process has mapped lies on huge pages."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = "ckstore-arena" in line
        elif is_ours and line.startswith("ShmemPmdMapped"):
            found += int(line.split()[1]) * 1024
    return found


def nbytes_of_addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def test_memory_of_a_slot_lies_on_huge_pages_where_the_system_has_them(arena):
    slot = arena.slots[1]
    slot.reserve(4 * UNIT_NBYTES)
    assert nbytes_huge() == 0
    slot.populate(0, 3 * UNIT_NBYTES, is_ahead=True)
    assert nbytes_huge() == (3 * UNIT_NBYTES if has_huge_pages() else 0)
    assert 3 * UNIT_NBYTES <= os.fstat(arena.fd).st_blocks * 512 < 3 * UNIT_NBYTES + MIB
    assert bytes(slot.view(0, 3 * UNIT_NBYTES)) == bytes(3 * UNIT_NBYTES)
    slot.view(UNIT_NBYTES - 1, 2)[:] = b"ab"
    other = Arena.attach(os.dup(arena.fd))
    assert bytes(other.slots[1].view(UNIT_NBYTES - 2, 4)) == b"\0ab\0"
    assert list(other.slots[1].map_ahead()) == [True, True, True, False]
    assert nbytes_huge() == (6 * UNIT_NBYTES if has_huge_pages() else 0), "the other side has them too"
    other.close()


def test_what_is_given_back_is_taken_in_huge_pages_again(arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES, is_ahead=True)
    slot.view(0, 1)[:] = b"a"
    assert slot.give_back() == 2 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_blocks * 512 < MIB
    assert nbytes_huge() == 0
    slot.populate(0, 2 * UNIT_NBYTES, is_ahead=True)
    assert nbytes_huge() == (2 * UNIT_NBYTES if has_huge_pages() else 0)
    assert bytes(slot.view(0, 1)) == b"\0"


def test_a_slot_that_grows_keeps_its_bytes_and_asks_for_no_page_twice(arena, monkeypatch):
    slot = arena.slots[0]
    slot.reserve(UNIT_NBYTES)
    slot.populate(0, UNIT_NBYTES)
    slot.view(5, 1)[:] = b"a"
    slot.reserve(3 * UNIT_NBYTES)
    system = with_system(monkeypatch, System())
    slot.populate(0, 2 * UNIT_NBYTES)
    assert system.asked == [slot.address + UNIT_NBYTES + page * HUGE_PAGE_NBYTES for page in range(A_UNIT)]
    assert bytes(slot.view(5, 1)) == b"a"


@pytest.mark.parametrize("problem", [errno.EINVAL, errno.ENOMEM])
def test_a_system_without_huge_pages_is_asked_once_and_gives_small_ones(arena, monkeypatch, problem):
    slot = arena.slots[0]
    slot.reserve(3 * UNIT_NBYTES)
    system = with_system(monkeypatch, System(problem))
    slot.populate(0, 3 * UNIT_NBYTES)
    assert len(system.asked) == 1
    assert slot.is_populated(0, 3 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * UNIT_NBYTES
    assert nbytes_huge() == 0


@pytest.mark.parametrize("problem", [errno.EAGAIN, errno.EBUSY])
def test_what_is_in_the_way_of_one_huge_page_is_not_in_that_of_the_next(arena, monkeypatch, problem):
    slot = arena.slots[0]
    slot.reserve(3 * UNIT_NBYTES)
    system = with_system(monkeypatch, System(problem))
    slot.populate(0, 3 * UNIT_NBYTES)
    assert len(system.asked) == 3 * A_UNIT
    assert slot.is_populated(0, 3 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * UNIT_NBYTES


@pytest.mark.parametrize(
    ("seconds_a_page", "is_ahead", "pages"),
    [(0.001, False, 24), (0.030, False, 2), (0.009, False, 7), (0.009, True, 24), (0.030, True, 3), (9.0, True, 1)],
)
def test_huge_pages_that_take_long_are_given_up_sooner_if_a_state_waits(
    arena, monkeypatch, seconds_a_page, is_ahead, pages
):
    slot = arena.slots[0]
    slot.reserve(12 * UNIT_NBYTES)
    system = with_system(monkeypatch, System(), seconds_a_page)
    slot.populate(0, 12 * UNIT_NBYTES, is_ahead=is_ahead)
    assert len(system.asked) == pages
    assert slot.is_populated(0, 12 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 12 * UNIT_NBYTES


def test_a_state_to_come_may_wait_longer_for_huge_pages_than_one_that_has_come(monkeypatch):
    dock = Dock(Limits())
    system = with_system(monkeypatch, System(), 0.009)
    dock.prewarm(12 * UNIT_NBYTES, Policy(staging_threads=1))
    assert len(system.asked) == 12 * A_UNIT
    dock.close(is_waited=True)


def test_a_mapping_takes_no_more_addresses_than_it_has_and_leaves_none(arena):
    slot = arena.slots[0]
    before = nbytes_of_addresses()
    slot.reserve(8 * UNIT_NBYTES)
    assert slot.address % HUGE_PAGE_NBYTES == 0
    taken = nbytes_of_addresses() - before
    assert abs(taken - 8 * UNIT_NBYTES - arena_module.DATA_OFFSET) < MIB
    slot.leave()
    gc.collect()
    assert abs(nbytes_of_addresses() - before) < MIB


def test_what_cannot_be_mapped_leaves_no_addresses_taken():
    before = nbytes_of_addresses()
    for _ in range(20):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            Mapping(-1, 0, 8 * MIB)
        assert caught.value.errno == errno.EBADF
    assert nbytes_of_addresses() - before < MIB
