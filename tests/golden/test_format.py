"""Protects old bytes: every version's files are read, and the current version writes the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckstore.format.manifest import decode_manifest, encode_manifest
from ckstore.format.pack import decode_directory, decode_superheader, decode_tail, scan_frames
from ckstore.format.records import FORMAT_VERSION, READABLE_VERSIONS, decode_record, encode_record
from ckstore.hashing import digest_of
from support import format_example
from support.format_samples import PACK_ID, STORE_ID, sample_frames, sample_manifest, sample_pack, sample_records

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
    assert found.losses == (sample_manifest().losses if folder == FOLDER else ())


def test_golden_manifest_round_trip():
    golden = (FOLDER / "sample.ckm").read_bytes()
    found = decode_manifest(golden, expect=sample_manifest().header.name)
    assert found.tree == sample_manifest().tree
    assert found.frames == sample_manifest().frames
    assert encode_manifest(found) == encode_manifest(sample_manifest()) == golden


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


@pytest.mark.parametrize("record", sample_records(), ids=lambda record: record.kind)
def test_golden_records_round_trip(record):
    golden = (FOLDER / f"{record.kind}.json").read_bytes()
    assert decode_record(golden, type(record)) == record
    assert encode_record(record) == golden
