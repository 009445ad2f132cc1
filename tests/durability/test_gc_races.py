"""Protects manifests that are published between two steps of a collection: one test for each order."""

from __future__ import annotations

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import NotFoundError
from ckstore.format.manifest import republished
from ckstore.io.memory import MemoryBackend
from ckstore.store import history
from ckstore.store.reachability import Marker
from ckstore.store.trash import Trash
from support.drop_marks import mark_dropped
from support.gc_histories import (
    HOUR,
    LAST_ONE,
    check_restores,
    commit_all,
    once,
    other_handle,
    pack_of,
    packs_in_place,
    state_of,
)
from support.model import difference


@pytest.fixture
def backend(clock):
    return MemoryBackend(clock=clock)


@pytest.fixture
def store(backend, clock):
    with ckstore.open(backend, clock=clock) as opened:
        commit_all(opened, [0, 1, 2])
        clock.now += 2 * HOUR
        yield opened


def republish(store, manifest):
    """Publish an entry that names packs which no other manifest names, as a writer does that knew them before."""
    manifests = repository_of(store).manifests
    seq = manifests.claim(manifests.listing().claimed_max + 1)
    again = republished(manifest, seq=seq, time_ns=repository_of(store).clock.now_ns(), is_archival=False)
    manifests.publish(again)
    return again


def same(store, ref, number):
    found = difference(store.restore(ref), state_of(number))
    assert found is None, found


@pytest.fixture
def dropped(store):
    """The manifest of step 1, which is dropped: its own pack is garbage now."""
    manifest = repository_of(store).manifests.load(repository_of(store).manifests.listing().names[1])
    store.delete(1)
    return manifest


def test_publish_before_move_keeps_pack(store, backend, dropped, monkeypatch):
    looks = []
    look = Marker.mark

    def publish_at_the_second(marker):
        looks.append(1)
        if len(looks) == 3:
            republish(store, dropped)
        return look(marker)

    monkeypatch.setattr(Marker, "mark", publish_at_the_second)
    report = other_handle(store).gc(now=True)
    assert report.done.moved_packs == 0, "the second look before the move has seen it"
    assert len(report.plan.moves) == 1
    same(store, 1, 1)


def test_publish_after_move_gets_pack_back(store, backend, dropped, monkeypatch):
    once(monkeypatch, Trash, "move_packs", before=lambda: republish(store, dropped))
    report = other_handle(store).gc(now=True)
    assert (report.done.moved_packs, report.done.rescued) == (1, 1)
    same(store, 1, 1)
    assert store.verify("decode").is_clean


def test_publish_after_last_check_rescues_pack(store, backend, dropped, monkeypatch):
    """A writer verifies its packs after publishing, and moves them back from the trash before they are purged."""
    published = []

    def publish_and_verify():
        published.append(republish(store, dropped))
        assert repository_of(store).rescue_packs(published[0].packs) == set()

    once(monkeypatch, Trash, "unlink", before=publish_and_verify)
    report = other_handle(store).gc(now=True)
    assert published
    assert report.done.freed_files <= 1, "a manifest in the trash at most"
    same(store, 1, 1)


def test_publish_after_purge_reports_lost_pack(store, backend, dropped):
    other_handle(store).gc(now=True)
    again = republish(store, dropped)
    assert repository_of(store).rescue_packs(again.packs), "then it withdraws, and nothing was acknowledged"


def test_commit_rewrites_collected_packs(store, backend, monkeypatch):
    """The unpublished packs of a writer that was stopped for long look like garbage to a collector."""
    manifests = type(repository_of(store).manifests)
    once(monkeypatch, manifests, "publish", before=lambda: other_handle(store).gc(now=True, min_age=0))
    receipt = store.commit(state_of(7), 7)
    same(store, 7, 7)
    assert receipt.seq == 4, "what was published first is withdrawn, and its seq never given again"
    assert store.verify("decode").is_clean


def test_commit_rescues_packs_from_trash(store, backend, monkeypatch):
    manifests = type(repository_of(store).manifests)
    once(monkeypatch, manifests, "publish", before=lambda: other_handle(store).gc(min_age=0))
    assert store.commit(state_of(7), 7).seq == 3
    same(store, 7, 7)
    assert store.verify("decode").is_clean


def test_reader_with_open_packs_survives_purge(folder):
    with ckstore.open(folder) as store:
        commit_all(store, [0, 1])
        file = repository_of(store).backend.open_read(pack_of(store, 0))
        size = file.nbytes
        other_handle(store).gc(LAST_ONE, now=True, repack_nbytes_max=1 << 30)
        assert file.read_at(0, 8) == b"CKPACK\x00\x01"
        assert file.nbytes == size
        file.close()


