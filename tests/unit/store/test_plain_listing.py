"""Protects `ckstore ls` of plain stores: the quick listing says what the other one says, or leaves it to that one."""

from __future__ import annotations

import dataclasses
import shutil
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckstore
from ckstore import config
from ckstore.format import header as heads
from ckstore.format import paths, records, wire
from ckstore.results import Info
from ckstore.store import plain_listing as plain
from ckstore.store.listing import Entry, RunLog, log_of_store
from support.memory_folders import tmp_path as tmp_path

CLOCK = iter(range(10**9))


def commit(store, step, **metrics):
    store.commit({"w": np.full(300, next(CLOCK), np.float32)}, step, metrics=metrics)


@pytest.fixture(scope="module")
def readonly_place(tmp_path_factory):
    """Two runs with metrics and tags; one has a dropped checkpoint."""
    place = tmp_path_factory.mktemp("plain") / "store"
    with ckstore.open(place, run="main") as store:
        for step in (0, 7, 7, 10**12):
            commit(store, step, loss=0.5 / (step + 1), acc=float("nan"), steps=float(step))
        store.tag("seq:1", "good")
        store.tag("seq:1", "a.good-one")
        store.tag("seq:2", "other")
        store.delete(0)
    with ckstore.open(place, run="x.y_2") as store:
        # A header longer than the first read.
        commit(store, 3, **{f"metric {number:03} {'x' * 40} \u00e9\u4e2d": number / 7 for number in range(300)})
    return place


@pytest.fixture
def place(readonly_place, tmp_path):
    """A copy that the test may change."""
    return Path(shutil.copytree(readonly_place, tmp_path / "store"))


def facts_of(log):
    """Return everything that a listing says about a run, with the types of the values."""
    facts = [(name, getattr(log, name)) for name in plain.PlainLog._fields if name != "entries"]
    for entry in log.entries:
        facts += [(entry.seq, entry.step, entry.damage, entry.refused, entry.points)]
        facts += [(name, repr(getattr(entry.info, name))) for name in plain.PlainInfo._fields]
    return facts


def both(place, **options):
    """Return the facts of the quick listing (None: it declines) and of the other one."""
    quick = plain.plain_logs(str(place), **options)
    return quick and [facts_of(log) for log in quick], [facts_of(log) for log in log_of_store(place, **options)]


@pytest.mark.parametrize("options", [{}, {"limit": 1}, {"limit": 99}, {"run": "x.y_2"}, {"run": "main", "limit": 2}])
def test_plain_listing_equals_the_other(readonly_place, options):
    quick, full = both(readonly_place, **options)
    assert quick == full
    assert len(full) == (1 if "run" in options else 2)


def test_new_store_is_listed_as_empty(tmp_path):
    ckstore.open(tmp_path / "store").close()
    assert plain.plain_logs(str(tmp_path / "store")) == []
    assert log_of_store(tmp_path / "store") == []


def test_link_to_a_store_is_followed(place):
    link = place.parent / "link"
    link.symlink_to(place)
    quick, full = both(link)
    assert quick == full != []


def test_constants_are_those_of_the_format():
    fields = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (Info, Entry)}
    assert plain.PlainInfo._fields == fields[Info]
    assert set(plain.PlainEntry._fields) == set(fields[Entry])
    assert all(hasattr(RunLog, name) for name in plain.PlainLog._fields)
    assert records.HeaderRecord.__struct_fields__ == plain.HEADER_FIELDS
    assert records.StoreRecord.__struct_fields__ == plain.STORE_FIELDS
    assert records.TagRecord.__struct_fields__ == (*plain.TAG_FIELDS, "point")
    assert plain.VERSIONS == records.READABLE_VERSIONS
    assert plain.COMPRESSED_VERSION == heads.COMPRESSED_VERSION
    assert (plain.MAGIC, plain.PREAMBLE.format) == (heads.MANIFEST_MAGIC, heads._PREAMBLE.format)
    sizes = plain.PREAMBLE_NBYTES, plain.TRAILER_NBYTES, plain.HEAD_NBYTES_MAX, plain.SEAL_NBYTES
    assert sizes == (heads.PREAMBLE_NBYTES, heads.TRAILER_NBYTES, heads.HEAD_NBYTES_MAX, wire.SEAL_NBYTES)
    assert config._NAME.pattern == rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{plain.NAME_LENGTH_MAX - 1}}}"
    assert all(config.is_name(letter) for letter in plain.LETTERS)
    assert len(set(plain.LETTERS)) == 62
    assert len(str(paths.SEQ_MAX)) == plain.DIGITS_MAX


def manifest_of(place, seq=1):
    return next((place / "manifests" / "main").glob(f"{seq:08d}-*"))


@pytest.mark.parametrize("name", ["store.json", "tags/main/good", "manifest"])
def test_every_changed_byte_is_left_to_the_other_listing(place, name):
    path = manifest_of(place) if name == "manifest" else place / name
    content = bytearray(path.read_bytes())
    preamble = heads.decode_preamble(content) if name == "manifest" else None
    path.chmod(0o600)
    for at in range(preamble.head_nbytes if preamble else len(content)):
        content[at] ^= 0x01
        path.write_bytes(content)
        assert plain.plain_logs(str(place)) is None, at
        content[at] ^= 0x01
    path.write_bytes(content)
    assert plain.plain_logs(str(place)) is not None


