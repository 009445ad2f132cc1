"""Pointers: what they name, and that they never silently name something else."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from ckstore.errors import ChecksumError, ConflictError, MalformedError, NotFoundError, UsageError
from ckstore.format.records import PointerRecord, encode_record
from ckstore.integrations import pointers
from ckstore.integrations.pointers import (
    address_from,
    address_in,
    entry_of,
    follow_pointer,
    is_pointer,
    read_pointer,
    refuse_damaged,
    require_local,
    write_pointer,
)
from ckstore.io.memory import MemoryBackend
from support.demotion_histories import filled


def record_of(store="store", **fields):
    defaults = {
        "about": "A checkpoint.",
        "made_by": "a test 1.0",
        "store": store,
        "store_id": "0" * 32,
        "run": "main",
        "step": 10,
        "after_seq": None,
        "seq": None,
        "checkpoint_id": None,
    }
    return PointerRecord(**{**defaults, **fields})


def state(step):
    return {"w": np.arange(8.0) + step, "step": step}


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "store") as opened:
        yield opened


def pointer_to(opened, receipt=None, **fields):
    if receipt is not None:
        fields = {"step": receipt.step, "seq": receipt.seq, "checkpoint_id": receipt.checkpoint_id, **fields}
    return record_of(store_id=opened.store_id, **fields)


def test_golden_bytes():
    assert encode_record(record_of()) == (
        b'{"kind":"pointer","xxh3":"3a280e2614866ca7","body":{\n  "about": "A checkpoint.",\n  "made_by": "a test 1.0",'
        b'\n  "store": "store",\n  "store_id": "00000000000000000000000000000000",\n  "run": "main",\n  "step": 10,\n'
        b'  "after_seq": null,\n  "seq": null,\n  "checkpoint_id": null\n}}\n'
    )


def test_unknown_fields_are_ignored(tmp_path):
    from ckstore.format.wire import xxh3_64

    body = json.dumps({**json.loads(encode_record(record_of()))["body"], "new": 1}).encode()
    (tmp_path / "p").write_bytes(b'{"kind":"pointer","xxh3":"%016x","body":%s}' % (xxh3_64(body), body))
    assert read_pointer(tmp_path / "p") == record_of()


def test_pointer_is_read_by_file_or_folder(tmp_path):
    write_pointer(tmp_path / "ckstore.json", record_of())
    assert read_pointer(tmp_path) == read_pointer(tmp_path / "ckstore.json") == record_of()
    assert [path.name for path in tmp_path.iterdir()] == ["ckstore.json"]


def test_failed_write_leaves_the_old_pointer(tmp_path, monkeypatch):
    write_pointer(tmp_path / "p", record_of(step=1))

    def fail(descriptor):
        raise OSError(28, "no space")

    monkeypatch.setattr(pointers.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_pointer(tmp_path / "p", record_of(step=2))
    assert read_pointer(tmp_path / "p").step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\3\4", b"\x80\x02}", b"x" * (1 << 17), b"[" * 60_000])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(MalformedError):
        read_pointer(tmp_path / "p")
    assert not is_pointer(tmp_path / "p")


def test_changed_pointer_is_refused(tmp_path):
    (tmp_path / "p").write_bytes(encode_record(record_of()).replace(b'"step": 10', b'"step": 11'))
    with pytest.raises(ChecksumError, match=r"pointer.*/p\. Delete it; the checkpoint stays in the store"):
        read_pointer(tmp_path / "p")
    assert not is_pointer(tmp_path / "p")
    with pytest.raises(ChecksumError):
        refuse_damaged(tmp_path / "p")


def test_damaged_pointer_in_a_folder_is_refused(tmp_path):
    refuse_damaged(tmp_path)
    for content in (b"", encode_record(record_of())[:100]):
        (tmp_path / "ckstore.json").write_bytes(content)
        with pytest.raises(MalformedError, match=r"ckstore\.json\. Delete it; the checkpoint stays in the store"):
            refuse_damaged(tmp_path)
    (tmp_path / "ckstore.json").write_bytes(encode_record(record_of()))
    refuse_damaged(tmp_path)


def test_file_of_another_program_is_no_damaged_pointer(tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"PK")
    refuse_damaged(tmp_path / "model.ckpt")


def test_missing_pointer_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="no pointer"):
        read_pointer(tmp_path)
    assert not is_pointer(tmp_path)
    assert not is_pointer(tmp_path / "missing")


def test_address_is_relative_and_moves_with_the_folders(tmp_path):
    folder = tmp_path / "run" / "checkpoint-10"
    folder.mkdir(parents=True)
    address = address_from(folder, str(tmp_path / "run" / "ckstore"))
    assert address == "../ckstore"
    write_pointer(folder / "ckstore.json", record_of(address))
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "checkpoint-10"
    assert address_in(read_pointer(moved), moved) == str(tmp_path / "moved" / "ckstore")


def test_address_of_a_bucket_is_kept(tmp_path):
    assert address_from(tmp_path, "s3://bucket/run") == "s3://bucket/run"
    assert address_in(record_of("s3://bucket/run"), tmp_path) == "s3://bucket/run"


def test_pointer_names_its_seq(store):
    first, second = store.commit(state(1), 10), store.commit(state(2), 10)
    assert entry_of(store, pointer_to(store, first), where="p").seq == first.seq
    assert entry_of(store, pointer_to(store, second), where="p").seq == second.seq


def test_pointer_in_flight_names_the_next_entry_of_its_step(store):
    old = store.commit(state(1), 10)
    store.commit(state(2), 11)
    new = store.commit(state(3), 10)
    store.commit(state(4), 10)
    assert entry_of(store, pointer_to(store, after_seq=old.seq), where="p").seq == new.seq
    assert entry_of(store, pointer_to(store), where="p").seq == old.seq


def test_pointer_whose_commit_was_lost_names_the_newest(store):
    seq = store.commit(state(1), 10).seq
    with pytest.raises(NotFoundError, match=r"step 10 did not become durable.*newest checkpoint is step 10") as caught:
        entry_of(store, pointer_to(store, after_seq=seq), where="p")
    assert caught.value.newest.seq == seq


def test_deleted_checkpoint_is_not_found_and_found_again(store):
    first = store.commit(state(1), 10)
    store.commit(state(2), 20)
    record = pointer_to(store, first)
    store.delete(10)
    with pytest.raises(NotFoundError, match=r"not in the store any more.*newest checkpoint is step 20.*undelete"):
        entry_of(store, record, where="p")
    back = store.undelete(10)
    assert entry_of(store, record, where="p").seq == back.seq != first.seq


def test_demoted_checkpoint_is_found():
    store, _ = filled(MemoryBackend(), 3)
    record = pointer_to(store, step=0, seq=0, checkpoint_id=store.info(0).checkpoint_id)
    store.demote(policy={"keep_newest": 1, "keep_every": 0})
    assert store.info(0).origin_id == record.checkpoint_id
    assert entry_of(store, record, where="p").step == 0


def test_another_checkpoint_with_the_seq_is_refused(store):
    receipt = store.commit(state(1), 10)
    with pytest.raises(ConflictError, match="not the checkpoint that the pointer names"):
        entry_of(store, pointer_to(store, receipt, checkpoint_id="0" * 64), where="p")


def test_another_store_is_refused(store):
    with pytest.raises(ConflictError, match="another store"):
        entry_of(store, record_of(), where="p")


def test_follow_pointer_gives_store_run_and_reference(store, tmp_path):
    receipt = store.commit(state(1), 10)
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    write_pointer(folder / "ckstore.json", pointer_to(store, receipt, store="../store"))
    assert follow_pointer(folder) == (str(tmp_path / "store"), "main", f"seq:{receipt.seq}")


def test_urls_are_refused():
    with pytest.raises(UsageError, match="local files"):
        require_local("s3://bucket/checkpoints/last.ckpt")
