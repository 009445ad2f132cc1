"""The rows and columns of a chunk, and positive factors for them, one byte each.

Rows have 16 to 65,536 elements. A tensor without such rows is treated as rows of 4,096.

Factors are logarithms whose powers come from a table, so they are exact on every machine. Code 0 is the factor 0. Code
c is ``2 ** (exponent + (c - 1) / 2 ** octave_bits)``, correctly rounded to fp32: an integer exponent, and one of the
sixteen mantissas below.

Invariants:
- Decoding uses integers only. For any codes, factors are 0 or normal fp32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import MalformedError, UsageError

FloatName = Literal["float32", "bfloat16", "float16"]

KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
"""The kernels' numbers of the dtypes."""
WIDTHS: dict[int, int] = {0: 4, 1: 2, 2: 2}

ROW_MIN, ROW_MAX = 16, 1 << 16
ROW_OTHERWISE = 4096


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The position of a chunk in its tensor.

    Args:
        dtype: Of the elements.
        row_nelements: Elements per row of the tensor.
        phase: Position of the chunk's first element in its row.

    Raises:
        UsageError: The dtype, the row length or the phase is out of range.
    """

    dtype: FloatName
    row_nelements: int
    phase: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in KINDS or not ROW_MIN <= self.row_nelements <= ROW_MAX:
            raise UsageError("a chunk has rows of 16 to 65,536 floats of two or four bytes", where=repr(self))
        if not 0 <= self.phase < self.row_nelements:
            raise UsageError("a chunk begins within a row", where=repr(self))

    @staticmethod
    def of(shape: Sequence[int], dtype: FloatName, element_offset: int = 0) -> ChunkShape:
        """Return the position of the chunk that begins with this element of a contiguous tensor."""
        row = math.prod(shape[1:]) if len(shape) > 1 else 0
        row = row if ROW_MIN <= row <= ROW_MAX else ROW_OTHERWISE
        return ChunkShape(dtype, row, element_offset % row)

    @property
    def kind(self) -> int:
        """The kernels' number of the dtype."""
        return KINDS[self.dtype]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.kind]


@dataclass(frozen=True, slots=True)
class Grid:
    """The rows and columns that a chunk of ``count`` elements covers, wholly or in part."""

    count: int
    row: int
    phase: int

    @property
    def row_count(self) -> int:
        """Number of rows, partial ones included."""
        return -(-(self.phase + self.count) // self.row) if self.count else 0

    def row_sizes(self) -> NDArray[np.int64]:
        """Return the number of the chunk's elements in each row."""
        sizes = np.full(self.row_count, self.row, np.int64)
        if self.count:
            sizes[0] -= self.phase
            sizes[-1] -= self.row_count * self.row - self.phase - self.count
        return sizes

    def col_sizes(self) -> NDArray[np.int64]:
        """Return the number of the chunk's elements in each column."""
        sizes = np.full(self.row, self.row_count, np.int64)
        if self.count:
            sizes[: self.phase] -= 1
            sizes[(self.phase + self.count - 1) % self.row + 1 :] -= 1
        return sizes


FACTOR_MAX = 2.0**100
"""Bound on factors."""

_OCTAVE_BITS = (4, 3, 2)
_EXPONENT_MIN, _EXPONENT_MAX = -126, 127
_CODE_MAX = 255

# The mantissas of 2 ** (i / 16), correctly rounded to 23 bits.
_MANTISSAS = np.array(
    [
        *(0x000000, 0x05AAC3, 0x0B95C2, 0x11C3D3, 0x1837F0, 0x1EF532, 0x25FED7, 0x2D583F),
        *(0x3504F3, 0x3D08A4, 0x45672A, 0x4E248C, 0x5744FD, 0x60CCDF, 0x6AC0C7, 0x75257D),
    ],
    np.uint32,
)


@dataclass(frozen=True, slots=True)
class Factors:
    """Coded factors.

    Args:
        codes: One byte per factor.
        exponent: The exponent of the smallest factor.
        octave_bits: Binary logarithm of the factors per octave: 2, 3 or 4.
    """

    codes: NDArray[np.uint8]
    exponent: int
    octave_bits: int

    def values(self) -> NDArray[np.float32]:
        """Return the factors."""
        steps = self.codes.astype(np.int32) - 1
        places = (steps & ((1 << self.octave_bits) - 1)) << (4 - self.octave_bits)
        words = (steps >> self.octave_bits) + (self.exponent + 127)
        found: NDArray[np.uint32] = (words.astype(np.uint32) << 23) | _MANTISSAS[places]
        found[self.codes == 0] = 0
        return found.view(np.float32)


def ones(count: int) -> Factors:
    """Return ``count`` factors of 1."""
    return Factors(np.ones(count, np.uint8), 0, 4)


def factors_of(values: NDArray[np.float64]) -> Factors:
    """Code the nearest factors, in the finest steps that span all of them.

    Args:
        values: Non-negative numbers below ``FACTOR_MAX``. Those below the range of a byte get the smallest factor.
    """
    positive = values[values > 0]
    if not positive.size:
        return Factors(np.zeros(values.size, np.uint8), 0, 4)
    highest, lowest = math.log2(float(positive.max())), math.log2(float(positive.min()))
    octave_bits = next((bits for bits in _OCTAVE_BITS if highest - lowest <= (254 >> bits) - 1), _OCTAVE_BITS[-1])
    exponent = max(_EXPONENT_MIN, math.floor(highest) + 1 - (254 >> octave_bits))
    with np.errstate(divide="ignore"):
        steps = np.rint((np.log2(values) - exponent) * (1 << octave_bits)) + 1
    codes = np.where(values > 0, np.clip(steps, 1, _CODE_MAX), 0)
    return Factors(codes.astype(np.uint8), exponent, octave_bits)


def require_known(exponent: int, octave_bits: int) -> None:
    """Check that all factors are normal numbers.

    Raises:
        MalformedError: The exponent or ``octave_bits`` is out of range.
    """
    is_known = octave_bits in _OCTAVE_BITS and exponent >= _EXPONENT_MIN
    if not is_known or exponent + (254 >> octave_bits) > _EXPONENT_MAX:
        raise MalformedError(
            f"factors have the exponent {exponent} and {octave_bits} bits per octave, which no writer makes"
        )
