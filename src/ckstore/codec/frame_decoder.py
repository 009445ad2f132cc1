"""One stored frame back into the plain bytes of its chunk, and the proof that they are those.

A ``FrameDecoder`` belongs to one thread and holds all memory that thread needs to decode; nothing is allocated
per frame. What it does with bytes is a C call that releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.config import KIB, MIB, Limits
from ckstore.errors import ChecksumError, CorruptError, MalformedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.wire import Checksum, new_xxh3, xxh3_64
from ckstore.hashing import NO_BASE, ChunkId, Hasher, new_hasher
from ckstore.io.buffers import map_zeros

Check = Literal["blake3", "xxh3", "none"]
"""What proves a decoded frame: the identity of its chunk (or the checksum in its place, see ``Expected``), the checksum
of what is stored, or the frames that are decoded on top of it."""

_PIECE_NBYTES = 256 * KIB
"""Copied and hashed in one go: fits into any second-level cache, and is long enough to let go of the GIL for."""

_CHANGED = "the stored bytes of a frame have changed"
_OTHER_BYTES = "a frame decodes to other bytes than were committed"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a manifest says of a frame: the chunk it holds, the plain bytes of that, and the chunk it needs."""

    chunk_id: ChunkId
    nbytes: int
    base_id: ChunkId = NO_BASE
    plain_xxh3: int | None = None
    """Of the chunk, where this process took it together with the identity: it proves as much against accidents, in
    less time."""

    def is_proved_by(self, digest: bytes) -> bool:
        """Whether plain bytes of this digest are the chunk's: of xxh3, big-endian, where that is known, else BLAKE3."""
        return digest == (self.chunk_id if self.plain_xxh3 is None else self.plain_xxh3.to_bytes(8, "big"))


def decoder_nbytes(chunk_nbytes_max: int) -> int:
    """Return the memory that one decoder may use, in bytes."""
    # Two buffers for planes, what zstd gives back, and one chunk aside; contexts and the tables of coders.
    return 4 * chunk_nbytes_max + MIB


class FrameDecoder:
    """What one thread needs to decode frames.

    Args:
        chunk_nbytes_max: The longest chunk.
        scratch: The thread's, if it has one already and nothing lies in it while frames are decoded.
    """

    def __init__(self, chunk_nbytes_max: int, scratch: Scratch | None = None) -> None:
        self._scratch = scratch or Scratch(chunk_nbytes_max)
        self._limits = Limits(chunk_nbytes_max=chunk_nbytes_max)
        self._aside: memoryview | None = None

    def aside(self, nbytes: int) -> memoryview:
        """Return this decoder's own memory for a chunk that has no place of its own; the same when asked again."""
        if self._aside is None:
            self._aside = map_zeros(self._limits.chunk_nbytes_max)
        return self._aside[:nbytes]

    def decode(
        self,
        frame: memoryview,
        expected: Expected,
        destination: memoryview,
        *,
        base: memoryview | None = None,
        check: Check = "blake3",
    ) -> None:
        """Decode a frame, header included, into ``destination``, and prove it to be the chunk asked for.

        Args:
            frame: As it lies in the pack.
            expected: What the manifest says of it.
            destination: Takes the plain bytes.
            base: The plain bytes of the frame's base; ``destination`` itself where that holds them.
            check: What is proved.

        Raises:
            CorruptError: Header, checksum, decoder or identity disagree.
            UnsupportedError: The frame needs a codec that this version does not have.
        """
        header = decode_frame_header(frame[:FRAME_HEADER_NBYTES], limits=self._limits)
        payload = frame[FRAME_HEADER_NBYTES:]
        check_header(header, expected, len(payload))
        if check == "xxh3" and xxh3_64(payload) != header.payload_xxh3:
            raise ChecksumError(_CHANGED)
        proof = None if check != "blake3" else new_hasher() if expected.plain_xxh3 is None else new_xxh3()
        try:
            self._decode(header, payload, destination, base, proof)
        except CorruptError as error:
            if xxh3_64(payload) != header.payload_xxh3:
                raise ChecksumError(_CHANGED) from error
            raise
        if proof is not None and not expected.is_proved_by(proof.digest()):
            raise ChecksumError(_CHANGED if xxh3_64(payload) != header.payload_xxh3 else _OTHER_BYTES)

    def check_frame(self, header: FrameHeader, payload: memoryview, base: memoryview | None = None, /) -> memoryview:
        """Decode a payload and compare its identity with the header's; for ``verify``.

        Returns:
            The plain bytes: where ``base`` lay if it is as long, else in this decoder's memory aside.

        Raises:
            CorruptError: It does not decode to the chunk it says it is.
            UnsupportedError: Another version is needed to decode it.
        """
        is_onto = base is not None and len(base) == header.plain_nbytes
        destination = base if base is not None and is_onto else self.aside(header.plain_nbytes)
        proof = new_hasher()
        self._decode(header, payload, destination, base, proof)
        if proof.digest() != header.chunk_id:
            raise ChecksumError(_OTHER_BYTES)
        return destination

    def _decode(
        self,
        header: FrameHeader,
        payload: memoryview,
        destination: memoryview,
        base: memoryview | None,
        proof: Hasher | Checksum | None,
    ) -> None:
        """Decode, and hash what comes out if there is something to hash it with."""
        if header.steps:
            chunk_codec.decode(
                payload,
                header.steps,
                width=header.element_width,
                destination=destination,
                scratch=self._scratch,
                base=base,
            )
            if proof is not None:
                proof.update(destination)
            return
        if base is not None or len(payload) != len(destination):
            raise MalformedError(f"{len(payload)} plain bytes are stored instead of {len(destination)}")
        if proof is None:
            kernels.copy_bytes(payload, destination)
            return
        for begin in range(0, len(payload), _PIECE_NBYTES):
            piece = destination[begin : begin + _PIECE_NBYTES]
            kernels.copy_bytes(payload[begin : begin + _PIECE_NBYTES], piece)
            proof.update(piece)


def check_header(header: FrameHeader, expected: Expected, payload_nbytes: int) -> None:
    """Compare a frame's header with what the manifest says of the frame.

    Raises:
        CorruptError: They contradict each other.
    """
    if header.chunk_id != expected.chunk_id:
        raise ChecksumError("another frame lies where the manifest locates this one")
    # The element width may differ: equal bytes of another dtype may have been stored first.
    if header.plain_nbytes != expected.nbytes:
        raise MalformedError("a frame's header disagrees with the manifest about its plain size")
    if header.stored_nbytes != payload_nbytes:
        raise MalformedError("a frame's header disagrees with the manifest about its stored size")
    if header.base_id != expected.base_id:
        raise MalformedError("a frame's header disagrees with the manifest about its base")
