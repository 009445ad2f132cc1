"""A part of a memfd in this process's addresses, on huge pages where the system has them.

2 MiB that are one page are taken in a fraction of the time of 512 small ones, each of which is a fault of its own, and
a state in huge pages is copied and read somewhat faster (``async_pages`` in docs/BENCH.md). The usual switch for shared
memory (``shmem_enabled``) is off nearly everywhere; ``MADV_COLLAPSE`` (madvise(2), Linux 6.1) asks for one range.

Invariants:
- Nothing is written to before memory was taken for it: whoever runs out gets an error and no SIGBUS.
- Huge pages are a matter of speed: where there are none, or making room for them takes too long, small ones do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref

from ckstore.clock import SYSTEM_CLOCK
from ckstore.leaves import writable_view_of

HUGE_PAGE_NBYTES = 2 << 20

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_COLLAPSE = 10, 14, 25
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_PASSING = (errno.EAGAIN, errno.EBUSY)
"""Something was in the way of one huge page (madvise(2)); the next may come."""

_SMALL_PAGES_SECONDS = 1.2e-3
"""What 2 MiB in small pages take (``async_pages``, the machine that docs/BENCH.md tells of)."""

_AHEAD_FACTOR = 8
"""How many times as long huge pages may take while no state waits for them."""

_PATIENCE_SECONDS = 0.05
"""What they may take longer than that, all in all. Where memory is in pieces the system moves what others have there,
and a virtual machine's host may have to find memory for each page that was never used before."""

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
        nbytes: How long it is, a multiple of 4096.

    Raises:
        OSError: There is no such room in this process's addresses.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self.address = _mapped(fd, offset, nbytes)
        self.nbytes = nbytes
        self._patience_seconds = _PATIENCE_SECONDS
        # Not at exit: a thread may be copying until the very end, and the kernel unmaps what is left.
        weakref.finalize(self, _unmap, os.getpid(), self.address, nbytes).atexit = False
        libc.madvise(self.address, nbytes, _MADV_DONTFORK)
        # For systems whose switch leaves it to this.
        libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes, writable, without a copy."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return writable_view_of(self.address + offset, nbytes, self)

    def take_huge_pages(self, offset: int, nbytes: int, *, is_ahead: bool) -> None:
        """Take memory for bytes that have none yet, in huge pages; some or all of it may be missing afterwards.

        Args:
            offset: Where they begin, a multiple of 2 MiB.
            nbytes: How many they are; less than a huge page at their end is left out.
            is_ahead: Nobody waits for it.
        """
        allowed_seconds = _SMALL_PAGES_SECONDS * (_AHEAD_FACTOR if is_ahead else 1)
        for begin in range(offset, offset + nbytes - HUGE_PAGE_NBYTES + 1, HUGE_PAGE_NBYTES):
            if self._patience_seconds <= 0:
                return
            begun = SYSTEM_CLOCK.monotonic()
            # A range in which there is nothing at all is refused.
            is_done = libc.madvise(self.address + begin, 4096, MADV_POPULATE_WRITE) == 0
            is_done = is_done and libc.madvise(self.address + begin, HUGE_PAGE_NBYTES, _MADV_COLLAPSE) == 0
            if not is_done and ctypes.get_errno() not in _PASSING:
                # Too little memory, or an older system: whoever takes small pages hears of what matters.
                self._patience_seconds = 0
                return
            took = SYSTEM_CLOCK.monotonic() - begun
            # Threads that do this at the same time may forget some of it: they end a little later.
            self._patience_seconds = min(self._patience_seconds - took + allowed_seconds, _PATIENCE_SECONDS)


def _mapped(fd: int, offset: int, nbytes: int) -> int:
    """Map a part of a file where its huge pages are huge pages of addresses too; return where that is."""
    # Room for it wherever it begins; what is not needed is given up again.
    room = _mmap(None, nbytes + HUGE_PAGE_NBYTES, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    address = room + -room % HUGE_PAGE_NBYTES
    try:
        _mmap(address, nbytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd, offset)
    except OSError:
        libc.munmap(room, nbytes + HUGE_PAGE_NBYTES)
        raise
    for begin, end in ((room, address), (address + nbytes, room + nbytes + HUGE_PAGE_NBYTES)):
        if begin < end:
            libc.munmap(begin, end - begin)
    return address


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
