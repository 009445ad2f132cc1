"""Log from where an exception, or a wait, would keep others waiting.

Filters and handlers are the user's, and Python lets what they raise through to whoever logs. And each handler has a
lock that Python code takes: Ctrl-C in the middle of a trainer's own ``log.info`` can leave it with the main thread for
ever (``tests/unit/test_logs.py`` counts how often), and every other thread that logs by that handler then waits for
ever.
On the threads that copy a state, or hear of a saver's end, either would leave somebody waiting who needs them.

So all threads but the main one have a thread of its own say what they have to say, and wait a little for it at most.

Invariants:
- ``tell`` raises nothing, and of a thread other than the main one it takes no longer than ``SAID_WITHIN_SECONDS``; but
  where no thread can be started it is said by whoever tells it, however long that takes.
- What is said is said in the order in which it was told; what waits to be said is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from ckstore.latch import Latch

SAID_WITHIN_SECONDS = 1.0
"""How long who tells something waits until it is said: what a thread logs before it acts is usually read before."""

UNSAID_COUNT_MAX = 1000
"""What may wait to be said while a handler keeps everybody waiting; what comes after it is dropped."""


def tell(log: logging.Logger, level: int, text: str, *facts: object, exc_info: bool = False) -> None:
    """Log what a thread has to say that others wait for; what a filter or handler raises cannot be told, and is not.

    Args:
        log: Where to.
        level: One of those of ``logging``.
        text: What to say, with a place for each fact as ``logging`` has them.
        facts: What the places stand for.
        exc_info: Whether to say what exception is being handled.
    """
    failure = sys.exc_info() if exc_info else None
    frame, thread = sys._getframe(1), threading.current_thread()
    where = frame.f_code.co_filename, frame.f_lineno
    function = frame.f_code.co_name

    def say() -> None:
        if log.isEnabledFor(level):
            record = log.makeRecord(log.name, level, *where, text, facts, failure, function)
            # Who says it, not who passes it on.
            record.thread, record.threadName = thread.ident, thread.name
            log.handle(record)

    if thread is threading.main_thread() or not _speaker.has_said(say):
        # Nobody else can; and the main thread never waits for a lock that it was left with itself.
        with contextlib.suppress(Exception):
            say()


class _Speaker:
    """Says what others tell it, one after another, on a thread that is there while there is something to say."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew, in a forked child too: it has no thread, and perhaps a lock that nobody releases."""
        # Entered by threads that no signal interrupts, and for no longer than a thread takes to start.
        self._changing = threading.Lock()
        self._unsaid: deque[tuple[Callable[[], None], Latch]] = deque()
        self._is_speaking = False
        self._is_stuck = False

    def has_said(self, say: Callable[[], None]) -> bool:
        """Have it said, and wait a little for it; False: no thread can be started for it."""
        said = Latch()
        with self._changing:
            if len(self._unsaid) == UNSAID_COUNT_MAX:
                return True
            self._unsaid.append((say, said))
            if not self._is_speaking:
                try:
                    threading.Thread(target=self._speak, name="ckstore-logs", daemon=True).start()
                except RuntimeError:
                    self._unsaid.pop()
                    return False
                self._is_speaking = True
        # Whoever waited in vain has waited for all who come after him, until something is said again.
        if not self._is_stuck and not said.wait(SAID_WITHIN_SECONDS):
            self._is_stuck = True
        return True

    def _speak(self) -> None:
        while True:
            with self._changing:
                if not self._unsaid:
                    self._is_speaking = False
                    return
                say, said = self._unsaid.popleft()
            with contextlib.suppress(BaseException):
                say()
            self._is_stuck = False
            said.set()


_speaker = _Speaker()
os.register_at_fork(after_in_child=_speaker.begin)
