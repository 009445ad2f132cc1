"""The payload of a chunk that is stored as outer products, written and read.

With ``p`` the product, an element is ``base + p`` (weights), ``p * sqrt(base)`` with ``p`` clipped to a limit (first
moments, whose base is the second moment), or ``((row * col) * max(1 + p, 1/16)) ** 2`` (second moments). The latter is
at least 2**-126, or 0 where a factor is 0.

Payload: ``row u32, phase u32``; for first moments ``limit f32``; for second moments the factors of rows and of columns,
``exponent i16, octave bits u8, codes``; then the product.

Product: ``rank u16, groups u8, 0 u8, scale f32, shifts rank x u8, group of each vector 2 rank x u8`` (left vectors
first); then for each group ``mode u8, nbytes u32`` of its low bytes and of its high bytes; then these streams. A group
contains its vectors one after another, zigzag-coded to 16 bits. Modes: 0 raw, 1 constant, 3 plane coder.

Invariants:
- For any bytes, reading yields a product that ``is_exact`` and has the expected shape, or raises.
- Nothing is allocated for a length that was not compared with the shape and the payload.
- Decoding uses an exact product and single IEEE 754 binary32 operations: the same bits on every machine.
- The destination is written only after the whole payload has been read and checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.config import LowRank
from ckstore.errors import MalformedError
from ckstore.quant.geometry import FACTOR_MAX, ROW_MAX, ROW_MIN, Factors, Grid, factors_of, require_known
from ckstore.quant.grid import CLASS_COUNT, SUM_COUNT
from ckstore.quant.lowrank import RANK_MAX, SHIFT_MAX, Floats, Integers, Product, fit, multiply, zero_product

_HEAD = struct.Struct("<HBBf")
_ROW = struct.Struct("<BI")
_RAW, _CONST, _RANS = 0, 1, 3
_GROUP_COUNT_MAX = 32
# Overhead in bits: of a group (states of the coder, bitmap of symbols, header, rows in the table), and of a symbol.
_GROUP_BITS, _SYMBOL_BITS = 8 * (256 + 32 + 4 + 10), 16
_SPREAD_MIN = 1e-3

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Side:
    """The vectors of one side as rows: low and high bytes of the zigzag code, and the spread of each vector."""

    planes: tuple[Bytes, Bytes]
    spreads: NDArray[np.float64]


def pack(product: Product) -> bytes:
    """Return the bytes of a product; ``unpack`` reads them."""
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
    """Read a product of this shape.

    Raises:
        MalformedError: No writer makes these bytes.
    """
    if payload.nbytes < _HEAD.size:
        raise MalformedError("a product is truncated")
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
        raise MalformedError("a product has superfluous bytes, or sums that are not exact")
    return product


def _split(vectors: Integers) -> _Side:
    """Return the low and high bytes of the zigzag code of vectors."""
    low, high, sums = np.empty(vectors.shape, np.uint8), np.empty(vectors.shape, np.uint8), np.empty(len(vectors))
    kernels.split_zigzag(np.ascontiguousarray(vectors).data, low.data, high.data, sums.data)
    return _Side((low, high), sums / max(1, vectors.shape[1]))


def _groups(sides: Sequence[_Side]) -> NDArray[np.uint8]:
    """Return the group of each vector. Vectors of similar spread share frequencies, so that the bits are fewest."""
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
        # Few vectors have high bytes other than zero.
        is_high = high.any(axis=1)
        _count(low, classes, counts[:, 0])
        _count(high[is_high], classes[is_high], counts[:, 1])
        counts[:, 1, 0] += np.bincount(classes[~is_high], minlength=len(counts)) * low.shape[1]
    _, group_of = np.unique(np.array(partition(counts))[all_classes], return_inverse=True)
    return group_of.astype(np.uint8)


def _count(symbols: Bytes, classes: Bytes, counts: NDArray[np.int64]) -> None:
    """Add the occurrences of each byte in the rows of each class."""
    length = symbols.shape[1]
    if symbols.size and ROW_MIN <= length <= ROW_MAX:
        found = np.zeros((SUM_COUNT, 256), np.uint32)
        kernels.class_counts(symbols.data, classes.data, np.zeros(length, np.uint8).data, found.data, length, 0)
        counts += found[: len(counts)]
    else:
        places = classes.astype(np.int64)[:, None] * 256 + symbols
        counts += np.bincount(places.reshape(-1), minlength=counts.size).reshape(counts.shape)


def partition(counts: NDArray[np.int64]) -> list[int]:
    """Partition classes into groups of neighbours with the fewest bits; return the first member of each one's group."""
    total = len(counts)
    starts, ends = np.triu_indices(total + 1, 1)

    def of_groups(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.concatenate([np.zeros_like(numbers[:1]), np.cumsum(numbers, axis=0)])
        found: NDArray[np.int64] = sums[ends] - sums[starts]
        return found

    flat = counts.reshape(total, -1)
    # Most byte values do not occur.
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
    """Return the bits of groups, from the occurrences of each byte in both planes and the planes' lengths."""
    entropies = _times_log2(sizes).sum(axis=1) - _times_log2(counts).sum(axis=1)
    found: NDArray[np.float64] = entropies + _SYMBOL_BITS * np.count_nonzero(counts, axis=1)
    return found + _GROUP_BITS


def _times_log2(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each number multiplied by its binary logarithm."""
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
        raise MalformedError(f"a stream of a product does not decode to {count} bytes")
    return plain


CHANGE, QUOTIENT, ROOT = "change", "quotient", "root"

_PLACE = struct.Struct("<II")
_FACTORS = struct.Struct("<hB")
_LIMIT = struct.Struct("<f")
_SIDE_MIN = 4
_SQUARE_MIN = 1e-28
_RULES = {CHANGE: 0, QUOTIENT: 1, ROOT: 2}
_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Approximated:
    """A chunk as outer products.

    Args:
        payload: Its bytes; ``read`` reads them.
        grid: Rows and columns of the chunk.
        product: The product.
        limit: Greatest quotient, for first moments.
        factors: Factors of rows and of columns, for second moments.
        whole: The integers of the product, if they were computed.
    """

    payload: bytes
    grid: Grid
    product: Product
    limit: float = 0.0
    factors: tuple[Factors, Factors] | None = None
    whole: Floats | None = None


def make_change(values: memoryview, grid: Grid, settings: LowRank) -> Approximated | None:
    """Approximate the changes of weights; None if few directions are not precise enough.

    Args:
        values: Finite fp32 values of the chunk.
        grid: Rows and columns of the chunk.
        settings: Precision and rank. The step is a multiple of the RMS of the changes.
    """
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=True)
    if found is None:
        return None
    return _approximated(*found, grid)


def make_quotient(values: memoryview, grid: Grid, settings: LowRank, limit: float) -> Approximated | None:
    """Approximate quotients of moments, clipped to a limit; None as in ``make_change``."""
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=False)
    if found is None:
        return None
    return _approximated(*found, grid, limit=limit)


def make_second(values: memoryview, grid: Grid, settings: LowRank) -> Approximated | None:
    """Approximate second moments; None if few directions are not precise enough. Overwrites ``values``."""
    if not grid.count:
        return None
    rows, cols = np.empty(grid.row_count), np.empty(grid.row)
    least, greatest = kernels.take_roots(values, rows.data, cols.data, grid.row, grid.phase)
    if not 0 <= least <= greatest < FACTOR_MAX:
        return None
    factors = _sides_of(rows, cols, grid)
    by_row, by_col = (_inverse_of(side) for side in factors)
    kernels.subtract_ones(values, by_row.data, by_col.data, grid.row, grid.phase)
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=False)
    if found is None:
        return None
    return _approximated(*found, grid, factors=factors)


def _sides_of(rows: NDArray[np.float64], cols: NDArray[np.float64], grid: Grid) -> tuple[Factors, Factors]:
    """Return the factors of rows and columns from sums of the roots of second moments. Overwrites ``cols``."""
    mean = float(rows.sum()) / grid.count
    cols /= np.maximum(grid.col_sizes(), 1)
    return factors_of(rows / np.maximum(grid.row_sizes(), 1)), factors_of(cols / mean if mean > 0 else cols)


def _approximated(
    product: Product,
    whole: Floats | None,
    grid: Grid,
    *,
    limit: float | None = None,
    factors: tuple[Factors, Factors] | None = None,
) -> Approximated:
    """Return a product with its payload: of first moments if there is a limit, of second ones if there are factors."""
    parts, stored_limit = [_PLACE.pack(grid.row, grid.phase)], 0.0
    if limit is not None:
        parts.append(_LIMIT.pack(limit))
        (stored_limit,) = _LIMIT.unpack(parts[-1])
    for side in factors or ():
        parts += [_FACTORS.pack(side.exponent, side.octave_bits), side.codes.tobytes()]
    return Approximated(b"".join([*parts, pack(product)]), grid, product, stored_limit, factors, whole)


def read(payload: memoryview, form: str, count: int) -> Approximated:
    """Read the payload of ``count`` elements.

    Raises:
        MalformedError: No writer makes these bytes.
    """
    if payload.nbytes < _PLACE.size:
        raise MalformedError("a chunk of outer products is truncated")
    row, phase = _PLACE.unpack(payload[: _PLACE.size])
    if not ROW_MIN <= row <= ROW_MAX or phase >= row:
        raise MalformedError(f"a chunk of outer products has rows of {row} and phase {phase}")
    grid, rest = Grid(count, row, phase), payload[_PLACE.size :]
    limit = 0.0
    if form == QUOTIENT:
        if rest.nbytes < _LIMIT.size:
            raise MalformedError("a chunk of outer products is truncated")
        (limit,), rest = _LIMIT.unpack(rest[: _LIMIT.size]), rest[_LIMIT.size :]
        if not 0 < limit < math.inf:
            raise MalformedError(f"quotients of moments have the limit {limit}")
    sides: list[Factors] = []
    for length in (grid.row_count, row) if form == ROOT else ():
        if rest.nbytes < _FACTORS.size + length:
            raise MalformedError("the factors of a chunk of outer products are truncated")
        exponent, octave_bits = _FACTORS.unpack(rest[: _FACTORS.size])
        require_known(exponent, octave_bits)
        codes = np.frombuffer(rest[_FACTORS.size : _FACTORS.size + length], np.uint8)
        sides.append(Factors(codes, exponent, octave_bits))
        rest = rest[_FACTORS.size + length :]
    product = unpack(rest, grid.row_count, row)
    return Approximated(b"", grid, product, limit, (sides[0], sides[1]) if sides else None)


def write(made: Approximated, form: str, kind: int, base: memoryview, destination: memoryview) -> float:
    """Write the elements; ``base``, if the form has one, and ``destination`` may be the same memory.

    Returns:
        The greatest quotient, for first moments.
    """
    grid = made.grid
    whole = made.whole
    if whole is None:
        whole = np.empty((grid.row_count, grid.row), np.float32)
        multiply(made.product, whole)
    rows, cols = (side.values().data for side in made.factors) if made.factors else (_NO_BYTES, _NO_BYTES)
    return kernels.finish_outer(
        *(whole.data, rows, cols, base, destination, grid.row, grid.phase, kind, _RULES[form]),
        *(float(made.product.scale), made.limit),
    )


def _fitted(matrix: Floats, grid: Grid, settings: LowRank, *, is_relative: bool) -> tuple[Product, Floats] | None:
    """Return a product that is precise enough, with its integers; None if there is none."""
    energy = _energy(matrix)
    mean = energy / max(1, grid.count)
    if not _can_be_squared(mean, matrix.shape):
        return None if mean or matrix.any() else (zero_product(*matrix.shape), np.zeros_like(matrix))
    found = fit(matrix, settings.step * (mean**0.5 if is_relative else 1.0), settings.rank_max)
    if found is None:
        return None
    whole: Floats = np.empty(matrix.shape, np.float32)
    multiply(found, whole)
    # Both sums are computed the same way, so they are equal if there is no direction.
    left_over, total = kernels.missed_squares(matrix.data, whole.data, float(found.scale))
    return (found, whole) if left_over <= settings.error_max * total else None


def _can_be_squared(mean: float, shape: tuple[int, ...]) -> bool:
    """Return True if sums of squares neither underflow nor overflow, and the shorter side has enough elements."""
    return _SQUARE_MIN < mean < 1 / _SQUARE_MIN and min(shape) >= _SIDE_MIN


def _matrix(values: Floats, grid: Grid) -> Floats:
    """Return the rows that a chunk covers; elements outside the chunk are 0."""
    if grid.count == grid.row_count * grid.row:
        return values.reshape(grid.row_count, grid.row)
    whole: Floats = np.zeros(grid.row_count * grid.row, np.float32)
    whole[grid.phase : grid.phase + grid.count] = values
    return whole.reshape(grid.row_count, grid.row)


def _inverse_of(factors: Factors) -> Floats:
    """Return the inverse of each factor; 0 for 0."""
    values = factors.values()
    inverses: Floats = np.divide(np.float32(1), values, out=np.zeros_like(values), where=values > 0)
    return inverses


def _energy(matrix: Floats) -> float:
    # Not a dot product, which BLAS libraries run on threads of their own.
    return float(np.einsum("ij,ij->", matrix, matrix))
