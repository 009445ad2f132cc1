"""Protects the frame header: it round-trips, all bytes are covered, and invalid frames are not written or read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import ChecksumError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import (
    FRAME_HEADER_NBYTES,
    FrameHeader,
    check_payload,
    decode_frame_header,
    encode_frame_header,
    frame_extent,
)
from ckstore.format.wire import sealed
from ckstore.hashing import NO_BASE, ChunkId
from support.format_samples import sample_frames

PLAIN, CODED, DELTA = (header for header, _ in sample_frames())

ids = st.binary(min_size=32, max_size=32).filter(lambda found: found != NO_BASE).map(ChunkId)
steps = st.lists(st.tuples(st.integers(1, 65_535), st.binary(max_size=12)), max_size=4).map(tuple)


@st.composite
def headers(draw):
    width = draw(st.sampled_from((1, 2, 4, 8)))
    plain_nbytes = width * draw(st.integers(1, (4 << 20) // width))
    chain = draw(steps)
    stored_nbytes = draw(st.integers(1, plain_nbytes)) if chain else plain_nbytes
    chunk_id = draw(ids)
    base_id = draw(ids.filter(lambda found: found != chunk_id)) if chain and draw(st.booleans()) else NO_BASE
    checksum = draw(st.integers(0, (1 << 64) - 1))
    return FrameHeader(chunk_id, base_id, plain_nbytes, stored_nbytes, width, chain, checksum)


@given(headers())
def test_header_round_trips(header):
    encoded = encode_frame_header(header)
    assert len(encoded) == FRAME_HEADER_NBYTES
    assert decode_frame_header(encoded) == header


@pytest.mark.parametrize("header", [PLAIN, CODED, DELTA])
def test_every_flipped_bit_is_refused(header):
    encoded = encode_frame_header(header)
    for at in range(len(encoded)):
        for bit in range(8):
            flipped = bytearray(encoded)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode_frame_header(flipped)


def test_every_other_length_is_refused():
    encoded = encode_frame_header(PLAIN)
    for nbytes in range(FRAME_HEADER_NBYTES):
        with pytest.raises(MalformedError):
            decode_frame_header(encoded[:nbytes])
    with pytest.raises(MalformedError):
        decode_frame_header(encoded + b"\0")


IMPOSSIBLE = {
    "elements of three bytes": replace(PLAIN, element_width=3),
    "no plain bytes": replace(CODED, plain_nbytes=0),
    "plain bytes over the chunk limit": replace(CODED, plain_nbytes=(4 << 20) + 2),
    "half an element": replace(CODED, plain_nbytes=255),
    "no stored bytes": replace(CODED, stored_nbytes=0),
    "more stored than plain bytes": replace(CODED, stored_nbytes=257),
    "plain bytes of another length": replace(PLAIN, stored_nbytes=100),
    "plain bytes with a base": replace(PLAIN, base_id=DELTA.chunk_id),
    "no chunk id": replace(CODED, chunk_id=NO_BASE),
    "its own base": replace(CODED, base_id=CODED.chunk_id),
    "a short id": replace(CODED, chunk_id=ChunkId(b"x" * 31)),
    "too many steps": replace(CODED, steps=((1, b""),) * 5),
    "codec zero": replace(CODED, steps=((0, b""),)),
    "a long config": replace(CODED, steps=((1, bytes(13)),)),
}


@pytest.mark.parametrize("header", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_frames_are_not_written(header):
    with pytest.raises(MalformedError):
        encode_frame_header(header)


def forge(header, at, content):
    """Return an encoded header with some bytes replaced and a correct seal."""
    body = bytearray(encode_frame_header(header)[:-8])
    body[at : at + len(content)] = content
    return sealed(bytes(body), FRAME_HEADER_NBYTES)


FORGED = {
    "magic": forge(CODED, 0, b"X"),
    "element width": forge(CODED, 12, b"\3"),
    "step count": forge(CODED, 13, b"\5"),
    "reserved": forge(CODED, 14, b"\1"),
    "plain_nbytes beyond the limit": forge(CODED, 16, b"\xff" * 8),
    "stored_nbytes beyond plain_nbytes": forge(CODED, 24, b"\xff" * 8),
    "no chunk id": forge(CODED, 32, bytes(32)),
    "its own base": forge(CODED, 64, CODED.chunk_id),
    "steps fewer than are filled": forge(CODED, 13, b"\0"),
    "codec zero": forge(CODED, 104, b"\0\0"),
    "config too long": forge(CODED, 106, b"\x0d"),
    "config longer than said": forge(CODED, 106, b"\0"),
    "reserved byte of a step": forge(CODED, 107, b"\1"),
    "a step beyond the count": forge(CODED, 120, b"\1"),
    "padding": forge(CODED, 175, b"\1"),
}


@pytest.mark.parametrize("encoded", FORGED.values(), ids=FORGED.keys())
def test_wrong_header_with_correct_seal_is_refused(encoded):
    with pytest.raises(MalformedError):
        decode_frame_header(encoded)


@pytest.mark.parametrize(("at", "content"), [(8, b"\xff\0"), (10, b"\1\0")], ids=["version", "flags"])
def test_newer_frames_are_unsupported(at, content):
    with pytest.raises(UnsupportedError):
        decode_frame_header(forge(CODED, at, content))


def test_chunk_limit_comes_from_the_store():
    encoded = encode_frame_header(PLAIN)
    with pytest.raises(MalformedError):
        decode_frame_header(encoded, limits=Limits(chunk_nbytes_max=128))


def test_payloads_are_checked():
    header, payload = sample_frames()[1]
    check_payload(header, payload)
    with pytest.raises(MalformedError):
        check_payload(header, payload[:-1])
    for at in range(len(payload)):
        flipped = bytearray(payload)
        flipped[at] ^= 1
        with pytest.raises(ChecksumError):
            check_payload(header, flipped)


@given(st.binary(min_size=FRAME_HEADER_NBYTES, max_size=FRAME_HEADER_NBYTES))
def test_arbitrary_sealed_fields_raise_only_our_errors(content):
    encoded = sealed(b"CKFRAME\x01\x01\0\0\0" + content[12:-8], FRAME_HEADER_NBYTES)
    try:
        header = decode_frame_header(encoded)
    except CkstoreError:
        return
    assert encode_frame_header(header) == encoded


def test_extents_do_not_overlap_the_next_frame():
    assert frame_extent(1) == 256
    assert frame_extent(64) == 256
    assert frame_extent(65) == 320
