"""Approximate a wide matrix of floats by the product of two narrow matrices of integers.

Every batch moves a matrix along the few directions of its activations and gradients. So the change of a weight within
a few hundred steps is nearly a sum of a few dozen outer products. The same holds for the direction of Adam's step, and
for the difference of a second moment from its row and column factors. In a GPT of 12.8 M parameters, 16 to 64
directions contain 85 to 98 % of the energy of the changes after 25 to 300 steps. A direction costs rows + columns
numbers instead of rows x columns. So outer products are tried before grids of single elements.

A matrix is approximated by ``scale * sum over r of 2**shift[r] * left[:, r] * right[r, :]`` with integers left and
right. Their steps follow the singular values: every coefficient of the transform is rounded in units of one step, and a
direction is kept if it removes more energy than its coefficients cost.

Invariants:
- ``multiply`` sums integers below 2**53 in float64, below 2**24 in float32, or int16 products in int32. Every partial
  sum is exact, so any order on any processor gives the same bits. Rounding to float32 comes afterwards.
- The result of ``fit`` may differ between machines in the last bits. It is the encoder's choice, and it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels

Floats = NDArray[np.float32]
Integers = NDArray[np.int16]

RANK_MAX = 256
SHIFT_MAX = 15

_INTEGER_MAX = 2**15 - 1
_EXACT_IN_FLOAT32, _EXACT_IN_FLOAT64 = 2**24, 2**53
# A direction is kept if its energy is above this share of the squared step for each of its coefficients. The value was
# found by comparing errors at equal bits; the optimum is flat.
_ENERGY_SHARE_MIN = 0.2
# Additional directions in the randomized iteration, so that the last wanted ones are accurate.
_EXTRA_DIRECTIONS = 8
_NARROW = 2
# Added to the diagonal, as a share of its maximum. Directions below it become short; fp32 rounding would turn them.
_RIDGE = 1e-6
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two matrices of integers.

    Args:
        left: One column for each direction.
        right: One row for each direction.
        shifts: For each direction, the exponent of the power of two that it is multiplied by.
        scale: The value of 1 in the product.
    """

    left: Integers
    right: Integers
    shifts: NDArray[np.uint8]
    scale: np.float32

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.shifts.size

    def sum_max(self) -> int:
        """Return a bound on every partial sum."""
        return self._bounds()[0]

    def _bounds(self) -> tuple[int, int]:
        """Return bounds on every partial sum and on the shifted integers of the right side."""
        if not self.rank or not self.left.size or not self.right.size:
            return 0, 0
        lefts, rights = (_greatest(side, axis) for side, axis in ((self.left, 0), (self.right, 1)))
        terms = zip(lefts, rights, self.shifts.tolist(), strict=True)
        shifted = [(one, other << shift) for one, other, shift in terms]
        return sum(one * other for one, other in shifted), max(other for _, other in shifted)

    def is_exact(self) -> bool:
        """Return True if all sums are exact in float64."""
        return self.sum_max() < _EXACT_IN_FLOAT64


def multiply(product: Product, out: Floats) -> None:
    """Write the integers of a product, without its scale; bit for bit the same on every machine.

    Args:
        product: A product that ``is_exact``.
        out: A contiguous matrix with the rows of ``left`` and the columns of ``right``.
    """
    if not product.rank:
        out.fill(0)
        return
    (rows, inner), cols = product.left.shape, out.shape[1]
    sum_max, right_max = product._bounds()
    if sum_max < _EXACT_IN_FLOAT32 and right_max <= _INTEGER_MAX:
        words = np.ascontiguousarray(np.left_shift(product.right, product.shifts[:, None].astype(np.int16)))
        kernels.multiply_words(np.ascontiguousarray(product.left).data, words.data, out.data, rows, inner, cols)
        return
    factors = np.left_shift(1, product.shifts.astype(np.int64))[:, None]
    if sum_max < _EXACT_IN_FLOAT32:
        singles = product.right.astype(np.float32) * factors.astype(np.float32)
        left = np.ascontiguousarray(product.left, np.float32)
        kernels.multiply_floats(left.data, np.ascontiguousarray(singles).data, out.data, rows, inner, cols)
    else:
        doubles = product.right.astype(np.float64) * factors
        out[:] = product.left.astype(np.float64) @ doubles


