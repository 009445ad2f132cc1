"""Memory that the ranks of one host share while they restore: who needs which chunk, and slots with decoded chunks.

It is a memfd of one of the ranks, which the others open through /proc. It has no file name, so nothing remains after
any process was killed.

Layout: a row for each rank (its state, pid and start time, and the bits of the chunks that it needs); then a record
for each slot; then the slots. A rank writes only to its own row, records and slots, and to its column of ``taken``. So
there is no lock between processes.

Invariants:
- A reader is at most about RING_NBYTES ahead of the slowest one.
- A reader uses a slot again only after every rank that needs its chunk has taken it, or has left.
- A rank trusts no slot: it copies the bytes first, and uses them only if they have the checksum of the record, which
  depends on the chunk, too. So a slot that is used again too early cannot make wrong bytes.
- Pages are populated before they are used, so a lack of memory is an error, and never SIGBUS.
- A rank that waits for another notices within a second if that one has ended, if it has been stopped by a signal for
  as long as a rank may be silent, or if the job has lost a rank.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ckstore.clock import SYSTEM_CLOCK
from ckstore.codec import kernels
from ckstore.concurrency import Latch, start_thread, wait_in_any_case
from ckstore.config import MIB
from ckstore.format.wire import align_up, xxh3_64
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.processes import StopTimer, is_running, process_started
from ckstore.ranks.io_loop import Timing

if TYPE_CHECKING:
    from numpy.typing import NDArray

RING_NBYTES = 256 * MIB
"""Bytes of the slots of all ranks of a host."""

SLOTS_MIN, SLOTS_MAX = 2, 16
"""Slots of a rank."""

_STATE, _PID, _STARTED, _PROGRESS = range(4)
"""Fields of a row."""

_ALL_READ = 1 << 30
"""Progress of a rank that has read all that it reads for others."""

_READING, _TAKING, _LEFT = range(3)
"""States: reads for others; only takes; neither."""

_ROW_NBYTES = 64

_ODD = 0x9E3779B97F4A7C15

_TURN, _CHUNK, _NBYTES, _CHECKSUM, _FIELDS = range(5)
"""Fields of a record, before a column for each rank: the last turn that it has taken."""

_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 0.0005, 0.008
"""How long to wait before the slots are searched again: twice as long after each search without a result."""

_CHECK_SECONDS = 0.5

_STOPPED_SECONDS_MAX = Timing().silent_seconds
"""Rank 0 gives up a rank that was stopped for so long, but the others do not know that before the restore has ended."""


class HostMemory:
    """The shared memory of the ranks of one host.

    Args:
        fd: The memfd. It stays the caller's.
        members: Number of ranks on the host.
        own: Which of them this one is.
        chunk_count: Chunks of the checkpoint.
        is_broken: Whether the job has lost a rank.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(
        self, fd: int, members: int, own: int, chunk_count: int, is_broken: Callable[[], bool] = lambda: False
    ) -> None:
        self._fd = os.dup(fd)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self.members, self.own, self._chunk_count = members, own, chunk_count
        self._is_broken = is_broken
        self._row_nbytes = _ROW_NBYTES + align_up(-(-chunk_count // 8), _ROW_NBYTES)
        self._rows_nbytes = align_up(members * self._row_nbytes, mmap.ALLOCATIONGRANULARITY)
        self.slot_count = self.slot_nbytes = self._slots_begin = 0
        self.needs = np.zeros((members, chunk_count), np.bool_)
        self._gone = np.zeros(members, np.bool_)
        self._checked = 0.0
        self._stop_timers: dict[int, StopTimer] = {}
        self._rows = self._mapped(0, self._rows_nbytes, populated=self._rows_nbytes)
        self._fields = self._rows[: members * self._row_nbytes].view(np.int64).reshape(members, -1)
        self._states, self._progress = self._fields[:, _STATE], self._fields[:, _PROGRESS]
        self._fields[own, _PID] = os.getpid()
        self._fields[own, _STARTED] = int(process_started(os.getpid()) or 0)

    def write_needs(self, chunks: NDArray[np.int64]) -> None:
        """Tell the others which chunks this rank needs."""
        bits = np.zeros(self._chunk_count, np.bool_)
        bits[chunks] = True
        packed = np.packbits(bits)
        begin = self.own * self._row_nbytes + _ROW_NBYTES
        self._rows[begin : begin + len(packed)] = packed

    def read_needs(self) -> NDArray[np.bool_]:
        """Return which rank needs which chunk, (members, chunks). Call it after all ranks have written theirs."""
        rows = self._rows[: self.members * self._row_nbytes].reshape(self.members, -1)[:, _ROW_NBYTES:]
        self.needs = np.unpackbits(rows, axis=1, count=self._chunk_count).astype(np.bool_)
        return self.needs

    def open_slots(self, slot_nbytes: int) -> None:
        """Map the slots.

        Args:
            slot_nbytes: Bytes of the longest shared chunk. The same on all ranks.

        Raises:
            OSError: There is not enough memory.
        """
        self.slot_nbytes = align_up(slot_nbytes, PAGE_NBYTES)
        share = RING_NBYTES // self.members // self.slot_nbytes
        self.slot_count = max(SLOTS_MIN, min(SLOTS_MAX, share))
        width = _FIELDS + self.members
        count = self.members * self.slot_count
        records_nbytes = align_up(count * width * 8, mmap.ALLOCATIONGRANULARITY)
        self._slots_begin = self._rows_nbytes + records_nbytes
        nbytes = records_nbytes + count * self.slot_nbytes
        self._slots = self._mapped(self._rows_nbytes, nbytes, populated=records_nbytes)
        records = self._slots[: count * width * 8].view(np.uint64)
        self.records: NDArray[np.uint64] = records.reshape(self.members, self.slot_count, width)

    def populate(self, slot: int) -> None:
        """Allocate the memory of one of this rank's slots.

        Raises:
            OSError: There is not enough memory.
        """
        begin = self._slots_begin + (self.own * self.slot_count + slot) * self.slot_nbytes
        os.posix_fallocate(self._fd, begin, self.slot_nbytes)

    def slot(self, member: int, slot: int, nbytes: int) -> memoryview:
        """Return the first bytes of a slot."""
        begin = self._slots_begin - self._rows_nbytes + (member * self.slot_count + slot) * self.slot_nbytes
        view: memoryview = self._slots[begin : begin + nbytes].data
        return view

    def set_progress(self, part: float) -> None:
        """Tell the others which part of its chunks this rank has read for them, from 0 to 1."""
        self._progress[self.own] = int(part * _ALL_READ)

    def least_progress(self) -> float:
        """Return the progress of the slowest rank that still reads for others."""
        is_reading = ~self.has_stopped_reading()
        return float(self._progress[is_reading].min(initial=_ALL_READ)) / _ALL_READ

    def stop_reading(self) -> None:
        """Tell the others that this rank has read its last chunk for them."""
        self._states[self.own] = max(_TAKING, int(self._states[self.own]))

    def leave(self) -> None:
        """Tell the others that this rank neither reads for them nor takes from them."""
        self._states[self.own] = _LEFT

    def has_left(self) -> NDArray[np.bool_]:
        """Return which ranks take nothing any longer: they have left or ended, or the job is broken. (members,)."""
        return self._ended() | (self._states >= _LEFT)

    def has_stopped_reading(self) -> NDArray[np.bool_]:
        """Return which ranks have read their last chunk for others. (members,)."""
        return self._ended() | (self._states >= _TAKING)

    def close(self) -> None:
        """Leave. The memory is unmapped when the last view of it is gone."""
        self.leave()
        self._close_fd()

    def _ended(self) -> NDArray[np.bool_]:
        now = SYSTEM_CLOCK.monotonic()
        if now - self._checked >= _CHECK_SECONDS:
            self._checked = now
            if self._is_broken():
                self._gone[:] = True
            for member, fields in enumerate(self._fields.tolist()):
                started = str(fields[_STARTED] or "")
                self._gone[member] |= is_running(fields[_PID], started) is False or self._is_stopped(fields[_PID], now)
        return self._gone

    def _is_stopped(self, pid: int, now: float) -> bool:
        timer = self._stop_timers.setdefault(pid, StopTimer(pid))
        return timer.seconds(now) >= _STOPPED_SECONDS_MAX

    def _mapped(self, begin: int, nbytes: int, *, populated: int) -> NDArray[np.uint8]:
        """Map a range of the file, and populate its first bytes. Every rank calls it with the same range."""
        if os.fstat(self._fd).st_size < begin + nbytes:
            os.ftruncate(self._fd, begin + nbytes)
        os.posix_fallocate(self._fd, begin, populated)
        mapping = mmap.mmap(self._fd, nbytes, offset=begin)
        # A forked data loader would keep the memory.
        mapping.madvise(mmap.MADV_DONTFORK)
        return np.frombuffer(mapping, np.uint8)


def _checksum(chunk: int, plain: memoryview) -> int:
    """Return a checksum of a chunk's bytes that is another one for every other chunk."""
    return (xxh3_64(plain) + chunk * _ODD) % 2**64


class _Pauses:
    """Waits between searches."""

    def __init__(self) -> None:
        self._seconds = _POLL_SECONDS_MIN

    def reset(self) -> None:
        """Wait for a short time next, because something has happened."""
        self._seconds = _POLL_SECONDS_MIN

    def wait(self) -> None:
        """Wait, twice as long as before."""
        SYSTEM_CLOCK.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _POLL_SECONDS_MAX)


class SlotWriter:
    """Passes the chunks that this rank has read to the others. Thread-safe.

    Args:
        memory: The shared memory, with slots.
        readers: Which rank reads each chunk.
    """

    def __init__(self, memory: HostMemory, readers: NDArray[np.int16]) -> None:
        self._memory = memory
        self._needs = memory.needs.copy()
        self._needs[memory.own] = False
        self._is_own = readers == memory.own
        self._written, self._total = 0, int(self._is_own.sum())
        # If one rank were far ahead, the others would hold very many tensors that wait for a chunk of a slower one.
        shared = int((readers >= 0).sum())
        self._lead_max = RING_NBYTES / (memory.slot_nbytes * max(1, shared))
        memory.set_progress(0 if self._total else 1)
        self._lock = threading.Lock()
        self._takers: list[NDArray[np.int64] | None] = [None] * memory.slot_count
        """Who takes the chunk in each slot; None: the slot was never used."""
        self._is_busy = [False] * memory.slot_count
        self._is_ended = False

    def write(self, chunk: int, plain: memoryview) -> None:
        """Put a chunk into a slot if other ranks wait for it. Waits for a free slot."""
        if self._is_ended or not self._is_own[chunk]:
            return
        memory = self._memory
        takers = np.flatnonzero(self._needs[:, chunk] & ~memory.has_left())
        slot = self._taken_slot(takers) if takers.size else None
        with self._lock:
            self._written += 1
            memory.set_progress(self._written / self._total)
        if slot is None:
            return
        record = memory.records[memory.own, slot]
        view = memory.slot(memory.own, slot, len(plain))
        kernels.copy_bytes(plain, view)
        record[_CHUNK], record[_NBYTES], record[_CHECKSUM] = chunk, len(plain), _checksum(chunk, view)
        # Ranks search for a new turn, so it is written last.
        record[_TURN] += np.uint64(1)
        self._is_busy[slot] = False

    def end(self) -> None:
        """Write nothing any longer."""
        self._is_ended = True
        self._memory.stop_reading()

    def _taken_slot(self, takers: NDArray[np.int64]) -> int | None:
        """Wait for a free slot, and take it; None: there is no memory for it, or the writer has ended."""
        with self._lock:
            pauses = _Pauses()
            while not self._is_ended:
                left = self._memory.has_left()
                if left[takers].all():
                    return None
                is_ahead = self._written / self._total - self._memory.least_progress() > self._lead_max
                for slot, before in enumerate(() if is_ahead else self._takers):
                    if not self._is_busy[slot] and self._is_free(slot, before, left):
                        if before is None and not self._populated(slot):
                            return None
                        self._is_busy[slot], self._takers[slot] = True, takers
                        return slot
                pauses.wait()
        return None

    def _is_free(self, slot: int, takers: NDArray[np.int64] | None, left: NDArray[np.bool_]) -> bool:
        if takers is None:
            return True
        record = self._memory.records[self._memory.own, slot]
        return bool(((record[_FIELDS + takers] >= record[_TURN]) | left[takers]).all())

    def _populated(self, slot: int) -> bool:
        try:
            self._memory.populate(slot)
        except OSError:
            # The others then read alone what this rank does not pass on.
            self.end()
            return False
        return True


class SlotTaker:
    """Takes chunks that other ranks have read, on a thread of its own.

    Args:
        memory: The shared memory, with slots.
        expected: The reader of each chunk to take.
        take: Called with each chunk and its plain bytes, which are valid during the call.
    """

    def __init__(
        self, memory: HostMemory, expected: Mapping[int, int], take: Callable[[int, memoryview], None]
    ) -> None:
        self._memory = memory
        self._expected = dict(expected)
        self._take = take
        self._seen = np.zeros((memory.members, memory.slot_count), np.uint64)
        self._buffer = memoryview(bytearray(memory.slot_nbytes))
        self._is_stopped = False
        self._ended = Latch()
        self._error: BaseException | None = None
        self._missing: set[int] = set()
        start_thread(threading.Thread(target=self._run, name="ckstore-take", daemon=True))

    def missing(self) -> Collection[int]:
        """Wait for all chunks, and return those that this rank must read itself.

        Raises:
            Exception: A chunk could not be taken.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._missing

    def stop(self) -> None:
        """Take nothing any longer. Returns when the thread has ended."""
        self._is_stopped = True
        wait_in_any_case(self._ended)

    def _run(self) -> None:
        pauses = _Pauses()
        try:
            while self._expected and not self._is_stopped:
                stopped = self._memory.has_stopped_reading()
                if self._take_new():
                    pauses.reset()
                else:
                    # A rank that had stopped before this search has put its last chunk into a slot before it.
                    self._give_up(stopped)
                    pauses.wait()
        except BaseException as error:
            self._error = error
            # Readers must not wait for a rank that takes nothing any longer.
            self._memory.leave()
        finally:
            self._ended.set()

    def _give_up(self, stopped: NDArray[np.bool_]) -> None:
        # Ranks that have read all are in ``stopped``, too.
        if stopped.any():
            gone = [chunk for chunk, reader in self._expected.items() if stopped[reader]]
            self._missing.update(gone)
            for chunk in gone:
                del self._expected[chunk]

    def _take_new(self) -> bool:
        """Take the chunks that are new in any slot. Return whether there was one."""
        turns = self._memory.records[:, :, _TURN].copy()
        is_new = turns > self._seen
        if not is_new.any():
            return False
        self._seen = turns
        for member, slot in np.argwhere(is_new).tolist():
            if member != self._memory.own:
                self._take_from(member, slot, turns[member, slot])
        return True

    def _take_from(self, member: int, slot: int, turn: np.uint64) -> None:
        memory = self._memory
        record = memory.records[member, slot]
        chunk, nbytes, checksum = int(record[_CHUNK]), int(record[_NBYTES]), int(record[_CHECKSUM])
        if self._expected.get(chunk) != member:
            return
        plain = self._buffer[: min(nbytes, memory.slot_nbytes)]
        kernels.copy_bytes(memory.slot(member, slot, len(plain)), plain)
        record[_FIELDS + memory.own] = turn
        del self._expected[chunk]
        if _checksum(chunk, plain) == checksum:
            self._take(chunk, plain)
        else:
            self._missing.add(chunk)
