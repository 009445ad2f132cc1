"""BLAKE3-256 digests, which are the addresses of chunks, and random ids.

The only module that imports blake3. A digest is 32 bytes; users see 64 lower-case hex digits or a prefix of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NewType, Protocol

from blake3 import blake3

if TYPE_CHECKING:
    from typing_extensions import Buffer


ChunkId = NewType("ChunkId", bytes)
"""BLAKE3-256 of a chunk's plain bytes: 32 bytes."""

PackId = NewType("PackId", bytes)
"""128 random bits, never reused."""

DIGEST_NBYTES = 32
PACK_ID_NBYTES = 16
NO_BASE = ChunkId(bytes(DIGEST_NBYTES))
"""Base id of a frame that has no base."""


def digest_of(content: Buffer) -> bytes:
    """Return the BLAKE3-256 of some bytes. Releases the GIL for long input."""
    return blake3(content).digest()


def chunk_id_of(plain: Buffer) -> ChunkId:
    """Return the chunk id of plain bytes: their BLAKE3-256."""
    return ChunkId(blake3(plain).digest())


def new_pack_id() -> PackId:
    """Return a random pack id."""
    return PackId(os.urandom(PACK_ID_NBYTES))


def new_token() -> str:
    """Return a random name of 32 hex digits, for drafts and trash folders."""
    return os.urandom(16).hex()


class Hasher(Protocol):
    """An incremental BLAKE3-256."""

    def update(self, content: Buffer, /) -> object:
        """Add bytes. Releases the GIL for long input."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all bytes added so far."""
        ...


def new_hasher() -> Hasher:
    """Return an incremental BLAKE3-256 without any bytes added."""
    return blake3()
