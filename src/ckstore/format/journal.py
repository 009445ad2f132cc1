"""A segment of a run's journal: a header, and records that one process appends.

A segment is ``header 4 KiB | record | record | ...``. A record is ``head 128 | body | zeros | frames | zeros``. Its
frames are those of packs, and start at multiples of 64. A record fills whole blocks of 4 KiB, so that appending to a
segment rewrites no block with acknowledged bytes. Each record names the one before it, also across segments. Reading
ends at the first record that is not whole: the process that wrote it was killed, and has never acknowledged it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckstore.config import Limits, is_name
from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import (
    FRAME_ALIGN,
    FRAME_HEADER_NBYTES,
    FrameHeader,
    check_payload,
    decode_frame_header,
    frame_extent,
)
from ckstore.format.records import FORMAT_VERSION, SegmentRecord, check_readable, decode_stored, encode_inner
from ckstore.format.wire import (
    BLOCK_NBYTES,
    SEAL_NBYTES,
    STORE_ID_NBYTES,
    align_up,
    check_seal,
    check_zero,
    exactly,
    sealed,
)
from ckstore.format.zstd import plain_section, stored_section
from ckstore.hashing import digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

SEGMENT_HEADER_NBYTES = BLOCK_NBYTES
RECORD_HEAD_NBYTES = 128
RECORD_ALIGN = BLOCK_NBYTES
RECORD_ID_NBYTES = 16
TOKEN_NBYTES = 16
SEGMENT_MAGIC = b"CKJRNL\x00\x01"
RECORD_MAGIC = b"CKPOINT\x01"
NO_RECORD = bytes(RECORD_ID_NBYTES)
"""Id of the record before the first one of a chain."""

_SEGMENT = struct.Struct("<8sHHIQQ16s16sQ")
_HEAD = struct.Struct("<8sHHI6Q16s16s16s")
_PLACE = struct.Struct("<16s3Q")
_DEFAULT_LIMITS = Limits()
_WINDOW_NBYTES = 1 << 20
_CHECKED_NBYTES = 4 << 20
"""Bytes of a record that are read by one request when all of it is checked."""

Read = Callable[[int, int], "Buffer"]
"""Reads bytes of a segment, by offset and number; fewer at its end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The header of a segment.

    Args:
        store_id: The store.
        token: 16 random bytes, also in the file's name.
        facts: Everything else.
    """

    store_id: bytes
    token: bytes
    facts: SegmentRecord


class RecordHead(NamedTuple):
    """The head of a record.

    Args:
        number: Number of the record in its chain, from 1.
        step: The trainer's step.
        time_ns: When it was made, nanoseconds since 1970.
        body_stored: Bytes of the body in the file.
        body_plain: Bytes of the body, decompressed.
        frames_nbytes: Bytes of the frames, with the padding after each.
        previous: Id of the record before it.
        record_id: Its own id.
        structure: Digest of the state's tree and tensors. A checkpoint of the same step and structure is its keyframe.
    """

    number: int
    step: int
    time_ns: int
    body_stored: int
    body_plain: int
    frames_nbytes: int
    previous: bytes
    record_id: bytes
    structure: bytes

    @property
    def frames_begin(self) -> int:
        """Where the frames begin, in bytes after the begin of the record."""
        return align_up(RECORD_HEAD_NBYTES + self.body_stored, FRAME_ALIGN)

    @property
    def frames_end(self) -> int:
        """Where the frames end, in bytes after the begin of the record. Zeros follow."""
        return self.frames_begin + self.frames_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return align_up(self.frames_end, RECORD_ALIGN)


class PlacedHead(NamedTuple):
    """The head of a record, and the offset of the record in its segment."""

    head: RecordHead
    offset: int


def encode_segment(segment: Segment) -> bytes:
    """Return the 4096 bytes of a header.

    Raises:
        MalformedError: A reader would refuse it.
    """
    _check_segment(segment, None)
    body = encode_inner(segment.facts)
    head = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, 0, 0, 0, segment.store_id, segment.token, len(body))
    if len(head) + len(body) > SEGMENT_HEADER_NBYTES - SEAL_NBYTES:
        raise MalformedError(f"the facts of a journal's segment have {len(body)} bytes")
    return sealed(head + body, SEGMENT_HEADER_NBYTES)


def decode_segment(content: Buffer, *, store_id: bytes | None = None, where: object = None) -> Segment:
    """Decode the header of a segment.

    Raises:
        ChecksumError: The header is damaged.
        MalformedError: Not a segment, or of another store.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = exactly(content, SEGMENT_HEADER_NBYTES, "the header of a journal's segment", where)
    if view[:8] != SEGMENT_MAGIC:
        raise MalformedError("no segment of a journal starts here", where=where)
    check_seal(view, "the header of a journal's segment", where)
    _, version, reserved, reserved_too, mandatory, _, found_store, token, nbytes = _SEGMENT.unpack_from(view)
    check_readable(version, mandatory, where=where)
    end = _SEGMENT.size + nbytes
    if reserved or reserved_too or end > SEGMENT_HEADER_NBYTES - SEAL_NBYTES:
        raise MalformedError("the header of a journal's segment has fields out of range", where=where)
    check_zero(view[end:-SEAL_NBYTES], "the header of a journal's segment", where)
    segment = Segment(found_store, token, decode_stored(view[_SEGMENT.size : end], SegmentRecord, where=where))
    if store_id is not None and found_store != store_id:
        raise MalformedError(
            f"this segment belongs to store {found_store.hex()}", where=where, todo="move it back to its own store"
        )
    _check_segment(segment, where)
    return segment


