"""Values of Python's own types in a foreign file, made of what was pickled of them: no class of the file is needed."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ckstore.tree import FACTORIES

_LEAVES: Mapping[str, tuple[Callable[..., Any], tuple[tuple[type, ...], ...]]] = {
    "builtins.complex": (complex, ((float, float),)),
    "builtins.range": (range, ((int, int, int),)),
    # Never with an integer: that many bytes would be made.
    "builtins.bytearray": (bytearray, ((), (bytes,))),
    "builtins.bytes": (bytes, ((), (bytes,))),
    "builtins.set": (set, ((list,),)),
    "builtins.frozenset": (frozenset, ((list,),)),
    "collections.Counter": (Counter, ((dict,),)),
    "datetime.date": (datetime.date, ((bytes,),)),
    "datetime.time": (datetime.time, ((bytes,), (bytes, datetime.timezone))),
    "datetime.datetime": (datetime.datetime, ((bytes,), (bytes, datetime.timezone))),
    "datetime.timedelta": (datetime.timedelta, ((int, int, int),)),
    "datetime.timezone": (datetime.timezone, ((datetime.timedelta,), (datetime.timedelta, str))),
    "fractions.Fraction": (Fraction, ((int, int), (str,))),
    "decimal.Decimal": (Decimal, ((str,),)),
}
"""By the name of a type: what makes a value of it, and the types of the arguments that it is pickled with."""

CONTAINERS = ("collections.deque", "collections.defaultdict")
"""What is made empty, and filled; see ``container_of``."""


def leaf_of(name: str, arguments: tuple[Any, ...]) -> object | None:
    """Return the value of a type that was to be made with these arguments; None: it is none of the table."""
    if name == "builtins.slice" and len(arguments) == 3:
        return slice(*arguments)
    make, known = _LEAVES.get(name, (None, ()))
    if make is None or tuple(map(type, arguments)) not in known:
        return None
    try:
        made: object = make(*arguments)
    except (ValueError, TypeError, ArithmeticError):
        return None
    return made


def container_of(name: str, arguments: tuple[Any, ...], held: Any) -> object | None:
    """Return the queue or dict that was to be made with these arguments and filled; None: it is neither.

    Args:
        name: The name of its type.
        arguments: With what it was to be made.
        held: The list or dict of what it was to be filled with.
    """
    if name == "collections.deque" and (isinstance(held, list) or not held):
        begun, length = arguments if len(arguments) == 2 else (arguments, None)
        is_sound = not begun and (length is None or (type(length) is int and length >= len(held)))
        return deque(held, length) if is_sound else None
    if name == "collections.defaultdict" and (isinstance(held, dict) or not held) and len(arguments) == 1:
        factories = {f"builtins.{word}": made for word, made in FACTORIES.items()} | {None: None}
        return defaultdict(factories[arguments[0]], held) if arguments[0] in factories else None
    return None
