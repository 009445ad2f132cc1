"""Fixed-width little-endian fields, lengths, and xxh3-64. Only this module imports xxhash.

A *seal* is the xxh3-64 of a structure, stored as its last eight bytes. It detects bit rot and torn writes. Identity
relies on BLAKE3 alone.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64 as _Xxh3
from xxhash import xxh3_64_intdigest

from ckstore.errors import ChecksumError, MalformedError

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import Buffer

    class Checksum(Protocol):
        """A running xxh3-64."""

        def update(self, content: Buffer, /) -> object:
            """Add bytes. Releases the GIL for long input."""
            ...

        def intdigest(self) -> int:
            """Return the checksum of all bytes so far."""
            ...

        def digest(self) -> bytes:
            """Return the checksum as eight bytes, big-endian."""
            ...


SEAL_NBYTES = 8
BLOCK_NBYTES = 4096
STORE_ID_NBYTES = 16

_U64 = struct.Struct("<Q")
_ZERO_BLOCK = bytes(64 * 1024)


def xxh3_64(content: Buffer) -> int:
    """Return the xxh3-64 (seed 0) of the bytes. Releases the GIL for long input."""
    return xxh3_64_intdigest(content)


def new_xxh3() -> Checksum:
    """Return a new running xxh3-64 (seed 0)."""
    return _Xxh3()


def align_up(number: int, alignment: int) -> int:
    """Round ``number`` up to a multiple of ``alignment``."""
    return -(-number // alignment) * alignment


def sealed(body: bytes, nbytes: int) -> bytes:
    """Return ``body`` padded with zeros, followed by its seal, with ``nbytes`` in total."""
    assert len(body) <= nbytes - SEAL_NBYTES, "a fixed-size structure overflows"
    filled = body.ljust(nbytes - SEAL_NBYTES, b"\0")
    return filled + _U64.pack(xxh3_64(filled))


def check_seal(structure: memoryview, what: str, where: object) -> None:
    """Compare a structure with the seal in its last eight bytes.

    Raises:
        ChecksumError: They differ.
    """
    body_nbytes = len(structure) - SEAL_NBYTES
    stored: int = _U64.unpack_from(structure, body_nbytes)[0]
    if xxh3_64(structure[:body_nbytes]) != stored:
        raise ChecksumError(f"the checksum of {what} differs", where=where)


def is_zero(content: memoryview) -> bool:
    """Say whether every byte is zero, without copying."""
    step = len(_ZERO_BLOCK)
    return all(content[at : at + step] == _ZERO_BLOCK[: len(content) - at] for at in range(0, len(content), step))


def check_zero(content: memoryview, what: str, where: object) -> None:
    """Check that reserved bytes or padding are zero.

    Raises:
        MalformedError: Some byte is not zero.
    """
    if not is_zero(content):
        raise MalformedError(f"reserved bytes of {what} are not zero", where=where)


def exactly(content: Buffer, nbytes: int, what: str, where: object) -> memoryview:
    """Return a flat view of a structure after checking its length.

    Raises:
        MalformedError: The length is wrong.
    """
    view = memoryview(content).cast("B")
    if len(view) != nbytes:
        raise MalformedError(f"{what} has {len(view)} bytes instead of {nbytes}", where=where)
    return view


class Reader:
    """Reads consecutive pieces of a buffer, and never past its end.

    Args:
        what: Name of the structure, for messages.
        where: Its location, for messages.
    """

    __slots__ = ("_at", "_view", "_what", "_where")

    def __init__(self, content: Buffer, what: str, where: object = None) -> None:
        self._view = memoryview(content).cast("B")
        self._at = 0
        self._what = what
        self._where = where

    @property
    def remaining(self) -> int:
        """Number of bytes that have not been taken."""
        return len(self._view) - self._at

    def take(self, nbytes: int) -> memoryview:
        """Return a view of the next bytes.

        Raises:
            MalformedError: Fewer bytes are left.
        """
        if nbytes < 0 or nbytes > self.remaining:
            raise MalformedError(
                f"{self._what} ends early: it needs {nbytes} more bytes and has {self.remaining}", where=self._where
            )
        start = self._at
        self._at += nbytes
        return self._view[start : self._at]

    def done(self) -> None:
        """Check that all bytes have been taken.

        Raises:
            MalformedError: Bytes are left over.
        """
        if self.remaining:
            raise MalformedError(f"{self._what} has {self.remaining} trailing bytes", where=self._where)
