"""Which value each symbol stands for: the conditional means of a grid.

Invariants:
- A codebook has an entry for each of 256 symbols, finite; those of symbols that do not occur are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SYMBOL_COUNT = 256


@dataclass(frozen=True, slots=True)
class Occurring:
    """The symbols from the first that occurs to the last."""

    first: int
    count: int

    @staticmethod
    def of(counts: NDArray[np.float64]) -> Occurring:
        """Return those that occur so often; one symbol does at least."""
        present = np.flatnonzero(counts)
        return Occurring(int(present[0]), int(present[-1] - present[0]) + 1)


def conditional_means(totals: NDArray[np.float64], *, zero: int | None) -> Floats:
    """Return the mean of the values of each symbol.

    Args:
        totals: 256 counts, then 256 sums.
        zero: The symbol that stands for 0 whatever its mean.
    """
    counts, sums = totals[:SYMBOL_COUNT], totals[SYMBOL_COUNT:]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 0.0)
    if zero is not None:
        means[zero] = 0.0
    return means.astype(np.float32)
