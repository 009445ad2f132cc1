"""Which checkpoints of a run need which frames and packs: what rewriting one of them would free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest
from ckstore.ids import PackId
from ckstore.store.parts import Parts
from ckstore.store.references import load_whole

Key = tuple[PackId, int]
"""A frame, by its place."""


def sizes_of(manifest: Manifest) -> dict[Key, int]:
    """Return every frame of a manifest with its bytes, in the manifest's order."""
    return {(manifest.packs[frame.pack].pack_id, frame.offset): frame.frame_nbytes for frame in manifest.frames}


class Ledger:
    """Frames and packs of a run by the checkpoints that need them; the newest checkpoint has rank 0."""

    def __init__(self) -> None:
        self.packs: dict[PackId, int] = {}
        """Packs that checkpoints of the run name, with their sizes."""
        self._spans: dict[Key | PackId, tuple[int, int]] = {}
        self._bases: set[Key] = set()
        self._elsewhere: set[Key | PackId] = set()
        self._packs_of: list[set[PackId]] = []

    @classmethod
    def of(cls, parts: Parts, names: Sequence[ManifestName]) -> Ledger:
        """Read every manifest of the store.

        Args:
            parts: The store.
            names: The run's manifests, the newest first.

        Raises:
            CorruptError: A checkpoint of the run is torn, or lacks a pack.
        """
        ledger = cls()
        for rank, name in enumerate(names):
            ledger._add(rank, load_whole(parts, name))
        for run in parts.runs():
            manifests = parts.manifests_of(run)
            for name in manifests.listing().names if run != parts.run else ():
                try:
                    keys = sizes_of(manifests.load(name))
                except FileNotFoundError:
                    # Dropped or replaced since it was listed; what it frees only makes the plan better.
                    continue
                ledger._elsewhere.update(keys, (pack_id for pack_id, _ in keys))
        return ledger

    def _add(self, rank: int, manifest: Manifest) -> None:
        keys = list(sizes_of(manifest))
        needed: list[Key | PackId] = [*keys, *(pack.pack_id for pack in manifest.packs)]
        for key in needed:
            self._spans[key] = self._spans.get(key, (rank, rank))[0], rank
        self._bases.update(keys[frame.base] for frame in manifest.frames if frame.base >= 0)
        self._packs_of.append({pack.pack_id for pack in manifest.packs})
        self.packs.update({pack.pack_id: pack.nbytes for pack in manifest.packs})

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield first and last rank of each group: no frame is a base in one group and needed in another."""
        reach = list(range(len(self._packs_of)))
        for key in self._bases:
            first, last = self._spans[key]
            reach[first] = max(reach[first], last)
        begin, end = 0, -1
        for rank, farthest in enumerate(reach):
            if rank > end >= 0:
                yield begin, end
                begin = rank
            end = max(end, farthest)
        if reach:
            yield begin, end

    def is_needed_outside(self, key: Key | PackId, first: int, last: int) -> bool:
        """Whether a frame or a pack is needed by a checkpoint newer or older than these, or by another run."""
        span = self._spans[key]
        return span[0] < first or span[1] > last or key in self._elsewhere

    def packs_nbytes(self, kept: Iterable[int], in_place: Iterable[PackId]) -> int:
        """Return the bytes of packs that are still needed when only checkpoints of these ranks keep their frames.

        Args:
            kept: Ranks of checkpoints that stay as they are.
            in_place: Packs of frames that others leave where they are.
        """
        needed = set(in_place).union(*(self._packs_of[rank] for rank in kept))
        return sum(nbytes for pack_id, nbytes in self.packs.items() if pack_id in needed)
