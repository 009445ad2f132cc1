"""The streams of symbols in numpy: which symbol goes where, and several of them in a byte; FORMAT.md has the bytes.

The specification of the native twins, bit for bit. Rows and columns have a class each, a number below 16; the sum of
both says which stream an element belongs to, and so under which frequencies it is coded.

Invariants:
- Geometry is that of ``quant_on_numpy``. A wrong length or number raises ValueError before anything is written.
- Whatever a packed stream holds, unpacking it writes nothing but its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ckstore.kernels.quant_on_numpy import Bytes, check_matrix, readable, rectangles, require, writable

if TYPE_CHECKING:
    from typing_extensions import Buffer

Ints = NDArray[np.int64]

STREAM_COUNT_MAX, CLASS_COUNT = 16, 16
SUM_COUNT = 2 * CLASS_COUNT - 1


def class_counts(symbols: Buffer, row_classes: Buffer, col_classes: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how often each of 256 symbols occurs under each sum of row and column class: 31 times 256 uint32."""
    codes, counts = readable(symbols), writable(out, np.uint32)
    require(counts.size == SUM_COUNT * 256, "lengths differ")
    total = np.zeros(counts.size, np.int64)
    for part, sums in _class_sums(codes.size, readable(row_classes), readable(col_classes), row, phase):
        total += np.bincount(sums.astype(np.int64) * 256 + codes[part], minlength=counts.size)
    counts[:] = total.astype(np.uint32)


def stream_sizes(
    row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, count: int, row: int, phase: int
) -> None:
    """Write how many elements belong to each of 16 streams (uint64): that of the sum of their classes."""
    streams, sizes = _checked_map(stream_of), writable(out, np.uint64)
    require(sizes.size == STREAM_COUNT_MAX, "lengths differ")
    total = np.zeros(STREAM_COUNT_MAX, np.int64)
    for _, sums in _class_sums(count, readable(row_classes), readable(col_classes), row, phase):
        total += np.bincount(streams[sums], minlength=STREAM_COUNT_MAX)
    sizes[:] = total.astype(np.uint64)


def split_streams(
    symbols: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols of each stream, one after another: by rows, in a row by the columns' classes, then columns."""
    codes, target = readable(symbols), writable(out, np.uint8)
    require(target.size == codes.size, "lengths differ")
    for part, places in _places(codes.size, row_classes, col_classes, stream_of, row, phase):
        target[places] = codes[part]


def merge_streams(
    streams: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols whose streams are given; the inverse of ``split_streams``."""
    source, codes = readable(streams), writable(out, np.uint8)
    require(source.size == codes.size, "lengths differ")
    for part, places in _places(codes.size, row_classes, col_classes, stream_of, row, phase):
        codes[part] = source[places]


def pack_symbols(symbols: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> None:
    """Write ``per_byte`` symbols into each byte: digits to the base ``alphabet``, the first one the lowest."""
    codes, packed = readable(symbols), writable(out, np.uint8)
    _check_packing(codes.size, packed.size, lowest, alphabet, per_byte)
    digits = np.zeros(packed.size * per_byte, np.uint8)
    digits[: codes.size] = codes - np.uint8(lowest)
    powers = np.array([alphabet**place for place in range(per_byte)], np.uint8)
    packed[:] = (digits.reshape(-1, per_byte) * powers).sum(axis=1, dtype=np.uint8)


def unpack_symbols(packed: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> bool:
    """Write the symbols of a packed stream; return whether every byte holds digits, and the last no more than that."""
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
    """Yield for pieces of a chunk where in the streams each of their elements lies."""
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
    require(is_base and 0 <= lowest <= 256 - alphabet, "no number of symbols that a byte holds")
    require(packed == -(-count // per_byte), "lengths differ")
