"""The loops of low-rank quantization in numpy: products of narrow matrices, and what the encoder does around them.

Invariants:
- ``multiply_words``, ``finish_outer`` and the loops around products (``take_roots`` to ``split_zigzag``) specify the
  native implementation bit for bit: exact sums or sums in fp64 in a fixed order, and single IEEE 754 binary32
  operations.
- ``multiply_floats`` is exact if every sum is, as it is for integers below 2**24. For other numbers implementations
  may differ in the last bits, as in eigenvectors and roots. Only encoders use those.
- A wrong length or number raises ValueError before anything is written. Numbers are aligned to their width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckstore.codec.kernels.quantize_reference import (
    BF16,
    LaneSum,
    check_matrix,
    elements_of,
    narrowed,
    parts,
    readable,
    rectangles,
    require,
    sums_of_values,
    widened,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


ADD, ROOT, SQUARE = 0, 1, 2
ROW_PRODUCTS_MAX = 1024

_RATIO_MIN = np.float32(1 / 16)
_LEAST = np.float32(2.0**-126)


def multiply_floats(
    left: Buffer,
    right: Buffer,
    out: Buffer,
    rows: int,
    inner: int,
    cols: int,
    right_is_turned: bool = False,
    out_is_turned: bool = False,
    rounds: bool = False,
) -> None:
    """Write the product of two fp32 matrices, ``rows`` by ``inner`` and ``inner`` by ``cols``.

    The right matrix or the product is stored by columns if its flag is set. With ``rounds``, finite factors are first
    rounded to bf16, to nearest, ties to even; factors below 2**-126 may become 0.
    """
    one, other, target = elements_of(left, 0), elements_of(right, 0), writable(out, np.float32)
    if rounds:
        one, other = (widened(narrowed(side, BF16), BF16) for side in (one, other))
    require(min(rows, inner, cols) >= 0, "a matrix has too many rows or columns")
    require(one.size == rows * inner and other.size == inner * cols and target.size == rows * cols, "lengths differ")
    second = other.reshape(cols, inner).T if right_is_turned else other.reshape(inner, cols)
    product = target.reshape(cols, rows).T if out_is_turned else target.reshape(rows, cols)
    with np.errstate(all="ignore"):
        np.matmul(one.reshape(rows, inner), second, out=product)


def multiply_words(left: Buffer, right: Buffer, out: Buffer, rows: int, inner: int, cols: int) -> None:
    """Write the product of two int16 matrices as fp32. Its partial sums, in any order, are below 2**24."""
    require(readable(left).size % 2 == readable(right).size % 2 == 0, "lengths differ")
    one, other = readable(left).view(np.int16), readable(right).view(np.int16)
    require(min(rows, inner, cols) >= 0, "a matrix has too many rows or columns")
    require(one.size == rows * inner and other.size == inner * cols, "lengths differ")
    multiply_floats(one.astype(np.float32).data, other.astype(np.float32).data, out, rows, inner, cols)


def symmetric_eigen(matrix: Buffer, vectors: Buffer, values: Buffer, work: Buffer) -> bool:
    """Write the eigenvectors of a symmetric fp64 matrix as rows, and the eigenvalues, in any order.

    Args:
        matrix: Square; overwritten.
        vectors: As large as the matrix.
        values: One for each row.
        work: Three for each row.

    Returns:
        True if all were found.
    """
    square, rows, found = (writable(buffer, np.float64) for buffer in (matrix, vectors, values))
    n = found.size
    require(square.size == rows.size == n * n and writable(work, np.float64).size == 3 * n, "lengths differ")
    require(n <= 4096, "a matrix has too many rows or columns")
    if not np.isfinite(square).all():
        return False
    try:
        found[:], columns = np.linalg.eigh(square.reshape(n, n))
    except np.linalg.LinAlgError:
        return False
    rows.reshape(n, n)[:] = columns.T
    return True


def products_of_rows(rows: Buffer, out: Buffer, count: int, inner: int) -> None:
    """Write the Gram matrix of up to 1024 rows: its upper half in fp64, and 0 below.

    Args:
        rows: ``count`` by ``inner``, fp32.
        out: ``count`` by ``count``.
        count: Number of rows.
        inner: Length of a row.
    """
    values, target = elements_of(rows, 0), writable(out, np.float64)
    require(0 <= count <= ROW_PRODUCTS_MAX and inner >= 0, "a matrix has too many rows or columns")
    require(values.size == count * inner and target.size == count * count, "lengths differ")
    wide = values.reshape(count, inner).astype(np.float64)
    with np.errstate(all="ignore"):
        target.reshape(count, count)[:] = np.triu(wide @ wide.T)


def inverse_root(matrix: Buffer, inverse: Buffer) -> bool:
    """Write the inverse of the lower Cholesky factor of a symmetric fp64 matrix.

    Args:
        matrix: Square, of at most 4096 rows. Its upper half is read and overwritten.
        inverse: As large; becomes lower triangular.

    Returns:
        True if the matrix is positive definite.
    """
    square, target = (writable(buffer, np.float64) for buffer in (matrix, inverse))
    n = math.isqrt(square.size)
    require(n <= 4096, "a matrix has too many rows or columns")
    require(square.size == n * n == target.size, "lengths differ")
    upper = np.triu(square.reshape(n, n))
    if not np.isfinite(upper).all():
        return False
    try:
        found = np.linalg.inv(np.linalg.cholesky(upper + np.triu(upper, 1).T))
    except np.linalg.LinAlgError:
        return False
    target.reshape(n, n)[:] = np.tril(found)
    return True


def finish_outer(
    product: Buffer,
    rows: Buffer,
    cols: Buffer,
    base: Buffer,
    destination: Buffer,
    row: int,
    phase: int,
    kind: int,
    rule: int,
    scale: float,
    limit: float,
) -> float:
    """Write the elements that a product represents. It has whole rows, of which the chunk may lack some elements.

    With ``p`` an entry of the product times the scale, an element is, by ``rule``: 0: ``base + p``; 1: ``p``, clipped
    to ``limit``, times ``sqrt(base)``; 2: the square of ``max(p + 1, 1/16) * (row factor * column factor)``, at least
    2**-126, but 0 where a factor is 0. Rule 2 has no base, the others no factors. The base may be the destination.

    Returns:
        The greatest magnitude of ``p`` for rule 1, else 0.
    """
    values, by_row, by_col = elements_of(product, 0), elements_of(rows, 0), elements_of(cols, 0)
    target, other = elements_of(destination, kind), elements_of(base, kind)
    writable(destination, target.dtype)
    require(rule in (ADD, ROOT, SQUARE), "rule must be 0, 1 or 2")
    require(other.size == (0 if rule == SQUARE else target.size), "lengths differ")
    row_count = -(-(phase + target.size) // row) if target.size and row else 0
    check_matrix(target.size, row, phase, row_count, row)
    require(values.size == row_count * row, "lengths differ")
    require((by_row.size, by_col.size) == ((row_count, row) if rule == SQUARE else (0, 0)), "lengths differ")
    greatest = 0.0
    with np.errstate(all="ignore"):
        p = values * np.float32(scale)
        if rule == SQUARE:
            factors = by_row[:, None] * by_col
            roots = np.maximum(p + np.float32(1), _RATIO_MIN) * factors.reshape(-1)
            p = np.maximum(roots * roots, _LEAST).reshape(row_count, row)
            p[by_row == 0] = 0
            p[:, by_col == 0] = 0
            p = p.reshape(-1)
        p = p[phase : phase + target.size]
        if rule == ADD:
            p = widened(other, kind) + p
        elif rule == ROOT:
            p = np.minimum(np.maximum(p, -np.float32(limit)), np.float32(limit))
            greatest = float(np.abs(p).max(initial=0))
            p = p * np.sqrt(widened(other, kind))
    target[:] = narrowed(p, kind)
    return greatest


_BEYOND = np.float32(2**20)


def take_roots(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int) -> tuple[float, float]:
    """Replace values by their square roots, and write the sums of these as ``sums_of_values`` does.

    Returns:
        The smallest and the greatest of the values; NaN if one of them is NaN; 0 and 0 if there are none.
    """
    x = writable(values, np.float32)
    rows, cols = writable(rows_out, np.float64), writable(cols_out, np.float64)
    check_matrix(x.size, row, phase, rows.size, cols.size)
    extremes = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    with np.errstate(all="ignore"):
        np.sqrt(x, out=x)
        sums_of_values(x.data, rows.data, cols.data, row, phase, False)
    return extremes


def subtract_ones(values: Buffer, rows: Buffer, cols: Buffer, row: int, phase: int) -> None:
    """Replace each value by itself times its row's number, times its column's number, minus 1; all fp32."""
    x, by_row, by_col = writable(values, np.float32), elements_of(rows, 0), elements_of(cols, 0)
    check_matrix(x.size, row, phase, by_row.size, by_col.size)
    for part, at, left, shape in rectangles(x.size, row, phase):
        block = x[part].reshape(shape)
        with np.errstate(all="ignore"):
            block *= by_row[at : at + shape[0], None]
            block *= by_col[None, left : left + shape[1]]
            block -= np.float32(1)


def missed_squares(values: Buffer, product: Buffer, scale: float) -> tuple[float, float]:
    """Return the sum of squares of values minus ``product * scale``, and the sum of squares of the values.

    The product times the scale is rounded to fp32. Sums are fp64, in 8 interleaved lanes that are added in halves.
    """
    given, made = elements_of(values, 0), elements_of(product, 0)
    require(given.size == made.size, "lengths differ")
    missed, squares = LaneSum(), LaneSum()
    for part in parts(given.size):
        with np.errstate(all="ignore"):
            numbers = given[part].astype(np.float64)
            errors = (made[part] * np.float32(scale)).astype(np.float64) - numbers
            missed.add(errors * errors)
            squares.add(numbers * numbers)
    return missed.total(), squares.total()


def round_vectors(vectors: Buffer, factors: Buffer, out: Buffer) -> float:
    """Write vectors, each times its factor, as 16-bit integers, to nearest, ties to even.

    Args:
        vectors: One for each factor, all of one length; fp32.
        factors: One fp32 for each vector.
        out: As many int16.

    Returns:
        The greatest magnitude, at most 2**20, which also stands for larger ones and NaN. Integers of more than 16 bits
        are undefined.
    """
    numbers, counts, target = elements_of(vectors, 0), elements_of(factors, 0), writable(out, np.int16)
    require(numbers.size == target.size, "lengths differ")
    _require_vectors(numbers.size, counts.size)
    if not numbers.size:
        return 0.0
    with np.errstate(all="ignore"):
        whole = numbers.reshape(counts.size, -1) * counts[:, None]
        whole = np.rint(np.where(whole > -_BEYOND, np.minimum(whole, _BEYOND), -_BEYOND))
    target[:] = whole.reshape(-1).astype(np.int32).astype(np.int16)
    return float(np.abs(whole).max())


def split_zigzag(words: Buffer, low: Buffer, high: Buffer, sums: Buffer) -> None:
    """Write the low and the high bytes of zigzag-coded words, and the sum of squares of each vector.

    Args:
        words: int16; as many vectors of one length as there are sums.
        low: The low bytes.
        high: The high bytes.
        sums: fp64; exact for vectors of up to 2**23 words.
    """
    lower, upper, squares = writable(low, np.uint8), writable(high, np.uint8), writable(sums, np.float64)
    plain = readable(words)
    require(plain.size == 2 * lower.size and lower.size == upper.size, "lengths differ")
    numbers = plain.view(np.int16)
    _require_vectors(numbers.size, squares.size)
    folded = ((numbers << 1) ^ (numbers >> 15)).view(np.uint16)
    lower[:] = folded.astype(np.uint8)
    upper[:] = (folded >> 8).astype(np.uint8)
    if squares.size:
        squares[:] = np.square(numbers.astype(np.int64)).reshape(squares.size, -1).sum(axis=1)


def _require_vectors(numbers: int, count: int) -> None:
    """Raise ValueError unless the numbers are this many vectors of one positive length."""
    require(numbers % count == 0 and numbers > 0 if count else numbers == 0, "lengths differ")
