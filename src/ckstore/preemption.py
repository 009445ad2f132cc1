"""Commit once more when a signal announces the end: preemption sends SIGTERM, and SIGKILL about 30 seconds later.

Python runs signal handlers on the main thread between any two instructions, possibly inside ``optimizer.step``, where
half of the state is new and half is old. The handler therefore only records the signal. The training loop calls
``LastCommit.check`` after each step, where the state is consistent, and ``check`` commits.

Invariants:
- The state is read between two steps only. If no step ends in time, nothing is committed and earlier checkpoints stay.
- The handler takes no lock, logs nothing and starts no thread, because the code it interrupts may hold any lock.
- A signal is never lost: it leads to the last commit and the exit after it, or to what would have happened without
  this module.
- A forked child handles no signal, so that SIGTERM ends data-loader workers as usual.
- A child killed by the same signal does not end the step: what a SIGCHLD handler raises then (torch raises when a
  data-loader worker dies) is suppressed until the last commit is made.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import check_step, check_tags
from ckstore.errors import CkstoreError, UsageError
from ckstore.interval import check_positive
from ckstore.processes import close_in_children, keep_in_children

if TYPE_CHECKING:
    from ckstore.background.pending import Pending
    from ckstore.config import Policy
    from ckstore.interval import Costs
    from ckstore.results import Receipt


_log = logging.getLogger("ckstore")

TRIES = 3
"""Attempts at the last commit. The first may raise the error of an earlier commit, or lose its saver to the signal."""

STAGED_SECONDS = 1.0
"""Extra time after the deadline for a started commit to become staged."""

SIGNAL_SECONDS = 1.0
"""How long to wait for the signal that has killed a child: a scheduler signals one process after another."""

_SUPPRESSES = "ckstore_holds"
"""Attribute of a SIGCHLD handler that suppresses what the handler below it raises."""

_Handler = Callable[[int, FrameType | None], Any]


class _LateError(Exception):
    """The deadline has passed, and the last commit is not durable."""


class CommittingStore(Protocol):
    """The part of a store that LastCommit needs."""

    @property
    def costs(self) -> Costs:
        """Its commits so far."""
        ...

    @property
    def arena_nbytes(self) -> int:
        """Size of the arena; 0 if the store has made no background commit."""
        ...

    def commit(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Receipt:
        """Commit a state and return when it is durable."""
        ...

    def commit_async(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Pending:
        """Commit a state in the background."""
        ...

    def tag(self, ref: str, name: str) -> None:
        """Tag a checkpoint."""
        ...


class StepAgreement(Protocol):
    """How the ranks of a job agree on the last step. ``ckstore.ranks.last_step.LastStep`` implements it."""

    @property
    def is_background(self) -> bool:
        """Whether the last commit is a background commit."""
        ...

    def is_reached(self, step: int, *, is_asked: bool) -> bool:
        """Say whether the last commit is to be made after this step; ``is_asked``: this rank got a signal."""
        ...


class LastCommit:
    """Records a signal, and commits at the next ``check``. ``Store.commit_on_signal`` creates it on the main thread.

    Attributes:
        signal: The signal received, or None.
        receipt: Receipt of the last commit, once it is durable.
    """

    def __init__(
        self,
        store: CommittingStore,
        get_state: Callable[[], Any],
        *,
        signals: Sequence[int] | None = None,
        deadline_seconds: float = 30.0,
        then: Literal["exit", "return"] = "exit",
        metrics: Callable[[], Mapping[str, float]] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
        agreement: StepAgreement | None = None,
    ) -> None:
        check_positive("deadline_seconds", deadline_seconds)
        if then not in ("exit", "return"):
            raise UsageError("then must be 'exit' or 'return'", where=f"then={then!r}")
        self.signal: signal.Signals | None = None
        self.receipt: Receipt | None = None
        self._store, self._get_state, self._agreement = store, get_state, agreement
        self._get_metrics, self._tags, self._policy = metrics, check_tags(tags), policy
        self._deadline_seconds, self._then = deadline_seconds, then
        self._deadline = 0.0
        self._awaited: Pending | None = None
        self._owner = os.getpid()
        self._commit_count = store.costs.commit_count
        self._is_over = self._is_done = self._is_ending = self._is_closed = self._is_untagged = False
        self._is_exiting = self._is_waiting = False
        self._child_handlers: tuple[_Handler, _Handler] | None = None
        self._previous = _current_handlers((signal.SIGTERM,) if signals is None else signals)
        # The handler, which must not take a lock, writes to it; the logging thread reads it.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # Closed only with this object, because a handler could write to another file with the same number.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._logger = threading.Thread(target=self._run_logger, name="ckstore-signals", daemon=True)
        self._logger.start()
        close_in_children(self)
        _instances.add(self)
        for number in self._previous:
            signal.signal(number, self._on_signal)

    @property
    def is_asked(self) -> bool:
        """True if a signal was received."""
        return self.signal is not None

    def check(self, step: SupportsIndex) -> bool:
        """Commit and exit if a signal was received. Call it after each step, where the state is consistent.

        If this step was committed since the previous call, that commit is awaited instead of repeated.

        Args:
            step: The step of the state.

        Returns:
            True if the run should end: the last commit was made, and previous handlers of the signal have returned.

        Raises:
            SystemExit: The commit is durable, or the deadline has passed and the log says whether it is staged. The
                exit code is 128 plus the signal number.
            CkstoreError: The last commit failed. Earlier checkpoints are intact.
        """
        is_due = self.signal is not None
        if self._agreement is not None and not self._is_over:
            is_due = self._agreement.is_reached(check_step(step), is_asked=is_due)
            if is_due and self.signal is None:
                # Other ranks got a signal, and this one did not, or not yet.
                self._deadline = SYSTEM_CLOCK.monotonic() + self._deadline_seconds
                self.signal = signal.Signals(next(iter(self._previous)))
        if self.signal is None or not is_due or self._is_over:
            self._commit_count = self._store.costs.commit_count
            if not self._is_over:
                # A data loader created since the last step may have installed a new SIGCHLD handler.
                self._wrap_child_handler()
            return self._is_over
        number = self.signal
        # Set first: the last commit is not repeated, even if it raises.
        self._is_over = True
        try:
            self._commit_last(check_step(step), number)
        finally:
            self._is_done = True
        return self._end(number)

    def close(self) -> None:
        """Restore the previous signal handlers. Repeated calls do nothing.

        Raises:
            SystemExit: A signal was received after the last check. Nothing was committed, and the process ends.
        """
        if self.leave() and self.signal is not None:
            self._end(self.signal)

    def __enter__(self) -> LastCommit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The exception ends the run, not the signal.
            self.leave(error)

    def leave(self, error: BaseException | None = None) -> bool:
        """Restore the previous signal handlers; log and return True if a received signal led to no commit.

        Args:
            error: The exception that has ended the loop, if any.
        """
        self._restore_handlers()
        if not self._is_closed:
            self._is_closed = True
            keep_in_children(self)
            os.eventfd_write(self._wake_fd, 1)
            self._logger.join()
        is_unhandled = self.signal is not None and not self._is_over
        if is_unhandled and self.signal is not None:
            self._is_over = True
            _log.warning("%s", self._unhandled_text(self.signal.name, error))
        return is_unhandled

    def _unhandled_text(self, name: str, error: BaseException | None) -> str:
        if error is None:
            return f"{name} was received after the last check(): nothing was committed; earlier checkpoints are intact"
        return (
            f"{name} received, but the loop ended ({type(error).__name__}) before the step was complete: no last "
            f"commit; earlier checkpoints are intact{self._ranks_text()}"
        )

    def _ranks_text(self) -> str:
        return "; all ranks commit after the same step" if self._agreement is not None else _ranks_text()

    def leave_at_exit(self) -> None:
        """Log at process exit if a received signal led to no commit."""
        if self._owner == os.getpid() and not self._is_closed:
            # Python stores an uncaught exception in sys.last_value.
            self.leave(getattr(sys, "last_value", None))

    # Signal handler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner or self._is_closed:
            _pass_on(self._previous[number], number, frame)
        elif self.signal is None:
            self._deadline = SYSTEM_CLOCK.monotonic() + self._deadline_seconds
            self.signal = signal.Signals(number)
            self._wrap_child_handler()
            os.eventfd_write(self._wake_fd, 1)
        elif self._is_ending:
            # Another thread made the last commit; only the main thread can end the process.
            self._end(self.signal, frame)
        elif self._is_insisting(number):
            self._is_over = self._is_done = True
            self._restore_handlers()
            _pass_on(self._previous[number], number, frame)

    def _is_insisting(self, number: int) -> bool:
        """Return True if this signal ends the process without a commit: a second Ctrl-C, or one after the deadline."""
        # A second SIGTERM is normal: the scheduler sends one, and the launcher another.
        is_again = number == signal.SIGINT and self.signal == signal.SIGINT
        return is_again or (SYSTEM_CLOCK.monotonic() > self._deadline and not self._is_over)

    # SIGCHLD handler

    def _wrap_child_handler(self) -> None:
        """Wrap the current SIGCHLD handler, if any, so that what it raises can be suppressed."""
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._owner:
            return
        below = signal.getsignal(signal.SIGCHLD)
        if not callable(below) or hasattr(below, _SUPPRESSES):
            return

        def suppressing(number: int, frame: FrameType | None) -> None:
            try:
                below(number, frame)
            except Exception as error:
                if not any(each._suppresses(error) for each in list(_instances)):
                    raise

        setattr(suppressing, _SUPPRESSES, True)
        self._child_handlers = suppressing, below
        signal.signal(signal.SIGCHLD, suppressing)

    def _suppresses(self, error: Exception) -> bool:
        """Return True if the error of a dead child is suppressed, so that the step goes on."""
        if self._is_waiting:
            # The call for the first dead child decides for all.
            return True
        if not (self.is_asked or self._is_closed) and self._names_signal(error):
            until = SYSTEM_CLOCK.monotonic() + SIGNAL_SECONDS
            self._is_waiting = True
            try:
                # Signal handlers also run during this loop.
                while not self.is_asked and SYSTEM_CLOCK.monotonic() < until:
                    SYSTEM_CLOCK.sleep(0.005)
            finally:
                self._is_waiting = False
        return self.is_asked and (self._is_exiting or not self._is_closed)

    def _names_signal(self, error: Exception) -> bool:
        """Return True if an error names one of the handled signals as the cause of a child's death."""
        return any(name in str(error) for number in self._previous if (name := signal.strsignal(number)))

    # The last commit

    def _commit_last(self, step: int, number: signal.Signals) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                self.receipt = self._try(step, is_first=tries_left == TRIES - 1)
            except _LateError:
                self._log_late(step, number)
            except (CkstoreError, MemoryError, OSError) as error:
                if tries_left == 0:
                    raise
                _log.warning("%s: the last commit failed and is retried: %s", number.name, error)
                continue
            else:
                _log.warning("%s: step %d is durable (seq %s)", number.name, step, self.receipt.seq)
            return

    def _try(self, step: int, *, is_first: bool) -> Receipt:
        store = self._store
        if is_first and store.costs.commit_count != self._commit_count:
            newest, receipt = store.costs.newest, store.costs.newest_receipt
            if newest is not None and newest[0] == step and receipt is not None:
                return self._tagged(receipt)
            if newest is not None and newest[0] == step and newest[1] is not None:
                self._is_untagged = bool(self._tags)
                return self._tagged(self._wait_durable(newest[1]))
        state = self._get_state()
        metrics = self._get_metrics() if self._get_metrics is not None else None
        # The arena of one rank may be empty, for example because its calls have failed. All make the same call.
        is_background = store.arena_nbytes > 0 if self._agreement is None else self._agreement.is_background
        if is_first and is_background:
            pending = store.commit_async(state, step, metrics=metrics, tags=self._tags, policy=self._policy)
            return self._wait_durable(pending)
        # A retry commits in this process, so that a killed saver cannot make it fail.
        return store.commit(state, step, metrics=metrics, tags=self._tags, policy=self._policy)

    def _tagged(self, receipt: Receipt) -> Receipt:
        """Tag a commit that was started before the signal. It is durable even if tagging fails."""
        for name in self._tags:
            try:
                self._store.tag(f"seq:{receipt.seq}", name)
            except (CkstoreError, OSError) as error:
                _log.warning("step %d is durable, but tagging it %r failed: %s", receipt.step, name, error)
        return receipt

    def _wait_durable(self, pending: Pending) -> Receipt:
        self._awaited = pending
        try:
            return pending.result(timeout=self._seconds_left())
        except TimeoutError:
            if not pending.is_done:
                raise _LateError from None
            # The commit has just ended, or itself failed with an operating system TimeoutError.
            return pending.result()

    def _log_late(self, step: int, number: signal.Signals) -> None:
        """Log whether the commit is staged although it is not durable at the deadline."""
        # Copying takes less than a second, unless the saver does not respond or another writer is active.
        if self._awaited is not None and self._awaited.wait_staged(STAGED_SECONDS):
            text = "%s: step %d is staged but not durable at the deadline; the saver continues to write it"
            if self._is_untagged:
                text += f" without the tags {', '.join(self._tags)}"
            _log.warning(text, number.name, step)
            return
        text = "%s: step %d is not staged at the deadline: it is lost if this process is killed now"
        _log.error(text, number.name, step)

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - SYSTEM_CLOCK.monotonic())

    def _end(self, number: signal.Signals, frame: FrameType | None = None) -> bool:
        """End the process as it would have ended without LastCommit."""
        if self._then == "return":
            return True
        if threading.current_thread() is not threading.main_thread():
            self._is_ending = True
            signal.pthread_kill(_main_thread(), number)
            return True
        previous = self._previous[number]
        # A child that dies from here on must not change the exit code.
        self._is_exiting = previous == signal.SIG_DFL
        self._restore_handlers()
        if callable(previous):
            previous(number, frame)
        elif self._is_exiting:
            raise SystemExit(128 + number)
        return True

    def _restore_handlers(self) -> None:
        """Restore the previous handlers, except where a newer handler has replaced ours."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._owner:
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, previous)
            if not self._is_exiting:
                self._unwrap_child_handler()

    def _unwrap_child_handler(self) -> None:
        if self._child_handlers is not None:
            suppressing, below = self._child_handlers
            if signal.getsignal(signal.SIGCHLD) is suppressing:
                signal.signal(signal.SIGCHLD, below)
            self._child_handlers = None

    def close_in_child(self) -> None:
        """Restore the previous handlers in a forked child."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._unwrap_child_handler()
        self._is_closed = True

    # Logging thread

    def _run_logger(self) -> None:
        wake_fd = self._wake_fd
        os.eventfd_read(wake_fd)
        if self._is_closed or self.signal is None:
            return
        name = self.signal.name
        text = "%s: the state is committed once more after this step; deadline in %.3g s%s"
        _log.warning(text, name, self._seconds_left(), self._ranks_text())
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        while not poll.poll(1000 * self._seconds_left()):
            if self._seconds_left() == 0:
                break
        if self._is_over:
            # _commit_last logs the outcome of a background commit at the deadline; this covers blocking commits.
            if not (poll.poll(2000 * STAGED_SECONDS) or self._is_done):
                text = "%s: the last commit is not durable after %.3g s and continues; earlier checkpoints are intact"
                _log.error(text, name, self._deadline_seconds)
        elif not self._is_closed:
            _log.error(
                "%s: check() was not called within %.3g s, and nothing was committed, because the state is consistent "
                "only between steps. The next check() still commits; another signal ends the process%s",
                name,
                self._deadline_seconds,
                self._ranks_text(),
            )


