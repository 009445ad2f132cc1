"""The arena: shared memory in which the trainer stages states and the saver reads them. A memfd with up to three slots.

Layout: a header (magic, number of slots, and for each slot ticket, state and capacity, each a native u64), then the
slots. A slot is one mark (a byte) for each of its units, and its bytes from ``DATA_OFFSET`` on.

Invariants:
- The arena is anonymous memory (memfd) without a file name. It is freed when the last process that holds it ends.
- Its length never shrinks, and every page is populated before it is first written. So a lack of memory raises an error,
  and never SIGBUS. The memory of an unused slot can be returned to the system; its address range remains.
- Each slot has its own range of a sparse file, so one slot can grow while another is read.
- A unit of 4 MiB is marked after its bytes were written, never before.
- Forked children inherit neither the mapping nor the descriptor, so a data loader that outlives the trainer holds no
  memory.
- Huge pages only affect speed. If they are missing, switched off or too slow, small pages are used.

Populating one huge page of 2 MiB is faster than 512 small ones, each of which is a page fault. ``MADV_COLLAPSE``
(madvise(2), Linux 6.1) makes huge pages of a range immediately. The usual switch for shared memory (``shmem_enabled``)
is off on most systems.
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
"""Slightly less than the time to populate 2 MiB in small pages."""

_PATIENCE_SECONDS = 0.05
"""How much longer than small pages huge pages may take, in total for one mapping. With fragmented memory, the kernel
first moves other pages."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

UNIT_NBYTES = 4 * MIB
"""Bytes that one mark stands for."""

FREE, STAGING, STAGED = range(3)
"""States of a slot: unused; being written; all bytes written."""

SLOTS_MAX = 3
"""One state is being written, one waits, and one is retained as a delta base."""

DATA_OFFSET = 2 * MIB
"""Where the bytes of a slot begin. The marks before them suffice for 8 TiB."""

_HEADER_NBYTES = 2 * MIB

_SLOT_STRIDE = 1 << 44

_MAGIC = int.from_bytes(b"ckarena1", "little")

_MAGIC_FIELD, _COUNT_FIELD, _FIRST_FIELD = 0, 1, 8

_TICKET, _STATE, _CAPACITY, _FIELDS = 0, 1, 2, 8

_FACTS_NBYTES = 4096

_UNITS_PER_CALL = 4
"""Units for which huge pages are requested in one call."""

_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2


