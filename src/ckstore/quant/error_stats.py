"""Measure the error of a quantized chunk, and the distance of two arrays.

Invariants:
- Sums are computed in float64. A sum that overflows is infinite, not wrong.
- Two elements that are the same NaN or infinity, bit by bit, have distance zero. If only one of them is NaN or
  infinite, the distance is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of a quantized chunk. Those of a tensor are the sum of its chunks'.

    Args:
        count: Elements.
        max_abs: Greatest error of an element.
        sum_sq_error: Sum of the squared errors.
        sum_sq_value: Sum of the squared values.
        sum_sq_change: Sum of the squared changes since the base; without a base, of the squared values.
        nonzero_count: Elements that are not quantized to zero.
        escape_count: Elements that are stored exactly.
        max_update_ratio: Of first moments, the greatest |m| / sqrt(v) after a restore; else 0.
    """

    count: int = 0
    max_abs: float = 0.0
    sum_sq_error: float = 0.0
    sum_sq_value: float = 0.0
    sum_sq_change: float = 0.0
    nonzero_count: int = 0
    escape_count: int = 0
    max_update_ratio: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.count + other.count,
            max(self.max_abs, other.max_abs),
            self.sum_sq_error + other.sum_sq_error,
            self.sum_sq_value + other.sum_sq_value,
            self.sum_sq_change + other.sum_sq_change,
            self.nonzero_count + other.nonzero_count,
            self.escape_count + other.escape_count,
            max(self.max_update_ratio, other.max_update_ratio),
        )

    @property
    def rel_rms(self) -> float:
        """RMS error divided by the RMS of the values; infinite if only the values are zero."""
        return _root_of_ratio(self.sum_sq_error, self.sum_sq_value)

    @property
    def rel_rms_change(self) -> float:
        """RMS error divided by the RMS of the changes; infinite if only the changes are zero."""
        return _root_of_ratio(self.sum_sq_error, self.sum_sq_change)

    @property
    def nonzero_share(self) -> float:
        """Share of the elements that are not quantized to zero."""
        return self.nonzero_count / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured errors of a reconstruction.

    Args:
        max_abs: Greatest error of an element.
        sum_sq_error: Sum of the squared errors.
        sum_sq_value: Sum of the squared values.
        is_same: If ``max_abs`` is 0: whether all bits are equal; else without meaning.
    """

    max_abs: float
    sum_sq_error: float
    sum_sq_value: float
    is_same: bool

    @property
    def is_measured(self) -> bool:
        """True if the numbers describe the loss. They do not if only signs of zeros differ, or if one is infinite."""
        is_finite = math.isfinite(self.max_abs) and math.isfinite(self.sum_sq_error)
        return is_finite and (self.max_abs > 0 or self.is_same)


def measure(plain: memoryview, made: memoryview, kind: int) -> Measured:
    """Return the errors of a reconstruction, in elements of the kernels' dtype ``kind``."""
    max_abs, sum_sq_error, sum_sq_value = kernels.measure_values(plain, made, kind)
    return Measured(max_abs, sum_sq_error, sum_sq_value, not max_abs and made == plain)


def greatest_quotient(
    table: NDArray[np.float32], counts: NDArray[np.float64], first: NDArray[np.float64], second: NDArray[np.float64]
) -> float:
    """Return the greatest magnitude of the codebook entries in use and of the quotients of escapes.

    Args:
        table: The value of each symbol.
        counts: How often each symbol occurs.
        first: First moments of the escapes.
        second: Their second moments.
    """
    found = float(np.abs(table[counts > 0]).max(initial=0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.abs(first) / np.sqrt(second)
    return max(found, float(np.nan_to_num(quotients, posinf=math.inf).max(initial=0.0)))


def _root_of_ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return math.sqrt(part / whole) if whole > 0.0 else math.inf


_PIECE_COUNT = 1 << 18
"""Elements per step, so that temporaries stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Sums over the elements of two arrays. Those of two parts can be added.

    Args:
        count: Elements.
        changed_count: Elements whose bits differ.
        max_abs: Greatest absolute difference.
        sum_sq_difference: Sum of the squared differences.
        sum_sq_value: Sum of the squares of the first array's finite elements.
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
        """RMS of the difference divided by the RMS of the first array; infinite if only that is zero."""
        if self.sum_sq_difference == 0:
            return 0.0
        return math.sqrt(self.sum_sq_difference / self.sum_sq_value) if self.sum_sq_value else math.inf


def floats_of(plain: memoryview, dtype: str) -> NDArray[Any]:
    """Return elements of ``"float32"``, ``"bfloat16"`` or ``"float16"`` as an array of float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(plain, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(plain, "<f4" if dtype == "float32" else "<f2").astype(np.float32, copy=False)


def distance_of(one: NDArray[Any], other: NDArray[Any]) -> Distance:
    """Return the distance of two arrays of equal dtype and shape. Complex numbers are compared by their parts."""
    total = Distance()
    flat, other_flat = _real(one.reshape(-1)), _real(other.reshape(-1))
    for begin in range(0, len(flat), _PIECE_COUNT):
        total += _piece(flat[begin : begin + _PIECE_COUNT], other_flat[begin : begin + _PIECE_COUNT])
    return total


def is_finite(values: NDArray[Any]) -> bool:
    """Return True if no element is NaN or infinite."""
    # Minimum and maximum need no temporary array; both are NaN if any element is.
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
        # NaN and infinity minus themselves are NaN, but equal bits have distance zero.
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
