"""Decide, without moving a byte, how each tensor will be stored, and what a restore has to read.

Pure: no files, no clock, no randomness. The same state and policy give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckstore.config import KIB, Limits
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.manifest import FrameRef, Manifest
from ckstore.ids import ChunkId
from ckstore.tensor import Piece, StorageSpec

SHARED_NBYTES_MAX = 256 * KIB
"""Storages below this size share chunks: a chunk of their own would cost a frame header and a read each."""


class StorageShape(Protocol):
    """What the plan needs to know of a storage."""

    @property
    def nbytes(self) -> int:
        """Bytes to store."""
        ...

    @property
    def element_width(self) -> int:
        """Bytes of one element: 1, 2, 4 or 8."""
        ...

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A range of one storage."""

    storage: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk to be made: where its bytes come from, in order."""

    nbytes: int
    element_width: int
    is_float: bool
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """Chunks in the order in which they are written, and each storage's pieces of them."""

    chunks: tuple[ChunkPlan, ...]
    storages: tuple[StorageSpec, ...]

    @property
    def nbytes(self) -> int:
        """Plain bytes of the state."""
        return sum(chunk.nbytes for chunk in self.chunks)


def plan_commit(storages: Sequence[StorageShape], limits: Limits) -> CommitPlan:
    """Cut storages into chunks at element boundaries; small ones of one kind share chunks, in tree order."""
    planner = _Planner(limits.chunk_nbytes_max)
    for index, storage in enumerate(storages):
        planner.add(index, storage)
    chunks = tuple(chunk.frozen() for chunk in planner.chunks)
    specs = tuple(
        StorageSpec(
            nbytes=storage.nbytes,
            element_width=storage.element_width,
            is_float=storage.is_float,
            pieces=tuple(planner.pieces[index]),
        )
        for index, storage in enumerate(storages)
    )
    return CommitPlan(chunks, specs)


@dataclass(slots=True)
class _Draft:
    element_width: int
    is_float: bool
    nbytes: int
    sources: list[Source]

    def frozen(self) -> ChunkPlan:
        return ChunkPlan(self.nbytes, self.element_width, self.is_float, tuple(self.sources))


class _Planner:
    def __init__(self, chunk_nbytes_max: int) -> None:
        self._chunk_nbytes_max = chunk_nbytes_max
        self.chunks: list[_Draft] = []
        self.pieces: dict[int, list[Piece]] = {}
        self._open: dict[tuple[int, bool], int] = {}

    def add(self, index: int, storage: StorageShape) -> None:
        self.pieces[index] = []
        if 0 < storage.nbytes < SHARED_NBYTES_MAX:
            self._add_shared(index, storage)
            return
        step = self._chunk_nbytes_max - self._chunk_nbytes_max % storage.element_width
        for offset in range(0, storage.nbytes, step):
            nbytes = min(step, storage.nbytes - offset)
            draft = _Draft(storage.element_width, storage.is_float, nbytes, [Source(index, offset, nbytes)])
            self.pieces[index].append(Piece(len(self.chunks), 0, nbytes))
            self.chunks.append(draft)

    def _add_shared(self, index: int, storage: StorageShape) -> None:
        kind = (storage.element_width, storage.is_float)
        at = self._open.get(kind)
        if at is None or self.chunks[at].nbytes + storage.nbytes > self._chunk_nbytes_max:
            at = self._open[kind] = len(self.chunks)
            self.chunks.append(_Draft(storage.element_width, storage.is_float, 0, []))
        draft = self.chunks[at]
        self.pieces[index].append(Piece(at, draft.nbytes, storage.nbytes))
        draft.sources.append(Source(index, 0, storage.nbytes))
        draft.nbytes += storage.nbytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a decoded chunk goes: bytes ``[chunk_offset, chunk_offset + nbytes)``."""

    storage: int
    storage_offset: int
    chunk_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to be restored, and every place it goes to."""

    chunk: int
    frame: FrameRef
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Frames that lie close together in one pack and are fetched by one read."""

    pack: int
    offset: int
    nbytes: int
    reads: tuple[ChunkRead, ...]


GAP_NBYTES_MAX = 64 * KIB
"""Reading this much for nothing costs less than a read of its own on every device we measured."""


def plan_restore(manifest: Manifest, storages: Iterable[int], *, group_nbytes_max: int) -> list[FrameGroup]:
    """List what must be read for these storages, in the order in which it lies on disk."""
    targets: dict[int, list[Target]] = {}
    for index in storages:
        position = 0
        for piece in manifest.storages[index].pieces:
            targets.setdefault(piece.chunk, []).append(Target(index, position, piece.offset, piece.nbytes))
            position += piece.nbytes
    frame_of = {frame.chunk_id: frame for frame in manifest.frames}
    reads = [
        ChunkRead(chunk, frame_of[ChunkId(manifest.chunks[chunk].chunk_id)], tuple(places))
        for chunk, places in targets.items()
    ]
    reads.sort(key=lambda read: (read.frame.pack, read.frame.offset))
    return list(_group(reads, group_nbytes_max))


def _group(reads: list[ChunkRead], group_nbytes_max: int) -> Iterable[FrameGroup]:
    group: list[ChunkRead] = []
    begin = end = 0
    for read in reads:
        frame_end = read.frame.offset + FRAME_HEADER_NBYTES + read.frame.stored_nbytes
        fits = (
            group
            and group[0].frame.pack == read.frame.pack
            and read.frame.offset - end <= GAP_NBYTES_MAX
            and max(end, frame_end) - begin <= group_nbytes_max
        )
        if group and not fits:
            yield FrameGroup(group[0].frame.pack, begin, end - begin, tuple(group))
            group = []
        if not group:
            begin = read.frame.offset
            end = begin
        group.append(read)
        end = max(end, frame_end)
    if group:
        yield FrameGroup(group[0].frame.pack, begin, end - begin, tuple(group))
