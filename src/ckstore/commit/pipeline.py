"""One chunk through gather -> encode, and decoded again for the proof; decoder.py is the way back.

A ``ChunkWorker`` belongs to one thread and holds all memory that thread needs; nothing is allocated per
chunk. What it does with bytes is a C call that releases the GIL.

The blocks that packs are written through: of one commit, or kept by a process that commits again and again.

Where a machine's memory is in pieces, the system has to make room for each huge page of new ones, and the disk waits
meanwhile: the first commit of a saver that has them is durable sooner (``async_wall``).

Invariants:
- A block is kept only when nobody has it any more: none that is in flight, and none that was lost.
- Never more are kept than one commit has; what the next one does not take gives its memory back.

What one thread of a commit has of its own: memory to code in, and a reader of bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import Encoded, Scratch
from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.commit.chunking import ChunkPlan
from ckstore.config import MIB, Compression, Limits, Policy, fit_memory
from ckstore.delta.chain_reader import ChainReader, chain_reader_nbytes
from ckstore.delta.cost_model import TIE_SHARE
from ckstore.errors import CorruptError
from ckstore.format.wire import new_xxh3
from ckstore.hashing import ChunkId, new_hasher
from ckstore.io.buffers import BufferPool, map_block
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.store.repository import Repository

_PIECE_NBYTES = 512 << 10
"""Fits into the second-level cache of most servers; measured between 64 and 512 KiB, where memory traffic does not
differ, and shorter pieces cost more of the interpreter: threads of a commit wait for the GIL (``async_wall``)."""

BufferPurpose = Literal[
    "gathered",
    "base",
    "whole",
    "decoded",
    # Of a task that stores chunks with a loss, plain and as they will be decoded: a weight or second moment is "one" of
    # its chunks, a rounding or first moment the "other".
    "one plain",
    "one",
    "other plain",
    "other",
]
"""What a thread holds a chunk for."""


class ByteSource(Protocol):
    """Bytes of one storage, as they are in the trainer's memory."""

    @property
    def is_host(self) -> bool:
        """Whether they are read without a copy."""
        ...

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``[begin, end)``; without a copy where the memory allows it."""
        ...


def worker_nbytes(chunk_nbytes_max: int) -> int:
    """Return the memory one worker may use, in bytes."""
    return chunk_codec.scratch_nbytes(chunk_nbytes_max) + 4 * chunk_nbytes_max


class ChunkWorker:
    """What one thread needs to encode and decode chunks."""

    def __init__(self, chunk_nbytes_max: int) -> None:
        self._scratch = Scratch(chunk_nbytes_max)
        self._chunk_nbytes_max = chunk_nbytes_max
        self._buffers: dict[str, memoryview] = {}

    @property
    def scratch(self) -> Scratch:
        """The coders' memory; what was encoded last lies in it."""
        return self._scratch

    def buffer(self, purpose: BufferPurpose) -> memoryview:
        """Return this worker's memory for one purpose, as long as the longest chunk."""
        if purpose not in self._buffers:
            # Not zeroed: a commit makes its workers anew.
            self._buffers[purpose] = np.empty(self._chunk_nbytes_max, np.uint8).data
        return self._buffers[purpose]

    def gather(
        self, chunk: ChunkPlan, storages: Sequence[ByteSource], *, private: memoryview | None = None
    ) -> memoryview:
        """Return the plain bytes of a chunk: the tensor's own memory, or small tensors copied side by side.

        Args:
            chunk: What to gather.
            storages: Where from.
            private: Always copy, and to here: nobody else can change what is hashed and then coded.
        """
        if len(chunk.sources) == 1 and private is None:
            source = chunk.sources[0]
            return storages[source.storage].read(source.offset, source.offset + source.nbytes)
        gathered = self.buffer("gathered") if private is None else private
        position = 0
        for source in chunk.sources:
            plain = storages[source.storage].read(source.offset, source.offset + source.nbytes)
            kernels.copy_bytes(plain, gathered[position : position + source.nbytes])
            position += source.nbytes
        return gathered[:position]

    def encode(self, plain: memoryview, chunk: ChunkPlan, compression: Compression) -> Encoded:
        """Choose a codec and encode; the result lives in this worker's scratch until its next call."""
        return chunk_codec.encode(
            plain,
            width=chunk.element_width,
            is_float=chunk.is_float,
            compression=compression,
            scratch=self._scratch,
        )

    def encode_delta(
        self, plain: memoryview, base: memoryview, chunk: ChunkPlan, compression: Compression
    ) -> Encoded | None:
        """Encode what is left when the base is subtracted; None where that does not pay."""
        return chunk_codec.encode_delta(
            plain,
            base,
            width=chunk.element_width,
            is_float=chunk.is_float,
            compression=compression,
            scratch=self._scratch,
        )

    def prefers_delta(self, plain: memoryview, base: memoryview, chunk: ChunkPlan) -> bool:
        """Whether samples of a chunk and of its base say that the difference is smaller."""
        width, is_float = chunk.element_width, chunk.is_float
        nbytes = min(chunk_codec.SAMPLE_NBYTES, plain.nbytes)
        sample, base_sample = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        chunk_codec.sample_of(plain, width, sample)
        chunk_codec.sample_of(base, width, base_sample)
        full_bits = chunk_codec.estimate_full(sample, width, is_float)
        return chunk_codec.estimate_delta(sample, base_sample, width, is_float) < full_bits * (1 - TIE_SHARE)

    def decode_payload(
        self,
        payload: Sequence[memoryview],
        encoded: Encoded,
        chunk: ChunkPlan,
        base: memoryview | None = None,
    ) -> memoryview:
        """Decode a coded payload as it lies in the write block; the result is valid until the next call.

        Raises:
            CorruptError: It does not decode at all.
        """
        decoded = self.buffer("decoded")[: chunk.nbytes]
        chunk_codec.decode(
            payload[0] if len(payload) == 1 else self._joined(payload),
            encoded.steps,
            width=encoded.width,
            destination=decoded,
            scratch=self._scratch,
            base=base,
        )
        return decoded

    def _joined(self, parts: Sequence[memoryview]) -> memoryview:
        """Put a frame that spans two write blocks into one piece, as decoders want it."""
        whole = self.buffer("whole")
        position = 0
        for part in parts:
            kernels.copy_bytes(part, whole[position : position + len(part)])
            position += len(part)
        return whole[:position]


