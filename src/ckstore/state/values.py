"""Plain values: Python's own leaves as nodes, and the converters that users register.

Invariants:
- Decoding restores the type and the bits of every encoded value: both directions use one table.
- A converter is chosen by exact type when storing, and by its stored name when restoring.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckstore.errors import LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tree import (
    KEY_INT_MAX,
    KEY_INT_MIN,
    Path,
    Value,
    ValueNode,
    place_of,
)

LONG_TEXT = "ckstore:str"
"""Name of the conversion of a long str to its UTF-8 bytes."""

_CONVERTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BUILT_IN = (dict, OrderedDict, Counter, defaultdict, list, tuple, bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _PlainType:
    """A row of the table of plain types.

    Args:
        name: The type's name on disk.
        kind: The type of the leaf.
        wire: The type of the value on disk.
        encode: Returns the value on disk; raises ValueError if the next row of the same kind must store the leaf.
        decode: Returns the leaf; raises ValueError for a value that ``encode`` does not return.
    """

    name: str
    kind: type
    wire: type
    encode: Callable[[Any], Value]
    decode: Callable[[Any], object]


def _same(value: Any) -> Any:
    return value


def _int_of_64_bits(number: int) -> int:
    if not KEY_INT_MIN <= number <= KEY_INT_MAX:
        raise ValueError(number.bit_length())
    return number


def _text(text: str) -> str:
    text.encode()
    return text


def _complex_of(content: bytes) -> complex:
    return complex(*_unpacked("<dd", content))


def _unpacked(layout: str, content: bytes) -> tuple[float, ...]:
    if len(content) != struct.calcsize(layout):
        raise ValueError(len(content))
    return struct.unpack(layout, content)


_TABLE = (
    _PlainType("none", type(None), type(None), _same, _same),
    _PlainType("bool", bool, bool, _same, _same),
    _PlainType("int", int, int, _int_of_64_bits, _same),
    _PlainType(
        "bigint",
        int,
        bytes,
        lambda number: number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True),
        lambda content: int.from_bytes(content, "little", signed=True),
    ),
    _PlainType(
        "float",
        float,
        bytes,
        lambda number: struct.pack("<d", number),
        lambda content: _unpacked("<d", content)[0],
    ),
    _PlainType("complex", complex, bytes, lambda number: struct.pack("<dd", number.real, number.imag), _complex_of),
    _PlainType("str", str, str, _text, _same),
    _PlainType(
        "surrogates",
        str,
        bytes,
        lambda text: text.encode("utf-8", "surrogatepass"),
        lambda content: content.decode("utf-8", "surrogatepass"),
    ),
    _PlainType("bytes", bytes, bytes, _same, _same),
)
_ROWS_OF: dict[type, tuple[_PlainType, ...]] = {
    row.kind: tuple(other for other in _TABLE if other.kind is row.kind) for row in _TABLE
}
_ROW_NAMED = {row.name: row for row in _TABLE}


def encode_plain(leaf: object) -> ValueNode | None:
    """Return the node of a plain Python value; None: not a plain value."""
    for row in _ROWS_OF.get(type(leaf), ()):
        try:
            return ValueNode(row.name, row.encode(leaf))
        except ValueError:
            continue
    return None


def decode_plain(node: ValueNode) -> object:
    """Return the plain value of a node.

    Raises:
        UnsupportedError: The type belongs to a newer version, or to a library without an adapter.
        MalformedError: The type cannot have this value.
    """
    row = _ROW_NAMED.get(node.type)
    if row is None:
        raise UnsupportedError(
            "a plain value has a type that cannot be restored here",
            where=repr(node.type[:80]),
            todo="install the library it belongs to, or a newer ckstore",
        )
    try:
        if type(node.value) is row.wire:
            return row.decode(node.value)
    except ValueError:
        pass
    raise MalformedError("a stored plain value does not have the form of its type", where=repr(node.type[:80]))


@dataclass(frozen=True, slots=True)
class Converter:
    """How a registered type becomes storable state, and is built from it again."""

    type: type[Any]
    name: str
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


_BY_TYPE: dict[type[Any], Converter] = {}
_BY_NAME: dict[str, Converter] = {}


def register_converter(
    kind: type[Any], name: str, to_state: Callable[[Any], Any], from_state: Callable[[Any], Any]
) -> None:
    """Make leaves of exactly this type storable. The meaning of the name must never change.

    Args:
        kind: The type; subclasses are not included.
        name: Stored in the checkpoint; restoring needs a converter with this name.
        to_state: Returns nested state that ckstore can store.
        from_state: Builds the leaf from that state.

    Raises:
        UsageError: The name is invalid or belongs to another type, or the type needs no converter.
    """
    if not isinstance(kind, type) or kind in _BUILT_IN:
        raise UsageError("a converter cannot be registered for this type", where=repr(kind))
    if not isinstance(name, str) or _CONVERTER_NAME.fullmatch(name) is None:
        raise UsageError("a converter's name is 1 to 128 letters, digits, '.', '_' or '-'", where=repr(name))
    holder = _BY_NAME.get(name)
    if holder is not None and holder.type is not kind:
        raise UsageError(f"the converter name {name!r} belongs to {holder.type.__qualname__}", where=repr(kind))
    former = _BY_TYPE.get(kind)
    if former is not None:
        del _BY_NAME[former.name]
    _BY_TYPE[kind] = _BY_NAME[name] = Converter(kind, name, to_state, from_state)


def converter_for(kind: type[Any]) -> Converter | None:
    """Return the converter of exactly this type; None: not registered."""
    return _BY_TYPE.get(kind)


def registered_converters() -> dict[type[Any], Converter]:
    """Return a copy of the table of converters."""
    return dict(_BY_TYPE)


def converter_named(name: str) -> Converter:
    """Return the converter with this name.

    Raises:
        UnsupportedError: This process has not registered one.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedError(
            "the state holds a leaf that needs a converter which is not registered",
            where=repr(name[:128]),
            todo="call ckstore.register_converter with this name before restoring",
        ) from None


def leaf_type_error(leaf: object, path: Path, why: str | None = None, todo: str | None = None) -> LeafTypeError:
    """Return the error for a leaf that cannot be stored; it names the path, the type and what to do."""
    kind = type(leaf)
    name = f"{kind.__module__}.{kind.__qualname__}"
    what = f"a leaf of type {name} cannot be stored" + (f" ({why})" if why else "")
    if todo is None:
        todo = "leave it out"
        if _takes_converter(kind):
            todo += f", or call ckstore.register_converter({kind.__qualname__}, name, to_state, from_state)"
    return LeafTypeError(what, where=place_of(path), todo=todo, path=path, leaf_type=name)


def _takes_converter(kind: type) -> bool:
    """Whether a converter helps: not for a type whose usual objects are stored without one."""
    base = (kind.__module__.partition(".")[0], kind.__qualname__)
    return kind not in _BUILT_IN and base not in _ALWAYS_STORED and kind.__module__ != "builtins"


_ALWAYS_STORED = (("torch", "Tensor"), ("torch", "Parameter"), ("torch", "Buffer"), ("numpy", "ndarray"))
