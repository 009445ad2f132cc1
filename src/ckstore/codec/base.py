"""The interface of a codec: a stable id, and lossless bytes in both directions.

Invariants:
- Encoding never changes the plain bytes. It returns None where coding saves nothing. The result may alias the plain
  bytes and the scratch, so it must be used before the same scratch encodes again.
- Decoding writes exactly the destination or raises: CorruptError, or UnsupportedError for a frame of a newer version.
  For any payload, it reads and allocates no more than the lengths of destination and payload allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckstore.config import Compression
from ckstore.errors import MalformedError, UnsupportedError

if TYPE_CHECKING:
    from ckstore.codec.byte_codecs import Scratch


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
