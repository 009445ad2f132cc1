"""How one chunk that lies on a device is stored with a loss: ``lossy_forms`` without the chunk's floats on the host.

A device finds the codes and measures what they are off by; the host writes the payload, and decodes from it what is
hashed. What a device decodes too is compared with that, by sums of its words.

Invariants:
- What is committed is what the host decodes; a device that would have decoded other bytes is never believed.
- None says that the host has to look at the chunk: nothing was stored, and nothing was noted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckstore import lossy_directions, lossy_forms, lossy_grids
from ckstore.codec.scratch import Scratch
from ckstore.kernels import on_gpu
from ckstore.kernels.on_gpu import Tensor
from ckstore.kernels.quant_on_numpy import sums_of_words
from ckstore.lossy_grids import GRID, MOMENT1, MOMENT2, Made
from ckstore.quant import on_device
from ckstore.quant.bound import Measured
from ckstore.quant.geometry import ChunkShape, Grid
from ckstore.quant.grid import Steps
from ckstore.quant.lowrank_forms import CHANGE, QUOTIENT, ROOT
from ckstore.quant.on_device import GridOnDevice, OuterOnDevice
from ckstore.quant.settings import FirstMomentSettings, SecondMomentSettings, WeightSettings

_STEPS = {CHANGE: lossy_directions.CHANGE_STEP, QUOTIENT: lossy_directions.QUOTIENT_STEP}
_STEPS[ROOT] = lossy_directions.ROOT_STEP
_NO_BYTES = memoryview(b"")


class DivergedError(Exception):
    """A device has made other bytes than the host; nobody beyond the commit sees it."""


@dataclass(frozen=True, slots=True)
class MadeThere:
    """A chunk that was quantized where it lies.

    Args:
        made: What the host stores of it.
        became: Its reconstruction on the device.
    """

    made: Made
    became: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk on a device, and what is needed to store it.

    Args:
        plain: Its elements.
        shape: What it is of its tensor.
        scratch: Memory of this thread.
        reconstruction: As many bytes of the host, which receive what the payload decodes to.
    """

    plain: Tensor
    shape: ChunkShape
    scratch: Scratch
    reconstruction: memoryview

    @property
    def grid(self) -> Grid:
        """Where it lies in the rows of its tensor."""
        return Grid(self.plain.numel(), self.shape.row_nelements, self.shape.phase)


def encode_weights(place: Place, base: Tensor, base_plain: memoryview, settings: WeightSettings) -> MadeThere | None:
    """Quantize what has changed since the base; None where that cannot be done here, or does not pay.

    Args:
        place: The chunk.
        base: Its base on the device.
        base_plain: The same on the host.
        settings: How.

    Raises:
        DivergedError: The device and the host decode other bytes.
    """
    values, is_finite = on_gpu.float_changes(place.plain, base)
    grid = place.grid
    if not grid.count or not is_finite:
        return None
    if settings.low_rank is not None:
        outer = on_device.make_outer(CHANGE, values, grid, settings.low_rank)
        change = float(values.double().square().sum())
        near = None if outer is None else _product(outer, place, base, base_plain, change)
        if near is not None:
            return near
    found = on_device.make_grid(
        values, grid, Steps(settings.step, settings.dead_zone, settings.levels_max, settings.scale)
    )
    return None if found is None else _symbols(GRID, found, place, base, base_plain)


def encode_second_moment(place: Place, settings: SecondMomentSettings) -> MadeThere | None:
    """Quantize a second moment; None and errors as in ``encode_weights``."""
    values, is_finite = on_gpu.float_values(place.plain)
    grid = place.grid
    if not grid.count or not is_finite:
        return None
    if settings.low_rank is not None:
        outer = on_device.make_outer(ROOT, values, grid, settings.low_rank)
        near = None if outer is None else _product(outer, place, None, _NO_BYTES)
        if near is not None:
            return near
    found = on_device.make_second(values, grid, settings)
    return None if found is None else _symbols(MOMENT2, found, place, None, _NO_BYTES)


