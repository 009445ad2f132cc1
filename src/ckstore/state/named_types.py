"""Enum members, named tuples and dataclasses as leaves: stored as the name of their class and their fields.

A checkpoint is untrusted data. So reading one never imports a module and never runs a function of a class. A class is
used only if its module is already loaded and contains it under its name, with the same kind and fields. Otherwise
the leaf is restored as a ``StandIn``.

Invariants:
- No ``__init__``, ``__new__``, ``__post_init__``, ``__setattr__`` or property of a named class runs here.
- A ``StandIn`` is stored as the object that it replaces.
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
"""The kinds of named types. Names on disk are ``ckstore:<kind>:<module>:<class>``."""

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set for classes that were created at run time, as by a class statement."""

_PLAIN_FACTORIES = (list, dict, set, tuple, str, int, float, bool)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Restored in place of an object whose class this process does not have, or has in another form.

    Attributes:
        kind: The kind of object: ``"enum"``, ``"namedtuple"``, ``"dataclass"``, or a type of a library.
        type_name: Module and name of its class, as in ``"trainer.config:Schedule"``.
        content: Its fields by name; for an enum member ``name`` and ``value``.
    """

    kind: str
    type_name: str
    content: Any

    def __hash__(self) -> int:
        # The content may not be hashable. Equal stand-ins have equal names.
        return hash((self.kind, self.type_name))


@dataclasses.dataclass(frozen=True, eq=False)
class DistinctStandIn(StandIn):
    """A stand-in that equals only itself, for a set member or key that would otherwise equal another or be unhashable.

    Objects that compare by identity may have equal fields, and a class may have lost its ``__hash__`` since.
    """


def distinct(items: Iterable[Any]) -> list[Any]:
    """Return keys or set members, replaced by stand-ins if they are equal to others or not hashable.

    Raises:
        ValueError: Two are still equal.
        TypeError: One is still not hashable.
    """
    found: dict[Any, None] = {}
    for item in items:
        is_duplicate = _has_hash(item) and item in found
        made = item if _has_hash(item) and not is_duplicate else _distinct(item, is_duplicate)
        if made in found:
            raise ValueError("a set member or key occurs twice")
        found[made] = None
    return list(found)


def _distinct(item: Any, is_duplicate: bool) -> Any:
    if type(item) in (tuple, frozenset):
        return type(item)(
            _distinct(each, is_duplicate) if is_duplicate or not _has_hash(each) else each for each in item
        )
    taken = (f"{BUILT_IN}{item.kind}:{item.type_name}", item.content) if type(item) is StandIn else convert_named(item)
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


def convert_named(item: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the conversion name and the fields of an object of a named type; None: other types.

    Raises:
        ValueError: The object has content besides its fields, or defines its own pickling.
    """
    kind = type(item)
    if isinstance(item, StandIn) and item.kind in KINDS:
        build_named(item.kind, item.type_name, item.content)
        return f"{BUILT_IN}{item.kind}:{item.type_name}", item.content
    if isinstance(item, enum.Enum):
        value = {"value": item._value_} if _is_plain(item._value_) else {}
        return _name("enum", kind), {"name": item._name_, **value}
    if isinstance(item, tuple) and kind is not tuple and _fields_of_tuple(kind) is not None:
        if getattr(item, "__dict__", None):
            raise ValueError("a named tuple with extra attributes")
        return _name("namedtuple", kind), dict(zip(kind._fields, tuple.__iter__(item), strict=True))
    if dataclasses.is_dataclass(kind):
        return _name("dataclass", kind), _fields_of_dataclass(item)
    return None


def build_named(kind: str, type_name: str, fields: Any) -> object:
    """Build the object if this process has its class, else a StandIn.

    Raises:
        ValueError: ``convert_named`` does not return such fields.
    """
    if not isinstance(fields, dict) or not all(type(name) is str for name in fields):
        raise ValueError("fields without names")
    if ":" not in type_name or (kind == "enum" and not {"name"} <= set(fields) <= {"name", "value"}):
        raise ValueError("not the name of a class or of an enum member")
    cls = find_class(type_name)
    made = None if cls is None else _MAKERS[kind](cls, fields)
    return StandIn(kind, type_name, fields) if made is None else made


def find_class(type_name: str) -> type | None:
    """Return a class that a loaded module contains under its own name; imports and calls nothing."""
    module_name, _, qualified = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for name in qualified.split("."):
        found = _names_in(found).get(name)
    # With other metaclasses, reading an attribute of the class may run code.
    if type(found) not in (type, abc.ABCMeta, enum.EnumMeta):
        return None
    own_name = (_names_in(found).get("__module__"), type.__dict__["__qualname__"].__get__(found))
    return found if own_name == (module_name, qualified) else None


def _names_in(holder: Any) -> Mapping[str, Any]:
    """Return the names that a module or class defines, without attribute access, which may run its code."""
    if issubclass(type(holder), types.ModuleType):
        attributes: dict[str, Any] = object.__getattribute__(holder, "__dict__")
        return attributes
    return type.__dict__["__dict__"].__get__(holder) if issubclass(type(holder), type) else {}


def has_class(name: str, item: object) -> bool:
    """Say whether an object stored under a name would be restored with its class in this process."""
    kind, _, type_name = name.removeprefix(BUILT_IN).partition(":")
    return kind not in KINDS or isinstance(item, StandIn) or find_class(type_name) is type(item)


def update_dataclass(target: Any, made: Any) -> bool:
    """Set the fields of a live object from another of the same class, without running its code; False: other class."""
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
        raise ValueError("a dataclass that inherits from a type implemented in C")
    if _defines_pickling(cls):
        raise ValueError("a dataclass that defines its own pickling")
    attributes = dict(getattr(item, "__dict__", {}))
    names = [field.name for field in dataclasses.fields(item)]
    slots = {name: _slot_of(cls, name) for name in names if name not in attributes}
    found = {name: slot.__get__(item) for name, slot in slots.items() if slot is not None and hasattr(item, name)}
    # Fields first, in declaration order, whether in slots or in the dict.
    return {
        name: found.get(name, attributes.get(name)) for name in names if name in found or name in attributes
    } | attributes


def _defines_pickling(cls: type) -> bool:
    own = {name: getattr(cls, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")}
    if getattr(own["__getstate__"], "__name__", "") == "_dataclass_getstate":
        # Generated for a frozen dataclass with slots; it returns the fields only.
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
    """Set fields in the slots or the dict of an object."""
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
        return _combined_flags(cls, value)
    # A member that has another value now is not the stored one.
    is_same = member is not None and ("value" not in fields or _is_same(member._value_, value))
    return member if is_same else None


def _combined_flags(cls: type[enum.Flag], value: int) -> object | None:
    """Return a combination of flags, which has no name; None: the class customizes how these are built."""
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
    if "__dataclass_fields__" not in _names_of_class(cls) or not _has_plain_layout(cls):
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
    """Return defaults of fields that were added to the class later, if they need no function of the class."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.name not in fields and field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.name not in fields and field.default_factory in _PLAIN_FACTORIES:
            found[field.name] = field.default_factory()
    return found


def _names_of_class(cls: type) -> set[str]:
    """Return the names that a class and its bases define."""
    return {name for base in cls.__mro__ for name in base.__dict__}


_MAKERS = {"enum": _make_enum, "namedtuple": _make_namedtuple, "dataclass": _make_dataclass}
