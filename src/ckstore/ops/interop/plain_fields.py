"""Objects of a foreign file as the plain fields that were pickled of them; no class is imported, and no code is run.

A config of any class (argparse.Namespace, a dataclass, an Enum, a path) is a few plain values under names: a dict of
its fields says the same. An object that holds tensors, a model or an optimizer for example, is more than its fields. It
stays as it is: the caller refuses it, or leaves it out.

Values of Python's own types in a foreign file, made of what was pickled of them: no class of the file is needed.
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
from ckstore.ops.interop.unpickle import Record, Symbol

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


_SCALARS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
# Of what may be in a field, these are stored as they are.
_STORED_TYPES = frozenset({("torch", "dtype"), ("torch", "device"), ("torch", "Size")})
_FORMS: Mapping[type, str] = {dict: "a dict of its fields", list: "a list of its parts"}
_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}")


class _NotPlainError(Exception):
    """An object holds what is no plain value."""


class PlainFields:
    """Replaces the objects of one state.

    Args:
        dicts: By ``id``, the name and arguments of what a dict or a list stands for; see ``StandIns.kind_of``.

    Attributes:
        notes: What was replaced, in whole sentences.
        leaf_count: Leaves that stood outside of all objects.
        left_out: Place -> what is not stored of it.
    """

    def __init__(self, dicts: Mapping[int, tuple[str, tuple[Any, ...], Any]]) -> None:
        from ckstore.ops.interop.stand_ins import StandIn

        self._stand_in = StandIn
        self._dicts = dicts
        self._open: set[int] = set()
        self.notes: list[str] = []
        self.leaf_count = 0
        self.left_out: dict[str, str] = {}
        self._dropped: list[str] = []

    def of(self, item: Any, path: Path = ()) -> Any:
        """Return a part of a state with every object replaced by its fields where these are plain."""
        name = self._name_of(item)
        if name is not None:
            return self._of_object(item, name, path)
        if not isinstance(item, (dict, list, tuple, set, frozenset)):
            self.leaf_count += 1
            return item
        if id(item) in self._open:
            # A container that holds itself; a commit refuses it by its path.
            return item
        self._open.add(id(item))
        try:
            return self._of_container(item, path)
        finally:
            self._open.discard(id(item))

    def _of_container(self, item: Any, path: Path) -> Any:
        if isinstance(item, (tuple, set, frozenset)):
            return _with_members(item, [self.of(child, (*path, index)) for index, child in enumerate(item)])
        if isinstance(item, dict) and not all(type(key) in (str, int) for key in item):
            self._make_keys_plain(item, path)
        for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
            item[key] = self.of(child, (*path, key))
        return item

    def _make_keys_plain(self, item: dict[Any, Any], path: Path) -> None:
        self._dropped = []
        try:
            made = self._keyed(item.items(), lambda child: child)
        except _NotPlainError:
            # A commit refuses such a key by the path of its dict.
            return
        if any(one is not other for one, other in zip(item, made, strict=True)):
            self.notes.append(f"{place_of(path)} has objects for keys; it is stored with their plain values.")
            item.clear()
            item.update(made)
            self._list_dropped(path)

    def _of_object(self, item: Any, name: str, path: Path) -> Any:
        self._dropped = []
        try:
            made = self._plain(item, may_hold_tensors=name in _NAMESPACES)
        except _NotPlainError:
            if id(item) not in self._dicts:
                return item
            # A container of a class of its own, such as a defaultdict of tensors.
            held = self._of_container(item, path)
            self._dropped = []
            made = self._with_arguments(item, name, held)
        self._list_dropped(path)
        if name in (f"{type(made).__module__}.{type(made).__qualname__}", "_codecs.encode"):
            self.leaf_count += 1
            return made
        form = _FORMS.get(type(made), f"a plain value of type {type(made).__name__}")
        self.notes.append(f"{place_of(path)} is an object of {name}; it is stored as {form}.")
        return made

    def _list_dropped(self, path: Path) -> None:
        if self._dropped:
            self.left_out[place_of(path)] = f"{', '.join(self._dropped)}: only what it holds is stored"

    def _name_of(self, item: Any) -> str | None:
        """Return the name of the class of an object; None: it is none."""
        if isinstance(item, self._stand_in):
            # What copyreg made carries its own class as the first argument.
            first = item.arguments[0] if item.kind == "copyreg._reconstructor" and item.arguments else None
            return item.kind if first is None else self._name_of(first) or item.kind
        if isinstance(item, Record):
            first = item.arguments[0] if item.kind.name == "_reconstructor" and item.arguments else item.kind
            return f"{first.module}.{first.name}" if isinstance(first, Symbol) else item.kind.name
        if isinstance(item, Symbol):
            return f"{item.module}.{item.name}"
        if isinstance(item, type):
            return str(getattr(item, "kind", item.__name__))
        return self._dicts[id(item)][0] if id(item) in self._dicts else None

    def _plain(self, item: Any, *, may_hold_tensors: bool = False) -> Any:
        if isinstance(item, _SCALARS) or (type(item).__module__, type(item).__name__) in _STORED_TYPES:
            return item
        if isinstance(item, (Symbol, type)):
            return self._name_of(item)
        if id(item) in self._open:
            raise _NotPlainError
        self._open.add(id(item))
        try:
            return self._plain_thing(item, may_hold_tensors)
        finally:
            self._open.discard(id(item))

    def _plain_thing(self, item: Any, may_hold_tensors: bool) -> Any:
        def plain(child: Any) -> Any:
            return self._plain(child, may_hold_tensors=may_hold_tensors)

        if isinstance(item, dict):
            attributes = getattr(item, "__dict__", {})
            fields = _united(self._keyed(item.items(), plain), self._keyed(attributes.items(), plain))
            return self._with_arguments(item, self._name_of(item), fields)
        if isinstance(item, (list, tuple, set, frozenset)):
            return self._with_arguments(item, self._name_of(item), _with_members(item, [plain(each) for each in item]))
        if isinstance(item, (self._stand_in, Record)):
            return self._fields(item, plain)
        is_scalar = type(item).__module__ == "numpy" and getattr(item, "shape", None) == ()
        if may_hold_tensors or is_scalar:
            return item
        raise _NotPlainError

    def _fields(self, item: Any, plain: Callable[[Any], Any]) -> Any:
        name = self._name_of(item) or ""
        if name.endswith(("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")):
            return _numpy_thing(item, plain)
        items, pairs = (item.items, item.pairs) if isinstance(item, Record) else ([], [])
        states = item.state if isinstance(item.state, tuple) and len(item.state) == 2 else (item.state,)
        if not all(state is None or isinstance(state, dict) for state in states):
            raise _NotPlainError
        fields = _united(self._keyed(pairs, plain), *(plain(state or {}) for state in states))
        if fields and items:
            raise _NotPlainError
        arguments = self._arguments_of(item)
        if fields or items or name in CONTAINERS:
            return self._with_arguments(item, name, [plain(each) for each in items] if items else fields)
        made = tuple(plain(argument) for argument in arguments)
        if name.startswith("pathlib.") and all(isinstance(part, str) for part in made):
            return str(PurePosixPath(*made))
        if name == "_codecs.encode" and len(made) == 2 and made[1] in ("latin1", "latin-1"):
            return made[0].encode("latin1")
        leaf = leaf_of(name, made)
        if leaf is not None or not made:
            return {} if leaf is None else leaf
        return made[0] if len(made) == 1 else list(made)

    def _arguments_of(self, item: Any) -> tuple[Any, ...]:
        """Return with what an object was to be made, beyond its class."""
        if not isinstance(item, (self._stand_in, Record)):
            return self._dicts[id(item)][1] if id(item) in self._dicts else ()
        if "_reconstructor" in (item.kind.name if isinstance(item, Record) else item.kind):
            # Its class, a base of Python's own, and what that base holds.
            return tuple(each for each in item.arguments[2:] if each is not None)
        return item.arguments

    def _with_arguments(self, item: Any, name: str | None, held: Any) -> Any:
        """Return a container with what an object holds; what that was to be made with is noted where it is lost."""
        try:
            arguments = tuple(map(self._plain, self._arguments_of(item)))
        except _NotPlainError:
            arguments = None
        found = container_of(name or "", arguments, held) if arguments is not None else None
        if found is None and arguments != ():
            self._dropped.append(f"the arguments with which {name} was made")
        return held if found is None else found

    def _keyed(self, pairs: Iterable[tuple[Any, Any]], plain: Callable[[Any], Any]) -> dict[Any, Any]:
        """Return a dict with plain keys."""
        made: dict[Any, Any] = {}
        for key, child in pairs:
            plain_key = self._key(key)
            if plain_key in made:
                raise _NotPlainError
            made[plain_key] = plain(child)
        return made

    def _key(self, key: Any) -> Any:
        made = self._plain(key)
        try:
            hash(made)
        except TypeError:
            raise _NotPlainError from None
        return made


def _united(*parts: dict[Any, Any]) -> dict[Any, Any]:
    """Return all that the dicts hold; what two of them hold, and is not the same, is not plain."""
    made: dict[Any, Any] = {}
    for part in parts:
        if not all(_is_same(made[key], part[key]) for key in made.keys() & part.keys()):
            raise _NotPlainError
        made |= part
    return made


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or (repr(one) == repr(other) and bool(one == other))
    except (ValueError, RuntimeError):
        # Arrays are not compared.
        return False


def _with_members(item: Any, members: list[Any]) -> Any:
    """Return members in place of those of a sequence or a set; a list where they can be no members of a set."""
    if not isinstance(item, list) and all(one is other for one, other in zip(members, item, strict=True)):
        return item
    try:
        made = type(item)(members)
    except TypeError:
        return sorted(members, key=repr)
    return made if len(made) == len(members) else sorted(members, key=repr)


def _numpy_thing(item: Any, plain: Callable[[Any], Any]) -> Any:
    """Return the array or the scalar that a pickle describes, of plain numbers."""
    import numpy as np

    try:
        if len(item.arguments) == 4:
            # As the pickles of protocol 5 have it.
            content, dtype, shape, layout = item.arguments
        elif item.state is None:
            (dtype, content), shape, layout = item.arguments, None, "C"
        else:
            _, shape, dtype, is_fortran, content = item.state
            layout = "F" if is_fortran else "C"
        if _NUMPY_DTYPE.fullmatch(dtype.arguments[0]) is None:
            raise _NotPlainError
        order = dtype.state[1] if dtype.state else "<"
        made: Any = np.frombuffer(plain(content), np.dtype(dtype.arguments[0]).newbyteorder(order))
        return made[0] if shape is None else made.reshape(shape, order=layout).copy(order="K")
    except (TypeError, ValueError, IndexError, AttributeError):
        raise _NotPlainError from None
