"""One more commit when a signal announces the end: preemption sends SIGTERM, and half a minute later SIGKILL.

Python calls what listens to signals on the main thread, between any two of its instructions: in the middle of
``optimizer.step`` too, where half of the state is new and half is old. So nothing is read there. The signal leaves
word; the training loop, which knows where a step ends, asks after each, and commits.

Invariants:
- A state is read between two steps only; where none ends in time, nothing is committed, and what was is kept.
- What a signal interrupts is not waited for: no lock is taken, nothing is logged and no thread is started there.
- A signal that came is acted on in the end: by the last commit and what follows it, or as if nobody had listened.
- A forked child listens to nothing: whoever ends data-loader workers by SIGTERM ends them.
- A child that the same signal has ended does not end the step: what a handler of SIGCHLD raises then (torch's, when a
  data-loader worker was killed) is held back until the last commit was made.
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
"""For the last commit: the first may be told of an earlier one's failure, or lose its saver to whoever sent it."""

STAGED_SECONDS = 1.0
"""After the deadline: for a commit that was begun to be staged."""

SIGNAL_SECONDS = 1.0
"""For this process to get the signal that has ended a child: a scheduler signals one process after the other."""

_HOLDS = "ckstore_holds"
"""Attribute of a handler that holds back what the handler below it raises."""

_Listener = Callable[[int, FrameType | None], Any]


class _LateError(Exception):
    """The deadline has passed before the last commit was durable."""


class Committing(Protocol):
    """A store, as far as a last commit needs one."""

    @property
    def costs(self) -> Costs:
        """What it has committed."""
        ...

    @property
    def arena_nbytes(self) -> int:
        """Not 0 where it commits through a saver."""
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
        """Commit a state, and return when it is durable."""
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
        """Commit a state through the saver."""
        ...

    def tag(self, ref: str, name: str) -> None:
        """Give a checkpoint a name."""
        ...


