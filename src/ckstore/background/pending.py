"""A commit that is on its way: staged, written, and at last a receipt or an error."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import Latch, log_safely
from ckstore.errors import CkstoreError, SaverError, UsageError, copy_error
from ckstore.results import Receipt

_log = logging.getLogger("ckstore")


class Waiter(Protocol):
    """Waits for an event, and says now and then for what."""

    def __call__(self, event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
        """Return whether it is set; whoever sets it need not give way to others meanwhile, where it is urgent."""
        ...


def _wait(event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
    return event.wait(timeout)


Finish = Callable[[bool], None]
"""Returns when all is copied; is told whether the receipt is wanted, which comes sooner if this comes later."""


def _nothing(is_receipt_wanted: bool) -> None:
    """Do nothing."""


class Pending:
    """A commit in the background; made by ``Store.commit_async``.

    Attributes:
        step: The trainer's step.
        stall_seconds: How long it has kept the trainer waiting, in ``commit_async`` and in guards.
        progress: Stage, bytes done and bytes in all, as the saver said last; None: nothing yet.
    """

    def __init__(self, step: int, *, finish: Finish | None = None, wait: Waiter = _wait) -> None:
        self.step = step
        self._owner = os.getpid()
        self.stall_seconds = 0.0
        self.progress: tuple[str, int, int] | None = None
        self.error_was_raised = False
        """Whether somebody has been told how it ended."""
        self._finish = finish or _nothing
        self._wait = wait
        self._staged = Latch()
        self._began = Latch()
        self._done = Latch()
        self._receipt: Receipt | None = None
        self._error: Exception | None = None
        self._origin: TracebackType | None = None
        self._is_skipped = False
        self._is_promised = False
        self._on_done: list[Callable[[Pending], None]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        how = "skipped" if self._is_skipped else "done" if self._receipt else "failed" if self._error else "pending"
        return f"<ckstore.Pending of step {self.step}: {how}>"

    @property
    def is_done(self) -> bool:
        """Whether it has ended: durable, failed or skipped."""
        return self._done.is_set()

    @property
    def is_staged(self) -> bool:
        """Whether all was copied and the saver has the run: it is published from now on, even if this process dies."""
        with self._lock:
            is_staged = self._staged.is_set() and self._began.is_set() and self._error is None
            # Who was told so relies on it.
            self._is_promised = self._is_promised or is_staged
            return is_staged

    @property
    def is_skipped(self) -> bool:
        """Whether it was left out, or replaced by a later one, because an earlier one was still being written."""
        return self._is_skipped

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state was copied and the saver has the run, or it failed.

        Then the state may be changed without a guard, and the checkpoint is published even if this process dies:
        a trainer that is started again finds that the saver has the run, and waits for it. Not where the saver dies
        with it: as all do in a container whose first process the trainer is, or that is killed as a whole for want of
        memory, and where a scheduler kills all processes of a job.

        Args:
            timeout: Seconds to wait for the saver once all is copied, which is always waited for, unless this is 0;
                None: as long as it lives.

        Returns:
            Whether that is so, within the timeout.

        Raises:
            UsageError: This is a forked child, and the saver its parent's.
        """
        if timeout is None or timeout > 0:
            self._finish_copying(is_receipt_wanted=False)
        deadline = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        for event in (self._staged, self._began):
            left = None if deadline is None else max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            self._wait(event, left, f"take the commit of step {self.step}")
        return self.is_staged

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until it is durable, and return the receipt.

        Args:
            timeout: Seconds to wait for the saver once all is copied, which is always waited for, unless this is 0;
                None: as long as it lives. Whoever has a limit may not live to see the receipt: then copying comes
                first. Without one the saver begins at once, and where that leaves too few processors to copies behind
                a guard, all is staged somewhat later, and a guard that is entered meanwhile waits longer.

        Raises:
            TimeoutError: It takes longer.
            UsageError: This is a forked child, and the saver its parent's.
            SaverError: The saver died, or the commit was skipped or replaced; earlier checkpoints are intact.
            CkstoreError: What the saver met: CapacityError, BackendError, ConflictError and so on.
        """
        if timeout is None or timeout > 0:
            self._finish_copying(is_receipt_wanted=timeout is None)
        if not self._wait(self._done, timeout, f"finish the commit of step {self.step}", is_urgent=True):
            raise TimeoutError(f"the commit of step {self.step} is not durable after {timeout:.3g} s")
        self.error_was_raised = True
        if self._error is not None:
            # With where it went wrong, if that is known; and not the one that is kept here: it would keep the frames
            # of who is told, and all that those have.
            raise copy_error(self._error).with_traceback(self._origin)
        assert self._receipt is not None
        return self._receipt

    def _finish_copying(self, *, is_receipt_wanted: bool) -> None:
        """Wait until all is copied: that ends by itself, and soon; where checksums are compared, this is when."""
        if self._owner != os.getpid() and not self.is_done:
            raise UsageError("a forked child cannot wait for its parent's saver", todo="open the store again")
        self._finish(is_receipt_wanted)

    def error_or_none(self) -> Exception | None:
        """Return why it failed; None while it goes on, and when it is durable."""
        return self._error

    def receipt_or_none(self) -> Receipt | None:
        """Return the receipt, if it is durable already."""
        return self._receipt

    def when_done(self, call: Callable[[Pending], None]) -> None:
        """Call this when it has ended, on any thread, or at once; it must not wait. What it raises is logged."""
        with self._lock:
            if not self._done.is_set():
                self._on_done.append(call)
                return
        self._call([call])

    def note_progress(self, stage: str, nbytes_done: int, nbytes_total: int) -> None:
        """Say how far the saver is."""
        self.progress = (stage, nbytes_done, nbytes_total)

    def note_staged(self) -> None:
        """Say that all of the state was copied."""
        self._staged.set()

    def note_began(self) -> None:
        """Say that the saver has the run for it."""
        self._began.set()

    def note_done(self, receipt: Receipt) -> None:
        """Say that it is durable; also of one that was to be left out, when the saver heard of that too late."""
        with self._lock:
            if self._is_skipped and not self.error_was_raised:
                self._receipt, self._error, self._origin, self._is_skipped = receipt, None, None, False
                return
        self._end(receipt, None)

    def note_failed(self, error: Exception, *, is_skipped: bool = False) -> None:
        """Say that it was not acknowledged; what comes after the end does not count."""
        self._end(None, error, is_skipped=is_skipped)

    def take_back(self, error: Exception) -> bool:
        """Leave it out for a later one, unless somebody was told that it will be published; return whether it is."""
        with self._lock:
            if self._is_promised or self._done.is_set():
                return False
            calls = self._note_end(None, error, is_skipped=True)
        self._call(calls)
        return True

    def _end(self, receipt: Receipt | None, error: Exception | None, *, is_skipped: bool = False) -> None:
        with self._lock:
            if self._done.is_set():
                return
            calls = self._note_end(receipt, error, is_skipped=is_skipped)
        self._call(calls)

    def _call(self, calls: list[Callable[[Pending], None]]) -> None:
        for call in calls:
            try:
                call(self)
            except Exception:
                # What comes after it is the store's: whether it failed is told to the next commit.
                log_safely(_log, logging.ERROR, "a callback of the commit of step %d failed", self.step, exc_info=True)

    def _note_end(
        self, receipt: Receipt | None, error: Exception | None, *, is_skipped: bool
    ) -> list[Callable[[Pending], None]]:
        self._receipt, self._error, self._is_skipped = receipt, error, is_skipped
        self._origin = None if error is None else error.__traceback__
        # Whoever keeps this must not keep the arena and the saver by it.
        self._finish, self._wait = _nothing, _wait
        self._done.set()
        self._staged.set()
        self._began.set()
        calls, self._on_done = self._on_done, []
        return calls


def skipped(step: int, busy_step: int) -> Pending:
    """Return a commit that was left out because another one is still being written."""
    pending = Pending(step)
    pending.note_failed(left_out_error(step, busy_step), is_skipped=True)
    pending.error_was_raised = True
    return pending


def left_out_error(step: int, busy_step: int) -> SaverError:
    """Return the error of a commit that was skipped or replaced."""
    return SaverError(
        f"the commit of step {step} was left out: that of step {busy_step} was still being written",
        todo="commit less often, or let the policy wait: on_busy='wait'",
        step=step,
        busy_step=busy_step,
    )


def as_failure(error: BaseException, step: int) -> Exception:
    """Return why a commit failed, to be kept: an interruption of the trainer is no error of the commit's."""
    if isinstance(error, Exception):
        return copy_error(error)
    return SaverError(f"the commit of step {step} was interrupted", todo="commit again")


def deferred_error(step: int, error: Exception, *, is_instead: bool) -> CkstoreError:
    """Return the error of a commit as it is raised to who did not ask for it: instead of what was called, or after."""
    what, todo = f"the commit of step {step} failed in the background", getattr(error, "todo", None)
    if is_instead:
        todo = "; ".join(filter(None, (todo, "this call has done nothing: repeat it")))
    if not isinstance(error, CkstoreError):
        return SaverError(f"{what}: {error}", todo=todo)
    return type(error)(f"{what}: {error.what}", where=error.where, todo=todo, **error.facts)
