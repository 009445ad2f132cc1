"""Hash all chunks of a commit, and encode, check and write those that are not known.

Threads work on chunks in parallel and take turns, in plan order, to get a place in the pack: the same
commit makes the same pack on any number of threads and with any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckstore import kernels
from ckstore.codec.chain import Encoded
from ckstore.config import MIB, Policy, fit_memory
from ckstore.format.frame import FrameHeader
from ckstore.format.manifest import FrameRef, PackRef
from ckstore.ids import NO_BASE, ChunkId, PackId, chunk_id_of, new_hasher
from ckstore.io.buffers import BufferPool
from ckstore.pipeline import ByteSource, ChunkWorker, require_identity, worker_nbytes
from ckstore.plan import ChunkPlan, CommitPlan
from ckstore.store.known import KnownFrame
from ckstore.store.packer import FramePlace, Packer
from ckstore.store.parts import Parts
from ckstore.workers import Turns, run_in_turns

WRITE_BLOCK_NBYTES = 8 * MIB
"""Measured: larger blocks gain nothing on the devices we have, smaller ones cost system calls."""

WRITE_BLOCKS = 12
"""Eight in flight, and some being filled; more gained nothing."""

WRITE_BLOCKS_MIN = 3
"""A frame may span two blocks while a third one is being written."""


@dataclass(slots=True)
class Stored:
    """Where every chunk of the plan lies after writing, and what was new."""

    frames: list[KnownFrame]
    chunks_new: int
    nbytes_written: int
    pack_names: list[str]


@dataclass(slots=True)
class _NewFrame:
    place: FramePlace
    chunk_id: ChunkId


@dataclass(slots=True, eq=False)
class ChunkWriter:
    """Hashes all chunks of a plan, and encodes and writes those that are not known."""

    parts: Parts
    plan: CommitPlan
    storages: Sequence[ByteSource]
    policy: Policy
    _results: list[KnownFrame | _NewFrame | None] = field(init=False)
    _placed: dict[ChunkId, _NewFrame] = field(init=False, default_factory=dict)
    _workers: list[ChunkWorker | None] = field(init=False)
    _turns: Turns = field(init=False, default_factory=Turns)
    _thread_count: int = field(init=False)
    _packer: Packer = field(init=False)
    _pool: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        policy, limits = self.policy, self.parts.limits
        self._thread_count, block_count = fit_memory(
            policy.thread_count,
            worker_nbytes(limits.chunk_nbytes_max),
            WRITE_BLOCK_NBYTES,
            buffers_wanted=WRITE_BLOCKS,
            buffers_min=WRITE_BLOCKS_MIN,
            memory_nbytes_max=policy.memory_nbytes_max,
        )
        self._results = [None] * len(self.plan.chunks)
        self._workers = [None] * self._thread_count
        self._pool = BufferPool(WRITE_BLOCK_NBYTES, block_count)
        self._packer = Packer(
            self.parts.backend,
            self._pool,
            store_id=self.parts.store_id,
            nbytes_expected=self.parts.nbytes_expected(self.plan.nbytes),
            copy=kernels.copy_bytes,
        )

    def run(self) -> None:
        """Hash, encode, check and write every chunk."""
        run_in_turns(
            len(self.plan.chunks),
            self._thread_count,
            self._store_chunk,
            self._turns,
            on_failure=self._packer.fail,
        )

    def flush(self) -> Stored:
        """Make the packs durable; return where every chunk lies."""
        refs = {ref.pack_id: ref for ref in self._packer.finish()}
        self._pool.close()
        new = {chunk_id: _located(frame, refs) for chunk_id, frame in self._placed.items()}
        frames = []
        for result in self._results:
            assert result is not None, "a chunk was neither found nor written"
            frames.append(new[result.chunk_id] if isinstance(result, _NewFrame) else result)
        return Stored(frames, len(new), sum(ref.nbytes for ref in refs.values()), self._packer.pack_names)

    def abandon(self) -> None:
        """Give up what was written; nothing refers to it."""
        self._packer.abandon()
        self._pool.close()

    def _store_chunk(self, index: int, thread: int) -> None:
        worker = self._workers[thread]
        if worker is None:
            worker = self._workers[thread] = ChunkWorker(self.parts.limits.chunk_nbytes_max)
        chunk = self.plan.chunks[index]
        # A frame that will not be decoded again must be coded from the very bytes that were hashed: a source that
        # changes in between, and back, would poison this identity for every later commit that has these bytes.
        plain = worker.gather(chunk, self.storages, is_private=not self.policy.verify_encoded)
        chunk_id = chunk_id_of(plain)
        known = self.parts.known.find(chunk_id)
        if known is not None or chunk_id in self._placed:
            with self._turns.turn(index):
                self._results[index] = known or self._placed[chunk_id]
            return
        encoded = worker.encode(plain, chunk, self.policy.compression)
        with self._turns.turn(index):
            # An earlier chunk with the same bytes may have been placed while this one was encoded.
            frame = self._placed.get(chunk_id)
            is_first = frame is None
            if frame is None:
                frame = self._placed[chunk_id] = _NewFrame(self._packer.place(encoded.nbytes), chunk_id)
            self._results[index] = frame
        if is_first:
            self._fill(frame, encoded, worker, chunk)

    def _fill(self, frame: _NewFrame, encoded: Encoded, worker: ChunkWorker, chunk: ChunkPlan) -> None:
        header = FrameHeader(
            chunk_id=frame.chunk_id,
            base_id=NO_BASE,
            plain_nbytes=chunk.nbytes,
            stored_nbytes=encoded.nbytes,
            element_width=encoded.width,
            steps=encoded.steps,
            payload_xxh3=0,
        )

        # A plain payload is its own decoding: it is hashed again piece by piece, as it is copied.
        hasher = None if encoded.steps else new_hasher()

        def check(payload: Sequence[memoryview]) -> None:
            if hasher is not None:
                require_identity(hasher.digest(), frame.chunk_id)
            elif self.policy.verify_encoded:
                require_identity(worker.identity_of_payload(payload, encoded, chunk), frame.chunk_id)

        watch = None if hasher is None else hasher.update
        self._packer.fill(frame.place, header, encoded.parts, check, watch=watch)


def _located(frame: _NewFrame, refs: dict[PackId, PackRef]) -> KnownFrame:
    place = frame.place
    # The pack's number is given when the manifest is put together.
    ref = FrameRef(frame.chunk_id, pack=0, offset=place.offset, stored_nbytes=place.stored_nbytes, base=-1, depth=0)
    return KnownFrame(ref, refs[place.pack.pack_id], base=None)
