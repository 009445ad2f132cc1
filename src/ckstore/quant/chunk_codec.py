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

Chunks as symbols: from what a quantizer has found to the payload, the reconstruction and the errors, and back.

Four steps: ``grid`` adds codes to a base (weights), ``moment2`` multiplies factors of rows and columns, ``moment1``
multiplies codes by the roots of its base, the second moment, and ``codebook`` is values by themselves.

Invariants:
- The reconstruction that is written is what the payload decodes to, on every machine.
- None says that nothing was stored: it does not pay, or no number would tell what is lost.

Chunks as a few outer products: the forms that are tried before grids, with their payloads and errors.

Invariants:
- The reconstruction that is written is what the payload decodes to, on every machine.
- None says that nothing was stored; the caller's values may have been used up by then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import chunk_codec as chain
from ckstore.codec import kernels
from ckstore.codec.base import CodecStep, Encoded
from ckstore.codec.byte_codecs import Scratch, quantizing_nbytes
from ckstore.codec.chunk_codec import QUANTIZED_STEPS
from ckstore.config import FirstMomentSettings, LowRank, SecondMomentSettings, WeightSettings
from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.quant import lowrank_payload
from ckstore.quant.error_stats import Errors, greatest_quotient, measure
from ckstore.quant.geometry import WIDTHS, ChunkShape, FloatName, Grid
from ckstore.quant.grid import Quantized, Steps, has_factors, quantize_first, quantize_grid, quantize_second
from ckstore.quant.lowrank_payload import CHANGE, QUOTIENT, ROOT, Approximated
from ckstore.quant.payload import Codes, read_codes, write_codes

__all__ = [
    "CODEBOOK",
    "GRID",
    "MOMENT1",
    "MOMENT2",
    "STEPS_WITH_BASE",
    "ChunkShape",
    "Errors",
    "FloatName",
    "QuantizedChunk",
    "base_nbytes_of",
    "decode",
    "encode_first_moment",
    "encode_second_moment",
    "encode_weights",
    "quantizing_nbytes",
]

GRID, MOMENT2, MOMENT1, CODEBOOK = GRID_STEPS = (7, 8, 9, 10)

_RULES = {GRID: 0, MOMENT2: 1, MOMENT1: 2, CODEBOOK: 3}
# Coding that saves less than one part in so many is not worth the loss.
SAVING_PART = 64
# More of them cost more than exact bytes.
_ESCAPES_PART = 64


@dataclass(frozen=True, slots=True)
class QuantizedChunk:
    """A chunk that was quantized.

    Args:
        encoded: Steps and payload; the parts lie in the scratch and last until it is used again.
        reconstruction: What it decodes to: the caller's buffer, whose bytes are what is committed.
        errors: How that differs from what was given.
    """

    encoded: Encoded
    reconstruction: memoryview
    errors: Errors


