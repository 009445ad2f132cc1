"""Protects the trash: its content can be restored until it is purged, and referenced files are never purged."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, MissingChunkError, NotFoundError, UsageError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from ckstore.ops.gc.policy import Retention
from ckstore.store import history
from ckstore.store.history import drop
from support.drop_marks import mark_dropped
from support.gc_histories import (
    LAST_ONE,
    check_restores,
    commit_all,
    damage,
    files_of,
    next_generation,
    other_handle,
    pack_of,
    packs_in_place,
    state_of,
)
from support.model import difference

HOUR = 3600


@pytest.fixture
def backend(clock):
    return MemoryBackend(clock=clock)


@pytest.fixture
def store(backend, clock):
    with ckstore.open(backend, clock=clock) as opened:
        commit_all(opened, [0, 1, 2, 3])
        clock.now += 2 * HOUR
        yield opened


def same(store, ref, number):
    found = difference(store.restore(ref), state_of(number))
    assert found is None, found


# Undelete


def test_undelete_restores_as_a_new_entry(store):
    store.delete(1)
    info = other_handle(store).undelete(1)
    assert (info.seq, info.step, info.is_archival) == (4, 1, True)
    same(store, 1, 1)
    same(store, "seq:4", 1)
    assert store.verify("decode").is_clean


def test_undelete_rescues_packs_that_were_collected(store, backend):
    pack = pack_of(store, 1)
    other_handle(store).gc(LAST_ONE)
    assert pack not in packs_in_place(backend)
    other_handle(store).undelete(1)
    assert pack in packs_in_place(backend)
    same(store, 1, 1)
    other_handle(store).gc(now=True)
    same(store, 1, 1)


def test_latest_ignores_undeleted_entries(store):
    store.delete(1)
    other_handle(store).undelete(1)
    assert store.latest().step == 3
    assert store.restore()["number"] == 3
    same(store, 3, 3)


def test_retention_keeps_undeleted_entries(store):
    other_handle(store).gc(LAST_ONE)
    other_handle(store).undelete("seq:2")
    report = other_handle(store).gc(LAST_ONE, now=True)
    check_restores(store, [2, 3])
    assert report.runs[0].verdicts[0].reasons == ("restored by undelete",)


def test_undelete_needs_no_lease(store, backend):
    store.commit(state_of(4), 4)
    store.delete(1)
    info = other_handle(store).undelete(1)
    receipt = store.commit(state_of(6), 6)
    assert receipt.seq == info.seq + 1
    check_restores(store, [0, 1, 2, 3, 4, 6])


@pytest.mark.parametrize("ref", [1, "1", "seq:1"])
def test_dropped_checkpoint_is_found_by_step_or_seq(store, ref):
    store.delete(1)
    assert other_handle(store).undelete(ref).step == 1


def test_dropped_checkpoint_is_found_by_id(store):
    prefix = store.info(1).checkpoint_id[:8]
    store.delete(1)
    assert other_handle(store).undelete(f"id:{prefix}").step == 1
    with pytest.raises(NotFoundError):
        other_handle(store).undelete("id:ffffffffffff")


def test_step_means_its_newest_dropped_entry(store):
    store.commit(state_of(9), 1)
    store.delete(1)
    assert other_handle(store).undelete(1).origin_id is not None
    same(store, 1, 9)


@pytest.mark.parametrize("ref", ["latest", "seq:x", "id:z", True, 1.5, "best:loss"])
def test_other_references_are_not_found_in_the_trash(store, ref):
    with pytest.raises(UsageError):
        other_handle(store).undelete(ref)


def test_undelete_of_existing_checkpoint_is_not_found(store):
    store.delete(2)
    with pytest.raises(NotFoundError, match=r"it has steps 2 \(seq:2\)|It has steps 2 \(seq:2\)"):
        other_handle(store).undelete(1)


def test_purged_checkpoint_cannot_be_undeleted(store):
    store.delete(1)
    other_handle(store).gc(now=True)
    with pytest.raises(NotFoundError, match="no checkpoint of this run"):
        other_handle(store).undelete(1)


def test_undelete_without_packs_fails(store, backend):
    store.delete(1)
    saved = {path: backend.files()[path] for path in files_of(backend) if path.startswith("trash/")}
    other_handle(store).gc(now=True)
    for path, content in saved.items():
        backend.make_folder(path.rsplit("/", 1)[0])
        backend.create(path, content, sync=True)
    with pytest.raises(MissingChunkError):
        other_handle(store).undelete(1)
    assert store.steps() == [0, 2, 3]


def test_pack_freed_after_publish_withdraws_undelete(store, backend, monkeypatch):
    other_handle(store).gc(LAST_ONE)
    parts = type(repository_of(store))
    rescue_packs = parts.rescue_packs

    def freed_first(self, packs):
        for path in [path for path in files_of(backend) if path.startswith("trash/") and path.endswith(".pack")]:
            backend.unlink(path)
        return rescue_packs(self, packs)

    monkeypatch.setattr(parts, "rescue_packs", freed_first)
    with pytest.raises(MissingChunkError, match="vanished meanwhile"):
        other_handle(store).undelete(1)
    assert store.steps() == [3]
    assert store.verify("decode").is_clean


def test_damaged_manifest_in_the_trash_is_not_published(store, backend):
    store.delete(1)
    damage(backend, next(path for path in files_of(backend) if path.startswith("trash/")))
    with pytest.raises(CorruptError):
        other_handle(store).undelete(1)


# The trash


def test_trash_lists_its_content(store):
    assert other_handle(store).trash() == []
    other_handle(store).gc(Retention(keep_last=2))
    entries = other_handle(store).trash()
    assert sum(entry.pack_count for entry in entries) == 1, "shared packs are still needed"
    assert [entry.manifests for entry in entries if entry.manifests] == [(("main", 0, 0, 0), ("main", 1, 1, 0))]
    assert all(entry.nbytes > 0 for entry in entries)


def test_restoring_a_trash_folder_restores_all_of_it(store, backend):
    before = packs_in_place(backend)
    other_handle(store).gc(Retention(keep_last=2))
    assert len(before - packs_in_place(backend)) == 1
    handle = other_handle(store)
    restored = [handle.restore_from_trash(entry.trash_id[:10]) for entry in handle.trash()]
    assert packs_in_place(backend) == before
    assert sorted(info.step for each in restored for info in each.undeleted) == [0, 1]
    check_restores(store, [0, 1, 2, 3])


def test_missing_or_invalid_trash_folder_is_refused(store):
    other_handle(store).gc(LAST_ONE)
    with pytest.raises(NotFoundError):
        other_handle(store).restore_from_trash("zz")
    with pytest.raises(NotFoundError):
        other_handle(store).restore_from_trash("")
    twin = other_handle(store).trash()[0].trash_id
    repository_of(store).backend.make_folder(paths.trash_folder(twin[:5] + "0" * 27))
    with pytest.raises(UsageError, match="more letters"):
        other_handle(store).purge(twin[:5])


def test_purge_frees_one_folder_or_all(store, backend):
    other_handle(store).gc(LAST_ONE)
    handle = other_handle(store)
    first, *others = handle.trash()
    assert handle.purge(first.trash_id) == first.nbytes
    assert handle.purge() == sum(entry.nbytes for entry in others)
    assert handle.trash() == []
    check_restores(store, [3])


def test_purge_rescues_referenced_packs(store, backend):
    path, gc_id = pack_of(store, 2), repository_of(store).trash.new_packs_folder()
    backend.rename(path, f"{paths.trash_packs_folder(gc_id)}/{path.rsplit('/')[-1]}")
    assert other_handle(store).purge() == 0
    assert path in packs_in_place(backend)


def test_purge_is_refused_with_unreadable_manifest(store, backend):
    store.delete(1)
    damage(backend, next(path for path in files_of(backend) if path.startswith("manifests/")))
    with pytest.raises(ConflictError, match="may name any pack"):
        other_handle(store).purge()
    assert len(other_handle(store).trash()) == 1


def trash_of(store, *names):
    """Move files to a new trash folder, as a power cut may leave them."""
    parts, gc_id = repository_of(store), repository_of(store).trash.new_packs_folder()
    for path in names:
        target = paths.trash_packs_folder(gc_id)
        if path.startswith("manifests/"):
            target = paths.trash_manifests_folder(gc_id, "main")
            parts.backend.make_folder(target)
        parts.backend.rename(path, f"{target}/{path.rsplit('/')[-1]}")
    return gc_id


def test_purge_of_one_folder_rescues_manifest_and_packs(store):
    name = repository_of(store).manifests.listing().names[1]
    gc_id = trash_of(store, pack_of(store, 1), name.path)
    assert other_handle(store).purge(gc_id) == 0
    check_restores(store, [0, 1, 2, 3])


def test_purge_of_one_folder_reads_the_others(store):
    """A higher generation in another folder supersedes the lower one in this folder. The higher one is restored."""
    lower = repository_of(store).manifests.listing().names[1]
    higher = repository_of(store).manifests.publish(next_generation(store, 1))
    trash_of(store, higher.path)
    gc_id = trash_of(store, lower.path)
    assert other_handle(store).purge(gc_id) > 0
    assert store.info(1).generation == 1
    check_restores(store, [0, 1, 2, 3])


# Leftovers of interrupted drops and replacements


def test_dropped_manifest_still_in_place_is_moved(store, backend):
    mark_dropped(repository_of(store), 1, 2)
    report = other_handle(store).gc()
    assert report.done.superseded == 2
    assert repository_of(store).manifests.listing().lower == ()
    assert report.done.moved_packs == 2


def test_superseded_generation_is_removed(store):
    repository_of(store).manifests.publish(next_generation(store, 1))
    report = other_handle(store).gc()
    assert (len(report.plan.superseded), report.done.superseded) == (1, 1)
    assert store.info(1).generation == 1


def test_superseded_generation_stays_without_newer_packs(store, backend):
    from dataclasses import replace

    manifest = next_generation(store, 1)
    elsewhere = replace(manifest.packs[-1], pack_id=bytes(16))
    repository_of(store).manifests.publish(replace(manifest, packs=(*manifest.packs[:-1], elsewhere)))
    report = other_handle(store).gc(LAST_ONE, now=True)
    assert "missing" in report.runs[0].blocked
    assert report.done.superseded == 0
    assert len(repository_of(store).manifests.listing().lower) == 1


def test_unsuperseded_manifest_in_trash_is_restored(store, backend):
    name = repository_of(store).manifests.listing().names[1]
    folder = paths.trash_manifests_folder("5" * 32, "main")
    backend.make_folder(folder)
    backend.rename(name.path, f"{folder}/{name.file}")
    assert store.steps() == [0, 2, 3]
    report = other_handle(store).gc(now=True)
    assert report.done.rescued == 1
    check_restores(store, [0, 1, 2, 3])


def test_superseded_manifest_in_trash_is_purged(store, backend):
    repository_of(store).manifests.publish(next_generation(store, 1))
    other_handle(store).gc()
    assert other_handle(store).gc(now=True).done.freed_files == 1
    check_restores(store, [0, 1, 2, 3])


def test_older_entries_of_a_step_are_dropped_first(store, backend, monkeypatch):
    store.commit(state_of(8), 1)
    store.commit(state_of(9), 1)
    manifests, batches = type(repository_of(store).manifests), []
    mark = manifests.mark_dropped

    def recorded_call(self, intents):
        batches.append(tuple(intents))
        mark(self, intents)

    monkeypatch.setattr(manifests, "mark_dropped", recorded_call)
    names = repository_of(store).manifests.listing().names
    done = drop(repository_of(store), [names[5], names[4], names[1], names[0]], "test")
    assert batches == [(0, 1), (4,), (5,)], "marks of one batch may reach the disk in any order"
    assert [name.seq for name in done.names] == [0, 1, 4, 5]
    assert repository_of(store).tags.intents_on(0) == []


def test_highest_generation_is_compared_as_a_number(store, monkeypatch):
    manifests = repository_of(store).manifests
    for generation in (2, 9, 10, 11):
        manifest = next_generation(store, 1)
        manifests.publish(replace(manifest, header=replace(manifest.header, generation=generation)))
    store.delete(1)
    (folder,) = [folder for folder in other_handle(store).trash() if folder.manifests]
    assert len(folder.manifests) == 5
    chosen, undelete = [], history.undelete

    def recorded_call(parts, trashed):
        chosen.append(trashed.name.generation)
        return undelete(parts, trashed)

    monkeypatch.setattr(history, "undelete", recorded_call)
    assert [info.step for info in other_handle(store).restore_from_trash(folder.trash_id).undeleted] == [1]
    assert chosen == [11]
