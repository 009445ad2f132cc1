"""Estimate from a small sample what coding would save; see kernels.sample_on_numpy for what the sample is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from ckstore.codec.scratch import Scratch
from ckstore.kernels.sample_on_numpy import RUN_COUNT, SAMPLE_NBYTES, run_of

NOISE_BITS = 7.8
"""Bits per byte above which a plane is taken for noise: no coder would code it either."""

# What a block of the plane coder takes besides: a table and states, in bits per byte.
_BLOCK_LOSS = 0.02


class Sliceable(Protocol):
    """Bytes that are read where they are asked for: a memoryview, or what lies in another memory."""

    @property
    def nbytes(self) -> int:
        """How many they are."""
        ...

    def __getitem__(self, part: slice, /) -> memoryview:
        """Return some of them."""
        ...


def sample_of(plain: Sliceable, width: int, out: memoryview) -> int:
    """Copy the sample of a chunk into ``out``, all of a short one; return how many bytes.

    The samples of two chunks of one length hold the same elements.
    """
    if plain.nbytes <= SAMPLE_NBYTES:
        out[: plain.nbytes] = plain[0 : plain.nbytes]
        return plain.nbytes
    # A chunk that holds no whole elements is never coded by elements.
    places, nbytes = _places(plain.nbytes, 1 if plain.nbytes % width else width)
    for source, target in places:
        out[target] = plain[source]
    return nbytes


@lru_cache(maxsize=64)
def _places(nbytes: int, width: int) -> tuple[tuple[tuple[slice, slice], ...], int]:
    """Return where each run lies in the chunk and in the sample, and how many bytes the sample has."""
    places, at = [], 0
    for index in range(RUN_COUNT):
        start, count = run_of(index, nbytes // width, width)
        places.append((slice(start * width, (start + count) * width), slice(at, at + count * width)))
        at += count * width
    return tuple(places), at


def take_sample(plain: memoryview, width: int, scratch: Scratch) -> memoryview:
    """Return the sample of a chunk, which is the chunk itself if it is short."""
    if plain.nbytes <= SAMPLE_NBYTES:
        return plain
    sample = scratch.sample(SAMPLE_NBYTES)
    return sample[: sample_of(plain, width, sample)]


def coded_bits(plane_bits: Sequence[float]) -> float:
    """Return the bits that coded planes take for each element."""
    return sum(8.0 if bits > NOISE_BITS else bits + _BLOCK_LOSS for bits in plane_bits if bits)
