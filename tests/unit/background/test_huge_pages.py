"""Protects the arena's pages: huge pages where the system provides them quickly, and normal pages otherwise.

Code that relies on huge pages would end training on a system without them, or wait for one.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path

import pytest

from ckstore.background import arena as arena_module
from ckstore.background import arena as shared_pages
from ckstore.background.arena import DATA_OFFSET, HUGE_PAGE_NBYTES, UNIT_NBYTES, Arena, Mapping
from ckstore.config import MIB
from ckstore.errors import CapacityError

COLLAPSE, MAP_FIXED = 25, 16
A_UNIT = UNIT_NBYTES // HUGE_PAGE_NBYTES
"""Huge pages in one unit."""

RUNS = ((1, 4), (5, 4), (9, 2))
"""Units that are requested in one call, from the second call on, and their number."""


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


class System:
    """The real system, except that ``madvise`` returns a chosen error and is recorded."""

    def __init__(self, problem=0):
        self.problem = problem
        self.asked = []
        self._real = shared_pages.libc

    def __getattr__(self, name):
        return getattr(self._real, name)

    def madvise(self, address, nbytes, advice):
        if advice != COLLAPSE:
            return self._real.madvise(address, nbytes, advice)
        self.asked.append((address, nbytes))
        ctypes.set_errno(self.problem)
        return -1 if self.problem else 0


class SteppingClock:
    """A clock that advances by a fixed number of seconds per reading."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def monotonic(self):
        self.now += self.seconds
        return self.now


@pytest.fixture
def switches(tmp_path, monkeypatch):
    """Pretend that the system supports huge pages."""
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE_PAGE_NBYTES}\n")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(shared_pages, "SWITCHES", tmp_path)
    return tmp_path


@pytest.fixture
def ask(monkeypatch, switches):
    """Return a function that sets the result of requesting huge pages, and the seconds that each request takes."""

    def set_up(problem=0, seconds=0.0):
        system = System(problem)
        monkeypatch.setattr(shared_pages, "libc", system)
        monkeypatch.setattr(shared_pages, "SYSTEM_CLOCK", SteppingClock(seconds))
        return system

    return set_up


def gives_huge_pages():
    """Return whether this system gives a huge page to a shared memory file that requests one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    fd = os.memfd_create("probe", os.MFD_CLOEXEC)
    os.ftruncate(fd, HUGE_PAGE_NBYTES)
    room = libc.mmap(None, 2 * HUGE_PAGE_NBYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    place = room + -room % HUGE_PAGE_NBYTES
    libc.mmap(place, HUGE_PAGE_NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    os.close(fd)
    ctypes.memset(place, 0, 1)
    found = libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE_PAGE_NBYTES), COLLAPSE) == 0
    libc.munmap(ctypes.c_void_p(room), ctypes.c_size_t(2 * HUGE_PAGE_NBYTES))
    return found and shared_pages.are_huge_pages_wanted()


@pytest.fixture
def huge(monkeypatch):
    """Disable the time limit, and return a function from bytes to the bytes expected on huge pages."""
    monkeypatch.setattr(shared_pages, "SYSTEM_CLOCK", SteppingClock(0.0))
    is_given = gives_huge_pages()
    return lambda nbytes: nbytes if is_given else 0


def nbytes_huge():
    """Return how many bytes of this process's arenas are on huge pages."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = "ckstore-arena" in line
        elif is_ours and line.startswith("ShmemPmdMapped"):
            found += int(line.split()[1]) * 1024
    return found


