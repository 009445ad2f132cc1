"""One chunk through gather -> hash -> encode and back, verified.

A ``ChunkWorker`` belongs to one thread and holds all memory that thread needs; nothing is allocated per
chunk. What it does with bytes is a C call that releases the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckstore import kernels
from ckstore.codec import chain
from ckstore.codec.chain import Encoded, Scratch
from ckstore.config import Compression
from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.manifest import FrameRef
from ckstore.format.wire import xxh3_64
from ckstore.ids import NO_BASE, ChunkId, chunk_id_of
from ckstore.plan import ChunkPlan, Target


class ByteSource(Protocol):
    """Bytes of one storage, as they are in the trainer's memory."""

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``[begin, end)``; without a copy where the memory allows it."""
        ...


@dataclass(frozen=True, slots=True)
class Expected:
    """What a manifest says of a chunk that is being restored."""

    chunk_id: ChunkId
    nbytes: int


def worker_nbytes(chunk_nbytes_max: int) -> int:
    """Return the memory one worker may use, in bytes."""
    return chain.scratch_nbytes(chunk_nbytes_max) + 3 * chunk_nbytes_max


class ChunkWorker:
    """What one thread needs to encode and decode chunks."""

    def __init__(self, chunk_nbytes_max: int) -> None:
        self._scratch = Scratch(chunk_nbytes_max)
        self._chunk_nbytes_max = chunk_nbytes_max
        self._gathered: memoryview | None = None
        self._decoded: memoryview | None = None
        self._whole: memoryview | None = None

    # Towards the disk

    def gather(self, chunk: ChunkPlan, storages: Sequence[ByteSource], *, is_private: bool = False) -> memoryview:
        """Return the plain bytes of a chunk: the tensor's own memory, or small tensors copied side by side.

        Args:
            chunk: What to gather.
            storages: Where from.
            is_private: Always copy: nobody else can change what is hashed and then coded.
        """
        if len(chunk.sources) == 1 and not is_private:
            source = chunk.sources[0]
            return storages[source.storage].read(source.offset, source.offset + source.nbytes)
        if self._gathered is None:
            self._gathered = memoryview(bytearray(self._chunk_nbytes_max))
        position = 0
        for source in chunk.sources:
            plain = storages[source.storage].read(source.offset, source.offset + source.nbytes)
            kernels.copy_bytes(plain, self._gathered[position : position + source.nbytes])
            position += source.nbytes
        return self._gathered[:position]

    def encode(self, plain: memoryview, chunk: ChunkPlan, compression: Compression) -> Encoded:
        """Choose a form and encode; the result lives in this worker's scratch until its next call."""
        return chain.encode(
            plain,
            width=chunk.element_width,
            is_float=chunk.is_float,
            compression=compression,
            scratch=self._scratch,
        )

    def identity_of_payload(self, payload: Sequence[memoryview], encoded: Encoded, chunk: ChunkPlan) -> ChunkId:
        """Decode a coded payload as it lies in the write block, and return the identity of what comes out.

        Raises:
            CorruptError: It does not decode at all.
        """
        destination = self._decoded_buffer()[: chunk.nbytes]
        whole = payload[0] if len(payload) == 1 else self._joined(payload)
        chain.decode(whole, encoded.steps, width=encoded.width, destination=destination, scratch=self._scratch)
        return chunk_id_of(destination)

    def _joined(self, parts: Sequence[memoryview]) -> memoryview:
        """Put a frame that spans two write blocks into one piece, as decoders want it."""
        if self._whole is None:
            self._whole = memoryview(bytearray(self._chunk_nbytes_max))
        position = 0
        for part in parts:
            kernels.copy_bytes(part, self._whole[position : position + len(part)])
            position += len(part)
        return self._whole[:position]

    # Back from the disk

    def decode_frame(
        self, frame: memoryview, expected: Expected, destination: memoryview, *, checks_identity: bool
    ) -> None:
        """Decode a stored frame into ``destination`` and prove that it is the chunk asked for.

        Raises:
            CorruptError: Header, checksum, decoder or identity disagree.
            UnsupportedError: The frame needs a codec that this version does not have.
        """
        header = decode_frame_header(frame[:FRAME_HEADER_NBYTES])
        payload = frame[FRAME_HEADER_NBYTES:]
        _check_header(header, expected, len(payload))
        if not checks_identity and xxh3_64(payload) != header.payload_xxh3:
            raise ChecksumError("the stored bytes of a frame have changed")
        try:
            if header.steps:
                chain.decode(
                    payload, header.steps, width=header.element_width, destination=destination, scratch=self._scratch
                )
            else:
                kernels.copy_bytes(payload, destination)
        except CorruptError as error:
            if xxh3_64(payload) != header.payload_xxh3:
                raise ChecksumError("the stored bytes of a frame have changed") from error
            raise
        if checks_identity and chunk_id_of(destination) != expected.chunk_id:
            if xxh3_64(payload) != header.payload_xxh3:
                raise ChecksumError("the stored bytes of a frame have changed")
            raise ChecksumError("a frame decodes to other bytes than were committed")

    def check_frame(self, header: FrameHeader, payload: memoryview) -> None:
        """Decode a payload into scratch and compare its identity with the header's; for ``verify``.

        Raises:
            CorruptError: It does not decode to the chunk it says it is.
            UnsupportedError: Another version is needed to decode it.
        """
        destination = self._decoded_buffer()[: header.plain_nbytes]
        chain.decode(payload, header.steps, width=header.element_width, destination=destination, scratch=self._scratch)
        if chunk_id_of(destination) != header.chunk_id:
            raise ChecksumError("a frame decodes to other bytes than were committed")

    def _decoded_buffer(self) -> memoryview:
        if self._decoded is None:
            self._decoded = memoryview(bytearray(self._chunk_nbytes_max))
        return self._decoded

    def decode_to_targets(
        self,
        frame: memoryview,
        expected: Expected,
        targets: Sequence[Target],
        destinations: Sequence[memoryview],
        *,
        checks_identity: bool,
    ) -> None:
        """Decode a frame to every place its bytes go to; straight there if one place takes all of it."""
        whole = next((i for i, t in enumerate(targets) if t.chunk_offset == 0 and t.nbytes == expected.nbytes), None)
        plain = destinations[whole] if whole is not None else self._decoded_buffer()[: expected.nbytes]
        self.decode_frame(frame, expected, plain, checks_identity=checks_identity)
        for index, (target, destination) in enumerate(zip(targets, destinations, strict=True)):
            if index != whole:
                kernels.copy_bytes(plain[target.chunk_offset : target.chunk_offset + target.nbytes], destination)


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


def _check_header(header: FrameHeader, expected: Expected, payload_nbytes: int) -> None:
    if header.chunk_id != expected.chunk_id:
        raise ChecksumError("another frame lies where the manifest locates this one")
    # The element width may differ: equal bytes of another dtype may have been stored first.
    if header.plain_nbytes != expected.nbytes:
        raise MalformedError("a frame's header disagrees with the manifest about its plain size")
    if header.stored_nbytes != payload_nbytes:
        raise MalformedError("a frame's header disagrees with the manifest about its stored size")
    if header.base_id != NO_BASE:
        raise UnsupportedError("the frame is a delta, which this version cannot decode", todo="upgrade ckstore")


def frame_nbytes(frame: FrameRef) -> int:
    """Return header and payload of a frame, in bytes."""
    return FRAME_HEADER_NBYTES + frame.stored_nbytes
