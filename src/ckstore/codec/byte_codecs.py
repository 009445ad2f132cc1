"""The door to zstandard, and the codec that is one zstd frame.

A frame carries its content size, no dictionary and no checksum. Contexts are kept and used again: making one
costs more than coding a small chunk.

Memory and coder contexts that one thread uses again for every chunk.

Bounded by ``scratch_nbytes``: one buffer of byte planes, one for planes that are decoded, both made on first
use, and what the coders hand over before it is copied; by ``quantizing_nbytes`` besides where elements are quantized.
A scratch belongs to one thread at a time.

The door to lz4, and the codec that is one LZ4 block without a size field.

A chunk that is one element over and over: zeros, ones, an untouched buffer.
"""

from __future__ import annotations

from typing import Literal

import lz4.block
import numpy as np
import zstandard

from ckstore.codec import kernels
from ckstore.codec.base import Brief, Encoded, require_elements, require_no_config
from ckstore.codec.kernels import SAMPLE_NBYTES
from ckstore.config import MIB
from ckstore.errors import MalformedError

Setting = Literal["entropy", "matches", "generic"]

# Byte planes of weights hold no repetitions, only a skewed distribution. With a hash table this small
# matches are hardly ever found, so that zstd works as a Huffman coder of literals.
_ENTROPY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, write_content_size=True
)
# A Huffman code cannot go below one bit a byte: planes of fewer need repetitions found, but only long ones.
_MATCHES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_LAZY2,
    window_log=20,
    hash_log=16,
    chain_log=16,
    search_log=4,
    min_match=5,
    target_length=32,
    write_content_size=True,
)
_GENERIC = zstandard.ZstdCompressionParameters.from_level(6, write_content_size=True)
_PARAMETERS: dict[Setting, zstandard.ZstdCompressionParameters] = {
    "entropy": _ENTROPY,
    "matches": _MATCHES,
    "generic": _GENERIC,
}
CONTEXTS_NBYTES = 8 << 20
"""Bound on what the contexts of one thread take, windows of the largest chunk excepted."""


class ZstdContexts:
    """Compressors and a decompressor of one thread.

    Args:
        window_nbytes_max: Frames that want more memory to be decoded are refused.
    """

    def __init__(self, *, window_nbytes_max: int) -> None:
        self._compressors: dict[Setting, zstandard.ZstdCompressor] = {}
        # zstd refuses bounds below 1 KiB.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=max(window_nbytes_max, 1 << 10))

    def compress(self, plain: memoryview, setting: Setting) -> bytes:
        """Return one frame that holds ``plain``; the GIL is released."""
        compressor = self._compressors.get(setting)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS[setting])
            self._compressors[setting] = compressor
        return compressor.compress(plain)

    def decompress(self, payload: memoryview, nbytes: int) -> bytes:
        """Return the content of one frame that must be exactly ``payload``; the GIL is released.

        Raises:
            MalformedError: It is no such frame, or its content is not ``nbytes`` long.
        """
        try:
            # The frame's own claim decides how much is allocated: look at it first.
            if zstandard.frame_content_size(payload) != nbytes:
                raise MalformedError(f"zstd frame does not claim to hold {nbytes} bytes")
            content = self._decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MalformedError(f"zstd frame cannot be decoded: {error}") from None
        if len(content) != nbytes:
            raise MalformedError(f"zstd frame holds {len(content)} bytes instead of {nbytes}")
        return content


class ZstdCodec:
    """One zstd frame; for bytes with repetitions, when there is time."""

    name = "zstd"
    codec_id = 3

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Code the bytes as one frame."""
        coded = scratch.zstd.compress(plain, "generic")
        return Encoded(((self.codec_id, b""),), [memoryview(coded)], brief.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the frame's content into ``destination``."""
        require_no_config(config, self.name)
        kernels.copy_bytes(scratch.zstd.decompress(payload, destination.nbytes), destination)


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


class Lz4Codec:
    """One LZ4 block; for bytes with repetitions, at little cost."""

    name = "lz4"
    codec_id = 4

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Code the bytes as one block."""
        return Encoded(((self.codec_id, b""),), [memoryview(compress(plain))], brief.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the block's content into ``destination``."""
        require_no_config(config, self.name)
        kernels.copy_bytes(_decompress(payload, destination.nbytes), destination)


def compress(plain: memoryview) -> bytes:
    """Return one block; the GIL is released."""
    block: bytes = lz4.block.compress(plain, store_size=False)
    return block


def _decompress(payload: memoryview, nbytes: int) -> bytes:
    try:
        content: bytes = lz4.block.decompress(payload, uncompressed_size=nbytes)
    except lz4.block.LZ4BlockError as error:
        raise MalformedError(f"LZ4 block cannot be decoded: {error}") from None
    if len(content) != nbytes:
        raise MalformedError(f"LZ4 block holds {len(content)} bytes instead of {nbytes}")
    return content


class ConstCodec:
    """The payload is the element."""

    name = "const"
    codec_id = 1

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Return the first element if all others equal it."""
        if not _repeats(plain, brief.width):
            return None
        return Encoded(((self.codec_id, b""),), [plain[: brief.width]], brief.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the element over and over."""
        require_no_config(config, self.name)
        count = require_elements(destination.nbytes, width)
        if payload.nbytes != width:
            raise MalformedError(f"{payload.nbytes} bytes are no element of width {width}")
        word = np.dtype(f"u{width}")
        np.frombuffer(destination, word, count).fill(np.frombuffer(payload, word)[0])


def _repeats(plain: memoryview, width: int) -> bool:
    # All elements are the same exactly when each equals its neighbour.
    return kernels.equal_bytes(plain[width:], plain[: plain.nbytes - width])
