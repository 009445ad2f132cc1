"""Chunks as a few outer products: the forms that are tried before grids, with their payloads and errors.

Invariants:
- The reconstruction that is written is what the payload decodes to, on every machine.
- None says that nothing was stored; the caller's values may have been used up by then.
"""

from __future__ import annotations

import numpy as np

from ckstore.codec.base import Encoded
from ckstore.config import LowRank
from ckstore.quant import lowrank_payload
from ckstore.quant.error_stats import Errors, measure
from ckstore.quant.geometry import ChunkShape, Grid
from ckstore.quant.lowrank_payload import CHANGE, QUOTIENT, ROOT, Approximated

CHANGE_STEP, QUOTIENT_STEP, ROOT_STEP = STEPS = (11, 12, 13)
WITH_BASE = (CHANGE_STEP, QUOTIENT_STEP)

_FORMS = {CHANGE_STEP: CHANGE, QUOTIENT_STEP: QUOTIENT, ROOT_STEP: ROOT}
# Coding that saves less than one part in so many is not worth the loss.
_SAVING_PART = 64


def encode(
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
        step: One of ``STEPS``.
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
    if found is None or len(found.payload) > plain.nbytes - plain.nbytes // _SAVING_PART:
        return None
    u_max = lowrank_payload.write(found, _FORMS[step], shape.kind, base, reconstruction)
    off = measure(plain, reconstruction, shape.kind)
    if not off.is_told or _vanishes(step, found, shape, reconstruction):
        return None
    encoded = Encoded(((step, bytes([shape.kind])),), [memoryview(found.payload)], shape.width)
    kept = grid.count if found.product.rank or step == ROOT_STEP else 0
    change = off.sum_sq_value if change is None else change
    return encoded, Errors(grid.count, off.max_abs, off.sum_sq_error, off.sum_sq_value, change, kept, 0, u_max)


def _vanishes(step: int, found: Approximated, shape: ChunkShape, reconstruction: memoryview) -> bool:
    """Whether a second moment became zero where its row and its column have some.

    The least that this form knows, 2 ** -126, is zero in fp16; a grid has the least moment of the chunk instead.
    """
    if step != ROOT_STEP or shape.dtype != "float16" or found.factors is None:
        return False
    is_zero = np.frombuffer(reconstruction, np.uint16) == 0
    rows, cols = (side.codes != 0 for side in found.factors)
    return bool((is_zero & (rows[:, None] & cols).reshape(-1)[found.grid.phase :][: is_zero.size]).any())


def decode(step: int, payload: memoryview, kind: int, width: int, base: memoryview, destination: memoryview) -> None:
    """Write the reconstruction of a chunk; the base may be the very memory of the destination.

    Raises:
        MalformedError: No writer makes such a payload for so many elements.
    """
    found: Approximated = lowrank_payload.read(payload, _FORMS[step], destination.nbytes // width)
    lowrank_payload.write(found, _FORMS[step], kind, base, destination)
