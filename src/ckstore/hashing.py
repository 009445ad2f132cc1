"""How bytes get their address: BLAKE3-256, its hex form, and random ids.

The only module that imports blake3. A digest is 32 bytes; people see 64 lower-case hex digits, or a
prefix of them.
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
"""The base id of a frame that needs no base."""


def digest_of(content: Buffer) -> bytes:
    """Return the BLAKE3-256 of the bytes; the GIL is released for long input."""
    return blake3(content).digest()


def chunk_id_of(plain: Buffer) -> ChunkId:
    """Return the address of a chunk: the BLAKE3-256 of its plain bytes."""
    return ChunkId(blake3(plain).digest())


def new_pack_id() -> PackId:
    """Return 128 fresh random bits."""
    return PackId(os.urandom(PACK_ID_NBYTES))


def new_token() -> str:
    """Return a fresh random name of 32 hex digits, for drafts and trash folders."""
    return os.urandom(16).hex()


class Hasher(Protocol):
    """A running BLAKE3-256."""

    def update(self, content: Buffer, /) -> object:
        """Add bytes; the GIL is released for long input."""
        ...

    def digest(self) -> bytes:
        """Return the digest of all bytes so far."""
        ...


def new_hasher() -> Hasher:
    """Return a running BLAKE3-256 of no bytes."""
    return blake3()