@pytest.mark.parametrize("name", ["store.json", "tags/main/good", "manifest"])
@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 150])
def test_short_file_is_left_to_the_other_listing(place, name, nbytes):
    path = manifest_of(place) if name == "manifest" else place / name
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:nbytes])
    assert plain.plain_logs(str(place)) is None


def rewrite_header(path, change):
    """Change the header record of a manifest, and correct every length and checksum."""
    content = path.read_bytes()
    preamble = heads.decode_preamble(content)
    record = msgspec.msgpack.decode(content[heads.PREAMBLE_NBYTES : preamble.head_nbytes])
    section = change(record)
    section = section if isinstance(section, bytes) else msgspec.msgpack.encode(section or record)
    more = len(section) - preamble.header_nbytes
    sizes = {"header_nbytes": len(section), "file_nbytes": preamble.file_nbytes + more}
    changed = dataclasses.replace(preamble, header_xxh3=wire.xxh3_64(section), **sizes)
    path.chmod(0o600)
    path.write_bytes(heads.encode_preamble(changed) + section + content[preamble.head_nbytes :])


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"logical_plain_nbytes": 1 << 40}, True),
        ({"logical_plain_nbytes": 1}, False),
        ({"version": 3}, False),
        ({"version": 3, "logical_plain_nbytes": 0}, True),
    ],
    ids=str,
)
def test_plain_length_is_that_of_the_version(place, changes, is_plain):
    path = manifest_of(place)
    content = path.read_bytes()
    path.chmod(0o600)
    changed = dataclasses.replace(heads.decode_preamble(content), **changes)
    path.write_bytes(heads.encode_preamble(changed) + content[heads.PREAMBLE_NBYTES :])
    if is_plain:
        quick, full = both(place)
        assert quick == full
    else:
        assert plain.plain_logs(str(place)) is None
        assert any(entry.damage for log in log_of_store(place) for entry in log.entries)


def setting(**fields):
    return lambda record: record.update(fields)


def without(field):
    return lambda record: {name: value for name, value in record.items() if name != field}


