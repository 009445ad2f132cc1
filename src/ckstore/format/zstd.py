"""Zstandard frames: for chunks, and for the sections of manifests. Only this module imports zstandard.

Invariants:
- A frame is stored alone, and records the length of its content. It has neither a dictionary nor a checksum, because
  what contains it has one.
- A reader knows how long the content must be, and compares this with the frame before it allocates memory.
"""

from __future__ import annotations

from typing import Literal

import zstandard

from ckstore.errors import MalformedError

Setting = Literal["entropy", "matches", "generic", "section"]

_WINDOW_NBYTES_MIN = 1 << 10
"""The smallest bound of a window that zstd accepts."""

# Byte planes of weights have a skewed distribution but no repetitions. With a hash table this small zstd finds almost
# no matches and works as a Huffman coder of literals.
_ENTROPY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, write_content_size=True
)
# A Huffman code needs at least one bit per byte. Planes below that need matches, but only long ones.
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
# Names and rows of tables: level 3 saves 4 % more than level 1, in 1.4 times the processor time.
_SECTION = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True)
_PARAMETERS: dict[Setting, zstandard.ZstdCompressionParameters] = {
    "entropy": _ENTROPY,
    "matches": _MATCHES,
    "generic": _GENERIC,
    "section": _SECTION,
}


class ZstdContexts:
    """Compressors and a decompressor of one thread.

    Args:
        window_nbytes_max: Frames that need a larger window to be decoded are refused.
    """

    def __init__(self, *, window_nbytes_max: int) -> None:
        self._compressors: dict[Setting, zstandard.ZstdCompressor] = {}
        self._window_nbytes_max = max(window_nbytes_max, _WINDOW_NBYTES_MIN)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=self._window_nbytes_max)

    def compress(self, plain: memoryview, setting: Setting) -> bytes:
        """Return one frame that holds ``plain``. Releases the GIL."""
        compressor = self._compressors.get(setting)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS[setting])
            self._compressors[setting] = compressor
        return compressor.compress(plain)

    def decompress(self, payload: memoryview, nbytes: int, *, where: object = None) -> bytes:
        """Return the content of the one frame that ``payload`` is. Releases the GIL.

        Raises:
            MalformedError: ``payload`` is not exactly one frame, or its content is not ``nbytes`` long.
        """
        try:
            # zstd allocates what the frame claims to hold, so the claim is checked first.
            claimed = zstandard.get_frame_parameters(payload)
            if claimed.content_size != nbytes:
                raise MalformedError(f"a zstd frame does not claim to hold {nbytes} bytes", where=where)
            if claimed.window_size > self._window_nbytes_max:
                raise MalformedError(f"a zstd frame has a window of {claimed.window_size} bytes", where=where)
            content = self._decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MalformedError(f"a zstd frame cannot be decoded: {error}", where=where) from None
        if len(content) != nbytes:
            raise MalformedError(f"a zstd frame holds {len(content)} bytes instead of {nbytes}", where=where)
        return content


def stored_section(plain: memoryview) -> memoryview:
    """Return a section of a manifest as it is stored: as one frame if that is shorter, else as it is."""
    frame = ZstdContexts(window_nbytes_max=plain.nbytes).compress(plain, "section")
    return memoryview(frame) if len(frame) < plain.nbytes else plain


def plain_section(stored: memoryview, nbytes: int, *, where: object = None) -> memoryview:
    """Return the ``nbytes`` plain bytes of a stored section. The caller has checked ``nbytes`` against the limits.

    Raises:
        MalformedError: The section is longer than its plain bytes, or shorter and not one frame of this length.
    """
    if stored.nbytes == nbytes:
        return stored
    if stored.nbytes > nbytes:
        raise MalformedError(
            f"a section of a manifest stores {nbytes} bytes in {stored.nbytes}: it has trailing bytes", where=where
        )
    return memoryview(ZstdContexts(window_nbytes_max=nbytes).decompress(stored, nbytes, where=where))
