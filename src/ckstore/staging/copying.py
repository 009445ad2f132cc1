"""Copy units of a state into the arena, on the threads of a crew.

Invariants:
- A unit is marked after its bytes were copied.
- A thread that copies does not need the interpreter between two units: a trainer that runs Python is not disturbed.
- Only threads of the crew copy, and only they say that a section is over: Ctrl-C is raised to who sends them and
  waits, and comes in the middle of nothing that is not done again by the next who does.
- Once ``is_over`` is set, no thread touches the section any more.
- What was sampled was sampled before any source may change that a guard protects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.errors import CkstoreError
from ckstore.kernels import copy_units as gather
from ckstore.latch import Latch
from ckstore.logs import tell
from ckstore.saver.arena import UNIT_NBYTES, Slot
from ckstore.staging.checksums import Checksums, Place
from ckstore.staging.crew import Crew
from ckstore.staging.spots import WORD_NBYTES
from ckstore.staging.stowage import Section
from ckstore.tensor import HostStorage

_log = logging.getLogger("ckstore")

_FRESH_UNITS = 8
"""Units that a thread populates, and then copies, where memory is still to be taken."""


def ignore(*_: object) -> None:
    """Do nothing: takes the place of what was to be called once, and was."""


def looked(
    look: Callable[[], BaseException | None], caught: type[BaseException] = BaseException
) -> BaseException | None:
    """Return what a look found, or what kept it from looking: unseen is not unchanged.

    Args:
        look: What to call.
        caught: What of that is returned; else it is raised, and who is interrupted by it has not looked.
    """
    try:
        return look()
    except caught as error:
        # Whoever is told of it keeps it, and its frames have the state.
        return without_frames(error)


def without_frames(error: BaseException) -> BaseException:
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
        look: Called once, when all is copied and before anybody may change it; returns what is wrong with it.
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
        look: Callable[[], BaseException | None] = lambda: None,
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
        self._look = look
        self._lock = threading.Lock()
        self._inside = 0
        self._is_sent = False
        self.is_rushed = False
        """Whether the whole crew was sent."""
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
                tell(_log, logging.ERROR, "a state could not be copied", exc_info=True)
            self.stop(without_frames(error))
        self._leave()

    def send(self, crew: Crew, count: int) -> None:
        """Let threads of the crew copy; no more of them than there are units, and one where there is none."""
        if not self.is_over.is_set():
            crew.send(self.work, min(count, max(1, self.section.unit_count)))
            # Not before: Ctrl-C in between must not leave nobody who copies.
            self._is_sent = True

    def join(self, crew: Crew) -> None:
        """Send the whole crew, and wait; whoever interrupts the wait does not end the copying."""
        self.is_rushed = True
        self.send(crew, crew.count)
        self.is_over.wait()

    def wait(self, crew: Crew, count: int) -> None:
        """Wait for those who copy already; where nobody was sent, send so many of the crew."""
        if not self._is_sent:
            self.send(crew, count)
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

    def changed_place(self) -> Place | None:
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
                self._error = self._error or looked(self._look)
                self.is_over.set()
        if is_last:
            # Nor may it be kept, with a table of every row, by a cycle that only a collector finds.
            on_over, self._on_over, self._look = self._on_over, ignore, ignore
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
