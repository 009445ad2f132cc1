"""Memory and coder contexts that one thread uses again for every chunk.

Bounded by ``scratch_nbytes``: one buffer of byte planes, one for planes that are decoded, both made on first
use, and what the coders hand over before it is copied; by ``quantizing_nbytes`` besides where elements are quantized.
A scratch belongs to one thread at a time.
"""

from __future__ import annotations

import numpy as np

from ckstore import kernels
from ckstore.codec.zstd import CONTEXTS_NBYTES, ZstdContexts
from ckstore.config import MIB
from ckstore.kernels import SAMPLE_NBYTES


def scratch_nbytes(chunk_nbytes_max: int) -> int:
    """Return the most memory that one scratch and the coding of one chunk take."""
    # Two buffers for planes, one for what the plane coder makes, and one result of zstd, which asks for slightly
    # more than it fills; the bits of a sparse plane, a sample, and the temporary blocks of the numpy kernels.
    return (
        3 * chunk_nbytes_max
        + kernels.plane_bound(chunk_nbytes_max)
        + chunk_nbytes_max // 64
        + chunk_nbytes_max // 8
        + 8 * SAMPLE_NBYTES
        + CONTEXTS_NBYTES
    )


def quantizing_nbytes(chunk_nbytes_max: int) -> int:
    """Return the most memory that quantizing one chunk takes besides."""
    # Elements as fp32, which may be twice as long as they are stored. Then either factors, classes and sums of rows,
    # the shortest of which have 16 elements, and of columns; or a product as long as the elements, and narrow matrices.
    return 2 * chunk_nbytes_max + 5 * chunk_nbytes_max + 4 * MIB


class Scratch:
    """Reusable buffers for chunks of at most ``chunk_nbytes_max`` bytes."""

    def __init__(self, chunk_nbytes_max: int = 4 * MIB) -> None:
        self.chunk_nbytes_max = chunk_nbytes_max
        self._buffers: dict[str, memoryview] = {}
        self.zstd = ZstdContexts(window_nbytes_max=chunk_nbytes_max)

    def planes(self, nbytes: int) -> memoryview:
        """Return the buffer for the byte planes of a chunk that is being encoded."""
        return self._buffer("planes", nbytes, self.chunk_nbytes_max)

    def decoded(self, nbytes: int) -> memoryview:
        """Return the buffer for planes that are being decoded."""
        return self._buffer("decoded", nbytes, self.chunk_nbytes_max)

    def coded(self, nbytes: int) -> memoryview:
        """Return the buffer for coded planes."""
        return self._buffer("coded", nbytes, kernels.plane_bound(self.chunk_nbytes_max))

    def values(self, nbytes: int) -> memoryview:
        """Return the buffer for the elements of a chunk as fp32, which may be twice as long as it."""
        return self._buffer("values", nbytes, 2 * self.chunk_nbytes_max)

    def sample(self, nbytes: int) -> memoryview:
        """Return the buffer for the sample of a chunk."""
        return self._buffer("sample", nbytes, SAMPLE_NBYTES)

    def bitmap(self, nbytes: int) -> memoryview:
        """Return the buffer for the bits of a sparse plane of so many bytes that is being decoded."""
        return self._buffer("bitmap", -(-nbytes // 8), -(-self.chunk_nbytes_max // 8))

    def _buffer(self, name: str, nbytes: int, nbytes_max: int) -> memoryview:
        assert nbytes <= nbytes_max, f"{nbytes} bytes asked of a scratch for {nbytes_max}"
        if name not in self._buffers:
            self._buffers[name] = np.empty(nbytes_max, np.uint8).data
        return self._buffers[name][:nbytes]
