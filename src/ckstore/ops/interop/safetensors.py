"""Export: the tensors of a restored state as one safetensors file; import comes with the other importers.

Invariants:
- The bytes in the file are the tensors' bytes; nothing is converted, but for big-endian arrays.
- What does not fit is told, never dropped in silence. No tensor is written twice: one that stands at two
  paths is written under the first, and the file's metadata says for the other where it is, as transformers does.

Read the header of a safetensors file: which tensors it holds, and where; their bytes are not touched.

The rules are those of the format's own reader (huggingface/safetensors:safetensors/src/tensor.rs), what it refuses
included: a gap, an overlap or a byte behind the last tensor could hide something, or is damage. Metadata is free text:
no tensor is made of it, but for the names that our own export gives one tensor twice.

Invariants:
- Everything is checked against the file's length before anything of a size that the file claims is allocated.

A safetensors file as a state: a flat dict of its tensors, whose bytes are read from it as a commit asks for them.

Neither torch nor a child process is needed: the format holds no code, and its header is checked before it is believed.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore.errors import MalformedError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, TensorNode, format_path
from ckstore.ops.interop.files import named_leaves, new_file
from ckstore.ops.interop.foreign_state import Loaded, skipped_by
from ckstore.ops.interop.storages import FileStorage, OpenFile
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage

HEADER_NBYTES_MAX = 100_000_000
"""Readers of the format refuse longer ones."""

SAME_TENSORS = "ckstore.same_tensors"
"""Key of the metadata under which an export says, as JSON, which names are other tensors of the file."""

_BLOCK_NBYTES = 64 << 20
_TORCH = {
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
_NUMPY = {
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


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        tensor_count: Tensors in the file.
        nbytes: Their bytes.
        shared: Path -> the path under which the same tensor was written.
        left_out: Path -> why it is not in the file.
    """

    tensor_count: int
    nbytes: int
    shared: dict[str, str]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Item:
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    content: Callable[[], memoryview]
    identity: tuple[object, ...]
    library: str


def export_safetensors(
    state: Any,
    target: Path,
    *,
    force: bool = False,
    metadata: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write every tensor of a state to a safetensors file, under its dotted path.

    Args:
        state: What ``Store.restore`` returned.
        target: The file; it appears whole and durable, or not at all.
        force: Replace a file that has the name.
        metadata: Strings to put into the file.
        on_progress: Called now and then with bytes written and bytes in all.

    Raises:
        NotFoundError: There is no tensor in the state that the format knows.
        UsageError: Two tensors have one dotted path, or the file exists.
    """
    items, shared, left_out = _collect(state)
    if not items:
        raise NotFoundError("there is no tensor to export", todo="look at the checkpoint with `ckstore show`")
    # Wide elements first, as the format's own writer does, so that every tensor is aligned.
    names = sorted(items, key=lambda name: (-items[name].itemsize, name))
    texts = {"format": "pt" if any(item.library == "torch" for item in items.values()) else "np"}
    if shared:
        texts[SAME_TENSORS] = json.dumps(shared, ensure_ascii=False)
    header: dict[str, Any] = {"__metadata__": {**texts, **(metadata or {}), **shared}}
    total = 0
    for name in names:
        item = items[name]
        offsets = [total, total + item.nbytes]
        header[name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": offsets}
        total += item.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > HEADER_NBYTES_MAX:
        raise UsageError("the names of the tensors make too long a header", todo="export fewer of them")
    with new_file(target, force=force) as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        done = 0
        for name in names:
            content = items[name].content()
            for begin in range(0, len(content), _BLOCK_NBYTES):
                done += file.write(content[begin : begin + _BLOCK_NBYTES])
                if on_progress is not None:
                    on_progress(done, total)
    return Exported(len(items), total, shared, left_out)


def _collect(state: Any) -> tuple[dict[str, _Item], dict[str, str], dict[str, str]]:
    items: dict[str, _Item] = {}
    written: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, leaf in named_leaves(state):
        item = _item_of(leaf)
        if isinstance(item, str):
            left_out[name] = item
        elif name == "__metadata__":
            raise UsageError("the format reserves this name", where=name, todo="export other leaves")
        elif item.nbytes and item.identity in written:
            shared[name] = written[item.identity]
        else:
            items[name] = item
            written[item.identity] = name
    return items, shared, left_out


def _item_of(leaf: Any) -> _Item | str:
    """Return how to write a leaf, or why it cannot be."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _torch_item(leaf)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray):
        return _numpy_item(leaf)
    return f"a plain value ({type(leaf).__name__}), not a tensor"


def _torch_item(leaf: Any) -> _Item | str:
    import torch

    name = str(leaf.dtype).removeprefix("torch.")
    if name not in _TORCH:
        return f"dtype {name} is not in the format"

    shape = tuple(leaf.shape)
    if _TORCH[name] == "F4":
        if not shape:
            return "a scalar of four-bit elements is not in the format"
        # torch counts pairs, the format elements; and torch copies no elements of this dtype.
        shape = (*shape[:-1], 2 * shape[-1])
        leaf = leaf.detach().view(torch.uint8)

    def content() -> memoryview:
        flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy())

    identity = ("torch", leaf.device, leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
    itemsize = leaf.dtype.itemsize
    return _Item(_TORCH[name], shape, itemsize, leaf.numel() * itemsize, content, identity, "torch")


def _numpy_item(leaf: Any) -> _Item | str:
    import numpy as np

    name = f"{leaf.dtype.kind}{leaf.dtype.itemsize}"
    if name not in _NUMPY or leaf.dtype.fields is not None:
        return f"dtype {leaf.dtype} is not in the format"

    def content() -> memoryview:
        flat = np.ascontiguousarray(leaf, dtype=leaf.dtype.newbyteorder("<")).reshape(-1)
        return flat.view(np.uint8).data

    address = leaf.__array_interface__["data"][0]
    identity = ("numpy", address, leaf.dtype.str, leaf.shape, leaf.strides)
    return _Item(_NUMPY[name], leaf.shape, leaf.dtype.itemsize, leaf.nbytes, content, identity, "numpy")


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


def open_safetensors(path: Path, *, key: str = "", skip: Sequence[str] = ()) -> Loaded:
    """Return the tensors of a file; they keep it open.

    Args:
        path: The file.
        key: The key that it gets in the state; empty: it is the whole state.
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
            f"The metadata of {path.name} has the names of tensors as texts ({', '.join(header.perhaps_same[:5])}). "
            "If these are tied tensors, restore into a model that ties them; no tensors were made of them."
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
        why = skipped_by((*prefix, entry.name), skip)
        if why is not None:
            left_out[format_path((*prefix, entry.name))] = why
            continue
        index_of[entry.name] = len(tensors)
        strides = _strides(entry.shape, 1 if entry.library == "torch" else entry.itemsize)
        tensors.append(TensorSpec(entry.library, entry.dtype, entry.shape, strides, len(storages), 0))
        storages.append(FileStorage(file, entry.offset, entry.nbytes, entry.element_width, entry.is_float))
    for name, other in header.same.items():
        if other in index_of and skipped_by((*prefix, name), skip) is None:
            index_of[name] = index_of[other]
    # Sorted by name: the order in the file follows dtypes, and says nothing of the model.
    names = tuple(sorted(index_of))
    nodes = tuple(TensorNode(index_of[name]) for name in names)
    return Loaded(Captured(DictNode("dict", names, nodes), [], tensors, storages, warnings), left_out)


def _strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= max(1, length)
    return tuple(reversed(strides))
