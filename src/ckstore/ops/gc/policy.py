"""Retention rules as users write them: on a command line, in Python, or in ``config.json``. Nothing here reads files.

Also time spans in words (``7d``, ``1d12h``), and the hour, day, week, month and year of a time.

Invariants:
- A policy has at least one rule, so an empty policy can never delete everything.
- An unknown rule name is an error, and the message suggests the closest rule.

The calendar is proleptic Gregorian. Date arithmetic follows Howard Hinnant, "chrono-compatible low-level date
algorithms"; it needs no table, locale or daylight saving time.
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

from ckstore.display import repr_of_changes
from ckstore.errors import UsageError
from ckstore.store.refs import WORDS, Order, order_of

SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}

_SPAN = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?[smhdwy])+", re.ASCII)
_PART = re.compile(r"([0-9.]+)([smhdwy])", re.ASCII)
_OFFSET = re.compile(r"([+-])([0-9]{2}):([0-9]{2})", re.ASCII)
_DAY_SECONDS = 86_400


def span_seconds(span: str | float) -> float:
    """Return the seconds of a span such as ``7d``, ``12h`` or ``1d12h``. A number is taken as seconds.

    Raises:
        UsageError: It is not a duration, or not positive.
    """
    seconds = math.nan
    if isinstance(span, str) and _SPAN.fullmatch(span):
        seconds = sum(float(count) * SECONDS_OF[unit] for count, unit in _PART.findall(span))
    elif isinstance(span, (int, float)) and not isinstance(span, bool):
        seconds = float(span)
    if not 0 < seconds < 1e11:
        raise UsageError(
            "not a duration",
            where=repr(span)[:80],
            todo="write for example 30m, 12h, 7d, 2w, 1y or 1d12h; a year has 365 days",
        )
    return seconds


def seconds_of(span: str | float) -> float:
    """Return the seconds of a span as ``span_seconds`` does, which may also be 0.

    Raises:
        UsageError: It is not a span of time.
    """
    return 0.0 if span in (0, "0") else span_seconds(span)


def span_words(seconds: float) -> str:
    """Return a span in words: ``7d``, ``1d12h``, ``90.5s``."""
    if seconds != int(seconds):
        return f"{seconds:.6f}".rstrip("0") + "s"
    rest, words = int(seconds), ""
    for unit in "dhms":
        count, rest = divmod(rest, SECONDS_OF[unit])
        words += f"{count}{unit}" if count else ""
    return words or "0s"


def zone_offset_seconds(zone: str) -> int:
    """Return the offset from UTC of a time zone, ``UTC`` or ``+HH:MM``, in seconds.

    Raises:
        UsageError: It has another form. Zones with daylight saving time have no fixed offset and are refused.
    """
    if zone == "UTC":
        return 0
    found = _OFFSET.fullmatch(zone) if isinstance(zone, str) else None
    if found is None or int(found[2]) > 14 or int(found[3]) > 59:
        raise UsageError("not a time zone", where=repr(zone)[:80], todo="write UTC, or a fixed offset as in +02:00")
    seconds = int(found[2]) * 3600 + int(found[3]) * 60
    return -seconds if found[1] == "-" else seconds


def hour_of(seconds: int) -> str:
    """Return the hour of a local time in seconds since 1970: ``2024-02-29 13h``."""
    return f"{day_of(seconds)} {seconds % _DAY_SECONDS // 3600:02d}h"


def day_of(seconds: int) -> str:
    """Return the day: ``2024-02-29``."""
    return "{:04d}-{:02d}-{:02d}".format(*_civil(seconds // _DAY_SECONDS))


def week_of(seconds: int) -> str:
    """Return the week, named after its Monday: ``week of 2024-02-26``."""
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
    # Years start in March here, so that a leap day is the last day of its year.
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
"""Rules that keep one checkpoint per period, each with the function that names the period of a local time in seconds.
"""

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
        """The rule as written on a command line and in ``config.json``."""
        return f"{self.metric}:{self.count}:{self.order}"

    @property
    def contradicts_name(self) -> bool:
        """Whether the order contradicts the metric's name. Older versions took every metric for a loss."""
        return order_of(self.metric) not in (None, self.order)

    @classmethod
    def of(cls, text: str) -> Best:
        """Parse ``metric[:count][:min|max]``.

        Raises:
            UsageError: It has another form, or the order is left out and the metric's name does not imply it.
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
                "keep_best must be METRIC, METRIC:COUNT or METRIC:COUNT:min|max", where=repr(text)[:80], todo=todo
            )
        found = order_of(metric) if order is None else "max" if order == "max" else "min"
        if found is None:
            raise UsageError(
                f"keep_best {text}: it is unclear whether the lowest or the highest {metric} is best",
                todo=f"write {metric}:{count}:min or {metric}:{count}:max",
            )
        return cls(metric, count, found)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a run to keep: every one that some rule matches. Rules apply to each run separately.

    Some checkpoints are kept whatever the rules: the newest complete one, the keyframe of the newest point of a
    journal, tagged ones, those restored by ``undelete``, those with a time in the future, and those newer than a kept
    checkpoint of the same step.

    Args:
        keep_last: Keep this many of the newest checkpoints.
        keep_every: Keep checkpoints whose step is a multiple of this.
        keep_within: Keep checkpoints at most this much older than the newest: ``"7d"``, ``"12h"``, or seconds.
        keep_hourly: Keep the newest checkpoint of each of the last N hours that have one.
        keep_daily: The same for days.
        keep_weekly: The same for weeks, which begin on Monday.
        keep_monthly: The same for months.
        keep_yearly: The same for years.
        keep_best: Keep the checkpoints with the best values of a metric: ``"loss"``, ``"loss:2"``, ``"speed:3:max"``,
            or several of these. ``min`` or ``max`` may be left out if the name implies it (loss, ppl, error: lowest;
            acc, f1, bleu, reward: highest). A checkpoint without the metric, or with NaN, is kept.
        keep_tag: Keep checkpoints with a matching tag: a name or pattern (``"release-*"``), or several. Tags always
            protect their checkpoint; this rule allows a policy that keeps only tagged checkpoints.
        keep_journal: Keep the points of the journal that follow this many of its newest keyframes. Points go with their
            keyframe anyway. Alone, this rule deletes no checkpoint.
        time_zone: Where days begin: ``"UTC"``, or a fixed offset such as ``"+02:00"``.

    Raises:
        UsageError: There is no rule, or a rule has an invalid value.
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
    keep_journal: int | None = None

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        for rule in ("keep_last", "keep_every", "keep_journal", *PERIODS):
            _check_count(rule, getattr(self, rule))
        for rule in ("keep_best", "keep_tag"):
            object.__setattr__(self, rule, _texts(rule, getattr(self, rule)))
        if self.keep_within is not None:
            object.__setattr__(self, "keep_within", span_words(span_seconds(self.keep_within)))
        zone_offset_seconds(self.time_zone)
        # Normalize, so that equal policies compare equal.
        object.__setattr__(self, "keep_best", tuple(best.spec for best in self.best))
        if not self.to_config().keys() - {"time_zone"}:
            raise UsageError(
                "a retention policy needs at least one rule",
                where="Retention()",
                todo=f"give one of {', '.join(RULES)}",
            )

    @property
    def has_checkpoint_rules(self) -> bool:
        """Whether a rule says which checkpoints to keep. Otherwise none is deleted."""
        return bool(self.to_config().keys() - {"keep_journal", "time_zone"})

    @property
    def best(self) -> tuple[Best, ...]:
        """The parsed ``keep_best`` rules."""
        return tuple(Best.of(text) for text in self.keep_best)

    @property
    def within_seconds(self) -> float | None:
        """``keep_within`` in seconds."""
        return None if self.keep_within is None else span_seconds(self.keep_within)

    @property
    def zone_seconds(self) -> int:
        """Offset of local time from UTC, in seconds."""
        return zone_offset_seconds(self.time_zone)

    def to_config(self) -> dict[str, Any]:
        """Return the rules that are set, in the form of ``config.json``."""
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
        """Make a policy from rule names and values, as in ``config.json`` or on a command line.

        Raises:
            UsageError: A name is not a rule (the message suggests the closest one), or a value is invalid.
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
        """Return the policy for what a caller passed: a ``Retention``, or a mapping of its rules.

        Raises:
            UsageError: It is neither, or a name is not a rule.
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, Mapping):
            return cls.of(policy)
        raise UsageError(
            "a retention policy must be a ckstore.Retention or a mapping of its rules",
            where=repr(policy)[:80],
            todo="for example ckstore.Retention(keep_last=3)",
        )

    @classmethod
    def given_or_none(cls, policy: object) -> Retention | None:
        """Return the policy as ``given`` does, and None for None."""
        return None if policy is None else cls.given(policy)

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
    return UsageError(f"{str(name)[:80]!r} is not a retention rule", where=where, todo=f"did you mean {near[0]!r}?")


def _naming_the_nearest(make: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` so that an unknown rule raises the same UsageError as ``of``, not a TypeError."""

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
            todo="leave the rule out to disable it",
        )


def _texts(rule: str, given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{rule} must be a string or several strings", where=f"Retention({rule}={given!r})"[:120])
    # Remove duplicates. The order has no meaning.
    return tuple(dict.fromkeys(texts))
