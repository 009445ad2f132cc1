"""A stored chunk: frame header and payload.

The header has 192 bytes and starts at a multiple of 64, so that a scan without the directory finds every frame. It
lists the codec steps ``(codec id, config)`` in the order in which the writer applied them. Without steps the payload
is the plain chunk. This module does not check codec ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckstore.config import Limits
from ckstore.errors import ChecksumError, MalformedError, UnsupportedError
from ckstore.format.records import FORMAT_VERSION, check_readable
from ckstore.format.wire import align_up, check_seal, check_zero, exactly, sealed, xxh3_64
from ckstore.hashing import DIGEST_NBYTES, NO_BASE, ChunkId

if TYPE_CHECKING:
    from typing_extensions import Buffer


FRAME_MAGIC = b"CKFRAME\x01"
FRAME_ALIGN = 64
FRAME_HEADER_NBYTES = 192
STEP_COUNT_MAX = 4
STEP_CONFIG_NBYTES_MAX = 12
ELEMENT_WIDTHS = (1, 2, 4, 8)

_DEFAULT_LIMITS = Limits()
_FIXED = struct.Struct("<8sHHBBHQQ32s32sQ")
_STEP = struct.Struct("<HBB12s")
_STEPS_END = _FIXED.size + STEP_COUNT_MAX * _STEP.size


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame; ``stored_nbytes`` is the length of the payload alone."""

    chunk_id: ChunkId
    base_id: ChunkId
    plain_nbytes: int
    stored_nbytes: int
    element_width: int
    steps: tuple[tuple[int, bytes], ...]
    payload_xxh3: int
    flags: int = 0

    @property
    def frame_nbytes(self) -> int:
        """Bytes of header and payload, without the padding after them."""
        return FRAME_HEADER_NBYTES + self.stored_nbytes

    @property
    def has_base(self) -> bool:
        """Whether decoding needs another chunk."""
        return self.base_id != NO_BASE

    def with_checksum(self, payload_xxh3: int) -> FrameHeader:
        """Return a copy of the header with the checksum of its payload."""
        return replace(self, payload_xxh3=payload_xxh3)


def frame_extent(stored_nbytes: int) -> int:
    """Return the bytes that a frame occupies in a pack, including the padding to the next frame."""
    return align_up(FRAME_HEADER_NBYTES + stored_nbytes, FRAME_ALIGN)


def encode_frame_header(header: FrameHeader, *, limits: Limits = _DEFAULT_LIMITS) -> bytes:
    """Return the 192 bytes of a header.

    Raises:
        MalformedError: A reader would refuse this header.
    """
    _check_header(header, limits, None)
    fixed = _FIXED.pack(
        FRAME_MAGIC,
        FORMAT_VERSION,
        header.flags,
        header.element_width,
        len(header.steps),
        0,
        header.plain_nbytes,
        header.stored_nbytes,
        header.chunk_id,
        header.base_id,
        header.payload_xxh3,
    )
    steps = b"".join(_STEP.pack(codec_id, len(config), 0, config) for codec_id, config in header.steps)
    return sealed(fixed + steps, FRAME_HEADER_NBYTES)


def decode_frame_header(content: Buffer, *, limits: Limits = _DEFAULT_LIMITS, where: object = None) -> FrameHeader:
    """Decode the 192 bytes of a header.

    Raises:
        MalformedError: No frame starts here, or its lengths are impossible.
        ChecksumError: The header is damaged.
        UnsupportedError: An unknown version or flag.
    """
    view = exactly(content, FRAME_HEADER_NBYTES, "a frame header", where)
    if view[:8] != FRAME_MAGIC:
        raise MalformedError("no frame starts here", where=where)
    check_seal(view, "a frame header", where)
    (_, version, flags, width, step_count, reserved, plain_nbytes, stored_nbytes, chunk_id, base_id, payload_xxh3) = (
        _FIXED.unpack_from(view)
    )
    check_readable(version, where=where)
    if reserved or step_count > STEP_COUNT_MAX:
        raise MalformedError("a frame header has fields out of range", where=where)
    check_zero(view[_FIXED.size + step_count * _STEP.size : FRAME_HEADER_NBYTES - 8], "a frame header", where)
    steps = tuple(_decode_step(view, index, where) for index in range(step_count))
    header = FrameHeader(
        ChunkId(chunk_id), ChunkId(base_id), plain_nbytes, stored_nbytes, width, steps, payload_xxh3, flags
    )
    _check_header(header, limits, where)
    return header


def _decode_step(view: memoryview, index: int, where: object) -> tuple[int, bytes]:
    codec_id, config_nbytes, reserved, config = _STEP.unpack_from(view, _FIXED.size + index * _STEP.size)
    if reserved or config_nbytes > STEP_CONFIG_NBYTES_MAX or any(config[config_nbytes:]):
        raise MalformedError("a codec step of a frame is malformed", where=where)
    return codec_id, config[:config_nbytes]


def check_payload(header: FrameHeader, payload: Buffer, *, where: object = None) -> None:
    """Compare a payload with its header's length and checksum.

    Raises:
        ChecksumError: The stored bytes are damaged.
        MalformedError: The length is wrong.
    """
    view = exactly(payload, header.stored_nbytes, "a frame's payload", where)
    if xxh3_64(view) != header.payload_xxh3:
        raise ChecksumError("the checksum of a frame's payload differs", where=where, chunk_id=header.chunk_id)


def _check_header(header: FrameHeader, limits: Limits, where: object) -> None:
    if header.flags:
        raise UnsupportedError(
            f"this version of ckstore does not know the frame flags {header.flags:#x}",
            where=where,
            todo="upgrade ckstore",
        )
    problem = _problem_with_lengths(header, limits) or _problem_with_ids(header) or _problem_with_steps(header)
    if problem:
        raise MalformedError(f"a frame header is malformed: {problem}", where=where)


def _problem_with_lengths(header: FrameHeader, limits: Limits) -> str | None:
    if header.element_width not in ELEMENT_WIDTHS:
        return f"elements of {header.element_width} bytes"
    if not 1 <= header.plain_nbytes <= limits.chunk_nbytes_max:
        return f"{header.plain_nbytes} plain bytes, beyond the chunk limit of {limits.chunk_nbytes_max}"
    if header.plain_nbytes % header.element_width:
        return f"{header.plain_nbytes} plain bytes are not whole elements of {header.element_width}"
    if not 1 <= header.stored_nbytes <= header.plain_nbytes:
        return f"{header.stored_nbytes} stored bytes for {header.plain_nbytes} plain ones"
    if not header.steps and header.stored_nbytes != header.plain_nbytes:
        return "a plain payload with another length than its chunk"
    return None


def _problem_with_ids(header: FrameHeader) -> str | None:
    if len(header.chunk_id) != DIGEST_NBYTES or len(header.base_id) != DIGEST_NBYTES:
        return "an id is not 32 bytes long"
    if header.chunk_id == NO_BASE:
        return "the chunk id is zero"
    if header.chunk_id == header.base_id:
        return "a chunk that is its own base"
    if header.has_base and not header.steps:
        return "a plain payload with a base"
    return None


def _problem_with_steps(header: FrameHeader) -> str | None:
    if len(header.steps) > STEP_COUNT_MAX:
        return f"more than {STEP_COUNT_MAX} steps"
    for codec_id, config in header.steps:
        if not 0 < codec_id < 1 << 16 or len(config) > STEP_CONFIG_NBYTES_MAX:
            return "a codec step out of range"
    return None
