"""Export: the tensors of a restored state as one safetensors file; import comes with the other importers.

Invariants:
- The bytes in the file are the tensors' bytes; nothing is converted, but for big-endian arrays.
- What does not fit is told, never dropped in silence. No tensor is written twice: one that stands at two
  paths is written under the first, and the file's metadata says for the other where it is, as transformers does.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore.adapters.files import named_leaves
from ckstore.errors import NotFoundError, UsageError
from ckstore.outfile import new_file

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
