"""An index in memory from chunk id to stored frame, built from the newest manifests.

The index is a hint: a pack may have been deleted since. Each hit is checked twice: before it is used, and again after
the manifest that relies on it was published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckstore.hashing import ChunkId, PackId

if TYPE_CHECKING:
    from ckstore.format.manifest import FrameRef, Manifest, PackRef


MANIFESTS_INDEXED_MAX = 16
"""Newest manifests of a run that are indexed. Bounds memory and what the first commit reads."""

LOCAL_TIER = "local"
LOST_TIER = "lost"
"""The tier of chunks that were lost; see ``damage.py``."""


@dataclass(frozen=True, slots=True)
class LocatedFrame:
    """A frame listed by an acknowledged manifest, with its pack and the frame that it needs as base."""

    frame: FrameRef
    pack: PackRef
    base: LocatedFrame | None

    def closure(self) -> list[LocatedFrame]:
        """Return the frame and all its bases, deepest base first."""
        chain: list[LocatedFrame] = [self]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        return chain[::-1]


def locate(frames: Iterable[LocatedFrame]) -> tuple[list[PackRef], list[FrameRef]]:
    """Return every frame once, including bases, and their packs, numbered as a manifest lists them."""
    packs: dict[PackId, tuple[int, PackRef]] = {}
    index_of: dict[ChunkId, int] = {}
    located: list[FrameRef] = []
    for frame in frames:
        for link in frame.closure():
            if link.frame.chunk_id in index_of:
                continue
            pack_index, _ = packs.setdefault(link.pack.pack_id, (len(packs), link.pack))
            base = -1 if link.base is None else index_of[link.base.frame.chunk_id]
            index_of[link.frame.chunk_id] = len(located)
            # The base may be located by an older frame of the same chunk, which has another depth.
            depth = 0 if base < 0 else located[base].depth + 1
            located.append(replace(link.frame, pack=pack_index, base=base, depth=depth))
    return [ref for _, ref in packs.values()], located


class ChunkIndex:
    """Chunk id to frame, for the newest manifests only."""

    def __init__(self, manifests_max: int = MANIFESTS_INDEXED_MAX) -> None:
        self.manifests_max = manifests_max
        self._pinned: dict[ChunkId, LocatedFrame] = {}
        self._manifests: deque[dict[ChunkId, LocatedFrame]] = deque(maxlen=manifests_max)

    def __len__(self) -> int:
        return len({chunk_id for frames in self._tables() for chunk_id in frames})

    def add(self, manifest: Manifest) -> None:
        """Index the local frames of an acknowledged manifest. The oldest manifest leaves the index."""
        self._manifests.append(_frames_of(manifest))

    def pin(self, manifest: Manifest) -> None:
        """Index a manifest until another one is pinned. A restored state is what training continues from."""
        self._pinned = _frames_of(manifest)

    def _tables(self) -> Iterator[dict[ChunkId, LocatedFrame]]:
        yield from reversed(self._manifests)
        yield self._pinned

    def find(self, chunk_id: ChunkId) -> LocatedFrame | None:
        """Return the newest indexed frame of a chunk."""
        for frames in self._tables():
            found = frames.get(chunk_id)
            if found is not None:
                return found
        return None

    def packs(self) -> dict[PackId, int]:
        """Return id and size of the packs of all indexed frames."""
        return {link.pack.pack_id: link.pack.nbytes for frames in self._tables() for link in frames.values()}

    def forget_packs(self, pack_ids: Iterable[PackId]) -> None:
        """Remove every frame that is in one of these packs or has a base in one."""
        gone = set(pack_ids)
        if not gone:
            return
        for frames in self._tables():
            for chunk_id in [
                chunk_id
                for chunk_id, frame in frames.items()
                if any(link.pack.pack_id in gone for link in frame.closure())
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
    return {located.frame.chunk_id: located for located in frames.values()}