def identity_and_checksum(plain: memoryview) -> tuple[ChunkId, int]:
    """Return the BLAKE3-256 of a chunk and its xxh3-64, reading memory once; the GIL is released meanwhile.

    A trainer at work empties the shared cache within a millisecond, and BLAKE3 takes about one for a chunk: what is
    read again after it comes from memory again, which training then waits for.
    """
    hasher, checksum = new_hasher(), new_xxh3()
    for begin in range(0, plain.nbytes, _PIECE_NBYTES):
        piece = plain[begin : begin + _PIECE_NBYTES]
        # In this order: a piece that changes in between is found when the checksum is compared.
        checksum.update(piece)
        hasher.update(piece)
    return ChunkId(hasher.digest()), checksum.intdigest()


def require_identity(found: bytes, chunk_id: ChunkId) -> None:
    """Compare the identity of what a frame decodes to with that of its source.

    Comparing identities, not bytes, also catches a state that was changed while it was committed: the frame
    then decodes to bytes that were never hashed.

    Raises:
        CorruptError: They differ.
    """
    if found != chunk_id:
        raise CorruptError(
            "a chunk changed while it was being committed, or memory is faulty",
            where=f"chunk {chunk_id.hex()[:16]}",
            todo="do not modify the state before commit returns; if nothing does, test this machine's memory",
        )


