"""Protects packs: superheader, directory and tail cover every byte, and a scan finds frames without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.frame import encode_frame_header as encode_header
from ckstore.format.pack import (
    SUPERHEADER_NBYTES,
    TAIL_NBYTES,
    DirectoryEntry,
    PackTail,
    check_entry,
    decode_directory,
    decode_superheader,
    decode_tail,
    encode_directory,
    encode_superheader,
    encode_tail,
    scan_frames,
)
from ckstore.format.wire import is_zero, sealed, xxh3_64
from ckstore.hashing import NO_BASE, PackId, digest_of
from support.format_samples import OTHER_PACK_ID, PACK_ID, STORE_ID, sample_chunk_id, sample_frames, sample_pack

PACK = sample_pack()
TAIL = decode_tail(PACK[-TAIL_NBYTES:])
DIRECTORY_BYTES = PACK[TAIL.directory_offset : TAIL.directory_offset + TAIL.directory_nbytes]
DIRECTORY = decode_directory(DIRECTORY_BYTES, TAIL)


def padding_ranges(tail, directory):
    """Yield the (offset, nbytes) of every gap in a pack. Gaps hold zeros."""
    behind = SUPERHEADER_NBYTES
    for entry in directory.entries:
        if entry.offset > behind:
            yield behind, entry.offset - behind
        behind = entry.end
    if tail.directory_offset > behind:
        yield behind, tail.directory_offset - behind
    behind = tail.directory_offset + tail.directory_nbytes
    if tail.pack_nbytes - TAIL_NBYTES > behind:
        yield behind, tail.pack_nbytes - TAIL_NBYTES - behind


def read_pack(pack):
    """Read a pack as ``verify`` at level ``read`` does: every byte is checked."""
    decode_superheader(pack[:SUPERHEADER_NBYTES], store_id=STORE_ID, pack_id=PACK_ID)
    tail = decode_tail(pack[-TAIL_NBYTES:], pack_nbytes=len(pack), store_id=STORE_ID, pack_id=PACK_ID)
    directory = decode_directory(pack[tail.directory_offset :][: tail.directory_nbytes], tail)
    for entry in directory.entries:
        header = decode_frame_header(pack[entry.offset : entry.offset + FRAME_HEADER_NBYTES])
        check_entry(entry, header)
        check_payload(header, pack[entry.offset + FRAME_HEADER_NBYTES : entry.end])
    for offset, nbytes in padding_ranges(tail, directory):
        if not is_zero(memoryview(pack)[offset : offset + nbytes]):
            raise MalformedError("padding is not zero")
    return directory


def test_pack_round_trips():
    headers = [header for header, _ in sample_frames()]
    assert [entry.chunk_id for entry in read_pack(PACK).entries] == [header.chunk_id for header in headers]


def test_every_flipped_byte_of_a_pack_is_found():
    pack = bytearray(PACK)
    for at in range(len(pack)):
        pack[at] ^= 1 << at % 8
        with pytest.raises((CorruptError, UnsupportedError)):
            read_pack(pack)
        pack[at] ^= 1 << at % 8
    read_pack(pack)


def test_padding_and_structures_fill_the_file():
    covered = SUPERHEADER_NBYTES + TAIL_NBYTES + TAIL.directory_nbytes
    covered += sum(entry.end - entry.offset for entry in DIRECTORY.entries)
    assert covered + sum(nbytes for _, nbytes in padding_ranges(TAIL, DIRECTORY)) == len(PACK)


def test_packs_of_another_name_store_or_size_are_refused():
    with pytest.raises(MalformedError, match="store"):
        decode_superheader(PACK[:SUPERHEADER_NBYTES], store_id=bytes(16))
    with pytest.raises(MalformedError, match="id"):
        decode_superheader(PACK[:SUPERHEADER_NBYTES], pack_id=OTHER_PACK_ID)
    with pytest.raises(MalformedError, match="store"):
        decode_tail(PACK[-TAIL_NBYTES:], store_id=bytes(16))
    with pytest.raises(MalformedError, match="id"):
        decode_tail(PACK[-TAIL_NBYTES:], pack_id=OTHER_PACK_ID)
    with pytest.raises(MalformedError, match="bytes"):
        decode_tail(PACK[-TAIL_NBYTES:], pack_nbytes=len(PACK) + 4096)


def test_stale_block_is_refused():
    with pytest.raises(MalformedError):
        decode_tail(PACK[:TAIL_NBYTES])
    with pytest.raises(MalformedError):
        decode_superheader(PACK[-SUPERHEADER_NBYTES:])
    with pytest.raises(MalformedError):
        decode_tail(bytes(TAIL_NBYTES))


def resealed(block, at, content):
    """Return a block with some bytes replaced and a correct seal."""
    body = bytearray(block[:-8])
    body[at : at + len(content)] = content
    return sealed(bytes(body), len(block))


@pytest.mark.parametrize(("at", "content"), [(8, b"\xff\0"), (16, b"\1")], ids=["version", "mandatory flag"])
def test_newer_packs_are_unsupported(at, content):
    with pytest.raises(UnsupportedError):
        decode_superheader(resealed(PACK[:SUPERHEADER_NBYTES], at, content))
    with pytest.raises(UnsupportedError):
        decode_tail(resealed(PACK[-TAIL_NBYTES:], at, content))


def test_wrong_magic_with_right_seal_is_refused():
    with pytest.raises(MalformedError, match="no pack starts here"):
        decode_superheader(resealed(PACK[:SUPERHEADER_NBYTES], 0, b"X"))
    with pytest.raises(MalformedError, match="does not end with a tail"):
        decode_tail(resealed(PACK[-TAIL_NBYTES:], 0, b"X"))


def test_optional_flags_are_kept_and_ignored():
    assert decode_superheader(resealed(PACK[:SUPERHEADER_NBYTES], 24, b"\4")).optional_flags == 4
    assert decode_tail(resealed(PACK[-TAIL_NBYTES:], 24, b"\4")).optional_flags == 4


@pytest.mark.parametrize("at", [10, 12, 2000])
def test_reserved_bytes_with_right_seal_are_refused(at):
    with pytest.raises(MalformedError):
        decode_superheader(resealed(PACK[:SUPERHEADER_NBYTES], at, b"\1"))
    with pytest.raises(MalformedError):
        decode_tail(resealed(PACK[-TAIL_NBYTES:], at, b"\1"))


@pytest.mark.parametrize("at", [64, 72, 80, 88], ids=["offset", "directory nbytes", "frame count", "pack nbytes"])
@pytest.mark.parametrize("value", [0, 1, 4096, 1 << 40, (1 << 64) - 4096, (1 << 64) - 1])
def test_lengths_in_a_tail_must_agree(at, value):
    with pytest.raises(MalformedError):
        decode_tail(resealed(PACK[-TAIL_NBYTES:], at, value.to_bytes(8, "little")))


def test_a_pack_over_the_limit_is_refused():
    with pytest.raises(MalformedError):
        decode_tail(PACK[-TAIL_NBYTES:], limits=Limits(pack_nbytes_max=8192))


def tail_for(directory):
    return PackTail(STORE_ID, PACK_ID, 8192, len(directory), len(directory) // 96, 16_384, digest_of(directory))


def entry(**changes):
    whole = DirectoryEntry(sample_chunk_id(1), NO_BASE, 4096, 100, 256, 2)
    return replace(whole, **changes)


WRONG_ENTRIES = {
    "in the superheader": [entry(offset=4032)],
    "not aligned": [entry(offset=4100)],
    "in the directory": [entry(offset=8192 - 256)],
    "beyond 64 bits": [entry(offset=(1 << 64) - 64)],
    "overlapping": [entry(), entry(chunk_id=sample_chunk_id(2), offset=4096 + 256)],
    "repeated": [entry(), entry(offset=4096 + 512)],
    "over the chunk limit": [entry(plain_nbytes=1 << 30)],
    "empty": [entry(stored_nbytes=0)],
    "larger than plain": [entry(stored_nbytes=257)],
    "elements of three bytes": [entry(element_width=3)],
    "its own base": [entry(base_id=sample_chunk_id(1))],
    "no chunk id": [entry(chunk_id=NO_BASE)],
}


def pack_entries(entries):
    return b"".join(
        found.chunk_id
        + found.base_id
        + found.offset.to_bytes(8, "little")
        + found.stored_nbytes.to_bytes(8, "little")
        + found.plain_nbytes.to_bytes(8, "little")
        + bytes([found.element_width])
        + bytes(7)
        for found in entries
    )


def test_forged_directory_equals_the_encoded_one():
    encoded = pack_entries([entry()])
    assert encoded == encode_directory([entry()]).encoded
    assert decode_directory(encoded, tail_for(encoded)).entries == (entry(),)


@pytest.mark.parametrize("entries", WRONG_ENTRIES.values(), ids=WRONG_ENTRIES.keys())
def test_wrong_entries_are_refused(entries):
    encoded = pack_entries(entries)
    with pytest.raises(MalformedError):
        decode_directory(encoded, tail_for(encoded))


def test_entries_are_sorted_or_refused():
    entries = [entry(), entry(chunk_id=sample_chunk_id(2), offset=4096 + 320)]
    encoded = pack_entries(entries[::-1])
    with pytest.raises(MalformedError):
        decode_directory(encoded, tail_for(encoded))
    assert encode_directory(entries[::-1]).encoded == pack_entries(entries)


def test_directory_flags_and_reserved_bytes_are_refused():
    for at, kind in ((89, MalformedError), (90, UnsupportedError), (92, MalformedError)):
        encoded = bytearray(pack_entries([entry()]))
        encoded[at] = 1
        with pytest.raises(kind):
            decode_directory(encoded, tail_for(encoded))


def test_a_directory_of_another_pack_is_refused():
    with pytest.raises(ChecksumError):
        decode_directory(DIRECTORY_BYTES, replace(TAIL, directory_digest=bytes(32)))
    with pytest.raises(MalformedError):
        decode_directory(DIRECTORY_BYTES[:-96], TAIL)


def test_frame_must_match_the_directory():
    header = sample_frames()[0][0]
    for changes in ({"chunk_id": sample_chunk_id(9)}, {"stored_nbytes": 255}, {"element_width": 8}):
        with pytest.raises(MalformedError):
            check_entry(replace(DIRECTORY.entries[0], **changes), header)


def test_empty_pack_round_trips():
    directory = encode_directory([])
    encoded = encode_tail(store_id=STORE_ID, pack_id=PACK_ID, directory=directory, directory_offset=4096)
    tail = decode_tail(encoded, pack_nbytes=8192)
    assert decode_directory(b"", tail).entries == ()


def reader_of(content):
    return lambda offset, nbytes: content[offset : offset + nbytes]


FRAMES = [(found.offset, decode_frame_header(PACK[found.offset :][:192])) for found in DIRECTORY.entries]


def test_a_scan_finds_the_frames_that_the_directory_lists():
    assert list(scan_frames(reader_of(PACK), len(PACK))) == FRAMES


def test_a_scan_finds_whole_frames_of_a_torn_pack():
    for nbytes in range(0, len(PACK), 64):
        found = list(scan_frames(reader_of(PACK[:nbytes]), nbytes))
        assert found == [frame for frame in FRAMES if frame[0] + frame[1].frame_nbytes <= nbytes]


def test_scan_continues_after_a_damaged_header():
    pack = bytearray(PACK)
    pack[FRAMES[0][0] + 20] ^= 1
    assert list(scan_frames(reader_of(pack), len(pack))) == FRAMES[1:]


def test_scan_crosses_window_borders():
    """Some frames are before, across and after the borders of the pieces that a scan reads."""
    content = bytearray(digest_of(b"noise") * 100_000)
    frames = []
    for number, offset in enumerate(
        (4096, (1 << 20) - 64, (2 << 20) + 4096 - 192, (2 << 20) + 4096 + 64, 3_000_000 // 64 * 64)
    ):
        header = FrameHeader(sample_chunk_id(number), NO_BASE, 64, 64, 1, (), xxh3_64(bytes(64)))
        content[offset : offset + 256] = encode_header(header) + bytes(64)
        frames.append((offset, header))
    assert list(scan_frames(reader_of(content), len(content))) == frames


@given(st.binary(max_size=600))
def test_a_scan_of_anything_ends(content):
    assert list(scan_frames(reader_of(bytes(4096) + content), 4096 + len(content))) == []


@given(pack_id=st.binary(min_size=16, max_size=16).map(PackId), store_id=st.binary(min_size=16, max_size=16))
def test_superheader_round_trips(pack_id, store_id):
    found = decode_superheader(encode_superheader(store_id=store_id, pack_id=pack_id))
    assert (found.store_id, found.pack_id) == (store_id, pack_id)
