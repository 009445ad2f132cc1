"""Read a stored checkpoint as a state, and code it again: what repack, demote, diff and stats share.

A stored state has the interface of a captured one: storages that return bytes, read from packs on demand.

Invariants:
- Bytes from ``read`` were checked against the chunk id. They stay valid until the same thread has read two other
  chunks.
- A thread holds two chunks, a decoder and a read buffer. Memory does not grow with the state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.commit.chunking import ChunkPlan, CommitPlan, Source
from ckstore.config import MEMORY_NBYTES_MIN, Limits, Policy
from ckstore.delta.base_cache import first_paths
from ckstore.delta.chain_reader import ChainReader
from ckstore.errors import UnsupportedError
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.paths import ManifestName
from ckstore.format.tensors import StorageSpec
from ckstore.hashing import ChunkId
from ckstore.io.buffers import map_zeros
from ckstore.state.capture import Captured, Structure
from ckstore.store.chunk_index import ChunkIndex
from ckstore.store.memory_budget import REREAD, MemoryBudget
from ckstore.store.repository import Repository

HELD_COUNT = 2
"""Chunks per thread, which ``REREAD`` counts: the one being coded, and the fp32 master that it may be a rounding of."""


class StoredState:
    """The state of one checkpoint, read chunk by chunk. Thread-safe. ``close`` closes its packs."""

    def __init__(self, repository: Repository, manifest: Manifest) -> None:
        self.manifest = manifest
        self._repository = repository
        self._frame_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
        self._threads: list[_Thread] = []
        self._local = threading.local()
        self.storages = [_StoredStorage(self, spec) for spec in manifest.storages]

    def close(self) -> None:
        """Close packs and free memory."""
        for thread in self._threads:
            thread.reader.close()
            thread.held.clear()

    def captured(self) -> Captured:
        """Return the state in the form that a commit takes."""
        manifest, structure = self.manifest, Structure()
        # The paths by which bases are named: without the root of many ranks, and without the nodes around tiles.
        storages = [tensor.storage for tensor in manifest.tensors]
        structure.once("paths", lambda: first_paths(plain_manifest(manifest).tree, storages))
        return Captured(manifest.tree, [], list(manifest.tensors), list(self.storages), [], structure)

    def chain(self, chunk: int) -> list[tuple[PackRef, FrameRef]]:
        """Return the frame of a chunk after its bases, deepest base first."""
        chain_frames = []
        index = self._frame_of[ChunkId(self.manifest.chunks[chunk].chunk_id)]
        while index >= 0:
            frame = self.manifest.frames[index]
            chain_frames.append((self.manifest.packs[frame.pack], frame))
            index = frame.base
        return chain_frames[::-1]

    def chunk(self, chunk: int) -> memoryview:
        """Return the plain bytes of a chunk. They stay valid until this thread has read two other chunks.

        Raises:
            CorruptError: They cannot be read, or are not what was committed.
        """
        return self._held(chunk, self.chain(chunk), self.manifest.chunks[chunk].nbytes)

    def base(self, chunk: int) -> memoryview:
        """Return the plain bytes of the base of a delta. They stay valid as those of ``chunk``.

        Raises:
            CorruptError: They cannot be read, or are not what was committed.
        """
        return self._held(-1 - chunk, self.chain(chunk)[:-1], self.manifest.chunks[chunk].nbytes)

    def _held(self, key: int, chain: list[tuple[PackRef, FrameRef]], nbytes: int) -> memoryview:
        thread = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = _Thread(self._repository)
            self._threads.append(thread)
        if key not in thread.held:
            buffer = thread.free_buffer()
            thread.reader.read(chain, nbytes, buffer[:nbytes])
        else:
            buffer = thread.held.pop(key)
        # The most recently used chunk is last.
        thread.held[key] = buffer
        return buffer[:nbytes]


@contextmanager
def stored_state(repository: Repository, manifest: Manifest) -> Iterator[StoredState]:
    """Open the state of a checkpoint for reading."""
    state = StoredState(repository, manifest)
    try:
        yield state
    finally:
        state.close()


class _Thread:
    """The reader of one thread and its held chunks, most recently used last."""

    def __init__(self, repository: Repository) -> None:
        chunk_nbytes_max = repository.limits.chunk_nbytes_max
        self.reader = ChainReader(repository, FrameDecoder(chunk_nbytes_max))
        self.held: dict[int, memoryview] = {}
        self._chunk_nbytes_max = chunk_nbytes_max

    def free_buffer(self) -> memoryview:
        """Return a free buffer, that of the least recently used chunk if necessary."""
        if len(self.held) < HELD_COUNT:
            return map_zeros(self._chunk_nbytes_max)
        return self.held.pop(next(iter(self.held)))


class _StoredStorage:
    """One storage of a checkpoint."""

    is_host = True

    def __init__(self, state: StoredState, spec: StorageSpec) -> None:
        self._state = state
        self.nbytes = spec.nbytes
        self.element_width = spec.element_width
        self.is_float = spec.is_float
        self._pieces = spec.pieces

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``: a view of the chunk, or a copy if they span several chunks."""
        found: list[bytes] = []
        begin = 0
        for piece in self._pieces:
            end = begin + piece.nbytes
            if begin < hi and lo < end:
                first, last = max(lo, begin) - begin, min(hi, end) - begin
                part = self._state.chunk(piece.chunk)[piece.offset + first : piece.offset + last]
                if hi <= end and not found:
                    return part
                found.append(bytes(part))
            begin = end
        return memoryview(b"".join(found))


