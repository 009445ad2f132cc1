"""The loops of quantization in numpy: values, sums, symbols, reconstruction, and streams of symbols.

They specify the native implementation bit for bit, including sums: every operation is one of IEEE 754 binary32, or
binary64 where stated, and sums are computed in a fixed order. docs/FORMAT.md has the bytes.

Streams: every row and column has a class below 16. The sum of both classes selects the stream of an element, and with
it the frequencies under which its symbol is coded.

Invariants:
- A chunk is ``count`` elements of a matrix with rows of ``row`` elements. The first is at position ``phase`` of its
  row. Row data has an entry for each row that the chunk covers in whole or part; column data one for each column.
- ``kind`` is the stored dtype: 0 fp32, 1 bf16, 2 fp16. Intermediate values are fp32.
- A wrong length or number raises ValueError before anything is written.
- For any packed stream, unpacking writes nothing but its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckstore.codec.kernels import bytes_reference

if TYPE_CHECKING:
    from typing_extensions import Buffer


Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

FP32, BF16, FP16 = 0, 1, 2
ADD, FLOOR, ROOT, PLAIN = 0, 1, 2, 3
ROW_MIN, ROW_MAX = 16, 1 << 16
ESCAPE, ZERO = 0, 128

_LANES, _ROW_LANES = 8, 16
_BLOCK = 1 << 14


def float_values(source: Buffer, out: Buffer, kind: int) -> bool:
    """Write the elements as fp32. Return True if all are finite."""
    plain, target = elements_of(source, kind), writable(out, np.float32)
    require(plain.size == target.size, "lengths differ")
    is_finite = True
    for part in parts(plain.size):
        target[part] = widened(plain[part], kind)
        is_finite &= bool(np.isfinite(target[part]).all())
    return is_finite


def float_changes(source: Buffer, base: Buffer, out: Buffer, kind: int) -> bool:
    """Write the elements minus those of the base. Return True if all three are finite."""
    plain, other, target = elements_of(source, kind), elements_of(base, kind), writable(out, np.float32)
    require(plain.size == other.size == target.size, "lengths differ")
    is_finite = True
    for part in parts(plain.size):
        a, b = widened(plain[part], kind), widened(other[part], kind)
        with np.errstate(all="ignore"):
            target[part] = a - b
        is_finite &= bool((np.isfinite(a) & np.isfinite(b) & np.isfinite(target[part])).all())
    return is_finite


def float_quotients(first: Buffer, second: Buffer, out: Buffer, kind: int, clip: float) -> bool:
    """Write the first moments divided by the roots of the second, clipped to ``clip``; 0 where the first is 0.

    Returns:
        True if all moments are finite and no second moment is negative.
    """
    first_moments, second_moments, target = (
        elements_of(first, kind),
        elements_of(second, kind),
        writable(out, np.float32),
    )
    require(first_moments.size == second_moments.size == target.size, "lengths differ")
    require(clip > 0, "clip must be above 0")
    limit, is_right = np.float32(clip), True
    for part in parts(first_moments.size):
        m, v = widened(first_moments[part], kind), widened(second_moments[part], kind)
        is_right &= bool((np.isfinite(m) & np.isfinite(v) & (v >= 0)).all())
        with np.errstate(all="ignore"):
            quotients = m / np.sqrt(np.abs(v))
        quotients = np.where(quotients > limit, limit, np.where(quotients < -limit, -limit, quotients))
        target[part] = np.where(m == 0, np.float32(0), quotients)
    return is_right


def sums_of_values(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int, squared: bool) -> None:
    """Write the sums of each row and each column as fp64, of squares if ``squared``.

    A row is summed in 16 interleaved lanes, which are then added in halves; a column from top to bottom.
    """
    x, rows, cols = _floats(values), writable(rows_out, np.float64), writable(cols_out, np.float64)
    check_matrix(x.size, row, phase, rows.size, cols.size)
    cols[:] = 0
    for part, at, left, shape in rectangles(x.size, row, phase):
        block = x[part].astype(np.float64).reshape(shape)
        if squared:
            block = block * block
        width = shape[1]
        lanes = np.zeros((shape[0], -(-width // _ROW_LANES) * _ROW_LANES))
        lanes[:, :width] = block
        turns = np.add.accumulate(lanes.reshape(shape[0], -1, _ROW_LANES), axis=1)[:, -1]
        rows[at : at + shape[0]] = _folded(turns)
        column = cols[left : left + width]
        column[:] = np.add.accumulate(np.concatenate([column[None], block]), axis=0)[-1]


def quantize_values(
    values: Buffer, inverses: Buffer, out: Buffer, row: int, phase: int, bias: float, level_max: int
) -> None:
    """Write 128 plus or minus the level of each value: ``|value| * inverse of its row + bias``, truncated.

    A level above ``level_max`` becomes 0, the escape. A negative level becomes zero.
    """
    x, scales, symbols = _floats(values), _floats(inverses), writable(out, np.uint8)
    require(symbols.size == x.size, "lengths differ")
    check_matrix(x.size, row, phase, scales.size, row)
    require(1 <= level_max <= ZERO - 1 and -128 < bias < 1, "level_max must be 1 to 127, and bias between -128 and 1")
    offset, limit = np.float32(bias), np.float32(level_max + 1)
    for part, at, _, shape in rectangles(x.size, row, phase):
        block = x[part].reshape(shape)
        with np.errstate(all="ignore"):
            levels = np.abs(block) * scales[at : at + shape[0], None] + offset
        is_escape = ~(levels < limit)
        whole = np.where(is_escape | (levels < 0), np.float32(0), levels).astype(np.int16)
        found = ZERO + np.where(block < 0, -whole, whole)
        symbols[part] = np.where(is_escape, ESCAPE, found).astype(np.uint8).reshape(-1)


def bin_values(values: Buffer, rows: Buffer, cols: Buffer, bounds: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how many ascending bounds are at most each value times the factors of its row and column."""
    x, edges, symbols = _floats(values), _floats(bounds), writable(out, np.uint8)
    by_row, by_col = _floats(rows), _floats(cols)
    require(symbols.size == x.size, "lengths differ")
    check_matrix(x.size, row, phase, by_row.size, by_col.size)
    require(edges.size <= 255 and not (np.diff(edges) < 0).any(), "bounds must be at most 255 ascending numbers")
    for part, ratios in _scaled(x, by_row, by_col, row, phase):
        symbols[part] = np.searchsorted(edges, ratios, side="right").astype(np.uint8)