def _greatest(integers: Integers, axis: int) -> list[int]:
    """Return the greatest magnitudes along an axis; 2**15 for -2**15."""
    most, least = (side.astype(np.int32) for side in (integers.max(axis=axis), integers.min(axis=axis)))
    found: list[int] = np.maximum(most, -least).tolist()
    return found


def zero_product(rows: int, cols: int) -> Product:
    """Return the product of rank 0, which is zero everywhere."""
    return Product(np.empty((rows, 0), np.int16), np.empty((0, cols), np.int16), np.empty(0, np.uint8), np.float32(1))


def fit(matrix: Floats, step: float, rank_max: int) -> Product | None:
    """Return the product that approximates a matrix with this step; None if its numbers are out of range.

    Args:
        matrix: Finite values, not all zero, whose squares neither underflow nor overflow.
        step: Step of the transform's coefficients, in units of the values; positive.
        rank_max: Bound on the directions.
    """
    rows, cols = matrix.shape
    found = _directions(matrix, _count_max(rows, cols, rank_max), _least_square(rows, cols, step))
    return None if found is None else product_of(*found, step)


def _count_max(rows: int, cols: int, rank_max: int) -> int:
    """Return the bound on directions: with more, the matrices are not narrow and cost more than they save."""
    return max(1, min(rank_max, RANK_MAX, rows * cols // (_NARROW * (rows + cols))))


def _least_square(rows: int, cols: int, step: float) -> float:
    """Return the squared singular value above which a direction removes more energy than it costs."""
    return _ENERGY_SHARE_MIN * (rows + cols) * step * step


def product_of(left: Floats, sizes: NDArray[np.float64], right: Floats, step: float) -> Product | None:
    """Round directions to integers; None if they are out of range.

    Args:
        left: Left directions as columns of length 1, or shorter if they are very weak.
        sizes: Singular values, the greatest first.
        right: Right directions as rows of length 1.
        step: The step, as in ``fit``.
    """
    if not sizes.size:
        return zero_product(len(left), right.shape[1])
    shifts = np.rint(np.log2(sizes[0] / sizes))
    if shifts[-1] > SHIFT_MAX:
        return None
    # The steps of both sides multiply to scale * 2**shift. Both sides share the rounding error of the shift.
    off = np.sqrt(sizes * np.exp2(shifts) / sizes[0])
    scale = step * step / sizes[0]
    counts = (sizes / (step * off)).astype(np.float32)
    if not _TINY <= scale < np.finfo(np.float32).max:
        return None
    lefts, rights = _rounded(left.T, counts), _rounded(right, counts)
    if lefts is None or rights is None:
        return None
    found = Product(lefts.T, rights, shifts.astype(np.uint8), np.float32(scale))
    return found if found.is_exact() else None


def _rounded(vectors: Floats, counts: Floats) -> Integers | None:
    """Return vectors, each multiplied by its count, as integers; None if they are out of range."""
    numbers = np.ascontiguousarray(vectors)
    words: Integers = np.empty(numbers.shape, np.int16)
    greatest = kernels.round_vectors(numbers.data, counts.data, words.data)
    return words if greatest <= _INTEGER_MAX else None


def _directions(matrix: Floats, count: int, least: float) -> tuple[Floats, NDArray[np.float64], Floats] | None:
    """Return left directions, singular values and right directions, the strongest first.

    None if products of the values overflow fp32.

    Randomized subspace iteration (Halko, Martinsson and Tropp, SIAM Review 2011): random signs along the shorter side
    are multiplied by the matrix and its transpose once, and the result spans its strongest directions. The signs are
    the same for every matrix.

    Args:
        matrix: Finite values.
        count: Bound on the directions.
        least: Directions whose squared singular value is not above this are left out.
    """
    rows, cols = matrix.shape

    def to_long_side(vectors: Floats) -> Floats:
        return _times(vectors, matrix, rounds=True) if rows <= cols else _times_turned(matrix, vectors)

    def to_short_side(vectors: Floats) -> Floats:
        return _times_turned(matrix, vectors) if rows <= cols else _times(vectors, matrix, rounds=True)

    short = min(rows, cols)
    basis = _orthogonal(to_short_side(to_long_side(_random_signs(count, short))))
    if basis is None:
        return None
    inside = to_long_side(basis)
    squares, vectors = _eigen(_gram(inside))
    sizes: NDArray[np.float64] = np.sqrt(np.maximum(squares[:count], _TINY))
    rank = int(np.count_nonzero(np.square(sizes) > least))
    sizes = sizes[:rank]
    turn: Floats = vectors[:rank].astype(np.float32)
    inverses: Floats = (1 / sizes).astype(np.float32)
    here, there = _times(turn, basis), _times(turn * inverses[:, None], inside)
    return (here.T, sizes, there) if rows <= cols else (there.T, sizes, here)


def _orthogonal(wide: Floats) -> Floats | None:
    """Return orthogonal rows of length 1 that span the rows of a matrix; None if the values overflow fp32.

    Cholesky QR (Fukaya et al., ScalA 2014). A small ridge on the diagonal makes directions short that fp32 cannot
    represent. The Gram matrix is summed in fp64, because fp32 errors would be larger than the ridge.
    """
    greatest = max(float(wide.max(initial=0)), -float(wide.min(initial=0)))
    if not 0 < greatest < np.inf:
        return wide if greatest == 0 else None
    wide *= np.float32(1 / greatest)
    (count, inner), size = wide.shape, 2 * (len(wide),)
    gram, inverse = np.empty(size), np.empty(size)
    kernels.products_of_rows(wide.data, gram.data, count, inner)
    gram[np.diag_indices(count)] += _RIDGE * gram.diagonal().max()
    if not kernels.inverse_root(gram.data, inverse.data):
        raise AssertionError("the Gram matrix of finite rows has no Cholesky root")
    return _times(inverse.astype(np.float32), wide)


def _times(left: Floats, right: Floats, *, rounds: bool = False) -> Floats:
    """Return a product of matrices, computed by the kernel on the caller's thread only.

    With ``rounds``, factors are rounded to bf16. Each is off by less than one part in 256 independently, so a sum over
    a side of the matrix is off by much less than the final step.
    """
    rows, inner = left.shape
    out: Floats = np.empty((rows, right.shape[1]), np.float32)
    kernels.multiply_floats(left.data, right.data, out.data, rows, inner, right.shape[1], rounds=rounds)
    return out


def _times_turned(left: Floats, right: Floats) -> Floats:
    """Return the product of the right matrix and the transpose of the left one, with factors rounded to bf16."""
    (rows, inner), cols = left.shape, len(right)
    out: Floats = np.empty((cols, rows), np.float32)
    kernels.multiply_floats(left.data, right.data, out.data, rows, inner, cols, True, True, True)
    return out


def _gram(wide: Floats) -> Floats:
    """Return the Gram matrix of a matrix's rows."""
    rows, inner = wide.shape
    out: Floats = np.empty((rows, rows), np.float32)
    kernels.multiply_floats(wide.data, wide.data, out.data, rows, inner, rows, True)
    return out


def _eigen(symmetric: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return eigenvalues, the greatest first, and eigenvectors as rows."""
    matrix = symmetric.astype(np.float64)
    vectors, values, work = np.empty_like(matrix), np.empty(len(matrix)), np.empty(3 * len(matrix))
    if not kernels.symmetric_eigen(matrix.data, vectors.data, values.data, work.data):
        raise AssertionError("the eigenvalues of a finite matrix were not found")
    order = np.argsort(values)[::-1]
    return values[order], vectors[order]


@lru_cache(maxsize=16)
def _signs(count: int, length: int) -> Floats:
    bits = np.random.Generator(np.random.PCG64(length)).integers(0, 2, (count, length), np.uint8)
    return bits.astype(np.float32) * 2 - 1


def _random_signs(count: int, length: int) -> Floats:
    """Return a fixed matrix of random signs, with some rows more than ``count``."""
    return _signs(min(count + _EXTRA_DIRECTIONS, length), length)
