"""Protects manifests: they round-trip, every byte is covered, contradictions are not written or accepted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.header import (
    PREAMBLE_NBYTES,
    decode_header,
    decode_preamble,
    header_nbytes_needed,
)
from ckstore.format.manifest import Manifest, decode_manifest, encode_manifest, republished
from ckstore.format.paths import ManifestName
from ckstore.format.tensors import Piece
from ckstore.format.tree import ListNode
from ckstore.format.wire import sealed
from support.forged_manifests import forged
from support.format_samples import STORE_ID, sample_manifest

SAMPLE = sample_manifest()
ENCODED = encode_manifest(SAMPLE)
NAME = SAMPLE.header.name
HEAD_NBYTES = header_nbytes_needed(ENCODED)


def same(left: Manifest, right: Manifest) -> bool:
    """Compare two manifests although a metric may be NaN."""
    return encode_manifest(left) == encode_manifest(right)


def test_forged_manifest_equals_the_encoded_one():
    assert forged() == ENCODED


def test_manifest_round_trips():
    found = decode_manifest(ENCODED, expect=NAME)
    assert same(found, SAMPLE)
    assert (found.tree, found.tensors, found.storages) == (SAMPLE.tree, SAMPLE.tensors, SAMPLE.storages)
    assert (found.chunks, found.packs, found.frames) == (SAMPLE.chunks, SAMPLE.packs, SAMPLE.frames)
    assert found.decisions == SAMPLE.decisions
    assert found.store_id == STORE_ID


def test_equal_manifests_have_equal_bytes():
    assert encode_manifest(sample_manifest()) == ENCODED


def test_every_flipped_bit_is_found():
    flipped = bytearray(ENCODED)
    for at in range(len(flipped)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode_manifest(flipped)
            flipped[at] ^= 1 << bit


def test_listing_finds_every_flipped_bit_of_the_head():
    flipped = bytearray(ENCODED[:HEAD_NBYTES])
    for at in range(len(flipped)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode_header(flipped)
            flipped[at] ^= 1 << bit


def test_every_truncation_and_extension_is_found():
    for nbytes in range(len(ENCODED)):
        with pytest.raises(CorruptError):
            decode_manifest(ENCODED[:nbytes])
    with pytest.raises(MalformedError):
        decode_manifest(ENCODED + b"\0")


def test_listing_reads_only_the_head():
    header = decode_header(ENCODED[:HEAD_NBYTES], expect=NAME)
    assert repr(header) == repr(SAMPLE.header)
    for nbytes in range(HEAD_NBYTES):
        with pytest.raises(MalformedError):
            decode_header(ENCODED[:nbytes])
    assert header_nbytes_needed(ENCODED[:PREAMBLE_NBYTES]) == HEAD_NBYTES


def test_a_listing_needs_neither_numpy_nor_torch():
    code = "import sys; import ckstore.format.header; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("changes", [{"run": "other"}, {"seq": 4}, {"step": 0}, {"generation": 0}])
def test_a_manifest_under_another_name_is_refused(changes):
    expected = replace(NAME, **changes)
    for decode in (decode_header, decode_manifest):
        with pytest.raises(MalformedError, match="header of this manifest belongs to"):
            decode(ENCODED, expect=expected)


def test_checkpoint_id_depends_on_state_not_on_packs():
    moved = replace(SAMPLE, packs=(replace(SAMPLE.packs[0], nbytes=32_768), SAMPLE.packs[1]))
    assert decode_manifest(encode_manifest(moved)).checkpoint_id == SAMPLE.checkpoint_id
    with pytest.raises(MalformedError, match="checkpoint id"):
        encode_manifest(replace(SAMPLE, tree=ListNode(())))


def test_repeated_chunk_is_listed_once():
    assert len(SAMPLE.chunks) == 2
    assert SAMPLE.storages[2].pieces == (Piece(0, 64, 128),)
    assert (SAMPLE.header.chunk_count, SAMPLE.header.chunks_new, SAMPLE.header.chunks_reused) == (2, 1, 2)


def test_rewound_entry_keeps_frames_and_its_source():
    again = decode_manifest(encode_manifest(republished(SAMPLE, seq=9, time_ns=1, is_archival=False)))
    assert (again.frames, again.packs, again.tensors) == (SAMPLE.frames, SAMPLE.packs, SAMPLE.tensors)
    assert again.header.name == ManifestName("main", 9, SAMPLE.header.step, 0)
    assert (again.header.parent, again.header.origin_id) == (SAMPLE.header.seq, SAMPLE.checkpoint_id)
    assert (again.header.is_archival, again.header.bytes_written, again.header.chunks_new) == (False, 0, 0)


WRONG_HEADERS = {
    "generation": {"generation": 10**9},
    "seq": {"seq": 10**18},
    "step": {"step": 10**18},
    "run": {"run": "../x"},
    "short origin": {"origin_id": b"x"},
    "short id": {"checkpoint_id": b"x"},
    "other id": {"checkpoint_id": bytes(32)},
    "negative": {"bytes_written": -1},
    "bytes of state": {"bytes_state": 1},
    "stored bytes": {"bytes_stored": 1},
    "tensors": {"tensor_count": 4},
    "chunks": {"chunk_count": 3},
    "depth": {"depth_max": 1},
    "unlike the record": {"time_ns": 1},
    "other metrics": {"metrics": {"loss": 1.0}},
    "metric that is no number": {"metrics": {"loss": "1"}},
    "more fields": {"more": 1},
}


@pytest.mark.parametrize("changes", WRONG_HEADERS.values(), ids=WRONG_HEADERS.keys())
def test_wrong_headers_are_refused(changes):
    with pytest.raises(MalformedError):
        decode_manifest(forged(header=changes))


def test_logical_record_must_match_the_header():
    with pytest.raises(MalformedError, match="contradicts"):
        decode_manifest(forged(record={"step": 7}))


@pytest.mark.parametrize("field", ["header_nbytes", "logical_nbytes", "location_nbytes", "file_nbytes"])
@pytest.mark.parametrize("value", [0, 1, 1 << 20, (1 << 64) - 1])
def test_wrong_lengths_are_refused(field, value):
    for place in ("preamble", "trailer"):
        with pytest.raises(CorruptError):
            decode_manifest(forged(**{place: {field: value}}))


def test_consistently_wrong_lengths_are_refused():
    shifted = {
        "header_nbytes": HEAD_NBYTES - PREAMBLE_NBYTES + 8,
        "logical_nbytes": decode_preamble(ENCODED).logical_nbytes - 8,
    }
    with pytest.raises(CorruptError):
        decode_manifest(forged(preamble=shifted, trailer=shifted))


def test_too_large_header_is_refused_before_reading():
    large = forged(header={"more": "x" * 70_000})
    with pytest.raises(MalformedError, match="preamble"):
        decode_header(large[:4096])


def test_newer_manifests_are_unsupported():
    with pytest.raises(UnsupportedError):
        decode_manifest(forged(preamble={"mandatory_flags": 1}))
    newer = sealed(ENCODED[:8] + b"\xff\0" + ENCODED[10 : PREAMBLE_NBYTES - 8], PREAMBLE_NBYTES)
    for decode in (decode_header, decode_manifest):
        with pytest.raises(UnsupportedError):
            decode(newer + ENCODED[PREAMBLE_NBYTES:])
    assert decode_manifest(forged(preamble={"optional_flags": 1})).frames == SAMPLE.frames


def test_reserved_bytes_of_a_preamble_are_refused():
    for at in (10, 12, 100):
        body = bytearray(ENCODED[: PREAMBLE_NBYTES - 8])
        body[at] = 1
        with pytest.raises(MalformedError):
            decode_header(sealed(bytes(body), PREAMBLE_NBYTES) + ENCODED[PREAMBLE_NBYTES:])


def test_wrong_digest_is_a_checksum_error():
    with pytest.raises(ChecksumError):
        decode_manifest(ENCODED[:-32] + bytes(32))


TENSOR = SAMPLE.tensors[0]
STORAGE = SAMPLE.storages[0]
CHUNK = SAMPLE.chunks[0]
PACK, COLD = SAMPLE.packs
FULL, MIDDLE, DEEP = SAMPLE.frames