def _check_segment(segment: Segment, where: object) -> None:
    facts = segment.facts
    before = facts.previous
    last = 0 if before is None else before.number
    if not (
        len(segment.store_id) == STORE_ID_NBYTES
        and len(segment.token) == TOKEN_NBYTES
        and is_name(facts.run)
        and facts.first == last + 1
        and (before is None or (len(before.token) == TOKEN_NBYTES and len(before.record_id) == RECORD_ID_NBYTES))
    ):
        raise MalformedError("the facts of a journal's segment contradict each other", where=where)


def structure_of(tree: Buffer, tensors: Buffer) -> bytes:
    """Return the digest of a state's encoded tree and encoded table of tensors, as in a manifest."""
    return digest_of(digest_of(tree) + digest_of(tensors))[:RECORD_ID_NBYTES]


def record_id_of(previous: bytes, number: int, step: int, time_ns: int, body: Buffer) -> bytes:
    """Return the id of a record: it covers the record before it and, by their ids, the chunks of its frames."""
    return digest_of(_PLACE.pack(previous, number, step, time_ns) + bytes(body))[:RECORD_ID_NBYTES]


def encode_record_head(
    *, number: int, step: int, time_ns: int, body: bytes, frames_nbytes: int, previous: bytes, structure: bytes
) -> tuple[RecordHead, bytes]:
    """Return the head of a record, and the bytes in front of its frames: head, body and padding.

    Behind the frames, the writer adds zeros up to ``RecordHead.nbytes``.

    Args:
        number: Number of the record in its chain, from 1.
        step: The trainer's step.
        time_ns: When it was made.
        body: What the record says, plain.
        frames_nbytes: Bytes of the frames, each with its padding.
        previous: Id of the record before it.
        structure: See ``structure_of``.
    """
    stored = stored_section(memoryview(body))
    record_id = record_id_of(previous, number, step, time_ns, body)
    head = RecordHead(number, step, time_ns, len(stored), len(body), frames_nbytes, previous, record_id, structure)
    encoded = sealed(_HEAD.pack(RECORD_MAGIC, FORMAT_VERSION, 0, 0, *head), RECORD_HEAD_NBYTES)
    return head, (encoded + stored).ljust(head.frames_begin, b"\0")


