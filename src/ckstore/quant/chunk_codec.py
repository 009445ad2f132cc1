"""Quantize, encode and decode one chunk. docs/FORMAT.md has the bytes.

A quantized frame has one step:

- ``grid``: a base plus codes times steps (weights);
- ``moment2``: codes times the factors of rows and columns (second moments);
- ``moment1``: codes times the roots of the base, which is the second moment (first moments);
- ``codebook``: values without a base;
- ``outer``, ``outer1``, ``outer2``: the same for weights, first and second moments as a few outer products. They are
  tried first if the settings ask for them.

The reconstruction, what the codes decode to, is what is hashed and committed.

Invariants:
- A payload decodes to the reconstruction, bit for bit, on every machine, and is smaller than the plain bytes.
- A chunk with NaN or infinity is not quantized.
- The destination is written only after the whole payload has been read and checked.
- An encoder returns None if quantizing does not save enough, or if the error cannot be expressed in numbers. The
  contents of its value buffer are then undefined.

``method_of`` and ``numbers_of`` describe how chunks were actually quantized: a chunk that few outer products do not
describe falls back to a grid, factors of too few rows fall back to logarithms, and single chunks may be exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import CodecStep, Encoded, Scratch
from ckstore.codec.chunk_codec import QUANTIZED_STEPS
from ckstore.codec.chunk_codec import encode as encode_exact
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
]

GRID, MOMENT2, MOMENT1, CODEBOOK = GRID_STEPS = (7, 8, 9, 10)

_RULES = {GRID: 0, MOMENT2: 1, MOMENT1: 2, CODEBOOK: 3}
# Quantizing must save at least one part in this many.
SAVING_PART = 64
# If more than one element in this many is an escape, exact coding takes fewer bytes.
_ESCAPES_PART = 64


@dataclass(frozen=True, slots=True)
class QuantizedChunk:
    """A quantized chunk.

    Args:
        encoded: Steps and payload. The parts are in the scratch and valid until its next use.
        reconstruction: What the payload decodes to, in the caller's buffer. These bytes are committed.
        errors: The difference between the reconstruction and the given values.
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
    """Write payload and reconstruction of a quantized chunk, and measure the errors; None if it does not save enough.

    Args:
        step: One of ``GRID_STEPS``.
        found: The quantizer's result. The symbols are in the first half of ``scratch.planes``.
        plain: The bytes of the chunk.
        base: The bytes of the base, as long as the chunk; empty for a step without base.
        shape: The chunk's position in its tensor.
        grid: Its rows and columns.
        scratch: Memory of this thread.
        reconstruction: Receives what the payload decodes to, as long as the chunk.
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
    """Write the elements that the codes represent; ``base`` and ``destination`` may be the same memory."""
    grid = codes.grid
    kernels.finish_values(
        *(codes.symbols, codes.rows.values().data, codes.cols.values().data, codes.table.data, base, destination),
        *(grid.row, grid.phase, kind, _RULES[step], codes.floor),
    )
    if codes.escapes.size:
        words = np.frombuffer(codes.words, f"<u{WIDTHS[kind]}")
        np.frombuffer(destination, words.dtype)[codes.escapes] = words


def _words_at(plain: memoryview, places: NDArray[np.int64], width: int) -> bytes:
    """Return the bytes of the elements at these places, one after another."""
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
    """Approximate a chunk by outer products and write the reconstruction; None if it is too inexact or too long.

    Args:
        step: One of ``LOWRANK_STEPS``.
        values: Changes, quotients or second moments as finite fp32 values. Those of second moments are overwritten.
        plain: The bytes of the chunk.
        base: The bytes of the base, as long as the chunk; empty for ``ROOT_STEP``.
        shape: The chunk's position in its tensor.
        grid: Its rows and columns.
        settings: Precision and rank.
        limit: Greatest quotient.
        reconstruction: Receives what the payload decodes to, as long as the chunk.
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
    if not off.is_measured or _has_lost_positive(step, found, shape, reconstruction):
        return None
    encoded = Encoded(((step, bytes([shape.kind])),), [memoryview(found.payload)], shape.width)
    nonzero_count = grid.count if found.product.rank or step == ROOT_STEP else 0
    change = off.sum_sq_value if change is None else change
    return encoded, Errors(
        grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value, change, nonzero_count, 0, max_update_ratio
    )


def _has_lost_positive(step: int, found: Approximated, shape: ChunkShape, reconstruction: memoryview) -> bool:
    """Return True if a positive second moment became zero.

    The smallest value of this form, 2**-126, is zero in fp16. A grid uses the smallest moment of the chunk instead.
    """
    if step != ROOT_STEP or shape.dtype != "float16" or found.factors is None:
        return False
    is_zero = np.frombuffer(reconstruction, np.uint16) == 0
    rows, cols = (side.codes != 0 for side in found.factors)
    return bool((is_zero & (rows[:, None] & cols).reshape(-1)[found.grid.phase :][: is_zero.size]).any())


def decode_lowrank(
    step: int, payload: memoryview, kind: int, width: int, base: memoryview, destination: memoryview
) -> None:
    """Write the reconstruction of a chunk; ``base`` and ``destination`` may be the same memory.

    Raises:
        MalformedError: No writer makes this payload for so many elements.
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
    """Quantize the change of weights since the base; None if that is impossible or does not save enough.

    Args:
        plain: The bytes of the chunk.
        base: The same weights as stored in the previous checkpoint, as long as the chunk.
        shape: The chunk's position in its tensor.
        settings: How to quantize.
        scratch: Memory of this thread.
        reconstruction: Receives what the codes decode to, as long as the chunk.

    Raises:
        UsageError: Lengths differ, are not whole elements, or are larger than the scratch.
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
    return _encode_found(GRID, found, plain, base, shape, grid, scratch, reconstruction)