class Mapping:
    """A range of the memfd, mapped into this process. Unmapped when no view of it is left.

    The module ``mmap`` is not used, because it keeps a descriptor that forked children would inherit.

    Args:
        fd: The memfd.
        offset: Begin of the range, a multiple of 2 MiB.
        nbytes: Length of the range.

    Raises:
        OSError: This process has no address space left.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        # Reserve a little more, so that the mapping can begin at a multiple of 2 MiB, as huge pages require.
        room_nbytes = nbytes + HUGE_PAGE_NBYTES
        room = _mmap(None, room_nbytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        # Registered now, so that an interruption below leaves nothing mapped. Not at exit, because a thread may copy
        # until the end; the kernel then unmaps the rest.
        weakref.finalize(self, _unmap, os.getpid(), room, room_nbytes).atexit = False
        self.address = room + -room % HUGE_PAGE_NBYTES
        self.nbytes = nbytes
        _mmap(self.address, nbytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd, offset)
        libc.madvise(room, room_nbytes, _MADV_DONTFORK)
        # For systems where huge pages must be requested.
        libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)
        self._spent_seconds = 0.0
        self._is_given_up = not are_huge_pages_wanted()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes as a writable view."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return writable_view_of(self.address + offset, nbytes, self)

    def take_huge_pages(self, offset: int, nbytes: int) -> None:
        """Populate bytes in huge pages. Some or all of them may be unpopulated afterwards.

        Args:
            offset: First byte, a multiple of 2 MiB.
            nbytes: How many, a multiple of 2 MiB. Each call drains page lists of every processor, so it should cover
                several huge pages.
        """
        if self._is_given_up:
            return
        begun = SYSTEM_CLOCK.monotonic()
        # MADV_COLLAPSE refuses a range without any page.
        firsts = range(self.address + offset, self.address + offset + nbytes, HUGE_PAGE_NBYTES)
        is_there = all(libc.madvise(first, mmap.PAGESIZE, MADV_POPULATE_WRITE) == 0 for first in firsts)
        is_done = is_there and libc.madvise(self.address + offset, nbytes, _MADV_COLLAPSE) == 0
        if not is_done and ctypes.get_errno() != errno.EAGAIN:
            # Huge pages are exhausted, limited or unsupported. Errors that matter will occur again for small pages.
            # Only EAGAIN is temporary.
            self._is_given_up = True
            return
        earned_seconds = _SMALL_PAGES_SECONDS * nbytes / HUGE_PAGE_NBYTES if is_done else 0
        # Time that was saved is not accumulated. Concurrent calls may lose an update, which is harmless.
        self._spent_seconds = max(0.0, self._spent_seconds + SYSTEM_CLOCK.monotonic() - begun - earned_seconds)
        if self._spent_seconds > _PATIENCE_SECONDS:
            self._is_given_up = True


def are_huge_pages_wanted() -> bool:
    """Return whether this system has huge pages of 2 MiB that are not switched off."""
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
    # A forked child has no such mapping, and may have mapped something else there.
    if pid == os.getpid():
        libc.munmap(address, nbytes)


class Slot:
    """Room for one staged state. Created by its arena."""

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
        """Unregisters the pinned pages at the devices. Returns whether that succeeded."""
        self.nbytes_pinned = 0
        """How many of its first bytes are pinned, and therefore in memory."""
        self.nbytes_begun = 0
        """Length of the current commit in whole units, as set by ``start`` in this process."""
        self.marks: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Capacity in bytes, as far as this process has mapped it."""
        mapped = 0 if self._mapping is None else self._mapping.nbytes - DATA_OFFSET
        # A mapping without memory for its marks does not count.
        return min(mapped, int(self._facts[_CAPACITY]))

    @property
    def nbytes_taken(self) -> int:
        """Memory that this process has populated. Address space alone takes none."""
        return int(np.count_nonzero(self._taken)) * UNIT_NBYTES

    def nbytes_wanting(self, nbytes: int) -> int:
        """Return how much memory is missing for its first ``nbytes`` bytes."""
        units = units_of(nbytes)
        return (units - int(np.count_nonzero(self._taken[:units]))) * UNIT_NBYTES

    @property
    def ticket(self) -> int:
        """The commit that last used the slot."""
        return int(self._facts[_TICKET])

    @property
    def state(self) -> int:
        """``FREE``, ``STAGING`` or ``STAGED``."""
        return int(self._facts[_STATE])

    @state.setter
    def state(self, state: int) -> None:
        self._facts[_STATE] = state

    @property
    def memory(self) -> object:
        """An object that lives as long as the slot is mapped at ``address``."""
        return self._mapping

    @property
    def address(self) -> int:
        """Address of its bytes in this process."""
        return self._mapped.address + DATA_OFFSET

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of its bytes as a writable view."""
        if nbytes == 0:
            return memoryview(bytearray())
        return self._mapped.view(DATA_OFFSET + offset, nbytes)

    def reserve(self, nbytes: int) -> None:
        """Increase the capacity. The contents remain. The other process sees the change after ``refresh``.

        Raises:
            CapacityError: This process has no address space left, or there is no memory for the marks.
        """
        if nbytes <= self.nbytes and self._mapping is not None:
            return
        capacity = -(-max(nbytes, 1) // UNIT_NBYTES) * UNIT_NBYTES
        end = self._base + DATA_OFFSET + capacity
        if DATA_OFFSET + capacity > _SLOT_STRIDE or capacity // UNIT_NBYTES > DATA_OFFSET:
            raise _no_memory(capacity, errno.ENOMEM)
        try:
            # Never shrink: a process that reads beyond the end gets SIGBUS.
            if os.fstat(self._arena.fd).st_size < end:
                os.ftruncate(self._arena.fd, end)
        except OSError as error:
            raise _no_memory(capacity, error.errno or errno.ENOMEM) from None
        self._map(capacity)
        self._take_memory(0, self.marks.size)
        self._facts[_CAPACITY] = capacity

    def refresh(self) -> None:
        """Map what the other process has reserved since.

        Raises:
            MalformedError: The capacity exceeds the arena.
        """
        capacity = int(self._facts[_CAPACITY])
        if capacity == self.nbytes:
            return
        if capacity % UNIT_NBYTES or self._base + DATA_OFFSET + capacity > os.fstat(self._arena.fd).st_size:
            raise MalformedError("the capacity of a slot exceeds the arena", where=f"slot {self.index}")
        self._map(capacity)

    def is_populated(self, offset: int, nbytes: int) -> bool:
        """Whether some of its bytes can be written without taking memory."""
        return bool(self._populated[offset // UNIT_NBYTES : units_of(offset + nbytes)].all())

    def populate(self, offset: int, nbytes: int) -> None:
        """Take memory for some of its bytes. Free of cost if that was done before.

        Raises:
            CapacityError: There is no memory left.
        """
        first, last = offset // UNIT_NBYTES, units_of(offset + nbytes)
        for begin in range(first, last, _UNITS_PER_CALL):
            end = min(begin + _UNITS_PER_CALL, last)
            while begin < end and self._taken[begin]:
                self._populate_unit(begin)
                begin += 1
            # Pinned pages cannot be replaced by huge ones.
            if not self._taken[begin:end].any() and self.unpin_pages is None:
                place, count = DATA_OFFSET + begin * UNIT_NBYTES, end - begin
                self._mapped.take_huge_pages(place, count * UNIT_NBYTES)
            for unit in range(begin, end):
                self._populate_unit(unit)

    def map_ahead(self) -> Iterator[bool]:
        """Map the pages that are in memory, so that a later reader has no page faults. Yield for each unit if it was.

        Takes no memory, unless the other process frees a unit at this moment. Stops on kernels before 5.14, which map a
        page when it is first read.
        """
        mapping = self._mapping
        for unit in range(0 if mapping is None else self._populated.size):
            assert mapping is not None
            address = mapping.address + DATA_OFFSET + unit * UNIT_NBYTES
            is_there = ctypes.create_string_buffer(UNIT_NBYTES // mmap.PAGESIZE)
            # Only units that are fully in memory: MADV_POPULATE_READ would create missing pages.
            is_whole = libc.mincore(address, UNIT_NBYTES, is_there) == 0 and b"\0" not in is_there.raw
            if is_whole and libc.madvise(address, UNIT_NBYTES, MADV_POPULATE_READ) != 0:
                return
            yield is_whole

    def give_back(self) -> int:
        """Return the memory of an unused slot to the system. Return how many bytes that were."""
        nbytes = self.nbytes_taken
        # A device could otherwise write to freed pages.
        if not nbytes or not self.unpin():
            return 0
        # Recorded first: populating once too often costs time, but writing to an unpopulated page may be SIGBUS.
        self._populated[:] = False
        place = (self._base + DATA_OFFSET, self._taken.size * UNIT_NBYTES)
        if libc.fallocate(self._arena.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, *place) != 0:
            return 0
        self._taken[:] = False
        return nbytes

    def leave(self) -> None:
        """Unmap the slot, when no thread of this process uses it. Its recorded facts stay readable."""
        self._mapping, self.marks, self._facts = None, np.zeros(0, np.uint8), self._facts.copy()

    def note_pinned(self, nbytes: int, release: Callable[[], bool]) -> None:
        """Record that its first ``nbytes`` bytes are pinned, and therefore in memory."""
        self.unpin_pages, self.nbytes_pinned = release, nbytes
        self._taken[: units_of(nbytes)] = True

    def unpin(self) -> bool:
        """Unregister pinned pages at the devices. Return whether that succeeded."""
        if self.unpin_pages is not None and not self.unpin_pages():
            return False
        self.unpin_pages, self.nbytes_pinned = None, 0
        return True

    def start(self, ticket: int, nbytes: int) -> None:
        """Assign the slot to a commit of ``nbytes`` bytes, and clear its marks."""
        assert nbytes <= self.nbytes
        self.marks[: units_of(nbytes)] = 0
        self._facts[_TICKET] = ticket
        self.nbytes_begun = units_of(nbytes) * UNIT_NBYTES
        self.state = STAGING

    def mark(self, offset: int, nbytes: int) -> None:
        """Mark all units of a range as staged."""
        self.marks[offset // UNIT_NBYTES : units_of(offset + nbytes)] = 1

    def is_staged(self, begin: int, end: int) -> bool:
        """Whether all bytes of a range are staged.

        Relies on loads being executed in order, as on x86. Not tested on processors that reorder loads.
        """
        return bool(self.marks[begin // UNIT_NBYTES : units_of(end)].all())

    @property
    def _mapped(self) -> Mapping:
        assert self._mapping is not None, "a slot without capacity has no bytes"
        return self._mapping

    def _map(self, capacity: int) -> None:
        try:
            self._mapping = Mapping(self._arena.fd, self._base, DATA_OFFSET + capacity)
        except OSError as error:
            raise _no_memory(capacity, error.errno or errno.ENOMEM) from None
        units = capacity // UNIT_NBYTES
        # A new mapping shows the same memory, but its page tables are empty until it is populated again.
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
                # Kernels before 5.14 lack MADV_POPULATE_WRITE. Allocating the pages also prevents SIGBUS.
                os.posix_fallocate(self._arena.fd, self._base + begin, nbytes)
            except OSError as error:
                raise self._no_memory(nbytes, error.errno or errno.ENOMEM) from None

    def _no_memory(self, nbytes: int, problem: int) -> CapacityError:
        # Memory is taken in small pieces. The error names the whole size.
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
        """Create an arena whose first slot has room for ``nbytes`` bytes.

        Raises:
            CapacityError: The system is out of memory or descriptors.
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
            # The number will be reused, so a forked child must not close it as an arena's.
            for broken in [each for each in _arenas if each.fd == fd]:
                broken.fd = -1
            os.close(fd)
            if isinstance(error, OSError):
                raise _no_memory(nbytes, error.errno or errno.ENOMEM) from None
            raise
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process has created. The arena owns the descriptor from now on.

        Raises:
            MalformedError: The descriptor does not belong to an arena.
        """
        if os.fstat(fd).st_size < _HEADER_NBYTES:
            raise MalformedError("this descriptor is not an arena", where=f"descriptor {fd}")
        arena = cls(fd)
        count = int(arena.facts[_COUNT_FIELD])
        if int(arena.facts[_MAGIC_FIELD]) != _MAGIC or not 1 <= count <= SLOTS_MAX:
            raise MalformedError("this descriptor is not an arena", where=f"descriptor {fd}")
        arena.slots = tuple(Slot(arena, index) for index in range(count))
        return arena

    @property
    def nbytes_taken(self) -> int:
        """Memory that this process has populated in all slots."""
        return sum(slot.nbytes_taken for slot in self.slots)

    def close(self, *, is_idle: bool = False) -> None:
        """Close the descriptor. Memory is freed when its last view is gone.

        Args:
            is_idle: No thread of this process uses a slot, so all slots are unmapped now.
        """
        _arenas.discard(self)
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid():
            os.close(fd)
        slots, self.slots = self.slots, ()
        if is_idle:
            # One mapped page keeps the whole memfd alive, and garbage collection may come late.
            self.facts = self.facts.copy()
            for slot in slots:
                slot.leave()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child, where the memory is not mapped."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def units_of(nbytes: int) -> int:
    """Return how many units this many bytes touch."""
    return -(-nbytes // UNIT_NBYTES)


def _no_memory(nbytes: int, problem: int, *, nbytes_there: int = 0) -> CapacityError:
    available = f", of which {nbytes_there} were available" if nbytes_there else ""
    return CapacityError(
        f"no shared memory for {nbytes} bytes of a staged state{available} ({os.strerror(problem)})",
        todo="commit less in one call, or use commit, which needs no second copy",
        errno=problem,
    )


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
