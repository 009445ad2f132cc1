"""Ideal order-0 coding of byte planes: the bound with which compression ratios are compared.

The transformations are those of docs/FORMAT.md. A float is rotated left by one bit, so that its exponent fills the top
byte. A difference is taken between patterns in the order of the numbers, and its sign is the lowest bit. This is numpy
code, independent of the code that is measured.
"""

from __future__ import annotations

import numpy as np


def rotated(words: np.ndarray) -> np.ndarray:
    """Return unsigned words rotated left by one bit."""
    bits = words.dtype.itemsize * 8
    return (words << words.dtype.type(1)) | (words >> words.dtype.type(bits - 1))


def in_order(words: np.ndarray) -> np.ndarray:
    """Return float patterns as unsigned numbers that sort as the floats do."""
    one = words.dtype.type(1)
    sign = words.dtype.type(words.dtype.itemsize * 8 - 1)
    return np.where(words >> sign, ~words, words | (one << sign))


def out_of_order(numbers: np.ndarray) -> np.ndarray:
    """Invert ``in_order``."""
    one = numbers.dtype.type(1)
    sign = numbers.dtype.type(numbers.dtype.itemsize * 8 - 1)
    return np.where(numbers >> sign, numbers ^ (one << sign), ~numbers)


def differences(words: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Return differences of ordered float patterns; small differences of either sign become small numbers."""
    signed = np.dtype(f"i{words.dtype.itemsize}")
    steps = (in_order(words) - in_order(base)).view(signed)
    shift = signed.type(words.dtype.itemsize * 8 - 1)
    return ((steps << signed.type(1)) ^ (steps >> shift)).view(words.dtype)


def plane_bits(words: np.ndarray) -> float:
    """Return the sum of the order-0 entropies of all byte planes, in bits per element."""
    if not words.size:
        return 0.0
    planes = words.view(np.uint8).reshape(-1, words.dtype.itemsize)
    bits = 0.0
    for index in range(planes.shape[1]):
        counts = np.bincount(planes[:, index], minlength=256)
        shares = counts[counts > 0] / words.size
        bits -= float((shares * np.log2(shares)).sum())
    return bits


def full_nbytes(words: np.ndarray) -> float:
    """Return the bytes of ideal coding of the rotated planes of one tensor."""
    return plane_bits(rotated(words)) * words.size / 8


def delta_nbytes(words: np.ndarray, base: np.ndarray) -> float:
    """Return the bytes of ideal coding of the planes of its differences."""
    return plane_bits(differences(words, base)) * words.size / 8


def xor_nbytes(words: np.ndarray, base: np.ndarray) -> float:
    """Return the bytes of ideal coding of the planes of an exclusive or."""
    return plane_bits(words ^ base) * words.size / 8
