"""One chunk through gather -> encode, and decoded again for the proof; decoder.py is the way back.

A ``ChunkWorker`` belongs to one thread and holds all memory that thread needs; nothing is allocated per
chunk. What it does with bytes is a C call that releases the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import Encoded, Scratch
from ckstore.commit.chunking import ChunkPlan
from ckstore.config import Compression
from ckstore.delta.cost_model import TIE_SHARE
from ckstore.errors import CorruptError
from ckstore.format.wire import new_xxh3
from ckstore.hashing import ChunkId, new_hasher

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