_instances: weakref.WeakSet[LastCommit] = weakref.WeakSet()
"""All objects that handle signals or have handled them."""


def _leave_at_exit() -> None:
    for each in list(_instances):
        each.leave_at_exit()


atexit.register(_leave_at_exit)


def _ranks_text() -> str:
    """Return a hint about the other ranks if ``torchrun`` has started several; else an empty text."""
    count, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "?")
    if not count.isdigit() or int(count) < 2:
        return ""
    return (
        f". This is rank {rank} of {count}. A rank that does not handle the signal ends in the middle of the step, and "
        "then no other rank can complete it: open the store and call commit_on_signal on every rank"
    )


def _current_handlers(numbers: Sequence[int]) -> dict[int, _Handler | int]:
    """Return the current handlers of some signals.

    Raises:
        UsageError: A signal cannot be handled here.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("only the main thread can handle signals", todo="call commit_on_signal on the main thread")
    handlers: dict[int, _Handler | int] = {}
    for number in numbers:
        try:
            # Raises ValueError for most real-time signals, which have no name in Python.
            signal.Signals(number)
            handler = signal.getsignal(number)
            # Raises OSError for SIGKILL and SIGSTOP; changes nothing otherwise.
            if handler is not None:
                signal.signal(number, handler)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"this signal cannot be handled ({error})", where=repr(number)) from None
        if handler is None:
            raise UsageError(
                "code outside of Python handles this signal and would no longer receive it",
                where=signal.Signals(number).name,
                todo="choose another signal",
            )
        handlers[number] = handler
    if not handlers:
        raise UsageError("signals must name at least one signal", where="signals=()")
    return handlers


def _pass_on(previous: _Handler | int, number: int, frame: FrameType | None) -> None:
    """Do what the previous handler would have done."""
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _main_thread() -> int:
    number = threading.main_thread().ident
    assert number is not None, "the main thread runs"
    return number
