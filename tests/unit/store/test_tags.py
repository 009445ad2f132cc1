"""Protects tags and concurrent drops: a tagged checkpoint is never dropped, in any order of events."""

from __future__ import annotations

import os
import threading

import pytest

from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckstore.format import paths
from ckstore.format.records import IntentRecord, encode_record
from ckstore.io.memory import MemoryBackend
from ckstore.processes import boot_identity
from ckstore.store import tags as tags_module
from ckstore.store.tags import Tags
from support.gc_histories import once

ID = bytes(range(32))


@pytest.fixture
def tags(backend):
    for folder in (*paths.TOP_FOLDERS, paths.tags_folder("main"), paths.claims_folder("main")):
        backend.make_folder(folder)
    return Tags(backend, "main", SYSTEM_CLOCK)


def put(tags, name, seq=3, *, is_dropped=lambda seq: False):
    tags.put(name, seq=seq, step=seq * 10, checkpoint_id=ID, is_dropped=is_dropped)


def test_tag_is_durable(tags, backend):
    put(tags, "good")
    record = tags.get("good")
    assert (record.seq, record.step, record.checkpoint_id) == (3, 30, ID.hex())
    assert backend.syncs[paths.tags_folder("main")] == 1
    assert any(name.startswith("tmp/") and name.endswith(".tag") for name in backend.syncs)
    assert backend.list_names("tmp") == []


def test_existing_tag_moves(tags):
    put(tags, "good", 3)
    put(tags, "other", 3)
    put(tags, "good", 4)
    assert tags.names_of(4) == ["good"]
    assert tags.names_of(3) == ["other"]
    assert {name: record.seq for name, record in tags.all().items()} == {"good": 4, "other": 3}


def test_missing_tag_is_not_found(tags):
    with pytest.raises(NotFoundError, match="no tag 'good'"):
        tags.get("good")
    with pytest.raises(NotFoundError):
        tags.remove("good")


def test_removing_a_tag_is_durable(tags, backend):
    put(tags, "good")
    before = backend.syncs[paths.tags_folder("main")]
    tags.remove("good")
    assert tags.all() == {}
    assert backend.syncs[paths.tags_folder("main")] == before + 1


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a..b", "latest", "7", "ä", "x" * 129])
def test_tag_names_with_path_parts_are_refused(tags, name):
    with pytest.raises(UsageError):
        put(tags, name)
    with pytest.raises(UsageError):
        tags.get(name)


def test_damaged_tag_is_reported_and_can_be_reset(tags, backend):
    path = paths.tag_name("main", "good")
    backend.create(path, b"not a record", sync=False)
    with pytest.raises(CorruptError, match="tag 'good' is damaged"):
        tags.get("good")
    put(tags, "good")
    assert tags.get("good").seq == 3


def test_tag_on_dropped_checkpoint_is_undone(tags):
    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", is_dropped=lambda seq: True)
    assert tags.all() == {}


def test_refused_move_restores_the_tag(tags):
    put(tags, "good", 1)
    with pytest.raises(ConflictError):
        put(tags, "good", 2, is_dropped=lambda seq: seq == 2)
    assert tags.get("good").seq == 1


def dropped_after_write():
    """Return a predicate: not dropped before a tag is written, and dropped after that."""
    looks = iter([False, True])
    return lambda seq: next(looks)


def test_tag_is_undone_if_dropped_while_writing(tags):
    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", is_dropped=dropped_after_write())
    assert tags.all() == {}


def test_move_is_undone_if_target_is_dropped_meanwhile(tags):
    put(tags, "good", 1)
    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", 2, is_dropped=dropped_after_write())
    assert tags.get("good").seq == 1


def test_intent_made_while_writing_refuses_the_tag(tags, monkeypatch):
    put(tags, "good", 1)
    once(monkeypatch, MemoryBackend, "rename", after=lambda: tags.declare(2, "delete"))
    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", 2)
    assert tags.get("good").seq == 1


def test_a_drop_that_ends_between_the_two_checks_refuses_the_tag(tags, monkeypatch):
    """It removes its intent when the checkpoint is gone, so the intents are read before the checkpoints."""
    intents, gone = [], []
    once(monkeypatch, MemoryBackend, "rename", after=lambda: intents.append(tags.declare(2, "delete")))

    def is_dropped(seq):
        was_gone = bool(gone)
        if intents and not gone:
            gone.append(seq)
            tags.retract(intents[0])
        return was_gone

    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", 2, is_dropped=is_dropped)
    assert tags.all() == {}


