"""ExCP (Li et al., ICML 2024) in ckstore's frames: the published method with the entropy coder of residuals.

Implemented from the paper. Changes of weights below a multiple of their median are pruned. Moments are kept where the
weight has changed and the first moment is large. K-means quantizes the rest. Codebooks are fp32, like everything else
that is compared; the published code uses fp16. Readers of ckstore decode these frames; ckstore writes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.quant import chunk_codec, geometry
from ckstore.quant.chunk_codec import CODEBOOK, GRID, QuantizedChunk
from ckstore.quant.geometry import ChunkShape, Grid
from ckstore.quant.grid import NO_ESCAPES, SYMBOL_COUNT, Quantized, choose_contexts, squares_of

_BIN_COUNT = 1 << 13
_TURNS = 30


@dataclass(frozen=True)
class Pruning:
    """Parameters of the method.

    Args:
        alpha: A change is pruned below this many times the median magnitude, divided by the root of the mean second
            moment.
        beta: First moments of at most this many times their mean magnitude become zero, and the second moments with
            them.
        bits: Bits of a code; one code is zero.
        factor_max: Upper bound of the multiple of the median; the multiple itself where there is no second moment.
    """

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4
    factor_max: float = 2.5

    def threshold_of(self, changes: np.ndarray, second_mean: float | None) -> float:
        """Return the magnitude below which changes are pruned, from the mean second moment of the tensor, if known."""
        factor = self.factor_max
        if second_mean is not None and second_mean > 0:
            factor = min(factor, self.alpha / math.sqrt(second_mean))
        return factor * float(np.median(np.abs(changes)))

    def kept_moments(self, first: np.ndarray, is_changed: np.ndarray) -> np.ndarray:
        """Return where moments are kept: the weight has changed, and the first moment is large."""
        magnitudes = np.abs(first)
        found: np.ndarray = is_changed & (magnitudes > self.beta * float(magnitudes.mean(dtype=np.float64)))
        return found


def encode_weights(
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    pruning: Pruning,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
    second_mean: float | None = None,
) -> QuantizedChunk | None:
    """Quantize what has changed since the base; None if that does not reduce the size."""
    grid = Grid(plain.nbytes // shape.width, shape.row_nelements, shape.phase)
    values, symbols = scratch.values(4 * grid.count), scratch.planes(grid.count)
    if not kernels.float_changes(plain, base, values, shape.kind):
        return None
    threshold = pruning.threshold_of(np.frombuffer(values, np.float32), second_mean)
    found = _quantized(values, symbols, grid, threshold, pruning.bits)
    return chunk_codec.encode_grid(
        GRID, found, plain, base, shape, grid, scratch=scratch, reconstruction=reconstruction
    )


def encode_moment(
    plain: memoryview,
    keep: np.ndarray,
    shape: ChunkShape,
    pruning: Pruning,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> QuantizedChunk | None:
    """Quantize the moments that are kept and set the others to zero; None if that does not reduce the size."""
    grid = Grid(plain.nbytes // shape.width, shape.row_nelements, shape.phase)
    values, symbols = scratch.values(4 * grid.count), scratch.planes(grid.count)
    if not kernels.float_values(plain, values, shape.kind):
        return None
    np.frombuffer(values, np.float32)[~keep] = 0.0
    found = _quantized(values, symbols, grid, 0.0, pruning.bits)
    how = {"scratch": scratch, "reconstruction": reconstruction}
    return chunk_codec.encode_grid(CODEBOOK, found, plain, memoryview(b""), shape, grid, **how)


def _quantized(values: memoryview, symbols: memoryview, grid: Grid, threshold: float, bits: int) -> Quantized:
    """Write the symbols of fp32 values."""
    clusters = clusters_of(np.frombuffer(values, np.float32), threshold, (1 << bits) - 1)
    rows, cols = geometry.ones(grid.row_count), geometry.ones(grid.row)
    edges = (rows.values().data, cols.values().data)
    kernels.bin_values(values, *edges, clusters.bounds.data, symbols, grid.row, grid.phase)
    counts = np.empty(256, np.uint32)
    kernels.histogram(symbols, counts.data)
    sums = squares_of(values, grid)
    found = choose_contexts(symbols, sums, grid, is_by_row=False)
    table, zero = clusters.codebook, clusters.zero
    return Quantized(rows, cols, table, counts.astype(np.float64), found, NO_ESCAPES, sums.total, zero)


# One-dimensional k-means


@dataclass(frozen=True)
class Clusters:
    """Centroids in rising order, with 0 among them, and the bounds between them.

    Args:
        codebook: An entry for each of 256 symbols.
        bounds: The symbol of a value is the number of bounds that are not greater than the value.
        zero: The symbol of 0.
    """

    codebook: np.ndarray
    bounds: np.ndarray
    zero: int


def clusters_of(values: np.ndarray, threshold: float, count: int) -> Clusters:
    """Return at most ``count`` centroids of the values above a threshold; all others become 0."""
    limit = np.float32(threshold)
    below = _centroids(values[values < -limit], values, limit, count)
    above = _centroids(values[values > limit], values, limit, count)
    centroids = np.concatenate([below, np.zeros(1, np.float32), above])
    inner = [-limit] * bool(below.size) + [np.nextafter(limit, np.float32(np.inf))] * bool(above.size)
    bounds = np.concatenate([_middles(below), np.array(inner, np.float32), _middles(above)])
    codebook = np.zeros(SYMBOL_COUNT, np.float32)
    codebook[: centroids.size] = centroids
    return Clusters(codebook, bounds, below.size)


def _middles(centroids: np.ndarray) -> np.ndarray:
    found: np.ndarray = centroids[:-1] * np.float32(0.5) + centroids[1:] * np.float32(0.5)
    return found


def _centroids(side: np.ndarray, values: np.ndarray, limit: np.float32, count: int) -> np.ndarray:
    """Return the centroids of the values on one side of zero; the two sides share ``count`` by their sizes."""
    kept = int(np.count_nonzero(np.abs(values) > limit))
    if not side.size:
        return np.empty(0, np.float32)
    # Each side that has values has a centroid.
    share = max(1, min(count - (1 if side.size < kept else 0), round(count * side.size / kept)))
    return _lloyd(side, share)


def _lloyd(values: np.ndarray, count: int) -> np.ndarray:
    """Return the centroids, in rising order, after Lloyd's iteration over a histogram."""
    low, high = float(values.min()), float(values.max())
    if low == high or count == 1:
        return np.array([float(values.mean(dtype=np.float64))], np.float32)
    places = ((values.astype(np.float64) - low) * ((_BIN_COUNT - 1) / (high - low))).astype(np.int64)
    masses = np.bincount(places, minlength=_BIN_COUNT).astype(np.float64)
    sums = np.bincount(places, weights=values, minlength=_BIN_COUNT)
    used = masses > 0
    masses, sums = masses[used], sums[used]
    means = sums / masses
    # For many centroids the best density is the value density to the power of 1/3.
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
