"""Classes of rows and columns, and which of them share the frequencies under which their symbols are coded.

Symbols of one step size are spread more widely in rows and columns that change more. A class counts quarters of an
octave of the RMS, so that the sum of a row's and a column's class says how widely; sums that are next to each other
share a stream. Measured on weights of a GPT: 3 to 8% of the bits, for steps from 0.5 to 3 RMS.

Invariants:
- Classes are below 16, their sums below 31, streams below 16; a stream holds sums that follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.quant.geometry import Grid

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
