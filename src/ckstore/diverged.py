"""Look for NaN and infinity in tensors of every kind of float, however they lie: a run that diverged must be seen.

Invariants:
- Only elements of the tensor count; what else lies in its memory does not.
- Memory beside the state is that of a piece, but for elements that lie strided in storages that are read from files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.capture import Captured
from ckstore.distance import is_finite
from ckstore.lossy import memory_shape
from ckstore.tensor import TensorSpec, byte_strides_of, count_of, extent_of

_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Kind:
    """How elements tell that they are no numbers.

    Args:
        dtype: What their parts are looked at as.
        mask: Bits of integers to compare; 0: they are floats of numpy.
        wrong: What these bits are in NaN and, where there is one, infinity.
        parts: Two for complex numbers.
    """

    dtype: str
    mask: int = 0
    wrong: int = 0
    parts: int = 1

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.parts * np.dtype(self.dtype).itemsize


_HALF = _Kind("<u2", 0x7C00, 0x7C00)
_SINGLE, _DOUBLE = _Kind("<f4"), _Kind("<f8")

_KINDS: Mapping[str, _Kind] = {
    "float16": _HALF,
    "bfloat16": _Kind("<u2", 0x7F80, 0x7F80),
    "float32": _SINGLE,
    "float64": _DOUBLE,
    "complex32": replace(_HALF, parts=2),
    "complex64": replace(_SINGLE, parts=2),
    "complex128": replace(_DOUBLE, parts=2),
    "float8_e4m3fn": _Kind("u1", 0x7F, 0x7F),
    "float8_e5m2": _Kind("u1", 0x7C, 0x7C),
    "float8_e4m3fnuz": _Kind("u1", 0xFF, 0x80),
    "float8_e5m2fnuz": _Kind("u1", 0xFF, 0x80),
    "float8_e8m0fnu": _Kind("u1", 0xFF, 0xFF),
    "<f2": _HALF,
    "<f4": _SINGLE,
    "<f8": _DOUBLE,
    "<c8": replace(_SINGLE, parts=2),
    "<c16": replace(_DOUBLE, parts=2),
    ">f4": _Kind(">f4"),
    ">f8": _Kind(">f8"),
}


def is_diverged(captured: Captured, spec: TensorSpec) -> bool:
    """Whether a tensor holds NaN or infinity."""
    kind = _KINDS.get(spec.dtype)
    nbytes = count_of(spec.shape) * (kind.width if kind else 0)
    if kind is None or not nbytes:
        return False
    storage = captured.storages[spec.storage]
    if memory_shape(replace(spec, offset=0), kind.width, nbytes) is None:
        return _is_wrong_strided(captured, spec, kind)
    end = spec.offset + nbytes
    pieces = [(start, min(end, start + _PIECE_NBYTES)) for start in range(spec.offset, end, _PIECE_NBYTES)]
    return any(_is_wrong(np.frombuffer(storage.read(*piece), kind.dtype), kind) for piece in pieces)


def _is_wrong_strided(captured: Captured, spec: TensorSpec, kind: _Kind) -> bool:
    """Whether a tensor whose elements have gaps, or lie upon each other, holds what is no number."""
    strides = byte_strides_of(spec.library, spec.strides, kind.width)
    # What is repeated is looked at once.
    shape = tuple(length if step else 1 for length, step in zip(spec.shape, strides, strict=True))
    low, high = extent_of(shape, strides, kind.width)
    plain = captured.storages[spec.storage].read(spec.offset + low, spec.offset + high)
    part_nbytes = kind.width // kind.parts
    every: NDArray[Any] = np.ndarray(
        (*shape, kind.parts), kind.dtype, plain, offset=-low, strides=(*strides, part_nbytes)
    )
    height = max(1, _PIECE_NBYTES * shape[0] // (kind.width * count_of(shape)))
    return any(_is_wrong(every[start : start + height], kind) for start in range(0, shape[0], height))


def _is_wrong(values: NDArray[Any], kind: _Kind) -> bool:
    if not kind.mask:
        return not is_finite(values)
    return bool(((values & values.dtype.type(kind.mask)) == kind.wrong).any())
