"""The error that was made, measured against what was given."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels


@dataclass(frozen=True, slots=True)
class Errors:
    """What reconstructions are off by; add those of chunks to get that of a tensor.

    Args:
        count: Elements.
        max_abs: Greatest difference of an element.
        sum_sq_error: Sum of the differences' squares.
        sum_sq_value: Of the values' squares.
        sum_sq_change: Of the squares of the changes since the base, where there is one; of the values elsewhere.
        kept_count: Elements that are not quantized to zero.
        escape_count: Elements that are stored as they are.
        u_max: Of first moments the greatest quotient by the root of the second that a resume will see; else 0.
    """

    count: int = 0
    max_abs: float = 0.0
    sum_sq_error: float = 0.0
    sum_sq_value: float = 0.0
    sum_sq_change: float = 0.0
    kept_count: int = 0
    escape_count: int = 0
    u_max: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.count + other.count,
            max(self.max_abs, other.max_abs),
            self.sum_sq_error + other.sum_sq_error,
            self.sum_sq_value + other.sum_sq_value,
            self.sum_sq_change + other.sum_sq_change,
            self.kept_count + other.kept_count,
            self.escape_count + other.escape_count,
            max(self.u_max, other.u_max),
        )

    @property
    def rel_rms(self) -> float:
        """RMS error in the RMS of the values; infinite where only the values vanish."""
        return _root_of_ratio(self.sum_sq_error, self.sum_sq_value)

    @property
    def rel_rms_change(self) -> float:
        """RMS error in the RMS of the changes; infinite where only the changes vanish."""
        return _root_of_ratio(self.sum_sq_error, self.sum_sq_change)

    @property
    def kept_fraction(self) -> float:
        """Share of the elements that are not quantized to zero."""
        return self.kept_count / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a reconstruction is off by.

    Args:
        max_abs: Greatest difference of an element.
        sum_sq_error: Sum of the differences' squares.
        sum_sq_value: Of the values' squares.
        is_same: Whether no bit differs, where no number does; of no meaning elsewhere.
    """

    max_abs: float
    sum_sq_error: float
    sum_sq_value: float
    is_same: bool

    @property
    def is_told(self) -> bool:
        """Whether these numbers tell what is lost: where only signs of zeros differ they do not, so it must not be."""
        is_finite = math.isfinite(self.max_abs) and math.isfinite(self.sum_sq_error)
        return is_finite and (self.max_abs > 0 or self.is_same)


def measure(plain: memoryview, made: memoryview, kind: int) -> Measured:
    """Return what elements that were made of others are off by."""
    max_abs, sum_sq_error, sum_sq_value = kernels.measure_values(plain, made, kind)
    return Measured(max_abs, sum_sq_error, sum_sq_value, not max_abs and made == plain)


def greatest_quotient(
    table: NDArray[np.float32], counts: NDArray[np.float64], first: NDArray[np.float64], second: NDArray[np.float64]
) -> float:
    """Return the greatest magnitude of the codebook's entries that occur, and of the escapes' quotients.

    Args:
        table: What each symbol stands for.
        counts: How often it occurs.
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
