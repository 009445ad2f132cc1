"""Protects segments of a journal: a torn or damaged record ends the segment, and nothing behind it is believed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, check_payload, encode_frame_header
from ckstore.format.journal import (
    NO_RECORD,
    RECORD_HEAD_NBYTES,
    SEGMENT_HEADER_NBYTES,
    Segment,
    decode_segment,
    encode_record_head,
    encode_segment,
    find_head_behind,
    frames_nbytes,
    read_body,
    read_frames,
    read_heads,
)
from ckstore.format.records import RecordPlace, SegmentRecord, with_changes
from ckstore.format.wire import sealed, xxh3_64
from ckstore.hashing import NO_BASE, chunk_id_of
from support.format_samples import STORE_ID

TOKEN = bytes(range(16))
FACTS = SegmentRecord(
    run="main",
    order=3,
    after_seq=7,
    time_ns=5,
    previous=None,
    first=1,
    environment={"torch": "2.13.0"},
)
SEGMENT = Segment(STORE_ID, TOKEN, FACTS)


def frame_of(payload):
    header = FrameHeader(chunk_id_of(payload), NO_BASE, len(payload), len(payload), 1, (), xxh3_64(payload))
    content = encode_frame_header(header) + payload
    return header, content.ljust(-(-len(content) // 64) * 64, b"\0")


def segment_of(records, segment=SEGMENT):
    """Return a segment with records, each a body and the payloads of its frames, and where each record begins."""
    content, starts = encode_segment(segment), []
    before = segment.facts.previous
    previous, number = (NO_RECORD, 0) if before is None else (before.record_id, before.number)
    for body, payloads in records:
        frames = [frame_of(payload) for payload in payloads]
        number += 1
        head, front = encode_record_head(
            number=number,
            step=1200 + number,
            time_ns=number,
            body=body,
            frames_nbytes=frames_nbytes([header for header, _ in frames]),
            previous=previous,
            structure=bytes([number]) * 16,
        )
        starts.append(len(content))
        content += (front + b"".join(each for _, each in frames)).ljust(head.nbytes, b"\0")
        previous = head.record_id
    return content, starts


def reader_of(content):
    return lambda offset, nbytes: content[offset : offset + nbytes]


def heads_of(content, segment=SEGMENT):
    return list(read_heads(reader_of(content), len(content), segment))


RECORDS = [
    (b"the first body", [b"x" * 100, b"y" * 7]),
    (b"a second one " * 50, []),
    (b"the third", [os.urandom(300)]),
]


def test_segment_and_records_read_back():
    content, starts = segment_of(RECORDS)
    assert decode_segment(content[:SEGMENT_HEADER_NBYTES], store_id=STORE_ID) == SEGMENT
    placed = heads_of(content)
    assert [each.offset for each in placed] == starts
    assert [each.head.number for each in placed] == [1, 2, 3]
    assert [each.head.step for each in placed] == [1201, 1202, 1203]
    read = reader_of(content)
    for each, (body, payloads) in zip(placed, RECORDS, strict=True):
        assert read_body(read, each) == body
        found = [(header, offset) for header, offset in read_frames(read, each)]
        assert [content[at + FRAME_HEADER_NBYTES :][: header.stored_nbytes] for header, at in found] == payloads
        for (header, _), payload in zip(found, payloads, strict=True):
            check_payload(header, payload)
    assert placed[1].head.body_stored < placed[1].head.body_plain, "long bodies are compressed"


def test_a_cut_segment_has_exactly_its_whole_records():
    content, starts = segment_of(RECORDS)
    ends = [*starts[1:], len(content)]
    for nbytes in range(SEGMENT_HEADER_NBYTES, len(content)):
        whole = sum(end <= nbytes for end in ends)
        assert len(heads_of(content[:nbytes])) == whole, nbytes


def test_records_fill_whole_blocks():
    content, starts = segment_of(RECORDS)
    assert [start % 4096 for start in [*starts, len(content)]] == [0] * 4


def test_no_damaged_byte_of_the_last_record_goes_unnoticed():
    content, starts = segment_of(RECORDS[:1])
    for at in range(starts[0], len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        assert heads_of(bytes(damaged)) == [], at


def test_a_record_whose_blocks_were_never_written_is_torn():
    # After a power cut, the file has its length and its first block, and zeros behind.
    content, starts = segment_of([*RECORDS, (b"fourth", [os.urandom(9000)])])
    torn = content[: starts[3] + RECORD_HEAD_NBYTES + 64] + bytes(len(content) - starts[3] - RECORD_HEAD_NBYTES - 64)
    assert [each.head.number for each in heads_of(torn)] == [1, 2, 3]


@pytest.mark.parametrize("at", [0, 20, RECORD_HEAD_NBYTES - 1])
def test_nothing_behind_a_damaged_head_is_believed(at):
    content, starts = segment_of(RECORDS)
    damaged = bytearray(content)
    damaged[starts[1] + at] ^= 1
    assert [each.head.number for each in heads_of(bytes(damaged))] == [1]


def test_damaged_bodies_and_headers_of_frames_raise_when_they_are_read():
    content, starts = segment_of(RECORDS)
    first = heads_of(content)[0]
    damaged = bytearray(content)
    damaged[starts[0] + RECORD_HEAD_NBYTES] ^= 1
    with pytest.raises(ChecksumError, match="record 1"):
        read_body(reader_of(bytes(damaged)), first)
    damaged = bytearray(content)
    damaged[starts[0] + first.head.frames_begin + 20] ^= 1
    with pytest.raises(ChecksumError):
        list(read_frames(reader_of(bytes(damaged)), first))


def test_the_last_whole_record_is_checked_whatever_follows_it():
    content, starts = segment_of(RECORDS[:2])
    damaged = bytearray(content)
    damaged[starts[1] + RECORD_HEAD_NBYTES] ^= 1
    for behind in (b"", bytes(10_000), b"garbage" * 100, content[starts[0] :]):
        assert [each.head.number for each in heads_of(content + behind)] == [1, 2]
        assert [each.head.number for each in heads_of(bytes(damaged) + behind)] == [1]


def test_only_a_head_that_no_torn_record_has_shows_damage():
    content, starts = segment_of([*RECORDS, (b"fourth", [os.urandom(9000)])])
    read = reader_of(content)
    behind = find_head_behind(read, starts[1], len(content), 1)
    assert behind is not None
    assert behind.number == 3, "record 2 may be torn, record 3 cannot exist then"
    assert find_head_behind(read, starts[3], len(content), 3) is None
    far = content[: starts[1]] + bytes(3 << 20) + content[starts[3] :]
    assert find_head_behind(reader_of(far), starts[1], len(far), 1).number == 4


def test_records_of_another_chain_are_not_read():
    # The blocks of a deleted file may come back behind a torn end.
    content, starts = segment_of(RECORDS)
    other, other_starts = segment_of([(b"foreign", []), *RECORDS[1:]])
    mixed = content[: starts[1]] + other[other_starts[1] :]
    assert [each.head.number for each in heads_of(mixed)] == [1]


def test_a_segment_continues_the_record_that_it_names():
    place = RecordPlace(token=bytes(16), number=9, record_id=b"r" * 16)
    facts = with_changes(FACTS, previous=place, first=10)
    segment = replace(SEGMENT, facts=facts)
    content, _ = segment_of(RECORDS, segment)
    assert decode_segment(content[:SEGMENT_HEADER_NBYTES]) == segment
    assert [each.head.number for each in heads_of(content, segment)] == [10, 11, 12]
    assert heads_of(content, SEGMENT) == [], "read as a segment that continues nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 2},
        {"run": "../other"},
        {"previous": RecordPlace(token=bytes(16), number=4, record_id=bytes(16))},
        {"previous": RecordPlace(token=bytes(15), number=0, record_id=bytes(16))},
        {"environment": {"torch": "x" * 1000, "a": "x" * 1000, "b": "x" * 1000, "c": "x" * 1000}},
    ],
)
def test_impossible_headers_are_never_written(changes):
    with pytest.raises(MalformedError):
        encode_segment(replace(SEGMENT, facts=with_changes(FACTS, **changes)))


def test_damaged_and_foreign_headers_are_refused():
    content = encode_segment(SEGMENT)
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(CorruptError):
            decode_segment(bytes(damaged))
    with pytest.raises(MalformedError, match="belongs to store"):
        decode_segment(content, store_id=bytes(16))
    newer = sealed(content[:8] + b"\xff\x00" + content[10:-8], len(content))
    with pytest.raises(UnsupportedError, match="Upgrade ckstore"):
        decode_segment(newer)


def test_a_record_of_a_newer_version_is_reported_and_not_taken_for_a_torn_one():
    content, starts = segment_of(RECORDS)
    head = content[starts[1] : starts[1] + RECORD_HEAD_NBYTES]
    newer = sealed(head[:8] + b"\xff\x00" + head[10:-8], RECORD_HEAD_NBYTES)
    content = content[: starts[1]] + newer + content[starts[1] + RECORD_HEAD_NBYTES :]
    with pytest.raises(UnsupportedError):
        heads_of(content)
