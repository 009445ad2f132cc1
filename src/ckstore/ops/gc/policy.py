"""The rules by which checkpoints are kept, as people write them: on a command line, in Python, in ``config.json``.

Invariants:
- A policy has at least one rule: no rules never means that nothing is kept.
- A word that is no rule is refused, with the nearest one that is.

Spans of time in words (``7d``, ``1d12h``), and the hours, days, weeks, months and years that moments lie in.

The calendar is the proleptic Gregorian one. The arithmetic of dates is Howard Hinnant's ("chrono-compatible low-level
date algorithms"): no table, no locale, no daylight saving.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckstore.errors import UsageError
from ckstore.store.refs import WORDS, Order, order_of

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

COUNT_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoints with the best values of a metric."""

    metric: str
    count: int
    order: Order

    def __str__(self) -> str:
        return f"{self.spec} ({WORDS[self.order]})"

    @property
    def spec(self) -> str:
        """As it is written on a command line and in ``config.json``."""
        return f"{self.metric}:{self.count}:{self.order}"

    @property
    def contradicts_name(self) -> bool:
        """Whether the name of the metric says the opposite, as where an older version took every metric for a loss."""
        return order_of(self.metric) not in (None, self.order)

    @classmethod
    def of(cls, text: str) -> Best:
        """Read ``metric[:count][:min|max]``.

        Raises:
            UsageError: It is written otherwise; or the order is left out, and the name of the metric leaves doubt.
        """
        metric, *rest = text.split(":") if isinstance(text, str) else ("",)
        count, order = 1, None
        if rest and rest[0].isascii() and rest[0].isdigit():
            count = int(rest.pop(0))
        if rest:
            order = rest.pop(0)
        if rest or not metric or not 1 <= count <= COUNT_MAX or order not in (None, "min", "max"):
            near = difflib.get_close_matches(order or "", ("min", "max"), n=1, cutoff=0.3)
            is_typo = bool(near) and order not in (None, "min", "max")
            todo = f"did you mean {near[0]!r}?" if is_typo else "for example loss:2:min"
            raise UsageError(
                "keep_best is written METRIC, METRIC:COUNT or METRIC:COUNT:min|max", where=repr(text)[:80], todo=todo
            )
        found = order_of(metric) if order is None else "max" if order == "max" else "min"
        if found is None:
            raise UsageError(
                f"keep_best {text}: the name does not say whether the lowest or the highest {metric} is the best",
                todo=f"write {metric}:{count}:min or {metric}:{count}:max",
            )
        return cls(metric, count, found)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a run are kept; what any rule keeps is kept. Each run is looked at by itself.

    Whatever the rules: the newest checkpoint that is whole stays, and so do tagged ones, those that were brought back
    by ``undelete``, those whose time lies in the future, and those newer than a kept one of the same step.

    Args:
        keep_last: The newest so many.
        keep_every: Those whose step is a multiple of this.
        keep_within: Those at most this much older than the newest: ``"7d"``, ``"12h"``, or seconds.
        keep_hourly: The newest of each hour, for the last so many hours that have one.
        keep_daily: The same for days.
        keep_weekly: The same for weeks, which begin on Mondays.
        keep_monthly: The same for months.
        keep_yearly: The same for years.
        keep_best: Those with the best values of a metric: ``"loss"``, ``"loss:2"``, ``"speed:3:max"``, or several of
            these. ``min`` or ``max`` may be left out where the name leaves no doubt (loss, ppl, error: the lowest; acc,
            f1, bleu, reward: the highest). One without the metric, or with NaN, cannot be judged and is kept.
        keep_tag: Those with a tag that matches: a name or pattern (``"release-*"``), or several. Every tag keeps its
            checkpoint anyway; this makes a policy of it.
        time_zone: Where days begin: ``"UTC"``, or a fixed offset as in ``"+02:00"``.

    Raises:
        UsageError: No rule is given, or a rule has a value that it cannot have.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: str | float | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_yearly: int | None = None
    keep_best: str | tuple[str, ...] = ()
    keep_tag: str | tuple[str, ...] = ()
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        for rule in ("keep_last", "keep_every", *PERIODS):
            _check_count(rule, getattr(self, rule))
        for rule in ("keep_best", "keep_tag"):
            object.__setattr__(self, rule, _texts(rule, getattr(self, rule)))
        if self.keep_within is not None:
            object.__setattr__(self, "keep_within", span_words(span_seconds(self.keep_within)))
        zone_offset_seconds(self.time_zone)
        # The same order in the same words, so that equal policies are equal.
        object.__setattr__(self, "keep_best", tuple(best.spec for best in self.best))
        if not self.to_config().keys() - {"time_zone"}:
            raise UsageError(
                "a retention policy needs a rule", where="Retention()", todo=f"give one of {', '.join(RULES)}"
            )

    @property
    def best(self) -> tuple[Best, ...]:
        """What ``keep_best`` says."""
        return tuple(Best.of(text) for text in self.keep_best)

    @property
    def within_seconds(self) -> float | None:
        """What ``keep_within`` says."""
        return None if self.keep_within is None else span_seconds(self.keep_within)

    @property
    def zone_seconds(self) -> int:
        """How far local time is ahead of UTC."""
        return zone_offset_seconds(self.time_zone)

    def to_config(self) -> dict[str, Any]:
        """Return the rules that are given, as ``config.json`` holds them."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.time_zone == "UTC":
            del given["time_zone"]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value not in (None, ())
        }

    @classmethod
    def of(cls, rules: Mapping[str, Any], *, where: object = None) -> Retention:
        """Make a policy of names and values, as ``config.json`` and a command line have them.

        Raises:
            UsageError: A name is no rule, and the message tells the nearest one; or a value cannot be.
        """
        given: dict[str, Any] = {}
        for name, value in rules.items():
            rule = str(name).replace("-", "_")
            if rule not in _FIELDS:
                raise _no_rule(name, where)
            given[rule] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    @classmethod
    def given(cls, policy: object) -> Retention:
        """Return a policy as callers may give one: itself, or names and values of rules.

        Raises:
            UsageError: It is neither, or has a rule that is none.
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, Mapping):
            return cls.of(policy)
        raise UsageError(
            "a retention policy is a ckstore.Retention, or a mapping of its rules",
            where=repr(policy)[:80],
            todo="for example ckstore.Retention(keep_last=3)",
        )

    def __str__(self) -> str:
        words = []
        for name, value in self.to_config().items():
            values = self.best if name == "keep_best" else value if isinstance(value, list) else [value]
            words += [f"{name} {each}" for each in values]
        return ", ".join(words)


