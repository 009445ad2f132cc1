"""Codec ids on disk <-> codecs. An id is never given to another codec."""

from __future__ import annotations

from ckstore.codec.base import Codec
from ckstore.codec.lz4 import Lz4Codec
from ckstore.codec.planes import PlanesCodec
from ckstore.codec.simple import ConstCodec
from ckstore.codec.zstd import ZstdCodec
from ckstore.errors import UnsupportedError

CONST = ConstCodec()
PLANES = PlanesCodec()
ZSTD = ZstdCodec()
LZ4 = Lz4Codec()

CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (CONST, PLANES, ZSTD, LZ4)}


def codec_of(codec_id: int) -> Codec:
    """Return the codec that frames call by this id.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if codec_id not in CODECS:
        raise UnsupportedError(f"unknown codec {codec_id}", todo="upgrade ckstore", codec_id=codec_id)
    return CODECS[codec_id]
