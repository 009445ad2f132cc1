"""Moments where the second one vanishes, or nearly: no form tells it, and the first one has no direction there.

A second moment below the least normal number comes back as many times what it is; one that is zero may come back as
what its row and its column have. A first moment that kept its quotient there would be a step that nobody would have
made, so it is dropped, and what that loses is counted: much of it makes both moments exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_TINY = 2.0**-128
"""A second moment below this may be told as more than four times what it is: forms know none below 2 ** -126."""


def quotient_max(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the greatest |m| / sqrt(v); infinite where v vanishes and m does not."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.abs(first) / np.sqrt(second)
    return float(np.where(first == 0, np.float32(0), quotient).max(initial=0.0))


def raised(values: NDArray[Any], became: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return where second moments became many times what they are because they are next to nothing; None: nowhere."""
    if float(values.min(initial=1.0)) >= _TINY:
        return None
    found: NDArray[np.bool_] = (values > 0) & (values < _TINY)
    found &= became > 4 * values
    return found if found.any() else None


def untold(second: NDArray[Any], where: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Return where first moments cannot be told: where the second one was raised, or is zero; None: nowhere."""
    is_zero: NDArray[np.bool_] = second == 0
    if not is_zero.any():
        return where
    return is_zero if where is None else is_zero | where


def sum_sq(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the sum of the squared differences."""
    difference = one.astype(np.float64) - other
    return float(np.dot(difference, difference))
