"""Hash all chunks of a commit, and encode, check and write those that are not known.

Threads work on chunks in parallel and take turns, in plan order, to get a place in the pack: the same
commit makes the same pack on any number of threads and with any engine.

What a commit writes of its chunks: coded ones, frames that have a place, and what became of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from ckstore.codec import chunk_codec as forms
from ckstore.codec import kernels
from ckstore.codec.chunk_codec import Encoded
from ckstore.commit.base_selection import StoragePlan
from ckstore.commit.chunking import ChunkPlan, CommitPlan
from ckstore.commit.pipeline import (
    ByteSource,
    ChunkWorker,
    CodingThread,
    WriteBlocks,
    identity_and_checksum,
    require_identity,
    thread_nbytes,
    threads_and_blocks,
)
from ckstore.concurrency import Step, ThreadLimit, Turns, run_in_turns
from ckstore.config import Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format.frame import FrameHeader
from ckstore.format.manifest import FrameRef, Loss, PackRef
from ckstore.format.wire import xxh3_64
from ckstore.hashing import NO_BASE, ChunkId, PackId, chunk_id_of, new_hasher
from ckstore.io.buffers import BufferPool
from ckstore.store.chunk_index import LocatedFrame
from ckstore.store.pack_writer import FrameSlot, PackWriter
from ckstore.store.repository import Repository


@dataclass(slots=True)
class WriteResult:
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


@dataclass(slots=True, eq=False)
class PendingFrame:
    """A frame that this commit writes, and the one that it needs as base."""

    place: FrameSlot
    chunk_id: ChunkId
    base: LocatedFrame | PendingFrame | None
    is_rounding: bool
    is_lossy: bool


@dataclass(slots=True)
class EncodedChunk:
    """An encoded chunk with the base that it needs: its frame, and its plain bytes for the check."""

    encoded: Encoded
    base: LocatedFrame | PendingFrame | None = None
    base_plain: memoryview | None = None
    is_rounding: bool = False
    is_lossy: bool = False
    plain_checksum: int | None = None
    """Of the very bytes that were hashed, where nobody can change those."""

    @property
    def base_id(self) -> ChunkId:
        """What the header names."""
        return NO_BASE if self.base is None else frame_id(self.base)


def frame_id(frame: LocatedFrame | PendingFrame) -> ChunkId:
    """Return the chunk that a frame holds."""
    return frame.chunk_id if isinstance(frame, PendingFrame) else frame.frame.chunk_id


def depth_of(frame: LocatedFrame | PendingFrame) -> int:
    """Return how many bases a frame needs."""
    if isinstance(frame, LocatedFrame):
        return frame.frame.depth
    return 0 if frame.base is None else depth_of(frame.base) + 1


def located(frame: PendingFrame, refs: dict[PackId, PackRef], done: dict[ChunkId, LocatedFrame]) -> LocatedFrame:
    """Return where a frame lies, and its bases with it, once every pack is written.

    Args:
        frame: The frame.
        refs: What a manifest says of each pack.
        done: What was located before; this one is added.
    """
    if frame.chunk_id in done:
        return done[frame.chunk_id]
    base = located(frame.base, refs, done) if isinstance(frame.base, PendingFrame) else frame.base
    # The numbers of the pack and of the base are given when the manifest is put together.
    ref = FrameRef(
        frame.chunk_id,
        pack=0,
        offset=frame.place.offset,
        stored_nbytes=frame.place.stored_nbytes,
        base=-1,
        depth=0 if base is None else base.frame.depth + 1,
    )
    found = done[frame.chunk_id] = LocatedFrame(ref, refs[frame.place.pack.pack_id], base)
    return found


ROUNDING_NBYTES = 1
"""Payload of a chunk that is stored as a rounding; no other form of a large chunk is as short."""


@dataclass(slots=True, eq=False)
class ChunkWriter:
    """Hashes all chunks of a plan, and encodes and writes those that are not known."""

    repository: Repository
    plan: CommitPlan
    storages: Sequence[ByteSource]
    policy: Policy
    plans: Sequence[StoragePlan]
    bases: BaseCache
    source_is_immutable: bool = field(default=False, kw_only=True)
    """Nobody changes the storages meanwhile: they lie in an arena."""
    retained_slot: int | None = field(default=None, kw_only=True)
    """The ticket of that arena's slot, where it stays as it is for as long as ``bases`` hold some of it."""
    thread_limit: ThreadLimit = field(default_factory=ThreadLimit, kw_only=True)
    """How many threads may begin chunks, at any time."""
    blocks: WriteBlocks = field(default_factory=WriteBlocks, kw_only=True)
    """Where the blocks come from that packs are written through."""
    _results: list[LocatedFrame | PendingFrame | None] = field(init=False)
    _placed: dict[ChunkId, PendingFrame] = field(init=False, default_factory=dict)
    _workers: list[CodingThread | None] = field(init=False)
    _thread_count: int = field(init=False)
    _waiting_count: int = field(init=False)
    _packer: PackWriter = field(init=False)
    _pool: BufferPool = field(init=False)
    _warnings: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        policy = self.policy
        has_bases = any(form.base for form in self.plans)
        # A thread that reads a base back waits for the disk; one more keeps the cores busy meanwhile.
        self._waiting_count = int(has_bases and policy.threads is None and policy.base_cache == "none")
        self._thread_count, block_count = threads_and_blocks(
            policy,
            self.repository.limits,
            spare_threads=self._waiting_count,
            nbytes_a_thread=self._thread_nbytes(has_bases=has_bases),
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

    def _thread_nbytes(self, *, has_bases: bool) -> int:
        """Return the memory that one thread may use."""
        return thread_nbytes(self.repository.limits, has_bases=has_bases)

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
        """Store chunks as their forms say."""
        # A rounding is stored when it is settled where its master lies.
        self._run([index for index in indices if self.plans[index].master is None])
        self._run([index for index in indices if self.plans[index].master is not None])

    def _run(self, indices: Sequence[int]) -> None:
        turns = Turns()

        def step(turn: int, thread: int) -> None:
            self._store_chunk(indices[turn], turns.turn(turn), thread)

        self._run_in_turns(len(indices), step, turns)

    def _run_in_turns(self, count: int, step: Step, turns: Turns) -> None:
        """Run a step for every index below ``count``, on as many threads as there are and as may begin."""

        def may_begin(thread_index: int) -> bool:
            return self.thread_limit.allows(thread_index - self._waiting_count)

        run_in_turns(count, self._thread_count, step, turns, on_failure=self._packer.fail, may_begin=may_begin)

    def flush(self) -> WriteResult:
        """Make the packs durable; return where every chunk lies."""
        refs = {ref.pack_id: ref for ref in self._packer.finish()}
        self.blocks.give_back(self._pool)
        new: dict[ChunkId, LocatedFrame] = {}
        frames, is_new, is_rounding = [], [], []
        for result in self._results:
            assert result is not None, "a chunk was neither found nor written"
            frames.append(located(result, refs, new) if isinstance(result, PendingFrame) else result)
            is_new.append(isinstance(result, PendingFrame))
            is_rounding.append(isinstance(result, PendingFrame) and result.is_rounding)
        # What nobody refers to stays in its pack, unseen: codes of a tensor that is stored exactly after all.
        placed = [frame for chunk_id, frame in self._placed.items() if chunk_id in new]
        return WriteResult(
            frames=frames,
            is_new=is_new,
            is_rounding=is_rounding,
            chunks_new=len(placed),
            chunks_delta=sum(frame.base is not None and not (frame.is_rounding or frame.is_lossy) for frame in placed),
            chunks_derived=sum(frame.is_rounding for frame in placed),
            chunks_lossy=sum(frame.is_lossy for frame in placed),
            payload_nbytes=sum(frame.place.stored_nbytes for frame in placed),
            nbytes_written=sum(ref.nbytes for ref in refs.values()),
            pack_names=self._packer.pack_names,
            warnings=self._warnings,
        )

    def abandon(self) -> None:
        """Give up what was written; nothing refers to it."""
        self._packer.abandon()
        self.blocks.give_back(self._pool)

    def _store_chunk(self, index: int, turn: AbstractContextManager[None], thread_index: int) -> None:
        thread = self._thread(thread_index)
        chunk, form, worker = self.plan.chunks[index], self.plans[index], thread.worker
        plain = worker.gather(chunk, self.storages, private=self._private(chunk, form, worker))
        # At once where the checksum is wanted, while the bytes are in the cache.
        chunk_id, checksum = identity_and_checksum(plain) if self.source_is_immutable else (chunk_id_of(plain), None)
        if checksum is not None:
            self.bases.keep_checksum(chunk_id, checksum)
        self._hold(chunk, form, chunk_id, plain, checksum)
        known = self.repository.chunk_index.find(chunk_id)
        is_outlived = known is not None and self._is_outlived(known, form)
        if (known is not None and not is_outlived) or chunk_id in self._placed:
            with turn:
                self._results[index] = self._placed.get(chunk_id) or known
            return
        coded = self._encode(plain, chunk, form, thread)
        if is_outlived and not coded.is_rounding:
            with turn:
                self._results[index] = known
            return
        coded.plain_checksum = checksum
        with turn:
            frame, is_first = self._take_place(index, chunk_id, coded)
        if is_first:
            self._fill(frame, coded, worker, chunk)

    def _hold(
        self, chunk: ChunkPlan, form: StoragePlan, chunk_id: ChunkId, plain: memoryview, checksum: int | None
    ) -> None:
        """Keep a chunk for the next commit if it is wanted, where it lies if it may stay there."""
        stays = self._stays(chunk)
        # What has not changed moves on to the newer slot, so that the older one can be given back.
        if form.is_held or (stays and self.bases.is_staged(chunk_id)):
            self.bases.hold(chunk_id, plain, checksum=checksum, ticket=self.retained_slot if stays else None)

    def _stays(self, chunk: ChunkPlan) -> bool:
        """Whether the bytes of a chunk lie in one piece where they stay for as long as they are held."""
        return self.retained_slot is not None and len(chunk.sources) == 1

    def _thread(self, index: int) -> CodingThread:
        """Return what one thread has of its own; made when it is first wanted."""
        thread = self._workers[index]
        if thread is None:
            thread = self._workers[index] = CodingThread.of(self.repository)
        return thread

    def _take_place(self, index: int, chunk_id: ChunkId, coded: EncodedChunk) -> tuple[PendingFrame, bool]:
        """Give a chunk, whose turn it is, its place; say whether it is the first with these bytes."""
        # An earlier chunk with the same bytes may have been placed while this one was encoded.
        frame = self._placed.get(chunk_id)
        is_first = frame is None
        if frame is None:
            place = self._packer.reserve(coded.encoded.nbytes)
            frame = PendingFrame(place, chunk_id, coded.base, coded.is_rounding, coded.is_lossy)
            self._placed[chunk_id] = frame
        self._results[index] = frame
        return frame, is_first

    def _is_outlived(self, known: LocatedFrame, form: StoragePlan) -> bool:
        """Whether a rounding is stored of a master that is no part of this state any more.

        It would keep that master alive, and have every restore read it beside the new one; a byte says the same of
        the new one.
        """
        master = None if form.master is None else self._results[form.master]
        if master is None or known.base is None:
            return False
        return known.frame.stored_nbytes == ROUNDING_NBYTES and known.base.frame.chunk_id != frame_id(master)

    def _private(self, chunk: ChunkPlan, form: StoragePlan, worker: ChunkWorker) -> memoryview | None:
        """Return where a chunk is copied to before it is hashed, or None where the trainer's memory will do.

        A frame that will not be decoded again must be coded from the very bytes that were hashed: a source that
        changes in between, and back, would poison this identity for every later commit that has these bytes. The
        same goes for bytes that later commits are coded against.
        """
        if form.is_held and not self._stays(chunk):
            return np.empty(chunk.nbytes, np.uint8).data
        is_sure = self.policy.verify_encoded or self.source_is_immutable
        return None if is_sure else worker.buffer("gathered")

    def _encode(self, plain: memoryview, chunk: ChunkPlan, form: StoragePlan, thread: CodingThread) -> EncodedChunk:
        worker, compression = thread.worker, self.policy.compression
        coded: EncodedChunk | None = None
        if form.master is not None:
            coded = self._encode_rounded(plain, form.master, worker)
        elif form.base is not None:
            # What is coded against a keyframe without being kept itself will be so again.
            is_lasting = self.policy.base_cache == "memory" and not form.is_held and form.base.base is None
            base_plain = self._base_plain(form.base, chunk.nbytes, thread, is_lasting=is_lasting)
            if base_plain is not None and (not form.is_unsampled or worker.prefers_delta(plain, base_plain, chunk)):
                encoded = worker.encode_delta(plain, base_plain, chunk, compression)
                coded = None if encoded is None else EncodedChunk(encoded, form.base, base_plain)
        return coded or EncodedChunk(worker.encode(plain, chunk, compression))

    def _encode_rounded(self, plain: memoryview, master: int, worker: ChunkWorker) -> EncodedChunk | None:
        frame = self._results[master]
        if frame is None or depth_of(frame) >= self.repository.limits.depth_max:
            return None
        # A copy, whose identity is compared: the frame must decode from what is stored of the master.
        master_chunk = self.plan.chunks[master]
        base_plain = worker.gather(master_chunk, self.storages, private=worker.buffer("base"))
        encoded = forms.encode_rounded(plain, base_plain, scratch=worker.scratch)
        if encoded is None:
            return None
        require_identity(chunk_id_of(base_plain), frame_id(frame))
        return EncodedChunk(encoded, frame, base_plain, is_rounding=True)

    def _base_plain(
        self, base: LocatedFrame, nbytes: int, thread: CodingThread, *, is_lasting: bool = False
    ) -> memoryview | None:
        """Return the plain bytes of a base: from memory if they are held there, else from the store.

        A lasting one is held from then on: the next commits will want it too.
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
            # The state is whole in memory: it is stored without the damaged base, and the damage is told.
            self.bases.forget_checksum(base.frame.chunk_id)
            self._warnings.append(f"a base could not be read back, so its chunk was stored whole: {error}")
            return None
        if is_lasting:
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

        # A plain payload is its own decoding: it is hashed again piece by piece, as it is copied. Where nobody can
        # have changed it since it was hashed, a checksum finds what copying or coding did, in a sixth of the time.
        wanted = coded.plain_checksum
        hasher = None if encoded.steps or wanted is not None else new_hasher()

        def check(payload: Sequence[memoryview]) -> None:
            if hasher is not None:
                require_identity(hasher.digest(), frame.chunk_id)
            elif encoded.steps and self.policy.verify_encoded:
                decoded = worker.decode_payload(payload, encoded, chunk, coded.base_plain)
                if wanted is None or xxh3_64(decoded) != wanted:
                    require_identity(chunk_id_of(decoded), frame.chunk_id)

        watch = None if hasher is None else hasher.update
        known = None if encoded.steps else wanted
        self._packer.fill(frame.place, header, encoded.parts, check, watch=watch, checksum=known)
