"""Built-in conversions: types of Python's standard library, and long plain values that are stored in chunks.

One table defines how each standard type is taken apart and built again. A type without a row cannot be stored.

A sampler's order, a log or a vocabulary would make every manifest long and slow. Such values are stored in chunks:

==============================  ====================================================================================
name                            child
==============================  ====================================================================================
``ckstore:count[:tuple]``       a tuple of two ints: the value is every int from the first to the second, exclusive
``ckstore:numbers[:tuple]``     a 1-D array of ``<i8``, ``<f8`` or ``|b1`` with the elements
``ckstore:plain``               bytes: the value's tree, encoded as in a manifest, without tensors
==============================  ====================================================================================

Invariants:
- Building from the state of a leaf returns an equal leaf of the same type, or a StandIn.
- Building refuses every state that taking apart does not return.
- Unpacking restores the type and the bits of every packed value. Short content never expands into much memory:
  counted ints are bounded, other values are as long as their chunks.
"""

from __future__ import annotations

import argparse
import datetime
import zoneinfo
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import ne
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np

from ckstore.errors import MalformedError, UnsupportedError
from ckstore.format.tree import BUILT_IN, DEPTH_MAX, KEY_INT_MAX, KEY_INT_MIN, PACKED_NUMBERS, PACKED_PLAIN
from ckstore.state.markers import PerRankValues
from ckstore.state.named_types import KINDS, StandIn, build_named, convert_named, distinct, update_dataclass

NUMBERS_MIN = 1024
"""A list or tuple of at least this many numbers is stored as an array."""

PLAIN_MIN = 8192
"""A container of at least this many plain values is stored as bytes."""

COUNT_MAX = 1 << 16
"""Most consecutive ints that are stored as a count. Optimizers number their parameters so, and commits read these."""

_REPR_COUNT_MAX = 10_000_000
"""Most values that ``exact_repr`` accepts."""

_REPR_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, list, tuple, dict))

(COUNT, NUMBERS), PLAIN = PACKED_NUMBERS, PACKED_PLAIN
_TUPLE = ":tuple"
_DTYPES = {int: "<i8", float: "<f8", bool: "|b1"}
_PACKED_KINDS = {list: "", tuple: _TUPLE}
PACKED_NAMES = frozenset((PLAIN, *(name + kind for name in (COUNT, NUMBERS) for kind in _PACKED_KINDS.values())))

Conversion = tuple[str, Any]
"""The name of a conversion, and the state from which the leaf is built again."""


@dataclass(frozen=True, slots=True)
class _StandardType:
    """A row of the table.

    Args:
        word: Its name on disk after ``ckstore:``.
        kind: The exact type.
        take: Returns the state of a leaf, made of simpler values.
        make: Builds the leaf from its state. Raises ValueError, TypeError or ArithmeticError for invalid states.
        update: Fills a live object with the content of another. If it returns False or is None, replace the object.
    """

    word: str
    kind: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]
    update: Callable[[Any, Any], bool] | None = None


def convert_standard(item: Any) -> Conversion | None:
    """Return how to store a leaf whose type is in the table or is a named class; None: other types.

    Raises:
        ValueError, TypeError, ArithmeticError, AttributeError: The leaf has content that cannot be stored.
    """
    row = _ROW_OF.get(type(item))
    if row is not None:
        return BUILT_IN + row.word, row.take(item)
    if isinstance(item, StandIn) and item.kind in _ROW_NAMED:
        # Users can create stand-ins: refuse one that a reader would refuse.
        _ROW_NAMED[item.kind].make(item.content)
        return BUILT_IN + item.kind, item.content
    return convert_named(item)


def build_standard(name: str, state: Any) -> object:
    """Build the leaf that was stored under a name.

    Raises:
        MalformedError: No leaf of this type has this state.
        UnsupportedError: Unknown name; a newer ckstore wrote it.
    """
    word = name.removeprefix(BUILT_IN)
    kind, _, type_name = word.partition(":")
    try:
        if kind in KINDS:
            return build_named(kind, type_name, state)
        if word in _ROW_NAMED:
            return _ROW_NAMED[word].make(state)
    except (ValueError, TypeError, ArithmeticError, AttributeError):
        raise MalformedError("a stored leaf does not have the form of its type", where=repr(name[:80])) from None
    raise unknown_conversion(name)


