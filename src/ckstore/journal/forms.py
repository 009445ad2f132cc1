"""Forms of a gradient: the numbers to code, from which every element of it is computed again exactly.

Training in bf16 or fp16 makes gradients that are bf16 or fp16 numbers, although they are float32 tensors. Clipping,
loss scaling and averaging multiply all of them by one factor: g = fl(b * f), rounded once. Then the numbers b and the
factor are stored, which take half the bits. A form is only used after it has reproduced every element, bit for bit.

Finding f. It is determined up to a power of two. For one element g and each mantissa that b can have, f is in an
interval of few float32 numbers around g / b. So there are some hundred candidates (bf16), and the other elements of a
sample rule out all but a few. ``ckstore.clip_grad_norm_`` records the factor, and the one of the last step is tried
first, so the search is rare.

Rows that are zero (tokens of an embedding that did not occur, experts that were idle) are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["plain", "bf16", "fp16"]

SAMPLE_COUNT = 64
"""Elements of large magnitude that a candidate for the factor must reproduce before all elements are computed. Small
ones may have lost bits as subnormal numbers."""

ROWS_MIN = 1 / 16
"""Zero rows are left out if they are at least this part of all rows."""

PIECE_COUNT = 32 * 1024
"""Elements that are narrowed and widened at a time, so that what is computed on the way stays in the cache."""
_FIRST_COUNT = 16
"""Elements of each row that are compared first: most rows have one there that is not zero."""
_ULPS = 2
"""Neighbours of g / b, to either side, that are tried. b is in [1, 2), so the interval of f has at most this many."""

_FP16_EXPONENT_MAX = 15
"""Numbers below 2 ** 15 stay finite in fp16, also after division by a factor in [1, 2)."""

_MANTISSA_BITS: dict[Kind, int] = {"bf16": 7, "fp16": 10}


class Form(NamedTuple):
    """A gradient as it is stored.

    Args:
        kind: What ``values`` are: the gradient's own elements, or numbers of two bytes.
        factor: What each number is multiplied by, in float32; None: nothing.
        rows: A bit for each row of the gradient, packed, 1 if it is stored; None: all are.
        values: The numbers, one dimension: float32 or another dtype of the gradient for ``plain``, else their bits as
            uint16.
    """

    kind: Kind
    factor: np.float32 | None
    rows: NDArray[np.uint8] | None
    values: NDArray[np.generic]


def form_of(gradient: NDArray[np.generic], factors: Iterable[np.float32] = (), *, searches: bool = True) -> Form:
    """Return the form that takes the fewest bits of those that reproduce a gradient exactly.

    Args:
        gradient: Any dtype and shape. Only float32 is narrowed.
        factors: Factors to try before a search.
        searches: Whether to search for a factor if none of these fits.
    """
    rows, stored = _without_zero_rows(gradient)
    values = stored.reshape(-1)
    if gradient.dtype != np.float32 or not values.size:
        return Form("plain", None, rows, values)
    numbers = np.ascontiguousarray(values).view(np.float32)
    for kind, factor in _candidates(numbers, factors, searches):
        # The first elements rule out nearly all that fail.
        if _narrowed(numbers[:SAMPLE_COUNT], kind, factor) is not None:
            narrow = _narrowed(numbers, kind, factor)
            if narrow is not None:
                return Form(kind, factor, rows, narrow)
    return Form("plain", None, rows, values)


def _candidates(
    numbers: NDArray[np.float32], factors: Iterable[np.float32], searches: bool
) -> Iterator[tuple[Kind, np.float32 | None]]:
    for factor in (None, *factors):
        for kind in _MANTISSA_BITS:
            yield kind, factor
    if not searches:
        return
    sample = _sample_of(numbers)
    for kind in _MANTISSA_BITS:
        for found in factors_of(sample, kind):
            yield kind, found


def write_gradient(form: Form, gradient: NDArray[np.generic]) -> None:
    """Write the gradient of a form into an array, every element.

    Args:
        form: The form; its arrays have the right lengths for the array.
        gradient: An array without gaps, of the gradient's shape and dtype: float32 for a form that is not plain.
    """
    values = form.values
    if form.kind != "plain":
        is_whole = form.rows is None
        values = gradient.reshape(-1) if is_whole else np.empty(form.values.size, np.float32)
        for begin in range(0, values.size, PIECE_COUNT):
            piece = form.values[begin : begin + PIECE_COUNT].view(np.uint16)
            _widen(piece, form.kind, form.factor, values[begin : begin + PIECE_COUNT])  # type: ignore[arg-type]
        if is_whole:
            return
    if form.rows is None:
        gradient.reshape(-1)[:] = values
        return
    gradient[...] = 0
    kept = np.unpackbits(form.rows, count=len(gradient)).view(np.bool_)
    gradient[kept] = values.reshape(-1, *gradient.shape[1:])


def stored_count(rows: NDArray[np.uint8] | None, shape: tuple[int, ...]) -> int:
    """Return how many elements of a gradient are stored."""
    count = int(np.prod(shape, dtype=np.int64))
    if rows is None:
        return count
    return count // shape[0] * int(np.unpackbits(rows, count=shape[0]).sum())


def _without_zero_rows(gradient: NDArray[np.generic]) -> tuple[NDArray[np.uint8] | None, NDArray[np.generic]]:
    """Return the bits of the rows that are not zero, and these rows; None and everything if few rows are zero."""
    if gradient.ndim < 1 or not gradient.size:
        return None, gradient
    # Compared as bits: -0.0 is not zero.
    plain = np.ascontiguousarray(gradient)
    words = plain.reshape(plain.shape[0], -1).view(f"u{min(8, plain.dtype.itemsize)}")
    kept: NDArray[np.bool_] = np.any(words[:, :_FIRST_COUNT], axis=1)
    open_rows = np.flatnonzero(~kept)
    kept[open_rows] = np.any(words[open_rows], axis=1)
    if np.count_nonzero(kept) > (1 - ROWS_MIN) * len(kept):
        return None, plain
    return np.packbits(kept), plain[kept]


def _sample_of(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return elements of large magnitude, finite and not zero. The largest of all is one of them."""
    step = max(1, numbers.size // (64 * SAMPLE_COUNT))
    magnitudes = np.where(np.isfinite(numbers), np.abs(numbers), 0)
    some = numbers[np.append(np.arange(0, numbers.size, step), np.argmax(magnitudes))]
    some = some[np.isfinite(some) & (some != 0)]
    if some.size > SAMPLE_COUNT:
        largest = np.argpartition(np.abs(some), some.size - SAMPLE_COUNT)[-SAMPLE_COUNT:]
        return np.ascontiguousarray(some[largest])
    return np.ascontiguousarray(some)


def _narrowed(numbers: NDArray[np.float32], kind: Kind, factor: np.float32 | None) -> NDArray[np.uint16] | None:
    """Return the numbers of two bytes that give exactly these, or None."""
    if kind == "bf16" and factor is None:
        # Reducing whole words is faster than reading every second half.
        if np.bitwise_or.reduce(numbers.view(np.uint32)) & 0xFFFF:
            return None
        upper: NDArray[np.uint16] = numbers.view(np.uint16)[1::2].copy()
        return upper
    narrow = np.empty(numbers.size, np.uint16)
    for begin in range(0, numbers.size, PIECE_COUNT):
        piece = numbers[begin : begin + PIECE_COUNT]
        with np.errstate(all="ignore"):
            quotients = piece if factor is None else np.divide(piece, factor, dtype=np.float32)
            found = _rounded(quotients, kind)
            again = _widened(found, kind, factor)
        if not np.array_equal(again.view(np.uint32), piece.view(np.uint32)):
            return None
        narrow[begin : begin + PIECE_COUNT] = found
    return narrow


def _rounded(numbers: NDArray[np.float32], kind: Kind) -> NDArray[np.uint16]:
    """Return the bits of the nearest numbers of two bytes.

    Only numbers that such a one times a factor gives are of interest: their quotients are at most two float32 numbers
    from it. So it does not matter how ties are rounded, nor that some kinds of NaN become other ones.
    """
    if kind == "fp16":
        return numbers.astype(np.float16).view(np.uint16)
    narrow: NDArray[np.uint16] = ((numbers.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return narrow


def _widened(
    narrow: NDArray[np.uint16], kind: Kind, factor: np.float32 | NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return numbers of two bytes as float32, times the factor."""
    numbers = np.empty(narrow.shape, np.float32)
    _widen(narrow, kind, factor, numbers)
    return numbers


def _widen(
    narrow: NDArray[np.uint16],
    kind: Kind,
    factor: np.float32 | NDArray[np.float32] | None,
    numbers: NDArray[np.float32],
) -> None:
    """Write numbers of two bytes as float32, times the factor, into an array of their shape."""
    if kind == "fp16":
        numbers[...] = narrow.view(np.float16)
    else:
        words = numbers.view(np.uint32)
        words[...] = narrow
        np.left_shift(words, np.uint32(16), out=words)
    if factor is not None:
        with np.errstate(all="ignore"):
            np.multiply(numbers, factor, out=numbers)


def factors_of(sample: NDArray[np.float32], kind: Kind) -> list[np.float32]:
    """Return the factors by which numbers of two bytes give a whole sample: one of each power of two.

    Args:
        sample: Finite elements that are not zero.
        kind: The numbers.
    """
    if sample.size < 2:
        return []
    # The mantissas of a product do not depend on exponents, so all numbers are taken from [1, 2) or [2, 4).
    first = np.float32(np.frexp(np.abs(sample[0]))[0] * 2)
    bits = _MANTISSA_BITS[kind]
    mantissas = 1 + np.arange(1 << bits, dtype=np.float64) / (1 << bits)
    quotients = np.float64(first) / mantissas
    near = np.where(quotients < 1, 2 * quotients, quotients).astype(np.float32)
    offsets = np.arange(-_ULPS, _ULPS + 1, dtype=np.int32)
    found = (near.view(np.int32)[:, None] + offsets).view(np.float32).reshape(-1)
    candidates = np.unique(found[(found >= 1) & (found < 2)])
    if kind == "fp16":
        # Numbers of few exponents: with the highest one near the end of their range, none loses bits.
        exponent = int(np.frexp(np.abs(sample).max())[1])
        candidates = np.ldexp(candidates, exponent - _FP16_EXPONENT_MAX)
    with np.errstate(all="ignore"):
        narrow = _rounded(sample / candidates[:, None], kind)
        again = _widened(narrow, kind, candidates[:, None])
    is_exact = (again.view(np.uint32) == sample.view(np.uint32)).all(axis=1)
    return list(candidates[is_exact])
