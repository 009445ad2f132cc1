"""Copy units of a state from host memory into a slot, on a pool of threads.

``CopyPool`` runs the threads, ``HostCopy`` copies one section, and ``Checksums`` detects changes of guarded memory: it
compares the sources before training continues, the copy, and the sources when the guard is entered.

Invariants:
- A unit is marked after its bytes were copied.
- A copying thread does not need the interpreter between two units, so a trainer that runs Python is not delayed.
- Only pool threads copy and end a section. Ctrl-C reaches only the thread that waits. The next wait
  repeats the interrupted step.
- Once ``is_over`` is set, no thread accesses the section.
- Changes are checked before any guard lets its sources change.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ckstore.background.arena import UNIT_NBYTES, Slot
from ckstore.background.arena_layout import WORD_NBYTES, Section
from ckstore.codec import kernels
from ckstore.codec.kernels import copy_units
from ckstore.concurrency import Latch, Result, log_safely, noop, run_uninterrupted, start_thread
from ckstore.errors import CkstoreError
from ckstore.format.wire import xxh3_64
from ckstore.state.tensors import HostStorage

StorageOffset = tuple[int, int]
"""The index of a storage, and an offset in it."""

Span = tuple[int, int]
"""First address, and the one after the last."""

_log = logging.getLogger("ckstore")

_FRESH_UNITS = 8
"""Units that a thread populates and then copies, where memory is not populated yet."""


class Checksums:
    """The checksums of one section: one (xxh3) for each row of its units.

    Args:
        section: What is copied.
        slot: The destination.
        storages: The sources. A storage on a device is read in the order of the calling thread's streams.
    """

    def __init__(self, section: Section, slot: Slot, storages: Sequence[HostStorage]) -> None:
        self._section = section
        self._slot = slot
        self._storages = storages
        self._noted: dict[int, list[int]] = {}
        self._changed: StorageOffset | None = None

    def note(self) -> None:
        """Take the checksums of the sources."""
        # A section that is given up meanwhile releases its sources.
        storages = self._storages
        for unit in range(self._section.unit_count) if storages else ():
            if unit not in self._noted:
                self._noted.setdefault(unit, self._of_sources(unit, storages))

    def check_copy(self, unit: int) -> None:
        """Compare the copy of a unit with the checksums of its source."""
        rows = list(self._section.rows_of(unit))
        copied = [xxh3_64(self._slot.view(place, nbytes)) for _, _, place, nbytes in rows]
        # A guard on another thread may copy a unit before its source was read. Then the copy's checksum counts.
        noted = self._noted.setdefault(unit, copied)
        for row, one, other in zip(rows, noted, copied, strict=True):
            if one != other:
                self._changed = row[0], row[1]

    def changed(self, *, reads_sources: bool = True) -> StorageOffset | None:
        """Return the offset of a change, in a copy that was compared or in a source. None: no change.

        Args:
            reads_sources: Read the sources again, unless they were released.
        """
        storages = self._storages if reads_sources else ()
        for unit, noted in list(self._noted.items()) if storages else ():
            found = self._of_sources(unit, storages)
            for row, one, other in zip(self._section.rows_of(unit), noted, found, strict=True):
                if one != other:
                    return row[0], row[1]
        return self._changed

    def forget(self) -> None:
        """Release the sources, which may change from now on."""
        self._storages = ()

    def _of_sources(self, unit: int, storages: Sequence[HostStorage]) -> list[int]:
        return [
            xxh3_64(storages[storage].read(offset, offset + nbytes))
            for storage, offset, _, nbytes in self._section.rows_of(unit)
        ]


_processor_now: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""The caller's processor. PyDLL keeps the GIL, so the answer is still true when it returns."""


