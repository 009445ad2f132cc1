"""Gradients as an optimizer saw them, and their rows in a point."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckstore.errors import MalformedError
from ckstore.format.logical import TORCH_ITEMSIZES
from ckstore.format.points import NARROW_KINDS, Gradient
from ckstore.journal.blobs import BlobReader, BlobWriter
from ckstore.journal.forms import Form, Kind, form_of, stored_count, write_gradient
from ckstore.state.memory import allocate

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOATS = {"float16", "bfloat16", "float32", "float64"}


class SeenGradient(NamedTuple):
    """A gradient in host memory.

    Args:
        parameter: Index of its parameter, counted over all groups of the optimizer.
        dtype: torch's name of its element type.
        shape: Its shape.
        values: Its elements: float32, or for other types their bits as unsigned integers. Of a sparse gradient those
            of the parts that it lists, (count, *dense dimensions).
        indices: Indices of the listed parts, int64, (sparse dimensions, count); None for a dense gradient.
    """

    parameter: int
    dtype: str
    shape: tuple[int, ...]
    values: NDArray[np.generic]
    indices: NDArray[np.int64] | None = None


class GradientMemory:
    """Memory for the gradients of successive steps. Each piece is used again when nothing refers to it any more.

    The first write to new memory takes as long as all that is computed for a gradient. Used on one thread; the last
    reference to a piece may end on any thread.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return uninitialized memory, one dimension."""
        free = self._free.setdefault(nbytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = allocate(nbytes)
        return np.asarray(_Lent(memory, free))


class _Lent:
    """Memory that arrays view, and that returns when the last of them is gone.

    Every array and tensor that shares the memory keeps this object alive: numpy and torch reach its owner only here.
    """

    def __init__(self, memory: NDArray[np.uint8], free: list[NDArray[np.uint8]]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._memory)


def word_type_of(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy type in which elements of torch's type are handled: float32, or unsigned integers."""
    return np.dtype(np.float32 if dtype == "float32" else f"u{TORCH_ITEMSIZES[dtype]}")


def store_gradient(
    seen: SeenGradient, writer: BlobWriter, factors: Iterable[np.float32], *, searches: bool = True
) -> Gradient:
    """Add a gradient to the blobs of a point, in its shortest form.

    Args:
        seen: The gradient.
        writer: Where its numbers go.
        factors: Factors that its elements may be multiplied by.
        searches: Whether to search for another factor if none of them fits.
    """
    is_float = seen.dtype in _FLOATS
    width = min(8, seen.values.dtype.itemsize)
    if seen.indices is not None:
        values = writer.add(seen.values, element_width=width, is_float=is_float)
        indices = writer.add(seen.indices, element_width=8, is_float=False)
        sparse_dims = len(seen.indices)
        return Gradient(seen.parameter, seen.dtype, seen.shape, "coo", None, None, values, indices, sparse_dims)
    form = form_of(seen.values.reshape(seen.shape), factors, searches=searches)
    rows = None if form.rows is None else writer.add(form.rows, element_width=1, is_float=False)
    if form.kind in NARROW_KINDS:
        width = 2
    values = writer.add(form.values, element_width=width, is_float=is_float)
    factor = None if form.factor is None else np.float32(form.factor).tobytes()
    return Gradient(seen.parameter, seen.dtype, seen.shape, form.kind, factor, rows, values, None)


def load_gradient(gradient: Gradient, reader: BlobReader, memory: GradientMemory | None = None) -> SeenGradient:
    """Return a stored gradient, in memory of its own.

    Args:
        gradient: Its row.
        reader: The blobs of its record.
        memory: Where the elements of a dense gradient go; None: into new memory.

    Raises:
        CorruptError: A frame is damaged, or the stored bytes do not have the gradient's shape.
    """
    word = word_type_of(gradient.dtype)
    facts = gradient.parameter, gradient.dtype, gradient.shape
    if gradient.indices is not None:
        indices = reader.bytes_of(gradient.indices).view(np.int64).copy()
        indices = indices.reshape(gradient.sparse_dims, -1)
        values = (
            reader.bytes_of(gradient.values)
            .copy()
            .view(word)
            .reshape(indices.shape[1], *gradient.shape[gradient.sparse_dims :])
        )
        return SeenGradient(*facts, values, indices)
    rows = None if gradient.rows is None else reader.bytes_of(gradient.rows)
    is_narrow = gradient.kind in NARROW_KINDS
    values = reader.passing_bytes_of(gradient.values).view(np.uint16 if is_narrow else word)
    if values.size != (stored_count(rows, gradient.shape) if rows is not None else math.prod(gradient.shape)):
        raise MalformedError("a stored gradient has another number of elements than its rows")
    factor = None if gradient.factor is None else np.frombuffer(gradient.factor, np.float32)[0]
    kind: Kind = gradient.kind  # type: ignore[assignment]
    nbytes = math.prod(gradient.shape) * word.itemsize
    plain = np.empty(nbytes, np.uint8) if memory is None else memory.take(nbytes)
    dense = plain.view(word).reshape(gradient.shape)
    write_gradient(Form(kind, factor, rows, values), dense)
    return SeenGradient(*facts, dense)
