"""Plain values and converters: Python's own leaves to nodes and back, and the types that users add.

Invariants:
- ``decode_plain(encode_plain(value))`` has the same type and the same bits.
- A converter is chosen by exact type when storing, and by its name, which is on disk, when restoring.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckstore.errors import LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.tree import KEY_INT_MAX, KEY_INT_MIN, Path, ValueNode, place_of

LONG_TEXT = "ckstore:str"
"""Name of the built-in conversion of a long str to its UTF-8 bytes."""

_CONVERTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BUILT_IN = (dict, OrderedDict, Counter, defaultdict, list, tuple, bool, int, float, complex, str, bytes, type(None))


def encode_plain(leaf: object) -> ValueNode | None:
    """Return the node of one of Python's own plain values; None: it is something else."""
    kind = type(leaf)
    if leaf is None:
        return ValueNode("none", None)
    if kind is bool:
        return ValueNode("bool", leaf is True)
    if kind is int:
        return _encode_int(leaf)  # type: ignore[arg-type]
    if kind is float:
        return ValueNode("float", struct.pack("<d", leaf))
    if kind is complex:
        return ValueNode("complex", struct.pack("<dd", leaf.real, leaf.imag))  # type: ignore[attr-defined]
    if kind is str:
        return _encode_text(leaf)  # type: ignore[arg-type]
    if kind is bytes:
        return ValueNode("bytes", leaf)  # type: ignore[arg-type]
    return None


def decode_plain(node: ValueNode) -> object:
    """Return the plain value of a node.

    Raises:
        UnsupportedError: A type of a newer version, or of a library that was not handed in.
        MalformedError: The value is none that its type can have.
    """
    value = node.value
    wanted = _WIRE_TYPES.get(node.type)
    if wanted is None:
        raise UnsupportedError(
            "a plain value has a type that cannot be restored here",
            where=repr(node.type[:80]),
            todo="install the library it belongs to, or a newer ckstore",
        )
    if type(value) is not wanted:
        raise _malformed(node)
    if node.type == "bigint":
        assert isinstance(value, bytes)
        return int.from_bytes(value, "little", signed=True)
    if node.type in ("float", "complex"):
        assert isinstance(value, bytes)
        return _decode_float(node, value)
    if node.type == "surrogates":
        assert isinstance(value, bytes)
        try:
            return value.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _malformed(node) from None
    return value


_WIRE_TYPES: dict[str, type] = {
    "none": type(None),
    "bool": bool,
    "int": int,
    "bigint": bytes,
    "float": bytes,
    "complex": bytes,
    "str": str,
    "surrogates": bytes,
    "bytes": bytes,
}


def _encode_int(number: int) -> ValueNode:
    if KEY_INT_MIN <= number <= KEY_INT_MAX:
        return ValueNode("int", number)
    return ValueNode("bigint", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))


def _encode_text(text: str) -> ValueNode:
    try:
        text.encode()
    except UnicodeEncodeError:
        return ValueNode("surrogates", text.encode("utf-8", "surrogatepass"))
    return ValueNode("str", text)


def _decode_float(node: ValueNode, value: bytes) -> float | complex:
    if len(value) != (8 if node.type == "float" else 16):
        raise _malformed(node)
    if node.type == "float":
        number: float = struct.unpack("<d", value)[0]
        return number
    return complex(*struct.unpack("<dd", value))


def _malformed(node: ValueNode) -> MalformedError:
    return MalformedError("a plain value is not what its type says", where=repr(node.type[:80]))


@dataclass(frozen=True, slots=True)
class Converter:
    """How a type that users added becomes storable state, and comes back."""

    type: type[Any]
    name: str
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


_BY_TYPE: dict[type[Any], Converter] = {}
_BY_NAME: dict[str, Converter] = {}


def register_converter(
    kind: type[Any], name: str, to_state: Callable[[Any], Any], from_state: Callable[[Any], Any]
) -> None:
    """Make leaves of exactly this type storable, under a name that must never change its meaning.

    Args:
        kind: The type; its subclasses are not meant.
        name: Recorded in the checkpoint; restoring needs a converter of this name.
        to_state: Returns nested state made of what ckstore can store.
        from_state: Makes the leaf again from that state.

    Raises:
        UsageError: A bad name, a type that needs no converter, or a name taken by another type.
    """
    if not isinstance(kind, type) or kind in _BUILT_IN:
        raise UsageError("this type takes no converter", where=repr(kind))
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
    """Return the converter of exactly this type, if there is one."""
    return _BY_TYPE.get(kind)


def registered_converters() -> dict[type[Any], Converter]:
    """Return the converters that there are now."""
    return dict(_BY_TYPE)


def converter_named(name: str) -> Converter:
    """Return the converter of this name.

    Raises:
        UnsupportedError: None is registered in this process.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedError(
            "the state holds a leaf that needs a converter which is not registered",
            where=repr(name[:128]),
            todo="call ckstore.register_converter with this name before restoring",
        ) from None


def leaf_type_error(leaf: object, path: Path, why: str | None = None) -> LeafTypeError:
    """Return the error for a leaf that cannot be stored; it names path, type and the way out."""
    kind = type(leaf)
    name = f"{kind.__module__}.{kind.__qualname__}"
    what = f"a leaf of type {name} cannot be stored" + (f" ({why})" if why else "")
    return LeafTypeError(
        what,
        where=place_of(path),
        todo="store tensors, arrays and plain values, or call "
        f"ckstore.register_converter({kind.__qualname__}, name, to_state, from_state)",
        path=path,
        leaf_type=name,
    )
