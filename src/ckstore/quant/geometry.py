"""Where the elements of a chunk lie in the rows and columns of their tensor.

Invariants:
- Rows have 16 to 65,536 elements; tensors that have no such rows are seen as rows of 4096.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import UsageError

FloatName = Literal["float32", "bfloat16", "float16"]

KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
"""How the kernels call the dtypes."""
WIDTHS: dict[int, int] = {0: 4, 1: 2, 2: 2}

ROW_MIN, ROW_MAX = 16, 1 << 16
ROW_OTHERWISE = 4096


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What a chunk is of its tensor.

    Args:
        dtype: Of the elements.
        row_nelements: Elements of a row of the tensor.
        phase: Where in its row the first element of the chunk lies.

    Raises:
        UsageError: There are no such rows, or another dtype.
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
        """Return that of the chunk that begins with this element of a contiguous tensor."""
        row = math.prod(shape[1:]) if len(shape) > 1 else 0
        row = row if ROW_MIN <= row <= ROW_MAX else ROW_OTHERWISE
        return ChunkShape(dtype, row, element_offset % row)

    @property
    def kind(self) -> int:
        """How the kernels call the dtype."""
        return KINDS[self.dtype]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.kind]


@dataclass(frozen=True, slots=True)
class Grid:
    """The rows and columns that a chunk of ``count`` elements touches."""

    count: int
    row: int
    phase: int

    @property
    def row_count(self) -> int:
        """Rows touched."""
        return -(-(self.phase + self.count) // self.row) if self.count else 0

    def row_sizes(self) -> NDArray[np.int64]:
        """Return how many elements of each row are there."""
        sizes = np.full(self.row_count, self.row, np.int64)
        if self.count:
            sizes[0] -= self.phase
            sizes[-1] -= self.row_count * self.row - self.phase - self.count
        return sizes

    def col_sizes(self) -> NDArray[np.int64]:
        """Return how many elements of each column are there."""
        sizes = np.full(self.row, self.row_count, np.int64)
        if self.count:
            sizes[: self.phase] -= 1
            sizes[(self.phase + self.count - 1) % self.row + 1 :] -= 1
        return sizes