class CopyPool:
    """Threads that copy. They are started when first needed, and sleep between calls. Thread-safe.

    Args:
        count: Number of threads, at most.
        name: Prefix of the thread names.
    """

    def __init__(self, count: int, name: str = "ckstore-stage") -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changing = threading.RLock()
        """Held while both are replaced or threads start, so that every thread belongs to the current queue."""
        self.count = count
        self._device_thread: CopyPool | None = None
        self._caller_cpu_pool: CopyPool | None = None
        self._is_closed = False

    @property
    def device_thread(self) -> CopyPool:
        """One more thread that waits for devices, so that no copy waits behind it."""
        if self._device_thread is None:
            self._device_thread = CopyPool(1)
        return self._device_thread

    def send(self, work: Callable[[], object], count: int | None = None) -> None:
        """Have threads of the pool call a function, ``count`` times in total. The function must not raise.

        If no thread can be started, because memory is short or the interpreter ends, it is called on this thread.
        """
        count = self.count if count is None else min(count, self.count)
        is_sent = False
        while not is_sent:
            queue_now = self._work
            with contextlib.suppress(RuntimeError):
                self.start(count)
            if not self._threads:
                work()
                return
            for _ in range(count):
                queue_now.put(work)
            # If the pool was closed meanwhile, its threads may have ended before this work. Then send it again.
            is_sent = queue_now is self._work
        if self._is_closed:
            # New threads were started for this work, and nobody else would end them.
            self.close(is_waited=False)

    def send_one(self, work: Callable[[], object]) -> None:
        """Have one thread call a function, which must not raise."""
        self.send(work, 1)

    def run_and_wait(self, step: Callable[[], Result]) -> Result:
        """Call a function on a pool thread and wait. Ctrl-C is raised before or after the call, never within it."""
        return run_uninterrupted(step, on_interrupt=lambda error: None, start=self.send_one)

    def run_on_caller_cpu(self, step: Callable[[], Result]) -> Result:
        """Like ``run_and_wait``, but on the caller's processor, which is idle while the caller waits.

        A waking thread is otherwise scheduled on its last processor. If training computes there, the thread waits for
        the next scheduler tick, which takes milliseconds.
        """
        if self._caller_cpu_pool is None:
            self._caller_cpu_pool = CopyPool(1, "ckstore-near")
        near = self._caller_cpu_pool

        def start(work: Callable[[], None]) -> None:
            # The caller's affinity: an interrupted call may have left the thread bound to one processor.
            processors = os.sched_getaffinity(0)

            def begin() -> None:
                try:
                    _run_on(0, processors)
                finally:
                    work()

            with contextlib.suppress(RuntimeError):
                near.start()
            thread = next(iter(near._threads), None)
            if thread is None or thread.native_id is None:
                # No thread could be started. Other pool threads may exist.
                self.send_one(work)
                return
            _run_on(thread.native_id, {_processor_now()})
            near.send_one(begin)
            if self._is_closed:
                # The pool is closed, and nobody else would end this thread.
                near.close(is_waited=False)

        return run_uninterrupted(step, on_interrupt=lambda error: None, start=start)

    def start(self, count: int | None = None) -> None:
        """Start threads until there are ``count``."""
        with self._changing:
            # Read together: a signal handler may close the pool in the middle of this.
            threads, work = self._threads, self._work
            while len(threads) < (self.count if count is None else count):
                name = f"{self._name}-{len(threads)}"
                thread = threading.Thread(target=_serve, args=(work,), name=name, daemon=True)
                start_thread(thread)
                threads.append(thread)

    def close(self, *, is_waited: bool = True) -> None:
        """End the threads after the work that was sent. Threads that are started for later work end after it."""
        threads = self._end()
        for thread in threads if is_waited else ():
            thread.join()

    def _end(self) -> list[threading.Thread]:
        """Tell all threads to end before waiting for any, so that an interrupted wait leaves no thread behind."""
        self._is_closed = True
        with self._changing:
            threads, self._threads = self._threads, []
            work, self._work = self._work, queue.SimpleQueue()
        work.put(None)
        others = [pool._end() for pool in (self._device_thread, self._caller_cpu_pool) if pool is not None]
        return [*threads, *(thread for each in others for thread in each)]