class LastCommit:
    """Waits for a signal, and commits at the next ``check``; made by ``Store.commit_on_signal``, on the main thread.

    Attributes:
        signal: The signal that came; None: none has.
        receipt: Of the last commit, once it is durable.
    """

    def __init__(
        self,
        store: Committing,
        get_state: Callable[[], Any],
        *,
        signals: Sequence[int] | None = None,
        deadline_seconds: float = 30.0,
        then: Literal["exit", "return"] = "exit",
        metrics: Callable[[], Mapping[str, float]] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> None:
        check_positive("deadline_seconds", deadline_seconds)
        if then not in ("exit", "return"):
            raise UsageError("then is 'exit' or 'return'", where=f"then={then!r}")
        self.signal: signal.Signals | None = None
        self.receipt: Receipt | None = None
        self._store, self._get_state = store, get_state
        self._get_metrics, self._tags, self._policy = metrics, check_tags(tags), policy
        self._deadline_seconds, self._then = deadline_seconds, then
        self._deadline = 0.0
        self._late: Pending | None = None
        self._owner = os.getpid()
        self._commit_count = store.costs.commit_count
        self._is_over = self._is_done = self._is_ending = self._is_closed = self._is_untagged = False
        self._is_exiting = self._is_waiting = False
        self._of_children: tuple[_Listener, _Listener] | None = None
        self._previous = _listeners_of((signal.SIGTERM,) if signals is None else signals)
        # Written to where no lock may be taken; read by a thread that may.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        # Only when nobody can ring it any more: another file may get its number.
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._teller = threading.Thread(target=self._tell, name="ckstore-signals", daemon=True)
        self._teller.start()
        close_in_children(self)
        _open.add(self)
        for number in self._previous:
            signal.signal(number, self._hear)

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def check(self, step: SupportsIndex) -> bool:
        """Commit, if a signal has come, and end; called where the state is whole, after each step.

        A commit of this step that was begun since the last call counts: it is waited for, and not repeated.

        Args:
            step: The step that the state is of.

        Returns:
            Whether the run is to end: the last commit was made, and whoever else was told by the signal has returned.

        Raises:
            SystemExit: It is durable, or the deadline has passed and the log says whether it is staged; 128 and the
                number of the signal.
            CkstoreError: The last commit failed; earlier checkpoints are intact.
        """
        if self.signal is None or self._is_over:
            self._commit_count = self._store.costs.commit_count
            if not self._is_over:
                # A data loader that was made meanwhile has put its own there.
                self._hold_children()
            return self._is_over
        number = self.signal
        # Whatever comes of it, it is not tried a second time.
        self._is_over = True
        try:
            self._commit_last(check_step(step), number)
        finally:
            self._is_done = True
        return self._end(number)

    def close(self) -> None:
        """Listen no more: what listened before does again; repeated calls do nothing.

        Raises:
            SystemExit: A signal came after the last check; nothing was committed, and the process ends all the same.
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
            # What went wrong first ends the run.
            self.leave(error)

    def leave(self, error: BaseException | None = None) -> bool:
        """Stop listening, and say so where a signal has come that nobody has acted on; return whether one has.

        Args:
            error: What has ended the loop, if anything did.
        """
        self._stop_listening()
        if not self._is_closed:
            self._is_closed = True
            keep_in_children(self)
            os.eventfd_write(self._bell, 1)
            self._teller.join()
        is_left = self.signal is not None and not self._is_over
        if is_left and self.signal is not None:
            self._is_over = True
            _log.warning("%s", self._left_text(self.signal.name, error))
        return is_left

    def _left_text(self, name: str, error: BaseException | None) -> str:
        if error is None:
            return f"{name} came after the last step that was checked: nothing was committed"
        return (
            f"{name} received, but the loop ended ({type(error).__name__}) before the step was complete: no last "
            f"commit; earlier checkpoints are intact{_ranks_text()}"
        )

    def leave_at_exit(self) -> None:
        """Say at the end of the process that a signal has come that nobody has acted on."""
        if self._owner == os.getpid() and not self._is_closed:
            # Of an exception that nobody has caught Python keeps this.
            self.leave(getattr(sys, "last_value", None))

    # Where the signal comes

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner or self._is_closed:
            _pass_on(self._previous[number], number, frame)
        elif self.signal is None:
            self._deadline = SYSTEM_CLOCK.monotonic() + self._deadline_seconds
            self.signal = signal.Signals(number)
            self._hold_children()
            os.eventfd_write(self._bell, 1)
        elif self._is_ending:
            # The last commit was made on another thread; only this one can end the process.
            self._end(self.signal, frame)
        elif self._is_insisting(number):
            self._is_over = self._is_done = True
            self._stop_listening()
            _pass_on(self._previous[number], number, frame)

    def _is_insisting(self, number: int) -> bool:
        """Whether to end without the last commit: Ctrl-C twice, or again when the time was up."""
        # SIGTERM comes twice of itself, from a scheduler to all processes and from a launcher to its own.
        is_again = number == signal.SIGINT and self.signal == signal.SIGINT
        return is_again or (SYSTEM_CLOCK.monotonic() > self._deadline and not self._is_over)

    # What children have died of

    def _hold_children(self) -> None:
        """Hold back what a handler of SIGCHLD raises, if there is one that is not held back yet."""
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._owner:
            return
        below = signal.getsignal(signal.SIGCHLD)
        if not callable(below) or hasattr(below, _HOLDS):
            return

        def held(number: int, frame: FrameType | None) -> None:
            try:
                below(number, frame)
            except Exception as error:
                if not any(each._is_holding(error) for each in list(_open)):
                    raise

        setattr(held, _HOLDS, True)
        self._of_children = held, below
        signal.signal(signal.SIGCHLD, held)

    def _is_holding(self, error: Exception) -> bool:
        """Whether the step is to go on although a child has died."""
        if self._is_waiting:
            # Another child has died meanwhile; the first one decides.
            return True
        if not (self.is_asked or self._is_closed) and self._names_signal(error):
            until = SYSTEM_CLOCK.monotonic() + SIGNAL_SECONDS
            self._is_waiting = True
            try:
                # Handlers are called in here, too.
                while not self.is_asked and SYSTEM_CLOCK.monotonic() < until:
                    SYSTEM_CLOCK.sleep(0.005)
            finally:
                self._is_waiting = False
        return self.is_asked and (self._is_exiting or not self._is_closed)

    def _names_signal(self, error: Exception) -> bool:
        """Whether an error says that a child was killed by a signal that this one listens to."""
        return any(name in str(error) for number in self._previous if (name := signal.strsignal(number)))

    # What comes of it

    def _commit_last(self, step: int, number: signal.Signals) -> None:
        for left in reversed(range(TRIES)):
            try:
                self.receipt = self._try(step, is_first=left == TRIES - 1)
            except _LateError:
                self._tell_late(step, number)
            except (CkstoreError, MemoryError, OSError) as error:
                if left == 0:
                    raise
                _log.warning("%s: the last commit is tried again: %s", number.name, error)
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
                return self._tagged(self._durable(newest[1]))
        state = self._get_state()
        metrics = self._get_metrics() if self._get_metrics is not None else None
        if is_first and store.arena_nbytes:
            pending = store.commit_async(state, step, metrics=metrics, tags=self._tags, policy=self._policy)
            return self._durable(pending)
        # Here nothing can come between: not a saver that is killed, for one.
        return store.commit(state, step, metrics=metrics, tags=self._tags, policy=self._policy)

    def _tagged(self, receipt: Receipt) -> Receipt:
        """Name a commit that was begun without knowing that it is the last; it is durable whatever comes of that."""
        for name in self._tags:
            try:
                self._store.tag(f"seq:{receipt.seq}", name)
            except (CkstoreError, OSError) as error:
                _log.warning("step %d is durable, but could not be tagged %r: %s", receipt.step, name, error)
        return receipt

    def _durable(self, pending: Pending) -> Receipt:
        self._late = pending
        try:
            return pending.result(timeout=self._left())
        except TimeoutError:
            if not pending.is_done:
                raise _LateError from None
            # It ended just now, or by an error of that kind: one that the system has given.
            return pending.result()

    def _tell_late(self, step: int, number: signal.Signals) -> None:
        """The deadline has passed: say what is certain, and what is not."""
        # Copying ends by itself, and soon; what takes longer is a saver that does not answer, or another writer.
        if self._late is not None and self._late.wait_staged(STAGED_SECONDS):
            text = "%s: step %d is staged and not durable in time; the saver goes on writing it"
            if self._is_untagged:
                text += f" and gives it none of the tags {', '.join(self._tags)}"
            _log.warning(text, number.name, step)
            return
        text = "%s: step %d is not staged in time: it is lost if this process is killed now, else finished"
        _log.error(text, number.name, step)

    def _left(self) -> float:
        return max(0.0, self._deadline - SYSTEM_CLOCK.monotonic())

    def _end(self, number: signal.Signals, frame: FrameType | None = None) -> bool:
        """End as the process would have without this."""
        if self._then == "return":
            return True
        if threading.current_thread() is not threading.main_thread():
            self._is_ending = True
            signal.pthread_kill(_main_thread(), number)
            return True
        previous = self._previous[number]
        # A child that dies from here on must not turn the exit code into another one.
        self._is_exiting = previous == signal.SIG_DFL
        self._stop_listening()
        if callable(previous):
            previous(number, frame)
        elif self._is_exiting:
            raise SystemExit(128 + number)
        return True

    def _stop_listening(self) -> None:
        """Let those listen again who did before; what was put over this one since then is left."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._owner:
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, previous)
            if not self._is_exiting:
                self._let_children_raise()

    def _let_children_raise(self) -> None:
        if self._of_children is not None:
            held, below = self._of_children
            if signal.getsignal(signal.SIGCHLD) is held:
                signal.signal(signal.SIGCHLD, below)
            self._of_children = None

    def close_in_child(self) -> None:
        """In a forked child: as if nobody had listened."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, previous)
        self._let_children_raise()
        self._is_closed = True

    # The thread that tells

    def _tell(self) -> None:
        bell = self._bell
        os.eventfd_read(bell)
        if self._is_closed or self.signal is None:
            return
        name = self.signal.name
        text = "%s: after this step the state is committed once more, within %.3g s%s"
        _log.warning(text, name, self._left(), _ranks_text())
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while not poll.poll(1000 * self._left()):
            if self._left() == 0:
                break
        if self._is_over:
            # What comes of one that waits for a saver is told by whoever waits, soon; nobody tells of the others.
            if not (poll.poll(2000 * STAGED_SECONDS) or self._is_done):
                text = "%s: the last commit is not durable after %.3g s, and goes on; earlier checkpoints are intact"
                _log.error(text, name, self._deadline_seconds)
        elif not self._is_closed:
            _log.error(
                "%s: no step was checked within %.3g s, and nothing was committed: a state in the middle of a step is "
                "none. The next check commits all the same; another signal ends the process%s",
                name,
                self._deadline_seconds,
                _ranks_text(),
            )


_open: weakref.WeakSet[LastCommit] = weakref.WeakSet()
"""Those that listen, or have listened."""


def _leave_at_exit() -> None:
    for each in list(_open):
        each.leave_at_exit()


atexit.register(_leave_at_exit)


def _ranks_text() -> str:
    """Return what a last commit needs of other ranks, where this is one of several (``torchrun`` says so)."""
    count, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "?")
    if not count.isdigit() or int(count) < 2:
        return ""
    return (
        f". This is rank {rank} of {count}: a rank that does not listen to the signal ends in the middle of the step, "
        "which no other rank can then complete; open the store and call commit_on_signal on every rank"
    )


def _listeners_of(numbers: Sequence[int]) -> dict[int, _Listener | int]:
    """Return what listens to some signals now.

    Raises:
        UsageError: Nobody could listen to one instead.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("signals come to the main thread only", todo="call commit_on_signal there")
    listeners: dict[int, _Listener | int] = {}
    for number in numbers:
        try:
            # Of real-time signals but the first and the last Python knows no name.
            signal.Signals(number)
            listener = signal.getsignal(number)
            # SIGKILL and SIGSTOP are refused here, and nothing is changed.
            if listener is not None:
                signal.signal(number, listener)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"nobody can listen to this signal ({error})", where=repr(number)) from None
        if listener is None:
            raise UsageError(
                "something that is not Python listens to this signal, and could not be told of it any more",
                where=signal.Signals(number).name,
                todo="choose another signal",
            )
        listeners[number] = listener
    if not listeners:
        raise UsageError("there is no signal to listen to", where="signals=()")
    return listeners


def _pass_on(previous: _Listener | int, number: int, frame: FrameType | None) -> None:
    """Do what would have been done without this."""
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _main_thread() -> int:
    number = threading.main_thread().ident
    assert number is not None, "the main thread runs"
    return number
