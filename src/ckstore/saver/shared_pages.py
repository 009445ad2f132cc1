"""A part of a memfd in this process's addresses, on huge pages where the system has them.

2 MiB that are one page are taken sooner than 512 small ones, each of which is a fault of its own: ``prewarm``, and the
call of a first commit without it, take a third of the time (``async_pages`` in docs/BENCH.md). The usual switch for
shared memory (``shmem_enabled``) is off nearly everywhere; ``MADV_COLLAPSE`` (madvise(2), Linux 6.1) asks for a range,
and at once.

Invariants:
- Nothing is written to before memory was taken for it: whoever runs out gets an error and no SIGBUS.
- Huge pages are a matter of speed: where there are none, where they are switched off, or where making room for them
  takes too long, small ones do.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

from ckstore.clock import SYSTEM_CLOCK
from ckstore.leaves import writable_view_of

HUGE_PAGE_NBYTES = 2 << 20

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_COLLAPSE = 10, 14, 25
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value

SWITCHES = Path("/sys/kernel/mm/transparent_hugepage")

_SMALL_PAGES_SECONDS = 1.2e-3
"""Somewhat less than what a thread takes here for 2 MiB in small pages: by ``async_pages``, what a call that was not
prewarmed returns later by, on two threads."""

_PATIENCE_SECONDS = 0.05
"""What they may take longer than that, all in all, in one mapping. Where memory is in pieces the system moves what
others have there, and a virtual machine's host may have to find memory for each page that was never used before."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Mapping:
    """A part of the memfd in this process's addresses; gone when nothing views it any more.

    Not ``mmap``: that keeps a descriptor of its own, which forked children would inherit.

    Args:
        fd: The memfd.
        offset: Where the part begins, a multiple of 2 MiB.
        nbytes: How long it is.

    Raises:
        OSError: There is no such room in this process's addresses.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        # Where huge pages of the file are huge pages of addresses too: somewhere in a room that is a little larger.
        room_nbytes = nbytes + HUGE_PAGE_NBYTES
        room = _mmap(None, room_nbytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        # At once: Ctrl-C between here and the end leaves nothing behind. Not at exit: a thread may be copying until
        # the very end, and the kernel unmaps what is left.
        weakref.finalize(self, _unmap, os.getpid(), room, room_nbytes).atexit = False
        self.address = room + -room % HUGE_PAGE_NBYTES
        self.nbytes = nbytes
        _mmap(self.address, nbytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd, offset)
        libc.madvise(room, room_nbytes, _MADV_DONTFORK)
        # For systems whose switch leaves it to this.
        libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)
        self._spent_seconds = 0.0
        self._is_given_up = not are_huge_pages_wanted()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes, writable, without a copy."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return writable_view_of(self.address + offset, nbytes, self)

    def take_huge_pages(self, offset: int, nbytes: int) -> None:
        """Take memory for bytes that have none yet, in huge pages; some or all of it may be missing afterwards.

        Args:
            offset: Where they begin, a multiple of 2 MiB.
            nbytes: How many they are, another one. Each call has the system empty its lists of pages on every
                processor, so it should be for some at once.
        """
        if self._is_given_up:
            return
        begun = SYSTEM_CLOCK.monotonic()
        # A huge page's range in which there is nothing at all would be refused.
        firsts = range(self.address + offset, self.address + offset + nbytes, HUGE_PAGE_NBYTES)
        is_there = all(libc.madvise(first, mmap.PAGESIZE, MADV_POPULATE_WRITE) == 0 for first in firsts)
        is_done = is_there and libc.madvise(self.address + offset, nbytes, _MADV_COLLAPSE) == 0
        if not is_done and ctypes.get_errno() != errno.EAGAIN:
            # There is no such page left, or the control group has its limit, or the system cannot do it: what matters
            # is heard by whoever takes small pages. Only what was in the way of one of them (EAGAIN) may pass.
            self._is_given_up = True
            return
        earned_seconds = _SMALL_PAGES_SECONDS * nbytes / HUGE_PAGE_NBYTES if is_done else 0
        # What was quick saves nothing up. Threads that do this at the same time may lose a little of it.
        self._spent_seconds = max(0.0, self._spent_seconds + SYSTEM_CLOCK.monotonic() - begun - earned_seconds)
        if self._spent_seconds > _PATIENCE_SECONDS:
            self._is_given_up = True


def are_huge_pages_wanted() -> bool:
    """Return whether this system has huge pages of 2 MiB, and nobody has switched them off altogether."""
    try:
        is_known = int((SWITCHES / "hpage_pmd_size").read_text()) == HUGE_PAGE_NBYTES
        return is_known and "[never]" not in (SWITCHES / "enabled").read_text()
    except (OSError, ValueError):
        return False


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    place: int | None = libc.mmap(address, nbytes, protection, flags, fd, offset)
    if place is None or place == _FAILED:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))
    return place


def _unmap(pid: int, address: int, nbytes: int) -> None:
    # A forked child has no such mapping; something else may lie at its place there.
    if pid == os.getpid():
        libc.munmap(address, nbytes)
