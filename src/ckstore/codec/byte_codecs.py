"""What every codec provides, the general-purpose codecs (zstd, lz4, constant), and the memory that a thread reuses.

- zstd: one frame, see ``format/zstd.py``. Compressors are reused, because creating one costs more than coding a small
  chunk.
- lz4: one block without a size field.
- constant: a chunk that repeats one element, for example zeros.

This is the only module that imports ``lz4``.

Invariants of every codec:
- Encoding never changes the plain bytes. It returns None where coding saves nothing. The result may alias the plain
  bytes and the scratch, so it must be used before the same scratch encodes again.
- Decoding writes exactly the destination or raises: CorruptError, or UnsupportedError for a frame of a newer version.
  For any payload, it reads and allocates no more than the lengths of destination and payload allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import lz4.block
import numpy as np

from ckstore.codec import kernels
from ckstore.codec.kernels import SAMPLE_NBYTES
from ckstore.config import MIB, Compression
from ckstore.errors import MalformedError, UnsupportedError
from ckstore.format.zstd import ZstdContexts

CodecStep = tuple[int, bytes]
"""Codec id and config, as a frame's header stores them."""

CONFIG_NBYTES_MAX = 12
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded payload, in parts that are written one after another.

    Args:
        steps: The codecs that made the payload, in order; empty for plain bytes.
        parts: The payload.
        width: Bytes of an element, as the frame's header will say.
    """

    steps: tuple[CodecStep, ...]
    parts: list[memoryview]
    width: int
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(part.nbytes for part in self.parts))


@dataclass(frozen=True, slots=True)
class EncodeParams:
    """What an encoder needs to know about a chunk.

    Args:
        width: Bytes of an element.
        rotate: Rotate each element left by one bit, so that the exponent of a float fills its highest byte.
        compression: How much time may be spent.
        plane_bits: Estimated bits per byte of each coded byte plane, from a sample of the rotated elements.
    """

    width: int
    rotate: bool
    compression: Compression
    plane_bits: Sequence[float]


class Codec(Protocol):
    """One way to code bytes."""

    @property
    def name(self) -> str:
        """The codec's name in reports."""
        ...

    @property
    def codec_id(self) -> int:
        """The codec's number in frames. It is never given to another codec."""
        ...

    def encode(self, plain: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded | None:
        """Code the bytes, or return None where that cannot save anything."""
        ...

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write exactly ``destination``.

        Raises:
            CorruptError: No encoder makes this payload for the expected number of bytes.
            UnsupportedError: This version does not know the config.
        """
        ...


def require_no_config(config: bytes, name: str) -> None:
    """Check that a codec without config has none.

    Raises:
        UnsupportedError: It has one, so a newer version made it.
    """
    if config:
        raise UnsupportedError(f"unknown config of codec {name}", where=config.hex(), todo="upgrade ckstore")


def require_elements(nbytes: int, width: int) -> int:
    """Return the number of elements in ``nbytes`` bytes, at least 1.

    Raises:
        MalformedError: The width is not 1, 2, 4 or 8, or the bytes are not one or more whole elements.
    """
    if width not in WIDTHS or nbytes == 0 or nbytes % width:
        raise MalformedError(f"{nbytes} bytes are not whole elements of width {width}")
    return nbytes // width


class ZstdCodec:
    """One zstd frame, for bytes with repetitions under ``compression="best"``."""

    name = "zstd"
    codec_id = 3

    def encode(self, plain: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded | None:
        """Code the bytes as one frame."""
        coded = scratch.zstd.compress(plain, "generic")
        return Encoded(((self.codec_id, b""),), [memoryview(coded)], params.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the frame's content into ``destination``."""
        require_no_config(config, self.name)
        kernels.copy_bytes(scratch.zstd.decompress(payload, destination.nbytes), destination)


class Scratch:
    """Buffers and zstd contexts that one thread reuses for chunks of at most ``chunk_nbytes_max`` bytes.

    Used by one thread at a time. Each buffer is allocated on first use. ``store/memory_budget.py`` counts them.
    """

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
        """Return the buffer for the elements of a chunk as fp32, up to twice as long as the chunk."""
        return self._buffer("values", nbytes, 2 * self.chunk_nbytes_max)

    def sample(self, nbytes: int) -> memoryview:
        """Return the buffer for the sample of a chunk."""
        return self._buffer("sample", nbytes, SAMPLE_NBYTES)

    def bitmap(self, nbytes: int) -> memoryview:
        """Return the buffer for the bitmap of a sparse plane of ``nbytes`` bytes that is being decoded."""
        return self._buffer("bitmap", -(-nbytes // 8), -(-self.chunk_nbytes_max // 8))

    def _buffer(self, name: str, nbytes: int, nbytes_max: int) -> memoryview:
        assert nbytes <= nbytes_max, f"{nbytes} bytes of a scratch buffer that has {nbytes_max}"
        if name not in self._buffers:
            self._buffers[name] = np.empty(nbytes_max, np.uint8).data
        return self._buffers[name][:nbytes]


class Lz4Codec:
    """One LZ4 block, for integers with repetitions under ``compression="fast"``."""

    name = "lz4"
    codec_id = 4

    def encode(self, plain: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded | None:
        """Code the bytes as one block."""
        return Encoded(((self.codec_id, b""),), [memoryview(compress_lz4(plain))], params.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the block's content into ``destination``."""
        require_no_config(config, self.name)
        kernels.copy_bytes(_decompress(payload, destination.nbytes), destination)


def compress_lz4(plain: memoryview) -> bytes:
    """Return one LZ4 block. Releases the GIL."""
    block: bytes = lz4.block.compress(plain, store_size=False)
    return block


def _decompress(payload: memoryview, nbytes: int) -> bytes:
    try:
        content: bytes = lz4.block.decompress(payload, uncompressed_size=nbytes)
    except lz4.block.LZ4BlockError as error:
        raise MalformedError(f"an LZ4 block cannot be decoded: {error}") from None
    if len(content) != nbytes:
        raise MalformedError(f"an LZ4 block holds {len(content)} bytes instead of {nbytes}")
    return content


class ConstCodec:
    """A chunk that repeats one element; the payload is that element."""

    name = "const"
    codec_id = 1

    def encode(self, plain: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded | None:
        """Return the first element if all others are equal to it."""
        if not _repeats(plain, params.width):
            return None
        return Encoded(((self.codec_id, b""),), [plain[: params.width]], params.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Fill ``destination`` with the element."""
        require_no_config(config, self.name)
        count = require_elements(destination.nbytes, width)
        if payload.nbytes != width:
            raise MalformedError(f"a constant chunk stores {payload.nbytes} bytes instead of one element of {width}")
        word = np.dtype(f"u{width}")
        np.frombuffer(destination, word, count).fill(np.frombuffer(payload, word)[0])


def _repeats(plain: memoryview, width: int) -> bool:
    # All elements are equal if and only if each equals its neighbour.
    return kernels.equal_bytes(plain[width:], plain[: plain.nbytes - width])
