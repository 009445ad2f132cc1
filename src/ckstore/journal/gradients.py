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
from ckstore.journal.forms import Form, Kind, form_of, gradient_of, stored_count

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


def word_type_of(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy type in which elements of torch's type are handled: float32, or unsigned integers."""
    return np.dtype(np.float32 if dtype == "float32" else f"u{TORCH_ITEMSIZES[dtype]}")


def store_gradient(seen: SeenGradient, writer: BlobWriter, factors: Iterable[np.float32]) -> Gradient:
    """Add a gradient to the blobs of a point, in its shortest form.

    Args:
        seen: The gradient.
        writer: Where its numbers go.
        factors: Factors that its elements may be multiplied by.
    """
    is_float = seen.dtype in _FLOATS
    width = min(8, seen.values.dtype.itemsize)
    if seen.indices is not None:
        values = writer.add(seen.values, element_width=width, is_float=is_float)
        indices = writer.add(seen.indices, element_width=8, is_float=False)
        sparse_dims = len(seen.indices)
        return Gradient(seen.parameter, seen.dtype, seen.shape, "coo", None, None, values, indices, sparse_dims)
    form = form_of(seen.values.reshape(seen.shape), factors)
    rows = None if form.rows is None else writer.add(form.rows, element_width=1, is_float=False)
    if form.kind in NARROW_KINDS:
        width = 2
    values = writer.add(form.values, element_width=width, is_float=is_float)
    factor = None if form.factor is None else np.float32(form.factor).tobytes()
    return Gradient(seen.parameter, seen.dtype, seen.shape, form.kind, factor, rows, values, None)


def load_gradient(gradient: Gradient, reader: BlobReader) -> SeenGradient:
    """Return a stored gradient. Its arrays may be views of the reader's memory.

    Raises:
        CorruptError: A frame is damaged, or the stored bytes do not have the gradient's shape.
    """
    word = word_type_of(gradient.dtype)
    stored = reader.bytes_of(gradient.values)
    facts = gradient.parameter, gradient.dtype, gradient.shape
    if gradient.indices is not None:
        indices = reader.bytes_of(gradient.indices).view(np.int64)
        indices = indices.reshape(gradient.sparse_dims, -1)
        values = stored.view(word).reshape(indices.shape[1], *gradient.shape[gradient.sparse_dims :])
        return SeenGradient(*facts, values, indices)
    rows = None if gradient.rows is None else reader.bytes_of(gradient.rows)
    is_narrow = gradient.kind in NARROW_KINDS
    values = stored.view(np.uint16 if is_narrow else word)
    if values.size != (stored_count(rows, gradient.shape) if rows is not None else math.prod(gradient.shape)):
        raise MalformedError("a stored gradient has another number of elements than its rows")
    factor = None if gradient.factor is None else np.frombuffer(gradient.factor, np.float32)[0]
    kind: Kind = gradient.kind  # type: ignore[assignment]
    return SeenGradient(*facts, gradient_of(Form(kind, factor, rows, values), gradient.shape, word))
