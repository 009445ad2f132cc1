"""Descriptions of tensors, storages and chunks, without their bytes.

Invariants:
- Nothing here imports numpy or torch, because listing a store needs these names and must start fast.
- A storage is a span of bytes that one or more tensors view. It is stored once.
- Offsets are in bytes from the start of the storage to element (0, ..., 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ckstore.errors import MalformedError

Row = TypeVar("Row")

RANK_MAX = 64
"""Largest number of dimensions."""

_NBYTES_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: a view of a storage.

    Args:
        library: The tensor library: ``"torch"``, ``"numpy"``, or ``"bytes"`` (a long bytes value).
        dtype: The library's name of the element type: ``"bfloat16"``; for numpy ``"<f4"``, or a JSON description if
            it has fields; ``""`` for bytes.
        shape: Length of each dimension.
        strides: Step of each dimension: in elements for torch, in bytes for other libraries.
        storage: Index of the storage.
        offset: Byte offset of element (0, ..., 0) in the storage.
        is_parameter: Whether it was a torch.nn.Parameter.
        requires_grad: Whether it required a gradient.
        cuts: Where its tiles begin, if it is stored in tiles, see tiles.py. Then ``strides`` say nothing. On disk such
            a tensor is flat, and the tree says where its tiles begin.
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int
    is_parameter: bool = False
    requires_grad: bool = False
    cuts: tuple[tuple[int, ...], ...] = ()


class Piece(NamedTuple):
    """A run of a storage's bytes: a part of a chunk."""

    chunk: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A span of bytes that tensors view: the concatenation of its pieces, a tuple or ``PieceRows``."""

    nbytes: int
    element_width: int
    is_float: bool
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A chunk: its id, its length, and the type of most of its elements."""

    chunk_id: bytes
    nbytes: int
    element_width: int
    is_float: bool


class Table(tuple[Row, ...]):
    """Rows that many manifests repeat, and what is known about them. The rows never change.

    Attributes:
        encoded: Their encoded form; None until it is needed.
        fits: What they were last checked against and fit.
        decoded_xxh3: Checksum of an encoded form that a reader has decoded to these rows.
    """

    encoded: bytes | None = None
    fits: object = None
    decoded_xxh3: int | None = None


def count_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for length in shape:
        count *= length
    return count


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def byte_strides_of(library: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return strides in bytes; torch counts strides in elements, other libraries in bytes."""
    return tuple(step * itemsize for step in strides) if library == "torch" else strides


def extent_of(shape: tuple[int, ...], byte_strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the byte range that a tensor views, relative to element (0, ..., 0); the end is exclusive."""
    if 0 in shape:
        return 0, 0
    lo = hi = 0
    for length, step in zip(shape, byte_strides, strict=True):
        if step < 0:
            lo += step * (length - 1)
        else:
            hi += step * (length - 1)
    return lo, hi + itemsize


def check_layout(spec: TensorSpec, itemsize: int, storage_nbytes: int) -> None:
    """Check that all elements of a tensor are within its storage.

    Raises:
        MalformedError: They are not, or the spec has impossible values.
    """
    where = f"tensor of shape {spec.shape[:RANK_MAX]}"
    if len(spec.shape) > RANK_MAX or len(spec.strides) != len(spec.shape):
        raise MalformedError("a tensor has too many dimensions, or another number of strides", where=where)
    if any(length < 0 or length >= _NBYTES_LIMIT for length in spec.shape):
        raise MalformedError("a tensor has an impossible dimension", where=where)
    if any(abs(step) >= _NBYTES_LIMIT for step in spec.strides):
        raise MalformedError("a tensor has an impossible stride", where=where)
    if spec.library == "torch" and any(step < 0 for step in spec.strides):
        raise MalformedError("a torch tensor has a negative stride", where=where)
    if count_of(tuple(length for length in spec.shape if length)) * max(itemsize, 1) >= _NBYTES_LIMIT:
        raise MalformedError("a tensor has an impossible number of elements", where=where)
    lo, hi = extent_of(spec.shape, byte_strides_of(spec.library, spec.strides, itemsize), itemsize)
    if spec.offset < 0 or spec.offset + lo < 0 or spec.offset + hi > storage_nbytes:
        raise MalformedError("a tensor reaches beyond its storage", where=where)


def is_dense(shape: tuple[int, ...], byte_strides: tuple[int, ...], itemsize: int) -> bool:
    """Say whether a tensor views every byte of its extent; expanded dimensions count once."""
    lo, hi = extent_of(shape, byte_strides, itemsize)
    moving = tuple(length for length, step in zip(shape, byte_strides, strict=True) if step)
    return not overlaps_itself(shape, byte_strides, itemsize, is_expanded_ok=True) and (
        hi - lo == itemsize * count_of(moving) or 0 in shape
    )


def overlaps_itself(
    shape: tuple[int, ...], byte_strides: tuple[int, ...], itemsize: int, *, is_expanded_ok: bool = False
) -> bool:
    """Say whether two elements may share a byte; ``is_expanded_ok`` ignores dimensions with stride 0."""
    reach = itemsize
    for step, length in sorted((abs(step), length) for length, step in zip(shape, byte_strides, strict=True)):
        if length <= 1 or (step == 0 and is_expanded_ok):
            continue
        if step < reach:
            return 0 not in shape
        reach += step * (length - 1)
    return False
