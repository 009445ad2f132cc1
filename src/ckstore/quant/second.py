"""Second moments: a factor for each row and one for each column, and a grid of logarithms for what these leave over.

Rank-1 factors are the row and column means of Adafactor (Shazeer and Stern, 2018).

Invariants:
- What was above zero stays above zero: there is a floor, the least moment of the chunk that is.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.quant import contexts, factors
from ckstore.quant.codebook import conditional_means
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import NO_ESCAPES, ZERO, Quantized
from ckstore.quant.settings import LEVELS_MAX, SecondMomentSettings

# Of fewer rows, factors of columns would be the moments themselves.
_ROWS_MIN = 8
# The grid reaches so many powers of two of the root on either side of the factors.
_REACH = 16
# Smaller moments have no factors that are normal numbers.
_MOMENT_MIN = 2.0**-118


def quantize_second(
    values: memoryview, symbols: memoryview, grid: Grid, settings: SecondMomentSettings
) -> Quantized | None:
    """Write the symbols of fp32 moments; None where they cannot be quantized."""
    row_sums, col_sums = np.empty(grid.row_count), np.empty(grid.row)
    kernels.sums_of_values(values, row_sums.data, col_sums.data, grid.row, grid.phase, False)
    x = np.frombuffer(values, np.float32)
    greatest = float(x.max())
    if float(x.min()) < 0 or not _MOMENT_MIN < greatest < factors.FACTOR_MAX:
        return None
    rows, cols = _scales_of_second(row_sums, col_sums, grid)
    if settings.form == "rank1" and has_factors(grid):
        np.frombuffer(symbols, np.uint8).fill(ZERO)
        table, counts = np.zeros(256, np.float32), np.zeros(256)
        table[ZERO], counts[ZERO] = 1.0, grid.count
    else:
        totals = _on_log_grid(values, symbols, rows.values(), cols.values(), grid, settings.log_step)
        table, counts = conditional_means(totals, zero=None), totals[:256]
    no_classes = contexts.one_stream(np.zeros(grid.row_count, np.uint8), np.zeros(grid.row, np.uint8))
    floor = _least_positive(x)
    return Quantized(rows, cols, table, counts, no_classes, NO_ESCAPES, 0.0, None, floor)


def _scales_of_second(
    row_sums: NDArray[np.float64], col_sums: NDArray[np.float64], grid: Grid
) -> tuple[factors.Factors, factors.Factors]:
    """Return the factors of rows and columns whose product comes nearest, from the sums of both."""
    row_means = row_sums / grid.row_sizes()
    if not has_factors(grid):
        return factors.factors_of(row_means), factors.ones(grid.row)
    mean = float(row_sums.sum()) / grid.count
    return factors.factors_of(row_means / mean), factors.factors_of(col_sums / np.maximum(grid.col_sizes(), 1))


def _log_bounds(log_step: float) -> tuple[int, NDArray[np.float32]]:
    """Return how many levels a grid of logarithms has on either side, and the bounds between them."""
    levels = min(LEVELS_MAX, math.ceil(_REACH / log_step))
    return levels, np.exp2(2.0 * log_step * (np.arange(-levels, levels) + 0.5)).astype(np.float32)


def has_factors(grid: Grid) -> bool:
    """Return whether a chunk has rows enough for factors of its columns."""
    return grid.row_count >= _ROWS_MIN


def _on_log_grid(
    values: memoryview,
    symbols: memoryview,
    rows: NDArray[np.float32],
    cols: NDArray[np.float32],
    grid: Grid,
    log_step: float,
) -> NDArray[np.float64]:
    """Write the symbols of what the factors leave over; return how often each occurs, and its sum."""
    levels, bounds = _log_bounds(log_step)
    above, beside = _inverse(rows), _inverse(cols)
    kernels.bin_values(values, above.data, beside.data, bounds.data, symbols, grid.row, grid.phase)
    codes = np.frombuffer(symbols, np.uint8)
    np.add(codes, np.uint8(ZERO - levels), out=codes)
    totals = np.empty(512)
    kernels.sums_of_levels(values, symbols, above.data, beside.data, totals.data, grid.row, grid.phase)
    return totals


def _inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    inverses = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=inverses, where=scales > 0)
    return inverses


def _least_positive(x: NDArray[np.float32]) -> float:
    # Words of floats that are not negative have the order of the numbers; those of zeros become the greatest.
    words = x.view(np.uint32) - np.uint32(1)
    return float((words.min() + np.uint32(1)).view(np.float32))
