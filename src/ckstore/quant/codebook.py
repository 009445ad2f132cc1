"""Which value each symbol stands for: conditional means of a grid, and k-means in one dimension by histogram.

Invariants:
- A codebook has an entry for each of 256 symbols, finite; those of symbols that do not occur are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SYMBOL_COUNT = 256

_BIN_COUNT = 1 << 13
_TURNS = 30


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


@dataclass(frozen=True, slots=True)
class Clusters:
    """Centroids in rising order, with 0 among them, and the bounds between them.

    Args:
        codebook: An entry for each of 256 symbols.
        bounds: A value belongs to the symbol whose number is that of the bounds at most as great.
        zero: The symbol of 0.
    """

    codebook: Floats
    bounds: Floats
    zero: int


def clusters_of(values: Floats, threshold: float, count: int) -> Clusters:
    """Return at most ``count`` centroids of the values beyond a threshold; all within it become 0."""
    limit = np.float32(threshold)
    below = _centroids(values[values < -limit], values, limit, count)
    above = _centroids(values[values > limit], values, limit, count)
    centroids = np.concatenate([below, np.zeros(1, np.float32), above])
    inner = [-limit] * bool(below.size) + [np.nextafter(limit, np.float32(np.inf))] * bool(above.size)
    bounds = np.concatenate([_middles(below), np.array(inner, np.float32), _middles(above)])
    codebook = np.zeros(SYMBOL_COUNT, np.float32)
    codebook[: centroids.size] = centroids
    return Clusters(codebook, bounds, below.size)


def _middles(centroids: Floats) -> Floats:
    found: Floats = centroids[:-1] * np.float32(0.5) + centroids[1:] * np.float32(0.5)
    return found


def _centroids(side: Floats, values: Floats, limit: np.float32, count: int) -> Floats:
    """Return the centroids of the values on one side of zero; both sides share ``count`` by their sizes."""
    kept = int(np.count_nonzero(np.abs(values) > limit))
    if not side.size:
        return np.empty(0, np.float32)
    # Each side that has values has a centroid.
    share = max(1, min(count - (1 if side.size < kept else 0), round(count * side.size / kept)))
    return _lloyd(side, share)


def _lloyd(values: Floats, count: int) -> Floats:
    """Return the centroids that Lloyd's iteration over a histogram ends in, in rising order."""
    low, high = float(values.min()), float(values.max())
    if low == high or count == 1:
        return np.array([float(values.mean(dtype=np.float64))], np.float32)
    places = ((values.astype(np.float64) - low) * ((_BIN_COUNT - 1) / (high - low))).astype(np.int64)
    masses = np.bincount(places, minlength=_BIN_COUNT).astype(np.float64)
    sums = np.bincount(places, weights=values, minlength=_BIN_COUNT)
    used = masses > 0
    masses, sums = masses[used], sums[used]
    means = sums / masses
    # Density to the power of a third is where the best centroids lie when there are many.
    spread = np.cumsum(np.cbrt(masses))
    starts = np.interp((np.arange(count) + 0.5) / count * spread[-1], spread, means)
    centroids = np.unique(starts)
    total_masses, total_sums = np.concatenate([[0], np.cumsum(masses)]), np.concatenate([[0], np.cumsum(sums)])
    for _ in range(_TURNS):
        edges = np.searchsorted(means, (centroids[:-1] + centroids[1:]) / 2)
        edges = np.concatenate([[0], edges, [means.size]])
        mass = total_masses[edges[1:]] - total_masses[edges[:-1]]
        filled = mass > 0
        moved = (total_sums[edges[1:]] - total_sums[edges[:-1]])[filled] / mass[filled]
        if moved.size == centroids.size and np.array_equal(moved, centroids):
            break
        centroids = moved
    return np.unique(centroids.astype(np.float32))
