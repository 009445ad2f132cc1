"""The quantizers' loops on torch tensors, on the device where these are: a GPU quantizes before anything is copied.

The names of quant_on_numpy and outer_on_numpy; results are returned, not written. What a reader computes again
(``finish_values``, ``multiply_integers``, ``finish_outer``) and the symbols of ``quantize_values`` and ``bin_values``
are the same bit for bit; sums and directions may differ in their last bits, as a device adds in an order of its own:
they are the encoder's choice, and stored.

Invariants:
- One operation of IEEE 754 binary32 is one operation of torch: nothing is fused. Products that must be exact are of
  integers in fp64, which no setting of torch rounds to fewer bits.
- Tensors are contiguous and on one device; nothing is copied to the host but what says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor as Tensor

from ckstore.kernels import outer_on_numpy
from ckstore.kernels.quant_on_numpy import ADD, ESCAPE, FLOOR, PLAIN, ROOT, ROW_MAX, ROW_MIN, ZERO, require

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {str(each).removeprefix("torch."): each for each in (*_FLOATS, torch.float64)}
"""By the names that settings and trees have for them."""

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Levels:
    """Symbols of a chunk on a device, and what its encoder needs to know of them.

    Args:
        symbols: uint8, 128 for zero.
        escapes: Elements beyond the last level, in rising order; their symbol is that of zero.
        totals: 256 counts and 256 sums of the values, fp64.
    """

    symbols: Tensor
    escapes: Tensor
    totals: Tensor


def float_values(source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements as fp32, and whether all are finite, both on the device."""
    values = _floats(source)
    return values, torch.isfinite(values).all()


