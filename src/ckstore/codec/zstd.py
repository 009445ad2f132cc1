"""The door to zstandard, and the codec that is one zstd frame.

A frame carries its content size, no dictionary and no checksum. Contexts are kept and used again: making one
costs more than coding a small chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import zstandard

from ckstore import kernels
from ckstore.codec.base import Brief, Encoded, require_no_config
from ckstore.errors import MalformedError

if TYPE_CHECKING:
    from ckstore.codec.scratch import Scratch

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
