"""Replace the objects in a foreign state by their plain fields. No class is imported and no code of the file runs.

The object of a config class (argparse.Namespace, a dataclass, an Enum, a path) consists of a few named plain values. It
becomes a dict of them. Objects of Python's own types become what they were: sets, dates, queues. An object that holds
tensors, such as a model or an optimizer, is more than its fields. It stays as it is, and the caller refuses it or
leaves it out.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from ckstore.format.tree import FACTORIES, Path, place_of
from ckstore.ops.interop.unpickle import Record, StandIn, Symbol

_LEAVES: Mapping[str, tuple[Callable[..., Any], tuple[tuple[type, ...], ...]]] = {
    "builtins.complex": (complex, ((float, float),)),
    "builtins.range": (range, ((int, int, int),)),
    # An integer argument is not allowed: it would allocate that many bytes.
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
"""Name of a type -> function that creates a value, and the argument types with which such values are pickled."""

CONTAINERS = ("collections.deque", "collections.defaultdict")
"""Types whose objects are created empty and then filled; see ``make_container``."""


def make_leaf(name: str, arguments: tuple[Any, ...]) -> object | None:
    """Return the value of a type in the table for these arguments, or None."""
    if name == "builtins.slice" and len(arguments) == 3:
        return slice(*arguments)
    make, signatures = _LEAVES.get(name, (None, ()))
    if make is None or tuple(map(type, arguments)) not in signatures:
        return None
    try:
        value: object = make(*arguments)
    except (ValueError, TypeError, ArithmeticError):
        return None
    return value


def make_container(name: str, arguments: tuple[Any, ...], content: Any) -> object | None:
    """Return the deque or defaultdict for these arguments and items; None for any other type.

    Args:
        name: The name of its type.
        arguments: The arguments of the call.
        content: The list or dict of its items.
    """
    if name == "collections.deque" and (isinstance(content, list) or not content):
        initial, length = arguments if len(arguments) == 2 else (arguments, None)
        is_valid = not initial and (length is None or (type(length) is int and length >= len(content)))
        return deque(content, length) if is_valid else None
    if name == "collections.defaultdict" and (isinstance(content, dict) or not content) and len(arguments) == 1:
        factories = {f"builtins.{word}": result for word, result in FACTORIES.items()} | {None: None}
        return defaultdict(factories[arguments[0]], content) if arguments[0] in factories else None
    return None


_SCALARS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
# A commit stores values of these torch types as they are.
_STORED_TYPES = frozenset({("torch", "dtype"), ("torch", "device"), ("torch", "Size")})
_FORM_WORDS: Mapping[type, str] = {dict: "a dict of its fields", list: "a list of its parts"}
_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}")


class _NotPlainError(Exception):
    """An object contains something that is not a plain value."""


class PlainFields:
    """Replaces the objects of one state.

    Args:
        containers: Dicts and lists that replace objects, by ``id``; see ``StandIns.containers``.

    Attributes:
        notes: What was replaced, in whole sentences.
        leaf_count: Number of leaves outside of all objects.
        left_out: Place -> what is not stored of it.
    """

    def __init__(self, containers: Mapping[int, tuple[str, tuple[Any, ...], Any]]) -> None:
        self._containers = containers
        self._open: set[int] = set()
        self.notes: list[str] = []
        self.leaf_count = 0
        self.left_out: dict[str, str] = {}
        self._dropped: list[str] = []

    def convert(self, item: Any, path: Path = ()) -> Any:
        """Return a part of a state in which every object with plain fields is replaced by them."""
        name = self._name_of(item)
        if name is not None:
            return self._convert_object(item, name, path)
        if not isinstance(item, (dict, list, tuple, set, frozenset)):
            self.leaf_count += 1
            return item
        if id(item) in self._open:
            # A container that contains itself. The commit refuses it by its path.
            return item
        self._open.add(id(item))
        try:
            return self._convert_container(item, path)
        finally:
            self._open.discard(id(item))

    def _convert_container(self, item: Any, path: Path) -> Any:
        if isinstance(item, (tuple, set, frozenset)):
            return _with_members(item, [self.convert(child, (*path, index)) for index, child in enumerate(item)])
        if isinstance(item, dict) and not all(type(key) in (str, int) for key in item):
            self._make_keys_plain(item, path)
        for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
            item[key] = self.convert(child, (*path, key))
        return item

    def _make_keys_plain(self, item: dict[Any, Any], path: Path) -> None:
        self._dropped = []
        try:
            result = self._with_plain_keys(item.items(), lambda child: child)
        except _NotPlainError:
            # The commit refuses such a key by the path of its dict.
            return
        if any(one is not other for one, other in zip(item, result, strict=True)):
            self.notes.append(f"{place_of(path)} has objects for keys; their plain values are stored.")
            item.clear()
            item.update(result)
            self._list_dropped(path)

    def _convert_object(self, item: Any, name: str, path: Path) -> Any:
        self._dropped = []
        try:
            result = self._plain(item, may_hold_tensors=name in _NAMESPACES)
        except _NotPlainError:
            if id(item) not in self._containers:
                return item
            # A container of a special class, such as a defaultdict of tensors.
            content = self._convert_container(item, path)
            self._dropped = []
            result = self._with_arguments(item, name, content)
        self._list_dropped(path)
        if name in (f"{type(result).__module__}.{type(result).__qualname__}", "_codecs.encode"):
            self.leaf_count += 1
            return result
        form = _FORM_WORDS.get(type(result), f"a plain value of type {type(result).__name__}")
        self.notes.append(f"{place_of(path)} is an object of {name}; it is stored as {form}.")
        return result

    def _list_dropped(self, path: Path) -> None:
        if self._dropped:
            self.left_out[place_of(path)] = f"{', '.join(self._dropped)}: only its content is stored"

    def _name_of(self, item: Any) -> str | None:
        """Return the name of the class of an object; None for a plain value."""
        if isinstance(item, StandIn):
            # copyreg passes the real class as the first argument.
            first = item.arguments[0] if item.kind == "copyreg._reconstructor" and item.arguments else None
            return item.kind if first is None else self._name_of(first) or item.kind
        if isinstance(item, Record):
            first = item.arguments[0] if item.kind.name == "_reconstructor" and item.arguments else item.kind
            return f"{first.module}.{first.name}" if isinstance(first, Symbol) else item.kind.name
        if isinstance(item, Symbol):
            return f"{item.module}.{item.name}"
        if isinstance(item, type):
            return str(getattr(item, "kind", item.__name__))
        return self._containers[id(item)][0] if id(item) in self._containers else None

    def _plain(self, item: Any, *, may_hold_tensors: bool = False) -> Any:
        if isinstance(item, _SCALARS) or (type(item).__module__, type(item).__name__) in _STORED_TYPES:
            return item
        if isinstance(item, (Symbol, type)):
            return self._name_of(item)
        if id(item) in self._open:
            raise _NotPlainError
        self._open.add(id(item))
        try:
            return self._plain_object(item, may_hold_tensors)
        finally:
            self._open.discard(id(item))

    def _plain_object(self, item: Any, may_hold_tensors: bool) -> Any:
        def plain(child: Any) -> Any:
            return self._plain(child, may_hold_tensors=may_hold_tensors)

        if isinstance(item, dict):
            attributes = getattr(item, "__dict__", {})
            fields = _union(
                self._with_plain_keys(item.items(), plain), self._with_plain_keys(attributes.items(), plain)
            )
            return self._with_arguments(item, self._name_of(item), fields)
        if isinstance(item, (list, tuple, set, frozenset)):
            return self._with_arguments(item, self._name_of(item), _with_members(item, [plain(each) for each in item]))
        if isinstance(item, (StandIn, Record)):
            return self._fields(item, plain)
        is_scalar = type(item).__module__ == "numpy" and getattr(item, "shape", None) == ()
        if may_hold_tensors or is_scalar:
            return item
        raise _NotPlainError

    def _fields(self, item: Any, plain: Callable[[Any], Any]) -> Any:
        name = self._name_of(item) or ""
        if name.endswith(("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")):
            return _numpy_value(item, plain)
        items, pairs = (item.items, item.pairs) if isinstance(item, Record) else ([], [])
        states = item.state if isinstance(item.state, tuple) and len(item.state) == 2 else (item.state,)
        if not all(state is None or isinstance(state, dict) for state in states):
            raise _NotPlainError
        fields = _union(self._with_plain_keys(pairs, plain), *(plain(state or {}) for state in states))
        if fields and items:
            raise _NotPlainError
        arguments = self._arguments_of(item)
        if fields or items or name in CONTAINERS:
            return self._with_arguments(item, name, [plain(each) for each in items] if items else fields)
        result = tuple(plain(argument) for argument in arguments)
        if name.startswith("pathlib.") and all(isinstance(part, str) for part in result):
            return str(PurePosixPath(*result))
        if name == "_codecs.encode" and len(result) == 2 and result[1] in ("latin1", "latin-1"):
            return result[0].encode("latin1")
        leaf = make_leaf(name, result)
        if leaf is not None or not result:
            return {} if leaf is None else leaf
        return result[0] if len(result) == 1 else list(result)

    def _arguments_of(self, item: Any) -> tuple[Any, ...]:
        """Return the arguments that an object was created with, without its class."""
        if not isinstance(item, (StandIn, Record)):
            return self._containers[id(item)][1] if id(item) in self._containers else ()
        if "_reconstructor" in (item.kind.name if isinstance(item, Record) else item.kind):
            # The arguments are the class, a base class of Python's own, and the content of that base.
            return tuple(each for each in item.arguments[2:] if each is not None)
        return item.arguments

    def _with_arguments(self, item: Any, name: str | None, content: Any) -> Any:
        """Return the container for the content of an object. Arguments that it cannot express are noted as dropped."""
        try:
            arguments = tuple(map(self._plain, self._arguments_of(item)))
        except _NotPlainError:
            arguments = None
        found = make_container(name or "", arguments, content) if arguments is not None else None
        if found is None and arguments != ():
            self._dropped.append(f"the arguments with which {name} was created")
        return content if found is None else found

    def _with_plain_keys(self, pairs: Iterable[tuple[Any, Any]], plain: Callable[[Any], Any]) -> dict[Any, Any]:
        """Return a dict with plain keys and values."""
        result: dict[Any, Any] = {}
        for key, child in pairs:
            plain_key = self._key(key)
            if plain_key in result:
                raise _NotPlainError
            result[plain_key] = plain(child)
        return result

    def _key(self, key: Any) -> Any:
        result = self._plain(key)
        try:
            hash(result)
        except TypeError:
            raise _NotPlainError from None
        return result


def _union(*parts: dict[Any, Any]) -> dict[Any, Any]:
    """Return the union of the dicts; raise if two of them have different values for one key."""
    result: dict[Any, Any] = {}
    for part in parts:
        if not all(_is_same(result[key], part[key]) for key in result.keys() & part.keys()):
            raise _NotPlainError
        result |= part
    return result


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or (repr(one) == repr(other) and bool(one == other))
    except (ValueError, RuntimeError):
        # Arrays cannot be compared this way.
        return False


def _with_members(item: Any, members: list[Any]) -> Any:
    """Return the sequence or set with other members; a list if a set cannot contain them."""
    if not isinstance(item, list) and all(one is other for one, other in zip(members, item, strict=True)):
        return item
    try:
        result = type(item)(members)
    except TypeError:
        return sorted(members, key=repr)
    return result if len(result) == len(members) else sorted(members, key=repr)


def _numpy_value(item: Any, plain: Callable[[Any], Any]) -> Any:
    """Return the array or scalar that a pickle describes, for numeric dtypes only."""
    import numpy as np

    try:
        if len(item.arguments) == 4:
            # Protocol 5.
            content, dtype, shape, layout = item.arguments
        elif item.state is None:
            (dtype, content), shape, layout = item.arguments, None, "C"
        else:
            _, shape, dtype, is_fortran, content = item.state
            layout = "F" if is_fortran else "C"
        if _NUMPY_DTYPE.fullmatch(dtype.arguments[0]) is None:
            raise _NotPlainError
        order = dtype.state[1] if dtype.state else "<"
        result: Any = np.frombuffer(plain(content), np.dtype(dtype.arguments[0]).newbyteorder(order))
        return result[0] if shape is None else result.reshape(shape, order=layout).copy(order="K")
    except (TypeError, ValueError, IndexError, AttributeError):
        raise _NotPlainError from None
