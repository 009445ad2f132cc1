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
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.errors import MalformedError
from ckstore.quant.lowrank import RANK_MAX, SHIFT_MAX, Integers, Product

_HEAD = struct.Struct("<HBBf")
_ROW = struct.Struct("<BI")
_RAW, _CONST, _RANS = 0, 1, 3
_GROUP_COUNT_MAX = 32
# What a group costs besides: states of the coder, bitmap of symbols, header, its rows in the table; and a symbol.
_GROUP_BITS, _SYMBOL_BITS = 8 * (256 + 32 + 4 + 10), 16

Bytes = NDArray[np.uint8]


def pack(product: Product) -> bytes:
    """Return the bytes that ``unpack`` makes the product of."""
    lefts = np.ascontiguousarray(product.left.T)
    vectors = [*lefts, *product.right]
    group_of = _groups(vectors, [*_spreads(lefts), *_spreads(product.right)])
    count = max(group_of, default=-1) + 1
    table, streams = [], []
    for group in range(count):
        chosen = [vector for vector, its in zip(vectors, group_of, strict=True) if its == group]
        words = _zigzag(np.concatenate(chosen))
        for plane in (words.astype(np.uint8), (words >> 8).astype(np.uint8)):
            mode, stored = _coded(plane)
            table.append(_ROW.pack(mode, len(stored)))
            streams.append(stored)
    head = _HEAD.pack(product.rank, count, 0, product.scale)
    return b"".join([head, product.shifts.tobytes(), bytes(group_of), *table, *streams])


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


def _zigzag(values: Integers) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = ((values << 1) ^ (values >> 15)).view(np.uint16)
    return found


def _spreads(vectors: Integers) -> list[float]:
    """Return the mean square of each row."""
    values = vectors.astype(np.float32)
    found: list[float] = (np.einsum("ij,ij->i", values, values) / max(1, values.shape[1])).tolist()
    return found


def _groups(vectors: Sequence[Integers], spreads: Sequence[float]) -> list[int]:
    """Return which vectors share frequencies: neighbours in their spread, as few groups as take the fewest bits."""
    octaves = [math.floor(math.log2(max(spread, 1e-3))) for spread in spreads]
    members: list[list[int]] = []
    counts: list[NDArray[np.int64]] = []
    for octave in sorted(set(octaves)):
        members.append([index for index, its in enumerate(octaves) if its == octave])
        joined = _zigzag(np.concatenate([vectors[index] for index in members[-1]]))
        counts.append(np.bincount(np.minimum(joined, 511), minlength=512))
    bits = [_bits(count) for count in counts]
    merged = [_bits(one + other) for one, other in pairwise(counts)]
    while len(counts) > 1:
        gains = [bits[index] + bits[index + 1] - both for index, both in enumerate(merged)]
        best = int(np.argmax(gains))
        if gains[best] <= 0 and len(counts) <= _GROUP_COUNT_MAX:
            break
        bits[best : best + 2] = [merged[best]]
        counts[best : best + 2] = [counts[best] + counts[best + 1]]
        members[best : best + 2] = [members[best] + members[best + 1]]
        # Only what is beside the new one has another neighbour.
        around = range(max(0, best - 1), min(best + 1, len(counts) - 1))
        merged[max(0, best - 1) : best + 2] = [_bits(counts[index] + counts[index + 1]) for index in around]
    group_of = [0] * len(vectors)
    for group, indices in enumerate(members):
        for index in indices:
            group_of[index] = group
    return group_of


def _bits(counts: NDArray[np.int64]) -> float:
    present = counts[counts > 0]
    return float(present @ np.log2(present.sum() / present)) + _GROUP_BITS + _SYMBOL_BITS * present.size


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
