"""Read safetensors files: the header with its checks, and a file as a flat dict of tensors. Encode headers.

Neither torch nor a child process is needed, because the format contains no code. The tensors' bytes are read when the
commit needs them. The checks are those of the format's own reader (huggingface/safetensors:safetensors/src/tensor.rs),
and it refuses the same files: a gap, an overlap or bytes after the last tensor are damage, or hide something.

Invariants:
- Everything is checked against the length of the file before anything of a claimed size is allocated.
- Metadata creates no tensors, except the second names that our own export writes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore.errors import MalformedError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, TensorNode, format_path
from ckstore.ops.interop.foreign_state import FileStorage, LoadedState, OpenFile, find_skip_reason
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage

HEADER_NBYTES_MAX = 100_000_000
"""Readers of the format refuse longer headers."""

SAME_TENSORS = "ckstore.same_tensors"
"""Metadata key of our own export. Its value is a JSON object: second name of a tensor -> name in the file."""

TORCH_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
NUMPY_DTYPES = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "u4": "U32",
    "i4": "I32",
    "u8": "U64",
    "i8": "I64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
}


RANK_MAX = 64
ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element in torch. For ``F4``, where a byte holds two elements, bytes per pair."""

_TORCH_NAMES = {name: dtype for dtype, name in TORCH_DTYPES.items()}
_NUMPY_NAMES = {name: dtype for dtype, name in NUMPY_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a header.

    Attributes:
        name: Its name.
        library: ``"torch"`` or ``"numpy"``, from the file's metadata.
        dtype: The dtype as that library names it.
        shape: Length of each dimension.
        itemsize: Bytes per element.
        element_width: Bytes of the number that elements consist of: half of the itemsize for complex elements.
        is_float: Whether these numbers are floating-point.
        offset: Where its bytes begin in the file.
        nbytes: Number of bytes.
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
    """The header of a file.

    Attributes:
        library: ``"numpy"`` if the metadata says so, else ``"torch"``.
        entries: The tensors, in the order of the header.
        same: Second name of a tensor -> its name in the file, from our own export.
        perhaps_same: Metadata keys whose text is the name of a tensor. They create none.
    """

    library: str
    entries: tuple[Entry, ...]
    same: dict[str, str]
    perhaps_same: tuple[str, ...] = ()


def read_header(read: Callable[[int, int], bytes | memoryview], nbytes: int, *, where: object = None) -> Header:
    """Read and check the header.

    Args:
        read: Returns the bytes at (offset, nbytes).
        nbytes: Length of the file.
        where: The file, for messages.

    Raises:
        MalformedError: It is not a safetensors file, or a damaged one.
        UnsupportedError: A tensor has a dtype that cannot be stored.
    """
    if nbytes < 8:
        raise MalformedError("the file is too short for a safetensors header", where=where)
    header_nbytes = struct.unpack("<Q", bytes(read(0, 8)))[0]
    if header_nbytes > min(HEADER_NBYTES_MAX, nbytes - 8):
        raise MalformedError("the safetensors header is longer than the file, or than the format allows", where=where)
    table = _parsed(bytes(read(8, header_nbytes)), where)
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedError("the metadata of a safetensors file contains a value that is not text", where=where)
    library = "numpy" if metadata.get("format") in ("np", "numpy") else "torch"
    entries = tuple(_entry(name, facts, 8 + header_nbytes, library, where) for name, facts in table.items())
    _check_places(entries, 8 + header_nbytes, nbytes, where)
    names = {entry.name for entry in entries}
    same = _same_tensors(metadata, names, where)
    # safetensors.torch.save_model writes tied tensors like this, but any text may equal the name of a tensor.
    perhaps = [name for name, text in metadata.items() if text in names and name not in names and name not in same]
    return Header(library, entries, same, tuple(perhaps))


def _same_tensors(metadata: dict[str, str], names: set[str], where: object) -> dict[str, str]:
    """Return the second names of tensors that our own export wrote."""
    if SAME_TENSORS not in metadata:
        return {}
    try:
        same = json.loads(metadata[SAME_TENSORS])
        is_valid = all(name not in names and other in names for name, other in same.items())
    except (ValueError, AttributeError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise MalformedError(f"the metadata {SAME_TENSORS!r} of a safetensors file is malformed", where=where)
    return dict(same)


def _parsed(encoded: bytes, where: object) -> dict[str, Any]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise MalformedError("the header of a safetensors file contains a name twice", where=where)
        return found

    try:
        if not encoded.startswith(b"{"):
            raise ValueError("it does not begin with '{'")
        table = json.loads(encoded, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as problem:
        raise MalformedError(f"the header of a safetensors file is not JSON ({problem})"[:300], where=where) from None
    if not isinstance(table, dict):
        raise MalformedError("the header of a safetensors file is not a JSON object", where=where)
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
        # A dtype that numpy lacks becomes a torch tensor.
        library = "torch"
    names = _NUMPY_NAMES if library == "numpy" else _TORCH_NAMES
    if kind not in names:
        raise UnsupportedError(
            f"dtype {kind[:40]!r} cannot be stored", where=where, todo="leave the file out with --exclude"
        )
    itemsize = ITEMSIZES[kind]
    nbytes = offsets[1] - offsets[0]
    if kind == "F4":
        shape = _shape_in_pairs(shape, where)
    if nbytes != math.prod(shape) * itemsize:
        raise MalformedError("the byte count of a tensor does not match its shape", where=where)
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


def _shape_in_pairs(shape: list[int], where: str) -> list[int]:
    """Return the shape in pairs of four-bit elements, which is how torch counts them."""
    if not shape or shape[-1] % 2:
        raise MalformedError("a tensor of four-bit elements has an odd number of them in a row", where=where)
    return [*shape[:-1], shape[-1] // 2]


def _numpy_dtype(code: str) -> str:
    """Return numpy's ``dtype.str``. Single-byte dtypes have no byte order."""
    return f"{'|' if code.endswith('1') else '<'}{code}"


def _check_places(entries: tuple[Entry, ...], begin: int, end: int, where: object) -> None:
    end_of_tensors = begin
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end_of_tensors:
            raise MalformedError("the tensors of a safetensors file overlap or leave a gap", where=where)
        end_of_tensors += entry.nbytes
    if end_of_tensors > end:
        raise MalformedError(
            f"the safetensors file ends early: {end_of_tensors - end} bytes are missing at the end", where=where,
            todo="copy or download it again",
        )  # fmt: skip
    if end_of_tensors < end:
        raise MalformedError(
            f"the safetensors file has {end - end_of_tensors} bytes after its last tensor", where=where
        )


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the begin of a file whose tensors follow in this order.

    Args:
        tensors: Name, dtype as the format names it, shape, and bytes of each.
        metadata: The metadata of the file.

    Raises:
        UsageError: The names are too long.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > HEADER_NBYTES_MAX:
        raise UsageError("the names of the tensors are too long for the header", todo="export fewer with --only")
    return struct.pack("<Q", len(encoded)) + encoded


def open_safetensors(path: Path, *, key: str = "", skip: Sequence[str] = ()) -> LoadedState:
    """Return the tensors of a file. They keep the file open.

    Args:
        path: The file.
        key: The key of this file in the whole state; empty if it is the whole state.
        skip: Globs over dotted paths of tensors that are left out.

    Raises:
        CorruptError: It is damaged.
        UnsupportedError: A tensor has a dtype that cannot be stored.
    """
    try:
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path))
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=path) from None
    header = read_header(file.read, file.nbytes, where=path)
    warnings = (
        [
            f"The metadata of {path.name} maps {', '.join(header.perhaps_same[:5])} to names of tensors. If these are "
            "tied tensors, restore into a model that ties them; they were not imported as tensors."
        ]
        if header.perhaps_same
        else []
    )
    tensors: list[TensorSpec] = []
    storages: list[HostStorage] = []
    index_of: dict[str, int] = {}
    prefix: tuple[str, ...] = (key,) if key else ()
    left_out: dict[str, str] = {}
    for entry in header.entries:
        why = find_skip_reason((*prefix, entry.name), skip)
        if why is not None:
            left_out[format_path((*prefix, entry.name))] = why
            continue
        index_of[entry.name] = len(tensors)
        strides = _strides(entry.shape, 1 if entry.library == "torch" else entry.itemsize)
        tensors.append(TensorSpec(entry.library, entry.dtype, entry.shape, strides, len(storages), 0))
        storages.append(FileStorage(file, entry.offset, entry.nbytes, entry.element_width, entry.is_float))
    for name, other in header.same.items():
        if other in index_of and find_skip_reason((*prefix, name), skip) is None:
            index_of[name] = index_of[other]
    # Sorted by name, because the order in the file only follows the dtypes.
    names = tuple(sorted(index_of))
    nodes = tuple(TensorNode(index_of[name]) for name in names)
    return LoadedState(Captured(DictNode("dict", names, nodes), [], tensors, storages, warnings), left_out)


def _strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= max(1, length)
    return tuple(reversed(strides))