HEADERS = {
    "unchanged": lambda record: record,
    "other text": setting(fidelity="residual \u00e9"),
    "archival": setting(is_archival=True),
    "other parent": setting(parent=10**17),
    "large counts": setting(bytes_state=2**63 - 1, tensor_count=70_000, chunk_count=2**33),
    "no parent": setting(parent=None),
    "many metrics": setting(metrics={f"metric {number}": -number / 3 for number in range(70)}),
    "too large count": setting(bytes_state=2**63),
    "negative count": setting(chunk_count=-1),
    "float count": setting(chunk_count=1.0),
    "true count": setting(chunk_count=True),
    "int metric": setting(metrics={"loss": 1}),
    "text metric": setting(metrics={"loss": "1"}),
    "metric without a name": setting(metrics={None: 1.0}),
    "metrics are a list": setting(metrics=[]),
    "long metric": setting(metrics={"x" * 1025: 1.0}),
    "other run": setting(run="x.y_2"),
    "other step": setting(step=8),
    "other seq": setting(seq=2),
    "generation": setting(generation=1),
    "has an origin": setting(origin_id=bytes(32)),
    "short id": setting(checkpoint_id=bytes(31)),
    "text id": setting(checkpoint_id="x" * 32),
    "number for a flag": setting(is_archival=1),
    "bytes for a text": setting(fidelity=b"exact"),
    "long text": setting(fidelity="x" * 1025),
    "parent out of range": setting(parent=10**18),
    "text parent": setting(parent="1"),
    "missing field": without("depth_max"),
    "unknown field": setting(more=1),
    "other order": lambda record: dict(reversed(record.items())),
    "a list": lambda record: [record],
    "trailing byte": lambda record: msgspec.msgpack.encode(record) + b"\0",
    "cut": lambda record: msgspec.msgpack.encode(record)[:-1],
    "empty": lambda record: b"\x80",
    "repeated field": lambda record: b"\xde\x00\x14" + msgspec.msgpack.encode(record)[3:] + b"\xa3run\xa4main",
    "deep": lambda record: b"\x81\xa1x" * 20_000 + b"\xc0",
    "invalid text": lambda record: msgspec.msgpack.encode(record).replace(b"exact", b"exa\xff\xff"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_strange_header_is_read_as_the_other_listing_does(place, name):
    rewrite_header(manifest_of(place), HEADERS[name])
    quick, full = both_or_damage(place)
    is_valid = list(HEADERS).index(name) < list(HEADERS).index("too large count")
    assert quick == (full if is_valid else None)


def both_or_damage(place):
    """Return the facts of both listings; those of the other one are None if it shows damage."""
    quick, full = plain.plain_logs(str(place)), log_of_store(place)
    is_damaged = any(entry.info is None for log in full for entry in log.entries)
    return quick and [facts_of(log) for log in quick], None if is_damaged else [facts_of(log) for log in full]


def replaced(place):
    path = manifest_of(place)
    path.rename(path.with_name(path.name.replace(".0.ckm", ".1.ckm")))


CHANGES = {
    "a folder that others may write": lambda place: place.chmod(0o777),
    "another version": lambda place: edit_store(place, b'"format_version": 4', b'"format_version": 9'),
    "an unknown feature": lambda place: edit_store(place, b'"mandatory_features": []', b'"mandatory_features": ["x"]'),
    "another hash": lambda place: edit_store(place, b'"blake3"', b'"sha256"'),
    "another id": lambda place: edit_store(place, b'"store_id": "', b'"store_id": "0'),
    "no store.json": lambda place: (place / "store.json").unlink(),
    "a link as store.json": lambda place: relink(place / "store.json"),
    "a link as manifest": lambda place: relink(manifest_of(place)),
    "a replaced manifest": replaced,
    "a foreign file": lambda place: (place / "manifests" / "main" / "x.txt").touch(),
    "a foreign claim": lambda place: (place / "claims" / "main" / "x").touch(),
    "a foreign run": lambda place: (place / "claims" / "not a run").mkdir(),
    "a foreign tag": lambda place: (place / "tags" / "main" / "..x").touch(),
    "an empty tag": lambda place: (place / "tags" / "main" / "x").touch(),
    "a short claim": lambda place: (place / "claims" / "main" / "0000009").touch(),
    "a lost manifest": lambda place: manifest_of(place).unlink(),
    "two manifests of one seq": lambda place: shutil.copy(
        manifest_of(place), manifest_of(place).with_name("00000001-000000000009.0.ckm")
    ),
    "a folder as manifest": lambda place: (place / "manifests" / "main" / "00000009-000000000009.0.ckm").mkdir(),
}


def edit_store(place, old, new):
    """Change the body of store.json, and correct its checksum."""
    content = (place / "store.json").read_bytes()
    body = content[content.index(b'"body":') + 7 : -2].replace(old, new)
    assert body != content[content.index(b'"body":') + 7 : -2]
    (place / "store.json").write_bytes(b'{"kind":"ckstore","xxh3":"%016x","body":%s}\n' % (wire.xxh3_64(body), body))


def relink(path):
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_plain_is_left_to_the_other_listing(place, name):
    CHANGES[name](place)
    assert plain.plain_logs(str(place)) is None


@pytest.mark.parametrize("claim", ["00000009", f"00000001.intent-{'0a' * 16}", "00000009.dropped"])
def test_claim_without_checkpoint_is_ignored(place, claim):
    (place / "claims" / "main" / claim).touch()
    quick, full = both(place)
    assert quick == full


def test_manifest_that_one_read_of_the_folder_misses_is_listed(place, monkeypatch):
    listed, missed = plain._list, manifest_of(place, 3).name

    def list_and_miss(folder):
        names = listed(folder)
        if missed in names and not seen:
            seen.append(names.pop(names.index(missed)))
        return names

    seen = []
    monkeypatch.setattr(plain, "_list", list_and_miss)
    quick, full = both(place)
    assert seen == [missed]
    assert quick == full


@pytest.mark.parametrize("path", ["s3://bucket/x", "C:x", "file:///x", "//x", "", "nowhere", "a\0b", "\udcff"])
def test_other_addresses_are_left_to_the_other_listing(path):
    assert plain.plain_logs(path) is None


def test_unknown_run_is_left_to_the_other_listing(readonly_place):
    assert plain.plain_logs(str(readonly_place), run="nobody") is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda values: st.dictionaries(st.text(), values, max_size=20),
)


@given(VALUES)
def test_messagepack_is_decoded_as_msgspec_does(value):
    encoded = msgspec.msgpack.encode(value)
    assert plain._value(encoded, 0) == (msgspec.msgpack.decode(encoded), len(encoded))


@given(st.binary(max_size=40))
def test_decoding_any_bytes_ends_with_value_or_refusal(content):
    try:
        _, end = plain._value(content, 0)
    except (plain._NotPlainError, ValueError, RecursionError):
        return
    assert end <= len(content)


@pytest.mark.parametrize("nbytes", [31, 255, 256, 65_535, 65_536])
def test_long_texts_and_bytes_are_decoded(nbytes):
    for value in ("x" * nbytes, bytes(nbytes), {"x": float(nbytes)}):
        encoded = msgspec.msgpack.encode(value)
        assert plain._value(encoded, 0) == (value, len(encoded))
        with pytest.raises(plain._NotPlainError):
            plain._value(encoded[:-1], 0)


def test_struct_errors_cannot_occur():
    # The preamble and floats are unpacked only after their lengths were checked.
    with pytest.raises(plain._NotPlainError):
        plain._value(struct.pack(">Bf", 0xCB, 1.0), 0)


def test_store_with_a_journal_is_left_to_the_other(place):
    (place / "journals").mkdir()
    assert both(place)[0] is None
