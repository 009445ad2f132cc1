"""Enum members, named tuples and dataclasses as leaves: stored by the name of their class and what they hold.

A class is code, and a checkpoint is data from elsewhere. So reading one never imports a module and never runs a
function of a class: a class counts only if its module is loaded already, if it stands there under its name, and if it
is such a class with the same fields. In every other case what was stored comes back as a ``StandIn``.

Invariants:
- No ``__init__``, ``__new__``, ``__post_init__``, ``__setattr__`` or property of a named class runs here.
- A ``StandIn`` is stored again as what it stands for.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ckstore.format.tree import BUILT_IN

KINDS = ("enum", "namedtuple", "dataclass")
"""What the names of these conversions go on with; behind it stand the module and the name of the class."""

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class that was made by a class statement, or as if."""

_PLAIN_FACTORIES = (list, dict, set, tuple, str, int, float, bool)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What comes back in place of an object whose class this process does not have, or has in another form.

    Attributes:
        kind: What it was: ``"enum"``, ``"namedtuple"``, ``"dataclass"``, or a type of a library.
        type_name: Module and name of its class, as in ``"trainer.config:Schedule"``.
        content: Its fields by name; of a member of an enum ``name`` and ``value``.
    """

    kind: str
    type_name: str
    content: Any

    def __hash__(self) -> int:
        # The content may be a dict; equal ones have equal names.
        return hash((self.kind, self.type_name))


@dataclasses.dataclass(frozen=True, eq=False)
class DistinctStandIn(StandIn):
    """A stand-in that equals only itself: a member of a set or a key that would be equal to another one, or no key.

    Objects that compare by identity look alike, and a class may since have lost its hash.
    """


def distinct(items: Iterable[Any]) -> list[Any]:
    """Return keys or members that are all different; where classes do not keep them so, stand-ins take their place.

    Raises:
        ValueError: Two are equal, or one can be no key, whatever its class is.
        TypeError: As above.
    """
    found: dict[Any, None] = {}
    for item in items:
        is_twin = _has_hash(item) and item in found
        made = item if _has_hash(item) and not is_twin else _distinct(item, is_twin)
        if made in found:
            raise ValueError("a member or key twice")
        found[made] = None
    return list(found)


def _distinct(item: Any, is_twin: bool) -> Any:
    if type(item) in (tuple, frozenset):
        return type(item)(_distinct(each, is_twin) if is_twin or not _has_hash(each) else each for each in item)
    taken = (f"{BUILT_IN}{item.kind}:{item.type_name}", item.content) if type(item) is StandIn else take_named(item)
    if taken is None:
        return item
    kind, _, type_name = taken[0].removeprefix(BUILT_IN).partition(":")
    return DistinctStandIn(kind, type_name, taken[1])


def _has_hash(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True


def take_named(item: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a conversion, and the fields of an object; None: it is nothing of the kind.

    Raises:
        ValueError: It is, and holds more than fields, or says itself how it is to be stored.
    """
    kind = type(item)
    if isinstance(item, StandIn) and item.kind in KINDS:
        make_named(item.kind, item.type_name, item.content)
        return f"{BUILT_IN}{item.kind}:{item.type_name}", item.content
    if isinstance(item, enum.Enum):
        value = {"value": item._value_} if _is_plain(item._value_) else {}
        return _name("enum", kind), {"name": item._name_, **value}
    if isinstance(item, tuple) and kind is not tuple and _fields_of_tuple(kind) is not None:
        if getattr(item, "__dict__", None):
            raise ValueError("a named tuple with attributes of its own")
        return _name("namedtuple", kind), dict(zip(kind._fields, tuple.__iter__(item), strict=True))
    if dataclasses.is_dataclass(kind):
        return _name("dataclass", kind), _fields_of_dataclass(item)
    return None


def make_named(kind: str, type_name: str, fields: Any) -> object:
    """Return the object of a class of this process, or a StandIn.

    Raises:
        ValueError: The fields are none that ``take_named`` returns.
    """
    if not isinstance(fields, dict) or not all(type(name) is str for name in fields):
        raise ValueError("fields have no names")
    if ":" not in type_name or (kind == "enum" and not {"name"} <= set(fields) <= {"name", "value"}):
        raise ValueError("no name of a class, or of a member of an enum")
    cls = find_class(type_name)
    made = None if cls is None else _MAKERS[kind](cls, fields)
    return StandIn(kind, type_name, fields) if made is None else made


def find_class(type_name: str) -> type | None:
    """Return a class of a module that is loaded, if it stands there under its name; nothing is imported or called."""
    module_name, _, qualified = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for name in qualified.split("."):
        found = _names_in(found).get(name)
    # Of other metaclasses, asking the class a question may run code.
    if type(found) not in (type, abc.ABCMeta, enum.EnumMeta):
        return None
    its_own = (_names_in(found).get("__module__"), type.__dict__["__qualname__"].__get__(found))
    return found if its_own == (module_name, qualified) else None


def _names_in(holder: Any) -> Mapping[str, Any]:
    """Return what a module or class defines, without asking it: a module may import what it is asked for."""
    if issubclass(type(holder), types.ModuleType):
        held: dict[str, Any] = object.__getattribute__(holder, "__dict__")
        return held
    return type.__dict__["__dict__"].__get__(holder) if issubclass(type(holder), type) else {}


