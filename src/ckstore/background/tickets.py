"""Match a saver's messages to the callers in its trainer: results of tickets, and answers to questions.

A ticket is the number of one background commit. Every begun ticket ends in exactly one call of ``on_done`` or
``on_failed``, followed by one call of ``on_free``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckstore.background import protocol
from ckstore.concurrency import Latch, log_safely, noop
from ckstore.errors import MalformedError
from ckstore.results import Receipt

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that report the progress of a ticket. They run on the listening thread and must not wait.

    Args:
        on_done: The checkpoint is durable.
        on_failed: The commit failed, with the saver's error, or with SaverError if the saver died.
        on_free: The slot may be reused. Always the last call.
        on_began: The saver holds the lease for this ticket. From here on a fully staged state is published even if the
            trainer dies, and a restarted trainer waits for it.
        on_progress: Stage, bytes done, bytes in total.
        on_retained: The commit has ended, but the saver still reads the slot. ``on_free`` follows later.
    """

    on_done: Callable[[Receipt], None]
    on_failed: Callable[[Exception], None]
    on_free: Callable[[], None]
    on_began: Callable[[], None] = noop
    on_progress: Callable[[str, int, int], None] = noop
    on_retained: Callable[[], None] = noop


class Tickets:
    """Tickets whose slots are still in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callbacks] = {}
        self._reported: set[int] = set()
        self._is_closed = False

    @property
    def unfinished_count(self) -> int:
        """Number of tickets that have neither succeeded nor failed."""
        with self._lock:
            return len(self._callbacks) - len(self._reported)

    def add(self, number: int, callbacks: Callbacks) -> bool:
        """Add a ticket. Return False if the saver is dead or about to end."""
        with self._lock:
            if not self._is_closed:
                self._callbacks[number] = callbacks
            return not self._is_closed

    @property
    def is_closed(self) -> bool:
        """Whether new tickets are refused."""
        return self._is_closed

    def close(self) -> bool:
        """Refuse new tickets if no ticket is unfinished. Return whether new tickets are refused."""
        with self._lock:
            self._is_closed = self._is_closed or len(self._callbacks) == len(self._reported)
            return self._is_closed

    def remove(self, number: int) -> None:
        """Remove a ticket that could not be sent."""
        with self._lock:
            self._callbacks.pop(number, None)

    def take(self, message: protocol.TicketMessage) -> None:
        """Call the function that belongs to a message.

        Raises:
            MalformedError: The ticket is unknown.
        """
        number = message.ticket
        with self._lock:
            callbacks = self._callbacks.get(number)
            if isinstance(message, protocol.SlotFree):
                self._callbacks.pop(number, None)
                self._reported.discard(number)
            elif isinstance(message, (protocol.Done, protocol.Failed)):
                self._reported.add(number)
        if callbacks is None:
            raise MalformedError("the saver reported on an unknown ticket", where=f"ticket {number}")
        if isinstance(message, protocol.Began):
            _call(callbacks.on_began)
        elif isinstance(message, protocol.Progress):
            _call(callbacks.on_progress, message.stage, message.nbytes_done, message.nbytes_total)
        elif isinstance(message, protocol.Done):
            _call(callbacks.on_done, message.receipt)
        elif isinstance(message, protocol.Failed):
            _call(callbacks.on_failed, protocol.error_of(message))
        else:
            _call(callbacks.on_retained if isinstance(message, protocol.Retained) else callbacks.on_free)

    def end(self, death: Callable[[], Exception]) -> None:
        """End every ticket because the saver is dead. ``death`` makes a new error for each."""
        with self._lock:
            self._is_closed = True
            callbacks, self._callbacks = self._callbacks, {}
        for number, each in callbacks.items():
            if number not in self._reported:
                _call(each.on_failed, death())
            _call(each.on_free)


class Questions:
    """Questions to the saver, which answers in the order of asking. Thread-safe.

    Questions are numbered. An answer also answers all earlier questions. So the answer to a caller that was
    interrupted is never taken for the answer to a later one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, Latch] = {}
        self._is_closed = False

    def ask(self) -> tuple[int, Latch]:
        """Return the number of the next question, and an event that is set by the answer or by the saver's death."""
        answered = Latch()
        with self._lock:
            self._last += 1
            if self._is_closed:
                answered.set()
            else:
                self._open[self._last] = answered
            return self._last, answered

    def take(self, number: int) -> None:
        """Handle an answer.

        Raises:
            MalformedError: This question was never asked.
        """
        with self._lock:
            if not 0 < number <= self._last:
                raise MalformedError("the saver answered a question that was not asked", where=f"question {number}")
            answered = [self._open.pop(each) for each in sorted(self._open) if each <= number]
        for event in answered:
            event.set()

    def end(self) -> None:
        """Wake every waiting caller because the saver is dead."""
        with self._lock:
            self._is_closed = True
            waiting, self._open = self._open, {}
        for event in waiting.values():
            event.set()


def _call(callback: Callable[..., None], *facts: object) -> None:
    try:
        callback(*facts)
    except Exception:
        log_safely(_log, logging.ERROR, "a callback of a background commit failed", exc_info=True)