def encode_first_moment(
    place: Place,
    second: Tensor,
    second_became: Tensor,
    second_plain: memoryview,
    settings: FirstMomentSettings,
) -> MadeThere | None:
    """Quantize a first moment over the root of the second; None and errors as in ``encode_weights``.

    Args:
        place: The chunk.
        second: The second moment of the same elements, as it was given.
        second_became: The same, as it is stored.
        second_plain: What it is stored as, on the host.
        settings: How.
    """
    values, is_right = on_gpu.float_quotients(place.plain, second, settings.clip)
    grid = place.grid
    if not grid.count or not is_right:
        return None
    if settings.form == "dropped":
        return _zeros(place)
    # As on the host: where the second moment is zero, no direction is kept.
    values = values.masked_fill(second == 0, 0)
    if settings.low_rank is not None:
        outer = on_device.make_outer(QUOTIENT, values, grid, settings.low_rank, limit=settings.clip)
        near = None if outer is None else _product(outer, place, second_became, second_plain)
        if near is not None:
            return near
    found = on_device.make_first(values, grid, settings)
    return None if found is None else _symbols(MOMENT1, found, place, second_became, second_plain)


def turns_negative(plain: Tensor, became: Tensor) -> bool:
    """Whether something that is nowhere negative would be."""
    return not bool((plain < 0).any()) and bool((became < 0).any())


def rounding_of(rounded: Tensor, plain: Tensor) -> str | None:
    """Return ``"bfloat16"`` or ``"float16"`` if bytes are, bit by bit, fp32 elements rounded to these; else None."""
    for name in ("bfloat16", "float16"):
        words = on_gpu.words_of(plain.to(on_gpu.DTYPES[name]))
        if words.equal(on_gpu.words_of(on_gpu.elements_of(rounded, name))):
            return name
    return None


def measured(plain: Tensor, became: Tensor, reconstruction: memoryview) -> Measured:
    """Return what a reconstruction is off by.

    Raises:
        DivergedError: That of the device is not that of the host.
    """
    if on_gpu.sums_of_words(became) != sums_of_words(reconstruction, plain.dtype.itemsize):
        raise DivergedError
    max_abs, sum_sq_error, sum_sq_value = on_gpu.to_host(on_gpu.measure_values(plain, became)).tolist()
    is_same = not max_abs and on_gpu.words_of(plain).equal(on_gpu.words_of(became))
    return Measured(max_abs, sum_sq_error, sum_sq_value, is_same)


def _product(
    outer: OuterOnDevice, place: Place, base: Tensor | None, base_plain: memoryview, change: float | None = None
) -> MadeThere | None:
    became, u_max = on_device.rebuilt_outer(outer, base, place.plain)

    def measure(greatest: float) -> Measured:
        if greatest != u_max:
            raise DivergedError
        return measured(place.plain, became, place.reconstruction)

    found = lossy_directions.finished(
        *(_STEPS[outer.form], outer.made, change, base_plain, place.shape),
        reconstruction=place.reconstruction,
        measure=measure,
    )
    return None if found is None else MadeThere(Made(found[0], place.reconstruction, found[1]), became)


def _symbols(
    step: int, found: GridOnDevice, place: Place, base: Tensor | None, base_plain: memoryview
) -> MadeThere | None:
    plain, grid = place.plain, place.grid
    if not lossy_grids.escapes_pay(found.made, grid):
        return None
    np.frombuffer(place.scratch.planes(grid.count), np.uint8)[:] = found.symbols
    words = b""
    if found.made.escapes.size:
        words = on_gpu.to_host(on_gpu.words_of(plain)[on_gpu.put(found.made.escapes, plain)]).tobytes()
    became = on_device.rebuilt_grid(found, grid, plain, base, is_second=step != GRID)
    made = lossy_grids.finished(
        *(step, found.made, words, base_plain, place.shape, grid),
        scratch=place.scratch,
        reconstruction=place.reconstruction,
        measure=lambda: measured(plain, became, place.reconstruction),
    )
    return None if made is None else MadeThere(made, became)


def _zeros(place: Place) -> MadeThere | None:
    became = place.plain.new_zeros(place.plain.shape)
    np.frombuffer(place.reconstruction, np.uint8).fill(0)
    off = measured(place.plain, became, place.reconstruction)
    if not off.is_told:
        return None
    made = lossy_forms.dropped(off, place.shape, place.grid, place.scratch, place.reconstruction)
    return MadeThere(made, became)