def encode_grid(
    step: int,
    found: Quantized,
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    grid: Grid,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> QuantizedChunk | None:
    """Write the payload and its reconstruction, and measure that; None where it does not pay.

    Args:
        step: One of ``GRID_STEPS``.
        found: What the symbols mean; these lie in the first half of ``scratch.planes``.
        plain: The bytes of the chunk.
        base: As many bytes as the chunk has, that decoding will be given; none where the step has none.
        shape: What the chunk is of its tensor.
        grid: Where it lies.
        scratch: Memory of this thread.
        reconstruction: As many bytes, which receive what the payload decodes to.
    """
    if found.escapes.size > grid.count // _ESCAPES_PART:
        return None
    words = _words_at(plain, found.escapes, shape.width)
    symbols = scratch.planes(grid.count)
    codes = Codes(grid, found.rows, found.cols, symbols, found.table, found.floor, found.escapes, words)
    reconstruct_grid(codes, step, shape.kind, base, reconstruction)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_measured:
        return None
    parts = write_codes(codes, found.contexts, found.counts, scratch)
    encoded = Encoded(((step, bytes([shape.kind])),), parts, shape.width)
    nbytes = reconstruction.nbytes
    if encoded.nbytes > nbytes - max(1, nbytes // SAVING_PART):
        return None
    errors = Errors(
        *(grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value),
        found.sum_sq if step == GRID else off.sum_sq_value,
        grid.count - (0 if found.zero is None else int(found.counts[found.zero]) - found.escapes.size),
        found.escapes.size,
        _max_update_ratio(found, words, base, shape) if step == MOMENT1 else 0.0,
    )
    return QuantizedChunk(encoded, reconstruction, errors)


def reconstruct_grid(codes: Codes, step: int, kind: int, base: memoryview, destination: memoryview) -> None:
    """Write the elements that codes stand for; the base may be the very memory of the destination."""
    grid = codes.grid
    kernels.finish_values(
        *(codes.symbols, codes.rows.values().data, codes.cols.values().data, codes.table.data, base, destination),
        *(grid.row, grid.phase, kind, _RULES[step], codes.floor),
    )
    if codes.escapes.size:
        words = np.frombuffer(codes.words, f"<u{WIDTHS[kind]}")
        np.frombuffer(destination, words.dtype)[codes.escapes] = words


def _words_at(plain: memoryview, places: NDArray[np.int64], width: int) -> bytes:
    """Return the bytes of some elements of a chunk, one after another."""
    return np.frombuffer(plain, f"<u{width}")[places].tobytes()


def _max_update_ratio(found: Quantized, words: bytes, base: memoryview, shape: ChunkShape) -> float:
    second = _words_at(base, found.escapes, shape.width)
    return greatest_quotient(found.table, found.counts, _numbers(words, shape), _numbers(second, shape))


def _numbers(words: bytes, shape: ChunkShape) -> NDArray[np.float64]:
    values = np.empty(len(words) // shape.width, np.float32)
    kernels.float_values(words, values.data, shape.kind)
    return values.astype(np.float64)


CHANGE_STEP, QUOTIENT_STEP, ROOT_STEP = LOWRANK_STEPS = (11, 12, 13)
LOWRANK_WITH_BASE = (CHANGE_STEP, QUOTIENT_STEP)

_FORMS = {CHANGE_STEP: CHANGE, QUOTIENT_STEP: QUOTIENT, ROOT_STEP: ROOT}


def encode_lowrank(
    step: int,
    values: memoryview,
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    grid: Grid,
    settings: LowRank,
    *,
    limit: float = 0.0,
    reconstruction: memoryview,
) -> tuple[Encoded, Errors] | None:
    """Approximate the values of a chunk and write what it becomes; None where that is not near enough or too long.

    Args:
        step: One of ``LOWRANK_STEPS``.
        values: Changes, quotients or second moments, as finite fp32 values; those of second moments are overwritten.
        plain: The bytes of the chunk.
        base: As many bytes that decoding will be given; none for ``ROOT_STEP``.
        shape: What the chunk is of its tensor.
        grid: Where it lies.
        settings: How near.
        limit: Greatest quotient.
        reconstruction: As many bytes, which receive what the payload decodes to.
    """
    change: float | None = None
    if step == CHANGE_STEP:
        changes = np.frombuffer(values, np.float32)
        change = float(np.einsum("i,i->", changes, changes))
        found = lowrank_payload.make_change(values, grid, settings)
    elif step == QUOTIENT_STEP:
        found = lowrank_payload.make_quotient(values, grid, settings, limit)
    else:
        found = lowrank_payload.make_second(values, grid, settings)
    if found is None or len(found.payload) > plain.nbytes - plain.nbytes // SAVING_PART:
        return None
    max_update_ratio = lowrank_payload.write(found, _FORMS[step], shape.kind, base, reconstruction)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_measured or _vanishes(step, found, shape, reconstruction):
        return None
    encoded = Encoded(((step, bytes([shape.kind])),), [memoryview(found.payload)], shape.width)
    kept = grid.count if found.product.rank or step == ROOT_STEP else 0
    change = off.sum_sq_value if change is None else change
    return encoded, Errors(
        grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value, change, kept, 0, max_update_ratio
    )


def _vanishes(step: int, found: Approximated, shape: ChunkShape, reconstruction: memoryview) -> bool:
    """Whether a second moment became zero where its row and its column have some.

    The least that this form knows, 2 ** -126, is zero in fp16; a grid has the least moment of the chunk instead.
    """
    if step != ROOT_STEP or shape.dtype != "float16" or found.factors is None:
        return False
    is_zero = np.frombuffer(reconstruction, np.uint16) == 0
    rows, cols = (side.codes != 0 for side in found.factors)
    return bool((is_zero & (rows[:, None] & cols).reshape(-1)[found.grid.phase :][: is_zero.size]).any())


def decode_lowrank(
    step: int, payload: memoryview, kind: int, width: int, base: memoryview, destination: memoryview
) -> None:
    """Write the reconstruction of a chunk; the base may be the very memory of the destination.

    Raises:
        MalformedError: No writer makes such a payload for so many elements.
    """
    found: Approximated = lowrank_payload.read(payload, _FORMS[step], destination.nbytes // width)
    lowrank_payload.write(found, _FORMS[step], kind, base, destination)


Settings = WeightSettings | FirstMomentSettings | SecondMomentSettings

STEPS_WITH_BASE = (GRID, MOMENT1, *LOWRANK_WITH_BASE)
_NO_BYTES = memoryview(b"")


def encode_weights(
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    settings: WeightSettings,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> QuantizedChunk | None:
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
        near = encode_lowrank(CHANGE_STEP, values, *where, settings.low_rank, reconstruction=reconstruction)
        if near is not None:
            return QuantizedChunk(near[0], reconstruction, near[1])
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
) -> QuantizedChunk | None:
    """Quantize a second moment; None where that cannot be done or does not pay. See ``encode_weights``."""
    grid = _grid_of(shape, scratch, plain, reconstruction)
    values, symbols = _buffers(grid, scratch)
    if not grid.count or not kernels.float_values(plain, values, shape.kind):
        return None
    if settings.low_rank is not None:
        where = plain, _NO_BYTES, shape, grid
        near = encode_lowrank(ROOT_STEP, values, *where, settings.low_rank, reconstruction=reconstruction)
        if near is not None:
            return QuantizedChunk(near[0], reconstruction, near[1])
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
) -> QuantizedChunk | None:
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
        near = encode_lowrank(
            *(QUOTIENT_STEP, values, *where, settings.low_rank),
            limit=settings.clip,
            reconstruction=reconstruction,
        )
        if near is not None:
            return QuantizedChunk(near[0], reconstruction, near[1])
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
    if codec_id in LOWRANK_STEPS:
        decode_lowrank(codec_id, payload, kind, width, base, destination)
        return
    is_second = codec_id == MOMENT2
    codes = read_codes(payload, destination.nbytes // width, width=width, is_second=is_second, scratch=scratch)
    reconstruct_grid(codes, codec_id, kind, base, destination)


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
) -> QuantizedChunk | None:
    """Write the payload and its reconstruction, and measure that; None where it does not pay."""
    if found is None:
        return None
    return encode_grid(step, found, plain, base, shape, grid, scratch=scratch, reconstruction=reconstruction)


def _clear_without_direction(values: memoryview, second: memoryview, shape: ChunkShape) -> None:
    """Drop first moments where the second is zero: what it becomes there may be none, and would make a step of them."""
    words = np.frombuffer(second, f"<u{shape.width}")
    is_zero = (words & ((1 << (8 * shape.width - 1)) - 1)) == 0
    if is_zero.any():
        np.frombuffer(values, np.float32)[is_zero] = 0


def _zeros(
    plain: memoryview, shape: ChunkShape, grid: Grid, scratch: Scratch, reconstruction: memoryview
) -> QuantizedChunk | None:
    np.frombuffer(reconstruction, np.uint8).fill(0)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_measured:
        return None
    encoded = chain.encode(reconstruction, width=shape.width, is_float=True, compression="fast", scratch=scratch)
    return QuantizedChunk(
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
    if taken.intersection(LOWRANK_STEPS):
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
