"""How far two arrays of the same kind are apart: numbers for people and for bounds, summed up piece by piece.

Invariants:
- Sums are of float64, whatever the elements are; what overflows there is infinite, not wrong.
- Where both sides are the same NaN or infinity bit by bit, they are not apart; where only one is, they are infinitely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE_COUNT = 1 << 18
"""Elements that are taken at once: temporaries stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Sums over the elements of two arrays; they add up.

    Args:
        count: Elements.
        changed_count: Elements whose bits differ.
        max_abs: Greatest absolute difference.
        sum_sq_difference: Sum of the squared differences.
        sum_sq_value: Sum of the squares of the first array's elements, NaN and infinities left out.
    """

    count: int = 0
    changed_count: int = 0
    max_abs: float = 0.0
    sum_sq_difference: float = 0.0
    sum_sq_value: float = 0.0

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.count + other.count,
            self.changed_count + other.changed_count,
            max(self.max_abs, other.max_abs),
            self.sum_sq_difference + other.sum_sq_difference,
            self.sum_sq_value + other.sum_sq_value,
        )

    @property
    def rms(self) -> float:
        """RMS of the difference."""
        return math.sqrt(self.sum_sq_difference / self.count) if self.count else 0.0

    @property
    def rms_value(self) -> float:
        """RMS of the first array."""
        return math.sqrt(self.sum_sq_value / self.count) if self.count else 0.0

    @property
    def relative(self) -> float:
        """RMS of the difference in that of the first array; infinite where only that is zero."""
        if self.sum_sq_difference == 0:
            return 0.0
        return math.sqrt(self.sum_sq_difference / self.sum_sq_value) if self.sum_sq_value else math.inf


def floats_of(plain: memoryview, dtype: str) -> NDArray[Any]:
    """Return elements of ``"float32"``, ``"bfloat16"`` or ``"float16"`` as an array of float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(plain, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(plain, "<f4" if dtype == "float32" else "<f2").astype(np.float32, copy=False)


def distance_of(one: NDArray[Any], other: NDArray[Any]) -> Distance:
    """Return how far two arrays of equal dtype and shape are apart; complex numbers by their parts."""
    total = Distance()
    flat, beside = _real(one.reshape(-1)), _real(other.reshape(-1))
    for begin in range(0, len(flat), _PIECE_COUNT):
        total += _piece(flat[begin : begin + _PIECE_COUNT], beside[begin : begin + _PIECE_COUNT])
    return total


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite."""
    # The least and the greatest tell, and need no memory: both are NaN where any element is.
    return not values.size or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _real(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind != "c":
        return values
    return np.ascontiguousarray(values).view(values.real.dtype)


def _piece(one: NDArray[Any], other: NDArray[Any]) -> Distance:
    words = f"u{one.dtype.itemsize}" if one.dtype.itemsize in (1, 2, 4, 8) else None
    if words is None:
        # Long doubles have padding, so values are compared and not bits.
        changed = ~((one == other) | ((one != one) & (other != other)))
    else:
        changed = np.ascontiguousarray(one).view(words) != np.ascontiguousarray(other).view(words)
    left, right = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(left - right)
        # Not a number minus itself is still no difference where the bits agree.
        difference[~changed] = 0.0
        difference[np.isnan(difference)] = np.inf
        finite = np.where(np.isfinite(left), left, 0.0)
        return Distance(
            count=len(one),
            changed_count=int(np.count_nonzero(changed)),
            max_abs=float(difference.max(initial=0.0)),
            sum_sq_difference=float(np.dot(difference, difference)),
            sum_sq_value=float(np.dot(finite, finite)),
        )
