"""Read the header of a safetensors file: which tensors it holds, and where; their bytes are not touched.

The rules are those of the format's own reader (huggingface/safetensors:safetensors/src/tensor.rs), what it refuses
included: a gap, an overlap or a byte behind the last tensor could hide something, or is damage. Metadata is free text:
no tensor is made of it, but for the names that our own export gives one tensor twice.

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

from ckstore.adapters.safetensors import _NUMPY, _TORCH, HEADER_NBYTES_MAX, SAME_TENSORS
from ckstore.errors import MalformedError, UnsupportedError

RANK_MAX = 64
_ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element as torch has it; of ``F4``, two of which share a byte, those of a pair."""

_TORCH_NAMES = {name: dtype for dtype, name in _TORCH.items()}
_NUMPY_NAMES = {name: dtype for dtype, name in _NUMPY.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor.

    Attributes:
        name: Its name.
        library: ``"torch"`` or ``"numpy"``.
        dtype: As torch names it, or numpy: the file's metadata says for whom it was written.
        shape: Length of each dimension.
        itemsize: Bytes of one element.
        element_width: Bytes of the unit that its elements are made of: half of a complex one.
        is_float: Whether these are floating-point numbers.
        offset: Where its bytes begin in the file.
        nbytes: How many there are.
    """

    name: str
    library: str
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
        same: Names of tensors that are others, and which: our own export writes them once.
        perhaps_same: Keys of the metadata whose text is the name of a tensor; they make none.
    """

    library: str
    entries: tuple[Entry, ...]
    same: dict[str, str]
    perhaps_same: tuple[str, ...] = ()


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
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedError("the metadata of a safetensors file holds other things than text", where=where)
    library = "numpy" if metadata.get("format") in ("np", "numpy") else "torch"
    entries = tuple(_entry(name, facts, 8 + header_nbytes, library, where) for name, facts in table.items())
    _check_places(entries, 8 + header_nbytes, nbytes, where)
    names = {entry.name for entry in entries}
    same = _same_tensors(metadata, names, where)
    # As safetensors.torch.save_model writes it, or any text that happens to be the name of a tensor.
    perhaps = [name for name, text in metadata.items() if text in names and name not in names and name not in same]
    return Header(library, entries, same, tuple(perhaps))


def _same_tensors(metadata: dict[str, str], names: set[str], where: object) -> dict[str, str]:
    """Return what our own export says of tensors that stand at two paths."""
    if SAME_TENSORS not in metadata:
        return {}
    try:
        same = json.loads(metadata[SAME_TENSORS])
        is_sound = all(name not in names and other in names for name, other in same.items())
    except (ValueError, AttributeError, TypeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise MalformedError(f"the metadata {SAME_TENSORS!r} of a safetensors file is malformed", where=where)
    return dict(same)


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
    if not isinstance(facts, dict) or not {"dtype", "shape", "data_offsets"} <= set(facts):
        raise MalformedError("an entry of a safetensors file lacks a field", where=where)
    kind, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    lists_are_sound = all(
        isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        for numbers in (shape, offsets)
    )
    if not lists_are_sound or len(offsets) != 2 or len(shape) > RANK_MAX or not isinstance(kind, str):
        raise MalformedError("an entry of a safetensors file is malformed", where=where)
    if library == "numpy" and kind not in _NUMPY_NAMES:
        # What numpy has no dtype for comes back as a tensor of torch.
        library = "torch"
    names = _NUMPY_NAMES if library == "numpy" else _TORCH_NAMES
    if kind not in names:
        raise UnsupportedError(
            f"dtype {kind[:40]!r} cannot be stored", where=where, todo="leave the file out with --exclude"
        )
    itemsize = _ITEMSIZES[kind]
    nbytes = offsets[1] - offsets[0]
    if kind == "F4":
        shape = _pairs(shape, where)
    if nbytes != math.prod(shape) * itemsize:
        raise MalformedError("a tensor has not as many bytes as its shape says", where=where)
    is_complex = kind == "C64"
    return Entry(
        name=name,
        library=library,
        dtype=_numpy_dtype(names[kind]) if library == "numpy" else names[kind],
        shape=tuple(shape),
        itemsize=itemsize,
        element_width=itemsize // 2 if is_complex else itemsize,
        is_float=is_complex or kind.startswith(("F", "BF")),
        offset=begin + offsets[0],
        nbytes=nbytes,
    )


def _pairs(shape: list[int], where: str) -> list[int]:
    """Return the shape in pairs of elements, as torch counts those of four bits."""
    if not shape or shape[-1] % 2:
        raise MalformedError("a tensor of four-bit elements has an odd number of them in a row", where=where)
    return [*shape[:-1], shape[-1] // 2]


def _numpy_dtype(code: str) -> str:
    """Return numpy's ``dtype.str``: single bytes have no order."""
    return f"{'|' if code.endswith('1') else '<'}{code}"


def _check_places(entries: tuple[Entry, ...], begin: int, end: int, where: object) -> None:
    behind = begin
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != behind:
            raise MalformedError("tensors of a safetensors file overlap, or leave a gap", where=where)
        behind += entry.nbytes
    if behind > end:
        raise MalformedError(
            f"the safetensors file ends early: {behind - end} bytes are missing", where=where,
            todo="copy or download it again",
        )  # fmt: skip
    if behind < end:
        raise MalformedError(f"the safetensors file has {end - behind} bytes behind its last tensor", where=where)