def sums_of_levels(
    values: Buffer, symbols: Buffer, rows: Buffer, cols: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write for each of 256 symbols its count and the sum of its values times their factors: 512 fp64.

    Sums are computed in 8 interleaved lanes, which are then added in halves.
    """
    x, codes, totals = _floats(values), readable(symbols), writable(out, np.float64)
    by_row, by_col = _floats(rows), _floats(cols)
    require(codes.size == x.size and totals.size == 512, "lengths differ")
    check_matrix(x.size, row, phase, by_row.size, by_col.size)
    lanes = np.zeros((_LANES, 256))
    counts = np.zeros(256, np.int64)
    for part, ratios in _scaled(x, by_row, by_col, row, phase):
        counts += np.bincount(codes[part], minlength=256)
        turn = np.arange(part.start, part.stop) % _LANES
        # Not np.bincount: a lane continues from its current sum.
        np.add.at(lanes, (turn, codes[part]), ratios.astype(np.float64))
    totals[:256] = counts
    totals[256:] = _folded(lanes.T)


def finish_values(
    symbols: Buffer,
    rows: Buffer,
    cols: Buffer,
    codebook: Buffer,
    base: Buffer,
    destination: Buffer,
    row: int,
    phase: int,
    kind: int,
    rule: int,
    floor: float,
) -> None:
    """Write the elements that the symbols represent.

    With ``p`` the row's factor times the column's factor, and ``c`` the codebook's entry, an element is, by ``rule``:
    0: ``base + p * c``; 1: ``max(p * c, floor)``, but 0 where a factor is 0; 2: ``(p * c) * sqrt(base)``; 3: ``p * c``.
    The base is empty for rules 1 and 3; it may be the memory of the destination.
    """
    codes, table, plain = readable(symbols), _floats(codebook), writable(destination, _STORED[_checked_kind(kind)])
    by_row, by_col, other = _floats(rows), _floats(cols), elements_of(base, kind)
    require(codes.size == plain.size and table.size == 256, "lengths differ")
    require(rule in (ADD, FLOOR, ROOT, PLAIN), "rule must be a number from 0 to 3")
    require(other.size == (plain.size if rule in (ADD, ROOT) else 0), "the base has the wrong length")
    check_matrix(codes.size, row, phase, by_row.size, by_col.size)
    least = np.float32(floor)
    for part, at, left, shape in rectangles(codes.size, row, phase):
        r, c = by_row[at : at + shape[0], None], by_col[None, left : left + shape[1]]
        with np.errstate(all="ignore"):
            values = (r * c) * table[codes[part]].reshape(shape)
            if rule == ADD:
                values = widened(other[part], kind).reshape(shape) + values
            elif rule == ROOT:
                values = values * np.sqrt(widened(other[part], kind).reshape(shape))
            elif rule == FLOOR:
                values = np.where((r == 0) | (c == 0), np.float32(0), np.where(values < least, least, values))
        plain[part] = narrowed(values.reshape(-1), kind)


def measure_values(source: Buffer, made: Buffer, kind: int) -> tuple[float, float, float]:
    """Return the greatest difference, the sum of its squares and the sum of the values' squares, in fp64.

    Sums are computed in 8 interleaved lanes, which are then added in halves.
    """
    plain, other = elements_of(source, kind), elements_of(made, kind)
    require(plain.size == other.size, "lengths differ")
    greatest, errors_sq, values_sq = 0.0, LaneSum(), LaneSum()
    for part in parts(plain.size):
        values = widened(plain[part], kind).astype(np.float64)
        errors = widened(other[part], kind).astype(np.float64) - values
        greatest = max(greatest, float(np.abs(errors).max()))
        errors_sq.add(errors * errors)
        values_sq.add(values * values)
    return greatest, errors_sq.total(), values_sq.total()


_STORED: dict[int, Any] = {FP32: np.dtype("<f4"), BF16: np.dtype("<u2"), FP16: np.dtype("<f2")}


def widened(elements: NDArray[Any], kind: int) -> Floats:
    """Return stored elements as fp32."""
    if kind == BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return elements.astype(np.float32)


def narrowed(values: Floats, kind: int) -> NDArray[Any]:
    """Return values as they are stored, rounded once."""
    if kind == FP32:
        return values
    return bytes_reference.rounded(values.view(np.uint32), kind).view(_STORED[kind])


def _folded(lanes: Doubles) -> Doubles:
    """Add the lanes, which are the last axis, in halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


class LaneSum:
    """A sum in 8 interleaved lanes that are added in halves at the end. Parts are multiples of 8, except the last."""

    def __init__(self) -> None:
        self._lanes = np.zeros(_LANES)

    def add(self, terms: Doubles) -> None:
        """Add further values, in order."""
        turns = np.zeros((1 + -(-terms.size // _LANES), _LANES))
        turns[0] = self._lanes
        turns[1:].reshape(-1)[: terms.size] = terms
        self._lanes = np.add.accumulate(turns, axis=0)[-1]

    def total(self) -> float:
        """Return the sum."""
        return float(_folded(self._lanes))


def parts(count: int) -> Iterator[slice]:
    """Yield the ranges of elements of blocks."""
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def rectangles(count: int, row: int, phase: int) -> Iterator[tuple[slice, int, int, tuple[int, int]]]:
    """Yield ranges of elements that form a rectangle, with its first row, first column, height and width."""
    start, at = 0, 0
    while start < count:
        left = phase if start == 0 else 0
        width = min(row - left, count - start)
        height = 1 if width < row else max(1, min((count - start) // row, _BLOCK // row))
        yield slice(start, start + height * width), at, left, (height, width)
        start, at = start + height * width, at + height


def _scaled(x: Floats, rows: Floats, cols: Floats, row: int, phase: int) -> Iterator[tuple[slice, Floats]]:
    for part, at, left, shape in rectangles(x.size, row, phase):
        with np.errstate(all="ignore"):
            scaled = (x[part].reshape(shape) * rows[at : at + shape[0], None]) * cols[None, left : left + shape[1]]
        yield part, scaled.reshape(-1)


def check_matrix(count: int, row: int, phase: int, row_count: int, col_count: int) -> None:
    """Raise ValueError unless the geometry is valid and has this many rows and columns."""
    require(ROW_MIN <= row <= ROW_MAX and 0 <= phase < row, "row is out of range, or phase is not below row")
    require(row_count == (-(-(phase + count) // row) if count else 0) and col_count == row, "lengths differ")


def _checked_kind(kind: int) -> int:
    require(kind in _STORED, "kind must be 0, 1 or 2, for a width of 4 or 2 bytes")
    return kind


def require(holds: bool, what: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not holds:
        raise ValueError(what)


def readable(buffer: Buffer) -> Bytes:
    """Return the bytes of a contiguous buffer."""
    view = memoryview(buffer)
    require(view.c_contiguous, "not a contiguous buffer")
    return np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)


def elements_of(buffer: Buffer, kind: int) -> NDArray[Any]:
    """Return the stored elements of a contiguous buffer."""
    stored, plain = _STORED[_checked_kind(kind)], readable(buffer)
    require(plain.size % stored.itemsize == 0, "length is no multiple of the width")
    return plain.view(stored)


def _floats(buffer: Buffer) -> Floats:
    return elements_of(buffer, FP32)


def writable(buffer: Buffer, stored: Any) -> NDArray[Any]:
    """Return the elements of a writable contiguous buffer."""
    require(not memoryview(buffer).readonly, "not a writable contiguous buffer")
    plain, width = readable(buffer), np.dtype(stored).itemsize
    require(plain.size % width == 0, "length is no multiple of the width")
    return plain.view(stored)


Ints = NDArray[np.int64]

STREAM_COUNT_MAX, CLASS_COUNT = 16, 16
SUM_COUNT = 2 * CLASS_COUNT - 1


def class_counts(symbols: Buffer, row_classes: Buffer, col_classes: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write the count of each of 256 symbols for each sum of row and column class: 31 times 256 uint32."""
    codes, counts = readable(symbols), writable(out, np.uint32)
    require(counts.size == SUM_COUNT * 256, "lengths differ")
    total = np.zeros(counts.size, np.int64)
    for part, sums in _class_sums(codes.size, readable(row_classes), readable(col_classes), row, phase):
        total += np.bincount(sums.astype(np.int64) * 256 + codes[part], minlength=counts.size)
    counts[:] = total.astype(np.uint32)


def stream_sizes(
    row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, count: int, row: int, phase: int
) -> None:
    """Write the number of elements of each of 16 streams (uint64)."""
    streams, sizes = _checked_map(stream_of), writable(out, np.uint64)
    require(sizes.size == STREAM_COUNT_MAX, "lengths differ")
    total = np.zeros(STREAM_COUNT_MAX, np.int64)
    for _, sums in _class_sums(count, readable(row_classes), readable(col_classes), row, phase):
        total += np.bincount(streams[sums], minlength=STREAM_COUNT_MAX)
    sizes[:] = total.astype(np.uint64)


def split_streams(
    symbols: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols stream by stream. In a stream: row by row, in a row by column class, then by column."""
    codes, target = readable(symbols), writable(out, np.uint8)
    require(target.size == codes.size, "lengths differ")
    for part, places in _places(codes.size, row_classes, col_classes, stream_of, row, phase):
        target[places] = codes[part]


def merge_streams(
    streams: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols from their streams; the inverse of ``split_streams``."""
    source, codes = readable(streams), writable(out, np.uint8)
    require(source.size == codes.size, "lengths differ")
    for part, places in _places(codes.size, row_classes, col_classes, stream_of, row, phase):
        codes[part] = source[places]


def pack_symbols(symbols: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> None:
    """Write ``per_byte`` symbols into each byte, as digits to the base ``alphabet``, the first one the lowest."""
    codes, packed = readable(symbols), writable(out, np.uint8)
    _check_packing(codes.size, packed.size, lowest, alphabet, per_byte)
    digits = np.zeros(packed.size * per_byte, np.uint8)
    digits[: codes.size] = codes - np.uint8(lowest)
    powers = np.array([alphabet**place for place in range(per_byte)], np.uint8)
    packed[:] = (digits.reshape(-1, per_byte) * powers).sum(axis=1, dtype=np.uint8)


def unpack_symbols(packed: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> bool:
    """Write the symbols of a packed stream. Return False if a byte has superfluous or invalid digits."""
    source, codes = readable(packed), writable(out, np.uint8)
    _check_packing(codes.size, source.size, lowest, alphabet, per_byte)
    digits = np.empty((source.size, per_byte), np.uint8)
    rest = source.astype(np.uint16)
    for place in range(per_byte):
        digits[:, place] = rest % alphabet
        rest //= alphabet
    flat = digits.reshape(-1)
    codes[:] = flat[: codes.size] + np.uint8(lowest)
    return not rest.any() and not flat[codes.size :].any()


def _class_sums(count: int, rows: Bytes, cols: Bytes, row: int, phase: int) -> Iterator[tuple[slice, Bytes]]:
    check_matrix(count, row, phase, rows.size, cols.size)
    require(not (rows >= CLASS_COUNT).any() and not (cols >= CLASS_COUNT).any(), "classes are numbers below 16")
    for part, at, left, shape in rectangles(count, row, phase):
        yield part, (rows[at : at + shape[0], None] + cols[None, left : left + shape[1]]).reshape(-1)


def _places(
    count: int, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, row: int, phase: int
) -> Iterator[tuple[slice, Ints]]:
    """Yield for each part of a chunk the positions of its elements in the streams."""
    rows, cols, streams = readable(row_classes), readable(col_classes), _checked_map(stream_of)
    sizes = np.empty(STREAM_COUNT_MAX, np.uint64)
    stream_sizes(row_classes, col_classes, stream_of, sizes.data, count, row, phase)
    nexts = np.concatenate([[0], np.cumsum(sizes.astype(np.int64))[:-1]])
    for part, at, left, shape in rectangles(count, row, phase):
        order = np.argsort(cols[left : left + shape[1]], kind="stable")
        sums = rows[at : at + shape[0], None] + cols[None, left + order]
        chosen = streams[sums].reshape(-1)
        ordered = np.empty(chosen.size, np.int64)
        for stream in range(STREAM_COUNT_MAX):
            where = np.flatnonzero(chosen == stream)
            ordered[where] = nexts[stream] + np.arange(where.size)
            nexts[stream] += where.size
        places = np.empty(shape, np.int64)
        places[:, order] = ordered.reshape(shape)
        yield part, places.reshape(-1)


def _checked_map(stream_of: Buffer) -> Bytes:
    streams = readable(stream_of)
    require(streams.size == SUM_COUNT, "lengths differ")
    require(not (streams >= STREAM_COUNT_MAX).any(), "streams are numbers below 16")
    return streams


def _check_packing(count: int, packed: int, lowest: int, alphabet: int, per_byte: int) -> None:
    is_base = 2 <= alphabet <= 256 and 1 <= per_byte <= 8 and alphabet**per_byte <= 256
    require(is_base and 0 <= lowest <= 256 - alphabet, "per_byte symbols do not fit into a byte")
    require(packed == -(-count // per_byte), "lengths differ")
