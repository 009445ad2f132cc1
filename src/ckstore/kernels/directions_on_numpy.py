"""What encoders do around products, in numpy: values become what directions are looked for in, directions become words.

Invariants:
- The specification of the native twins, bit for bit: single operations of IEEE 754 binary32, sums of binary64 in a
  fixed order.
- A wrong length or number raises ValueError before anything is written; numbers are aligned to their width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckstore.kernels.quant_on_numpy import (
    LaneSum,
    check_matrix,
    elements_of,
    parts,
    readable,
    rectangles,
    require,
    sums_of_values,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BEYOND = np.float32(2**20)


def take_roots(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int) -> tuple[float, float]:
    """Replace values by their roots, and write the sums of these as ``sums_of_values`` does.

    Returns:
        The least and the greatest of the values, NaN where one of them is; 0 and 0 where there are none.
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
    """Replace each value by itself times the number of its row, times that of its column, less 1; all fp32."""
    x, above, beside = writable(values, np.float32), elements_of(rows, 0), elements_of(cols, 0)
    check_matrix(x.size, row, phase, above.size, beside.size)
    for part, at, left, shape in rectangles(x.size, row, phase):
        block = x[part].reshape(shape)
        with np.errstate(all="ignore"):
            block *= above[at : at + shape[0], None]
            block *= beside[None, left : left + shape[1]]
            block -= np.float32(1)


def missed_squares(values: Buffer, product: Buffer, scale: float) -> tuple[float, float]:
    """Return the sum of the squares of what ``product * scale`` misses of values, and that of the values' squares.

    The product with the scale is rounded to fp32; sums are fp64, in 8 lanes that take turns and are added in halves.
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
    """Write vectors, each times its factor, as integers of 16 bits: the nearest, and of two the even ones.

    Args:
        vectors: As many as there are factors, all equally long; fp32.
        factors: One fp32 for each.
        out: As many int16.

    Returns:
        The greatest magnitude, at most 2**20, which stands for all beyond and for NaN. Of integers that 16 bits do not
        hold nothing is said.
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
    """Write both bytes of zigzagged words apart, and the sum of the squares of each vector.

    Args:
        words: int16, as many vectors of one length as there are sums.
        low: The lower bytes.
        high: The upper ones.
        sums: fp64; exact for vectors of up to 2**23 words, which chunks do not reach.
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
    """Refuse numbers that are not so many vectors of one length, which is not 0."""
    require(numbers % count == 0 and numbers > 0 if count else numbers == 0, "lengths differ")
