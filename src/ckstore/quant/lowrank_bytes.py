"""The bytes of a product: its numbers, and its integers in streams that share frequencies.

``rank u16, groups u8, 0 u8, scale f32, shifts rank x u8, group of each vector 2 rank x u8``, first those of the
left side, then those of the right; then for each group ``mode u8, nbytes u32`` of its low bytes and of its high
bytes; then the streams in that order. A group is its vectors one after another, zigzagged to 16 bits. Modes: 0 raw,
1 one byte that all of them are, 3 the plane coder.

Invariants:
- Whatever the bytes, reading them yields a product that ``is_exact`` of the shape that was asked for, or raises.
- Nothing is allocated by a length that was not compared with the shape and the bytes at hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.errors import MalformedError
from ckstore.quant.contexts import CLASS_COUNT, SUM_COUNT
from ckstore.quant.geometry import ROW_MAX, ROW_MIN
from ckstore.quant.lowrank import RANK_MAX, SHIFT_MAX, Integers, Product

_HEAD = struct.Struct("<HBBf")
_ROW = struct.Struct("<BI")
_RAW, _CONST, _RANS = 0, 1, 3
_GROUP_COUNT_MAX = 32
# What a group costs besides: states of the coder, bitmap of symbols, header, its rows in the table; and a symbol.
_GROUP_BITS, _SYMBOL_BITS = 8 * (256 + 32 + 4 + 10), 16
_SPREAD_MIN = 1e-3

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Side:
    """The vectors of one side as rows: their low and their high bytes, zigzagged, and the mean square of each."""

    planes: tuple[Bytes, Bytes]
    spreads: NDArray[np.float64]


def pack(product: Product) -> bytes:
    """Return the bytes that ``unpack`` makes the product of."""
    sides = [_split(product.left.T), _split(product.right)]
    group_of = _groups(sides)
    of_left, of_right = group_of[: product.rank], group_of[product.rank :]
    count = int(group_of.max(initial=0)) + 1 if product.rank else 0
    table, streams = [], []
    for group in range(count):
        members = of_left == group, of_right == group
        for plane in (0, 1):
            chosen = [side.planes[plane][those].reshape(-1) for side, those in zip(sides, members, strict=True)]
            mode, stored = _coded(np.concatenate(chosen))
            table.append(_ROW.pack(mode, len(stored)))
            streams.append(stored)
    head = _HEAD.pack(product.rank, count, 0, product.scale)
    return b"".join([head, product.shifts.tobytes(), group_of.tobytes(), *table, *streams])


def unpack(payload: memoryview, rows: int, cols: int) -> Product:
    """Return the product of this shape.

    Raises:
        MalformedError: No writer makes such bytes.
    """
    if payload.nbytes < _HEAD.size:
        raise MalformedError("a product is cut short")
    rank, count, zero, scale = _HEAD.unpack(payload[: _HEAD.size])
    at = _HEAD.size + 3 * rank + 2 * count * _ROW.size
    if zero or rank > min(rows, cols, RANK_MAX) or count > _GROUP_COUNT_MAX or payload.nbytes < at:
        raise MalformedError(f"a product has {rank} directions in {count} groups in {payload.nbytes} bytes")
    if not 0 < scale < math.inf:
        raise MalformedError(f"a product has the scale {scale}")
    numbers = np.frombuffer(payload[_HEAD.size : _HEAD.size + 3 * rank], np.uint8)
    shifts, group_of = numbers[:rank], numbers[rank:]
    if (shifts > SHIFT_MAX).any() or (group_of >= count).any():
        raise MalformedError("a product has a shift or a group that no writer makes")
    table = list(_ROW.iter_unpack(payload[_HEAD.size + 3 * rank : at]))
    vectors = np.concatenate([np.full(rank, rows), np.full(rank, cols)])
    left, right = np.empty((rows, rank), np.int16), np.empty((rank, cols), np.int16)
    for group in range(count):
        members = np.flatnonzero(group_of == group)
        words = np.zeros(int(vectors[members].sum()), np.uint16)
        for shift, (mode, nbytes) in zip((0, 8), table[2 * group : 2 * group + 2], strict=True):
            words |= _decoded(payload[at : at + nbytes], mode, nbytes, words.size).astype(np.uint16) << shift
            at += nbytes
        values = (words >> 1).astype(np.int16) ^ -(words & 1).astype(np.int16)
        start = 0
        for member in members.tolist():
            target = left[:, member] if member < rank else right[member - rank]
            target[:] = values[start : start + target.size]
            start += target.size
    product = Product(left, right, shifts, np.float32(scale))
    if at != payload.nbytes or not product.is_exact():
        raise MalformedError("a product has more bytes than it needs, or sums that are not exact")
    return product


def _split(vectors: Integers) -> _Side:
    """Return the bytes of zigzagged integers."""
    low, high, sums = np.empty(vectors.shape, np.uint8), np.empty(vectors.shape, np.uint8), np.empty(len(vectors))
    kernels.split_zigzag(np.ascontiguousarray(vectors).data, low.data, high.data, sums.data)
    return _Side((low, high), sums / max(1, vectors.shape[1]))


def _groups(sides: Sequence[_Side]) -> NDArray[np.uint8]:
    """Return which vectors share frequencies: neighbours in their spread, in groups that take the fewest bits."""
    spreads = np.concatenate([side.spreads for side in sides])
    if not spreads.size:
        return np.empty(0, np.uint8)
    octaves = np.floor(np.log2(np.maximum(spreads, _SPREAD_MIN))).astype(np.int64)
    octaves -= octaves.min()
    all_classes = (octaves // (octaves.max() // CLASS_COUNT + 1)).astype(np.uint8)
    counts = np.zeros((int(all_classes.max()) + 1, 2, 256), np.int64)
    start = 0
    for side in sides:
        low, high = side.planes
        classes = all_classes[start : start + len(low)]
        start += len(low)
        # Hardly any vector has a high byte.
        is_high = high.any(axis=1)
        _count(low, classes, counts[:, 0])
        _count(high[is_high], classes[is_high], counts[:, 1])
        counts[:, 1, 0] += np.bincount(classes[~is_high], minlength=len(counts)) * low.shape[1]
    _, group_of = np.unique(np.array(partition(counts))[all_classes], return_inverse=True)
    return group_of.astype(np.uint8)


def _count(symbols: Bytes, classes: Bytes, counts: NDArray[np.int64]) -> None:
    """Add how often each byte occurs in the rows of each class."""
    length = symbols.shape[1]
    if symbols.size and ROW_MIN <= length <= ROW_MAX:
        found = np.zeros((SUM_COUNT, 256), np.uint32)
        kernels.class_counts(symbols.data, classes.data, np.zeros(length, np.uint8).data, found.data, length, 0)
        counts += found[: len(counts)]
    else:
        places = classes.astype(np.int64)[:, None] * 256 + symbols
        counts += np.bincount(places.reshape(-1), minlength=counts.size).reshape(counts.shape)


def partition(counts: NDArray[np.int64]) -> list[int]:
    """Return the first member of each one's group, where groups of neighbours take the fewest bits in all."""
    total = len(counts)
    starts, ends = np.triu_indices(total + 1, 1)

    def of_groups(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.concatenate([np.zeros_like(numbers[:1]), np.cumsum(numbers, axis=0)])
        found: NDArray[np.int64] = sums[ends] - sums[starts]
        return found

    flat = counts.reshape(total, -1)
    # Most bytes occur nowhere.
    occurring = np.ascontiguousarray(flat[:, flat.any(axis=0)])
    bits = np.full((total + 1, total + 1), np.inf)
    bits[starts, ends] = bits_of_groups(of_groups(occurring), of_groups(counts.sum(axis=2)))
    least, first = np.zeros(total + 1), [0] * (total + 1)
    for end in range(1, total + 1):
        both = least[:end] + bits[:end, end]
        first[end] = int(both.argmin())
        least[end] = both[first[end]]
    found, end = [0] * total, total
    while end:
        found[first[end] : end] = [first[end]] * (end - first[end])
        end = first[end]
    return found


def bits_of_groups(counts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what groups cost: of each how often each byte occurs in either plane, and how long both planes are."""
    entropies = _times_log2(sizes).sum(axis=1) - _times_log2(counts).sum(axis=1)
    found: NDArray[np.float64] = entropies + _SYMBOL_BITS * np.count_nonzero(counts, axis=1)
    return found + _GROUP_BITS


def _times_log2(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each number times its logarithm."""
    numbers = counts.astype(np.float64)
    found: NDArray[np.float64] = np.log2(np.maximum(numbers, 1))
    found *= numbers
    return found


def _coded(plane: Bytes) -> tuple[int, bytes]:
    if kernels.is_constant(plane.data):
        return _CONST, plane[:1].tobytes()
    room = np.empty(kernels.plane_bound(plane.size), np.uint8)
    nbytes = kernels.encode_plane(plane.data, room.data)
    return (_RANS, room[:nbytes].tobytes()) if nbytes < plane.size else (_RAW, plane.tobytes())


def _decoded(stored: memoryview, mode: int, nbytes: int, count: int) -> Bytes:
    plain = np.empty(count, np.uint8)
    if stored.nbytes == nbytes and mode == _RAW and nbytes == count:
        plain[:] = np.frombuffer(stored, np.uint8)
    elif stored.nbytes == nbytes and mode == _CONST and nbytes == 1:
        plain.fill(stored[0])
    elif stored.nbytes != nbytes or mode != _RANS or not kernels.decode_plane(stored, plain.data):
        raise MalformedError(f"a stream of a product does not hold {count} bytes")
    return plain
