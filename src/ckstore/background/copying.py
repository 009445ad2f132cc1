"""Copy units of a state into the arena, on the threads of a pool.

Invariants:
- A unit is marked after its bytes were copied.
- A thread that copies does not need the interpreter between two units: a trainer that runs Python is not disturbed.
- Only threads of the pool copy, and only they say that a section is over: Ctrl-C is raised to who sends them and
  waits, and comes in the middle of nothing that is not done again by the next who does.
- Once ``is_over`` is set, no thread touches the section any more.
- What was sampled was sampled before any source may change that a guard protects.

Checksums of what a guard protects: as it was when the call returned, in its copy, and when the guard is entered.

Threads that copy: how they are started, sent to work, waited for, and ended.
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
from ckstore.codec.kernels import copy_units as gather
from ckstore.concurrency import Latch, Result, log_safely, noop, run_uninterrupted, start_thread
from ckstore.errors import CkstoreError
from ckstore.format.wire import xxh3_64
from ckstore.state.tensors import HostStorage

Place = tuple[int, int]
"""A storage, and an offset in it."""


class Checksums:
    """Those of one section, one (xxh3) for each row of its units.

    Args:
        section: What is copied.
        slot: Where to.
        storages: Where from; a storage in a device is read in the order of the thread that asks.
    """

    def __init__(self, section: Section, slot: Slot, storages: Sequence[HostStorage]) -> None:
        self._section = section
        self._slot = slot
        self._storages = storages
        self._noted: dict[int, list[int]] = {}
        self._changed: Place | None = None

    def note(self) -> None:
        """Note what the sources are now."""
        # What is given up meanwhile lets go of its sources.
        storages = self._storages
        for unit in range(self._section.unit_count) if storages else ():
            if unit not in self._noted:
                self._noted.setdefault(unit, self._of_sources(unit, storages))

    def check_copy(self, unit: int) -> None:
        """Compare the copy of a unit, which has been made, with what was noted."""
        rows = list(self._section.rows_of(unit))
        copied = [xxh3_64(self._slot.view(place, nbytes)) for _, _, place, nbytes in rows]
        # A guard on another thread may be faster than the note.
        noted = self._noted.setdefault(unit, copied)
        for row, one, other in zip(rows, noted, copied, strict=True):
            if one != other:
                self._changed = row[0], row[1]

    def changed(self, *, reads_sources: bool = True) -> Place | None:
        """Return where bytes are not what was noted: in a copy that was compared, or in a source by now; None: none.

        Args:
            reads_sources: Read the sources, unless they were let go of.
        """
        storages = self._storages if reads_sources else ()
        for unit, noted in list(self._noted.items()) if storages else ():
            found = self._of_sources(unit, storages)
            for row, one, other in zip(self._section.rows_of(unit), noted, found, strict=True):
                if one != other:
                    return row[0], row[1]
        return self._changed

    def forget(self) -> None:
        """Let go of the sources: they may change from now on."""
        self._storages = ()

    def _of_sources(self, unit: int, storages: Sequence[HostStorage]) -> list[int]:
        return [
            xxh3_64(storages[storage].read(offset, offset + nbytes))
            for storage, offset, _, nbytes in self._section.rows_of(unit)
        ]


_log = logging.getLogger("ckstore")

_processor_now: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""Which one the caller is on; the GIL is kept, so that this is still so when it returns."""


