"""Decode one stored frame into the plain bytes of its chunk, and prove that they are the right bytes.

A ``FrameDecoder`` is used by one thread and owns all memory that decoding needs. Nothing is allocated per frame.
Hashing, copying and decoding are C calls that release the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.config import KIB, Limits
from ckstore.errors import ChecksumError, CorruptError, MalformedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.wire import new_xxh3, xxh3_64
from ckstore.hashing import NO_BASE, ChunkId, Hasher, new_hasher
from ckstore.io.buffers import map_zeros

if TYPE_CHECKING:
    from ckstore.format.wire import Checksum

Check = Literal["blake3", "xxh3", "none"]
"""What verifies a decoded frame.

``blake3``: the chunk id of the decoded bytes, or their checksum if ``Expected`` has it. ``xxh3``: the checksum of the
stored bytes. ``none``: not verified; the frame that uses this one as its base is verified."""

_PIECE_NBYTES = 256 * KIB
"""Copied and then hashed: fits into a second-level cache, and is long enough for releasing the GIL."""

_CHANGED = "the stored bytes of a frame have changed"
_OTHER_BYTES = "a frame decodes to other bytes than were committed"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the manifest says about a frame.

    Args:
        chunk_id: The chunk that the frame contains.
        nbytes: Plain bytes of the chunk.
        base_id: The chunk that it is a difference from.
        plain_xxh3: Checksum of the plain bytes, if this process computed it together with the chunk id. Against
            accidents it proves as much as the chunk id, in less time.
    """

    chunk_id: ChunkId
    nbytes: int
    base_id: ChunkId = NO_BASE
    plain_xxh3: int | None = None

    def is_proved_by(self, digest: bytes) -> bool:
        """Return True if plain bytes with this digest are the chunk's.

        Args:
            digest: xxh3 in big-endian order if ``plain_xxh3`` is set, else BLAKE3.
        """
        return digest == (self.chunk_id if self.plain_xxh3 is None else self.plain_xxh3.to_bytes(8, "big"))


class FrameDecoder:
    """Decodes frames. Used by one thread.

    Args:
        chunk_nbytes_max: The longest chunk.
        scratch: The thread's scratch, if it already has one that is free while frames are decoded.
    """

    def __init__(self, chunk_nbytes_max: int, scratch: Scratch | None = None) -> None:
        self._scratch = scratch or Scratch(chunk_nbytes_max)
        self._limits = Limits(chunk_nbytes_max=chunk_nbytes_max)
        self._own_buffer: memoryview | None = None

    def own_buffer(self, nbytes: int) -> memoryview:
        """Return the decoder's own memory, for a chunk without another destination. Every call returns the same."""
        if self._own_buffer is None:
            self._own_buffer = map_zeros(self._limits.chunk_nbytes_max)
        return self._own_buffer[:nbytes]

    def decode(
        self,
        frame: memoryview,
        expected: Expected,
        destination: memoryview,
        *,
        base: memoryview | None = None,
        check: Check = "blake3",
    ) -> None:
        """Decode a frame, header included, into ``destination``, and prove that it is the expected chunk.

        Args:
            frame: The frame as stored in the pack.
            expected: What the manifest says about it.
            destination: Receives the plain bytes.
            base: The plain bytes of the frame's base; may be ``destination`` itself.
            check: What is proved.

        Raises:
            CorruptError: The header differs from the manifest, a checksum or the chunk id does not match, or the
                payload does not decode.
            UnsupportedError: This version does not have a codec that the frame needs.
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
        """Decode a payload and compare its chunk id with the header's; used by ``verify``.

        Returns:
            The plain bytes: in the memory of ``base`` if that has the same length, else in ``own_buffer``.

        Raises:
            CorruptError: The payload does not decode to the chunk that the header names.
            UnsupportedError: A newer version made the frame.
        """
        is_onto_base = base is not None and len(base) == header.plain_nbytes
        destination = base if base is not None and is_onto_base else self.own_buffer(header.plain_nbytes)
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
        """Decode a payload, and hash the plain bytes with ``proof`` if it is not None."""
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
            raise MalformedError(f"a plain frame stores {len(payload)} bytes instead of {len(destination)}")
        if proof is None:
            kernels.copy_bytes(payload, destination)
            return
        for begin in range(0, len(payload), _PIECE_NBYTES):
            piece = destination[begin : begin + _PIECE_NBYTES]
            kernels.copy_bytes(payload[begin : begin + _PIECE_NBYTES], piece)
            proof.update(piece)


def check_header(header: FrameHeader, expected: Expected, payload_nbytes: int) -> None:
    """Check that a frame's header agrees with the manifest.

    Raises:
        CorruptError: They differ.
    """
    if header.chunk_id != expected.chunk_id:
        raise ChecksumError("the pack contains another frame where the manifest locates this one")
    # The element width may differ: equal bytes with another dtype may have been stored first.
    if header.plain_nbytes != expected.nbytes:
        raise MalformedError("a frame's header and the manifest disagree about its plain size")
    if header.stored_nbytes != payload_nbytes:
        raise MalformedError("a frame's header and the manifest disagree about its stored size")
    if header.base_id != expected.base_id:
        raise MalformedError("a frame's header and the manifest disagree about its base")
