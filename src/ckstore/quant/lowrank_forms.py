"""Chunks as products of narrow matrices: changes of weights, quotients of moments, roots of second moments.

With ``p`` the product, an element is ``base + p`` (weights), ``p * sqrt(base)`` with ``p`` cut to a limit (first
moments; the base is the second one) or ``((row * col) * max(1 + p, 1/16)) ** 2`` (second moments), but never below
2**-126, and 0 where a factor is.

Payload: ``row u32, phase u32``; for first moments ``limit f32``, for second ones the factors of rows and of columns,
``exponent i16, octave bits u8, codes``; then the product.

Invariants:
- Decoding takes an exact product, then single operations of IEEE 754 binary32: the same bits on every machine.
- Whatever the payload, the destination is written only when all of it has been read and found right.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.errors import MalformedError
from ckstore.quant.factors import FACTOR_MAX, Factors, factors_of, require_known
from ckstore.quant.geometry import ROW_MAX, ROW_MIN, Grid
from ckstore.quant.lowrank import Floats, Product, fit, multiply, nothing
from ckstore.quant.lowrank_bytes import pack, unpack
from ckstore.quant.settings import LowRank

CHANGE, QUOTIENT, ROOT = "change", "quotient", "root"

_HEAD = struct.Struct("<II")
_FACTORS = struct.Struct("<hB")
_LIMIT = struct.Struct("<f")
_SIDE_MIN = 4
_SQUARE_MIN = 1e-28
_RULES = {CHANGE: 0, QUOTIENT: 1, ROOT: 2}
_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Approximated:
    """What became of a chunk.

    Args:
        payload: What ``read`` makes it of again.
        grid: Where it lies.
        product: Its product.
        limit: Greatest quotient, of first moments.
        factors: Those of rows and of columns, of second moments.
        whole: The integers of the product, where they are known already.
    """

    payload: bytes
    grid: Grid
    product: Product
    limit: float = 0.0
    factors: tuple[Factors, Factors] | None = None
    whole: Floats | None = None


def make_change(values: memoryview, grid: Grid, settings: LowRank) -> Approximated | None:
    """Approximate changes of weights; None where few directions do not come near enough.

    Args:
        values: Finite fp32 values of the chunk.
        grid: Where it lies.
        settings: How near; the step counts the RMS of the changes.
    """
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=True)
    if found is None:
        return None
    return _approximated(*found, grid)


def make_quotient(values: memoryview, grid: Grid, settings: LowRank, limit: float) -> Approximated | None:
    """Approximate quotients of moments, which never exceed a limit; None as in ``make_change``."""
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=False)
    if found is None:
        return None
    return _approximated(*found, grid, limit=limit)


def make_second(values: memoryview, grid: Grid, settings: LowRank) -> Approximated | None:
    """Approximate second moments; ``values`` are used up, and None is returned, where few directions are not enough."""
    if not grid.count:
        return None
    rows, cols = np.empty(grid.row_count), np.empty(grid.row)
    least, greatest = kernels.take_roots(values, rows.data, cols.data, grid.row, grid.phase)
    if not 0 <= least <= greatest < FACTOR_MAX:
        return None
    factors = _sides_of(rows, cols, grid)
    above, beside = (_inverse_of(side) for side in factors)
    kernels.subtract_ones(values, above.data, beside.data, grid.row, grid.phase)
    matrix = _matrix(np.frombuffer(values, np.float32), grid)
    found = _fitted(matrix, grid, settings, is_relative=False)
    if found is None:
        return None
    return _approximated(*found, grid, factors=factors)


def _sides_of(rows: NDArray[np.float64], cols: NDArray[np.float64], grid: Grid) -> tuple[Factors, Factors]:
    """Return the factors of rows and columns from sums of the roots of second moments; those of columns are used up."""
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
    """Return a product with its payload: with a limit that of first moments, with factors that of second ones."""
    parts, kept = [_HEAD.pack(grid.row, grid.phase)], 0.0
    if limit is not None:
        parts.append(_LIMIT.pack(limit))
        (kept,) = _LIMIT.unpack(parts[-1])
    for side in factors or ():
        parts += [_FACTORS.pack(side.exponent, side.octave_bits), side.codes.tobytes()]
    return Approximated(b"".join([*parts, pack(product)]), grid, product, kept, factors, whole)


def read(payload: memoryview, form: str, count: int) -> Approximated:
    """Return what a payload of ``count`` elements says.

    Raises:
        MalformedError: No writer makes such bytes.
    """
    if payload.nbytes < _HEAD.size:
        raise MalformedError("a chunk of directions is cut short")
    row, phase = _HEAD.unpack(payload[: _HEAD.size])
    if not ROW_MIN <= row <= ROW_MAX or phase >= row:
        raise MalformedError(f"a chunk of directions has rows of {row} and phase {phase}")
    grid, rest = Grid(count, row, phase), payload[_HEAD.size :]
    limit = 0.0
    if form == QUOTIENT:
        if rest.nbytes < _LIMIT.size:
            raise MalformedError("a chunk of directions is cut short")
        (limit,), rest = _LIMIT.unpack(rest[: _LIMIT.size]), rest[_LIMIT.size :]
        if not 0 < limit < math.inf:
            raise MalformedError(f"quotients of moments have the limit {limit}")
    sides: list[Factors] = []
    for length in (grid.row_count, row) if form == ROOT else ():
        if rest.nbytes < _FACTORS.size + length:
            raise MalformedError("factors of a chunk of directions are cut short")
        exponent, octave_bits = _FACTORS.unpack(rest[: _FACTORS.size])
        require_known(exponent, octave_bits)
        codes = np.frombuffer(rest[_FACTORS.size : _FACTORS.size + length], np.uint8)
        sides.append(Factors(codes, exponent, octave_bits))
        rest = rest[_FACTORS.size + length :]
    product = unpack(rest, grid.row_count, row)
    return Approximated(b"", grid, product, limit, (sides[0], sides[1]) if sides else None)


def write(made: Approximated, form: str, kind: int, base: memoryview, destination: memoryview) -> float:
    """Write the elements; the base, if the form has one, may be the very memory of the destination.

    Returns:
        The greatest quotient, of first moments.
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
    """Return a product that comes near enough, and its integers."""
    energy = _energy(matrix)
    mean = energy / max(1, grid.count)
    if not _can_be_squared(mean, matrix.shape):
        return None if mean or matrix.any() else (nothing(*matrix.shape), np.zeros_like(matrix))
    found = fit(matrix, settings.step * (mean**0.5 if is_relative else 1.0), settings.rank_max)
    if found is None:
        return None
    whole: Floats = np.empty(matrix.shape, np.float32)
    multiply(found, whole)
    # Both sums by the same rule: where there is no direction, one is the other.
    left_over, total = kernels.missed_squares(matrix.data, whole.data, float(found.scale))
    return (found, whole) if left_over <= settings.error_max * total else None


def _can_be_squared(mean: float, shape: tuple[int, ...]) -> bool:
    """Whether squares of so many neither vanish nor overflow, and the shorter side has room for directions."""
    return _SQUARE_MIN < mean < 1 / _SQUARE_MIN and min(shape) >= _SIDE_MIN


def _matrix(values: Floats, grid: Grid) -> Floats:
    """Return the rows that a chunk touches; what it does not hold of them is 0."""
    if grid.count == grid.row_count * grid.row:
        return values.reshape(grid.row_count, grid.row)
    whole: Floats = np.zeros(grid.row_count * grid.row, np.float32)
    whole[grid.phase : grid.phase + grid.count] = values
    return whole.reshape(grid.row_count, grid.row)


def _inverse_of(factors: Factors) -> Floats:
    """Return one over each factor, and 0 for 0."""
    values = factors.values()
    inverses: Floats = np.divide(np.float32(1), values, out=np.zeros_like(values), where=values > 0)
    return inverses


def _energy(matrix: Floats) -> float:
    # Not a dot product, which libraries spread over threads of their own.
    return float(np.einsum("ij,ij->", matrix, matrix))
