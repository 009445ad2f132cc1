"""A stored checkpoint, seen as a commit sees a state: storages whose bytes are read from packs as they are asked for.

Invariants:
- What ``read`` returns was checked against the chunk's identity; it stays valid until this thread has read from two
  other chunks.
- A thread holds two chunks, a decoder and a read buffer, and nothing that grows with the state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.codec.frame_decoder import FrameDecoder, decoder_nbytes
from ckstore.commit.chunking import ChunkPlan, CommitPlan, Source
from ckstore.config import Limits
from ckstore.delta.chain_reader import ChainReader, chain_reader_nbytes
from ckstore.errors import UnsupportedError
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.tensors import StorageSpec
from ckstore.hashing import ChunkId
from ckstore.io.buffers import map_zeros
from ckstore.state.capture import Captured
from ckstore.store.repository import Repository

HELD_COUNT = 2
"""Chunks that a thread holds: one that is coded, and the master whose rounding it may be."""


def reader_nbytes(limits: Limits) -> int:
    """Return the memory that one thread that reads may use, in bytes."""
    return decoder_nbytes(limits.chunk_nbytes_max) + chain_reader_nbytes(limits) + HELD_COUNT * limits.chunk_nbytes_max


class StoredState:
    """The state of one checkpoint, read chunk by chunk, from any number of threads; ``close`` lets go of its packs."""

    def __init__(self, repository: Repository, manifest: Manifest) -> None:
        self.manifest = manifest
        self._repository = repository
        self._frame_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
        self._threads: list[_Thread] = []
        self._local = threading.local()
        self.storages = [_StoredStorage(self, spec) for spec in manifest.storages]

    def close(self) -> None:
        """Let go of packs and memory."""
        for thread in self._threads:
            thread.reader.close()
            thread.held.clear()

    def captured(self) -> Captured:
        """Return the state as a commit takes it."""
        manifest = self.manifest
        return Captured(manifest.tree, [], list(manifest.tensors), list(self.storages), [])

    def chain(self, chunk: int) -> list[tuple[PackRef, FrameRef]]:
        """Return the frame of a chunk and the bases that it needs, deepest base first."""
        links = []
        index = self._frame_of[ChunkId(self.manifest.chunks[chunk].chunk_id)]
        while index >= 0:
            frame = self.manifest.frames[index]
            links.append((self.manifest.packs[frame.pack], frame))
            index = frame.base
        return links[::-1]

    def chunk(self, chunk: int) -> memoryview:
        """Return the plain bytes of a chunk; valid until this thread has read two other ones.

        Raises:
            CorruptError: They cannot be read, or are not what was committed.
        """
        return self._held(chunk, self.chain(chunk), self.manifest.chunks[chunk].nbytes)

    def base(self, chunk: int) -> memoryview:
        """Return the plain bytes of the base of a chunk that is stored as a difference; valid as those of ``chunk``.

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
            buffer = thread.room()
            thread.reader.read(chain, nbytes, buffer[:nbytes])
        else:
            buffer = thread.held.pop(key)
        # The one used last stands last.
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
    """What one thread reads with, and the chunks it holds, the one used last at the end."""

    def __init__(self, repository: Repository) -> None:
        chunk_nbytes_max = repository.limits.chunk_nbytes_max
        self.reader = ChainReader(repository, FrameDecoder(chunk_nbytes_max))
        self.held: dict[int, memoryview] = {}
        self._chunk_nbytes_max = chunk_nbytes_max

    def room(self) -> memoryview:
        """Return a buffer that holds nothing that is wanted any more."""
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
        """Return bytes ``lo`` to ``hi``: of the chunk that holds them, or a copy where they lie in several."""
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


def plan_of(manifest: Manifest) -> CommitPlan:
    """Return the plan by which this checkpoint was cut into chunks.

    Raises:
        UnsupportedError: Its tensors do not cover all of its chunks, so that no state makes these chunks.
    """
    places: dict[int, dict[int, Source]] = {}
    for index, storage in enumerate(manifest.storages):
        position = 0
        for piece in storage.pieces:
            # Where equal chunks of several tensors are one, the first that has a place tells.
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