def encode_second_moment(
    plain: memoryview,
    shape: ChunkShape,
    settings: SecondMomentSettings,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> QuantizedChunk | None:
    """Quantize a second moment; None if that is impossible or does not save enough. See ``encode_weights``."""
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
    return _encode_found(MOMENT2, found, plain, _NO_BYTES, shape, grid, scratch, reconstruction)


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
    """Quantize a first moment divided by the root of the second; None if impossible or if it does not save enough.

    The frame's base is the chunk of ``second_reconstruction``. A dropped moment is stored as zeros instead, without
    base and without a quantized step.

    Args:
        plain: The bytes of the chunk.
        second_plain: The second moment of the same elements, as given.
        second_reconstruction: The second moment of the same elements, as stored.
        shape: The position of both chunks in their tensors.
        settings: How to quantize.
        scratch: Memory of this thread.
        reconstruction: Receives what the codes decode to, as long as the chunk.

    Raises:
        UsageError: Lengths differ, are not whole elements, or are larger than the scratch.
    """
    grid = _grid_of(shape, scratch, plain, second_plain, second_reconstruction, reconstruction)
    values, symbols = _buffers(grid, scratch)
    if not grid.count or not kernels.float_quotients(plain, second_plain, values, shape.kind, settings.clip):
        return None
    if settings.form == "dropped":
        return _zeros(plain, shape, grid, scratch, reconstruction)
    _clear_where_second_is_zero(values, second_plain, shape)
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
    return _encode_found(MOMENT1, found, plain, second_reconstruction, shape, grid, scratch, reconstruction)


def base_nbytes_of(steps: Sequence[CodecStep], plain_nbytes: int) -> int:
    """Return the length of the base that a quantized chunk needs; 0 if it has none.

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
    """Write exactly the reconstruction of one chunk; ``base`` and ``destination`` may be the same memory.

    Raises:
        CorruptError: The payload does not decode to that many bytes, or the base has another length.
        UnsupportedError: A newer version made the frame.
    """
    codec_id, kind = _only_step(steps)
    if width != WIDTHS[kind] or not destination.nbytes or destination.nbytes % width:
        raise MalformedError(
            f"{destination.nbytes} bytes of width {width} are not whole floats of {WIDTHS[kind]} bytes"
        )
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
    """Return codec id and kind of the one step of a quantized frame."""
    if len(steps) != 1 or steps[0][0] not in QUANTIZED_STEPS:
        raise UnsupportedError(
            f"unknown combination of codecs {tuple(step[0] for step in steps)}", todo="upgrade ckstore"
        )
    codec_id, config = steps[0]
    if len(config) != 1 or config[0] not in WIDTHS:
        name = QUANTIZED_STEPS[codec_id]
        raise UnsupportedError(f"unknown config of codec {name}", where=config.hex(), todo="upgrade ckstore")
    return codec_id, config[0]


def _encode_found(
    step: int,
    found: Quantized | None,
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    grid: Grid,
    scratch: Scratch,
    reconstruction: memoryview,
) -> QuantizedChunk | None:
    """Call ``encode_grid`` if the quantizer found something; else return None."""
    if found is None:
        return None
    return encode_grid(step, found, plain, base, shape, grid, scratch=scratch, reconstruction=reconstruction)


def _clear_where_second_is_zero(values: memoryview, second: memoryview, shape: ChunkShape) -> None:
    """Set first moments to zero where the second is zero: restored as non-zero, it would make an update of them."""
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
    encoded = encode_exact(reconstruction, width=shape.width, is_float=True, compression="fast", scratch=scratch)
    return QuantizedChunk(
        encoded, reconstruction, Errors(grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value, off.sum_sq_value)
    )


def _grid_of(shape: ChunkShape, scratch: Scratch, plain: memoryview, *others: memoryview) -> Grid:
    """Return the rows and columns of a chunk, after checking that all its buffers have the same length."""
    if any(other.nbytes != plain.nbytes for other in others) or plain.nbytes % shape.width:
        lengths = [plain.nbytes, *(other.nbytes for other in others)]
        raise UsageError(f"buffers of {lengths} bytes do not contain equally many elements of {shape.width} bytes")
    if plain.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"a chunk of {plain.nbytes} bytes is larger than the scratch of {scratch.chunk_nbytes_max}")
    return Grid(plain.nbytes // shape.width, shape.row_nelements, shape.phase)


def _buffers(grid: Grid, scratch: Scratch) -> tuple[memoryview, memoryview]:
    return scratch.values(4 * grid.count), scratch.planes(grid.count)


EXACT_METHOD, ROUNDED_METHOD = "exact", "rounded"


def method_of(steps: Sequence[CodecStep], settings: Settings, shape: ChunkShape, plain_nbytes: int) -> str:
    """Return the word for how a chunk was quantized.

    Args:
        steps: The steps of its frame.
        settings: The settings of its tensor.
        shape: The chunk's position in its tensor.
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
    """Return the numbers in the settings; those for outer products only if some chunk was stored as such."""
    facts = {field.name: getattr(settings, field.name) for field in fields(settings)}
    low_rank = facts.get("low_rank")
    if low_rank is not None and "outer" in methods:
        facts |= {f"outer_{field.name}": getattr(low_rank, field.name) for field in fields(low_rank)}
    return {name: float(value) for name, value in facts.items() if isinstance(value, int | float)}


def word_of(methods: Collection[str]) -> str:
    """Return the words of all chunks of a tensor as one word."""
    return ".".join(sorted(methods))