def float_changes(source: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements less those of the base, and whether all of the three are finite."""
    require(source.shape == base.shape, "lengths differ")
    changes = _floats(source) - _floats(base)
    # What is not finite leaves a change that is not finite.
    return changes, torch.isfinite(changes).all()


def float_quotients(first: Tensor, second: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the first moments over the roots of the second, within ``clip``, and whether all of them are moments."""
    require(first.shape == second.shape, "lengths differ")
    require(clip > 0, "clip must be above 0")
    m, v = _floats(first), _floats(second)
    is_right = (torch.isfinite(m) & torch.isfinite(v) & (v >= 0)).all()
    quotients = (m / _root(v.abs())).clamp(-_single(clip), _single(clip))
    return torch.where(m == 0, torch.zeros_like(m), quotients), is_right


def sums_of_values(values: Tensor, row: int, phase: int, squared: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of each row and of each column, or of their squares, as fp64."""
    matrix = _matrix(values, row, phase).double()
    terms = matrix * matrix if squared else matrix
    return terms.sum(dim=1), terms.sum(dim=0)


def quantize_values(values: Tensor, inverses: Tensor, row: int, phase: int, bias: float, level_max: int) -> Tensor:
    """Return 128 plus or minus the level of each value, or 0, the escape, as ``quant_on_numpy`` does."""
    require(1 <= level_max <= ZERO - 1 and -128 < bias < 1, "level_max or bias is no number of levels")
    matrix = _matrix(values, row, phase)
    require(inverses.shape == matrix.shape[:1], "lengths differ")
    levels = matrix.abs() * inverses[:, None]
    levels = levels + _single(bias)
    is_inside = levels < _single(level_max + 1)
    whole = torch.where(is_inside & (levels >= 0), levels, torch.zeros_like(levels)).to(torch.int16)
    codes = torch.where(is_inside, ZERO + torch.where(matrix < 0, -whole, whole), ESCAPE)
    return _flat(codes.to(torch.uint8), values.numel(), phase)


def bin_values(values: Tensor, rows: Tensor, cols: Tensor, bounds: Tensor, row: int, phase: int) -> Tensor:
    """Return how many of the ascending bounds are at most each value times the factors of its row and its column."""
    matrix = (_matrix(values, row, phase) * rows[:, None]) * cols[None]
    return _flat(torch.bucketize(matrix, bounds, right=True).to(torch.uint8), values.numel(), phase)


def sums_of_levels(values: Tensor, symbols: Tensor, rows: Tensor, cols: Tensor, row: int, phase: int) -> Tensor:
    """Return for each of 256 symbols how often it occurs, then the sum of its values times their factors: 512 fp64."""
    scaled = _flat((_matrix(values, row, phase) * rows[:, None]) * cols[None], values.numel(), phase)
    places = symbols.long()
    counts = torch.bincount(places, minlength=256).double()
    sums = torch.zeros(256, dtype=torch.float64, device=values.device)
    return torch.cat([counts, sums.index_add_(0, places, scaled.double())])


def finish_values(
    symbols: Tensor,
    rows: Tensor,
    cols: Tensor,
    codebook: Tensor,
    base: Tensor | None,
    row: int,
    phase: int,
    dtype: torch.dtype,
    rule: int,
    floor: float,
) -> Tensor:
    """Return the elements that symbols stand for, as ``quant_on_numpy`` does; the base has as many, or is None."""
    require(rule in (ADD, FLOOR, ROOT, PLAIN), "rule must be a number from 0 to 3")
    require(dtype in _FLOATS, "elements are fp32, bf16 or fp16")
    require((base is not None) == (rule in (ADD, ROOT)), "length of the base is another one")
    codes = _matrix(symbols, row, phase)
    factors = rows[:, None] * cols[None]
    values = factors * codebook[codes.int()]
    if rule == FLOOR:
        values = torch.where(values < _single(floor), _single(floor), values)
        values = torch.where((rows == 0)[:, None] | (cols == 0)[None], 0.0, values)
    flat = _flat(values, symbols.numel(), phase)
    if base is not None:
        require(base.numel() == symbols.numel(), "length of the base is another one")
        other = _floats(base).reshape(-1)
        flat = other + flat if rule == ADD else flat * _root(other)
    return flat.to(dtype)


def levels_of(values: Tensor, inverses: Tensor, units: Tensor, row: int, phase: int, bias: float, most: int) -> Levels:
    """Return the symbols of a chunk, its escapes taken out, and what its codebook is made from.

    Args:
        values: Changes or quotients, fp32.
        inverses: One over each row's step.
        units: One over each row's factor.
        row: Elements of a row.
        phase: Where in its row the first element lies.
        bias: One less the dead zone.
        most: Levels on either side of zero.
    """
    symbols = quantize_values(values, inverses, row, phase, bias, most)
    totals = sums_of_levels(values, symbols, units, torch.ones(row, device=values.device), row, phase)
    escapes = torch.nonzero(symbols == ESCAPE).reshape(-1)
    symbols[escapes] = ZERO
    return Levels(symbols, escapes, totals)


# Products of narrow matrices


def multiply_integers(left: Tensor, right: Tensor, shifts: Tensor) -> Tensor:
    """Return the sum of the products of left columns and right rows, each times a power of two; sums are below 2**53.

    Args:
        left: int16, one column for each direction.
        right: int16, one row for each direction.
        shifts: uint8, the powers.

    Returns:
        fp32, the exact sums rounded once.
    """
    require(left.shape[1] == right.shape[0] == shifts.numel(), "lengths differ")
    # Powers of two are made of integers: a device's power function may be off in its last bit.
    powers = torch.bitwise_left_shift(torch.ones_like(shifts, dtype=torch.int64), shifts.long())
    doubles = right.double() * powers.double()[:, None]
    # A sum of nothing but zeros of either sign is +0, in whatever order it was taken.
    return (left.double() @ doubles + 0.0).float()


def finish_outer(
    product: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    base: Tensor | None,
    count: int,
    row: int,
    phase: int,
    dtype: torch.dtype,
    rule: int,
    scale: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Return the elements that a product stands for, and the greatest magnitude by rule 1, as ``outer_on_numpy`` does.

    Args:
        product: fp32, the rows that the chunk touches.
        rows: Factors of rows, by rule 2; else None.
        cols: Factors of columns, by rule 2; else None.
        base: As many elements as the chunk has; None by rule 2.
        count: Elements of the chunk.
        row: Elements of a row.
        phase: Where in its row the first element lies.
        dtype: Of the elements.
        rule: ``outer_on_numpy``'s ADD, ROOT or SQUARE.
        scale: What 1 in the product stands for.
        limit: Greatest magnitude, by rule 1.
    """
    require(rule in (outer_on_numpy.ADD, outer_on_numpy.ROOT, outer_on_numpy.SQUARE), "rule must be 0, 1 or 2")
    require(dtype in _FLOATS, "elements are fp32, bf16 or fp16")
    require(ROW_MIN <= row <= ROW_MAX and 0 <= phase < row, "row or phase is no length of a row")
    require(product.numel() == -(-(phase + count) // row) * row * (count > 0), "lengths differ")
    is_square = rule == outer_on_numpy.SQUARE
    given = (base is None, rows is not None, cols is not None)
    require(given == (is_square,) * 3, "a rule lacks what it takes")
    p = product.reshape(-1, row) * _single(scale)
    if rows is not None and cols is not None:
        roots = (p + 1.0).clamp(min=1 / 16) * (rows[:, None] * cols[None])
        p = (roots * roots).clamp(min=2.0**-126)
        p = torch.where((rows == 0)[:, None] | (cols == 0)[None], 0.0, p)
    flat = p.reshape(-1)[phase : phase + count]
    greatest = torch.zeros((), device=product.device)
    if base is not None:
        require(base.numel() == count, "length of the base is another one")
        other = _floats(base).reshape(-1)
        if rule == outer_on_numpy.ADD:
            flat = other + flat
        else:
            flat = flat.clamp(-_single(limit), _single(limit))
            greatest = flat.abs().max() if count else greatest
            flat = flat * _root(other)
    return flat.to(dtype), greatest


def measure_values(source: Tensor, made: Tensor) -> Tensor:
    """Return the greatest difference, and the sums of squared differences and of squared values, as three fp64."""
    require(source.shape == made.shape, "lengths differ")
    one, other = _floats(source).double(), _floats(made).double()
    off = one - other
    greatest = off.abs().max() if off.numel() else torch.zeros((), dtype=torch.float64, device=off.device)
    return torch.stack([greatest, off.square().sum(), one.square().sum()])


def sums_of_words(elements: Tensor) -> tuple[int, int]:
    """Return the sum of the words and that of each times its place, modulo 2**64, as ``quant_on_numpy`` does."""
    words = words_of(elements).long()
    places = torch.arange(1, words.numel() + 1, device=words.device)
    total, weighted = torch.stack([words.sum(), (words * places).sum()]).tolist()
    return int(total) % _MODULUS, int(weighted) % _MODULUS


def sum_of_squares(one: Tensor, other: Tensor, where: Tensor) -> float:
    """Return the sum of the squared differences of some elements."""
    off = _floats(one)[where].double() - _floats(other)[where].double()
    return float(off.square().sum())


def roots_of(values: Tensor) -> Tensor:
    """Return square roots of fp32 values, correctly rounded."""
    return _root(values)


def rows_of(values: Tensor, row: int, phase: int) -> Tensor:
    """Return the rows that a chunk touches; what it does not have of them is zero."""
    return _matrix(values, row, phase)


def elements_of(content: Tensor, dtype: str) -> Tensor:
    """Return bytes as elements of a dtype of ``DTYPES``; a view where they lie evenly."""
    kind = DTYPES[dtype]
    is_even = content.storage_offset() % kind.itemsize == 0
    return (content if is_even else content.clone()).view(kind)


def words_of(elements: Tensor) -> Tensor:
    """Return the words of elements of two or four bytes, as integers that share their memory."""
    return elements.reshape(-1).view(torch.int32 if elements.dtype.itemsize == 4 else torch.int16)


def are_moments(second: Tensor, first: Tensor) -> bool:
    """Whether all elements are finite, and none of the second moments is negative."""
    return bool((torch.isfinite(second) & (second >= 0) & torch.isfinite(first)).all())


def raised(values: Tensor, made: Tensor, least: float) -> Tensor | None:
    """Return where values below ``least``, but for zeros, became more than four times what they are; None: nowhere."""
    own = _floats(values)
    found = (own > 0) & (own < least) & (_floats(made) > 4 * own)
    return found if bool(found.any()) else None


def untold(second: Tensor, where: Tensor | None) -> Tensor | None:
    """Return where first moments cannot be told: where the second one was raised, or is zero; None: nowhere."""
    found = second == 0 if where is None else (second == 0) | where
    return found if bool(found.any()) else None


def all_finite(elements: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return bool(torch.isfinite(elements).all())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Compute as it is written here, whatever the caller's thread has set up for its training."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def has_doubles(tensor: Tensor) -> bool:
    """Whether the device of a tensor can compute what must be exact."""
    return tensor.device.type != "mps"


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Return a copy on the host; whatever quantizing brings there, but for single numbers, comes through here."""
    found: NDArray[Any] = tensor.contiguous().cpu().numpy()
    return found


def uploaded(plain: memoryview, beside: Tensor) -> Tensor:
    """Return the elements of a chunk of the host on the device of a tensor, and of its dtype."""
    return put(np.frombuffer(plain, np.uint8), beside).view(beside.dtype)


def put(array: NDArray[Any], beside: Tensor) -> Tensor:
    """Return a copy of an array of the host on the device of a tensor."""
    return torch.from_numpy(np.array(array)).to(beside.device)


def _floats(elements: Tensor) -> Tensor:
    require(elements.dtype in _FLOATS, "elements are fp32, bf16 or fp16")
    return elements.to(torch.float32)


def _root(values: Tensor) -> Tensor:
    """Return square roots, correctly rounded, which those of torch in fp32 are not everywhere.

    A root of a number of 24 bits is never so near to the middle of two of them that an error in the last bit of fp64
    matters.
    """
    return values.double().sqrt().float()


def _single(number: float) -> float:
    """Return the fp32 number that this is, so that comparing with it is exact."""
    return float(torch.tensor(number, dtype=torch.float32))


def _matrix(flat: Tensor, row: int, phase: int) -> Tensor:
    """Return the rows that a chunk touches; what it does not have of them is zero."""
    require(ROW_MIN <= row <= ROW_MAX and 0 <= phase < row, "row or phase is no length of a row")
    flat = flat.reshape(-1)
    behind = -(phase + flat.numel()) % row if flat.numel() else 0
    if (phase and flat.numel()) or behind:
        flat = torch.nn.functional.pad(flat, (phase, behind))
    return flat.reshape(-1, row)


def _flat(matrix: Tensor, count: int, phase: int) -> Tensor:
    return matrix.reshape(-1)[phase : phase + count] if count else matrix.reshape(-1)