def unknown_conversion(name: str) -> UnsupportedError:
    """Return the error for a conversion of a newer ckstore."""
    return UnsupportedError(
        "this version of ckstore does not know a type of leaf in the state",
        where=repr(name[:128]),
        todo="use a newer ckstore, or select other leaves with only=",
    )


def is_standard(name: str) -> bool:
    """Say whether ``build_standard`` knows a name."""
    word = name.removeprefix(BUILT_IN)
    return name.startswith(BUILT_IN) and (word in _ROW_NAMED or word.partition(":")[0] in KINDS)


def update_in_place(target: object, made: object) -> object:
    """Return the live object with the content of ``made``; ``made`` itself if the live object cannot be changed."""
    if isinstance(target, dict) and isinstance(made, dict):
        return update_dict(target, made)
    if isinstance(target, list):
        return update_list(target, made)
    return target if _update_standard(target, made) else made


def update_dict(target: dict[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
    """Fill a live dict with the items of ``made``, in the same order; return ``made`` if the classes differ.

    The live dict is filled in both cases, because other objects may refer to it.
    """
    target.clear()
    # Counter.update adds counts, which is the same for an empty Counter.
    target.update(made)
    if type(target) is not type(made):
        return made
    if isinstance(target, defaultdict) and isinstance(made, defaultdict):
        target.default_factory = made.default_factory
    return target


def update_list(target: object, items: object) -> object:
    """Fill a live list with the items of another list; return ``items`` unless both are lists."""
    if isinstance(target, list) and isinstance(items, list):
        target[:] = items
        return target
    return items


def _update_standard(target: Any, made: Any) -> bool:
    """Fill a live object with the content of another object of its type; False: it must be replaced."""
    row = _ROW_OF.get(type(target))
    if row is None:
        return type(target).__hash__ is None and update_dataclass(target, made)
    return row.update is not None and type(made) is type(target) and row.update(target, made)


def _order(item: Any) -> tuple[str, str]:
    """Return a sort key for members of a set; equal in every process for plain values."""
    if isinstance(item, (tuple, frozenset)):
        inner = [_order(each) for each in item]
        return type(item).__qualname__, repr(sorted(inner) if isinstance(item, frozenset) else inner)
    # Python refuses to convert very long integers to decimal.
    return type(item).__qualname__, f"{item:x}" if type(item) is int else repr(item)


def _in_order(members: Any) -> list[Any]:
    return sorted(members, key=_order)


def _set_of(kind: type) -> Callable[[Any], Any]:
    return lambda state: kind(distinct(_checked(state, list)))


def _checked(state: Any, kind: type[Any], *kinds: type) -> Any:
    """Return a state after checking its type, and the types of its items if it is a tuple."""
    if type(state) is not kind or (kinds and list(map(type, state)) != list(kinds)):
        raise ValueError(kind)
    return state


def _queue_parts(queue: deque[Any]) -> dict[str, Any]:
    return {"items": list(queue), "maxlen": queue.maxlen}


def _queue_of(state: Any) -> deque[Any]:
    if set(_checked(state, dict)) != {"items", "maxlen"}:
        raise ValueError("not the state of a queue")
    items, length = state["items"], state["maxlen"]
    if type(items) is not list or not (length is None or (type(length) is int and len(items) <= length)):
        raise ValueError("the queue is longer than its maxlen")
    return deque(items, length)


def _update_queue(target: deque[Any], made: deque[Any]) -> bool:
    if target.maxlen != made.maxlen:
        return False
    target.clear()
    target.extend(made)
    return True


def _update_set(target: set[Any], made: set[Any]) -> bool:
    target.clear()
    target.update(made)
    return True


def _attributes_of(space: Any) -> dict[str, Any]:
    attributes = dict(vars(space))
    if not all(type(name) is str for name in attributes):
        raise ValueError("the name of an attribute is not a str")
    return attributes


def _namespace_of(kind: type) -> Callable[[Any], Any]:
    def make(state: Any) -> Any:
        made = kind()
        if not all(type(name) is str for name in _checked(state, dict)):
            raise ValueError("the name of an attribute is not a str")
        vars(made).update(state)
        return made

    return make


def _update_namespace(target: Any, made: Any) -> bool:
    vars(target).clear()
    vars(target).update(vars(made))
    return True


def _path_of(kind: type) -> Callable[[Any], Any]:
    return lambda text: _if_same_text(kind(_checked(text, str)), text)


def _if_same_text(made: Any, text: str) -> Any:
    if str(made) != text:
        raise ValueError(text)
    return made


def _fraction_of(state: Any) -> Fraction:
    made = Fraction(*_checked(state, tuple, int, int))
    if (made.numerator, made.denominator) != state:
        raise ValueError("the fraction is not in lowest terms")
    return made


def _parts_of_time(time: Any) -> tuple[Any, ...]:
    date = (time.year, time.month, time.day) if isinstance(time, datetime.datetime) else ()
    return (*date, time.hour, time.minute, time.second, time.microsecond, time.tzinfo, time.fold)


def _time_of(kind: type, word: str, count: int) -> Callable[[Any], Any]:
    def make(state: Any) -> Any:
        *numbers, zone, fold = _checked(state, tuple)
        if len(numbers) != count or not all(type(each) is int for each in (*numbers, fold)):
            raise ValueError("not the fields of a time")
        if isinstance(zone, StandIn):
            kind(*numbers, fold=fold)
            return StandIn(word, "", state)
        return kind(*numbers, tzinfo=zone, fold=fold)

    return make


def _timedelta_of(state: Any) -> datetime.timedelta:
    made = datetime.timedelta(*_checked(state, tuple, int, int, int))
    if (made.days, made.seconds, made.microseconds) != state:
        raise ValueError("the duration is not normalized")
    return made


def _offset_of(state: Any) -> datetime.timezone:
    made = datetime.timezone(*_checked(state, tuple))
    if made.__getinitargs__() != state:  # type: ignore[attr-defined]
        raise ValueError("the UTC offset is not normalized")
    return made


def _zone_key(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise ValueError("the time zone has no key")
    return zone.key


def _zone_of(key: Any) -> Any:
    try:
        return zoneinfo.ZoneInfo(_checked(key, str))
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        # This machine lacks the zone: a time in it becomes a stand-in with its fields.
        return StandIn("zone", "", key)


def _date_parts(date: datetime.date) -> tuple[int, int, int]:
    return date.year, date.month, date.day


def _slice_of(state: Any) -> slice:
    start, stop, step = _checked(state, tuple)
    return slice(start, stop, step)


def _by_rank(values: PerRankValues) -> dict[int, Any]:
    _values_by_rank(dict(values))
    return dict(sorted(values.items()))


def _values_by_rank(state: Any) -> PerRankValues:
    if not _checked(state, dict) or not all(type(rank) is int and rank >= 0 for rank in state):
        raise ValueError("its keys are not the numbers of ranks")
    return PerRankValues(state)


def _update_values(target: PerRankValues, made: PerRankValues) -> bool:
    target.clear()
    target.update(made)
    return True


_PATHS: tuple[type[PurePath], ...] = (PosixPath, PurePosixPath, PureWindowsPath)
_TABLE = (
    _StandardType("set", set, _in_order, _set_of(set), _update_set),
    _StandardType("frozenset", frozenset, _in_order, _set_of(frozenset)),
    _StandardType("deque", deque, _queue_parts, _queue_of, _update_queue),
    _StandardType(
        "SimpleNamespace", SimpleNamespace, _attributes_of, _namespace_of(SimpleNamespace), _update_namespace
    ),
    _StandardType(
        "Namespace", argparse.Namespace, _attributes_of, _namespace_of(argparse.Namespace), _update_namespace
    ),
    _StandardType("bytearray", bytearray, bytes, lambda state: bytearray(_checked(state, bytes))),
    _StandardType(
        "range",
        range,
        lambda numbers: (numbers.start, numbers.stop, numbers.step),
        lambda state: range(*_checked(state, tuple, int, int, int)),
    ),
    _StandardType("slice", slice, lambda item: (item.start, item.stop, item.step), _slice_of),
    _StandardType("UUID", UUID, lambda number: number.bytes, lambda state: UUID(bytes=_checked(state, bytes))),
    *(_StandardType(kind.__name__, kind, str, _path_of(kind)) for kind in _PATHS),
    _StandardType("Fraction", Fraction, lambda number: (number.numerator, number.denominator), _fraction_of),
    _StandardType("Decimal", Decimal, str, lambda text: _if_same_text(Decimal(_checked(text, str)), text)),
    _StandardType(
        "date", datetime.date, _date_parts, lambda state: datetime.date(*_checked(state, tuple, int, int, int))
    ),
    _StandardType("time", datetime.time, _parts_of_time, _time_of(datetime.time, "time", 4)),
    _StandardType("datetime", datetime.datetime, _parts_of_time, _time_of(datetime.datetime, "datetime", 7)),
    _StandardType(
        "timedelta", datetime.timedelta, lambda item: (item.days, item.seconds, item.microseconds), _timedelta_of
    ),
    _StandardType("timezone", datetime.timezone, lambda zone: zone.__getinitargs__(), _offset_of),
    _StandardType("zone", zoneinfo.ZoneInfo, _zone_key, _zone_of),
    _StandardType("per_rank", PerRankValues, _by_rank, _values_by_rank, _update_values),
)
_ROW_OF: Mapping[type, _StandardType] = {row.kind: row for row in _TABLE}
_ROW_NAMED: Mapping[str, _StandardType] = {row.word: row for row in _TABLE}


def pack_numbers(items: list[Any] | tuple[Any, ...], *, only_counts: bool) -> tuple[str, Any] | None:
    """Return conversion name and child of a long list or tuple of numbers; None: it is short, or not of numbers.

    Args:
        items: The list or tuple.
        only_counts: Pack consecutive ints only, whose values the tree still shows.
    """
    if len(items) < NUMBERS_MIN:
        return None
    kinds = set(map(type, items))
    dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    kind = _PACKED_KINDS[type(items)]
    if dtype == "<i8":
        first, end = items[0], items[0] + len(items)
        if not all(KEY_INT_MIN <= bound <= KEY_INT_MAX for bound in (min(items), max(items))):
            return None
        if len(items) <= COUNT_MAX and end <= KEY_INT_MAX and all(map(int.__eq__, items, range(first, end))):
            return COUNT + kind, (first, end)
    return None if only_counts else (NUMBERS + kind, np.array(items, dtype))


def unpack_numbers(name: str, child: Any) -> Any:
    """Return the list or tuple that ``pack_numbers`` packed.

    Raises:
        MalformedError: ``pack_numbers`` does not return this child.
    """
    stem = name.removesuffix(_TUPLE)
    kind = tuple if name.endswith(_TUPLE) else list
    if stem == COUNT and type(child) is tuple and [type(each) for each in child] == [int, int]:
        first, end = child
        if NUMBERS_MIN <= end - first <= COUNT_MAX:
            return kind(range(first, end))
    if stem == NUMBERS and isinstance(child, np.ndarray) and child.ndim == 1 and child.dtype.str in _DTYPES.values():
        return kind(child.tolist())
    raise MalformedError("a stored list of numbers does not have the form of its type", where=repr(name[:80]))


def exact_repr(value: object) -> str | None:
    """Return a text that identifies a value together with all its types; None: there is no such text.

    This is many times faster than building a tree.
    """
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        if not level:
            try:
                return repr(value)
            except ValueError:
                # Python refuses to convert very long integers to decimal.
                return None
        kinds = set(map(type, level))
        # The repr of other types is arbitrary, and all NaNs have the same repr.
        if not kinds <= _REPR_TYPES or (kinds & {float, complex} and any(map(ne, level, level))):
            return None
        inner: list[Any] = []
        for each in level if kinds & {list, tuple, dict} else ():
            if type(each) in (list, tuple, dict):
                inner += each
                if type(each) is dict:
                    inner += each.values()
            if len(inner) > _REPR_COUNT_MAX:
                return None
        level = inner
    return None
