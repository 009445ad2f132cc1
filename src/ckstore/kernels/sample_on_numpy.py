"""What the plane coder would make of byte planes, told from a sample of their elements.

The sample is the whole, or one run in each sixteenth, at places that depend on the length and the width alone:
the samples of two chunks of one length hold the same elements. Integers decide, so that every twin and every
machine estimates alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckstore.kernels.coder_on_numpy import Bytes, Ints, bits_with, model_of

SAMPLE_NBYTES = 16 * 1024
RUN_COUNT = 16

_RUN_NBYTES = SAMPLE_NBYTES // RUN_COUNT
# Knuth's multiplicative hash: spreads the runs within their sixteenths.
_SPREAD = 2654435761
# Planes are judged by one run in four first; of fewer bytes than this, noise cannot be told.
_FIRST_RUNS = 4
_FIRST_COUNT = 1024
# 2^7.9: two bytes of noise are alike less often than once in so many pairs.
_NOISE_PAIRS = 238


def run_of(index: int, count: int, width: int) -> tuple[int, int]:
    """Return where a run of the sample of ``count`` elements begins and how many there are in it."""
    part, length = count // RUN_COUNT, _RUN_NBYTES // width
    if count <= RUN_COUNT * length:
        return index * part, count - index * part if index == RUN_COUNT - 1 else part
    return index * part + ((index + 1) * _SPREAD) % (part - length + 1), length


def bits_of_planes(count: int, width: int, split: Callable[[int, int], Bytes]) -> list[float]:
    """Return the bits that coding takes for each byte of each plane: 0 if all are alike, 8 if they are noise.

    Args:
        count: Elements.
        width: Bytes of each.
        split: Returns the planes of some elements, as rows; takes where they start and how many they are.
    """
    runs = [split(*run_of(index, count, width)) for index in range(RUN_COUNT)]
    first, whole = np.concatenate(runs[::_FIRST_RUNS], axis=1), np.concatenate(runs, axis=1)
    return [8.0 if _is_noise(begin) else _bits_of(plane) for begin, plane in zip(first, whole, strict=True)]


def _is_noise(plane: Bytes) -> bool:
    counts = _counted(plane)
    pairs, total = int((counts * counts).sum()) - plane.size, plane.size
    return total >= _FIRST_COUNT and pairs * _NOISE_PAIRS < total * (total - 1)


def _bits_of(plane: Bytes) -> float:
    counts = _counted(plane)
    if counts.max() == plane.size:
        return 0.0
    return bits_with(model_of(counts, plane.size), counts) / (256.0 * plane.size)


def _counted(plane: Bytes) -> Ints:
    return np.bincount(plane, minlength=256)
