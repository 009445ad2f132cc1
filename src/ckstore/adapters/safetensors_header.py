"""Read the header of a safetensors file: which tensors it holds, and where; their bytes are not touched.

The rules are those of the format's own reader (huggingface/safetensors:safetensors/src/tensor.rs), what it refuses
included: a gap, an overlap or a byte behind the last tensor could hide something, or is damage.

Invariants:
- Everything is checked against the file's length before anything of a size that the file claims is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckstore.adapters.safetensors import _NUMPY, _TORCH, HEADER_NBYTES_MAX
from ckstore.errors import MalformedError, UnsupportedError

RANK_MAX = 64
_ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_TORCH_NAMES = {name: dtype for dtype, name in _TORCH.items()}
_NUMPY_NAMES = {name: dtype for dtype, name in _NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor.

    Attributes:
        name: Its name.
        dtype: As torch names it, or numpy: the file's metadata says for whom it was written.
        shape: Length of each dimension.
        itemsize: Bytes of one element.
        element_width: Bytes of the unit that its elements are made of: half of a complex one.
        is_float: Whether these are floating-point numbers.
        offset: Where its bytes begin in the file.
        nbytes: How many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    element_width: int
    is_float: bool
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds.

    Attributes:
        library: ``"torch"``, or ``"numpy"`` where the file says that it was written for that.
        entries: Its tensors, in the order of the header.
        same: Names of tensors that are others, and which: they are written once.
    """

    library: str
    entries: tuple[Entry, ...]
    same: dict[str, str]


def read_header(read: Callable[[int, int], bytes | memoryview], nbytes: int, *, where: object = None) -> Header:
    """Read the header.

    Args:
        read: Returns the bytes at (offset, nbytes).
        nbytes: Length of the file.
        where: The file, for messages.

    Raises:
        MalformedError: It is no safetensors file, or a damaged one.
        UnsupportedError: A tensor has a dtype that cannot be stored.
    """
    if nbytes < 8:
        raise MalformedError("a safetensors file has at least 8 bytes", where=where)
    header_nbytes = struct.unpack("<Q", bytes(read(0, 8)))[0]
    if header_nbytes > min(HEADER_NBYTES_MAX, nbytes - 8):
        raise MalformedError("the header is longer than the file, or than may be", where=where)
    table = _parsed(bytes(read(8, header_nbytes)), where)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedError("the metadata of a safetensors file holds other things than text", where=where)
    library = "numpy" if metadata.get("format") in ("np", "numpy") else "torch"
    entries = tuple(_entry(name, facts, 8 + header_nbytes, library, where) for name, facts in table.items())
    _check_places(entries, 8 + header_nbytes, nbytes, where)
    names = {entry.name for entry in entries}
    # As transformers and our own export write it: the name of a tensor that is not there, and of the one that it is.
    same = {name: value for name, value in metadata.items() if value in names and name not in names}
    return Header(library, entries, same)


def _parsed(encoded: bytes, where: object) -> dict[str, Any]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise MalformedError("the header of a safetensors file has a name twice", where=where)
        return found

    try:
        if not encoded.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        table = json.loads(encoded, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as problem:
        raise MalformedError(f"the header of a safetensors file is no JSON ({problem})"[:300], where=where) from None
    if not isinstance(table, dict):
        raise MalformedError("the header of a safetensors file is no table", where=where)
    return table


def _entry(name: str, facts: Any, begin: int, library: str, where: object) -> Entry:
    where = f"{where}, tensor {name[:200]}"
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise MalformedError("an entry of a safetensors file has other fields than it must have", where=where)
    kind, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    lists_are_sound = all(
        isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        for numbers in (shape, offsets)
    )
    if not lists_are_sound or len(offsets) != 2 or len(shape) > RANK_MAX or not isinstance(kind, str):
        raise MalformedError("an entry of a safetensors file is malformed", where=where)
    names = _NUMPY_NAMES if library == "numpy" else _TORCH_NAMES
    if kind not in names:
        raise UnsupportedError(f"dtype {kind[:40]!r} cannot be stored", where=where, todo="leave the file out")
    itemsize = _ITEMSIZES[kind]
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * itemsize:
        raise MalformedError("a tensor has not as many bytes as its shape says", where=where)
    is_complex = kind == "C64"
    return Entry(
        name=name,
        dtype=_numpy_dtype(names[kind]) if library == "numpy" else names[kind],
        shape=tuple(shape),
        itemsize=itemsize,
        element_width=itemsize // 2 if is_complex else itemsize,
        is_float=is_complex or kind.startswith(("F", "BF")),
        offset=begin + offsets[0],
        nbytes=nbytes,
    )


def _numpy_dtype(code: str) -> str:
    """Return numpy's ``dtype.str``: single bytes have no order."""
    return f"{'|' if code.endswith('1') else '<'}{code}"


def _check_places(entries: tuple[Entry, ...], begin: int, end: int, where: object) -> None:
    behind = begin
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != behind:
            raise MalformedError("tensors of a safetensors file overlap, or leave a gap", where=where)
        behind += entry.nbytes
    if behind != end:
        raise MalformedError("a safetensors file ends before its last tensor does, or after it", where=where)