def nbytes_of_addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def test_slot_uses_huge_pages_if_available(huge, arena):
    slot = arena.slots[1]
    slot.reserve(4 * UNIT_NBYTES)
    before = nbytes_huge()
    slot.populate(0, 3 * UNIT_NBYTES)
    assert nbytes_huge() - before >= huge(3 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * UNIT_NBYTES
    assert bytes(slot.view(0, 3 * UNIT_NBYTES)) == bytes(3 * UNIT_NBYTES)
    slot.view(UNIT_NBYTES - 1, 2)[:] = b"ab"
    other = Arena.attach(os.dup(arena.fd))
    assert bytes(other.slots[1].view(UNIT_NBYTES - 2, 4)) == b"\0ab\0"
    assert list(other.slots[1].map_ahead()) == [True, True, True, False]
    assert nbytes_huge() - before >= huge(6 * UNIT_NBYTES), "the other process has them too"
    other.close()


def test_freed_memory_uses_huge_pages_again(huge, arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    before = nbytes_huge()
    slot.populate(0, 2 * UNIT_NBYTES)
    slot.view(0, 1)[:] = b"a"
    assert slot.give_back() == 2 * UNIT_NBYTES
    assert nbytes_huge() == before
    slot.populate(0, 2 * UNIT_NBYTES)
    assert nbytes_huge() - before >= huge(2 * UNIT_NBYTES)
    assert bytes(slot.view(0, 1)) == b"\0"


def test_huge_pages_are_requested_for_every_byte(ask, arena):
    slot = arena.slots[0]
    slot.reserve(12 * UNIT_NBYTES)
    system = ask()
    slot.populate(UNIT_NBYTES, 10 * UNIT_NBYTES)
    assert system.asked == [(slot.address + first * UNIT_NBYTES, count * UNIT_NBYTES) for first, count in RUNS]
    assert slot.is_populated(UNIT_NBYTES, 10 * UNIT_NBYTES)
    assert not slot.is_populated(0, UNIT_NBYTES)


def test_growing_slot_requests_no_page_twice(ask, arena):
    slot = arena.slots[0]
    slot.reserve(UNIT_NBYTES)
    slot.populate(0, UNIT_NBYTES)
    slot.view(5, 1)[:] = b"a"
    slot.reserve(3 * UNIT_NBYTES)
    system = ask()
    slot.populate(0, 2 * UNIT_NBYTES)
    assert system.asked == [(slot.address + UNIT_NBYTES, UNIT_NBYTES)]
    assert slot.is_populated(0, 2 * UNIT_NBYTES)
    assert bytes(slot.view(5, 1)) == b"a"


def test_pages_pinned_for_a_device_are_not_changed(ask, arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.unpin_pages = lambda: True
    system = ask()
    slot.populate(0, 2 * UNIT_NBYTES)
    assert not system.asked
    assert slot.is_populated(0, 2 * UNIT_NBYTES)


@pytest.mark.parametrize("problem", [errno.EINVAL, errno.ENOMEM, errno.EBUSY])
def test_system_without_huge_pages_is_asked_once(ask, arena, problem):
    slot = arena.slots[0]
    slot.reserve(12 * UNIT_NBYTES)
    system = ask(problem)
    slot.populate(0, 12 * UNIT_NBYTES)
    assert len(system.asked) == 1
    assert slot.is_populated(0, 12 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 12 * UNIT_NBYTES


def test_transient_failure_does_not_stop_huge_pages(ask, arena):
    slot = arena.slots[0]
    slot.reserve(12 * UNIT_NBYTES)
    system = ask(errno.EAGAIN)
    slot.populate(0, 12 * UNIT_NBYTES)
    assert len(system.asked) == 3
    assert slot.is_populated(0, 12 * UNIT_NBYTES)
    assert os.fstat(arena.fd).st_blocks * 512 >= 12 * UNIT_NBYTES


@pytest.mark.parametrize(
    ("problem", "milliseconds_a_page", "tries"),
    [(0, 1, 12), (0, 3, 4), (0, 9, 1), (0, 999, 1), (errno.EAGAIN, 1, 7), (errno.EAGAIN, 3, 3)],
)
def test_slow_huge_pages_are_not_requested_again(ask, arena, problem, milliseconds_a_page, tries):
    slot = arena.slots[0]
    slot.reserve(48 * UNIT_NBYTES)
    system = ask(problem, 1e-3 * milliseconds_a_page * 4 * A_UNIT)
    slot.populate(0, 48 * UNIT_NBYTES)
    assert len(system.asked) == tries
    assert slot.is_populated(0, 48 * UNIT_NBYTES)
    slot.reserve(60 * UNIT_NBYTES)
    slot.populate(48 * UNIT_NBYTES, 4 * UNIT_NBYTES)
    assert len(system.asked) == tries + 1, "newly mapped memory is tried again"


def test_threads_share_the_decision_against_huge_pages(ask, arena):
    slot = arena.slots[0]
    slot.reserve(12 * UNIT_NBYTES)
    system = ask()
    mapping, answer = slot.memory, system.madvise

    def given_up_meanwhile(*args):
        system.madvise = answer
        system.problem = errno.ENOMEM
        slot.populate(8 * UNIT_NBYTES, UNIT_NBYTES)
        system.problem = 0
        return answer(*args)

    system.madvise = given_up_meanwhile
    slot.populate(0, 4 * UNIT_NBYTES)
    tries = len(system.asked)
    slot.populate(4 * UNIT_NBYTES, 4 * UNIT_NBYTES)
    assert len(system.asked) == tries
    assert slot.memory is mapping
    assert slot.is_populated(0, 9 * UNIT_NBYTES)


@pytest.mark.parametrize(
    ("name", "content"), [("enabled", "always madvise [never]\n"), ("hpage_pmd_size", "33554432\n"), ("enabled", None)]
)
def test_disabled_huge_pages_are_not_requested(ask, switches, arena, name, content):
    (switches / name).unlink()
    if content is not None:
        (switches / name).write_text(content)
    system = ask()
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    assert not system.asked
    assert slot.is_populated(0, 2 * UNIT_NBYTES)


def test_missing_memory_raises_with_huge_pages_too(ask, arena, monkeypatch):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    system = ask()

    def refuse(*_):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    system.madvise = refuse
    monkeypatch.setattr(arena_module, "libc", system)
    with pytest.raises(CapacityError, match="no shared memory"):
        slot.populate(0, UNIT_NBYTES)
    assert not slot.is_populated(0, UNIT_NBYTES)


def test_mapping_reserves_and_frees_its_addresses_only(arena):
    gc.collect()
    slot = arena.slots[0]
    before = nbytes_of_addresses()
    slot.reserve(80 * UNIT_NBYTES)
    assert slot.address % HUGE_PAGE_NBYTES == 0
    taken = nbytes_of_addresses() - before
    assert 80 * UNIT_NBYTES <= taken <= 80 * UNIT_NBYTES + DATA_OFFSET + 2 * HUGE_PAGE_NBYTES
    slot.leave()
    gc.collect()
    assert abs(nbytes_of_addresses() - before) < HUGE_PAGE_NBYTES


def test_failed_mapping_frees_its_addresses():
    gc.collect()
    before = nbytes_of_addresses()
    for _ in range(20):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            Mapping(-1, 0, 8 * MIB)
        assert caught.value.errno == errno.EBADF
    gc.collect()
    assert nbytes_of_addresses() - before < 20 * MIB


@pytest.mark.parametrize("call", [2, 3, 4])
def test_interrupted_mapping_leaves_nothing(arena, monkeypatch, call):
    gc.collect()
    before, calls = nbytes_of_addresses(), []

    class Interrupted(System):
        def note(self, work, *args):
            found = work(*args)
            calls.append(work)
            if len(calls) == call:
                raise KeyboardInterrupt
            return found

        def mmap(self, *args):
            return self.note(self._real.mmap, *args)

        def madvise(self, *args):
            return self.note(self._real.madvise, *args)

    with monkeypatch.context() as patched:
        patched.setattr(shared_pages, "libc", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            Mapping(arena.fd, 0, 80 * UNIT_NBYTES)
    gc.collect()
    assert nbytes_of_addresses() - before < 40 * UNIT_NBYTES
    assert len(calls) == call
