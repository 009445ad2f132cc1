"""Something that happens once, waited for by threads that Ctrl-C may interrupt.

``threading.Event`` is made of Python code: a signal whose handler raises right after its lock was taken, before the
``with`` around it has begun, leaves that lock locked. Whoever sets the event then waits for it for ever, and so does
whoever waits for the event. Of waits that a signal comes to as they begin it happens to some in a thousand
(``tests/unit/test_latch.py`` counts them).

Invariants:
- No lock is held but by somebody who waits, and that one is his own: nobody ever waits for one that was left locked.
- Whoever is interrupted leaves nothing that keeps others waiting: if it was in ``set``, they look by themselves.
"""

from __future__ import annotations

import contextlib
import math
import threading

from ckstore.clock import SYSTEM_CLOCK

LOOK_SECONDS = 1.0
"""Between two looks of who waits, in case that whoever has set it was interrupted before all were woken."""


class Latch:
    """Is set once, and stays so."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._is_set

    @property
    def waiting_count(self) -> int:
        """How many threads wait for it."""
        return len(self._waiting)

    def set(self) -> None:
        """Wake all who wait, and let pass who comes later; never waits."""
        self._is_set = True
        # Whoever is not in the list by now sees that it has happened. Two may be setting it at a time.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it happens.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether it has happened.
        """
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            # Not before: it may be set before this one is in the list.
            self._waiting.append(mine)
            end = math.inf if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
            while not self._is_set and (left := end - SYSTEM_CLOCK.monotonic()) > 0:
                mine.acquire(timeout=min(LOOK_SECONDS, left))
            # Whoever is woken is not in it any more.
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)
        return self._is_set
