"""Hash all chunks of a commit; encode, check and write those that the store does not have.

Threads process chunks in parallel, and reserve space in a pack in the order of the plan. So one commit makes the same
packs on any number of threads and with any I/O engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import Encoded
from ckstore.commit.chunking import ChunkPlan, CommitPlan, StoragePlan
from ckstore.commit.pipeline import (
    ByteSource,
    ChunkWorker,
    CodingThread,
    WriteBlocks,
    identity_and_checksum,
    require_identity,
)
from ckstore.concurrency import Step, ThreadLimit, Turns, noop, run_in_turns, run_uninterrupted
from ckstore.config import Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader
from ckstore.format.manifest import FrameRef, Loss, PackRef
from ckstore.format.wire import xxh3_64
from ckstore.hashing import NO_BASE, ChunkId, PackId, chunk_id_of
from ckstore.io.buffers import BufferPool
from ckstore.store.chunk_index import LocatedFrame
from ckstore.store.memory_budget import ENCODE, ENCODE_DELTA, MemoryBudget
from ckstore.store.pack_writer import FrameSlot, PackWriter
from ckstore.store.repository import Repository


@dataclass(slots=True)
class WriteResult:
    """Where each chunk of the plan is stored, and what was written.

    Args:
        frames: The frame of each chunk of the plan, with its bases.
        is_new: For each chunk of the plan, whether this commit wrote it.
        is_rounding: For each chunk of the plan, whether this commit wrote it as the rounding of another chunk.
        chunks_new: Number of new frames.
        chunks_delta: New frames that are differences from a base.
        chunks_derived: New frames that are roundings.
        chunks_lossy: New frames that are quantized.
        payload_nbytes: Payload bytes of all new frames.
        nbytes_written: Bytes of the packs.
        pack_names: Files of the packs.
        warnings: For the receipt.
        losses: The storages that are not stored exactly.
    """

    frames: list[LocatedFrame]
    is_new: list[bool]
    is_rounding: list[bool]
    chunks_new: int
    chunks_delta: int
    chunks_derived: int
    chunks_lossy: int
    payload_nbytes: int
    nbytes_written: int
    pack_names: list[str]
    warnings: list[str]
    losses: tuple[Loss, ...] = ()

    @property
    def frames_nbytes(self) -> int:
        """Bytes of all new frames, with their headers."""
        return self.payload_nbytes + FRAME_HEADER_NBYTES * self.chunks_new


@dataclass(slots=True, eq=False)
class PendingFrame:
    """A frame that this commit writes: its reserved space in a pack, and the frame of its base."""

    slot: FrameSlot
    chunk_id: ChunkId
    base: LocatedFrame | PendingFrame | None
    is_rounding: bool
    is_lossy: bool


@dataclass(slots=True)
class EncodedChunk:
    """An encoded chunk, with the frame of its base and the base's plain bytes for the check.

    Args:
        encoded: Steps and payload.
        base: The frame of the base.
        base_plain: The plain bytes of the base.
        is_rounding: The chunk is stored as the rounding of its base.
        is_lossy: The chunk is quantized.
        plain_checksum: xxh3 of the bytes that were hashed, if it was computed with the chunk id.
    """

    encoded: Encoded
    base: LocatedFrame | PendingFrame | None = None
    base_plain: memoryview | None = None
    is_rounding: bool = False
    is_lossy: bool = False
    plain_checksum: int | None = None

    @property
    def base_id(self) -> ChunkId:
        """The base's chunk id, for the frame's header."""
        return NO_BASE if self.base is None else frame_id(self.base)


def frame_id(frame: LocatedFrame | PendingFrame) -> ChunkId:
    """Return the chunk id of a frame."""
    return frame.chunk_id if isinstance(frame, PendingFrame) else frame.frame.chunk_id


def depth_of(frame: LocatedFrame | PendingFrame) -> int:
    """Return how many bases a frame needs, one below the other."""
    if isinstance(frame, LocatedFrame):
        return frame.frame.depth
    return 0 if frame.base is None else depth_of(frame.base) + 1


def located(frame: PendingFrame, refs: dict[PackId, PackRef], done: dict[ChunkId, LocatedFrame]) -> LocatedFrame:
    """Return the location of a frame and of its bases, after every pack has been written.

    Args:
        frame: The frame.
        refs: The manifest's record of each pack.
        done: The frames located so far; this one is added.
    """
    if frame.chunk_id in done:
        return done[frame.chunk_id]
    base = located(frame.base, refs, done) if isinstance(frame.base, PendingFrame) else frame.base
    # The indices of pack and base are set when the manifest is built.
    ref = FrameRef(
        frame.chunk_id,
        pack=0,
        offset=frame.slot.offset,
        stored_nbytes=frame.slot.stored_nbytes,
        base=-1,
        depth=0 if base is None else base.frame.depth + 1,
    )
    found = done[frame.chunk_id] = LocatedFrame(ref, refs[frame.slot.pack.pack_id], base)
    return found


OPENING_NBYTES = 64 << 10
"""A chunk that begins with as many bytes of an earlier one is probably that one."""

ROUNDING_NBYTES = 1
"""Payload bytes of a rounding. No other payload of a large chunk is as short."""


@dataclass(slots=True, eq=False)
class ChunkWriter:
    """Hashes all chunks of a plan; encodes and writes those that the store does not have.

    Args:
        repository: The open run.
        plan: How the state is cut into chunks.
        storages: The storages of the state.
        policy: How to store it.
        plans: For each chunk of the plan, how to store it.
        bases: Chunks of the previous checkpoint. Receives chunks that the next commit may need.
        source_is_immutable: Nothing changes the storages during the commit, because they are in an arena.
        retained_slot: The ticket of the arena's slot, if its memory stays unchanged for as long as ``bases`` use it.
        thread_limit: How many threads may begin chunks; may change during the commit.
        blocks: Source of the blocks that packs are written through.
        check: Called before each chunk, on any thread. What it raises ends the work.
    """

    repository: Repository
    plan: CommitPlan
    storages: Sequence[ByteSource]
    policy: Policy
    plans: Sequence[StoragePlan]
    bases: BaseCache
    source_is_immutable: bool = field(default=False, kw_only=True)
    retained_slot: int | None = field(default=None, kw_only=True)
    thread_limit: ThreadLimit = field(default_factory=ThreadLimit, kw_only=True)
    blocks: WriteBlocks = field(default_factory=WriteBlocks, kw_only=True)
    check: Callable[[], None] = field(default=noop, kw_only=True)
    _results: list[LocatedFrame | PendingFrame | None] = field(init=False)
    _pending: dict[ChunkId, PendingFrame] = field(init=False, default_factory=dict)
    _workers: list[CodingThread | None] = field(init=False)
    _thread_count: int = field(init=False)
    _waiting_count: int = field(init=False)
    _packer: PackWriter = field(init=False)
    _pool: BufferPool = field(init=False)
    _warnings: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        policy = self.policy
        has_bases = any(choice.base for choice in self.plans)
        # A thread that reads a base waits for the disk. One more thread keeps the cores busy in that time.
        self._waiting_count = int(has_bases and policy.threads is None and policy.base_cache == "none")
        self._thread_count, block_count = self._thread_budget(has_bases=has_bases).fit_writing(
            policy, self.repository.limits, spare_threads=self._waiting_count
        )
        self._results = [None] * len(self.plan.chunks)
        self._workers = [None] * self._thread_count
        self._pool = self.blocks.take(block_count)
        self._packer = PackWriter(
            self.repository.backend,
            self._pool,
            store_id=self.repository.store_id,
            nbytes_expected=self.repository.nbytes_expected(self.plan.nbytes),
            copy=kernels.copy_bytes,
        )

    def _thread_budget(self, *, has_bases: bool) -> MemoryBudget:
        """Return the memory that one thread may use."""
        return ENCODE_DELTA if has_bases else ENCODE

    def write(self, watch: Callable[[str], AbstractContextManager[object]] = nullcontext) -> WriteResult:
        """Write every chunk. The packs are durable when this returns; after an error none of them is left.

        Args:
            watch: Measures the stages "write" and "flush".
        """
        try:
            with watch("write"):
                self.run()
            with watch("flush"):
                return run_uninterrupted(self.flush, on_interrupt=lambda error: None)
        except BaseException:
            self.abandon()
            raise

    def run(self) -> None:
        """Hash, encode, check and write every chunk."""
        indices = range(len(self.plan.chunks))
        try:
            self._store(indices)
        finally:
            for thread in self._workers:
                if thread is not None:
                    thread.reader.close()

    def _store(self, indices: Sequence[int]) -> None:
        """Store chunks as planned: roundings last, because they need the frames of their masters."""
        self._run([index for index in indices if self.plans[index].master is None])
        self._run([index for index in indices if self.plans[index].master is not None])

    def _run(self, indices: Sequence[int]) -> None:
        turns = Turns()

        def step(turn: int, thread: int) -> None:
            self._store_chunk(indices[turn], turns.turn(turn), thread)

        self._run_in_turns(len(indices), step, turns)

    def _run_in_turns(self, count: int, step: Step, turns: Turns) -> None:
        """Run a step for every index below ``count``, on as many threads as the thread limit allows."""

        def may_begin(thread_index: int) -> bool:
            return self.thread_limit.allows(thread_index - self._waiting_count)

        run_in_turns(count, self._thread_count, step, turns, on_failure=self._packer.fail, may_begin=may_begin)

    def flush(self) -> WriteResult:
        """Make the packs durable. Return where each chunk is stored."""
        refs = {ref.pack_id: ref for ref in self._packer.finish()}
        self.blocks.give_back(self._pool)
        new: dict[ChunkId, LocatedFrame] = {}
        frames, is_new, is_rounding = [], [], []
        for result in self._results:
            assert result is not None, "a chunk was neither found nor written"
            frames.append(located(result, refs, new) if isinstance(result, PendingFrame) else result)
            is_new.append(isinstance(result, PendingFrame))
            is_rounding.append(isinstance(result, PendingFrame) and result.is_rounding)
        # Frames without a reference stay in the pack but are not counted: those of tensors that could not be quantized.
        new_frames = [frame for chunk_id, frame in self._pending.items() if chunk_id in new]
        return WriteResult(
            frames=frames,
            is_new=is_new,
            is_rounding=is_rounding,
            chunks_new=len(new_frames),
            chunks_delta=sum(
                frame.base is not None and not (frame.is_rounding or frame.is_lossy) for frame in new_frames
            ),
            chunks_derived=sum(frame.is_rounding for frame in new_frames),
            chunks_lossy=sum(frame.is_lossy for frame in new_frames),
            payload_nbytes=sum(frame.slot.stored_nbytes for frame in new_frames),
            nbytes_written=sum(ref.nbytes for ref in refs.values()),
            pack_names=self._packer.pack_names,
            warnings=self._warnings,
        )

    def abandon(self) -> None:
        """Delete the packs that were begun; no manifest refers to them."""
        self._packer.abandon()
        self.blocks.give_back(self._pool)

    def _store_chunk(self, index: int, turn: AbstractContextManager[None], thread_index: int) -> None:
        self.check()
        thread = self._thread(thread_index)
        chunk, choice, worker = self.plan.chunks[index], self.plans[index], thread.worker
        private = self._private(chunk, choice, worker)
        plain = worker.gather(chunk, self.storages, private=private)
        is_steady = self.source_is_immutable or private is not None or len(chunk.sources) > 1
        known = None if is_steady or choice.master is not None else self._known_frame(plain)
        if known is not None:
            with turn:
                self._results[index] = known
            return
        chunk_id, checksum = identity_and_checksum(plain, None if is_steady else worker.piece)
        self.bases.keep_checksum(chunk_id, checksum)
        self._hold(chunk, choice, chunk_id, plain, checksum)
        existing = self.repository.chunk_index.find(chunk_id)
        is_of_old_master = existing is not None and self._is_rounding_of_old_master(existing, choice)
        if (existing is not None and not is_of_old_master) or chunk_id in self._pending:
            with turn:
                self._results[index] = self._pending.get(chunk_id) or existing
            return
        coded = self._encode(plain, chunk, choice, thread)
        if is_of_old_master and not coded.is_rounding:
            with turn:
                self._results[index] = existing
            return
        coded.plain_checksum = checksum
        with turn:
            frame, is_first = self._reserve_frame(index, chunk_id, coded)
        if is_first:
            self._fill(frame, coded, worker, chunk)

    def _known_frame(self, plain: memoryview) -> LocatedFrame | PendingFrame | None:
        """Return the frame of a chunk that begins like a stored one and is stored. Hashing it is then all it costs."""
        if not self.bases.is_familiar(xxh3_64(plain[:OPENING_NBYTES])):
            return None
        chunk_id = chunk_id_of(plain)
        return self._pending.get(chunk_id) or self.repository.chunk_index.find(chunk_id)

    def _hold(self, chunk: ChunkPlan, choice: StoragePlan, chunk_id: ChunkId, plain: memoryview, checksum: int) -> None:
        """Hold a chunk's bytes for the next commit if they will be needed: in the arena if possible, else as a copy."""
        can_stay = self._can_stay_in_slot(chunk)
        # An unchanged chunk is held in the newer slot from now on, so that the older slot can be freed.
        if choice.is_held or (can_stay and self.bases.is_staged(chunk_id)):
            self.bases.hold(chunk_id, plain, checksum=checksum, ticket=self.retained_slot if can_stay else None)

    def _can_stay_in_slot(self, chunk: ChunkPlan) -> bool:
        """Return True if a chunk is one piece of a retained slot, so that it can be held there without a copy."""
        return self.retained_slot is not None and len(chunk.sources) == 1

    def _thread(self, index: int) -> CodingThread:
        """Return the memory of one thread; it is created on first use."""
        thread = self._workers[index]
        if thread is None:
            thread = self._workers[index] = CodingThread.of(self.repository)
        return thread

    def _reserve_frame(self, index: int, chunk_id: ChunkId, coded: EncodedChunk) -> tuple[PendingFrame, bool]:
        """Reserve space for the chunk whose turn it is. Also return True if it is the first chunk with these bytes."""
        # An earlier chunk with the same bytes may have got its space while this one was encoded.
        frame = self._pending.get(chunk_id)
        is_first = frame is None
        if frame is None:
            slot = self._packer.reserve(coded.encoded.nbytes)
            frame = PendingFrame(slot, chunk_id, coded.base, coded.is_rounding, coded.is_lossy)
            self._pending[chunk_id] = frame
        self._results[index] = frame
        return frame, is_first

    def _is_rounding_of_old_master(self, existing: LocatedFrame, choice: StoragePlan) -> bool:
        """Return True if the existing frame rounds an fp32 master that this state no longer contains.

        Reusing it would keep the old master's frame alive and make every restore read it. Storing the chunk as a
        rounding of the new master costs one byte.
        """
        master = None if choice.master is None else self._results[choice.master]
        if master is None or existing.base is None:
            return False
        return existing.frame.stored_nbytes == ROUNDING_NBYTES and existing.base.frame.chunk_id != frame_id(master)

    def _private(self, chunk: ChunkPlan, choice: StoragePlan, worker: ChunkWorker) -> memoryview | None:
        """Return the memory that a chunk is copied to before it is hashed; None to hash the state's own memory.

        A frame that is not decoded for a check must be coded from exactly the bytes that were hashed. If the source
        changed in between, the frame would not match its chunk id, and every later commit with this chunk would
        refer to it. The same holds for bytes that later commits are coded against.
        """
        if choice.is_held and not self._can_stay_in_slot(chunk):
            return np.empty(chunk.nbytes, np.uint8).data
        is_sure = self.policy.verify_encoded or self.source_is_immutable
        return None if is_sure else worker.buffer("gathered")

    def _encode(self, plain: memoryview, chunk: ChunkPlan, choice: StoragePlan, thread: CodingThread) -> EncodedChunk:
        worker, compression = thread.worker, self.policy.compression
        coded: EncodedChunk | None = None
        if choice.master is not None:
            coded = self._encode_rounded(plain, choice.master, worker)
        elif choice.base is not None:
            # A chunk that is coded against a keyframe and is not held will be coded against it again.
            keep_for_later = self.policy.base_cache == "memory" and not choice.is_held and choice.base.base is None
            base_plain = self._base_plain(choice.base, chunk.nbytes, thread, keep_for_later=keep_for_later)
            if base_plain is not None and (not choice.is_unsampled or worker.prefers_delta(plain, base_plain, chunk)):
                encoded = worker.encode_delta(plain, base_plain, chunk, compression)
                coded = None if encoded is None else EncodedChunk(encoded, choice.base, base_plain)
        return coded or EncodedChunk(worker.encode(plain, chunk, compression))

    def _encode_rounded(self, plain: memoryview, master: int, worker: ChunkWorker) -> EncodedChunk | None:
        frame = self._results[master]
        if frame is None or depth_of(frame) >= self.repository.limits.depth_max:
            return None
        # A copy, whose chunk id is compared below: the frame must decode from the stored master.
        master_chunk = self.plan.chunks[master]
        base_plain = worker.gather(master_chunk, self.storages, private=worker.buffer("base"))
        encoded = chunk_codec.encode_rounded(plain, base_plain, scratch=worker.scratch)
        if encoded is None:
            return None
        require_identity([base_plain], frame_id(frame))
        return EncodedChunk(encoded, frame, base_plain, is_rounding=True)

    def _base_plain(
        self, base: LocatedFrame, nbytes: int, thread: CodingThread, *, keep_for_later: bool = False
    ) -> memoryview | None:
        """Return the plain bytes of a base from memory if they are held, else from the store; None if unreadable.

        Args:
            base: The frame of the base.
            nbytes: Its length.
            thread: Memory of this thread.
            keep_for_later: Hold the bytes, because the next commits will need them too.
        """
        held = self.bases.held(base.frame.chunk_id)
        if held is not None and len(held) == nbytes:
            return held
        destination = thread.worker.buffer("base")[:nbytes]
        chain = [(link.pack, link.frame) for link in base.closure()]
        try:
            plain_xxh3 = self.bases.checksum_of(base.frame.chunk_id)
            thread.reader.read(chain, nbytes, destination, plain_xxh3=plain_xxh3)
        except (CorruptError, UnsupportedError, BackendError) as error:
            # The state itself is complete in memory, so the chunk is stored without the damaged base, with a warning.
            self.bases.forget_checksum(base.frame.chunk_id)
            self._warnings.append(f"a base could not be read, so its chunk was stored without one: {error}")
            return None
        if keep_for_later:
            self.bases.hold_read(base.frame.chunk_id, destination)
        return destination

    def _fill(self, frame: PendingFrame, coded: EncodedChunk, worker: ChunkWorker, chunk: ChunkPlan) -> None:
        encoded = coded.encoded
        header = FrameHeader(
            chunk_id=frame.chunk_id,
            base_id=coded.base_id,
            plain_nbytes=chunk.nbytes,
            stored_nbytes=encoded.nbytes,
            element_width=encoded.width,
            steps=encoded.steps,
            payload_xxh3=0,
        )

        def check(payload: Sequence[memoryview], payload_xxh3: int) -> None:
            plain, plain_xxh3 = payload, payload_xxh3
            if encoded.steps:
                if not self.policy.verify_encoded:
                    return
                plain = [worker.decode_payload(payload, encoded, chunk, coded.base_plain)]
                plain_xxh3 = xxh3_64(plain[0])
            # Where the checksum was computed with the chunk id, it proves as much, in less time.
            if plain_xxh3 != coded.plain_checksum:
                require_identity(plain, frame.chunk_id)

        self._packer.fill(frame.slot, header, encoded.parts, check)
