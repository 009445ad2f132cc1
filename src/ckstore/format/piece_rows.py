"""The pieces of a storage as rows of 12 bytes: a storage of a checkpoint by many ranks has thousands of pieces.

As tuples of Python numbers, the pieces of a large checkpoint by 4,096 ranks take hundreds of megabytes in every rank.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from ckstore.errors import MalformedError
from ckstore.format.tensors import Piece

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROW = struct.Struct("<III")
"""Chunk, offset in the chunk, length."""

PACKED_COUNT_MIN = 64
"""Fewer pieces are a tuple, which is faster."""


class PieceRows(Sequence[Piece]):
    """Pieces that are made when they are used. It equals a tuple of the same pieces.

    Args:
        rows: The encoded pieces.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: bytes) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows) // ROW.size

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece._make, ROW.iter_unpack(self.rows))

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return Piece._make(ROW.unpack_from(self.rows, places * ROW.size))
        return tuple([self[place] for place in places])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PieceRows):
            return self.rows == other.rows
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def between(self, lo: int, hi: int) -> Iterator[Piece]:
        """Yield the pieces of the bytes ``lo`` to ``hi`` of the storage, without making others."""
        import numpy as np

        ends = np.cumsum(self._columns[2], dtype=np.uint64)
        first, last = np.searchsorted(ends, np.array([lo, hi], np.uint64), side="right").tolist()
        at = int(ends[first - 1]) if first else 0
        for chunk, offset, nbytes in ROW.iter_unpack(self.rows[first * ROW.size : (last + 1) * ROW.size]):
            begin, end = max(lo, at), min(hi, at + nbytes)
            if begin < end:
                yield Piece(chunk, offset + begin - at, end - begin)
            at += nbytes

    def chunk_starts(self) -> Iterator[tuple[int, int]]:
        """Yield as the function ``chunk_starts``."""
        import numpy as np

        chunk, offset, nbytes = self._columns
        begins = np.flatnonzero(offset == 0)
        positions = np.cumsum(nbytes, dtype=np.uint64)[begins] - nbytes[begins]
        return zip(positions.tolist(), chunk[begins].tolist(), strict=True)

    def checked_nbytes(self, lengths: NDArray[np.uint64], is_used: NDArray[np.uint8], where: object) -> int:
        """Return the bytes of all pieces after checking them.

        Args:
            lengths: The lengths of all chunks.
            is_used: Set to 1 for each chunk that a piece needs.
            where: The manifest, for errors.

        Raises:
            MalformedError: A piece is empty, or its chunk does not exist or is shorter.
        """
        import numpy as np

        chunk, offset, nbytes = self._columns
        is_wrong = bool((chunk >= len(lengths)).any()) or not nbytes.all()
        if is_wrong or (offset.astype(np.uint64) + nbytes > lengths[chunk]).any():
            raise MalformedError("a piece of a storage reaches beyond its chunk", where=where)
        is_used[chunk] = 1
        return int(nbytes.sum(dtype=np.uint64))

    @property
    def _columns(self) -> NDArray[np.uint32]:
        import numpy as np

        columns: NDArray[np.uint32] = np.frombuffer(self.rows, "<u4").reshape(-1, 3).T
        return columns


def pieces_of_rows(rows: memoryview) -> Sequence[Piece]:
    """Return encoded pieces."""
    if len(rows) < PACKED_COUNT_MIN * ROW.size:
        return tuple(map(Piece._make, ROW.iter_unpack(rows)))
    return PieceRows(bytes(rows))


def chunk_starts(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield for each piece at the begin of its chunk where it is in the storage, and the chunk."""
    if isinstance(pieces, PieceRows):
        yield from pieces.chunk_starts()
        return
    position = 0
    for chunk, offset, nbytes in pieces:
        if offset == 0:
            yield position, chunk
        position += nbytes


def rows_of_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return pieces in encoded form."""
    if isinstance(pieces, PieceRows):
        return pieces.rows
    return b"".join([ROW.pack(chunk, offset, nbytes) for chunk, offset, nbytes in pieces])
