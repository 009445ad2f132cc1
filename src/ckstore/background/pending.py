"""``Pending``: a commit in the background, from its staging to its receipt or error."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import Latch, log_safely, noop
from ckstore.errors import CkstoreError, SaverError, UsageError, copy_error
from ckstore.results import Receipt

_log = logging.getLogger("ckstore")


class Waiter(Protocol):
    """Waits for an event, and warns if that takes long."""

    def __call__(self, event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
        """Return whether the event is set. If urgent, raise the saver's priority meanwhile."""
        ...


def _wait(event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
    return event.wait(timeout)


FinishCopying = Callable[[bool], None]
"""Returns when all bytes are copied. True: the caller waits for the receipt, so the saver may run meanwhile."""


class Pending:
    """A commit in the background. Returned by ``Store.commit_async``. Thread-safe.

    Attributes:
        step: The trainer's step.
        stall_seconds: How long the commit has delayed the trainer, in ``commit_async`` and in guards.
        progress: Stage, bytes done and bytes in total, as last reported by the saver. None: no report yet.
    """

    def __init__(
        self, step: int, *, finish: FinishCopying | None = None, wait: Waiter = _wait, is_of_many: bool = False
    ) -> None:
        self.step = step
        # Then being staged depends on work of the savers of all ranks.
        self._is_of_many = is_of_many
        self._owner = os.getpid()
        self.stall_seconds = 0.0
        self.progress: tuple[str, int, int] | None = None
        self.error_was_raised = False
        """Whether the failure was raised to the caller."""
        self._finish = finish or noop
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
        """Whether the commit has ended: durable, failed or skipped."""
        return self._done.is_set()

    @property
    def is_staged(self) -> bool:
        """Whether all bytes are copied and the saver holds the lease: published even if this process dies."""
        with self._lock:
            is_staged = self._staged.is_set() and self._began.is_set() and self._error is None
            # The caller relies on True, so the commit must not be replaced from now on.
            self._is_promised = self._is_promised or is_staged
            return is_staged

    @property
    def is_skipped(self) -> bool:
        """Whether the commit was skipped or replaced because an earlier one was still being written."""
        return self._is_skipped

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state is copied and the saver has taken over the run, or the commit has failed.

        Afterwards the state may be changed without a guard, and the checkpoint is published even if this process dies.
        A restarted trainer waits for the saver. This does not help if the saver is killed too. That happens in a
        container whose first process is the trainer, when a container runs out of memory as a whole, and when a
        scheduler kills all processes of a job.

        Args:
            timeout: Seconds to wait for the saver after all bytes are copied. Copying is always waited for, unless the
                timeout is 0. None: as long as the saver lives.

        Returns:
            Whether the commit is staged, as ``is_staged``.

        Raises:
            UsageError: This is a forked child, and its parent owns the saver.
        """
        if timeout is None or timeout > 0:
            self._finish_copying(is_receipt_wanted=False)
        deadline = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        for event in (self._staged, self._began):
            left = None if deadline is None else max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            self._wait(event, left, f"take the commit of step {self.step}", is_urgent=self._is_of_many)
        return self.is_staged

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until the checkpoint is durable, and return the receipt.

        Args:
            timeout: Seconds to wait for the saver after all bytes are copied. Copying is always waited for, unless the
                timeout is 0. None: as long as the saver lives. With a timeout, copying has priority over writing.
                Without one the saver starts immediately; guarded copies may then finish later, and guards wait longer.

        Raises:
            TimeoutError: The checkpoint is not durable yet.
            UsageError: This is a forked child, and its parent owns the saver.
            SaverError: The saver died, or the commit was skipped or replaced. Earlier checkpoints are intact.
            CkstoreError: The saver failed, for example with CapacityError, BackendError or ConflictError.
        """
        if timeout is None or timeout > 0:
            self._finish_copying(is_receipt_wanted=timeout is None)
        if not self._wait(self._done, timeout, f"finish the commit of step {self.step}", is_urgent=True):
            raise TimeoutError(f"the commit of step {self.step} is not durable after {timeout:.3g} s")
        self.error_was_raised = True
        if self._error is not None:
            # A copy: the stored error must not keep the caller's frames and their data alive. The traceback shows where
            # the commit failed, if that is known.
            raise copy_error(self._error).with_traceback(self._origin)
        assert self._receipt is not None
        return self._receipt

    def _finish_copying(self, *, is_receipt_wanted: bool) -> None:
        """Wait until all bytes are copied, and compare the checksums if there are any."""
        if self._owner != os.getpid() and not self.is_done:
            raise UsageError("a forked child cannot wait for its parent's saver", todo="open the store again")
        self._finish(is_receipt_wanted)

    def error_or_none(self) -> Exception | None:
        """Return why the commit failed, or None if it is durable or still in flight."""
        return self._error

    def receipt_or_none(self) -> Receipt | None:
        """Return the receipt if the checkpoint is durable, else None."""
        return self._receipt

    def when_done(self, call: Callable[[Pending], None]) -> None:
        """Call a function when the commit has ended, on any thread. It must not wait. Exceptions are logged."""
        with self._lock:
            if not self._done.is_set():
                self._on_done.append(call)
                return
        self._call([call])

    def note_progress(self, stage: str, nbytes_done: int, nbytes_total: int) -> None:
        """Record the saver's progress."""
        self.progress = (stage, nbytes_done, nbytes_total)

    def note_staged(self) -> None:
        """Record that all bytes are copied."""
        self._staged.set()

    def note_began(self) -> None:
        """Record that the saver holds the lease for this commit."""
        self._began.set()

    def note_done(self, receipt: Receipt) -> None:
        """Record that the checkpoint is durable, also if it was to be skipped and the saver was faster."""
        with self._lock:
            if self._is_skipped and not self.error_was_raised:
                self._receipt, self._error, self._origin, self._is_skipped = receipt, None, None, False
                return
        self._end(receipt, None)

    def note_failed(self, error: Exception, *, is_skipped: bool = False) -> None:
        """Record why the commit failed. Ignored after the end."""
        self._end(None, error, is_skipped=is_skipped)

    def take_back(self, error: Exception) -> bool:
        """Skip this commit for a later one, unless ``is_staged`` was ever True. Return whether it is skipped."""
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
                # A failed callback of the store must not affect the others.
                log_safely(_log, logging.ERROR, "a callback of the commit of step %d failed", self.step, exc_info=True)

    def _note_end(
        self, receipt: Receipt | None, error: Exception | None, *, is_skipped: bool
    ) -> list[Callable[[Pending], None]]:
        self._receipt, self._error, self._is_skipped = receipt, error, is_skipped
        self._origin = None if error is None else error.__traceback__
        # A caller that keeps this object must not keep the arena and the saver alive.
        self._finish, self._wait = noop, _wait
        self._done.set()
        self._staged.set()
        self._began.set()
        calls, self._on_done = self._on_done, []
        return calls


def skipped(step: int, busy_step: int) -> Pending:
    """Return a pending commit that was skipped because an earlier one is still being written."""
    pending = Pending(step)
    pending.note_failed(skip_error(step, busy_step), is_skipped=True)
    pending.error_was_raised = True
    return pending


def skip_error(step: int, busy_step: int) -> SaverError:
    """Return the error of a commit that was skipped or replaced."""
    return SaverError(
        f"the commit of step {step} was skipped: that of step {busy_step} was still being written",
        todo="commit less often, or use on_busy='wait'",
        step=step,
        busy_step=busy_step,
    )


def as_failure(error: BaseException, step: int) -> Exception:
    """Return the error to store for a failed commit. An interruption of the trainer becomes a SaverError."""
    if isinstance(error, Exception):
        return copy_error(error)
    return SaverError(f"the commit of step {step} was interrupted", todo="commit again")


def deferred_error(step: int, error: Exception, *, call_did_nothing: bool) -> CkstoreError:
    """Return the error of an earlier commit, to be raised by another call than ``Pending.result``."""
    what, todo = f"the commit of step {step} failed in the background", getattr(error, "todo", None)
    if call_did_nothing:
        todo = "; ".join(filter(None, (todo, "this call has done nothing: repeat it")))
    if not isinstance(error, CkstoreError):
        return SaverError(f"{what}: {error}", todo=todo)
    return type(error)(f"{what}: {error.what}", where=error.where, todo=todo, **error.facts)
