"""Quantize values to symbols of one byte: uniform steps, three values, or logarithms.

- ``quantize_grid``: uniform steps around a dead zone, for changes of weights and quotients of moments. Symbol 128 is
  zero; 128 plus the level are the others. Elements beyond the last level are escapes, which are stored exactly.
- ``quantize_first``: the same for first moments divided by the root of the second, or three values ("ternary").
- ``quantize_second``: a factor for each row and column, and logarithms of the rest. The factors are the row and column
  means of Adafactor (Shazeer and Stern, 2018).

A symbol decodes to the mean of the values that it stands for (the codebook). Rows and columns that change more have a
wider spread of symbols. So each row and column gets a class, in quarters of an octave of its RMS. The sum of both
classes selects one of up to 16 streams of symbols, each with its own frequencies. This saves 3 to 8 % of the bits of a
GPT's weights for steps from 0.5 to 3 RMS.

Invariants:
- Symbols and means are computed in IEEE arithmetic in a fixed order: the same values give the same codes.
- A codebook has a finite entry for each of 256 symbols; unused entries are 0.
- Classes are below 16, their sums below 31, streams below 16. A stream contains consecutive sums.
- Quotients of moments are clipped before they are quantized, so that a tiny second moment makes no large step.
- A positive second moment stays positive: its lower bound is the smallest positive moment of the chunk.
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
    """The range of symbols in use: from the first to the last."""

    first: int
    count: int

    @staticmethod
    def of(counts: NDArray[np.float64]) -> Occurring:
        """Return the range for these counts of symbols, of which at least one is positive."""
        present = np.flatnonzero(counts)
        return Occurring(int(present[0]), int(present[-1] - present[0]) + 1)


def conditional_means(totals: NDArray[np.float64], *, zero: int | None) -> Floats:
    """Return the mean of the values of each symbol.

    Args:
        totals: 256 counts, then 256 sums.
        zero: A symbol that stands for 0 instead of its mean.
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
# Overhead in bits: of a stream (states of the coder, bitmap of symbols, its row in the payload), and of a symbol.
_STREAM_BITS, _SYMBOL_BITS = 8 * (256 + 32 + 4 + 8), 16
_CLASS_BITS = 3
# With fewer elements a second stream costs more than it saves.
_COUNT_MIN = 1 << 14
_ROWS_MIN = 8


@dataclass(frozen=True, slots=True)
class Contexts:
    """Classes of rows and columns, and the stream of each sum of two classes; one stream if classes save nothing."""

    rows: Bytes
    cols: Bytes
    stream_of: Bytes
    stream_count: int


def classes_of(
    row_sums: NDArray[np.float64], col_sums: NDArray[np.float64], grid: Grid, *, has_row_scales: bool
) -> tuple[Bytes, Bytes]:
    """Return the classes of rows and columns.

    Args:
        row_sums: Sum of squares of each row.
        col_sums: Sum of squares of each column.
        grid: Rows and columns of the chunk.
        has_row_scales: Symbols are relative to their row's RMS, so all rows have the same class.
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
    """Return contexts with one stream for all elements."""
    return Contexts(rows, cols, np.zeros(SUM_COUNT, np.uint8), 1)


def is_worth_classes(grid: Grid) -> bool:
    """Return True if a chunk has enough elements and rows for classes to save bits."""
    return grid.count >= max(_COUNT_MIN, _ROWS_MIN * grid.row)


def contexts_of(rows: Bytes, cols: Bytes, counts: NDArray[np.uint32]) -> Contexts:
    """Return the contexts with the number of streams that takes the fewest bits.

    Args:
        rows: Classes of rows.
        cols: Classes of columns.
        counts: Occurrences of each of 256 symbols for each of 31 sums of classes.
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
    """Return the bits of streams with these counts of symbols."""
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
    """The result of a quantizer. The symbols are in the caller's buffer.

    Args:
        rows: Factors of rows.
        cols: Factors of columns.
        table: The value of each of 256 symbols.
        counts: Occurrences of each symbol.
        contexts: The streams of the symbols.
        escapes: Elements to store exactly, in rising order.
        sum_sq: Sum of the squares of the quantized values.
        zero: The symbol that stands for 0, if there is one.
        floor: Lower bound of second moments; 0 for other values.
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
    """A grid of uniform steps.

    Args:
        step: Width of a step, in multiples of ``unit``.
        dead_zone: Values below this many steps become zero.
        levels_max: Levels on either side of zero.
        unit: ``"row"`` for the RMS of each row, ``"chunk"`` for that of the chunk, ``"one"`` for 1.
    """

    step: float
    dead_zone: float
    levels_max: int
    unit: str


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of squares of each row and each column."""

    rows: NDArray[np.float64]
    cols: NDArray[np.float64]
    total: float


def squares_of(values: memoryview, grid: Grid) -> Sums:
    """Return the sums of the squares of fp32 values."""
    rows, cols = np.empty(grid.row_count), np.empty(grid.row)
    kernels.sums_of_values(values, rows.data, cols.data, grid.row, grid.phase, True)
    return Sums(rows, cols, float(rows.sum()))


