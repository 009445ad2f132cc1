"""What a codec is: a name on disk, and lossless bytes there and back.

Invariants:
- Encoding never touches the plain bytes, and gives None where it does not pay; the result may alias the
  plain bytes and the scratch, so it is used up before the same scratch encodes again.
- Decoding writes exactly the destination or raises CorruptError (UnsupportedError for what a newer writer
  made); whatever the payload says, it reads and allocates no more than destination and payload are long.
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
    """A payload in pieces that are written one after another.

    Args:
        steps: How the payload was made; empty for plain bytes.
        width: Bytes of an element, as the decoder will be told.
    """

    steps: tuple[CodecStep, ...]
    parts: list[memoryview]
    width: int
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(part.nbytes for part in self.parts))


@dataclass(frozen=True, slots=True)
class Brief:
    """What an encoder is told about a chunk.

    Args:
        plane_bits: Bits per byte that coding takes in each byte plane, rotated if ``rotate``, as a sample tells.
    """

    width: int
    rotate: bool
    compression: Compression
    plane_bits: Sequence[float]


class Codec(Protocol):
    """One way to code bytes."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def codec_id(self) -> int:
        """What frames call it; never given to another codec."""
        ...

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Code the bytes, or return None where that cannot pay."""
        ...

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write exactly ``destination``.

        Raises:
            CorruptError: The payload is not what an encoder makes for this many bytes.
            UnsupportedError: The config asks for what this version does not know.
        """
        ...


def require_no_config(config: bytes, name: str) -> None:
    """Refuse a config that this version does not know.

    Raises:
        UnsupportedError: There is one.
    """
    if config:
        raise UnsupportedError(f"unknown config of codec {name}", where=config.hex(), todo="upgrade ckstore")


def require_elements(nbytes: int, width: int) -> int:
    """Return how many elements there are, at least one.

    Raises:
        MalformedError: The width is none of ours, or the length no multiple of it.
    """
    if width not in WIDTHS or nbytes == 0 or nbytes % width:
        raise MalformedError(f"{nbytes} bytes are no elements of width {width}")
    return nbytes // width