def test_interleaved_collections_lose_nothing(store, backend, monkeypatch):
    once(monkeypatch, Trash, "move_packs", before=lambda: other_handle(store).gc(LAST_ONE, now=True))
    report = other_handle(store).gc(LAST_ONE, now=True)
    assert report.done.moved_packs == 0, "the other one was faster"
    check_restores(store, [2])
    assert other_handle(store).gc(LAST_ONE, now=True).plan.is_empty


def test_next_collection_completes_killed_purge(store, backend, monkeypatch):
    class Killed(BaseException):
        pass

    def die():
        raise Killed

    once(monkeypatch, Trash, "move_packs", after=die)
    with pytest.raises(Killed):
        other_handle(store).gc(LAST_ONE, now=True)
    packs = packs_in_place(backend)
    report = other_handle(store).gc(now=True)
    assert report.done.freed_files >= 1
    assert packs_in_place(backend) == packs
    check_restores(store, [2])


def test_run_created_during_listing_is_seen(store, backend, clock, monkeypatch):
    once(monkeypatch, type(repository_of(store)), "runs", before=None, after=lambda: begin(backend, clock))
    look = Marker(repository_of(store)).mark()
    assert "late" in look.dropped
    assert any(name.run == "late" for name in look.manifests)


def begin(backend, clock):
    with ckstore.open(backend, run="late", clock=clock) as late:
        commit_all(late, [5])


def test_vanished_manifest_is_listed_again(store, backend, monkeypatch):
    from dataclasses import replace

    manifest = repository_of(store).manifests.load(repository_of(store).manifests.listing().names[1])
    following = replace(manifest, header=replace(manifest.header, generation=1))

    def replace_it():
        name = repository_of(store).manifests.publish(following)
        repository_of(store).manifests.move_lower_to_trash(name)

    once(monkeypatch, Marker, "_add", before=replace_it)
    look = Marker(repository_of(store)).mark()
    assert sorted((name.seq, name.generation) for name in look.manifests) == [(0, 0), (1, 1), (2, 0)]


def test_changed_manifest_under_same_name_is_reread(store, backend):
    """A withdrawn generation frees its name for another replacement, which has other packs."""
    from dataclasses import replace

    manifest = repository_of(store).manifests.load(repository_of(store).manifests.listing().names[1])
    other_pack = replace(manifest.packs[-1], pack_id=bytes(range(16)))
    one = replace(manifest, header=replace(manifest.header, generation=1))
    other = replace(one, packs=(*one.packs[:-1], other_pack))
    name = repository_of(store).manifests.publish(one)
    marker = Marker(repository_of(store))
    assert bytes(range(16)) not in marker.mark().named
    repository_of(store).manifests.withdraw(name)
    repository_of(store).manifests.publish(other)
    assert bytes(range(16)) in marker.mark().named


def test_gc_drops_nothing_if_newest_loses_its_pack(store, backend, monkeypatch):
    """A manifest whose pack is in the trash counts as whole, because the pack is moved back; here it is freed first."""
    path, gc_id = pack_of(store, 2), repository_of(store).trash.new_packs_folder()
    trashed = f"trash/{gc_id}/packs/{path.rsplit('/')[-1]}"
    backend.rename(path, trashed)
    once(monkeypatch, Trash, "rescue_pack", before=lambda: backend.unlink(trashed))
    report = other_handle(store).gc(LAST_ONE)
    assert [name.step for name in report.plan.drops] == [0, 1]
    assert report.done.dropped == []
    assert all("was freed" in why for why in report.done.spared.values())
    same(store, 1, 1)


def test_delete_survives_purge_of_its_trash(disk_store, monkeypatch):
    """A collector frees the trash folder with the files moved so far; the rest goes to a new folder."""
    commit_all(disk_store, [1, 2])
    parts, taken = repository_of(disk_store), []
    rename = parts.backend.rename

    def freed_after_the_first(source, target):
        if taken:
            rename(source, target)
            return
        rename(source, target)
        taken.append(target)
        parts.backend.unlink(target)
        assert parts.trash.remove_if_empty(target.split("/")[1])

    mark_dropped(parts, 0, 1)
    with monkeypatch.context() as patches:
        patches.setattr(parts.backend, "rename", freed_after_the_first)
        assert parts.manifests.move_to_trash(frozenset({0, 1})) == 2
    assert len(taken) == 1
    assert disk_store.steps() == []


def test_delete_reports_concurrently_dropped(store, monkeypatch):
    """Found by a stress test: the collector runs between finding the checkpoint and listing its step."""
    resolve = history.resolve

    def dropped_meanwhile(parts, reference):
        name = resolve(parts, reference)
        other_handle(store).gc(LAST_ONE)
        return name

    monkeypatch.setattr(history, "resolve", dropped_meanwhile)
    with pytest.raises(NotFoundError, match="deleted meanwhile"):
        store.delete(0)
    check_restores(store, [2])