def quantize_grid(values: memoryview, symbols: memoryview, grid: Grid, steps: Steps) -> Quantized | None:
    """Write the symbols of fp32 values; None if all are zero or their scale is out of range."""
    sums = squares_of(values, grid)
    scales = _scales_of(sums, grid, steps.unit)
    if not 0.0 < sums.total < np.inf or not scales.max() < geometry.FACTOR_MAX:
        return None
    is_by_row = steps.unit == "row"
    rows = geometry.factors_of(scales) if is_by_row else geometry.ones(grid.row_count)
    if is_by_row:
        # Use the coded factors, which the decoder will use too.
        scales = rows.values().astype(np.float64)
    kernels.quantize_values(
        *(values, _inverses_of(steps.step * scales).data, symbols, grid.row, grid.phase),
        *(1.0 - steps.dead_zone, steps.levels_max),
    )
    codes = np.frombuffer(symbols, np.uint8)
    totals = np.empty(512)
    units, by_col = _inverses_of(rows.values().astype(np.float64)), np.ones(grid.row, np.float32)
    kernels.sums_of_levels(values, symbols, units.data, by_col.data, totals.data, grid.row, grid.phase)
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
    """Return the streams of the symbols.

    Args:
        symbols: One for each element.
        sums: Sums of the squares of the quantized values.
        grid: Rows and columns of the chunk.
        is_by_row: Steps are relative to the row's RMS, so all rows have the same class.
    """
    rows, cols = classes_of(sums.rows, sums.cols, grid, has_row_scales=is_by_row)
    if not is_worth_classes(grid):
        return one_stream(rows, cols)
    counts = np.empty(SUM_COUNT * 256, np.uint32)
    kernels.class_counts(symbols, rows.data, cols.data, counts.data, grid.row, grid.phase)
    return contexts_of(rows, cols, counts)


def _scales_of(sums: Sums, grid: Grid, unit: str) -> NDArray[np.float64]:
    """Return the unit of a step for each row: its RMS, the RMS of the chunk, or 1."""
    if unit == "row":
        return np.sqrt(sums.rows / grid.row_sizes())
    return np.full(grid.row_count, np.sqrt(sums.total / grid.count) if unit == "chunk" else 1.0)


def _inverses_of(scales: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the inverse of each scale; 0 for 0."""
    with np.errstate(divide="ignore"):
        inverses = np.where(scales > 0, np.minimum(1.0 / scales, _FLOAT_MAX), 0.0)
    return inverses.astype(np.float32)


def quantize_first(
    values: memoryview, symbols: memoryview, grid: Grid, settings: FirstMomentSettings
) -> Quantized | None:
    """Write the symbols of fp32 quotients; None if all are zero."""
    if settings.form == "ternary":
        return _quantize_ternary(values, symbols, grid, settings)
    steps = Steps(settings.step, settings.dead_zone, _levels_of_first(settings), "one")
    return quantize_grid(values, symbols, grid, steps)


def _levels_of_first(settings: FirstMomentSettings) -> int:
    """Return the levels on either side that are needed to reach the clip."""
    return min(LEVELS_MAX, max(1, math.ceil(settings.clip / settings.step)))


def _ternary_bounds(settings: FirstMomentSettings) -> NDArray[np.float32]:
    """Return the two bounds between the three values."""
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


# Range of the logarithmic grid on either side of the factors, in octaves of the root.
_OCTAVES_EACH_SIDE = 16
# Factors of smaller moments would not be normal numbers.
_MOMENT_MIN = 2.0**-118


def quantize_second(
    values: memoryview, symbols: memoryview, grid: Grid, settings: SecondMomentSettings
) -> Quantized | None:
    """Write the symbols of fp32 moments; None if they are negative somewhere or out of range."""
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
    floor = _smallest_positive(x)
    return Quantized(rows, cols, table, counts, no_classes, NO_ESCAPES, 0.0, None, floor)


def _scales_of_second(
    row_sums: NDArray[np.float64], col_sums: NDArray[np.float64], grid: Grid
) -> tuple[geometry.Factors, geometry.Factors]:
    """Return the factors of rows and columns whose products approximate the moments, from the sums of both."""
    row_means = row_sums / grid.row_sizes()
    if not has_factors(grid):
        return geometry.factors_of(row_means), geometry.ones(grid.row)
    mean = float(row_sums.sum()) / grid.count
    return geometry.factors_of(row_means / mean), geometry.factors_of(col_sums / np.maximum(grid.col_sizes(), 1))


def _log_bounds(log_step: float) -> tuple[int, NDArray[np.float32]]:
    """Return the levels of a logarithmic grid on either side, and the bounds between them."""
    levels = min(LEVELS_MAX, math.ceil(_OCTAVES_EACH_SIDE / log_step))
    return levels, np.exp2(2.0 * log_step * (np.arange(-levels, levels) + 0.5)).astype(np.float32)


def has_factors(grid: Grid) -> bool:
    """Return True if a chunk has enough rows for factors of its columns."""
    return grid.row_count >= _ROWS_MIN


def _on_log_grid(
    values: memoryview,
    symbols: memoryview,
    rows: NDArray[np.float32],
    cols: NDArray[np.float32],
    grid: Grid,
    log_step: float,
) -> NDArray[np.float64]:
    """Write the symbols of values divided by their factors. Return counts and sums of the symbols."""
    levels, bounds = _log_bounds(log_step)
    by_row, by_col = _inverse(rows), _inverse(cols)
    kernels.bin_values(values, by_row.data, by_col.data, bounds.data, symbols, grid.row, grid.phase)
    codes = np.frombuffer(symbols, np.uint8)
    np.add(codes, np.uint8(ZERO - levels), out=codes)
    totals = np.empty(512)
    kernels.sums_of_levels(values, symbols, by_row.data, by_col.data, totals.data, grid.row, grid.phase)
    return totals


def _inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    inverses = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=inverses, where=scales > 0)
    return inverses


def _smallest_positive(x: NDArray[np.float32]) -> float:
    # Non-negative floats have the order of their bits. Subtracting 1 makes zeros the greatest.
    words = x.view(np.uint32) - np.uint32(1)
    return float((words.min() + np.uint32(1)).view(np.float32))