class CopyPool:
    """Threads that copy; they are started when first needed, and sleep in between.

    Args:
        count: How many there are at most.
        name: What the names of its threads begin with.
    """

    def __init__(self, count: int, name: str = "ckstore-stage") -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changing = threading.RLock()
        """Held while these two are exchanged, or threads started: one counted here must serve what is sent here."""
        self.count = count
        self._device_thread: CopyPool | None = None
        self._caller_cpu_pool: CopyPool | None = None
        self._is_closed = False

    @property
    def device_thread(self) -> CopyPool:
        """One thread more, for what waits for devices: whoever copies must not wait behind it."""
        if self._device_thread is None:
            self._device_thread = CopyPool(1)
        return self._device_thread

    def send(self, work: Callable[[], object], count: int | None = None) -> None:
        """Let threads call this, each once, or one more often; it must not raise.

        Where no thread can be started, for want of memory or while the interpreter ends, it is called right here.
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
            # Whoever closed the pool meanwhile has left its threads nothing but the word to end.
            is_sent = queue_now is self._work
        if self._is_closed:
            # These were started for what was still to be done, and nobody would end them.
            self.close(is_waited=False)

    def send_one(self, work: Callable[[], object]) -> None:
        """Let one thread call this; it must not raise."""
        self.send(work, 1)

    def run_and_wait(self, step: Callable[[], Result]) -> Result:
        """Let one thread call this, and wait: Ctrl-C comes before it or after it, and never in its middle."""
        return run_uninterrupted(step, on_interrupt=lambda error: None, start=self.send_one)

    def run_on_caller_cpu(self, step: Callable[[], Result]) -> Result:
        """As ``run_and_wait``, by a thread of its own, on the processor that the caller leaves to wait.

        A thread that is woken goes to the processor that it ran on last. There another one of the trainer's may be
        computing, or spin, as those of OpenMP do after each parallel loop; and the caller's processor has nothing to do
        until the next tick of the scheduler, milliseconds (seen in traces).
        """
        if self._caller_cpu_pool is None:
            self._caller_cpu_pool = CopyPool(1, "ckstore-near")
        near = self._caller_cpu_pool

        def start(work: Callable[[], None]) -> None:
            # Its caller's, for whoever was interrupted here may have left the thread on one processor.
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
                # Threads of the pool may be there all the same.
                self.send_one(work)
                return
            _run_on(thread.native_id, {_processor_now()})
            near.send_one(begin)
            if self._is_closed:
                # Nobody would end its thread.
                near.close(is_waited=False)

        return run_uninterrupted(step, on_interrupt=lambda error: None, start=start)

    def start(self, count: int | None = None) -> None:
        """Start as many threads now."""
        with self._changing:
            # Both of one time: a handler of signals may close it in the middle of this.
            threads, work = self._threads, self._work
            while len(threads) < (self.count if count is None else count):
                name = f"{self._name}-{len(threads)}"
                thread = threading.Thread(target=_serve, args=(work,), name=name, daemon=True)
                start_thread(thread)
                threads.append(thread)

    def close(self, *, is_waited: bool = True) -> None:
        """End the threads after what they were sent; those that are started for more afterwards end after that."""
        threads = self._end()
        for thread in threads if is_waited else ():
            thread.join()

    def _end(self) -> list[threading.Thread]:
        """Tell all threads to end, before any is waited for: Ctrl-C must not leave one that nobody has told."""
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
            # No Ctrl-C comes here, but whatever does: a thread that ended would still be counted, and waited for.
            with contextlib.suppress(BaseException):
                log_safely(_log, logging.ERROR, "a thread that copies met what it should not", exc_info=True)
        # Nothing of a commit is kept alive while the thread sleeps.
        del call
    # For the next one; Ctrl-C while a thread was started may have left one that nobody counts.
    work.put(None)


def _run_on(thread: int, processors: set[int]) -> None:
    # Where a thread runs is a matter of time, and of nothing else; -1, where the system tells of none, is no processor.
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(thread, processors)


_FRESH_UNITS = 8
"""Units that a thread populates, and then copies, where memory is still to be taken."""


def result_or_error(
    find_change: Callable[[], BaseException | None], caught: type[BaseException] = BaseException
) -> BaseException | None:
    """Return what a find_change found, or what kept it from looking: unseen is not unchanged.

    Args:
        find_change: What to call.
        caught: What of that is returned; else it is raised, and who is interrupted by it has not result_or_error.
    """
    try:
        return find_change()
    except caught as error:
        # Whoever is told of it keeps it, and its frames have the state.
        return strip_traceback(error)


def strip_traceback(error: BaseException) -> BaseException:
    """Return an error that does not know where it was raised, nor does what it came from: frames hold their callers."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