@pytest.mark.parametrize("is_intended", [True, False])
def test_refused_move_never_leaves_the_old_checkpoint(tags, monkeypatch, is_intended):
    put(tags, "good", 1)
    if is_intended:
        tags.declare(2, "delete")

    def written(*args):
        raise AssertionError("a drop might have read it")

    monkeypatch.setattr(type(tags), "_replace", written)
    with pytest.raises(ConflictError, match="is being deleted"):
        put(tags, "good", 2, is_dropped=lambda seq: not is_intended)
    assert tags.get("good").seq == 1


def test_intent_refuses_tags_until_retracted(tags):
    intent = tags.declare(3, "delete")
    with pytest.raises(ConflictError):
        put(tags, "good", 3)
    put(tags, "other", 4)
    tags.retract(intent)
    put(tags, "good", 3)
    assert tags.names_of(3) == ["good"]


def test_intent_is_durable_before_tags_are_read(tags, backend):
    before = backend.syncs[paths.claims_folder("main")]
    path = tags.declare(3, "delete")
    assert [count for name, count in backend.syncs.items() if name.endswith(".intent")] == [1]
    assert backend.stat(path) is not None
    assert backend.list_names("tmp") == []
    assert backend.syncs[paths.claims_folder("main")] == before + 1


def test_intent_of_dead_maker_is_ignored(tags, backend):
    record = IntentRecord(
        host="here",
        boot_id=boot_identity(),
        pid=os.getppid(),
        process_started="1",
        token="cd" * 16,
        acquired_ns=1,
        heartbeat_ns=1,
        what="delete",
    )
    backend.create(paths.intent_name("main", 3, record.token), encode_record(record), sync=False)
    assert tags.intents_on(3) == []
    put(tags, "good", 3)


def test_intent_of_another_host_refuses_tags(tags, backend):
    record = IntentRecord(
        host="elsewhere",
        boot_id="another",
        pid=1,
        process_started="1",
        token="cd" * 16,
        acquired_ns=1,
        heartbeat_ns=1,
        what="delete",
    )
    backend.create(paths.intent_name("main", 3, record.token), encode_record(record), sync=False)
    with pytest.raises(ConflictError):
        put(tags, "good", 3)


def test_concurrent_delete_and_tag_lose_no_tagged_checkpoint(store):
    for round_number in range(15):
        seq = store.commit({"n": round_number}, round_number).seq
        barrier = threading.Barrier(2)
        outcome = {}

        def tag(seq=seq, barrier=barrier, outcome=outcome):
            barrier.wait()
            try:
                # Bypass the handle's lock, as another process does.
                parts = repository_of(store)
                header = parts.manifests.header(parts.manifests.listing().names[-1])
                parts.tags.put(
                    "kept",
                    seq=seq,
                    step=header.step,
                    checkpoint_id=header.checkpoint_id,
                    is_dropped=lambda s: all(n.seq != s for n in parts.manifests.listing().names),
                )
                outcome["tagged"] = True
            except (ConflictError, FileNotFoundError, IndexError):
                outcome["tagged"] = False

        def delete(seq=seq, barrier=barrier, outcome=outcome):
            barrier.wait()
            try:
                store.delete(f"seq:{seq}")
                outcome["deleted"] = True
            except ConflictError:
                outcome["deleted"] = False

        threads = [threading.Thread(target=tag), threading.Thread(target=delete)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not (outcome["tagged"] and outcome["deleted"]), outcome
        in_place = any(entry.seq == seq for entry in store.log())
        assert in_place is not outcome["deleted"]
        if outcome["tagged"]:
            assert store.tags() == {"kept": seq}
            store.untag("kept")


def test_tag_between_intent_and_drop_stops_the_drop(store, monkeypatch):
    seq = store.commit({"n": 1}, 1).seq
    declared = tags_module.Tags.declare

    def declare_and_be_tagged(self, number, purpose):
        # The tag is written just before the intent becomes visible.
        record = self.all()
        assert record == {}
        header = store.info(f"seq:{seq}")
        self.put(
            "kept",
            seq=seq,
            step=1,
            checkpoint_id=bytes.fromhex(header.checkpoint_id),
            is_dropped=lambda number: False,
        )
        return declared(self, number, purpose)

    monkeypatch.setattr(tags_module.Tags, "declare", declare_and_be_tagged)
    with pytest.raises(ConflictError, match="is kept by the tag 'kept'"):
        store.delete(f"seq:{seq}")
    assert store.steps() == [1]
    assert repository_of(store).tags.intents_on(seq) == []
