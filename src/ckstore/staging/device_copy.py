"""One section of a state that lies in a device, on its way into a slot: told to the device once, and seen to its end.

Invariants:
- Copies come after what the device was told before ``begin``, whichever thread tells it of them.
- Nothing of what was given up before it was told to the device is told to it any more; what was told is waited for.
- A guard lets nobody pass before the device was told of everything that it is to copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ckstore.errors import BackendError, CkstoreError
from ckstore.logs import tell
from ckstore.saver.arena import UNIT_NBYTES, Slot
from ckstore.staging.checksums import Checksums, Place
from ckstore.staging.copying import ignore, looked, without_frames
from ckstore.staging.devices import copies_of
from ckstore.staging.stowage import Section
from ckstore.tensor import HostStorage

_log = logging.getLogger("ckstore")


class DeviceCopy:
    """One section of a device's storages.

    Args:
        section: What to copy.
        slot: Where to.
        storages: Where from.
        on_over: Called once, on any thread, with what went wrong, if anything did.
        bell: An eventfd to ring after each unit; -1: none.
        look: Returns what is wrong with it: called until the first guard has let training pass, or all has come.
        error_at: Returns the error that names what lies at a place. Where it is given, checksums are taken of the
            sources, before training goes on and when it is let pass, and of what has come.
    """

    def __init__(
        self,
        section: Section,
        slot: Slot,
        storages: Sequence[HostStorage],
        on_over: Callable[[BaseException | None], None],
        *,
        bell: int,
        look: Callable[[], BaseException | None],
        error_at: Callable[[Place], BaseException | None] | None = None,
    ) -> None:
        self._section = section
        self._slot = slot
        self._copies = copies_of(section, storages, slot)
        self._sums = None if error_at is None else Checksums(section, slot, storages)
        self._error_at = error_at
        self._marks = slot.marks[section.first_unit : section.first_unit + section.unit_count]
        self._on_over = on_over
        self._bell = bell
        self._look = look
        self._seen: BaseException | None = None
        self._problem: BaseException | None = None
        self._is_begun = self._is_over = self._is_held = False
        self.is_launched = False
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        # Devices are waited for by one thread at a time.
        self._turning = threading.Lock()

    def begin(self) -> None:
        """Take note of what the device was told before, by this thread; what it is told later comes after.

        Raises:
            CapacityError: There is no memory for it.
        """
        with self._turning:
            if not self._is_over:
                self._slot.populate(self._section.begin, self._section.unit_count * UNIT_NBYTES)
                self._copies.fence()
                self._is_begun = True

    def launch(self) -> BaseException | None:
        """Tell the device to send, if nobody has; return what kept whoever did from it."""
        with self._launching:
            if self._is_begun and not self.is_launched:
                self.is_launched = True
                try:
                    self._copies.launch()
                except BaseException as problem:
                    if isinstance(problem, Exception) and not isinstance(problem, CkstoreError):
                        tell(_log, logging.ERROR, "a device could not be told what to copy", exc_info=True)
                    # Whoever is told may keep it, and with its frames the state and the arena.
                    self._problem = without_frames(problem)
                    if not isinstance(problem, Exception):
                        raise
            return self._problem

    def hold(self) -> BaseException | None:
        """Let what is launched later wait for the copies; return what was changed before, if anything was.

        What a guard has let pass changes from then on, in the order of the device, while the copies are on their way,
        and counts as a change at once: so it is looked at here for the last time.
        """
        if self._is_over:
            return None
        if (problem := self.launch()) is not None:
            return problem
        self._copies.hold()
        # Ctrl-C interrupts the step, whose next guard looks again.
        self._look_once(Exception, is_held=True)
        return self._seen

    def _look_once(self, caught: type[BaseException], *, is_held: bool) -> None:
        with self._lock:
            if not self._is_held:
                self._seen = self._seen or looked(self._look, caught)
                # Not before: Ctrl-C in between must not leave a change unseen.
                self._is_held = is_held

    def note(self) -> None:
        """Note what is to be sent as this thread's streams have it, if that is to be checked; waits for them."""
        if self._sums is not None:
            self._sums.note()

    def changed_place(self) -> Place | None:
        """Return where a source is not what was noted any more, as this thread's streams have it; None: nowhere.

        Before a guard lets training pass: afterwards the sources are not looked at again.
        """
        if self._sums is None:
            return None
        found = self._sums.changed()
        if found is None:
            self._sums.forget()
        return found

    def forget(self) -> None:
        """Let go of the sources: nobody asks any more whether they were changed."""
        if self._sums is not None:
            self._sums.forget()
        self._error_at = None

    def wait(self) -> None:
        """Wait until all has come, on a thread of the crew; never raises."""
        self._finish(None)

    def cancel(self, error: BaseException) -> None:
        """Give it up; what a device has been told to send comes all the same, and is waited for."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._turning:
            if self._is_over:
                return
            with self._launching:
                # What is given up is not begun any more.
                self._is_begun = self._is_begun and error is None
            try:
                error = error or self.launch()
                if self.is_launched:
                    self._copies.wait(self._mark)
            except BaseException as problem:
                error = error or without_frames(problem)
            self._copies.forget()
            if error is None and not self._marks.all():
                error = BackendError("a device has sent less than it was asked for", todo="report this: it is a bug")
            # No guard may have come meanwhile: what was changed until now was changed while it was copied.
            self._look_once(BaseException, is_held=False)
            error = error or self._seen or looked(self._changed_copy)
            self._is_over = True
            self._problem = None
            on_over, self._on_over, self._look = self._on_over, ignore, ignore
            try:
                self._marks = np.zeros(0, np.uint8)
            finally:
                on_over(error)

    def _changed_copy(self) -> BaseException | None:
        """Return an error if what has come is not what was noted."""
        if self._sums is None or self._error_at is None:
            return None
        place = self._sums.changed(is_looking=False)
        return None if place is None else self._error_at(place)

    def _mark(self, unit: int) -> None:
        if self._sums is not None:
            self._sums.check_copy(unit)
        self._marks[unit] = 1
        if self._bell >= 0:
            # A bell that cannot be heard any more, or has rung often enough, is no reason to stop.
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)
