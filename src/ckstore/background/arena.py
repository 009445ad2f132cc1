"""Shared memory that the trainer stages into and the saver reads: a memfd with a page of facts and up to three slots.

Invariants:
- It is no file of any file system: nothing limits it but memory, and it is gone with the last process that holds it.
- Its length never shrinks, and a page is populated before it is first written, so that running out of memory is an
  error and no SIGBUS. Memory of a slot that nobody reads or writes can be given back; a place in it stays.
- Each slot has a place of its own in a sparse address space: one can grow while the other is being read.
- A unit of 4 MiB is marked after its bytes were written, never before.
- Forked children inherit neither the mapping nor the descriptor: a data loader that outlives its trainer keeps no
  memory.

Layout: a header (magic, number of slots, and for each slot ticket, state and capacity, each a native u64), then slots.
A slot is one mark (a byte) for each of its units, and its bytes from ``DATA_OFFSET`` on.

A part of a memfd in this process's addresses, on huge pages where the system has them.

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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import MIB
from ckstore.errors import CapacityError, MalformedError
from ckstore.processes import close_in_children
from ckstore.state.memory import writable_view_of

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


UNIT_NBYTES = 4 * MIB
"""What one mark stands for."""

FREE, STAGING, STAGED = range(3)
"""States of a slot: nobody's; being written; whole."""

SLOTS_MAX = 3
"""One state is being written, one waits, and one is what they may be coded against."""

DATA_OFFSET = 2 * MIB
"""Where a slot's bytes begin, after its marks: room for 8 TiB."""

_HEADER_NBYTES = 2 * MIB
_SLOT_STRIDE = 1 << 44
_MAGIC = int.from_bytes(b"ckarena1", "little")
_MAGIC_FIELD, _COUNT_FIELD, _FIRST_FIELD = 0, 1, 8
_TICKET, _STATE, _CAPACITY, _FIELDS = 0, 1, 2, 8
_FACTS_NBYTES = 4096

_UNITS_AT_ONCE = 4
"""For which huge pages are asked in one go."""

_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2


