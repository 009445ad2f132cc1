"""Cut the storages of a state into chunks, and say how each chunk is to be stored.

Large storages are cut at element boundaries. Small ones of the same kind share a chunk. Pure: the same shapes and
limits give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckstore.config import KIB, Limits
from ckstore.format.tensors import Piece, StorageSpec, Table
from ckstore.store.chunk_index import LocatedFrame

SHARED_NBYTES_MAX = 256 * KIB
"""Storages below this size share chunks, because a chunk of their own would cost a frame header and a read each."""


class StorageShape(Protocol):
    """What the plan needs to know about a storage."""

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


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk, and the ranges of storages that its bytes come from, in order."""

    nbytes: int
    element_width: int
    is_float: bool
    sources: tuple[Source, ...]

    @cached_property
    def columns(self) -> NDArray[np.uint64]:
        """The sources as an array of shape (4, n): storage, offset, bytes, and position in the chunk."""
        rows = np.empty((4, len(self.sources)), np.uint64)
        rows[:3] = np.array([(each.storage, each.offset, each.nbytes) for each in self.sources], np.uint64).T
        rows[3] = np.cumsum(rows[2]) - rows[2]
        return rows


@dataclass(frozen=True)
class CommitPlan:
    """The chunks in the order in which they are written, and the pieces of them that make up each storage.

    Args:
        chunks: The chunks.
        storages: The storages.
        starts: Where each storage begins in the storage of the checkpoint: not 0 for a shard of a tensor that many
            ranks store. Empty: at 0.
    """

    chunks: tuple[ChunkPlan, ...]
    storages: tuple[StorageSpec, ...]
    starts: tuple[int, ...] = ()

    def position_of(self, source: Source) -> int:
        """Return where a range of a storage begins in the storage of the checkpoint."""
        return source.offset + (self.starts[source.storage] if self.starts else 0)

    @cached_property
    def chunks_of(self) -> list[tuple[int, ...]]:
        """The chunks of each storage."""
        return chunks_of(self.storages)

    @property
    def nbytes(self) -> int:
        """Plain bytes of the state."""
        return sum(chunk.nbytes for chunk in self.chunks)


def chunks_of(storages: Sequence[StorageSpec]) -> list[tuple[int, ...]]:
    """Return the chunks of each storage. Storages with the same chunks have the same tuple object."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = (tuple([piece.chunk for piece in storage.pieces]) for storage in storages)
    return [known.setdefault(each, each) for each in found]


def plan_commit(
    storages: Sequence[StorageShape],
    limits: Limits,
    *,
    unshared: frozenset[int] = frozenset(),
    starts: Sequence[int] = (),
    edges: Mapping[int, Sequence[int]] | None = None,
) -> CommitPlan:
    """Cut storages into chunks at element boundaries. Small ones of one kind share chunks, in their given order.

    Args:
        storages: The storages of the state, in the order of its tree.
        limits: Bounds of the store.
        unshared: Indices of storages that get chunks of their own even if they are small.
        starts: Where each storage begins in the storage of the checkpoint; empty: at 0. Chunks end at multiples of
            their length there, so that most of them stay the same when the ranks hold other shards.
        edges: Further places at which chunks of a storage end, by storage: where those of its base begin.
    """
    planner = _Planner(limits.chunk_nbytes_max)
    for index, storage in enumerate(storages):
        start, further = starts[index] if starts else 0, edges.get(index, ()) if edges else ()
        planner.add(index, storage, start=start, edges=further, is_unshared=index in unshared)
    chunks = tuple(chunk.frozen() for chunk in planner.chunks)
    specs = Table(
        StorageSpec(
            nbytes=storage.nbytes,
            element_width=storage.element_width,
            is_float=storage.is_float,
            pieces=tuple(planner.pieces[index]),
        )
        for index, storage in enumerate(storages)
    )
    return CommitPlan(chunks, specs, tuple(starts))


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """How to store one chunk of the plan if the store does not have it.

    Args:
        base: The frame that it is coded against; None to code it whole.
        is_unsampled: The base has no sample, so compare samples of both before coding against it.
        master: The chunk of the plan that it may be a rounding of.
        is_held: Hold its plain bytes, because the next commit will need them as a base.
    """

    base: LocatedFrame | None = None
    is_unsampled: bool = False
    master: int | None = None
    is_held: bool = False


WHOLE = StoragePlan()


@dataclass(slots=True)
class _ChunkDraft:
    element_width: int
    is_float: bool
    nbytes: int
    sources: list[Source]

    def frozen(self) -> ChunkPlan:
        return ChunkPlan(self.nbytes, self.element_width, self.is_float, tuple(self.sources))


class _Planner:
    def __init__(self, chunk_nbytes_max: int) -> None:
        self._chunk_nbytes_max = chunk_nbytes_max
        self.chunks: list[_ChunkDraft] = []
        self.pieces: dict[int, list[Piece]] = {}
        self._open: dict[tuple[int, bool], int] = {}

    def add(self, index: int, storage: StorageShape, *, start: int, edges: Sequence[int], is_unshared: bool) -> None:
        self.pieces[index] = []
        if not is_unshared and 0 < storage.nbytes < _limit_for(storage, min(SHARED_NBYTES_MAX, self._chunk_nbytes_max)):
            self._add_shared(index, storage)
            return
        step = grid_nbytes(storage, self._chunk_nbytes_max)
        places = sorted({edge for edge in edges if 0 < edge < storage.nbytes and edge % storage.element_width == 0})
        ends = iter([*places, storage.nbytes])
        offset, end = 0, 0
        while offset < storage.nbytes:
            end = next(ends) if offset == end else end
            nbytes = min(step - (start + offset) % step, end - offset)
            draft = _ChunkDraft(storage.element_width, storage.is_float, nbytes, [Source(index, offset, nbytes)])
            self.pieces[index].append(Piece(len(self.chunks), 0, nbytes))
            self.chunks.append(draft)
            offset += nbytes

    def _add_shared(self, index: int, storage: StorageShape) -> None:
        kind = (storage.element_width, storage.is_float)
        at = self._open.get(kind)
        if at is None or self.chunks[at].nbytes + storage.nbytes > self._chunk_nbytes_max:
            at = self._open[kind] = len(self.chunks)
            self.chunks.append(_ChunkDraft(storage.element_width, storage.is_float, 0, []))
        draft = self.chunks[at]
        self.pieces[index].append(Piece(at, draft.nbytes, storage.nbytes))
        draft.sources.append(Source(index, 0, storage.nbytes))
        draft.nbytes += storage.nbytes


def grid_nbytes(storage: StorageShape, chunk_nbytes_max: int) -> int:
    """Return the distance of the places at which a storage is cut: the length of most of its chunks."""
    step = _limit_for(storage, chunk_nbytes_max)
    return step - step % storage.element_width


def _limit_for(storage: StorageShape, nbytes: int) -> int:
    """Return the limit on a chunk's bytes for one kind of storage: half of it for floats of two bytes.

    So a chunk of bf16 weights holds the same elements as the chunk of their fp32 masters, whose rounding it may be.
    """
    return nbytes // 2 if storage.is_float and storage.element_width == 2 else nbytes
