"""Planes most of whose bytes are the same, in numpy: a bitmap of the others, and the others, each by the plane coder.

The specification of the native twin, bit for bit; docs/FORMAT.md has the layout.
"""

from __future__ import annotations

import struct

import numpy as np

from ckstore.kernels import coder_on_numpy
from ckstore.kernels.coder_on_numpy import Bytes, count_sample

SPARSE_FROM = 64 * 1024
"""Shorter planes are left to the plane coder."""

_HEADER = struct.Struct("<BII")
# At most one byte in four is another; one run in 64 tells which byte is common.
_OTHERS_PART = 4
_SPACING = 6


def encode(plane: Bytes, out: Bytes) -> int:
    """Code a plane into ``out`` and return its length, or 0 where the plane is not sparse or too short."""
    if plane.size < SPARSE_FROM:
        return 0
    counts = count_sample(plane, _SPACING)
    total, common = int(counts.sum()), int(counts.argmax())
    if total - int(counts[common]) > total // _OTHERS_PART:
        return 0
    is_other = plane != common
    others = plane[is_other]
    if not 0 < others.size <= plane.size // _OTHERS_PART:
        return 0
    coded = coder_on_numpy.encode(np.packbits(is_other, bitorder="little"), out[_HEADER.size :])
    _HEADER.pack_into(out.data, 0, common, others.size, coded)
    end = _HEADER.size + coded
    return end + coder_on_numpy.encode(others, out[end:])


def decode(payload: Bytes, plane: Bytes) -> bool:
    """Decode exactly ``plane``; return whether the payload held it."""
    if payload.size < _HEADER.size:
        return False
    common, count, coded = _HEADER.unpack_from(payload.tobytes())
    end = _HEADER.size + coded
    if not 0 < count <= plane.size or end > payload.size:
        return False
    bitmap, others = np.empty(-(-plane.size // 8), np.uint8), np.empty(count, np.uint8)
    if not coder_on_numpy.decode(payload[_HEADER.size : end], bitmap):
        return False
    if not coder_on_numpy.decode(payload[end:], others):
        return False
    bits = np.unpackbits(bitmap, bitorder="little").astype(bool)
    if bits[plane.size :].any() or int(bits.sum()) != count:
        return False
    plane[:] = common
    plane[bits[: plane.size]] = others
    return True
