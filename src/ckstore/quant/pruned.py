"""The published method (ExCP, ICML 2024), for comparison: prune by a threshold, then k-means.

Written after the paper and the description in this project's notes. Where the published code keeps its codebooks in
fp16, these are fp32, so that what is compared is the method.

Invariants:
- What is pruned is exactly zero.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.quant import factors
from ckstore.quant.codebook import clusters_of
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import NO_ESCAPES, Quantized, choose_contexts, squares_of
from ckstore.quant.settings import PrunedWeights


def threshold_of(values: memoryview, settings: PrunedWeights, second_mean: float | None) -> float:
    """Return below which changes are pruned: a multiple of their median magnitude.

    Args:
        values: Changes, fp32.
        settings: The multiple.
        second_mean: Mean of the tensor's second moment, if there is one.
    """
    factor = settings.factor_max
    if second_mean is not None and second_mean > 0:
        factor = min(factor, settings.alpha / math.sqrt(second_mean))
    return factor * float(np.median(np.abs(np.frombuffer(values, np.float32))))


def quantize_pruned(values: memoryview, symbols: memoryview, grid: Grid, threshold: float, bits: int) -> Quantized:
    """Write the symbols of fp32 values."""
    x = np.frombuffer(values, np.float32)
    clusters = clusters_of(x, threshold, (1 << bits) - 1)
    rows, cols = factors.ones(grid.row_count), factors.ones(grid.row)
    edges = (rows.values().data, cols.values().data)
    kernels.bin_values(values, *edges, clusters.bounds.data, symbols, grid.row, grid.phase)
    counts: NDArray[np.uint32] = np.empty(256, np.uint32)
    kernels.histogram(symbols, counts.data)
    sums = squares_of(values, grid)
    found = choose_contexts(symbols, sums, grid, is_by_row=False)
    table, zero = clusters.codebook, clusters.zero
    return Quantized(rows, cols, table, counts.astype(np.float64), found, NO_ESCAPES, sums.total, zero)


def keep_mask(first: NDArray[np.float32], is_changed: NDArray[np.bool_], beta: float, out: NDArray[np.uint8]) -> None:
    """Write 1 where the weight was kept and the first moment is large against its mean magnitude."""
    magnitudes = np.abs(first)
    np.copyto(out, is_changed & (magnitudes > beta * float(magnitudes.mean(dtype=np.float64))))