class HostCopy:
    """Copies one section, on all threads that enter.

    Args:
        section: What to copy.
        slot: Where to.
        storages: Where from.
        starts: The address of each storage.
        bell: An eventfd to ring after each unit; -1: none.
        is_checked: Take checksums before and after.
        on_over: Called once, on any thread, with what went wrong, if anything did.
        find_change: Called once, when all is copied and before anybody may change it; returns what is wrong with it.
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
        """Whether the whole pool was sent."""
        self._error: BaseException | None = None
        self._is_cancelled = False

    @property
    def error(self) -> BaseException | None:
        """What went wrong, if anything did."""
        return self._error

    def work(self) -> None:
        """Copy what nobody else has taken; never raises."""
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
                log_safely(_log, logging.ERROR, "a state could not be copied", exc_info=True)
            self.stop(strip_traceback(error))
        self._leave()

    def send(self, pool: CopyPool, count: int) -> None:
        """Let threads of the pool copy; no more of them than there are units, and one where there is none."""
        if not self.is_over.is_set():
            pool.send(self.work, min(count, max(1, self.section.unit_count)))
            # Not before: Ctrl-C in between must not leave nobody who copies.
            self._is_sent = True

    def join(self, pool: CopyPool) -> None:
        """Send the whole pool, and wait; whoever interrupts the wait does not end the copying."""
        self.is_rushed = True
        self.send(pool, pool.count)
        self.is_over.wait()

    def wait(self, pool: CopyPool, count: int) -> None:
        """Wait for those who copy already; where nobody was sent, send so many of the pool."""
        if not self._is_sent:
            self.send(pool, count)
        self.is_over.wait()

    def stop(self, error: BaseException) -> None:
        """Take no more units; it is over when the last thread that has entered, or enters from now on, leaves it."""
        with self._lock:
            self._error = self._error or error
            self._is_cancelled = True
            self._turn[0] = self.section.unit_count

    def note(self) -> None:
        """Note what is to be copied, as it must be: all of it by checksums, if they are wanted; else some bytes."""
        if self._sums is not None:
            self._sums.note()
        elif self.section.unit_count:
            self._words = self._words_at(0)

    def changed_at(self) -> Place | None:
        """Return storage and offset of bytes that are not what was noted, in the copy or by now; None: all are."""
        return None if self._sums is None else self._sums.changed()

    def sampled_change(self) -> Place | None:
        """Return storage and offset of a copy that is not what some words of its source were; None: none was seen."""
        noted = self._words
        if noted is None:
            return None
        changed = np.flatnonzero((noted != self._words_at(1)).any(axis=1))
        return (
            (int(self.section.words[changed[0], 0]), int(self.section.words[changed[0], 1])) if changed.size else None
        )

    def _words_at(self, side: int) -> NDArray[np.uint8]:
        """Return the words of the section, of its source (0) or of its copy (1)."""
        table = self._table_of_words.copy()
        found = np.zeros((len(table), WORD_NBYTES), np.uint8)
        table[:, 0] = self._table_of_words[:, side]
        table[:, 1] = np.arange(len(table), dtype=np.uint64) * np.uint64(WORD_NBYTES) + np.uint64(found.ctypes.data)
        firsts, mark = np.array([0, len(table)], np.uint64), np.zeros(1, np.uint8)
        gather(table.data, firsts.data, mark.data, np.zeros(1, np.uint64).data, -1)
        return found

    def forget(self) -> None:
        """Let go of the sources."""
        self._storages = ()
        if self._sums is not None:
            self._sums.forget()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            is_last = self._inside == 0 and not self.is_over.is_set()
            is_last = is_last and (self._is_cancelled or bool(self._marks.all()))
            if is_last:
                # From here on nobody enters any more, and whoever waits may change what was copied.
                self._error = self._error or result_or_error(self._find_change)
                self.is_over.set()
        if is_last:
            # Nor may it be kept, with a table of every row, by a cycle that only a collector finds.
            on_over, self._on_over, self._find_change = self._on_over, noop, noop
            try:
                # Whoever keeps this must not keep the arena by it.
                self._marks = np.zeros(0, np.uint8)
                if self._sums is None:
                    self.forget()
                self._table = self._table_of_words = self._table[:0].copy()
            finally:
                # Without memory for that too: somebody waits.
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