_FIELDS = tuple(field.name for field in dataclasses.fields(Retention))
RULES = tuple(name for name in _FIELDS if name.startswith("keep_"))
"""The names of all rules."""


def _no_rule(name: object, where: object = None) -> UsageError:
    near = difflib.get_close_matches(str(name).replace("-", "_"), _FIELDS, n=1, cutoff=0.0)
    return UsageError(f"{str(name)[:80]!r} is no retention rule", where=where, todo=f"did you mean {near[0]!r}?")


def _naming_the_nearest(make: Callable[..., None]) -> Callable[..., None]:
    """Return a ``__init__`` that refuses a name that is no rule as ``of`` does, not with a TypeError."""

    @functools.wraps(make)
    def refuse_or_make(self: Retention, *args: Any, **rules: Any) -> None:
        for name in rules:
            if name not in _FIELDS:
                raise _no_rule(name, f"Retention({name}=...)")
        make(self, *args, **rules)

    return refuse_or_make


Retention.__init__ = _naming_the_nearest(Retention.__init__)  # type: ignore[method-assign]


def _check_count(rule: str, count: object) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= COUNT_MAX:
        raise UsageError(
            f"{rule} must be a number from 1 to {COUNT_MAX}",
            where=f"Retention({rule}={count!r})"[:120],
            todo="leave the rule out if it is not wanted",
        )


def _texts(rule: str, given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{rule} takes a string, or several", where=f"Retention({rule}={given!r})"[:120])
    # The order in which they are given means nothing.
    return tuple(dict.fromkeys(texts))
