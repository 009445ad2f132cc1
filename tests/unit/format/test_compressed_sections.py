"""Protects compressed manifests: they are small, packs stay searchable, and only exact frames are decompressed."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import CorruptError, MalformedError
from ckstore.format.header import TRAILER_NBYTES, decode_preamble
from ckstore.format.location import FULL, StorageDecision, decode_pack_table, decode_tiers, split_location
from ckstore.format.manifest import (
    ChunkSpec,
    Decisions,
    FrameRef,
    Manifest,
    PackRef,
    build_manifest,
    decode_manifest,
    encode_manifest,
)
from ckstore.format.tensors import Piece, StorageSpec, TensorSpec
from ckstore.format.tree import DictNode, TensorNode
from ckstore.hashing import digest_of
from support.forged_manifests import forged, plain_sections
from support.format_samples import OTHER_PACK_ID, PACK_ID, STORE_ID, TIME_NS, sample_chunk_id

COUNT, NBYTES = 300, 1024


def large_manifest() -> Manifest:
    """Return a manifest of many small tensors in one chunk, with its base in another tier."""
    storages = [StorageSpec(NBYTES, 4, True, (Piece(0, number * NBYTES, NBYTES),)) for number in range(COUNT)]
    return build_manifest(
        store_id=STORE_ID,
        run="main",
        seq=3,
        step=3,
        time_ns=TIME_NS,
        parent=2,
        tree=DictNode(
            "dict",
            tuple(f"layers.{number // 8}.experts.{number % 8}.weight" for number in range(COUNT)),
            tuple(TensorNode(number) for number in range(COUNT)),
        ),
        tensors=[TensorSpec("torch", "float32", (16, 16), (16, 1), n, 0, True, True) for n in range(COUNT)],
        storages=storages,
        chunks=[ChunkSpec(sample_chunk_id(1), COUNT * NBYTES, 4, True)],
        packs=[
            PackRef(PACK_ID, 1 << 20, digest_of(b"one")),
            PackRef(OTHER_PACK_ID, 1 << 20, digest_of(b"two"), "cold"),
        ],
        frames=[FrameRef(sample_chunk_id(0), 1, 4096, 9000), FrameRef(sample_chunk_id(1), 0, 4096, 9000, 0, 1)],
        bytes_written=1 << 20,
        chunks_new=1,
        decisions=Decisions("previous", 2, 0, "why", tuple(StorageDecision(FULL, 26.5, 21.25) for _ in storages)),
    )


LARGE = large_manifest()
ENCODED = encode_manifest(LARGE)
PREAMBLE = decode_preamble(ENCODED)
LOGICAL, LOCATION = plain_sections(LARGE)
LOCATION_STORED = ENCODED[PREAMBLE.head_nbytes + PREAMBLE.logical_nbytes : -TRAILER_NBYTES]
PACKS_NBYTES = 32 + len(b"\x92\xa4cold\xa5local") + 2 * 64
PLAIN = {"logical": LOGICAL, "location": LOCATION[PACKS_NBYTES:]}
"""The two parts that may be compressed."""

SECTIONS = pytest.mark.parametrize("section", PLAIN)


def with_part(section: str, part: bytes, **changes: object) -> bytes:
    """Return the manifest with other bytes in place of a compressed part, and right digests."""
    stored = part if section == "logical" else LOCATION[:PACKS_NBYTES] + part
    return forged(LARGE, stored={section: stored}, **changes)


def frame_of(plain: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(plain)


def test_large_sections_are_compressed():
    assert forged(LARGE) == ENCODED
    assert PREAMBLE.logical_plain_nbytes == len(LOGICAL) > 5 * PREAMBLE.logical_nbytes
    assert len(LOCATION) > 5 * PREAMBLE.location_nbytes
    assert len(ENCODED) < 25 * COUNT
    found = decode_manifest(ENCODED, expect=LARGE.header.name)
    assert found == LARGE
    assert found.checkpoint_id == digest_of(LOGICAL)


@SECTIONS
def test_plain_parts_are_read(section):
    assert decode_manifest(with_part(section, PLAIN[section])) == LARGE


def test_parts_that_do_not_shrink_stay_plain():
    empty = build_manifest(
        store_id=STORE_ID,
        run="r",
        seq=0,
        step=0,
        time_ns=0,
        parent=None,
        tree=DictNode("dict", (), ()),
        tensors=[],
        storages=[],
        chunks=[],
        packs=[],
        frames=[],
        bytes_written=0,
        chunks_new=0,
    )
    preamble = decode_preamble(encode_manifest(empty))
    # Four lengths and an empty table of tiers: nothing is left that could be compressed.
    assert preamble.location_nbytes == 33
    assert decode_manifest(encode_manifest(empty)) == empty


def test_packs_and_tiers_can_be_searched_in_damaged_manifest():
    """A collection keeps what a quarantined manifest seems to name."""
    assert LOCATION_STORED.startswith(LOCATION[:PACKS_NBYTES])
    for name in (PACK_ID, OTHER_PACK_ID, b"cold", b"local"):
        assert name in LOCATION_STORED


def test_tiers_are_listed_without_decompression():
    assert decode_tiers(LOCATION_STORED[:64], version=PREAMBLE.version) == ("cold", "local")
    code = "import sys; import ckstore.format.location; sys.exit('zstandard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_collection_reads_the_same_tables():
    table = decode_pack_table(ENCODED, expect=LARGE.header.name)
    tiers, pack_rows, frame_rows, _ = split_location(memoryview(LOCATION), version=PREAMBLE.version)
    assert (table.tiers, table.pack_rows, bytes(table.frame_rows)) == (tiers, bytes(pack_rows), bytes(frame_rows))
    assert (table.header, table.frame_count) == (LARGE.header, 2)


WRONG_PARTS = {
    "nothing": lambda plain: b"",
    "the beginning of the plain bytes": lambda plain: plain[:-1],
    "trailing bytes after plain bytes": lambda plain: plain + b"\0",
    "half a frame": lambda plain: frame_of(plain)[:-1],
    "trailing bytes after a frame": lambda plain: frame_of(plain) + b"\0",
    "two frames": lambda plain: frame_of(plain[:100]) + frame_of(plain[100:]),
    "an empty second frame": lambda plain: frame_of(plain) + frame_of(b""),
    "a skippable frame behind": lambda plain: frame_of(plain) + b"\x50\x2a\x4d\x18\1\0\0\0x",
    "a skippable frame in front": lambda plain: b"\x50\x2a\x4d\x18\1\0\0\0x" + frame_of(plain),
    "a skippable frame of the plain length": lambda plain: b"\x50\x2a\x4d\x18" + struct.pack("<I", len(plain)) + b"x",
    "a frame without a content size": lambda plain: frame_of(plain, write_content_size=False),
    "a frame of too few bytes": lambda plain: frame_of(plain[:-1]),
    "a frame of too many bytes": lambda plain: frame_of(plain + b"\0"),
    "a frame that holds less than it says": lambda plain: repeated(len(plain), len(plain) - 1),
    "a frame that holds more than it says": lambda plain: repeated(len(plain), len(plain) + 1),
    "a frame with a dictionary": lambda plain: frame_of(plain, dict_data=trained_dictionary()),
    "a frame of other bytes": lambda plain: repeated(len(plain), len(plain)),
    "a frame with a wide window": lambda plain: repeated(len(plain), len(plain), window_log=27),
}


def repeated(claimed: int, count: int, *, window_log: int | None = None) -> bytes:
    """Return a frame by hand (RFC 8878): one byte, ``count`` times, in a frame that says ``claimed``."""
    descriptor = 0x80 | (0x20 if window_log is None else 0)
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    block = (count << 3 | 1 << 1 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + struct.pack("<I", claimed) + block + b"\0"


def trained_dictionary() -> zstandard.ZstdCompressionDict:
    return zstandard.train_dictionary(1024, [f"layers.{n}.experts.{n % 8}.weight".encode() * 9 for n in range(200)])


def test_frames_made_by_hand_are_valid():
    for count in (400, 40_000):
        for window_log in (None, 27):
            frame = repeated(count, count, window_log=window_log)
            assert zstandard.ZstdDecompressor().decompress(frame) == bytes(count)


@SECTIONS
@pytest.mark.parametrize("make", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_parts_that_are_not_one_frame_of_their_plain_length_are_refused(section, make):
    wrong = with_part(section, make(PLAIN[section]))
    with pytest.raises(MalformedError):
        decode_manifest(wrong)
    if section == "location" and make is not WRONG_PARTS["a frame of other bytes"]:
        with pytest.raises(MalformedError):
            decode_pack_table(wrong)


CAUSES = {
    "a frame of too few bytes": "does not claim to hold",
    "a skippable frame in front": "does not claim to hold",
    "a frame with a wide window": "window",
    "trailing bytes after a frame": "cannot be decoded",
    "a frame that holds more than it says": "cannot be decoded",
}


@SECTIONS
@pytest.mark.parametrize(("name", "cause"), CAUSES.items())
def test_refusals_say_what_is_wrong(section, name, cause):
    with pytest.raises(MalformedError, match=cause) as caught:
        decode_manifest(with_part(section, WRONG_PARTS[name](PLAIN[section])), where="x.ckm")
    assert "x.ckm" in str(caught.value)


@pytest.mark.parametrize("nbytes", [0, 1, PREAMBLE.logical_nbytes - 1, len(LOGICAL) - 1, len(LOGICAL) + 1, 1 << 63])
def test_wrong_plain_length_in_the_preamble_is_refused(nbytes):
    with pytest.raises(MalformedError):
        decode_manifest(forged(LARGE, preamble={"logical_plain_nbytes": nbytes}))


@pytest.mark.parametrize("decode", [decode_manifest, decode_pack_table])
def test_limit_bounds_the_plain_manifest(decode):
    plain_nbytes = len(forged(LARGE, stored={"logical": LOGICAL, "location": LOCATION}))
    decode(ENCODED, limits=Limits(manifest_nbytes_max=plain_nbytes))
    encode_manifest(LARGE, limits=Limits(manifest_nbytes_max=plain_nbytes))
    with pytest.raises(MalformedError, match="exceeds the limit"):
        decode(ENCODED, limits=Limits(manifest_nbytes_max=plain_nbytes - 1))
    with pytest.raises(MalformedError, match="exceeds the limit"):
        encode_manifest(LARGE, limits=Limits(manifest_nbytes_max=plain_nbytes - 1))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_old_versions_have_neither_frames_nor_plain_lengths(version):
    old = {"version": version, "logical_plain_nbytes": 0}
    plain = {"logical": LOGICAL, "location": LOCATION}
    if version > 1:
        assert decode_manifest(forged(LARGE, preamble=old, stored=plain)) == LARGE
    for section in PLAIN:
        mixed = {name: content for name, content in plain.items() if name != section}
        with pytest.raises(MalformedError):
            decode_manifest(forged(LARGE, preamble=old, stored=mixed))
    with pytest.raises(MalformedError, match="preamble"):
        decode_manifest(forged(LARGE, preamble={"version": version}, stored=plain))


@settings(deadline=None)
@given(data=st.data())
def test_any_changed_frame_is_refused_or_means_the_same(data):
    section = data.draw(st.sampled_from(tuple(PLAIN)))
    frame = bytearray(frame_of(PLAIN[section]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_manifest(with_part(section, bytes(frame)))
    except CorruptError:
        return
    # Other frames and decisions may be consistent, too; the checkpoint is the same.
    assert (found.header, found.logical) == (LARGE.header, LARGE.logical)
