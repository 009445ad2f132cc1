"""Products of two narrow matrices of integers that come near a wide matrix of floats.

What training changes in a weight within a few hundred steps, the direction that Adam takes, and what a second moment
differs from the product of its row and its column are all sums of a few dozen outer products: each batch pushes a
matrix along the few directions in which its activations and its gradients lie. Sixteen to sixty-four such directions
hold 85 to 98% of the energy of the changes (measured on a GPT of 12.8 M parameters, for 25, 100 and 300 steps), and
cost a rows + columns of numbers each, not rows x columns. That is why this comes first, and grids for single
elements second.

A matrix is approximated by ``scale * sum over r of 2**shift[r] * left[:, r] * right[r, :]``, where left and right are
integers. Their steps follow the singular values: every coefficient of the transform is rounded in units of one step,
and a direction is kept where it takes away more energy than its coefficients cost.

Invariants:
- ``multiply`` sums integers below 2**53 in float64, or below 2**24 in float32, or in int32 of words: every partial sum
  is exact, so that any order and any processor gives the same bits. Rounding to float32 comes after it.
- What ``fit`` finds may differ from machine to machine in the last bits: it is the encoder's choice, and is stored.
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
# A direction is kept if its energy is above this share of what rounding one step adds per coefficient; found by
# comparing errors at equal bits, and flat around its optimum.
_KEPT_FROM = 0.2
# Directions that are tried beyond those that are wanted, so that the last of these are found well.
_OVERSAMPLED = 8
_NARROW = 2
# Directions of less than this share of the greatest square come short: rounding to fp32 would turn them.
_NO_SIZE = 1e-6
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Product:
    """Integers whose product is meant.

    Args:
        left: One column for each direction.
        right: One row for each direction.
        shifts: The power of two that a direction is multiplied by.
        scale: What an integer of the product stands for.
    """

    left: Integers
    right: Integers
    shifts: NDArray[np.uint8]
    scale: np.float32

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return self.shifts.size

    def sum_max(self) -> int:
        """Return a bound on every partial sum."""
        return self._bounds()[0]

    def _bounds(self) -> tuple[int, int]:
        """Return a bound on every partial sum, and one on the shifted integers of the right side."""
        if not self.rank or not self.left.size or not self.right.size:
            return 0, 0
        lefts, rights = (_greatest(side, axis) for side, axis in ((self.left, 0), (self.right, 1)))
        terms = zip(lefts, rights, self.shifts.tolist(), strict=True)
        shifted = [(one, other << shift) for one, other, shift in terms]
        return sum(one * other for one, other in shifted), max(other for _, other in shifted)

    def is_exact(self) -> bool:
        """Return whether the sums stay where float64 is exact."""
        return self.sum_max() < _EXACT_IN_FLOAT64


def multiply(product: Product, out: Floats) -> None:
    """Write the integers that a product stands for, without its scale; bit for bit the same everywhere.

    Args:
        product: One that ``is_exact``.
        out: A contiguous matrix of as many rows as ``left`` has and columns as ``right`` has.
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
    """Return the greatest magnitudes along an axis; that of -2**15 is 2**15."""
    most, least = (side.astype(np.int32) for side in (integers.max(axis=axis), integers.min(axis=axis)))
    found: list[int] = np.maximum(most, -least).tolist()
    return found


def nothing(rows: int, cols: int) -> Product:
    """Return the product that is zero everywhere."""
    return Product(np.empty((rows, 0), np.int16), np.empty((0, cols), np.int16), np.empty(0, np.uint8), np.float32(1))


def fit(matrix: Floats, step: float, rank_max: int) -> Product | None:
    """Return the product that comes near a matrix with so coarse a step; None where its numbers do not fit.

    Args:
        matrix: Finite values, not all of them zero, whose squares are neither zero nor infinite.
        step: Width of a step of the transform's coefficients, in units of the values, above 0.
        rank_max: Most directions.
    """
    rows, cols = matrix.shape
    found = _directions(matrix, _count_max(rows, cols, rank_max), _least_square(rows, cols, step))
    return None if found is None else product_of(*found, step)


