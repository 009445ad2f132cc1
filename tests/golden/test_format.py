"""Protects old bytes: every version's files are read, and the current version writes the same bytes.

The compressed parts of a manifest are compared after decompression, because another zstd library may compress them to
other bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckstore.config import Limits
from ckstore.format.header import PREAMBLE_NBYTES, decode_preamble
from ckstore.format.journal import SEGMENT_HEADER_NBYTES, decode_segment, read_body, read_frames, read_heads
from ckstore.format.location import plain_location
from ckstore.format.manifest import decode_manifest, encode_manifest
from ckstore.format.many_ranks import (
    LayoutFacts,
    MeshFacts,
    per_rank_nodes,
    plain_manifest,
    state_of,
    values_of,
    world_of,
)
from ckstore.format.pack import decode_directory, decode_superheader, decode_tail, scan_frames
from ckstore.format.paths import ManifestName
from ckstore.format.points import decode_point
from ckstore.format.records import FORMAT_VERSION, READABLE_VERSIONS, decode_record, encode_record
from ckstore.format.replay_form import replay_form_of
from ckstore.format.tree import ValueNode
from ckstore.format.zstd import plain_section
from ckstore.hashing import chunk_id_of, digest_of
from support import format_example
from support.format_samples import (
    PACK_ID,
    STORE_ID,
    sample_frames,
    sample_manifest,
    sample_pack,
    sample_records,
    sample_replay_form,
    sample_replay_manifest,
    sample_tag_on_point,
)
from support.journal_samples import BLOBS, SEGMENT, sample_points, sample_segment
from support.rank_parts import sample_ranks_manifest

GOLDEN = Path(__file__).parent
FOLDER = GOLDEN / f"v{FORMAT_VERSION}" / "format"
FOLDERS = [GOLDEN / f"v{version}" / "format" for version in READABLE_VERSIONS]


def each_version(function):
    return pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)(function)


@each_version
def test_golden_files_are_unchanged(folder):
    digests = json.loads((folder / "digests.json").read_text())
    assert {path.name for path in folder.iterdir()} == {*digests, "digests.json"}
    for name, digest in digests.items():
        assert digest_of((folder / name).read_bytes()).hex() == digest


@each_version
def test_golden_manifest_of_every_version_is_read(folder):
    found = decode_manifest((folder / "sample.ckm").read_bytes(), expect=sample_manifest().header.name)
    assert (found.tree, found.frames, found.packs) == (
        sample_manifest().tree,
        sample_manifest().frames,
        sample_manifest().packs,
    )
    assert (found.decisions is None) == (folder.parent.name == "v1")
    assert found.losses == (sample_manifest().losses if folder.parent.name >= "v3" else ())


def test_golden_manifest_round_trip():
    golden = (FOLDER / "sample.ckm").read_bytes()
    found = decode_manifest(golden, expect=sample_manifest().header.name)
    assert found.tree == sample_manifest().tree
    assert found.frames == sample_manifest().frames
    assert plain_bytes(encode_manifest(found)) == plain_bytes(encode_manifest(sample_manifest())) == plain_bytes(golden)


def test_golden_manifest_of_many_ranks():
    golden = (FOLDER / "ranks.ckm").read_bytes()
    found = decode_manifest(golden, expect=ManifestName("main", 4, 42_000, 0))
    assert plain_bytes(sample_ranks_manifest()) == plain_bytes(encode_manifest(found)) == plain_bytes(golden)
    world = world_of(found.tree)
    assert (world.size, world.meshes) == (4, (MeshFacts(("dp",), (4,)),))
    assert world.layouts == (LayoutFacts(0, "(Shard(dim=0),)", (0, 1)),)
    assert [rank.host for rank in world.ranks] == ["node0", "node0", "node1", "node1"]
    assert world.partial == ((("head",), (3,)),)
    per_rank = {path: values_of(node) for path, node in per_rank_nodes(state_of(found.tree))}
    assert list(per_rank) == [("rng",), ("differs",), ("epoch",)]
    assert per_rank["epoch",] == {rank: ValueNode("int", rank // 2) for rank in range(4)}
    storages = [found.tensors[node.tensor].storage for node in per_rank["differs",].values()]
    assert storages == [storages[0], storages[0] + 1, storages[0], storages[0]]
    plain = plain_manifest(found)
    assert (plain.tensors[1].shape, plain.tensors[1].cuts) == ((4, 6), ((), (2, 4)))


def test_golden_manifest_in_replay_form():
    golden = (FOLDER / "replay.ckm").read_bytes()
    found = decode_manifest(golden, expect=sample_replay_manifest().header.name)
    assert plain_bytes(encode_manifest(sample_replay_manifest())) == plain_bytes(golden)
    assert replay_form_of(found) == sample_replay_form()
    assert found.header.may_be_in_replay_form
    assert found.header.origin_id == sample_manifest().checkpoint_id


def plain_bytes(encoded):
    """Return the parts of a manifest that do not depend on the zstd library."""
    view = memoryview(encoded)
    preamble = decode_preamble(view)
    logical_end = preamble.head_nbytes + preamble.logical_nbytes
    logical = plain_section(view[preamble.head_nbytes : logical_end], preamble.logical_plain_nbytes)
    location = plain_location(view, preamble, Limits(), None)
    lengths = dict.fromkeys(("logical_nbytes", "location_nbytes", "file_nbytes"), 0)
    head = bytes(view[PREAMBLE_NBYTES : preamble.head_nbytes])
    return replace(preamble, **lengths), head, bytes(logical), bytes(location)


@each_version
def test_checkpoint_keeps_its_id_when_it_is_written_again(folder):
    found = decode_manifest((folder / "sample.ckm").read_bytes())
    again = decode_manifest(encode_manifest(found))
    assert again.checkpoint_id == found.checkpoint_id
    assert encode_manifest(again) == encode_manifest(found)


def test_golden_manifests_show_both_forms():
    sizes = {}
    for folder in FOLDERS:
        preamble = decode_preamble((folder / "sample.ckm").read_bytes())
        sizes[folder.parent.name] = (preamble.logical_nbytes, preamble.logical_plain_nbytes)
    assert all(stored == plain for stored, plain in (sizes["v1"], sizes["v2"], sizes["v3"]))
    assert sizes["v4"][0] < sizes["v4"][1] == sizes["v3"][1]


def test_format_document_matches_golden_preamble():
    document = (GOLDEN.parents[1] / "docs" / "FORMAT.md").read_text()
    example = "\n".join(format_example.lines((FOLDER / "sample.ckm").read_bytes()))
    assert f"```\n{example}\n```" in document


@each_version
def test_golden_pack_of_every_version_is_read(folder):
    golden = (folder / "sample.pack").read_bytes()
    decode_superheader(golden[:4096], store_id=STORE_ID, pack_id=PACK_ID)
    tail = decode_tail(golden[-4096:], pack_nbytes=len(golden), store_id=STORE_ID, pack_id=PACK_ID)
    directory = decode_directory(golden[tail.directory_offset :][: tail.directory_nbytes], tail)
    scanned = list(scan_frames(lambda offset, nbytes: golden[offset : offset + nbytes], len(golden)))
    assert [offset for offset, _ in scanned] == [entry.offset for entry in directory.entries]
    if folder == FOLDER:
        assert [header for _, header in scanned] == [header for header, _ in sample_frames()]
        assert sample_pack() == golden


@pytest.mark.parametrize(
    ("name", "record"),
    [*((record.kind, record) for record in sample_records()), ("tag_on_point", sample_tag_on_point())],
)
def test_golden_records_round_trip(name, record):
    golden = (FOLDER / f"{name}.json").read_bytes()
    assert decode_record(golden, type(record)) == record
    assert encode_record(record) == golden


def test_golden_journal_round_trips():
    golden = (FOLDER / "journal.ckj").read_bytes()
    assert sample_segment() == golden
    segment = decode_segment(golden[:SEGMENT_HEADER_NBYTES], store_id=STORE_ID)
    assert segment == SEGMENT

    def read(offset, nbytes):
        return golden[offset : offset + nbytes]

    placed = list(read_heads(read, len(golden), segment))
    assert [each.head.step for each in placed] == [1219, 1220]
    assert tuple(decode_point(read_body(read, each)) for each in placed) == sample_points()
    frames = [list(read_frames(read, each)) for each in placed]
    assert [header.chunk_id for header, _ in frames[1]] == [chunk_id_of(plain) for plain in BLOBS]
    assert not frames[0]