def decode_record_head(content: Buffer, *, limits: Limits = _DEFAULT_LIMITS, where: object = None) -> RecordHead:
    """Decode the 128 bytes of a head.

    Raises:
        ChecksumError: The head is damaged.
        MalformedError: No record starts here, or its lengths are impossible.
        UnsupportedError: An unknown version.
    """
    view = exactly(content, RECORD_HEAD_NBYTES, "a record of a journal", where)
    if view[:8] != RECORD_MAGIC:
        raise MalformedError("no record of a journal starts here", where=where)
    check_seal(view, "a record of a journal", where)
    _, version, reserved, reserved_too, *fields = _HEAD.unpack_from(view)
    check_readable(version, where=where)
    check_zero(view[_HEAD.size : -SEAL_NBYTES], "a record of a journal", where)
    head = RecordHead(*fields)
    if (
        reserved
        or reserved_too
        or not head.number
        or not 1 <= head.body_stored <= head.body_plain <= limits.manifest_nbytes_max
        or head.frames_nbytes % FRAME_ALIGN
    ):
        raise MalformedError("a record of a journal has fields out of range", where=where)
    return head


def read_heads(
    read: Read,
    nbytes: int,
    segment: Segment,
    *,
    limits: Limits = _DEFAULT_LIMITS,
    where: object = None,
    continued: Container[bytes] = (),
) -> Iterator[PlacedHead]:
    """Yield the heads of a segment's whole records. The last one is read whole, because it may be torn.

    A record is begun when the one before it is durable. So a head shows that the record before it was acknowledged.
    And so does a segment that continues a record: its writer has made this record durable first.

    Args:
        read: Reads bytes of the file.
        nbytes: Length of the file.
        segment: Its header.
        limits: Limits of the store.
        where: The file, for messages.
        continued: Ids of records that other segments continue. If the last one is among them, its head is enough to
            know that it is not torn. Damage behind the head is not found then.

    Raises:
        UnsupportedError: A newer version has written a record.
    """
    before = segment.facts.previous
    previous, number = (NO_RECORD, 0) if before is None else (before.record_id, before.number)
    last: PlacedHead | None = None
    offset = SEGMENT_HEADER_NBYTES
    while offset + RECORD_HEAD_NBYTES <= nbytes:
        try:
            head = decode_record_head(read(offset, RECORD_HEAD_NBYTES), limits=limits, where=where)
        except CorruptError:
            break
        except UnsupportedError:
            if last is not None:
                yield last
            raise
        if offset + head.nbytes > nbytes or (head.previous, head.number) != (previous, number + 1):
            break
        if last is not None:
            yield last
        last = PlacedHead(head, offset)
        previous, number, offset = head.record_id, head.number, offset + head.nbytes
    if last is not None and (last.head.record_id in continued or _is_whole(read, last, limits, where)):
        yield last


def find_head_behind(
    read: Read, begin: int, end: int, number: int, *, limits: Limits = _DEFAULT_LIMITS
) -> RecordHead | None:
    """Return the first of ``heads_behind``; None if there is none."""
    return next(heads_behind(read, begin, end, number, limits=limits), None)


def heads_behind(
    read: Read, begin: int, end: int, number: int, *, limits: Limits = _DEFAULT_LIMITS
) -> Iterator[RecordHead]:
    """Yield the heads behind the last whole record that cannot be part of a torn one.

    A record is begun when the one before it is durable. So only the next record can be torn, and the head of a later
    one shows that acknowledged bytes are damaged.

    Args:
        read: Reads bytes of the file.
        begin: Where the last whole record ends.
        end: Length of the file.
        number: Number of the last whole record.
        limits: Limits of the store.
    """
    for offset in range(begin, end, _WINDOW_NBYTES):
        content = bytes(read(offset, _WINDOW_NBYTES + RECORD_HEAD_NBYTES))
        at = content.find(RECORD_MAGIC)
        while 0 <= at < _WINDOW_NBYTES:
            if at % RECORD_ALIGN == 0:
                with contextlib.suppress(CorruptError, UnsupportedError):
                    head = decode_record_head(content[at : at + RECORD_HEAD_NBYTES], limits=limits)
                    if head.number > number + 1:
                        yield head
            at = content.find(RECORD_MAGIC, at + 1)


