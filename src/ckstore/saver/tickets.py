"""What becomes of what a saver was given to do: each ticket is told once how it ended, each question answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckstore.errors import MalformedError
from ckstore.latch import Latch
from ckstore.logs import tell
from ckstore.receipt import Receipt
from ckstore.saver.messages import Began, Done, Failed, Kept, Progress, SlotFree, error_of

_log = logging.getLogger("ckstore")

OF_TICKET = (Began, Progress, Done, Failed, Kept, SlotFree)


def _ignore(*facts: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What is called, on the listening thread, as a ticket goes on; none of them may wait.

    Args:
        on_done: It is durable.
        on_failed: It was not acknowledged; with the error of the saver, or SaverError if that died.
        on_free: The slot may be used again; comes last, and always.
        on_began: The saver holds the lease for it. From here on the checkpoint is published even if the trainer
            dies, provided that all was staged; and a trainer that is started again waits for it.
        on_progress: Stage, bytes done, bytes in all.
        on_kept: The ticket has ended, and its slot is still needed; ``on_free`` comes later.
    """

    on_done: Callable[[Receipt], None]
    on_failed: Callable[[Exception], None]
    on_free: Callable[[], None]
    on_began: Callable[[], None] = _ignore
    on_progress: Callable[[str, int, int], None] = _ignore
    on_kept: Callable[[], None] = _ignore


class Tickets:
    """The tickets that have not ended yet; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callbacks] = {}
        self._told: set[int] = set()
        self._is_closed = False

    @property
    def untold(self) -> int:
        """How many were neither acknowledged nor given up."""
        with self._lock:
            return len(self._callbacks) - len(self._told)

    def add(self, number: int, callbacks: Callbacks) -> bool:
        """Add a ticket; False: it is too late, the saver is dead or about to end."""
        with self._lock:
            if not self._is_closed:
                self._callbacks[number] = callbacks
            return not self._is_closed

    @property
    def is_closed(self) -> bool:
        """Whether no more are taken."""
        return self._is_closed

    def close(self) -> bool:
        """Take no more, unless one was not told yet how it ended; return whether none is taken any more."""
        with self._lock:
            self._is_closed = self._is_closed or len(self._callbacks) == len(self._told)
            return self._is_closed

    def remove(self, number: int) -> None:
        """Take back a ticket that was not handed over."""
        with self._lock:
            self._callbacks.pop(number, None)

    def take(self, message: Began | Progress | Done | Failed | Kept | SlotFree) -> None:
        """Call what a message calls for.

        Raises:
            MalformedError: There is no such ticket.
        """
        number = message.ticket
        with self._lock:
            callbacks = self._callbacks.get(number)
            if isinstance(message, SlotFree):
                self._callbacks.pop(number, None)
                self._told.discard(number)
            elif isinstance(message, (Done, Failed)):
                self._told.add(number)
        if callbacks is None:
            raise MalformedError("the saver tells of a ticket that it was not given", where=f"ticket {number}")
        if isinstance(message, Began):
            _call(callbacks.on_began)
        elif isinstance(message, Progress):
            _call(callbacks.on_progress, message.stage, message.nbytes_done, message.nbytes_total)
        elif isinstance(message, Done):
            _call(callbacks.on_done, message.receipt)
        elif isinstance(message, Failed):
            _call(callbacks.on_failed, error_of(message))
        else:
            _call(callbacks.on_kept if isinstance(message, Kept) else callbacks.on_free)

    def end(self, death: Callable[[], Exception]) -> None:
        """The saver is dead: end every ticket; ``death`` makes an error for each."""
        with self._lock:
            self._is_closed = True
            callbacks, self._callbacks = self._callbacks, {}
        for number, each in callbacks.items():
            if number not in self._told:
                _call(each.on_failed, death())
            _call(each.on_free)


class Answers:
    """Questions that a saver answers in the order in which they were asked; thread-safe.

    Each has a number, and an answer is one to all before it: whoever is interrupted before a question was sent, or
    before its answer came, leaves nothing that another one could take for theirs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, Latch] = {}
        self._is_closed = False

    def ask(self) -> tuple[int, Latch]:
        """Return the number of the next question, and what is set when it was answered, or nobody is there to do so."""
        answered = Latch()
        with self._lock:
            self._last += 1
            if self._is_closed:
                answered.set()
            else:
                self._open[self._last] = answered
            return self._last, answered

    def take(self, number: int) -> None:
        """Take an answer.

        Raises:
            MalformedError: Nobody asked that.
        """
        with self._lock:
            if not 0 < number <= self._last:
                raise MalformedError("the saver answers what nobody asked", where=f"question {number}")
            answered = [self._open.pop(each) for each in sorted(self._open) if each <= number]
        for event in answered:
            event.set()

    def end(self) -> None:
        """The saver is dead: let nobody wait."""
        with self._lock:
            self._is_closed = True
            waiting, self._open = self._open, {}
        for event in waiting.values():
            event.set()


def _call(callback: Callable[..., None], *facts: object) -> None:
    try:
        callback(*facts)
    except Exception:
        tell(_log, logging.ERROR, "a callback of a background commit failed", exc_info=True)