def _serve(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := work.get()) is not None:
        try:
            call()
        except BaseException:
            # The thread must go on: it would still be counted and waited for.
            with contextlib.suppress(BaseException):
                log_safely(_log, logging.ERROR, "unexpected error on a copy thread", exc_info=True)
        # A sleeping thread must not keep the data of a commit alive.
        del call
    # For the next thread. An interrupted start may have left one that is not counted.
    work.put(None)


def _run_on(thread: int, processors: set[int]) -> None:
    # Failures are ignored, because affinity only affects speed. A processor of -1 (unknown) raises ValueError.
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(thread, processors)


def result_or_error(
    check: Callable[[], BaseException | None], caught: type[BaseException] = BaseException
) -> BaseException | None:
    """Return the result of a check, or the exception that it raised, since a failed check proves nothing.

    Args:
        check: The function to call.
        caught: Which exceptions are returned. Others are raised, and then the check must be repeated.
    """
    try:
        return check()
    except caught as error:
        # Stored errors must not keep frames, and with them the state, alive.
        return strip_traceback(error)


def strip_traceback(error: BaseException) -> BaseException:
    """Return an error after removing its traceback, and those of its contexts. They would keep frames alive."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


class HostCopy:
    """Copies one section, on all threads that call ``work``. Thread-safe.

    Args:
        section: What to copy.
        slot: The destination.
        storages: The sources.
        starts: The address of each storage.
        bell: An eventfd to ring after each unit; -1: none.
        is_checked: Take checksums before and after.
        on_over: Called once, on any thread, with the error if there is one.
        find_change: Called once, when all is copied and before the sources may change. Returns an error for a change.
    """

    def __init__(
        self,
        section: Section,
        slot: Slot,
        storages: Sequence[HostStorage],
        *,
        starts: NDArray[np.uint64],
        bell: int,
        is_checked: bool,
        on_over: Callable[[BaseException | None], None],
        find_change: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self.section = section
        self.is_over = Latch()
        self._words: NDArray[np.uint8] | None = None
        self._slot = slot
        self._sums = Checksums(section, slot, storages) if is_checked else None
        self._storages: Sequence[HostStorage] = storages
        self._table = section.table(starts, slot.address) if section.unit_count else np.empty((0, 3), np.uint64)
        self._table_of_words = section.table_of_words(starts, slot.address)
        self._marks = slot.marks[section.first_unit : section.first_unit + section.unit_count]
        self._turn = np.zeros(1, np.uint64)
        self._bell = bell
        self._is_fresh = not slot.is_populated(section.begin, section.unit_count * UNIT_NBYTES)
        self._on_over = on_over
        self._find_change = find_change
        self._lock = threading.Lock()
        self._inside = 0
        self._is_sent = False
        self.is_rushed = False
        """Whether all threads of the pool work on this section."""
        self._error: BaseException | None = None
        self._is_cancelled = False

    @property
    def error(self) -> BaseException | None:
        """The error, if there is one."""
        return self._error

    def work(self) -> None:
        """Copy units until none is left. Never raises."""
        with self._lock:
            if self.is_over.is_set():
                return
            self._inside += 1
        try:
            if self._is_fresh or self._sums is not None:
                self._copy_stepwise()
            elif self.section.unit_count:
                self._copy(self._table, self.section.firsts, self._marks, self._turn)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, CkstoreError):
                log_safely(_log, logging.ERROR, "could not copy a state", exc_info=True)
            self.stop(strip_traceback(error))
        self._leave()

    def send(self, pool: CopyPool, count: int) -> None:
        """Have up to ``count`` pool threads copy: at most one per unit, and one if there is none."""
        if not self.is_over.is_set():
            pool.send(self.work, min(count, max(1, self.section.unit_count)))
            # Set last: if Ctrl-C comes in between, the next call sends again.
            self._is_sent = True

    def join(self, pool: CopyPool) -> None:
        """Have all pool threads copy, and wait. If the wait is interrupted, copying continues."""
        self.is_rushed = True
        self.send(pool, pool.count)
        self.is_over.wait()

    def wait(self, pool: CopyPool, count: int) -> None:
        """Wait for the threads that are copying. If none is, send ``count``."""
        if not self._is_sent:
            self.send(pool, count)
        self.is_over.wait()

    def stop(self, error: BaseException) -> None:
        """Stop copying. The section ends when every thread inside ``work`` has returned."""
        with self._lock:
            self._error = self._error or error
            self._is_cancelled = True
            self._turn[0] = self.section.unit_count

    def note(self) -> None:
        """Record the sources before training continues: checksums of everything if wanted, else some words."""
        if self._sums is not None:
            self._sums.note()
        elif self.section.unit_count:
            self._words = self._words_at(0)

    def changed_at(self) -> StorageOffset | None:
        """Return the offset of a change that the checksums show. None: no change, or no checksums."""
        return None if self._sums is None else self._sums.changed()

    def sampled_change(self) -> StorageOffset | None:
        """Return the offset of a change that the recorded words show. None: no change was detected."""
        noted = self._words
        if noted is None:
            return None
        changed = np.flatnonzero((noted != self._words_at(1)).any(axis=1))
        return (
            (int(self.section.words[changed[0], 0]), int(self.section.words[changed[0], 1])) if changed.size else None
        )

    def _words_at(self, side: int) -> NDArray[np.uint8]:
        """Return the words of the section, from its source (side 0) or from its copy (side 1)."""
        table = self._table_of_words.copy()
        found = np.zeros((len(table), WORD_NBYTES), np.uint8)
        table[:, 0] = self._table_of_words[:, side]
        table[:, 1] = np.arange(len(table), dtype=np.uint64) * np.uint64(WORD_NBYTES) + np.uint64(found.ctypes.data)
        firsts, mark = np.array([0, len(table)], np.uint64), np.zeros(1, np.uint8)
        copy_units(table.data, firsts.data, mark.data, np.zeros(1, np.uint64).data, -1)
        return found

    def forget(self) -> None:
        """Release the sources."""
        self._storages = ()
        if self._sums is not None:
            self._sums.forget()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            is_last = self._inside == 0 and not self.is_over.is_set()
            is_last = is_last and (self._is_cancelled or bool(self._marks.all()))
            if is_last:
                # After this no thread begins to work, and the waiting thread may change the sources.
                self._error = self._error or result_or_error(self._find_change)
                self.is_over.set()
        if is_last:
            # Drop the callbacks, because garbage collection may be off.
            on_over, self._on_over, self._find_change = self._on_over, noop, noop
            try:
                # A caller that keeps this object must not keep the arena alive.
                self._marks = np.zeros(0, np.uint8)
                if self._sums is None:
                    self.forget()
                self._table = self._table_of_words = self._table[:0].copy()
            finally:
                # Called even if there is no memory for the above, because somebody waits.
                on_over(self._error)

    def _take(self, count: int) -> tuple[int, int] | None:
        with self._lock:
            first = int(self._turn[0])
            last = min(first + count, self.section.unit_count)
            if first >= last:
                return None
            self._turn[0] = last
            return first, last

    def _copy(
        self,
        rows: NDArray[np.uint64],
        firsts: NDArray[np.uint64],
        marks: NDArray[np.uint8],
        turn: NDArray[np.uint64],
    ) -> None:
        kernels.copy_units(rows.data, firsts.data, marks.data, turn.data, self._bell)

    def _copy_stepwise(self) -> None:
        firsts = self.section.firsts
        while (taken := self._take(1 if self._sums is not None else _FRESH_UNITS)) is not None:
            first, last = taken
            self._slot.populate(self.section.begin + first * UNIT_NBYTES, (last - first) * UNIT_NBYTES)
            rows = self._table[int(firsts[first]) : int(firsts[last])]
            starts = firsts[first : last + 1] - firsts[first]
            self._copy(rows, starts, self._marks[first:last], np.zeros(1, np.uint64))
            if self._sums is not None:
                self._sums.check_copy(first)
