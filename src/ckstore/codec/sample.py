"""Estimate from a small sample what coding would save.

The sample is 16 runs of 4 KiB, one in each sixteenth of the chunk, at places that depend on nothing but the
length: the same bytes are always coded in the same way.
"""

from __future__ import annotations

import numpy as np

from ckstore import kernels
from ckstore.codec.scratch import SAMPLE_NBYTES, Scratch

RUN_COUNT = 16
RUN_NBYTES = SAMPLE_NBYTES // RUN_COUNT
# Knuth's multiplicative hash: spreads the runs within their sixteenths.
_SPREAD = 2654435761


def take_sample(plain: memoryview, width: int, scratch: Scratch) -> memoryview:
    """Return some runs of elements, one after another; all bytes if there are few."""
    if plain.nbytes <= SAMPLE_NBYTES:
        return plain
    sample = scratch.sample(SAMPLE_NBYTES)
    part = plain.nbytes // RUN_COUNT
    for run in range(RUN_COUNT):
        start = run * part + ((run + 1) * _SPREAD) % (part - RUN_NBYTES + 1)
        start -= start % width
        sample[run * RUN_NBYTES : (run + 1) * RUN_NBYTES] = plain[start : start + RUN_NBYTES]
    return sample


def plane_entropies(sample: memoryview, width: int, rotate: bool, scratch: Scratch) -> list[float]:
    """Return the order-0 entropy of each byte plane, in bits per byte."""
    planes = scratch.sample_planes(sample.nbytes)
    kernels.split_planes(sample, planes, width, rotate)
    count = sample.nbytes // width
    counts = scratch.counts[:width]
    for index in range(width):
        kernels.histogram(planes[index * count : (index + 1) * count], counts[index])
    shares = counts / count
    bits: list[float] = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=1)
    return [float(bit) + 0.0 for bit in bits]
