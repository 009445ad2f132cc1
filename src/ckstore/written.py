"""What a commit writes of its chunks: coded ones, frames that have a place, and what became of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.format.manifest import FrameRef, Loss, PackRef
from ckstore.forms import Encoded
from ckstore.ids import NO_BASE, ChunkId, PackId
from ckstore.store.known import KnownFrame
from ckstore.store.packer import FramePlace


@dataclass(slots=True)
class Stored:
    """Where every chunk of the plan lies after writing, and what was new.

    Args:
        frames: The frame of each chunk of the plan, with its bases.
        is_new: Whether this commit wrote it.
        is_derived: Whether it is stored as the rounding of another chunk.
        payload_nbytes: Payload bytes of all new frames.
        nbytes_written: Bytes of the packs.
        warnings: What the caller should look at.
        losses: What is not stored as it was.
    """

    frames: list[KnownFrame]
    is_new: list[bool]
    is_derived: list[bool]
    chunks_new: int
    chunks_delta: int
    chunks_derived: int
    chunks_lossy: int
    payload_nbytes: int
    nbytes_written: int
    pack_names: list[str]
    warnings: list[str]
    losses: tuple[Loss, ...] = ()


@dataclass(slots=True, eq=False)
class NewFrame:
    """A frame that this commit writes, and the one that it needs as base."""

    place: FramePlace
    chunk_id: ChunkId
    base: KnownFrame | NewFrame | None
    is_derived: bool
    is_lossy: bool


@dataclass(slots=True)
class Coded:
    """An encoded chunk with the base that it needs: its frame, and its plain bytes for the check."""

    encoded: Encoded
    base: KnownFrame | NewFrame | None = None
    base_plain: memoryview | None = None
    is_derived: bool = False
    is_lossy: bool = False
    plain_checksum: int | None = None
    """Of the very bytes that were hashed, where nobody can change those."""

    @property
    def base_id(self) -> ChunkId:
        """What the header names."""
        return NO_BASE if self.base is None else frame_id(self.base)


def frame_id(frame: KnownFrame | NewFrame) -> ChunkId:
    """Return the chunk that a frame holds."""
    return frame.chunk_id if isinstance(frame, NewFrame) else frame.frame.chunk_id


def depth_of(frame: KnownFrame | NewFrame) -> int:
    """Return how many bases a frame needs."""
    if isinstance(frame, KnownFrame):
        return frame.frame.depth
    return 0 if frame.base is None else depth_of(frame.base) + 1


def located(frame: NewFrame, refs: dict[PackId, PackRef], done: dict[ChunkId, KnownFrame]) -> KnownFrame:
    """Return where a frame lies, and its bases with it, once every pack is written.

    Args:
        frame: The frame.
        refs: What a manifest says of each pack.
        done: What was located before; this one is added.
    """
    if frame.chunk_id in done:
        return done[frame.chunk_id]
    base = located(frame.base, refs, done) if isinstance(frame.base, NewFrame) else frame.base
    # The numbers of the pack and of the base are given when the manifest is put together.
    ref = FrameRef(
        frame.chunk_id,
        pack=0,
        offset=frame.place.offset,
        stored_nbytes=frame.place.stored_nbytes,
        base=-1,
        depth=0 if base is None else base.frame.depth + 1,
    )
    found = done[frame.chunk_id] = KnownFrame(ref, refs[frame.place.pack.pack_id], base)
    return found
