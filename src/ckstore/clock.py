"""The only module that reads time, so that tests can pass a fake clock."""

from __future__ import annotations

import time

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Clock(Protocol):
        """Wall-clock time for records, monotonic time for durations."""

        def now_ns(self) -> int:
            """Return wall-clock time in nanoseconds since 1970-01-01 UTC."""
            ...

        def monotonic(self) -> float:
            """Return seconds of a clock that never goes backwards."""
            ...

        def sleep(self, seconds: float) -> None:
            """Sleep for a number of seconds."""
            ...
else:
    Clock = object


class SystemClock:
    """The clock of the operating system."""

    def now_ns(self) -> int:
        """Return wall-clock time in nanoseconds since 1970-01-01 UTC."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
_YEAR_MAX = 9999


def local_text(time_ns: int) -> str:
    """Return a time since 1970 as ``2026-11-29 01:10:02`` in the time zone of this machine, else its nanoseconds."""
    try:
        local = time.localtime(time_ns // 10**9)
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"
    return time.strftime("%Y-%m-%d %H:%M:%S", local) if local.tm_year <= _YEAR_MAX else f"{time_ns} ns"


def utc_text(time_ns: int) -> str:
    """Return a time since 1970 as ``2026-11-29 01:10:02 UTC``; if it is beyond the calendar, its nanoseconds."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns // 10**9))
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"
