"""Words less words and back, and single floats rounded to half of their width: in numpy, as FORMAT.md has it.

The specification of the native twins, bit for bit. Arrays hold unsigned words, and arithmetic wraps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]

BF16, FP16 = 1, 2


def residual(words: Words, base: Words, ordered: bool) -> Words:
    """Return the zigzagged differences, of floats in their order; small where both are close."""
    bits = 8 * words.dtype.itemsize
    if ordered:
        words, base = _in_order(words, bits), _in_order(base, bits)
    difference: Words = words - base
    signs: Words = 0 - (difference >> (bits - 1))
    return (difference << 1) ^ signs


def restored(residuals: Words, base: Words, ordered: bool) -> Words:
    """Return the words that ``residual`` was made from."""
    bits = 8 * residuals.dtype.itemsize
    signs: Words = 0 - (residuals & 1)
    difference: Words = (residuals >> 1) ^ signs
    if not ordered:
        return difference + base
    return _out_of_order(difference + _in_order(base, bits), bits)


def rounded(words: Words, kind: int) -> Words:
    """Return fp32 words as the nearest bf16 or fp16, ties to even."""
    return (_to_bf16(words) if kind == BF16 else _to_fp16(words)).astype("<u2")


def _in_order(words: Words, bits: int) -> Words:
    """Map floats so that unsigned words are in the order of the numbers."""
    flipped: Words = (0 - (words >> (bits - 1))) | words.dtype.type(1 << (bits - 1))
    return flipped ^ words


def _out_of_order(words: Words, bits: int) -> Words:
    flipped: Words = ((words >> (bits - 1)) - 1) | words.dtype.type(1 << (bits - 1))
    return flipped ^ words


def _to_bf16(words: Words) -> Words:
    nearest: Words = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    return np.where((words & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC0), nearest)


def _to_fp16(words: Words) -> Words:
    magnitude = words & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (0xFFF + ((magnitude >> 13) & 1))) >> 13
    # Next to a half, the unit of the last place is that of the subnormal numbers: the addition rounds to it.
    small = np.minimum(magnitude, np.uint32(0x38800000)).view(np.float32)
    subnormal = (small + np.float32(0.5)).view(np.uint32) - 0x3F000000
    nearest = np.where(magnitude < 0x38800000, subnormal, normal)
    nearest = np.where(magnitude >= 0x477FF000, np.uint32(0x7C00), nearest)
    nan = 0x7E00 | ((magnitude >> 13) & 0x3FF)
    unsigned: Words = np.where(magnitude > 0x7F800000, nan, nearest)
    signs: Words = (words >> 16) & 0x8000
    return unsigned | signs