def _count_max(rows: int, cols: int, rank_max: int) -> int:
    """Return how many directions are looked for: more are no narrow matrices any more, whatever they would save."""
    return max(1, min(rank_max, RANK_MAX, rows * cols // (_NARROW * (rows + cols))))


def _least_square(rows: int, cols: int, step: float) -> float:
    """Return the square of a singular value from which on a direction takes away more than it costs."""
    return _KEPT_FROM * (rows + cols) * step * step


def product_of(left: Floats, sizes: NDArray[np.float64], right: Floats, step: float) -> Product | None:
    """Round directions to integers; None where they do not fit.

    Args:
        left: Left directions as columns, of length 1, or shorter where they are very weak.
        sizes: Singular values, the greatest first.
        right: Right directions as rows, of length 1.
        step: Width of a step, as ``fit`` takes it.
    """
    if not sizes.size:
        return nothing(len(left), right.shape[1])
    shifts = np.rint(np.log2(sizes[0] / sizes))
    if shifts[-1] > SHIFT_MAX:
        return None
    # The steps of both sides multiply to scale * 2**shift: what the shift is off by, both sides share.
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
    """Return vectors, each times its count, as integers; None where they do not fit."""
    numbers = np.ascontiguousarray(vectors)
    words: Integers = np.empty(numbers.shape, np.int16)
    greatest = kernels.round_vectors(numbers.data, counts.data, words.data)
    return words if greatest <= _INTEGER_MAX else None


def _directions(matrix: Floats, count: int, least: float) -> tuple[Floats, NDArray[np.float64], Floats] | None:
    """Return the first left directions, singular values and right directions, found by a randomized iteration.

    None where products of the values are too large for fp32.

    Halko, Martinsson and Tropp (SIAM Review 2011): random signs along the shorter side go through the matrix and back
    once; what they become spans its strongest directions. The signs are the same for every matrix.

    Args:
        matrix: Finite values.
        count: Most directions.
        least: Squares of singular values that are not above it are left out.
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
    kept = int(np.count_nonzero(np.square(sizes) > least))
    sizes = sizes[:kept]
    turn: Floats = vectors[:kept].astype(np.float32)
    inverses: Floats = (1 / sizes).astype(np.float32)
    here, there = _times(turn, basis), _times(turn * inverses[:, None], inside)
    return (here.T, sizes, there) if rows <= cols else (there.T, sizes, here)


def _orthogonal(wide: Floats) -> Floats | None:
    """Return orthogonal rows of length 1 that span those of a matrix; directions of no size become short.

    By Cholesky's root of the products of the rows (Fukaya et al., ScalA 2014), to whose diagonal a little is added, so
    that what the last product below rounds away has no direction. The products are summed in fp64: errors of fp32 are
    larger than what is added, and would make rows of any length. None where values are too large for fp32.
    """
    greatest = max(float(wide.max(initial=0)), -float(wide.min(initial=0)))
    if not 0 < greatest < np.inf:
        return wide if greatest == 0 else None
    wide *= np.float32(1 / greatest)
    (count, inner), size = wide.shape, 2 * (len(wide),)
    gram, inverse = np.empty(size), np.empty(size)
    kernels.products_of_rows(wide.data, gram.data, count, inner)
    gram[np.diag_indices(count)] += _NO_SIZE * gram.diagonal().max()
    if not kernels.inverse_root(gram.data, inverse.data):
        raise AssertionError("the products of finite rows have no root")
    return _times(inverse.astype(np.float32), wide)


def _times(left: Floats, right: Floats, *, rounds: bool = False) -> Floats:
    """Return a product of matrices by the kernel, which takes one thread: the caller's.

    Where it ``rounds``, factors are rounded to bf16: they are off by less than one part in 256, each its own way, and a
    sum of them over a side of the matrix by far less than the step that it is rounded by in the end.
    """
    rows, inner = left.shape
    out: Floats = np.empty((rows, right.shape[1]), np.float32)
    kernels.multiply_floats(left.data, right.data, out.data, rows, inner, right.shape[1], rounds=rounds)
    return out


def _times_turned(left: Floats, right: Floats) -> Floats:
    """Return the product of the right matrix and the transpose of the left one, whose factors are rounded to bf16."""
    (rows, inner), cols = left.shape, len(right)
    out: Floats = np.empty((cols, rows), np.float32)
    kernels.multiply_floats(left.data, right.data, out.data, rows, inner, cols, True, True, True)
    return out


def _gram(wide: Floats) -> Floats:
    """Return the products of a matrix's rows with each other."""
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
    """Return a fixed matrix of random signs, with some rows more than directions are looked for."""
    return _signs(min(count + _OVERSAMPLED, length), length)