def is_found(name: str, item: object) -> bool:
    """Say whether what is stored under a name would get its class back in this process, if it needs one."""
    kind, _, type_name = name.removeprefix(BUILT_IN).partition(":")
    return kind not in KINDS or isinstance(item, StandIn) or find_class(type_name) is type(item)


def renew_dataclass(target: Any, made: Any) -> bool:
    """Give a live object the fields of one that was just made, if both are of one class; no code of it runs."""
    if type(target) is not type(made):
        return False
    _fill(target, _fields_of_dataclass(made))
    return True


def _name(kind: str, cls: type) -> str:
    return f"{BUILT_IN}{kind}:{cls.__module__}:{cls.__qualname__}"


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(_is_plain(each) for each in value)
    return type(value) in (type(None), bool, int, float, complex, str, bytes)


def _fields_of_tuple(cls: type) -> tuple[str, ...] | None:
    fields = getattr(cls, "_fields", None)
    if type(fields) is not tuple or tuple not in cls.__mro__ or not all(type(name) is str for name in fields):
        return None
    return fields


def _fields_of_dataclass(item: Any) -> dict[str, Any]:
    cls = type(item)
    if not _has_plain_layout(cls):
        raise ValueError("a dataclass that is built upon a type that is no class of Python's own")
    if _says_itself_how(cls):
        raise ValueError("a dataclass that says itself how it is to be pickled")
    held = dict(getattr(item, "__dict__", {}))
    names = [field.name for field in dataclasses.fields(item)]
    slots = {name: _slot_of(cls, name) for name in names if name not in held}
    found = {name: slot.__get__(item) for name, slot in slots.items() if slot is not None and hasattr(item, name)}
    # Fields first, in their order, whichever way they are held.
    return {name: found.get(name, held.get(name)) for name in names if name in found or name in held} | held


def _says_itself_how(cls: type) -> bool:
    own = {name: getattr(cls, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")}
    if getattr(own["__getstate__"], "__name__", "") == "_dataclass_getstate":
        # That of a frozen dataclass with slots says what its fields say.
        del own["__getstate__"]
    return any(found is not getattr(object, name, None) for name, found in own.items())


def _has_plain_layout(cls: type) -> bool:
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _slot_of(cls: type, name: str) -> types.MemberDescriptorType | None:
    for base in cls.__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            return found if isinstance(found, types.MemberDescriptorType) else None
    return None


def _fill(item: Any, fields: Mapping[str, Any]) -> None:
    """Set fields where they are held: in slots, or in the dict of the object."""
    for name, value in fields.items():
        slot = _slot_of(type(item), name)
        if slot is None:
            object.__getattribute__(item, "__dict__")[name] = value
        else:
            slot.__set__(item, value)


def _make_enum(cls: type, fields: Mapping[str, Any]) -> object | None:
    if not issubclass(cls, enum.Enum) or type(cls) is not enum.EnumMeta:
        return None
    name, value = fields["name"], fields.get("value")
    members: Mapping[str, enum.Enum] = cls.__dict__["_member_map_"]
    member = members.get(name) if isinstance(name, str) else None
    if member is None and issubclass(cls, enum.Flag) and type(value) is int:
        return _union_of(cls, value)
    # Under the name stands another value today: that is not what was stored.
    is_same = member is not None and ("value" not in fields or _is_same(member._value_, value))
    return member if is_same else None


def _union_of(cls: type[enum.Flag], value: int) -> object | None:
    """Return a union of flags, which has no name of its own; None: its class makes them in a way of its own."""
    if cls._missing_.__func__ is not enum.Flag._missing_.__func__:  # type: ignore[attr-defined]
        return None
    try:
        return cls(value)
    except (ValueError, TypeError):
        return None


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def _make_namedtuple(cls: type, fields: Mapping[str, Any]) -> object | None:
    if _fields_of_tuple(cls) != tuple(fields) or not all(
        base in (tuple, object) or base.__flags__ & _HEAP_TYPE for base in cls.__mro__
    ):
        return None
    return tuple.__new__(cls, fields.values())


def _make_dataclass(cls: type, fields: Mapping[str, Any]) -> object | None:
    if "__dataclass_fields__" not in dir_of(cls) or not _has_plain_layout(cls):
        return None
    fields = {**_defaults(cls, fields), **fields}
    wanted = {field.name for field in dataclasses.fields(cls)}
    has_dict = cls.__dictoffset__ != 0
    if not wanted <= set(fields) or not all(has_dict or _slot_of(cls, name) for name in fields):
        return None
    made: object = object.__new__(cls)
    _fill(made, fields)
    return made


def _defaults(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what fields that the class got since then are by default, where no function has to be called for it."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.name not in fields and field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.name not in fields and field.default_factory in _PLAIN_FACTORIES:
            found[field.name] = field.default_factory()
    return found


def dir_of(cls: type) -> set[str]:
    """Return the names that a class and its bases define."""
    return {name for base in cls.__mro__ for name in base.__dict__}


_MAKERS = {"enum": _make_enum, "namedtuple": _make_namedtuple, "dataclass": _make_dataclass}
