"""Uniform steps around a dead zone, with a scale for each row and a mean for each level.

Invariants:
- Symbols are 128 plus the level; 128 stands for 0 exactly. What is beyond the last level is stored as it is.
- Symbols and means are computed in IEEE arithmetic and a fixed order: the same values give the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.quant import contexts, factors
from ckstore.quant.codebook import conditional_means
from ckstore.quant.contexts import Contexts
from ckstore.quant.factors import Factors
from ckstore.quant.geometry import Grid

ZERO = 128
_ESCAPE = 0
_FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Symbols, which lie in the caller's buffer, and what they mean.

    Args:
        rows: Factors of rows.
        cols: Factors of columns.
        table: What each of 256 symbols stands for.
        counts: How often each occurs.
        contexts: Which elements are coded together.
        escapes: Elements that are to be stored as they are, in rising order.
        sum_sq: Sum of the squares of what was quantized.
        zero: The symbol that stands for 0, if there is one.
        floor: Least second moment, 0 elsewhere.
    """

    rows: Factors
    cols: Factors
    table: NDArray[np.float32]
    counts: NDArray[np.float64]
    contexts: Contexts
    escapes: NDArray[np.int64]
    sum_sq: float
    zero: int | None
    floor: float = 0.0


NO_ESCAPES = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Steps:
    """How a grid lies.

    Args:
        step: Width of a step, in units of ``unit``.
        dead_zone: Less than so many steps are zero.
        levels_max: Levels on either side of zero.
        unit: The RMS of each row, that of the chunk, or 1.
    """

    step: float
    dead_zone: float
    levels_max: int
    unit: str


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of the squares of values: of each row and of each column."""

    rows: NDArray[np.float64]
    cols: NDArray[np.float64]
    total: float


def squares_of(values: memoryview, grid: Grid) -> Sums:
    """Return the sums of the squares of fp32 values."""
    rows, cols = np.empty(grid.row_count), np.empty(grid.row)
    kernels.sums_of_values(values, rows.data, cols.data, grid.row, grid.phase, True)
    return Sums(rows, cols, float(rows.sum()))


def quantize_grid(values: memoryview, symbols: memoryview, grid: Grid, steps: Steps) -> Quantized | None:
    """Write the symbols of fp32 values; None where there is nothing to quantize, or it cannot be scaled."""
    sums = squares_of(values, grid)
    scales = _scales_of(sums, grid, steps.unit)
    if not 0.0 < sums.total < np.inf or not scales.max() < factors.FACTOR_MAX:
        return None
    is_by_row = steps.unit == "row"
    rows = factors.factors_of(scales) if is_by_row else factors.ones(grid.row_count)
    if is_by_row:
        # Levels are even in the factors that a reader knows.
        scales = rows.values().astype(np.float64)
    kernels.quantize_values(
        *(values, _inverses_of(steps.step * scales).data, symbols, grid.row, grid.phase),
        *(1.0 - steps.dead_zone, steps.levels_max),
    )
    codes = np.frombuffer(symbols, np.uint8)
    totals = np.empty(512)
    units, beside = _inverses_of(rows.values().astype(np.float64)), np.ones(grid.row, np.float32)
    kernels.sums_of_levels(values, symbols, units.data, beside.data, totals.data, grid.row, grid.phase)
    escapes = NO_ESCAPES
    if totals[_ESCAPE]:
        escapes = np.flatnonzero(codes == _ESCAPE)
        codes[escapes] = ZERO
    table = conditional_means(totals, zero=ZERO)
    table[_ESCAPE] = 0.0
    counts = totals[:256].copy()
    counts[ZERO] += counts[_ESCAPE]
    counts[_ESCAPE] = 0
    found = choose_contexts(symbols, sums, grid, is_by_row=is_by_row)
    return Quantized(rows, factors.ones(grid.row), table, counts, found, escapes, sums.total, ZERO)


def choose_contexts(symbols: memoryview, sums: Sums, grid: Grid, *, is_by_row: bool) -> Contexts:
    """Return which elements are to be coded together.

    Args:
        symbols: One for each element.
        sums: Squares of what they stand for.
        grid: Where the chunk lies.
        is_by_row: Steps follow the rows' RMS: rows do not differ.
    """
    rows, cols = contexts.classes_of(sums.rows, sums.cols, grid, has_row_scales=is_by_row)
    if not contexts.pays(grid):
        return contexts.one_stream(rows, cols)
    counts = np.empty(contexts.SUM_COUNT * 256, np.uint32)
    kernels.class_counts(symbols, rows.data, cols.data, counts.data, grid.row, grid.phase)
    return contexts.contexts_of(rows, cols, counts)


def _scales_of(sums: Sums, grid: Grid, unit: str) -> NDArray[np.float64]:
    """Return what a step is counted in, for each row: its RMS, that of the chunk, or 1."""
    if unit == "row":
        return np.sqrt(sums.rows / grid.row_sizes())
    return np.full(grid.row_count, np.sqrt(sums.total / grid.count) if unit == "chunk" else 1.0)


def _inverses_of(scales: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return one over each scale, and 0 for 0."""
    with np.errstate(divide="ignore"):
        inverses = np.where(scales > 0, np.minimum(1.0 / scales, _FLOAT_MAX), 0.0)
    return inverses.astype(np.float32)
