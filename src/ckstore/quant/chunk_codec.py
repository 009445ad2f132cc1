"""How one chunk can be stored with a loss: as codes, most of them against a base; FORMAT.md has the bytes.

What is committed is the reconstruction: it is made here, hashed by the caller, and exactly what the codes decode to.
Steps stand alone in a frame: those of ``lossy_grids``, and before these, where the settings ask for it, those of
``lossy_directions``, which tries to do with a few outer products.

Invariants:
- What is encoded decodes to the reconstruction, bit for bit, on every machine, and is smaller than the plain bytes.
- Elements that are not finite are never quantized: the chunk is left to be stored exactly.
- The destination is written only when the whole payload has been read and found right.

What was done to a chunk, in a word and in numbers: as it came out, not as it was asked for.

A chunk that few directions do not describe falls back to a grid, factors of too few rows to logarithms, and some
chunks of a tensor may be exact. Of a tensor whose chunks differ, every word is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

import numpy as np

from ckstore.codec import chunk_codec as chain
from ckstore.codec import kernels
from ckstore.codec.base import CodecStep
from ckstore.codec.byte_codecs import Scratch, quantizing_nbytes
from ckstore.codec.chunk_codec import QUANTIZED_STEPS
from ckstore.config import FirstMomentSettings, SecondMomentSettings, WeightSettings
from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.quant import grid_chunks, lowrank_chunks
from ckstore.quant.error_stats import Errors, measure
from ckstore.quant.geometry import WIDTHS, ChunkShape, FloatName, Grid
from ckstore.quant.grid import Quantized, Steps, has_factors, quantize_first, quantize_grid, quantize_second
from ckstore.quant.grid_chunks import CODEBOOK, GRID, MOMENT1, MOMENT2, Made
from ckstore.quant.payload import read_codes

__all__ = [
    "CODEBOOK",
    "GRID",
    "MOMENT1",
    "MOMENT2",
    "STEPS_WITH_BASE",
    "ChunkShape",
    "Errors",
    "FloatName",
    "Made",
    "base_nbytes_of",
    "decode",
    "encode_first_moment",
    "encode_second_moment",
    "encode_weights",
    "quantizing_nbytes",
]

Settings = WeightSettings | FirstMomentSettings | SecondMomentSettings

STEPS_WITH_BASE = (GRID, MOMENT1, *lowrank_chunks.WITH_BASE)
_NO_BYTES = memoryview(b"")


def encode_weights(
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    settings: WeightSettings,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> Made | None:
    """Quantize what has changed since the base; None where that cannot be done or does not pay.

    Args:
        plain: The bytes of the chunk.
        base: As many bytes: what the same weights were in the checkpoint before, as it is stored.
        shape: What the chunk is of its tensor.
        settings: How.
        scratch: Memory of this thread.
        reconstruction: As many bytes, which receive what the codes decode to.

    Raises:
        UsageError: Lengths differ, are no elements, or are more than the scratch is made for.
    """
    grid = _grid_of(shape, scratch, plain, base, reconstruction)
    values, symbols = _buffers(grid, scratch)
    if not grid.count or not kernels.float_changes(plain, base, values, shape.kind):
        return None
    if settings.low_rank is not None:
        where = plain, base, shape, grid
        near = lowrank_chunks.encode(
            lowrank_chunks.CHANGE_STEP, values, *where, settings.low_rank, reconstruction=reconstruction
        )
        if near is not None:
            return Made(near[0], reconstruction, near[1])
    steps = Steps(settings.step, settings.dead_zone, settings.levels_max, settings.scale)
    found = quantize_grid(values, symbols, grid, steps)
    return _made(GRID, found, plain, base, shape, grid, scratch, reconstruction)


def encode_second_moment(
    plain: memoryview,
    shape: ChunkShape,
    settings: SecondMomentSettings,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> Made | None:
    """Quantize a second moment; None where that cannot be done or does not pay. See ``encode_weights``."""
    grid = _grid_of(shape, scratch, plain, reconstruction)
    values, symbols = _buffers(grid, scratch)
    if not grid.count or not kernels.float_values(plain, values, shape.kind):
        return None
    if settings.low_rank is not None:
        where = plain, _NO_BYTES, shape, grid
        near = lowrank_chunks.encode(
            lowrank_chunks.ROOT_STEP, values, *where, settings.low_rank, reconstruction=reconstruction
        )
        if near is not None:
            return Made(near[0], reconstruction, near[1])
        kernels.float_values(plain, values, shape.kind)
    found = quantize_second(values, symbols, grid, settings)
    return _made(MOMENT2, found, plain, _NO_BYTES, shape, grid, scratch, reconstruction)


def encode_first_moment(
    plain: memoryview,
    second_plain: memoryview,
    second_reconstruction: memoryview,
    shape: ChunkShape,
    settings: FirstMomentSettings,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> Made | None:
    """Quantize a first moment over the root of the second; None where that cannot be done or does not pay.

    The frame's base is the chunk of ``second_reconstruction``; but a moment that is dropped is stored as zeros, without
    base and without a lossy step.

    Args:
        plain: The bytes of the chunk.
        second_plain: As many bytes: the second moment of the same elements, as it was given.
        second_reconstruction: The same, as it is stored.
        shape: What the chunk is of its tensor, and those of the second moment of theirs.
        settings: How.
        scratch: Memory of this thread.
        reconstruction: As many bytes, which receive what the codes decode to.

    Raises:
        UsageError: Lengths differ, are no elements, or are more than the scratch is made for.
    """
    grid = _grid_of(shape, scratch, plain, second_plain, second_reconstruction, reconstruction)
    values, symbols = _buffers(grid, scratch)
    if not grid.count or not kernels.float_quotients(plain, second_plain, values, shape.kind, settings.clip):
        return None
    if settings.form == "dropped":
        return _zeros(plain, shape, grid, scratch, reconstruction)
    _clear_without_direction(values, second_plain, shape)
    if settings.low_rank is not None:
        where = plain, second_reconstruction, shape, grid
        near = lowrank_chunks.encode(
            *(lowrank_chunks.QUOTIENT_STEP, values, *where, settings.low_rank),
            limit=settings.clip,
            reconstruction=reconstruction,
        )
        if near is not None:
            return Made(near[0], reconstruction, near[1])
    found = quantize_first(values, symbols, grid, settings)
    return _made(MOMENT1, found, plain, second_reconstruction, shape, grid, scratch, reconstruction)


def base_nbytes_of(steps: Sequence[CodecStep], plain_nbytes: int) -> int:
    """Return how many bytes of a base a chunk with a lossy step needs; 0: it has none.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    codec_id, _ = _only_step(steps)
    return plain_nbytes if codec_id in STEPS_WITH_BASE else 0


