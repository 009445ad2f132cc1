"""The memory of a commit: the buffers of a thread that codes chunks, and the blocks that packs are written through.

A ``ChunkWorker`` gathers a chunk, encodes it, and decodes it again for the check. It is used by one thread and owns
all memory that the thread needs, so nothing is allocated per chunk. Copying, hashing and coding are C calls that
release the GIL. A ``CodingThread`` adds a reader of bases.

``WriteBlocks`` lends blocks to one commit at a time. A saver process keeps them for its next commit: on a machine with
fragmented memory the kernel must compact memory for each huge page of a new block, while the disk waits.

Invariants of ``WriteBlocks``:
- A block is reused only after everything else has released it. Blocks of writes that never finished are not reused.
- At most as many blocks are kept as one commit uses. Blocks that the next commit does not take are freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import Encoded, Scratch
from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.commit.chunking import ChunkPlan
from ckstore.config import Compression
from ckstore.delta.chain_reader import ChainReader
from ckstore.delta.cost_model import TIE_SHARE
from ckstore.errors import CorruptError
from ckstore.format.wire import new_xxh3
from ckstore.hashing import ChunkId, new_hasher
from ckstore.io.buffers import BufferPool, map_block
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.state.memory import Spans
from ckstore.store.memory_budget import WRITE_BLOCK_NBYTES, WRITE_BLOCKS
from ckstore.store.repository import Repository

PIECE_NBYTES = 256 << 10
"""Fits into a second-level cache. Shorter pieces take the GIL more often."""

BufferPurpose = Literal[
    "gathered",
    "base",
    "whole",
    "decoded",
    # Chunks of a quantization task, plain and as they will be decoded. The primary chunk is a weight or second moment,
    # the secondary chunk a rounding or first moment.
    "primary plain",
    "primary",
    "secondary plain",
    "secondary",
]
"""What one of a thread's buffers contains."""


