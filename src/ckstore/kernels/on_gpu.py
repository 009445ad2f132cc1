"""The quantizers' loops on torch tensors, on the device where these are: a GPU quantizes before anything is copied.

The names of quant_on_numpy; results are returned, not written. What a reader computes again, ``finish_values``, and
the symbols of ``quantize_values`` and ``bin_values`` are the same bit for bit; sums may differ in their last bits, as a
device adds in an order of its own: they are the encoder's choice, and stored.

Invariants:
- One operation of IEEE 754 binary32 is one operation of torch: nothing is fused, and no tensor core is used.
- Tensors are contiguous and on one device; nothing is copied to the host but what says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ckstore.kernels.quant_on_numpy import ADD, ESCAPE, FLOOR, PLAIN, ROOT, ROW_MAX, ROW_MIN, ZERO, require

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
