"""First moments over the root of the second: a grid of uniform steps, or three values.

Invariants:
- Quotients are clipped before they come here, so that a vanishing second moment makes no great step of a resume.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.quant import factors
from ckstore.quant.codebook import conditional_means
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import NO_ESCAPES, ZERO, Quantized, Steps, choose_contexts, quantize_grid, squares_of
from ckstore.quant.settings import LEVELS_MAX, FirstMomentSettings


def quantize_first(
    values: memoryview, symbols: memoryview, grid: Grid, settings: FirstMomentSettings
) -> Quantized | None:
    """Write the symbols of fp32 quotients; None where there is nothing to quantize."""
    if settings.form == "ternary":
        return _quantize_ternary(values, symbols, grid, settings)
    steps = Steps(settings.step, settings.dead_zone, _levels_of_first(settings), "one")
    return quantize_grid(values, symbols, grid, steps)


def _levels_of_first(settings: FirstMomentSettings) -> int:
    """Return how many levels on either side reach to the clip."""
    return min(LEVELS_MAX, max(1, math.ceil(settings.clip / settings.step)))


def _ternary_bounds(settings: FirstMomentSettings) -> NDArray[np.float32]:
    """Return the two bounds between three values."""
    limit = np.float32(settings.step * settings.dead_zone)
    return np.array([-limit, np.nextafter(limit, np.float32(np.inf))], np.float32)


def _quantize_ternary(
    values: memoryview, symbols: memoryview, grid: Grid, settings: FirstMomentSettings
) -> Quantized | None:
    sums = squares_of(values, grid)
    if not 0.0 < sums.total < np.inf:
        return None
    bounds = _ternary_bounds(settings)
    rows, cols = factors.ones(grid.row_count), factors.ones(grid.row)
    edges = (rows.values().data, cols.values().data)
    kernels.bin_values(values, *edges, bounds.data, symbols, grid.row, grid.phase)
    codes = np.frombuffer(symbols, np.uint8)
    np.add(codes, np.uint8(ZERO - 1), out=codes)
    totals = np.empty(512)
    kernels.sums_of_levels(values, symbols, *edges, totals.data, grid.row, grid.phase)
    found = choose_contexts(symbols, sums, grid, is_by_row=False)
    table = conditional_means(totals, zero=ZERO)
    return Quantized(rows, cols, table, totals[:256].copy(), found, NO_ESCAPES, sums.total, ZERO)