def decode(
    payload: memoryview,
    steps: Sequence[CodecStep],
    *,
    width: int,
    destination: memoryview,
    scratch: Scratch,
    base: memoryview | None = None,
) -> None:
    """Write exactly the reconstruction of one chunk; the base may be the very memory of the destination.

    Raises:
        CorruptError: The payload does not decode to that many bytes, or the base has another length.
        UnsupportedError: A newer version made the frame.
    """
    codec_id, kind = _only_step(steps)
    if width != WIDTHS[kind] or not destination.nbytes or destination.nbytes % width:
        raise MalformedError(f"{destination.nbytes} bytes of width {width} are no floats of {WIDTHS[kind]} bytes")
    base = _NO_BYTES if base is None else base
    if base.nbytes != base_nbytes_of(steps, destination.nbytes):
        raise MalformedError(f"the base of a chunk of {destination.nbytes} bytes has {base.nbytes}")
    if codec_id in lowrank_chunks.STEPS:
        lowrank_chunks.decode(codec_id, payload, kind, width, base, destination)
        return
    is_second = codec_id == MOMENT2
    codes = read_codes(payload, destination.nbytes // width, width=width, is_second=is_second, scratch=scratch)
    grid_chunks.reconstruct(codes, codec_id, kind, base, destination)


def _only_step(steps: Sequence[CodecStep]) -> tuple[int, int]:
    """Return codec and kind of the one step of a lossy frame."""
    if len(steps) != 1 or steps[0][0] not in QUANTIZED_STEPS:
        raise UnsupportedError(f"chain of codecs {tuple(step[0] for step in steps)}", todo="upgrade ckstore")
    codec_id, config = steps[0]
    if len(config) != 1 or config[0] not in WIDTHS:
        name = QUANTIZED_STEPS[codec_id]
        raise UnsupportedError(f"unknown config of codec {name}", where=config.hex(), todo="upgrade ckstore")
    return codec_id, config[0]


def _made(
    step: int,
    found: Quantized | None,
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    grid: Grid,
    scratch: Scratch,
    reconstruction: memoryview,
) -> Made | None:
    """Write the payload and its reconstruction, and measure that; None where it does not pay."""
    if found is None:
        return None
    return grid_chunks.encode(step, found, plain, base, shape, grid, scratch=scratch, reconstruction=reconstruction)


def _clear_without_direction(values: memoryview, second: memoryview, shape: ChunkShape) -> None:
    """Drop first moments where the second is zero: what it becomes there may be none, and would make a step of them."""
    words = np.frombuffer(second, f"<u{shape.width}")
    is_zero = (words & ((1 << (8 * shape.width - 1)) - 1)) == 0
    if is_zero.any():
        np.frombuffer(values, np.float32)[is_zero] = 0


def _zeros(
    plain: memoryview, shape: ChunkShape, grid: Grid, scratch: Scratch, reconstruction: memoryview
) -> Made | None:
    np.frombuffer(reconstruction, np.uint8).fill(0)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_told:
        return None
    encoded = chain.encode(reconstruction, width=shape.width, is_float=True, compression="fast", scratch=scratch)
    return Made(
        encoded, reconstruction, Errors(grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value, off.sum_sq_value)
    )


def _grid_of(shape: ChunkShape, scratch: Scratch, plain: memoryview, *others: memoryview) -> Grid:
    """Return where a chunk lies, all whose buffers are equally long."""
    if any(other.nbytes != plain.nbytes for other in others) or plain.nbytes % shape.width:
        lengths = [plain.nbytes, *(other.nbytes for other in others)]
        raise UsageError(f"chunks of {lengths} bytes are not as many elements of {shape.width} bytes each")
    if plain.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"{plain.nbytes} bytes are more than the scratch is made for")
    return Grid(plain.nbytes // shape.width, shape.row_nelements, shape.phase)


def _buffers(grid: Grid, scratch: Scratch) -> tuple[memoryview, memoryview]:
    return scratch.values(4 * grid.count), scratch.planes(grid.count)


EXACT_METHOD, ROUNDED_METHOD = "exact", "rounded"


def method_of(steps: Sequence[CodecStep], settings: Settings, shape: ChunkShape, plain_nbytes: int) -> str:
    """Return the word for how a chunk was quantized.

    Args:
        steps: Of its frame.
        settings: What was asked for.
        shape: What the chunk is of its tensor.
        plain_nbytes: Its length.
    """
    taken = {step for step, _ in steps}
    if taken.intersection(lowrank_chunks.STEPS):
        return "outer"
    if not taken.intersection(QUANTIZED_STEPS):
        return "dropped"
    if isinstance(settings, SecondMomentSettings):
        grid = Grid(plain_nbytes // shape.width, shape.row_nelements, shape.phase)
        return "rank1" if settings.form == "rank1" and has_factors(grid) else "log"
    return settings.form if isinstance(settings, FirstMomentSettings) else "grid"


def numbers_of(settings: Settings, methods: Collection[str]) -> dict[str, float]:
    """Return the numbers among the settings; those of outer products where some were taken."""
    facts = {field.name: getattr(settings, field.name) for field in fields(settings)}
    low_rank = facts.get("low_rank")
    if low_rank is not None and "outer" in methods:
        facts |= {f"outer_{field.name}": getattr(low_rank, field.name) for field in fields(low_rank)}
    return {name: float(value) for name, value in facts.items() if isinstance(value, int | float)}


def word_of(methods: Collection[str]) -> str:
    """Return the words for the chunks of a tensor in one."""
    return ".".join(sorted(methods))
