"""Protects collections in a tier: purged data is removed there too, and needed data never."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import BackendError, ConflictError
from ckstore.format import paths
from ckstore.format.records import DeletionListRecord, decode_record, encode_record
from ckstore.io.url import backend_for
from ckstore.store import pending_deletes
from ckstore.store.listing import packs_in
from ckstore.store.pending_deletes import LIST_FILE, deletion_lists
from ckstore.store.small_files import put_small


def state_of(seed, count=40_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "shared": np.arange(9_000), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])
        assert np.array_equal(store.restore(step)["shared"], np.arange(9_000))


@pytest.fixture
def pushed(folder, place):
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        store.gc(now=True)
        yield store


def packs_at(place):
    return {pack_id for pack_id, _ in packs_in(backend_for(place))}


def manifests_at(place):
    return backend_for(place).list_names("manifests/main")


def test_dropped_checkpoint_is_removed_after_purge(pushed, place):
    assert len(packs_at(place)) == 2
    pushed.delete(2)
    kept = pushed.gc_tier(min_age=0)
    assert (kept.dropped, kept.packs) == ([], {}), "it can still be undeleted"
    pushed.gc(now=True)
    planned = pushed.gc_tier(min_age=0, dry_run=True)
    assert len(manifests_at(place)) == 2
    report = pushed.gc_tier(min_age=0)
    assert [name.step for name in report.dropped] == [name.step for name in planned.dropped] == [2]
    assert report.freed_nbytes == planned.freed_nbytes > 100_000
    assert len(packs_at(place)) == len(manifests_at(place)) == 1
    assert deletion_lists(backend_for(place)) == []
    assert_restores(pushed, 1, 3)
    with ckstore.open(place) as there:
        assert there.steps() == [1]
        assert there.verify("decode").is_clean


def test_shared_pack_stays(pushed, place):
    pushed.delete(1)
    pushed.gc(now=True)
    pushed.gc_tier(min_age=0)
    # The shared chunk is in the pack of the first checkpoint; it was written to a new pack, too.
    assert len(packs_at(place)) == 3
    assert_restores(pushed, 2, 3)


def test_young_packs_and_packs_in_trash_stay(pushed, place):
    pushed.delete(2)
    pushed.gc(now=True)
    report = pushed.gc_tier()
    assert report.packs == {}
    assert report.young_nbytes > 100_000
    assert len(packs_at(place)) == 2


def test_undeleted_checkpoint_keeps_its_packs(pushed, place):
    pushed.delete(2)
    pushed.undelete(2)
    pushed.gc_tier(min_age=0)
    pushed.gc(now=True)
    pushed.gc_tier(min_age=0)
    assert_restores(pushed, 1, 2, 3)


def test_rewound_checkpoint_keeps_its_packs(pushed, place):
    pushed.rewind(2)
    pushed.delete("seq:1")
    pushed.gc(now=True)
    report = pushed.gc_tier(min_age=0)
    assert [name.seq for name in report.dropped] == [1]
    assert report.packs == {}
    assert_restores(pushed, 1, 2, 3)


def test_lower_generation_is_removed_below_whole_one(pushed, place):
    pushed.pull()
    pushed.push(keep_local=1)
    assert len(manifests_at(place)) == 4
    report = pushed.gc_tier(min_age=0)
    assert len(report.superseded) == 2
    assert report.packs == {}
    assert len(manifests_at(place)) == 2
    pushed.gc(now=True)
    assert_restores(pushed, 1, 2, 3)


def test_unreadable_manifest_stops_removal_of_packs(pushed, place):
    pushed.delete(2)
    pushed.gc(now=True)
    there = backend_for(place)
    name = f"manifests/main/{paths.ManifestName('main', 7, 7, 0).file}"
    there.create(name, b"torn", sync=True)
    report = pushed.gc_tier(min_age=0)
    assert report.stop
    assert report.packs == {}
    assert len(packs_at(place)) == 2
    there.unlink(name)
    assert len(pushed.gc_tier(min_age=0).packs) == 1


def put_list(there, pack_ids, **changes):
    """Write a list as a running collector of this process does."""
    there.make_folder("tmp")
    packs = {bytes.fromhex(pack_id): 1 for pack_id in pack_ids}
    path = pending_deletes._write_list(there, SYSTEM_CLOCK, packs)
    if changes:
        record = decode_record(there.read_bytes(path, nbytes_max=1 << 20), DeletionListRecord)
        there.unlink(path)
        kept = {name: getattr(record, name) for name in record.__struct_fields__}
        there.create(path, encode_record(DeletionListRecord(**{**kept, **changes})), sync=True)
    return path


def test_push_sees_packs_listed_for_removal(folder, place):
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
        pack_ids = [pack.pack_id for pack in store.contents(1).packs]
        there = backend_for(place)
        store.push(place, keep_local=1, dry_run=True)
        put_list(there, pack_ids)
        with pytest.raises(ConflictError):
            store.push(place, keep_local=0)
        assert {pack.tier for pack in store.contents(1).packs} == {"local"}
        assert_restores(store, 1)


def test_collector_sees_manifest_published_after_plan(pushed, place, monkeypatch):
    """A push of the same packs comes between the list and the last check."""
    pushed.delete(2)
    pushed.gc(now=True)
    there = backend_for(place)
    kept = next(file for file in manifests_at(place) if "-000000000002." in file)
    content = there.read_bytes(f"manifests/main/{kept}", nbytes_max=1 << 30)

    def publishes_again(backend, name, written):
        put_small(backend, name, written)
        if name.endswith(LIST_FILE):
            there.create(f"manifests/main/{kept}", content, sync=True)

    monkeypatch.setattr("ckstore.store.pending_deletes.put_small", publishes_again)
    report = pushed.gc_tier(min_age=0)
    assert report.packs == {}
    assert len(packs_at(place)) == 2


# Lists of dead collectors


@pytest.fixture
def listed(folder, place):
    """A store, and a location whose list names the only pack."""
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
        yield store, backend_for(place), [pack.pack_id for pack in store.contents(1).packs]


def settled_immediately(monkeypatch):
    """Treat requests of a process as completed immediately."""
    monkeypatch.setattr(pending_deletes, "LAST_REQUEST_SECONDS", -2.0)


def test_list_of_dead_local_process_does_not_block(listed, place, monkeypatch):
    store, there, pack_ids = listed
    put_list(there, pack_ids, pid=2**22 + 1, process_started="1")
    with pytest.raises(ConflictError):
        store.push(place, keep_local=0)
    settled_immediately(monkeypatch)
    store.push(place, keep_local=0)
    assert_restores(store, 1)
    assert store.gc_tier(min_age=0).lists == 1
    assert deletion_lists(there) == []


def test_list_of_living_or_remote_process_blocks(listed, place, monkeypatch, quiet_log):
    store, there, pack_ids = listed
    settled_immediately(monkeypatch)
    for changes in ({}, {"host": "elsewhere", "boot_id": "m/b/n"}):
        path = put_list(there, pack_ids, **changes)
        with pytest.raises(ConflictError):
            store.push(place, keep_local=0)
        there.unlink(path)
    put_list(there, pack_ids, host="elsewhere", boot_id="m/b/n")
    monkeypatch.setattr(pending_deletes, "LIST_AGE_SECONDS_MAX", -2.0)
    store.push(place, keep_local=0)
    assert_restores(store, 1)


class FastClock:
    """The clock of a machine whose time is a day ahead."""

    def __getattr__(self, name):
        return getattr(SYSTEM_CLOCK, name)

    def now_ns(self):
        return SYSTEM_CLOCK.now_ns() + 86_400 * 10**9


def test_clock_jump_does_not_expire_a_list(listed, place, quiet_log):
    _, there, pack_ids = listed
    path = put_list(there, pack_ids, host="elsewhere", boot_id="m/b/n")
    packs = {bytes.fromhex(pack_id) for pack_id in pack_ids}
    assert pending_deletes.packs_pending_deletion(there, packs, FastClock()) == packs
    assert pending_deletes.remove_dead_lists(there, FastClock()) == 0
    assert deletion_lists(there) == [path]


def test_leftover_list_of_this_process_does_not_block(listed, place, monkeypatch):
    store, there, pack_ids = listed
    path = put_list(there, pack_ids)
    pending_deletes._LISTS_IN_USE.discard(path)
    settled_immediately(monkeypatch)
    store.push(place, keep_local=0)


def test_unreadable_list_may_name_anything(listed, place, quiet_log):
    store, there, pack_ids = listed
    path = put_list(there, pack_ids)
    there.unlink(path)
    there.create(path, b"torn", sync=True)
    with pytest.raises(ConflictError):
        store.push(place, keep_local=0)
    assert store.gc_tier("remote", min_age=0).lists == 0
    assert store.gc_tier("remote", min_age=0, clear_lists=True).lists == 1
    store.push(place, keep_local=0)
    assert_restores(store, 1)


def test_removal_without_answer_keeps_its_list(pushed, place, monkeypatch, quiet_log):
    """The removal may still take effect, and must not hit a manifest that was published after the list was removed."""
    pushed.delete(2)
    pushed.gc(now=True)
    target = repository_of(pushed).tiers.open("remote")
    unlink = target.unlink

    def loses_the_answer(name):
        if name.startswith("packs/"):
            raise BackendError("no answer", is_transient=True)
        unlink(name)

    with monkeypatch.context() as patches:
        patches.setattr(target, "unlink", loses_the_answer)
        with pytest.raises(BackendError):
            pushed.gc_tier(min_age=0)
    assert len(deletion_lists(backend_for(place))) == 1
    settled_immediately(monkeypatch)
    report = pushed.gc_tier(min_age=0)
    assert (report.lists, len(report.packs)) == (1, 1)
    assert deletion_lists(backend_for(place)) == []