def _is_whole(read: Read, placed: PlacedHead, limits: Limits, where: object) -> bool:
    try:
        check_record(read, placed, limits=limits, where=where)
    except CorruptError:
        return False
    return True


def check_record(read: Read, placed: PlacedHead, *, limits: Limits = _DEFAULT_LIMITS, where: object = None) -> None:
    """Check every byte of a record whose head was read. Frames are not decoded.

    Raises:
        CorruptError: A byte is damaged or missing.
        UnsupportedError: A newer version has written a frame.
    """
    read = _Window(read, placed.offset + placed.head.nbytes).read
    read_body(read, placed, where=where)
    for header, offset in read_frames(read, placed, limits=limits, where=where):
        rest = read(offset + FRAME_HEADER_NBYTES, frame_extent(header.stored_nbytes) - FRAME_HEADER_NBYTES)
        payload = memoryview(rest).cast("B")[: header.stored_nbytes]
        check_payload(header, payload, where=where)
        check_zero(memoryview(rest).cast("B")[header.stored_nbytes :], "a record of a journal", where)
    head = placed.head
    padding = read(placed.offset + head.frames_end, head.nbytes - head.frames_end)
    check_zero(exactly(padding, head.nbytes - head.frames_end, "a record of a journal", where), "its padding", where)


class _Window:
    """Reads the small parts of a record in few large requests.

    Args:
        read: Reads bytes of the segment.
        end: Where the record ends.
    """

    def __init__(self, read: Read, end: int) -> None:
        self._read = read
        self._end = end
        self._begin = 0
        self._content = memoryview(b"")

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return these bytes; fewer only at the end of the file."""
        begin = offset - self._begin
        if not 0 <= begin <= begin + nbytes <= len(self._content):
            count = max(nbytes, min(_CHECKED_NBYTES, self._end - offset))
            self._begin, begin = offset, 0
            self._content = memoryview(self._read(offset, count)).cast("B")
        return self._content[begin : begin + nbytes]


def read_body(read: Read, placed: PlacedHead, *, where: object = None) -> bytes:
    """Return the plain body of a record.

    Raises:
        ChecksumError: It is not the body that the record's id names.
        MalformedError: It is cut off, or cannot be decompressed.
    """
    head, offset = placed
    stored = memoryview(read(offset + RECORD_HEAD_NBYTES, head.frames_begin - RECORD_HEAD_NBYTES)).cast("B")
    stored = exactly(stored, head.frames_begin - RECORD_HEAD_NBYTES, "the body of a journal's record", where)
    check_zero(stored[head.body_stored :], "a record of a journal", where)
    body = bytes(plain_section(stored[: head.body_stored], head.body_plain, where=where))
    if record_id_of(head.previous, head.number, head.step, head.time_ns, body) != head.record_id:
        raise ChecksumError(f"the body of record {head.number} of a journal is damaged", where=where)
    return body


def read_frames(
    read: Read, placed: PlacedHead, *, limits: Limits = _DEFAULT_LIMITS, where: object = None
) -> Iterator[tuple[FrameHeader, int]]:
    """Yield the header and the offset in the segment of each frame of a record. Payloads are not read.

    Raises:
        CorruptError: A header is damaged, or the frames do not fill their place.
        UnsupportedError: A newer version has written a frame.
    """
    offset = placed.offset + placed.head.frames_begin
    end = placed.offset + placed.head.frames_end
    while offset < end:
        header = decode_frame_header(read(offset, FRAME_HEADER_NBYTES), limits=limits, where=where)
        yield header, offset
        offset += frame_extent(header.stored_nbytes)
    if offset != end:
        raise MalformedError("the frames of a journal's record exceed it", where=where, number=placed.head.number)


def frames_nbytes(headers: Sequence[FrameHeader]) -> int:
    """Return the bytes that frames occupy in a record, with the padding after each."""
    return sum(frame_extent(header.stored_nbytes) for header in headers)
