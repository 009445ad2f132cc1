"""Types of Python's standard library as leaves: sets, queues, namespaces, paths, times, exact numbers.

One table says of each type how it is taken apart and how it is made again; what is no row of it cannot be stored.

Invariants:
- ``make(name, state)`` of what ``take`` returned is equal to the leaf and of its type, or a StandIn.
- ``make`` refuses every state that ``take`` does not return.
"""

from __future__ import annotations

import argparse
import datetime
import zoneinfo
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from ckstore.errors import MalformedError, UnsupportedError
from ckstore.format.tree import BUILT_IN
from ckstore.state.named_types import KINDS, StandIn, distinct, make_named, renew_dataclass, take_named

Taken = tuple[str, Any]
"""The name of a conversion, and the state that makes the leaf again."""


@dataclass(frozen=True, slots=True)
class _StandardType:
    """A row of the table.

    Args:
        word: What its name on disk is, behind ``ckstore:``.
        kind: The type, exactly this one.
        take: Returns the state of a leaf: something simpler.
        make: Returns the leaf of a state; raises ValueError, TypeError, OverflowError or ArithmeticError for others.
        renew: Gives a live object what another one holds; False, or None in its place: it cannot be changed to that.
    """

    word: str
    kind: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]
    renew: Callable[[Any, Any], bool] | None = None


def take_standard(item: Any) -> Taken | None:
    """Return how a leaf is stored, if it is of a type of the table, or of a named class; None: it is not.

    Raises:
        ValueError, TypeError, ArithmeticError, AttributeError: It is, and has more to it than can be stored.
    """
    row = _ROW_OF.get(type(item))
    if row is not None:
        return BUILT_IN + row.word, row.take(item)
    if isinstance(item, StandIn) and item.kind in _ROW_NAMED:
        # Anybody can make one: what could not be read again is refused.
        _ROW_NAMED[item.kind].make(item.content)
        return BUILT_IN + item.kind, item.content
    return take_named(item)


def make_standard(name: str, state: Any) -> object:
    """Return the leaf that was stored under a name.

    Raises:
        MalformedError: The state is none that such a leaf has.
        UnsupportedError: No such name: a newer ckstore wrote it.
    """
    word = name.removeprefix(BUILT_IN)
    kind, _, type_name = word.partition(":")
    try:
        if kind in KINDS:
            return make_named(kind, type_name, state)
        if word in _ROW_NAMED:
            return _ROW_NAMED[word].make(state)
    except (ValueError, TypeError, ArithmeticError, AttributeError):
        raise MalformedError("a leaf is not what its type says", where=repr(name[:80])) from None
    raise unknown_conversion(name)


def unknown_conversion(name: str) -> UnsupportedError:
    """Return the error for a name of ours that means nothing here."""
    return UnsupportedError(
        "the state holds a leaf of a kind that this ckstore does not know",
        where=repr(name[:128]),
        todo="use a newer ckstore, or choose other leaves with only=",
    )


def is_standard(name: str) -> bool:
    """Say whether ``make_standard`` knows a name."""
    word = name.removeprefix(BUILT_IN)
    return name.startswith(BUILT_IN) and (word in _ROW_NAMED or word.partition(":")[0] in KINDS)


def renew(target: Any, made: Any) -> bool:
    """Give a live object what another one of its type holds; False: it cannot be changed, and is to be replaced."""
    row = _ROW_OF.get(type(target))
    if row is None:
        return type(target).__hash__ is None and renew_dataclass(target, made)
    return row.renew is not None and type(made) is type(target) and row.renew(target, made)


def _order(item: Any) -> tuple[str, str]:
    """Return what orders the members of a set, in every process alike for plain values."""
    if isinstance(item, (tuple, frozenset)):
        inner = [_order(each) for each in item]
        return type(item).__qualname__, repr(sorted(inner) if isinstance(item, frozenset) else inner)
    # Python refuses to write very long integers in decimal.
    return type(item).__qualname__, f"{item:x}" if type(item) is int else repr(item)


def _in_order(members: Any) -> list[Any]:
    return sorted(members, key=_order)


def _set_of(kind: type) -> Callable[[Any], Any]:
    return lambda state: kind(distinct(_checked(state, list)))


def _checked(state: Any, kind: type[Any], *kinds: type) -> Any:
    """Return a state that is of a type, and as a tuple has members of these types."""
    if type(state) is not kind or (kinds and list(map(type, state)) != list(kinds)):
        raise ValueError(kind)
    return state


def _queue_parts(queue: deque[Any]) -> dict[str, Any]:
    return {"items": list(queue), "maxlen": queue.maxlen}


def _queue_of(state: Any) -> deque[Any]:
    if set(_checked(state, dict)) != {"items", "maxlen"}:
        raise ValueError("no queue")
    items, length = state["items"], state["maxlen"]
    if type(items) is not list or not (length is None or (type(length) is int and len(items) <= length)):
        raise ValueError("a queue longer than it can be")
    return deque(items, length)


def _renew_queue(target: deque[Any], made: deque[Any]) -> bool:
    if target.maxlen != made.maxlen:
        return False
    target.clear()
    target.extend(made)
    return True


def _renew_set(target: set[Any], made: set[Any]) -> bool:
    target.clear()
    target.update(made)
    return True


