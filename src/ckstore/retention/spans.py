"""Spans of time in words (``7d``, ``1d12h``), and the hours, days, weeks, months and years that moments lie in.

The calendar is the proleptic Gregorian one. The arithmetic of dates is Howard Hinnant's ("chrono-compatible low-level
date algorithms"): no table, no locale, no daylight saving.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from ckstore.errors import UsageError

SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}

_SPAN = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?[smhdwy])+", re.ASCII)
_PART = re.compile(r"([0-9.]+)([smhdwy])", re.ASCII)
_OFFSET = re.compile(r"([+-])([0-9]{2}):([0-9]{2})", re.ASCII)
_DAY_SECONDS = 86_400


def span_seconds(span: str | float) -> float:
    """Return the seconds of a span such as ``7d``, ``12h`` or ``1d12h``; a number is seconds already.

    Raises:
        UsageError: It is none, or not positive.
    """
    seconds = math.nan
    if isinstance(span, str) and _SPAN.fullmatch(span):
        seconds = sum(float(count) * SECONDS_OF[unit] for count, unit in _PART.findall(span))
    elif isinstance(span, (int, float)) and not isinstance(span, bool):
        seconds = float(span)
    if not 0 < seconds < 1e11:
        raise UsageError(
            "this is no span of time",
            where=repr(span)[:80],
            todo="write 30m, 12h, 7d, 2w, 1y or 1d12h; a year has 365 d",
        )
    return seconds


def span_words(seconds: float) -> str:
    """Return a span as people write it: ``7d``, ``1d12h``, ``90.5s``."""
    if seconds != int(seconds):
        return f"{seconds:.6f}".rstrip("0") + "s"
    rest, words = int(seconds), ""
    for unit in "dhms":
        count, rest = divmod(rest, SECONDS_OF[unit])
        words += f"{count}{unit}" if count else ""
    return words or "0s"


def zone_offset_seconds(zone: str) -> int:
    """Return how far a time zone, ``UTC`` or ``+HH:MM``, is ahead of UTC.

    Raises:
        UsageError: It is written otherwise; zones with daylight saving have no fixed offset and are not taken.
    """
    if zone == "UTC":
        return 0
    found = _OFFSET.fullmatch(zone) if isinstance(zone, str) else None
    if found is None or int(found[2]) > 14 or int(found[3]) > 59:
        raise UsageError(
            "this is no time zone", where=repr(zone)[:80], todo="write UTC, or a fixed offset as in +02:00"
        )
    seconds = int(found[2]) * 3600 + int(found[3]) * 60
    return -seconds if found[1] == "-" else seconds


def hour_of(seconds: int) -> str:
    """Return the hour that a local time in seconds since 1970 lies in: ``2024-02-29 13h``."""
    return f"{day_of(seconds)} {seconds % _DAY_SECONDS // 3600:02d}h"


def day_of(seconds: int) -> str:
    """Return the day: ``2024-02-29``."""
    return "{:04d}-{:02d}-{:02d}".format(*_civil(seconds // _DAY_SECONDS))


def week_of(seconds: int) -> str:
    """Return the week, by the Monday it begins with: ``week of 2024-02-26``."""
    days = seconds // _DAY_SECONDS
    # 1970-01-01 was a Thursday.
    monday = days - (days + 3) % 7
    return f"week of {day_of(monday * _DAY_SECONDS)}"


def month_of(seconds: int) -> str:
    """Return the month: ``2024-02``."""
    year, month, _ = _civil(seconds // _DAY_SECONDS)
    return f"{year:04d}-{month:02d}"


def year_of(seconds: int) -> str:
    """Return the year: ``2024``."""
    return f"{_civil(seconds // _DAY_SECONDS)[0]:04d}"


def _civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a day counted from 1970-01-01."""
    days += 719_468
    era, day_of_era = divmod(days, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    # Years begin with March here, so that the day that leap years have more is their last.
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    month += 3 if month < 10 else -9
    return year_of_era + era * 400 + (month <= 2), month, day


PERIODS: dict[str, Callable[[int], str]] = {
    "keep_hourly": hour_of,
    "keep_daily": day_of,
    "keep_weekly": week_of,
    "keep_monthly": month_of,
    "keep_yearly": year_of,
}
"""Rules that keep one checkpoint of each period, and what tells the period of a local time in seconds."""
