"""Protects old bytes: what version 1 wrote is read for ever, and what is written today is the same, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckstore.format.manifest import decode_manifest, encode_manifest
from ckstore.format.pack import decode_directory, decode_superheader, decode_tail, scan_frames
from ckstore.format.records import decode_record, encode_record
from ckstore.ids import digest_of
from ckstore.testing.format_samples import (
    PACK_ID,
    STORE_ID,
    sample_frames,
    sample_manifest,
    sample_pack,
    sample_records,
)

FOLDER = Path(__file__).parent.parent / "golden" / "v1" / "format"
DIGESTS = json.loads((FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("name", DIGESTS)
def test_golden_files_are_what_was_written(name):
    assert digest_of((FOLDER / name).read_bytes()).hex() == DIGESTS[name]


def test_no_golden_file_is_without_digest():
    assert {path.name for path in FOLDER.iterdir()} == {*DIGESTS, "digests.json"}


def test_the_golden_manifest_is_read_and_written():
    golden = (FOLDER / "sample.ckm").read_bytes()
    found = decode_manifest(golden, expect=sample_manifest().header.name)
    assert found.tree == sample_manifest().tree
    assert found.frames == sample_manifest().frames
    assert encode_manifest(found) == encode_manifest(sample_manifest()) == golden


def test_the_golden_pack_is_read_and_written():
    golden = (FOLDER / "sample.pack").read_bytes()
    decode_superheader(golden[:4096], store_id=STORE_ID, pack_id=PACK_ID)
    tail = decode_tail(golden[-4096:], pack_nbytes=len(golden), store_id=STORE_ID, pack_id=PACK_ID)
    directory = decode_directory(golden[tail.directory_offset :][: tail.directory_nbytes], tail)
    scanned = scan_frames(lambda offset, nbytes: golden[offset : offset + nbytes], len(golden))
    headers = [header for header, _ in sample_frames()]
    assert list(scanned) == list(zip([entry.offset for entry in directory.entries], headers, strict=True))
    assert sample_pack() == golden


@pytest.mark.parametrize("record", sample_records(), ids=lambda record: record.kind)
def test_golden_records_are_read_and_written(record):
    golden = (FOLDER / f"{record.kind}.json").read_bytes()
    assert decode_record(golden, type(record)) == record
    assert encode_record(record) == golden