class Slot:
    """Room for one staged state; made by its arena."""

    def __init__(self, arena: Arena, index: int) -> None:
        self.index = index
        self._arena = arena
        self._base = _HEADER_NBYTES + index * _SLOT_STRIDE
        first = _FIRST_FIELD + index * _FIELDS
        self._facts = arena.facts[first : first + _FIELDS]
        self._mapping: Mapping | None = None
        self._populated: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._taken: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.unpin_pages: Callable[[], bool] | None = None
        """Makes devices forget the pages that they were told of; returns whether they have."""
        self.nbytes_pinned = 0
        """How many of its first bytes devices were told of; their pages stay in memory."""
        self.nbytes_begun = 0
        """How many of its first bytes the commit takes that it was last given to here, in whole units."""
        self.marks: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes that it has room for, as far as this process has mapped them."""
        mapped = 0 if self._mapping is None else self._mapping.nbytes - DATA_OFFSET
        # What was mapped, and lacked memory for its marks, is no room.
        return min(mapped, int(self._facts[_CAPACITY]))

    @property
    def nbytes_taken(self) -> int:
        """Memory that this process has taken for it; room on its own takes none."""
        return int(np.count_nonzero(self._taken)) * UNIT_NBYTES

    def nbytes_wanting(self, nbytes: int) -> int:
        """Return the memory that it lacks for its first so many bytes."""
        units = units_of(nbytes)
        return (units - int(np.count_nonzero(self._taken[:units]))) * UNIT_NBYTES

    @property
    def ticket(self) -> int:
        """Which commit it was last given to."""
        return int(self._facts[_TICKET])

    @property
    def state(self) -> int:
        """Free, staging or staged."""
        return int(self._facts[_STATE])

    @state.setter
    def state(self, state: int) -> None:
        self._facts[_STATE] = state

    @property
    def memory(self) -> object:
        """What lives as long as its bytes lie at ``address``."""
        return self._mapping

    @property
    def address(self) -> int:
        """Where its bytes lie in this process."""
        return self._mapped.address + DATA_OFFSET

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes, writable, without a copy."""
        if nbytes == 0:
            return memoryview(bytearray())
        return self._mapped.view(DATA_OFFSET + offset, nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make room; what lay in the slot is still there. The other process sees it by ``refresh``.

        Raises:
            CapacityError: There is no such room in this process's addresses.
        """
        if nbytes <= self.nbytes and self._mapping is not None:
            return
        capacity = -(-max(nbytes, 1) // UNIT_NBYTES) * UNIT_NBYTES
        end = self._base + DATA_OFFSET + capacity
        if DATA_OFFSET + capacity > _SLOT_STRIDE or capacity // UNIT_NBYTES > DATA_OFFSET:
            raise _no_memory(capacity, errno.ENOMEM)
        try:
            # Never smaller: whoever reads beyond the end would be killed.
            if os.fstat(self._arena.fd).st_size < end:
                os.ftruncate(self._arena.fd, end)
        except OSError as error:
            raise _no_memory(capacity, error.errno or errno.ENOMEM) from None
        self._map(capacity)
        self._take_memory(0, self.marks.size)
        self._facts[_CAPACITY] = capacity

    def refresh(self) -> None:
        """Map what the other process has reserved meanwhile.

        Raises:
            MalformedError: The slot claims more than there is.
        """
        capacity = int(self._facts[_CAPACITY])
        if capacity == self.nbytes:
            return
        if capacity % UNIT_NBYTES or self._base + DATA_OFFSET + capacity > os.fstat(self._arena.fd).st_size:
            raise MalformedError("a slot of the arena claims more than there is", where=f"slot {self.index}")
        self._map(capacity)

    def is_populated(self, offset: int, nbytes: int) -> bool:
        """Whether some of its bytes can be written without taking memory."""
        return bool(self._populated[offset // UNIT_NBYTES : units_of(offset + nbytes)].all())

    def populate(self, offset: int, nbytes: int) -> None:
        """Take memory for some of its bytes; what has been populated costs nothing.

        Raises:
            CapacityError: There is no memory left.
        """
        first, last = offset // UNIT_NBYTES, units_of(offset + nbytes)
        for begin in range(first, last, _UNITS_AT_ONCE):
            end = min(begin + _UNITS_AT_ONCE, last)
            while begin < end and self._taken[begin]:
                self._populate_unit(begin)
                begin += 1
            # A device has been told of its pages, which cannot become others any more.
            if not self._taken[begin:end].any() and self.unpin_pages is None:
                place, count = DATA_OFFSET + begin * UNIT_NBYTES, end - begin
                self._mapped.take_huge_pages(place, count * UNIT_NBYTES)
            for unit in range(begin, end):
                self._populate_unit(unit)

    def map_ahead(self) -> Iterator[bool]:
        """Map what lies in memory, so that whoever reads it first need not; yield for each unit whether that was done.

        It takes no memory, but for a unit that the other process gives back in that very moment. Stops at once on
        kernels before 5.14, where a page is mapped when it is first read.
        """
        mapping = self._mapping
        for unit in range(0 if mapping is None else self._populated.size):
            assert mapping is not None
            address = mapping.address + DATA_OFFSET + unit * UNIT_NBYTES
            is_there = ctypes.create_string_buffer(UNIT_NBYTES // mmap.PAGESIZE)
            # The other process may have taken memory for some units only, and pages that are not there would be made.
            is_whole = libc.mincore(address, UNIT_NBYTES, is_there) == 0 and b"\0" not in is_there.raw
            if is_whole and libc.madvise(address, UNIT_NBYTES, MADV_POPULATE_READ) != 0:
                return
            yield is_whole

    def give_back(self) -> int:
        """Give the memory of a slot that nobody uses back to the system; return how many bytes."""
        nbytes = self.nbytes_taken
        # A device would go on to write to pages that are gone.
        if not nbytes or not self.unpin():
            return 0
        # Before they are gone: what is populated in vain costs time, what is not there when it is written, the trainer.
        self._populated[:] = False
        place = (self._base + DATA_OFFSET, self._taken.size * UNIT_NBYTES)
        if libc.fallocate(self._arena.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, *place) != 0:
            return 0
        self._taken[:] = False
        return nbytes

    def leave(self) -> None:
        """Let go of the memory, when no thread of this process uses it any more; what is known of it stays so."""
        self._mapping, self.marks, self._facts = None, np.zeros(0, np.uint8), self._facts.copy()

    def note_pinned(self, nbytes: int, release: Callable[[], bool]) -> None:
        """Take note that devices were told of its first so many bytes, whose pages are in memory from then on."""
        self.unpin_pages, self.nbytes_pinned = release, nbytes
        self._taken[: units_of(nbytes)] = True

    def unpin(self) -> bool:
        """Have devices forget its pages; return whether they have."""
        if self.unpin_pages is not None and not self.unpin_pages():
            return False
        self.unpin_pages, self.nbytes_pinned = None, 0
        return True

    def start(self, ticket: int, nbytes: int) -> None:
        """Give the slot to a commit that will stage so many bytes: from here on nothing in it is staged."""
        assert nbytes <= self.nbytes
        self.marks[: units_of(nbytes)] = 0
        self._facts[_TICKET] = ticket
        self.nbytes_begun = units_of(nbytes) * UNIT_NBYTES
        self.state = STAGING

    def mark(self, offset: int, nbytes: int) -> None:
        """Say that all units of a range were staged."""
        self.marks[offset // UNIT_NBYTES : units_of(offset + nbytes)] = 1

    def is_staged(self, begin: int, end: int) -> bool:
        """Whether all bytes of a range were staged.

        On processors that reorder loads (not x86) nothing here orders this and what is read next; never run on one.
        """
        return bool(self.marks[begin // UNIT_NBYTES : units_of(end)].all())

    @property
    def _mapped(self) -> Mapping:
        assert self._mapping is not None, "a slot without room has no bytes"
        return self._mapping

    def _map(self, capacity: int) -> None:
        try:
            self._mapping = Mapping(self._arena.fd, self._base, DATA_OFFSET + capacity)
        except OSError as error:
            raise _no_memory(capacity, error.errno or errno.ENOMEM) from None
        units = capacity // UNIT_NBYTES
        # Shared memory stays when it is mapped again; its page tables are filled by populating once more.
        self._populated = np.zeros(units, np.bool_)
        self._taken = np.concatenate((self._taken, np.zeros(max(0, units - self._taken.size), np.bool_)))
        self.unpin_pages, self.nbytes_pinned = None, 0
        self.marks = np.frombuffer(self._mapping.view(0, units), np.uint8)

    def _populate_unit(self, unit: int) -> None:
        if not self._populated[unit]:
            self._take_memory(DATA_OFFSET + unit * UNIT_NBYTES, UNIT_NBYTES)
            self._populated[unit] = self._taken[unit] = True

    def _take_memory(self, begin: int, nbytes: int) -> None:
        if libc.madvise(self._mapped.address + begin, nbytes, MADV_POPULATE_WRITE) != 0:
            problem = ctypes.get_errno()
            if problem != errno.EINVAL:
                raise self._no_memory(nbytes, problem)
            try:
                # Kernels before 5.14 cannot populate; allocating the pages is what keeps SIGBUS away.
                os.posix_fallocate(self._arena.fd, self._base + begin, nbytes)
            except OSError as error:
                raise self._no_memory(nbytes, error.errno or errno.ENOMEM) from None

    def _no_memory(self, nbytes: int, problem: int) -> CapacityError:
        # It is taken in small pieces, and nobody wants to know which of them was missing.
        return _no_memory(max(nbytes, self.nbytes), problem, nbytes_there=self.nbytes_taken)


class Arena:
    """The shared memory of one trainer and its saver."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = os.getpid()
        try:
            mapping = Mapping(fd, 0, _FACTS_NBYTES)
        except OSError as error:
            raise _no_memory(_FACTS_NBYTES, error.errno or errno.ENOMEM) from None
        self.facts: NDArray[np.uint64] = np.frombuffer(mapping.view(0, _FACTS_NBYTES), np.uint64)
        self.slots: tuple[Slot, ...] = ()
        _arenas.add(self)
        close_in_children(self)

    @classmethod
    def create(cls, nbytes: int = 0, *, slot_count: int = 1) -> Arena:
        """Make an arena with room for so many bytes in its first slot.

        Raises:
            CapacityError: The system gives no more memory or descriptors.
        """
        assert 1 <= slot_count <= SLOTS_MAX
        try:
            fd = os.memfd_create("ckstore-arena", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(nbytes, error.errno or errno.ENOMEM) from None
        try:
            os.ftruncate(fd, _HEADER_NBYTES)
            os.posix_fallocate(fd, 0, _FACTS_NBYTES)
            arena = cls(fd)
            arena.facts[_MAGIC_FIELD], arena.facts[_COUNT_FIELD] = _MAGIC, slot_count
            arena.slots = tuple(Slot(arena, index) for index in range(slot_count))
            if nbytes:
                arena.slots[0].reserve(nbytes)
        except BaseException as error:
            # Others get this number: no forked child may close it as one of ours.
            for broken in [each for each in _arenas if each.fd == fd]:
                broken.fd = -1
            os.close(fd)
            if isinstance(error, OSError):
                raise _no_memory(nbytes, error.errno or errno.ENOMEM) from None
            raise
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process has made; the descriptor is this arena's from now on.

        Raises:
            MalformedError: The descriptor is no arena's.
        """
        if os.fstat(fd).st_size < _HEADER_NBYTES:
            raise MalformedError("a descriptor is no arena's", where=f"descriptor {fd}")
        arena = cls(fd)
        count = int(arena.facts[_COUNT_FIELD])
        if int(arena.facts[_MAGIC_FIELD]) != _MAGIC or not 1 <= count <= SLOTS_MAX:
            raise MalformedError("a descriptor is no arena's", where=f"descriptor {fd}")
        arena.slots = tuple(Slot(arena, index) for index in range(count))
        return arena

    @property
    def nbytes_taken(self) -> int:
        """Memory that this process has taken for all slots."""
        return sum(slot.nbytes_taken for slot in self.slots)

    def close(self, *, is_idle: bool = False) -> None:
        """Let go of the descriptor; memory is freed when the last view of it is.

        Args:
            is_idle: No thread of this process uses a slot any more: they are let go of as well, whoever has them.
        """
        _arenas.discard(self)
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid():
            os.close(fd)
        slots, self.slots = self.slots, ()
        if is_idle:
            # A page of a memfd that stays mapped keeps all of it, and whoever has the arena may be garbage for long.
            self.facts = self.facts.copy()
            for slot in slots:
                slot.leave()

    def close_in_child(self) -> None:
        """In a forked child: let go of the descriptor, and of mappings that are not there."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def units_of(nbytes: int) -> int:
    """Return how many units so many bytes touch."""
    return -(-nbytes // UNIT_NBYTES)


def _no_memory(nbytes: int, problem: int, *, nbytes_there: int = 0) -> CapacityError:
    there = f", of which {nbytes_there} were to be had" if nbytes_there else ""
    return CapacityError(
        f"no shared memory for {nbytes} bytes of a staged state{there} ({os.strerror(problem)})",
        todo="commit less at once, or use commit, which needs no second copy",
        errno=problem,
    )


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