@dataclass(frozen=True, slots=True)
class CodingThread:
    """What one thread has of its own."""

    worker: ChunkWorker
    reader: ChainReader

    @classmethod
    def of(cls, repository: Repository) -> CodingThread:
        """Make it; memory is taken when it is first needed."""
        worker = ChunkWorker(repository.limits.chunk_nbytes_max)
        # Bases are read before their chunk is coded, so that both can use the same scratch.
        decoder = FrameDecoder(repository.limits.chunk_nbytes_max, worker.scratch)
        return cls(worker, ChainReader(repository, decoder))


def thread_nbytes(limits: Limits, *, has_bases: bool) -> int:
    """Return the memory that one thread of a commit may use, in bytes."""
    return worker_nbytes(limits.chunk_nbytes_max) + (chain_reader_nbytes(limits) if has_bases else 0)


WRITE_BLOCK_NBYTES = 8 * MIB
"""Measured: larger blocks gain nothing on the devices we have, smaller ones cost system calls."""

WRITE_BLOCKS = 12
"""Eight in flight, and some being filled; more gained nothing."""

WRITE_BLOCKS_MIN = 3
"""A frame may span two blocks while a third one is being written."""


class WriteBlocks:
    """Hands out the blocks of one commit at a time.

    Args:
        is_kept: Whether blocks that came back are there for the next commit; else their memory is given back.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        self._kept: list[memoryview] = []

    def take(self, count: int) -> BufferPool:
        """Return so many blocks, the kept ones first; commits that read bases have fewer than others.

        Raises:
            CapacityError: The address space is exhausted.
        """
        blocks, self._kept = self._kept[:count], []
        blocks += [map_block(WRITE_BLOCK_NBYTES) for _ in range(count - len(blocks))]
        return BufferPool(WRITE_BLOCK_NBYTES, count, blocks=blocks)

    def give_back(self, pool: BufferPool) -> None:
        """Take back what was handed out; nothing of it is used any more, but blocks that were lost."""
        blocks = pool.close_and_take_blocks()
        if self._is_kept:
            self._kept = [*self._kept, *blocks][:WRITE_BLOCKS]

    def warm(self, count: int, nbytes: int) -> Iterator[None]:
        """Take memory for as many blocks as a commit fills, before they are wanted; yields after each.

        Args:
            count: The most blocks that it will have.
            nbytes: Of the state that will be committed.

        Raises:
            CapacityError: The address space is exhausted.
        """
        assert self._is_kept, "nobody would find them"
        # One more than it fills for frames' headers and a directory.
        for index in range(min(count, 2 + nbytes // WRITE_BLOCK_NBYTES)):
            if index == len(self._kept):
                self._kept.append(map_block(WRITE_BLOCK_NBYTES))
            # A byte of each page: one that is written to has memory.
            np.frombuffer(self._kept[index], np.uint8)[::PAGE_NBYTES] = 0
            yield
            if index >= len(self._kept):
                # A commit has taken them meanwhile.
                return

    def let_go(self) -> None:
        """Give back the memory of what is kept."""
        self._kept = []


def threads_and_blocks(
    policy: Policy, limits: Limits, *, spare_threads: int = 0, nbytes_a_thread: int | None = None
) -> tuple[int, int]:
    """Return how many threads and write blocks a commit has within the memory that its policy allows.

    Args:
        policy: How it is stored.
        limits: Bounds of the store.
        spare_threads: Threads that mostly wait, beside those that compute.
        nbytes_a_thread: Memory that one thread may use; None: as much as one without bases.
    """
    return fit_memory(
        policy.thread_count + spare_threads,
        thread_nbytes(limits, has_bases=False) if nbytes_a_thread is None else nbytes_a_thread,
        WRITE_BLOCK_NBYTES,
        buffers_wanted=WRITE_BLOCKS,
        buffers_min=WRITE_BLOCKS_MIN,
        memory_nbytes_max=policy.memory_nbytes_max,
    )