def _names_of(space: Any) -> dict[str, Any]:
    held = dict(vars(space))
    if not all(type(name) is str for name in held):
        raise ValueError("an attribute whose name is no text")
    return held


def _space_of(kind: type) -> Callable[[Any], Any]:
    def make(state: Any) -> Any:
        made = kind()
        if not all(type(name) is str for name in _checked(state, dict)):
            raise ValueError("names are text")
        vars(made).update(state)
        return made

    return make


def _renew_space(target: Any, made: Any) -> bool:
    vars(target).clear()
    vars(target).update(vars(made))
    return True


def _path_of(kind: type) -> Callable[[Any], Any]:
    return lambda text: _if_told_alike(kind(_checked(text, str)), text)


def _if_told_alike(made: Any, text: str) -> Any:
    if str(made) != text:
        raise ValueError(text)
    return made


def _fraction_of(state: Any) -> Fraction:
    made = Fraction(*_checked(state, tuple, int, int))
    if (made.numerator, made.denominator) != state:
        raise ValueError("a fraction that is not in lowest terms")
    return made


def _parts_of_moment(moment: Any) -> tuple[Any, ...]:
    date = (moment.year, moment.month, moment.day) if isinstance(moment, datetime.datetime) else ()
    return (*date, moment.hour, moment.minute, moment.second, moment.microsecond, moment.tzinfo, moment.fold)


def _moment_of(kind: type, word: str, count: int) -> Callable[[Any], Any]:
    def make(state: Any) -> Any:
        *numbers, zone, fold = _checked(state, tuple)
        if len(numbers) != count or not all(type(each) is int for each in (*numbers, fold)):
            raise ValueError("no moment")
        if isinstance(zone, StandIn):
            kind(*numbers, fold=fold)
            return StandIn(word, "", state)
        return kind(*numbers, tzinfo=zone, fold=fold)

    return make


def _span_of(state: Any) -> datetime.timedelta:
    made = datetime.timedelta(*_checked(state, tuple, int, int, int))
    if (made.days, made.seconds, made.microseconds) != state:
        raise ValueError("a span of time in another form")
    return made


def _offset_of(state: Any) -> datetime.timezone:
    made = datetime.timezone(*_checked(state, tuple))
    if made.__getinitargs__() != state:  # type: ignore[attr-defined]
        raise ValueError("an offset in another form")
    return made


def _zone_key(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise ValueError("a time zone without a name")
    return zone.key


def _zone_of(key: Any) -> Any:
    try:
        return zoneinfo.ZoneInfo(_checked(key, str))
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        # This machine has no such zone: a moment in it is told by its parts.
        return StandIn("zone", "", key)


def _date_parts(date: datetime.date) -> tuple[int, int, int]:
    return date.year, date.month, date.day


def _cut_of(state: Any) -> slice:
    start, stop, step = _checked(state, tuple)
    return slice(start, stop, step)


_PATHS: tuple[type[PurePath], ...] = (PosixPath, PurePosixPath, PureWindowsPath)
_TABLE = (
    _StandardType("set", set, _in_order, _set_of(set), _renew_set),
    _StandardType("frozenset", frozenset, _in_order, _set_of(frozenset)),
    _StandardType("deque", deque, _queue_parts, _queue_of, _renew_queue),
    _StandardType("SimpleNamespace", SimpleNamespace, _names_of, _space_of(SimpleNamespace), _renew_space),
    _StandardType("Namespace", argparse.Namespace, _names_of, _space_of(argparse.Namespace), _renew_space),
    _StandardType("bytearray", bytearray, bytes, lambda state: bytearray(_checked(state, bytes))),
    _StandardType(
        "range",
        range,
        lambda numbers: (numbers.start, numbers.stop, numbers.step),
        lambda state: range(*_checked(state, tuple, int, int, int)),
    ),
    _StandardType("slice", slice, lambda cut: (cut.start, cut.stop, cut.step), _cut_of),
    _StandardType("UUID", UUID, lambda number: number.bytes, lambda state: UUID(bytes=_checked(state, bytes))),
    *(_StandardType(kind.__name__, kind, str, _path_of(kind)) for kind in _PATHS),
    _StandardType("Fraction", Fraction, lambda number: (number.numerator, number.denominator), _fraction_of),
    _StandardType("Decimal", Decimal, str, lambda text: _if_told_alike(Decimal(_checked(text, str)), text)),
    _StandardType(
        "date", datetime.date, _date_parts, lambda state: datetime.date(*_checked(state, tuple, int, int, int))
    ),
    _StandardType("time", datetime.time, _parts_of_moment, _moment_of(datetime.time, "time", 4)),
    _StandardType("datetime", datetime.datetime, _parts_of_moment, _moment_of(datetime.datetime, "datetime", 7)),
    _StandardType("timedelta", datetime.timedelta, lambda span: (span.days, span.seconds, span.microseconds), _span_of),
    _StandardType("timezone", datetime.timezone, lambda zone: zone.__getinitargs__(), _offset_of),
    _StandardType("zone", zoneinfo.ZoneInfo, _zone_key, _zone_of),
)
_ROW_OF: Mapping[type, _StandardType] = {row.kind: row for row in _TABLE}
_ROW_NAMED: Mapping[str, _StandardType] = {row.word: row for row in _TABLE}
