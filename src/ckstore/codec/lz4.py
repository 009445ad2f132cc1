"""The door to lz4, and the codec that is one LZ4 block without a size field."""

from __future__ import annotations

import lz4.block

from ckstore import kernels
from ckstore.codec.base import Brief, Encoded, require_no_config
from ckstore.codec.scratch import Scratch
from ckstore.errors import MalformedError


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