class ByteSource(Protocol):
    """The bytes of one storage, in the trainer's memory, an arena or a pack."""

    @property
    def is_host(self) -> bool:
        """Return True if the bytes are in host memory and are read without a copy."""
        ...

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``[begin, end)``, without a copy if the memory allows it."""
        ...


class ChunkWorker:
    """Gathers, encodes and decodes chunks. Used by one thread."""

    def __init__(self, chunk_nbytes_max: int) -> None:
        self._scratch = Scratch(chunk_nbytes_max)
        self._chunk_nbytes_max = chunk_nbytes_max
        self._buffers: dict[str, memoryview] = {}
        self.piece = np.empty(PIECE_NBYTES, np.uint8).data
        """For ``identity_and_checksum``."""

    @property
    def scratch(self) -> Scratch:
        """The coders' memory. It contains the last encoded chunk."""
        return self._scratch

    def buffer(self, purpose: BufferPurpose) -> memoryview:
        """Return this worker's buffer for one purpose, as long as the longest chunk."""
        if purpose not in self._buffers:
            self._buffers[purpose] = np.empty(self._chunk_nbytes_max, np.uint8).data
        return self._buffers[purpose]

    def gather(
        self, chunk: ChunkPlan, storages: Sequence[ByteSource], *, private: memoryview | None = None
    ) -> memoryview:
        """Return the plain bytes of a chunk: the storage's own memory, or small storages copied one after another.

        Args:
            chunk: The chunk.
            storages: The storages of the state.
            private: Copy the bytes to this memory in any case, so that nothing can change them between hashing and
                coding.
        """
        if len(chunk.sources) == 1 and private is None:
            source = chunk.sources[0]
            return storages[source.storage].read(source.offset, source.offset + source.nbytes)
        return gathered(chunk, storages, self.buffer("gathered") if private is None else private)

    def encode(self, plain: memoryview, chunk: ChunkPlan, compression: Compression) -> Encoded:
        """Choose a codec and encode. The result is valid until this worker's next call."""
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
        """Encode the difference from the base; None if that does not save enough."""
        return chunk_codec.encode_delta(
            plain,
            base,
            width=chunk.element_width,
            is_float=chunk.is_float,
            compression=compression,
            scratch=self._scratch,
        )

    def prefers_delta(self, plain: memoryview, base: memoryview, chunk: ChunkPlan) -> bool:
        """Return True if samples of a chunk and its base say that the difference is smaller than the chunk."""
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
        """Decode a payload as it was copied to the write blocks. The result is valid until the next call.

        Raises:
            CorruptError: The payload does not decode.
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
        """Copy a payload that spans write blocks into one piece, which decoders need."""
        whole = self.buffer("whole")
        position = 0
        for part in parts:
            kernels.copy_bytes(part, whole[position : position + len(part)])
            position += len(part)
        return whole[:position]


def gathered(chunk: ChunkPlan, storages: Sequence[ByteSource], destination: memoryview) -> memoryview:
    """Copy the sources of a chunk one after another. Return them in ``destination``."""
    if len(chunk.sources) > 1 and isinstance(storages, Spans) and storages.are_host:
        # All in one call, because there may be ten thousand. It would copy a large source past the cache.
        storage, offset, nbytes, position = chunk.columns
        begin = np.uint64(np.frombuffer(destination, np.uint8).ctypes.data)
        table = np.stack((storages.starts[storage] + offset, begin + position, nbytes), axis=1)
        firsts = np.array([0, len(table)], np.uint64)
        kernels.copy_units(table.data, firsts.data, np.zeros(1, np.uint8).data, np.zeros(1, np.uint64).data, -1)
        return destination[: chunk.nbytes]
    begins = itertools.accumulate((source.nbytes for source in chunk.sources), initial=0)
    for source, at in zip(chunk.sources, begins, strict=False):
        plain = storages[source.storage].read(source.offset, source.offset + source.nbytes)
        kernels.copy_bytes(plain, destination[at : at + source.nbytes])
    return destination[: chunk.nbytes]


def identity_and_checksum(plain: memoryview, private: memoryview | None) -> tuple[ChunkId, int]:
    """Return the BLAKE3-256 and the xxh3-64 of a chunk, reading its memory once. Releases the GIL.

    Both belong to the same bytes, also if the chunk changes meanwhile. So a copy or a decoded frame with this checksum
    has this chunk id, and is proved in less time than BLAKE3 takes.

    Args:
        plain: The chunk.
        private: Memory of ``PIECE_NBYTES`` that pieces are copied to; None if nothing can change the chunk.
    """
    hasher, checksum = new_hasher(), new_xxh3()
    for begin in range(0, plain.nbytes, PIECE_NBYTES):
        piece = plain[begin : begin + PIECE_NBYTES]
        if private is not None:
            copy = private[: len(piece)]
            kernels.copy_bytes(piece, copy)
            piece = copy
        checksum.update(piece)
        hasher.update(piece)
    return ChunkId(hasher.digest()), checksum.intdigest()


def require_identity(plain: Sequence[memoryview], chunk_id: ChunkId) -> None:
    """Check that a frame decodes to the chunk that it names.

    Also finds a state that changed while it was committed: the frame then decodes to bytes that were never hashed.

    Args:
        plain: What the frame decodes to, in pieces.
        chunk_id: The chunk that it names.

    Raises:
        CorruptError: The chunk ids differ.
    """
    hasher = new_hasher()
    for piece in plain:
        hasher.update(piece)
    if hasher.digest() != chunk_id:
        raise CorruptError(
            "a chunk changed while it was being committed, or memory is faulty",
            where=f"chunk {chunk_id.hex()[:16]}",
            todo="do not modify the state before commit returns; if nothing does, test this machine's memory",
        )


@dataclass(frozen=True, slots=True)
class CodingThread:
    """The memory and the reader of bases of one thread of a commit."""

    worker: ChunkWorker
    reader: ChainReader

    @classmethod
    def of(cls, repository: Repository) -> CodingThread:
        """Create both. Memory is allocated when it is first needed."""
        worker = ChunkWorker(repository.limits.chunk_nbytes_max)
        # A base is read before its chunk is coded, so both can use the same scratch.
        decoder = FrameDecoder(repository.limits.chunk_nbytes_max, worker.scratch)
        return cls(worker, ChainReader(repository, decoder))


class WriteBlocks:
    """Lends write blocks to one commit at a time.

    Args:
        is_reused: Keep returned blocks for the next commit; else free them.
    """

    def __init__(self, *, is_reused: bool = False) -> None:
        self._is_reused = is_reused
        self._free: list[memoryview] = []

    def take(self, count: int) -> BufferPool:
        """Return ``count`` blocks, kept ones first. Kept blocks that are not needed are freed.

        Raises:
            CapacityError: The address space is exhausted.
        """
        blocks, self._free = self._free[:count], []
        blocks += [map_block(WRITE_BLOCK_NBYTES) for _ in range(count - len(blocks))]
        return BufferPool(WRITE_BLOCK_NBYTES, count, blocks=blocks)

    def give_back(self, pool: BufferPool) -> None:
        """Return the blocks of a finished commit. Blocks of writes that never finished are dropped."""
        blocks = pool.close_and_take_blocks()
        if self._is_reused:
            self._free = [*self._free, *blocks][:WRITE_BLOCKS]

    def warm(self, count: int, nbytes: int) -> Iterator[None]:
        """Allocate and touch the blocks that the next commit will fill. Yields after each block.

        Args:
            count: Bound on the commit's blocks.
            nbytes: Bytes of the state that will be committed.

        Raises:
            CapacityError: The address space is exhausted.
        """
        assert self._is_reused, "warm blocks would be freed"
        # One block more for the headers of frames and the directory.
        for index in range(min(count, 2 + nbytes // WRITE_BLOCK_NBYTES)):
            if index == len(self._free):
                self._free.append(map_block(WRITE_BLOCK_NBYTES))
            # Writing one byte of a page makes the kernel allocate the page.
            np.frombuffer(self._free[index], np.uint8)[::PAGE_NBYTES] = 0
            yield
            if index >= len(self._free):
                # A commit took the blocks in the meantime.
                return

    def release(self) -> None:
        """Free the kept blocks."""
        self._free = []
