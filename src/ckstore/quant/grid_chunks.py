"""Chunks as symbols: from what a quantizer has found to the payload, the reconstruction and the errors, and back.

Four steps: ``grid`` adds codes to a base (weights), ``moment2`` multiplies factors of rows and columns, ``moment1``
multiplies codes by the roots of its base, the second moment, and ``codebook`` is values by themselves.

Invariants:
- The reconstruction that is written is what the payload decodes to, on every machine.
- None says that nothing was stored: it does not pay, or no number would tell what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.codec.base import Encoded
from ckstore.codec.byte_codecs import Scratch
from ckstore.quant.error_stats import Errors, greatest_quotient, measure
from ckstore.quant.geometry import WIDTHS, ChunkShape, Grid
from ckstore.quant.grid import Quantized
from ckstore.quant.payload import Codes, write_codes

GRID, MOMENT2, MOMENT1, CODEBOOK = STEPS = (7, 8, 9, 10)

_RULES = {GRID: 0, MOMENT2: 1, MOMENT1: 2, CODEBOOK: 3}
# Coding that saves less than one part in so many is not worth the loss.
SAVING_PART = 64
# More of them cost more than exact bytes.
_ESCAPES_PART = 64


@dataclass(frozen=True, slots=True)
class Made:
    """A chunk that was quantized.

    Args:
        encoded: Steps and payload; the parts lie in the scratch and last until it is used again.
        reconstruction: What it decodes to: the caller's buffer, whose bytes are what is committed.
        errors: How that differs from what was given.
    """

    encoded: Encoded
    reconstruction: memoryview
    errors: Errors


def encode(
    step: int,
    found: Quantized,
    plain: memoryview,
    base: memoryview,
    shape: ChunkShape,
    grid: Grid,
    *,
    scratch: Scratch,
    reconstruction: memoryview,
) -> Made | None:
    """Write the payload and its reconstruction, and measure that; None where it does not pay.

    Args:
        step: One of ``STEPS``.
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
    reconstruct(codes, step, shape.kind, base, reconstruction)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_told:
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
        _u_max(found, words, base, shape) if step == MOMENT1 else 0.0,
    )
    return Made(encoded, reconstruction, errors)


def reconstruct(codes: Codes, step: int, kind: int, base: memoryview, destination: memoryview) -> None:
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


def _u_max(found: Quantized, words: bytes, base: memoryview, shape: ChunkShape) -> float:
    second = _words_at(base, found.escapes, shape.width)
    return greatest_quotient(found.table, found.counts, _numbers(words, shape), _numbers(second, shape))


def _numbers(words: bytes, shape: ChunkShape) -> NDArray[np.float64]:
    values = np.empty(len(words) // shape.width, np.float32)
    kernels.float_values(words, values.data, shape.kind)
    return values.astype(np.float64)