class IsolatedRepository(Repository):
    """The same store with a chunk index of its own, so that the index of the caller's handle does not change."""

    def __init__(self, repository: Repository, chunk_index: ChunkIndex) -> None:
        super().__init__(repository.backend, repository.record, repository.run, clock=repository.clock)
        self.chunk_index = chunk_index
        self.nbytes_planned = 0

    def nbytes_expected(self, nbytes: int) -> int:
        """Return how many bytes the plan expects to be written."""
        return min(nbytes, self.nbytes_planned)


def rewrite_policy(policy: Policy, limits: Limits, coding: MemoryBudget, **changes: Any) -> Policy:
    """Return the policy for coding stored chunks again, with memory reserved for reading.

    Args:
        policy: Threads and memory, as the caller has set them.
        limits: Size limits of the store.
        coding: Memory that one thread needs to code a chunk.
        changes: Other settings to replace.
    """
    memory_nbytes, reading_nbytes = policy.memory_nbytes_max, REREAD.nbytes(limits)
    # Each thread reads a chunk and its bases before it codes the chunk.
    threads = max(1, min(policy.thread_count, memory_nbytes // (reading_nbytes + coding.nbytes(limits))))
    return replace(
        policy,
        threads=threads,
        memory_nbytes_max=max(MEMORY_NBYTES_MIN, memory_nbytes - threads * reading_nbytes),
        verify_encoded=True,
        **changes,
    )


def is_replaced(repository: Repository, manifest: Manifest) -> bool:
    """Return whether the next generation of a checkpoint is in place."""
    header = manifest.header
    name = ManifestName(header.run, header.seq, header.step, header.generation + 1)
    return repository.backend.stat(name.path) is not None


def plan_of(manifest: Manifest) -> CommitPlan:
    """Return the plan by which this checkpoint was cut into chunks.

    Raises:
        UnsupportedError: Its tensors do not cover all of its chunks.
    """
    places: dict[int, dict[int, Source]] = {}
    for index, storage in enumerate(manifest.storages):
        position = 0
        for piece in storage.pieces:
            # If several tensors share a chunk, use the first location.
            places.setdefault(piece.chunk, {}).setdefault(piece.offset, Source(index, position, piece.nbytes))
            position += piece.nbytes
    chunks = []
    for index, spec in enumerate(manifest.chunks):
        sources = tuple(_tiling(places.get(index, {}), spec.nbytes))
        if sum(source.nbytes for source in sources) != spec.nbytes:
            raise UnsupportedError(f"the tensors of seq {manifest.header.seq} do not cover its chunks")
        chunks.append(ChunkPlan(spec.nbytes, spec.element_width, spec.is_float, sources))
    return CommitPlan(tuple(chunks), manifest.storages)


def _tiling(places: dict[int, Source], nbytes: int) -> Iterator[Source]:
    position = 0
    while position < nbytes and (source := places.get(position)) is not None and source.nbytes:
        yield source
        position += source.nbytes
