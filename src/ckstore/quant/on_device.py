"""Chunks quantized on the device where their tensors lie: numbers of a product or symbols of a grid come to the host.

The twins of ``lowrank_forms``, ``grid``, ``moments`` and ``second``, with ``kernels.on_gpu`` for their loops. They make
what these make: an ``Approximated`` with its payload, or a ``Quantized`` with its symbols, for the host to code.

Invariants:
- ``rebuilt_outer`` and ``rebuilt_grid`` return, on the device, the very bytes that the host decodes from it.
- Of a chunk's elements nothing is copied to the host but one byte each, or the narrow sides of a product; sums of rows
  and columns, and single numbers, come too.
- Sums and directions may differ from the host's in their last bits: they are the encoder's choice, and stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.kernels import directions_on_gpu, on_gpu
from ckstore.kernels.on_gpu import Tensor
from ckstore.quant import contexts, factors, lowrank, lowrank_forms
from ckstore.quant.codebook import conditional_means
from ckstore.quant.factors import FACTOR_MAX
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import NO_ESCAPES, ZERO, Quantized, Steps, Sums, choose_contexts, inverses_of, scales_of
from ckstore.quant.lowrank_forms import CHANGE, QUOTIENT, ROOT, Approximated
from ckstore.quant.moments import levels_of_first, ternary_bounds
from ckstore.quant.second import MOMENT_MIN, has_factors, log_bounds, scales_of_second
from ckstore.quant.settings import FirstMomentSettings, LowRank, SecondMomentSettings

Bytes = NDArray[np.uint8]

_RULES = {CHANGE: 0, QUOTIENT: 1, ROOT: 2}
_ADD, _FLOOR, _ROOT, _PLAIN = 0, 1, 2, 3
# Sums of squares in fp32 are not nearer than this.
_SLACK = 1.001


@dataclass(frozen=True, slots=True)
class OuterOnDevice:
    """A chunk as a product.

    Args:
        made: What the host stores of it.
        whole: The integers of the product, on the device.
        form: What it is a product for.
    """

    made: Approximated
    whole: Tensor
    form: str


@dataclass(frozen=True, slots=True)
class GridOnDevice:
    """A chunk as symbols.

    Args:
        made: What they mean; it is on the host.
        symbols: One for each element, on the host.
        there: The same on the device.
    """

    made: Quantized
    symbols: Bytes
    there: Tensor


def make_outer(form: str, values: Tensor, grid: Grid, settings: LowRank, *, limit: float = 0.0) -> OuterOnDevice | None:
    """Approximate changes, quotients or second moments by few directions; None where these do not come near enough.

    Args:
        form: ``lowrank_forms.CHANGE``, ``QUOTIENT`` or ``ROOT``.
        values: Finite fp32 values of the chunk, contiguous; they are left as they are.
        grid: Where it lies.
        settings: How near.
        limit: Greatest quotient.
    """
    if form != ROOT:
        matrix = on_gpu.rows_of(values, grid.row, grid.phase)
        found = _fitted(matrix, grid, settings, is_relative=form == CHANGE)
        if found is None:
            return None
        product, whole = found
        made = lowrank_forms.approximated(product, None, grid, limit=limit if form == QUOTIENT else None)
        return OuterOnDevice(made, whole, form)
    if not grid.count or not 0 <= float(values.min()) <= float(values.max()) < FACTOR_MAX:
        return None
    roots = on_gpu.roots_of(values)
    rows, cols = (on_gpu.to_host(each) for each in on_gpu.sums_of_values(roots, grid.row, grid.phase, False))
    sides = lowrank_forms.sides_of(rows, cols, grid)
    above, beside = (on_gpu.put(lowrank_forms.inverse_of(side), values) for side in sides)
    matrix = on_gpu.rows_of(roots, grid.row, grid.phase) * above[:, None] * beside - 1.0
    # What the chunk does not have of its rows is no error to be told.
    matrix = on_gpu.rows_of(matrix.reshape(-1)[grid.phase : grid.phase + grid.count], grid.row, grid.phase)
    found = _fitted(matrix, grid, settings, is_relative=False)
    if found is None:
        return None
    product, whole = found
    return OuterOnDevice(lowrank_forms.approximated(product, None, grid, factors=sides), whole, form)


def rebuilt_outer(outer: OuterOnDevice, base: Tensor | None, like: Tensor) -> tuple[Tensor, float]:
    """Return the elements on the device, and the greatest quotient, of first moments.

    Args:
        outer: What was made of the chunk.
        base: What decoding will be given: the base of a weight, the second moments of first ones, None of second ones.
        like: A tensor of the dtype of the elements.
    """
    made, grid = outer.made, outer.made.grid
    rows, cols = (on_gpu.put(side.values(), like) for side in made.factors) if made.factors else (None, None)
    how = (grid.row, grid.phase, like.dtype, _RULES[outer.form], float(made.product.scale), made.limit)
    elements, greatest = on_gpu.finish_outer(outer.whole, rows, cols, base, grid.count, *how)
    return elements, float(greatest)


def make_grid(values: Tensor, grid: Grid, steps: Steps) -> GridOnDevice | None:
    """Quantize fp32 values in uniform steps; None where there is nothing to quantize, or it cannot be scaled."""
    sums = _squares(values, grid)
    scales = scales_of(sums, grid, steps.unit)
    if not 0.0 < sums.total < np.inf or not scales.max() < FACTOR_MAX:
        return None
    is_by_row = steps.unit == "row"
    rows = factors.factors_of(scales) if is_by_row else factors.ones(grid.row_count)
    if is_by_row:
        scales = rows.values().astype(np.float64)
    inverses, units = inverses_of(steps.step * scales), inverses_of(rows.values().astype(np.float64))
    levels = on_gpu.levels_of(
        *(values, on_gpu.put(inverses, values), on_gpu.put(units, values), grid.row, grid.phase),
        *(1.0 - steps.dead_zone, steps.levels_max),
    )
    totals = on_gpu.to_host(levels.totals)
    table = conditional_means(totals, zero=ZERO)
    table[0] = 0.0
    counts = totals[:256].copy()
    counts[ZERO] += counts[0]
    counts[0] = 0
    symbols = on_gpu.to_host(levels.symbols)
    found = choose_contexts(symbols.data, sums, grid, is_by_row=is_by_row)
    escapes = on_gpu.to_host(levels.escapes)
    made = Quantized(rows, factors.ones(grid.row), table, counts, found, escapes, sums.total, ZERO)
    return GridOnDevice(made, symbols, levels.symbols)


def make_first(values: Tensor, grid: Grid, settings: FirstMomentSettings) -> GridOnDevice | None:
    """Quantize fp32 quotients of moments; None where there is nothing to quantize."""
    if settings.form != "ternary":
        return make_grid(values, grid, Steps(settings.step, settings.dead_zone, levels_of_first(settings), "one"))
    sums = _squares(values, grid)
    if not 0.0 < sums.total < np.inf:
        return None
    rows, cols = factors.ones(grid.row_count), factors.ones(grid.row)
    edges = on_gpu.put(rows.values(), values), on_gpu.put(cols.values(), values)
    bounds = on_gpu.put(ternary_bounds(settings), values)
    there = on_gpu.bin_values(values, *edges, bounds, grid.row, grid.phase) + (ZERO - 1)
    totals = on_gpu.to_host(on_gpu.sums_of_levels(values, there, *edges, grid.row, grid.phase))
    symbols = on_gpu.to_host(there)
    found = choose_contexts(symbols.data, sums, grid, is_by_row=False)
    table = conditional_means(totals, zero=ZERO)
    made = Quantized(rows, cols, table, totals[:256].copy(), found, NO_ESCAPES, sums.total, ZERO)
    return GridOnDevice(made, symbols, there)


def make_second(values: Tensor, grid: Grid, settings: SecondMomentSettings) -> GridOnDevice | None:
    """Quantize fp32 second moments by factors and a grid of logarithms; None where they cannot be."""
    if not grid.count or float(values.min()) < 0 or not MOMENT_MIN < float(values.max()) < FACTOR_MAX:
        return None
    sums = [on_gpu.to_host(each) for each in on_gpu.sums_of_values(values, grid.row, grid.phase, False)]
    rows, cols = scales_of_second(sums[0], sums[1], grid)
    if settings.form == "rank1" and has_factors(grid):
        table, counts = np.zeros(256, np.float32), np.zeros(256)
        table[ZERO], counts[ZERO] = 1.0, grid.count
        there = on_gpu.put(np.full(grid.count, ZERO, np.uint8), values)
    else:
        levels, bounds = log_bounds(settings.log_step)
        above, beside = (on_gpu.put(lowrank_forms.inverse_of(side), values) for side in (rows, cols))
        binned = on_gpu.bin_values(values, above, beside, on_gpu.put(bounds, values), grid.row, grid.phase)
        there = binned + (ZERO - levels)
        totals = on_gpu.to_host(on_gpu.sums_of_levels(values, there, above, beside, grid.row, grid.phase))
        table, counts = conditional_means(totals, zero=None), totals[:256]
    floor = float(values[values > 0].min())
    no_classes = contexts.one_stream(np.zeros(grid.row_count, np.uint8), np.zeros(grid.row, np.uint8))
    made = Quantized(rows, cols, table, counts, no_classes, NO_ESCAPES, 0.0, None, floor)
    return GridOnDevice(made, on_gpu.to_host(there), there)


def rebuilt_grid(found: GridOnDevice, grid: Grid, plain: Tensor, base: Tensor | None, *, is_second: bool) -> Tensor:
    """Return the elements on the device; escapes are those of the chunk.

    Args:
        found: What was made of it.
        grid: Where it lies.
        plain: Its own elements.
        base: The base of a weight, or the second moments that quotients are told in; None of second moments.
        is_second: Whether these are second moments, or the base of first ones.
    """
    made = found.made
    rule = _FLOOR if base is None and is_second else _PLAIN if base is None else _ROOT if is_second else _ADD
    rows, cols, table = (on_gpu.put(each, plain) for each in (made.rows.values(), made.cols.values(), made.table))
    how = (grid.row, grid.phase, plain.dtype, rule, made.floor)
    elements = on_gpu.finish_values(found.there, rows, cols, table, base, *how)
    if made.escapes.size:
        places = on_gpu.put(made.escapes, plain)
        elements[places] = plain.reshape(-1)[places]
    return elements


def _fitted(
    matrix: Tensor, grid: Grid, settings: LowRank, *, is_relative: bool
) -> tuple[lowrank.Product, Tensor] | None:
    """Return a product that comes near enough, and its integers on the device."""
    rows, cols = matrix.shape
    energy = float(matrix.double().square().sum())
    mean = energy / max(1, grid.count)
    if not lowrank_forms.can_be_squared(mean, (rows, cols)):
        is_zero = not mean and not bool(matrix.any())
        return (lowrank.nothing(rows, cols), matrix.float().clone()) if is_zero else None
    step = settings.step * (math.sqrt(mean) if is_relative else 1.0)
    count = lowrank.count_max(rows, cols, settings.rank_max)
    signs = on_gpu.put(lowrank.random_signs(count, min(rows, cols)), matrix)
    found = directions_on_gpu.directions(matrix, signs, count, lowrank.least_square(rows, cols, step))
    if found is None:
        return None
    left, sizes, right = found
    # What directions leave over, their roundings do not take away: then the narrow sides need not come to the host.
    if energy - float(sizes.square().sum()) > _SLACK * settings.error_max * energy:
        return None
    product = lowrank.product_of(on_gpu.to_host(left), on_gpu.to_host(sizes), on_gpu.to_host(right), step)
    if product is None:
        return None
    whole = on_gpu.multiply_integers(
        *(on_gpu.put(each, matrix) for each in (product.left, product.right, product.shifts))
    )
    error = float((whole * float(product.scale) - matrix).double().square().sum())
    return (product, whole) if error <= settings.error_max * energy else None


def _squares(values: Tensor, grid: Grid) -> Sums:
    rows, cols = (on_gpu.to_host(each) for each in on_gpu.sums_of_values(values, grid.row, grid.phase, True))
    return Sums(rows, cols, float(rows.sum()))
