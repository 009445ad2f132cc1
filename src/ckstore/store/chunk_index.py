"""Where chunks lie: in memory, from the newest manifests.

What is known is a hint: a pack may be gone since. Every hit is checked twice, before it is used and
after the manifest that relies on it was published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckstore.hashing import ChunkId, PackId

if TYPE_CHECKING:
    from ckstore.format.manifest import FrameRef, Manifest, PackRef


MANIFESTS_KNOWN_MAX = 16
"""Manifests of a run whose chunks are remembered: bounds memory and the first commit's reading."""

LOCAL_TIER = "local"
LOST_TIER = "lost"
"""Where a manifest locates chunks that are nowhere any more; see lost.py."""


@dataclass(frozen=True, slots=True)
class LocatedFrame:
    """A frame that an acknowledged manifest locates, its pack, and the frame it needs as base."""

    frame: FrameRef
    pack: PackRef
    base: LocatedFrame | None

    def closure(self) -> list[LocatedFrame]:
        """Return the frame and its bases, deepest base first."""
        chain: list[LocatedFrame] = [self]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        return chain[::-1]


def locate(frames: Iterable[LocatedFrame]) -> tuple[list[PackRef], list[FrameRef]]:
    """Return every frame once, bases included, and the packs they lie in, as a manifest lists them."""
    packs: dict[PackId, tuple[int, PackRef]] = {}
    index_of: dict[ChunkId, int] = {}
    located: list[FrameRef] = []
    for known in frames:
        for link in known.closure():
            if link.frame.chunk_id in index_of:
                continue
            pack_index, _ = packs.setdefault(link.pack.pack_id, (len(packs), link.pack))
            base = -1 if link.base is None else index_of[link.base.frame.chunk_id]
            index_of[link.frame.chunk_id] = len(located)
            # An older frame of the same chunk may stand in for the base, and have another depth.
            depth = 0 if base < 0 else located[base].depth + 1
            located.append(replace(link.frame, pack=pack_index, base=base, depth=depth))
    return [ref for _, ref in packs.values()], located


class ChunkIndex:
    """Chunk id to frame, for the newest manifests only."""

    def __init__(self, manifests_max: int = MANIFESTS_KNOWN_MAX) -> None:
        self.manifests_max = manifests_max
        self._pinned: dict[ChunkId, LocatedFrame] = {}
        self._generations: deque[dict[ChunkId, LocatedFrame]] = deque(maxlen=manifests_max)

    def __len__(self) -> int:
        return len({chunk_id for frames in self._tables() for chunk_id in frames})

    def add(self, manifest: Manifest) -> None:
        """Remember what an acknowledged manifest locates in the local tier; the oldest one is forgotten."""
        self._generations.append(_frames_of(manifest))

    def pin(self, manifest: Manifest) -> None:
        """Remember a manifest until another one is pinned: what was restored is what training goes on from."""
        self._pinned = _frames_of(manifest)

    def _tables(self) -> Iterator[dict[ChunkId, LocatedFrame]]:
        yield from reversed(self._generations)
        yield self._pinned

    def find(self, chunk_id: ChunkId) -> LocatedFrame | None:
        """Return the newest known frame of a chunk."""
        for frames in self._tables():
            known = frames.get(chunk_id)
            if known is not None:
                return known
        return None

    def packs(self) -> dict[PackId, int]:
        """Return id and size of the packs of all known frames."""
        return {link.pack.pack_id: link.pack.nbytes for frames in self._tables() for link in frames.values()}

    def forget_packs(self, pack_ids: Iterable[PackId]) -> None:
        """Forget every frame that lies in one of these packs, or needs one that does."""
        gone = set(pack_ids)
        if not gone:
            return
        for frames in self._tables():
            for chunk_id in [
                chunk_id
                for chunk_id, known in frames.items()
                if any(link.pack.pack_id in gone for link in known.closure())
            ]:
                del frames[chunk_id]


def _frames_of(manifest: Manifest) -> dict[ChunkId, LocatedFrame]:
    frames: dict[int, LocatedFrame] = {}
    for index, frame in enumerate(manifest.frames):
        pack = manifest.packs[frame.pack]
        base = frames.get(frame.base) if frame.base >= 0 else None
        if pack.tier != LOCAL_TIER or (frame.base >= 0 and base is None):
            continue
        frames[index] = LocatedFrame(frame, pack, base)
    return {known.frame.chunk_id: known for known in frames.values()}
