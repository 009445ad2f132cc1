"""The only place that reads time, so that tests can hand in another clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records people read, monotonic time for durations."""

    def now_ns(self) -> int:
        """Return wall-clock time in nanoseconds since 1970-01-01 UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ns(self) -> int:
        """Return wall-clock time in nanoseconds since 1970-01-01 UTC."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
