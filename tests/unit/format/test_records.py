"""Protects file records: they round-trip, and altered, added or missing fields are refused."""

from __future__ import annotations

import json
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError, UsageError
from ckstore.format.records import (
    ConfigRecord,
    HeaderRecord,
    StoreRecord,
    TagRecord,
    decode_inner,
    decode_record,
    encode_inner,
    encode_record,
)
from ckstore.format.wire import xxh3_64
from support.format_samples import sample_records

RECORDS = {record.kind: record for record in sample_records()}
TAG = RECORDS["tag"]


def forged(kind, **changes):
    """Return a record with other fields and a correct checksum."""
    body = json.loads(encode_record(RECORDS[kind]))["body"] | changes
    text = json.dumps({name: value for name, value in body.items() if value != "absent"}).encode()
    return b'{"kind": "%s", "xxh3": "%016x", "body": %s}' % (kind.encode(), xxh3_64(text), text)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_record_round_trips(record):
    assert decode_record(encode_record(record), type(record)) == record


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_flipped_bit_is_refused_or_changes_nothing(record):
    encoded = encode_record(record)
    for at in range(len(encoded)):
        for bit in range(8):
            flipped = bytearray(encoded)
            flipped[at] ^= 1 << bit
            try:
                found = decode_record(bytes(flipped), type(record))
            except CorruptError:
                continue
            assert found == record


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_every_truncation_is_refused(record):
    encoded = encode_record(record).rstrip()
    for nbytes in range(len(encoded)):
        with pytest.raises(CorruptError):
            decode_record(encoded[:nbytes], type(record))


def test_types_are_checked_with_a_right_checksum():
    assert decode_record(forged("tag"), TagRecord) == TAG
    for changes in (
        {"seq": -1},
        {"seq": "3"},
        {"seq": 1 << 63},
        {"seq": True},
        {"seq": 1.5},
        {"checkpoint_id": "00"},
        {"checkpoint_id": "A" * 64},
        {"more": 1},
        {"step": "absent"},
    ):
        with pytest.raises(MalformedError):
            decode_record(forged("tag", **changes), TagRecord)


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(MalformedError):
        decode_record(encode_record(TAG), StoreRecord)
    with pytest.raises(MalformedError, match="kind 'lease'"):
        decode_record(forged("tag").replace(b'"tag"', b'"lease"'), TagRecord)


def test_trailing_bytes_and_long_files_are_refused():
    with pytest.raises(MalformedError):
        decode_record(encode_record(TAG) + b"{}", TagRecord)
    with pytest.raises(MalformedError):
        decode_record(encode_record(TAG), TagRecord, nbytes_max=20)


def test_newer_store_is_unsupported():
    for changes in (
        {"format_version": 255, "new_field": 1},
        {"mandatory_features": ["sharding"]},
        {"hash_name": "sha3"},
        {"block_nbytes": 65_536},
    ):
        with pytest.raises(UnsupportedError):
            decode_record(forged("ckstore", **changes), StoreRecord)


@pytest.mark.parametrize(
    "changes", [{"chunk_nbytes_max": 0}, {"chunk_nbytes_max": 1 << 31}, {"depth_max": 1 << 20}, {"store_id": "xy"}]
)
def test_limits_of_a_store_are_bounded(changes):
    with pytest.raises(MalformedError):
        decode_record(forged("ckstore", **changes), StoreRecord)


def test_config_with_edit_mark_needs_no_checksum():
    encoded = encode_record(RECORDS["config"])
    edited = encoded.replace(b'"keep_last": 3', b'"keep_last": 5')
    with pytest.raises(ChecksumError, match="null"):
        decode_record(edited, ConfigRecord)
    envelope = json.loads(edited)
    envelope["xxh3"] = None
    assert decode_record(json.dumps(envelope).encode(), ConfigRecord).retention == {"keep_last": 5}


def test_other_records_need_their_checksum():
    envelope = json.loads(encode_record(TAG))
    envelope["xxh3"] = None
    with pytest.raises(ChecksumError):
        decode_record(json.dumps(envelope).encode(), TagRecord)


def test_a_tier_must_have_a_name():
    with pytest.raises(MalformedError):
        decode_record(forged("config", tiers={"../x": "/"}), ConfigRecord)


def test_unsupported_values_are_not_written():
    for content in ("\ud800", 1 << 64, object()):
        with pytest.raises(UsageError):
            encode_inner([content])


def test_inner_records_refuse_other_shapes():
    for content in (b"", b"\xc1", b"\x80", encode_inner([1, 2]), encode_inner({"run": "a"})):
        with pytest.raises(MalformedError):
            decode_inner(content, HeaderRecord)


def test_threads_that_decode_a_kind_first_make_their_decoders_one_after_another(monkeypatch):
    # msgspec keeps an incomplete description of a class in that class. A thread that uses it crashes.
    make, busy, most = msgspec.msgpack.Decoder, [], []

    def make_slowly(kind):
        busy.append(kind)
        most.append(len(busy))
        time.sleep(0.02)
        busy.remove(kind)
        return make(kind)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", make_slowly)
    kinds = [namedtuple(f"Kind{number}", "value") for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda kind: decode_inner(encode_inner([7]), kind), kinds))
    assert [each.value for each in found] == [7] * 4
    assert most == [1] * 4
