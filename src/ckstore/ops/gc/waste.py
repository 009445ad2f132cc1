"""How much of each pack is still needed: the frames that manifests locate in it, each counted once.

Frames are looked at in a second reading, of those manifests only that stay, and kept as numbers: memory grows with the
frames that differ, not with manifests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES
from ckstore.format.location import FRAME_ROW, PackTable
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.wire import BLOCK_NBYTES, align_up
from ckstore.store.reachability import MarkedManifest, Marker

_OFFSET_BITS = 34
"""Offsets of frames, in units of 64 bytes, lie below 2^30 in a pack of 64 GiB; the number of the pack stands above."""

_HELD_MAX = 1 << 20
"""Frames gathered before repeated ones are struck off."""

Keys = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PackUse:
    """What of a pack is needed.

    Attributes:
        number: The pack, as ``PackNumbers`` counts.
        frame_count: Frames that are needed.
        live_nbytes: Bytes of these with headers and padding.
    """

    number: int
    frame_count: int
    live_nbytes: int

    @property
    def packed_nbytes(self) -> int:
        """Bytes of a pack that holds these frames and no other."""
        directory = align_up(self.frame_count * DIRECTORY_ENTRY_NBYTES, BLOCK_NBYTES)
        return align_up(SUPERHEADER_NBYTES + self.live_nbytes, BLOCK_NBYTES) + directory + TAIL_NBYTES


class FrameCount:
    """Counts the frames that manifests locate, each once."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self._lengths: list[Lengths] = []
        self._held = 0

    def add(self, marked: MarkedManifest, table: PackTable) -> None:
        """Add the frames of a manifest."""
        rows = np.frombuffer(table.frame_rows, dtype=np.dtype(list(FRAME_ROW)))
        if not len(rows) or int(rows["pack"].max()) >= len(marked.packs):
            # Whoever decodes it whole refuses it; here its packs are named, and that is all.
            return
        numbers = np.array(marked.packs, dtype=np.uint64)[rows["pack"]]
        keys = (numbers << np.uint64(_OFFSET_BITS)) | (rows["offset"] // np.uint64(FRAME_ALIGN))
        self._keys.append(keys)
        self._lengths.append(rows["stored_nbytes"].astype(np.uint32))
        self._held += len(keys)
        if self._held > _HELD_MAX:
            self._strike_repeated()

    def uses(self) -> list[PackUse]:
        """Return what is needed of every pack."""
        keys, lengths = self._strike_repeated()
        if not len(keys):
            return []
        extents = (lengths.astype(np.int64) + FRAME_HEADER_NBYTES + FRAME_ALIGN - 1) // FRAME_ALIGN * FRAME_ALIGN
        numbers, first = np.unique(keys >> np.uint64(_OFFSET_BITS), return_index=True)
        sums = np.add.reduceat(extents, first)
        counts = np.diff(np.append(first, len(keys)))
        return [
            PackUse(int(number), int(count), int(nbytes))
            for number, count, nbytes in zip(numbers, counts, sums, strict=True)
        ]

    def _strike_repeated(self) -> tuple[Keys, Lengths]:
        if not self._keys:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        keys, first = np.unique(np.concatenate(self._keys), return_index=True)
        lengths = np.concatenate(self._lengths)[first]
        self._keys, self._lengths = [keys], [lengths]
        # What is left is counted from here on: else every further manifest would sort all again.
        self._held = 0
        return keys, lengths


def count_frames(marker: Marker, manifests: Iterable[MarkedManifest]) -> list[PackUse]:
    """Read manifests once more and return what they need of every pack.

    Raises:
        FileNotFoundError: One was moved meanwhile: then nothing is known of what it needed.
        CorruptError: One cannot be read any more.
    """
    count = FrameCount()
    for found in marker.read_each((marked.name, marked.name.path) for marked in manifests):
        if isinstance(found, Exception):
            raise found
        count.add(*found)
    return count.uses()
