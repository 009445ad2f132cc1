"""Uniform steps around a dead zone, with a scale for each row and a mean for each level.

Invariants:
- Symbols are 128 plus the level; 128 stands for 0 exactly. What is beyond the last level is stored as it is.
- Symbols and means are computed in IEEE arithmetic and a fixed order: the same values give the same codes.

Which value each symbol stands for: the conditional means of a grid.

Invariants:
- A codebook has an entry for each of 256 symbols, finite; those of symbols that do not occur are 0.

Classes of rows and columns, and which of them share the frequencies under which their symbols are coded.

Symbols of one step size are spread more widely in rows and columns that change more. A class counts quarters of an
octave of the RMS, so that the sum of a row's and a column's class says how widely; sums that are next to each other
share a stream. Measured on weights of a GPT: 3 to 8% of the bits, for steps from 0.5 to 3 RMS.

Invariants:
- Classes are below 16, their sums below 31, streams below 16; a stream holds sums that follow each other.

First moments over the root of the second: a grid of uniform steps, or three values.

Invariants:
- Quotients are clipped before they come here, so that a vanishing second moment makes no great step of a resume.

Second moments: a factor for each row and one for each column, and a grid of logarithms for what these leave over.

Rank-1 factors are the row and column means of Adafactor (Shazeer and Stern, 2018).

Invariants:
- What was above zero stays above zero: there is a floor, the least moment of the chunk that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.config import LEVELS_MAX, FirstMomentSettings, SecondMomentSettings
from ckstore.quant import geometry
from ckstore.quant.geometry import Factors, Grid

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


Bytes = NDArray[np.uint8]

CLASS_COUNT = 16
SUM_COUNT = 2 * CLASS_COUNT - 1
STREAM_COUNT_MAX = 16

_MIDDLE = 8
_CLASSES_PER_OCTAVE = 4
_STREAM_COUNTS = (2, 4, 8)
# What a stream costs besides: states of the coder, its table for a few symbols, and its row in the payload, in bits.
_STREAM_BITS, _SYMBOL_BITS = 8 * (256 + 32 + 4 + 8), 16
_CLASS_BITS = 3
# Fewer elements do not pay for a second stream.
_COUNT_MIN = 1 << 14
_ROWS_MIN = 8


@dataclass(frozen=True, slots=True)
class Contexts:
    """Classes, and the stream of each sum of two; one stream if there are no classes worth having."""

    rows: Bytes
    cols: Bytes
    stream_of: Bytes
    stream_count: int


def classes_of(
    row_sums: NDArray[np.float64], col_sums: NDArray[np.float64], grid: Grid, *, has_row_scales: bool
) -> tuple[Bytes, Bytes]:
    """Return the classes of rows and columns whose squares have these sums.

    Args:
        row_sums: Of each row.
        col_sums: Of each column.
        grid: Where the chunk lies.
        has_row_scales: Symbols are relative to their row's RMS: rows do not differ.
    """
    mean = float(row_sums.sum()) / max(1, grid.count)
    rows = np.full(grid.row_count, _MIDDLE, np.uint8)
    if not has_row_scales:
        rows = _classed(row_sums / grid.row_sizes(), mean)
    return rows, _classed(col_sums / np.maximum(grid.col_sizes(), 1), mean)


def _classed(squares: NDArray[np.float64], mean: float) -> Bytes:
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = 0.5 * np.log2(squares / mean) if mean > 0 else np.zeros(squares.size)
    classes = np.rint(np.nan_to_num(octaves, neginf=-1e9) * _CLASSES_PER_OCTAVE) + _MIDDLE
    found: Bytes = np.clip(classes, 0, CLASS_COUNT - 1).astype(np.uint8)
    return found


def one_stream(rows: Bytes, cols: Bytes) -> Contexts:
    """Return that all elements are coded together."""
    return Contexts(rows, cols, np.zeros(SUM_COUNT, np.uint8), 1)


def pays(grid: Grid) -> bool:
    """Return whether a chunk is long enough, and has rows enough, to look for classes at all."""
    return grid.count >= max(_COUNT_MIN, _ROWS_MIN * grid.row)


def contexts_of(rows: Bytes, cols: Bytes, counts: NDArray[np.uint32]) -> Contexts:
    """Return the number of streams that takes the fewest bits.

    Args:
        rows: Classes of rows.
        cols: Classes of columns.
        counts: How often each of 256 symbols occurs under each of 31 sums of classes.
    """
    by_sum = counts.reshape(SUM_COUNT, 256)
    by_sum = by_sum[:, by_sum.any(axis=0)].astype(np.float64)
    masses = by_sum.sum(axis=1)
    middles = (np.cumsum(masses) - masses / 2) / max(1.0, masses.sum())
    best = one_stream(rows, cols)
    fewest = _bits(by_sum.sum(axis=0, keepdims=True))
    for stream_count in _STREAM_COUNTS:
        stream_of = np.minimum(middles * stream_count, stream_count - 1).astype(np.uint8)
        used, stream_of = np.unique(stream_of, return_inverse=True)
        merged = np.zeros((used.size, by_sum.shape[1]))
        np.add.at(merged, stream_of, by_sum)
        bits = _bits(merged) + _CLASS_BITS * (rows.size + cols.size)
        if bits < fewest:
            fewest, best = bits, Contexts(rows, cols, stream_of.astype(np.uint8), used.size)
    return best


def _bits(by_stream: NDArray[np.float64]) -> float:
    """Return the bits of streams whose symbols occur so often."""
    totals = by_stream.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(by_stream > 0, by_stream * np.log2(totals / by_stream), 0.0)
    present = np.count_nonzero(by_stream, axis=1)
    return float(bits.sum() + (_STREAM_BITS + _SYMBOL_BITS * present).sum())


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
    if not 0.0 < sums.total < np.inf or not scales.max() < geometry.FACTOR_MAX:
        return None
    is_by_row = steps.unit == "row"
    rows = geometry.factors_of(scales) if is_by_row else geometry.ones(grid.row_count)
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
    return Quantized(rows, geometry.ones(grid.row), table, counts, found, escapes, sums.total, ZERO)


def choose_contexts(symbols: memoryview, sums: Sums, grid: Grid, *, is_by_row: bool) -> Contexts:
    """Return which elements are to be coded together.

    Args:
        symbols: One for each element.
        sums: Squares of what they stand for.
        grid: Where the chunk lies.
        is_by_row: Steps follow the rows' RMS: rows do not differ.
    """
    rows, cols = classes_of(sums.rows, sums.cols, grid, has_row_scales=is_by_row)
    if not pays(grid):
        return one_stream(rows, cols)
    counts = np.empty(SUM_COUNT * 256, np.uint32)
    kernels.class_counts(symbols, rows.data, cols.data, counts.data, grid.row, grid.phase)
    return contexts_of(rows, cols, counts)


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
    rows, cols = geometry.ones(grid.row_count), geometry.ones(grid.row)
    edges = (rows.values().data, cols.values().data)
    kernels.bin_values(values, *edges, bounds.data, symbols, grid.row, grid.phase)
    codes = np.frombuffer(symbols, np.uint8)
    np.add(codes, np.uint8(ZERO - 1), out=codes)
    totals = np.empty(512)
    kernels.sums_of_levels(values, symbols, *edges, totals.data, grid.row, grid.phase)
    found = choose_contexts(symbols, sums, grid, is_by_row=False)
    table = conditional_means(totals, zero=ZERO)
    return Quantized(rows, cols, table, totals[:256].copy(), found, NO_ESCAPES, sums.total, ZERO)


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
    if float(x.min()) < 0 or not _MOMENT_MIN < greatest < geometry.FACTOR_MAX:
        return None
    rows, cols = _scales_of_second(row_sums, col_sums, grid)
    if settings.form == "rank1" and has_factors(grid):
        np.frombuffer(symbols, np.uint8).fill(ZERO)
        table, counts = np.zeros(256, np.float32), np.zeros(256)
        table[ZERO], counts[ZERO] = 1.0, grid.count
    else:
        totals = _on_log_grid(values, symbols, rows.values(), cols.values(), grid, settings.log_step)
        table, counts = conditional_means(totals, zero=None), totals[:256]
    no_classes = one_stream(np.zeros(grid.row_count, np.uint8), np.zeros(grid.row, np.uint8))
    floor = _least_positive(x)
    return Quantized(rows, cols, table, counts, no_classes, NO_ESCAPES, 0.0, None, floor)


def _scales_of_second(
    row_sums: NDArray[np.float64], col_sums: NDArray[np.float64], grid: Grid
) -> tuple[geometry.Factors, geometry.Factors]:
    """Return the factors of rows and columns whose product comes nearest, from the sums of both."""
    row_means = row_sums / grid.row_sizes()
    if not has_factors(grid):
        return geometry.factors_of(row_means), geometry.ones(grid.row)
    mean = float(row_sums.sum()) / grid.count
    return geometry.factors_of(row_means / mean), geometry.factors_of(col_sums / np.maximum(grid.col_sizes(), 1))


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
