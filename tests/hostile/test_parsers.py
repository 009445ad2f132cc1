"""Protects readers from hostile bytes: a parser answers quickly, uses little memory, and raises only ckstore errors.

Memory is measured with tracemalloc, which sees the allocations of Python and msgspec.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from contextlib import contextmanager, suppress

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import CorruptError, UnsupportedError
from ckstore.format.frame import decode_frame_header, encode_frame_header
from ckstore.format.header import decode_header, header_nbytes_needed
from ckstore.format.location import decode_location, decode_pack_table
from ckstore.format.logical import decode_logical
from ckstore.format.manifest import decode_manifest, encode_manifest
from ckstore.format.pack import PackTail, decode_directory, decode_superheader, decode_tail, scan_frames
from ckstore.format.records import (
    HeaderRecord,
    TagRecord,
    TensorRow,
    decode_inner,
    decode_record,
    encode_inner,
    encode_record,
)
from ckstore.format.tree import decode_tree
from ckstore.format.wire import sealed
from ckstore.hashing import digest_of
from support.forged_manifests import forged, plain_sections
from support.format_samples import (
    PACK_ID,
    STORE_ID,
    sample_frames,
    sample_manifest,
    sample_pack,
    sample_records,
)

REFUSALS = (CorruptError, UnsupportedError)
MIB = 1 << 20
LIMITS = Limits()

PACK = sample_pack()
TAIL = decode_tail(PACK[-4096:])
STARTS = {
    "manifest": encode_manifest(sample_manifest()),
    "frame": encode_frame_header(sample_frames()[2][0]),
    "superheader": PACK[:4096],
    "directory": PACK[TAIL.directory_offset :][: TAIL.directory_nbytes],
    "tail": PACK[-4096:],
    "record": encode_record(sample_records()[2]),
}


def read_directory(content):
    return decode_directory(content, forged_tail(content))


def forged_tail(directory):
    nbytes = len(directory) // 96 * 96
    return PackTail(STORE_ID, PACK_ID, 1 << 40, nbytes, nbytes // 96, 1 << 41, digest_of(directory))


PARSERS = {
    "manifest": [decode_manifest, decode_header, header_nbytes_needed],
    "frame": [decode_frame_header],
    "superheader": [decode_superheader],
    "directory": [read_directory, lambda content: decode_directory(content, TAIL)],
    "tail": [decode_tail],
    "record": [lambda content: decode_record(content, TagRecord)],
}


@contextmanager
def within(nbytes, seconds):
    """Fail if the body allocates more, or uses more processor time: other programs must not affect it."""
    tracemalloc.start()
    begun = time.thread_time()
    try:
        yield
        lasted = time.thread_time() - begun
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak} bytes were allocated"
    assert lasted < seconds, f"it took {lasted:.1f} s"


@pytest.mark.parametrize("kind", PARSERS)
@settings(deadline=None)
@given(data=st.data())
def test_mutated_structures_raise_only_ckstore_errors(kind, data):
    content = bytearray(STARTS[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(("flip", "cut", "insert", "repeat", "zero"))):
            case "flip":
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[data.draw(st.integers(1, len(content))) :]
            case "insert":
                at = data.draw(st.integers(0, len(content)))
                content[at:at] = data.draw(st.binary(max_size=64))
            case "repeat":
                content += content[: data.draw(st.integers(0, 512))]
            case "zero":
                at = data.draw(st.integers(0, len(content) - 1))
                content[at : at + 512] = bytes(len(content[at : at + 512]))
        content = content or bytearray(b"\0")
    for parse in PARSERS[kind]:
        with suppress(*REFUSALS):
            parse(bytes(content))


@pytest.mark.parametrize("kind", PARSERS)
@given(content=st.binary(max_size=5000))
def test_arbitrary_bytes_raise_only_ckstore_errors(kind, content):
    for parse in PARSERS[kind]:
        with pytest.raises(REFUSALS):
            parse(content + b"\1")


@settings(deadline=None)
@given(fields=st.binary(max_size=160), magic=st.sampled_from((b"CKPACK\0\1", b"CKTAIL\0\1")))
def test_sealed_noise_raises_only_ckstore_errors(fields, magic):
    block = sealed(magic + b"\1\0" + fields, 4096)
    for parse in (decode_superheader, decode_tail):
        with suppress(*REFUSALS):
            parse(block)


@given(rows=st.lists(st.binary(min_size=96, max_size=96), min_size=1, max_size=4))
def test_noise_directories_raise_only_ckstore_errors(rows):
    with pytest.raises(REFUSALS):
        read_directory(b"".join(rows))


LARGE = (1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("field", range(6))
def test_counts_of_a_logical_section_allocate_nothing(count, field):
    counts = [0, 0, 1, 0, 0, 0]
    counts[field] = count
    section = memoryview(struct.pack("<QQQQQQ", *counts) + b"\x90" * 100)
    with within(MIB, 2), pytest.raises(CorruptError):
        decode_logical(section, limits=LIMITS)


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize(
    ("version", "field"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 3), (4, 0), (4, 3)]
)
def test_counts_of_a_location_section_allocate_nothing(count, version, field):
    counts = [1, 0, 0, 0][: min(version, 2) + 2]
    counts[field] = count
    section = memoryview(struct.pack(f"<{len(counts)}Q", *counts) + b"\x90" * 100)
    with within(MIB, 2), pytest.raises(CorruptError):
        decode_location(section, version=version, limits=LIMITS)


@pytest.mark.parametrize("decode", [decode_manifest, decode_pack_table])
@pytest.mark.parametrize("nbytes", [64 * MIB, *LARGE[1:]])
def test_plain_lengths_of_a_manifest_allocate_nothing(nbytes, decode):
    _, location = plain_sections()
    bomb = zstandard.compress(bytes(64 * MIB), 1)
    in_logical = forged(stored={"logical": bomb}, preamble={"logical_plain_nbytes": nbytes})
    # The length of the decisions is at 24; frames and decisions follow the packs.
    packs_nbytes = 32 + len(encode_inner(["cold", "local"])) + 2 * 64
    lengths = location[:24] + nbytes.to_bytes(8, "little")
    in_location = forged(stored={"location": lengths + location[32:packs_nbytes] + bomb})
    for encoded in (in_logical, in_location):
        with within(MIB, 2), pytest.raises(CorruptError, match="exceeds the limit"):
            decode(encoded, limits=Limits(manifest_nbytes_max=16 * MIB))


@pytest.mark.parametrize("content_nbytes", [64 * MIB, 1 << 40])
def test_frame_of_a_section_allocates_no_more_than_the_section_has(content_nbytes):
    logical, _ = plain_sections()
    frame = zstandard.compress(bytes(64 * MIB), 1)
    # Descriptor with a content size of eight bytes, then the claim.
    claims = b"\x28\xb5\x2f\xfd\xe0" + content_nbytes.to_bytes(8, "little")
    for bomb in (frame[:500], claims + b"\x03\0\0a"):
        encoded = forged(stored={"logical": bomb}, preamble={"logical_plain_nbytes": len(logical)})
        with within(MIB, 2), pytest.raises(CorruptError):
            decode_manifest(encoded)


@pytest.mark.parametrize(
    "head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"], ids=["array", "map", "bin", "str", "ext"]
)
@pytest.mark.parametrize("count", [1 << 20, 1 << 27, (1 << 32) - 1])
def test_lengths_in_messagepack_allocate_nothing(head, count):
    content = head + count.to_bytes(4, "big") + b"\0\0\0\0"
    with within(MIB, 2):
        for kind in (object, list[str], list[TensorRow], HeaderRecord):
            with pytest.raises(CorruptError):
                decode_inner(content, kind)
        with pytest.raises(CorruptError):
            decode_tree(content, tensor_count=1)


def test_nested_lengths_in_messagepack_do_not_multiply():
    nbytes = 100_000
    content = (b"\xdd" + (nbytes // 2).to_bytes(4, "big")) * 400 + b"\0" * nbytes
    with within(16 * MIB, 5), pytest.raises(CorruptError):
        decode_tree(content, tensor_count=1)


@pytest.mark.parametrize("content", [b"[" * 1_000_000, b'{"a":' * 200_000, b'{"kind":"tag","body":' + b"[" * 900_000])
def test_deeply_nested_json_is_refused(content):
    with within(16 * MIB, 5), pytest.raises(CorruptError):
        decode_record(content, TagRecord)


def test_tail_cannot_claim_more_than_its_pack():
    """A reader allocates ``directory_nbytes``, which is bounded by the given size of the file."""
    body = bytearray(STARTS["tail"][:-8])
    struct.pack_into("<QQQQ", body, 64, 1 << 35, 96 << 20, 1 << 20, (1 << 35) + (96 << 20) + 4096)
    with pytest.raises(CorruptError):
        decode_tail(sealed(bytes(body), 4096), pack_nbytes=len(PACK))


def test_scan_of_large_file_holds_one_window():
    blank = bytes(MIB)
    with within(4 * MIB, 20):
        assert list(scan_frames(lambda offset, nbytes: blank[:nbytes], 256 * MIB)) == []


def test_scan_of_headers_without_payload_ends():
    """A valid header could start every 64 bytes; each is read once, and none has its payload in the file."""
    header = encode_frame_header(sample_frames()[0][0])
    content = bytes(4096) + header * 200
    with within(4 * MIB, 20):
        found = list(scan_frames(lambda offset, nbytes: content[offset : offset + nbytes], len(content)))
    assert all(offset + frame.frame_nbytes <= len(content) for offset, frame in found)


def test_truncated_source_ends_the_scan():
    assert list(scan_frames(lambda offset, nbytes: b"", 1 << 40)) == []
    assert list(scan_frames(lambda offset, nbytes: PACK[offset : offset + nbytes], 1 << 40)) != []
