"""Protects rewriting of packs in a tier: unneeded space is freed, and no checkpoint is unavailable at any moment."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import BackendError, CkstoreError
from ckstore.format import paths
from ckstore.io.url import backend_for
from ckstore.ops.gc import rewrite_packs
from ckstore.store.listing import packs_in
from ckstore.store.pending_deletes import deletion_lists
from ckstore.tiers import gc
from ckstore.tiers import gc as tier_repack

STEPS = (1, 2, 3)


def state_of(seed, count=40_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "shared": np.arange(9_000), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])
        assert np.array_equal(store.restore(step)["shared"], np.arange(9_000))


def packs_at(place):
    return {pack_id.hex(): info.nbytes for pack_id, info in packs_in(backend_for(place))}


def manifests_at(place):
    return backend_for(place).list_names("manifests/main")


def packs_of(store, step):
    return {pack.pack_id for pack in store.contents(step).packs}


@pytest.fixture
def wasteful(folder, place):
    """A store whose first checkpoint was purged: of its pack in the tier only the shared chunk is needed."""
    with ckstore.open(folder) as store:
        for step in STEPS:
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        store.gc(now=True, min_age=0)
        store.delete(1)
        store.gc(now=True, min_age=0)
        yield store


def collect_all(store):
    """Collect in the tier, purge the local trash, and collect in the tier again."""
    first = store.gc_tier(min_age=0)
    store.gc(now=True, min_age=0)
    store.gc_tier(min_age=0)
    return first


def assert_tidy(store, place, *steps):
    """Nothing is left to do, locally or in the tier, and both stores are complete."""
    again = store.gc_tier(min_age=0)
    assert (again.packs, again.rewrites, again.renewed, again.superseded, again.stop) == ({}, [], 0, [], "")
    assert again.repacked.troubles == []
    assert_restores(store, *steps)
    assert store.verify("decode", remote=True).is_clean
    with ckstore.open(place) as there:
        assert there.steps() == sorted(steps)[: len(there.steps())]
        assert_restores(there, *there.steps())
        assert there.verify("decode").is_clean
    assert deletion_lists(backend_for(place)) == []


def test_pack_of_which_little_is_needed_is_rewritten(wasteful, place):
    before = packs_at(place)
    old = max(before, key=before.get)
    report = wasteful.gc_tier(min_age=0)
    assert [rewrite.pack_id.hex() for rewrite in report.rewrites] == [old]
    assert [pack_id.hex() for pack_id in report.repacked.pack_ids] == [old]
    # The checkpoint that names the pack has one local manifest and a copy of it in the tier.
    assert (report.repacked.manifests, report.renewed) == (1, 1)
    (new,) = packs_at(place).keys() - before.keys()
    assert packs_at(place)[new] == report.rewrites[0].packed_nbytes == report.repacked.nbytes_written
    assert packs_at(place)[new] < before[old] / 2
    assert new in packs_of(wasteful, 2)
    assert old not in packs_of(wasteful, 2)
    # The replaced manifest is in the local trash, and could be undeleted.
    assert old in packs_at(place)
    assert_restores(wasteful, 2, 3)
    wasteful.gc(now=True, min_age=0)
    last = wasteful.gc_tier(min_age=0)
    assert [pack_id.hex() for pack_id in last.packs] == [old]
    assert packs_at(place).keys() == (before.keys() | {new}) - {old}
    assert_tidy(wasteful, place, 2, 3)


def test_dry_run_reports_rewrites_and_changes_nothing(wasteful, place):
    packs, manifests = packs_at(place), manifests_at(place)
    planned = wasteful.gc_tier(min_age=0, dry_run=True)
    assert (packs_at(place), manifests_at(place)) == (packs, manifests)
    assert planned.repacked.pack_ids == []
    assert planned.rewritten_nbytes > planned.written_nbytes > 0
    assert wasteful.gc_tier(min_age=0).rewrites == planned.rewrites


def test_budget_and_waste_limit_are_respected(wasteful):
    assert wasteful.gc_tier(min_age=0, repack_nbytes_max=0).rewrites == []
    assert wasteful.gc_tier(min_age=0, repack_nbytes_max=10_000).rewrites == []
    assert wasteful.gc_tier(min_age=0, waste_max=0.99).rewrites == []
    assert len(wasteful.gc_tier(min_age=0, waste_max=0.5).rewrites) == 1


def test_undeletable_data_is_not_rewritten_away(folder, place):
    with ckstore.open(folder) as store:
        for step in STEPS:
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        store.gc(now=True, min_age=0)
        store.delete(1)
        assert store.gc_tier(min_age=0).rewrites == [], "it would free nothing"
        store.undelete("seq:0")
        assert_restores(store, *STEPS)


def test_runs_that_share_a_pack_are_all_updated(folder, place):
    with ckstore.open(folder) as store, ckstore.open(folder, run="other") as other:
        for step in STEPS:
            store.commit(state_of(step), step)
        other.commit(state_of(7), 7)
        store.push(place, keep_local=1)
        other.push(place, keep_local=0)
        store.delete(1)
        store.gc(now=True, min_age=0)
        report = collect_all(store)
        assert report.repacked.manifests == report.renewed == 2
        assert_tidy(store, place, 2, 3)
        assert_restores(other, 7)
        with ckstore.open(place, run="other") as there:
            assert_restores(there, 7)


def test_pull_and_push_work_after_rewriting(wasteful, place):
    collect_all(wasteful)
    wasteful.pull()
    wasteful.push(place, keep_local=0)
    collect_all(wasteful)
    assert_tidy(wasteful, place, 2, 3)


def test_lost_store_is_recovered_after_rewriting(wasteful, place, tmp_path):
    collect_all(wasteful)
    with ckstore.open(place) as there:
        there.mirror(str(tmp_path / "again"))
    with ckstore.open(tmp_path / "again") as again:
        assert_restores(again, 2)


# What prevents rewriting


def test_local_copy_of_pack_is_freed_first(folder, place):
    """Freeing a local pack requires the pack in the tier, because local manifests say that it is there."""
    with ckstore.open(folder) as store:
        for step in (1, 2):
            store.commit(state_of(step), step)
        store.commit({"w": state_of(3)["w"]}, 3)
        (old,) = packs_of(store, 1)
        store.delete(1)
        store.push(place, keep_local=1)
        # The purge removes what was dropped and what a push has replaced; the pack is still local.
        for trashed in repository_of(store).trash.contents():
            for manifest in trashed.manifests:
                repository_of(store).trash.unlink(manifest.path)
        assert old in packs_of(store, 2)
        assert repository_of(store).backend.stat(paths.pack_name(bytes.fromhex(old))) is not None
        assert store.gc_tier(min_age=0).rewrites == []
        backend_for(place).unlink(paths.pack_name(bytes.fromhex(old)))
        assert store.gc(now=True, min_age=0).unproven
        assert_restores(store, 2)


def test_checkpoint_with_missing_pack_is_not_retried(wasteful, place):
    shared = {pack.pack_id: pack.nbytes for pack in wasteful.contents(2).packs}
    (own,) = shared.keys() - {max(packs_at(place), key=packs_at(place).get)}
    backend_for(place).unlink(paths.pack_name(bytes.fromhex(own)))
    for _ in range(3):
        report = wasteful.gc_tier(min_age=0)
        assert (report.rewrites, report.repacked.nbytes_written) == ([], 0)
        wasteful.gc(now=True, min_age=0)


def test_store_with_older_generation_still_works(wasteful, place, folder):
    """Its newest manifest was damaged, and an earlier generation was restored: its number is taken in the tier."""
    (name,) = [each for each in repository_of(wasteful).manifests.listing().names if each.step == 2]
    earlier = folder / name.path, (folder / name.path).read_bytes()
    wasteful.gc_tier(min_age=0)
    wasteful.gc(now=True, min_age=0)
    for _ in range(2):
        (name,) = [each for each in repository_of(wasteful).manifests.listing().names if each.step == 2]
        (folder / name.path).unlink()
        earlier[0].write_bytes(earlier[1])
        wasteful.pull()
        wasteful.push(place, keep_local=0)
        wasteful.gc(now=True, min_age=0)
    collect_all(wasteful)
    collect_all(wasteful)
    assert_tidy(wasteful, place, 2, 3)


def test_pulled_checkpoint_prevents_rewriting(wasteful, place):
    """Their copies in the tier name the pack, but no local manifest does."""
    wasteful.pull()
    assert wasteful.gc_tier(min_age=0).rewrites == []
    wasteful.gc(now=True, min_age=0)
    assert wasteful.gc_tier(min_age=0).rewrites == []
    assert_tidy(wasteful, place, 2, 3)


def test_foreign_checkpoint_prevents_rewriting(wasteful, place):
    """A commit to the tier finds the shared chunk, and names its pack; the local store does not know that."""
    with ckstore.open(place) as there:
        there.commit(state_of(9), 9)
        (old,) = packs_of(there, 9) & packs_of(wasteful, 2)
    assert wasteful.gc_tier(min_age=0).rewrites == []
    collect_all(wasteful)
    assert old in packs_at(place)
    with ckstore.open(place) as there:
        assert_restores(there, 2, 9)


def test_foreign_claim_prevents_rewriting(wasteful, place):
    there = backend_for(place)
    (manifest,) = manifests_at(place)[-1:]
    claim = paths.claim_name("main", paths.parse_manifest_file("main", manifest).seq)
    there.unlink(claim)
    there.create(claim, b"", sync=True)
    assert wasteful.gc_tier(min_age=0).rewrites == []


# Concurrent changes


class _DiedError(Exception):
    pass


def test_next_collection_renews_remaining_copies(wasteful, place, monkeypatch):
    def dies(*given):
        raise _DiedError

    with monkeypatch.context() as patch:
        patch.setattr(gc, "renew_copies", dies)
        with pytest.raises(_DiedError):
            wasteful.gc_tier(min_age=0)
    assert_restores(wasteful, 2, 3)
    with ckstore.open(place) as there:
        assert_restores(there, 2)
    wasteful.gc(now=True, min_age=0)
    report = wasteful.gc_tier(min_age=0)
    # The copies in the tier name the old pack until they are renewed, so that it was not removed.
    assert (report.packs, report.rewrites, report.renewed) == ({}, [], 1)
    assert_restores(wasteful, 2, 3)
    assert list(wasteful.gc_tier(min_age=0).packs) != []
    assert_tidy(wasteful, place, 2, 3)


def test_death_before_replacement_leaves_only_garbage(wasteful, place, monkeypatch):
    def dies(*given):
        raise _DiedError

    before = packs_at(place)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite_packs, "_replace", dies)
        with pytest.raises(_DiedError):
            wasteful.gc_tier(min_age=0)
    assert len(packs_at(place)) == len(before) + 1
    assert_restores(wasteful, 2, 3)
    report = wasteful.gc_tier(min_age=0)
    assert len(report.packs) == len(report.rewrites) == 1
    collect_all(wasteful)
    assert_tidy(wasteful, place, 2, 3)


def test_checkpoint_dropped_in_rewrite_stays_dropped(wasteful, place, folder, monkeypatch):
    copy = rewrite_packs._copy

    def drops_meanwhile(*given):
        copied = copy(*given)
        with ckstore.open(folder) as other:
            other.delete(2)
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(rewrite_packs, "_copy", drops_meanwhile)
        wasteful.gc_tier(min_age=0)
    assert wasteful.steps() == [3]
    collect_all(wasteful)
    collect_all(wasteful)
    assert packs_at(place) == {}
    assert manifests_at(place) == []
    assert_restores(wasteful, 3)


def test_concurrent_pull_is_not_undone(wasteful, place, folder, monkeypatch):
    renew = gc.renew_copies

    def pulls_meanwhile(*given):
        with ckstore.open(folder) as other:
            other.pull()
        return renew(*given)

    with monkeypatch.context() as patch:
        patch.setattr(gc, "renew_copies", pulls_meanwhile)
        assert wasteful.gc_tier(min_age=0).renewed == 0
    assert packs_of(wasteful, 2) & packs_at(place).keys()
    collect_all(wasteful)
    assert_restores(wasteful, 2, 3)
    wasteful.push(place, keep_local=0)
    collect_all(wasteful)
    assert_tidy(wasteful, place, 2, 3)


def test_damaged_pack_is_reported_and_not_rewritten(wasteful, place):
    there = backend_for(place)
    old = max(packs_at(place), key=packs_at(place).get)
    name = paths.pack_name(bytes.fromhex(old))
    content = bytearray(there.read_bytes(name, nbytes_max=1 << 30))
    content[4096:-8192:64] = bytes(len(content[4096:-8192:64]))
    there.unlink(name)
    there.create(name, bytes(content), sync=True)
    before = packs_at(place)
    report = wasteful.gc_tier(min_age=0)
    assert report.repacked.pack_ids == []
    assert [old in trouble and "was not rewritten" in trouble for trouble in report.repacked.troubles] == [True]
    assert packs_at(place) == before


def test_foreign_manifest_name_is_reported(wasteful, place):
    there = backend_for(place)
    name = paths.parse_manifest_file("main", manifests_at(place)[-1])
    generation = name.generation + 1
    taken = paths.ManifestName("main", name.seq, name.step, generation)
    content = there.read_bytes(name.path, nbytes_max=1 << 30)
    put = tier_repack.StoreCopy.put_manifest

    def is_late(self, manifest):
        if manifest.header.generation == generation:
            there.create(taken.path, content, sync=True)
        put(self, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_repack.StoreCopy, "put_manifest", is_late)
        report = wasteful.gc_tier(min_age=0)
    assert report.renewed == 0
    assert "was not renewed" in report.repacked.troubles[0]
    assert_restores(wasteful, 2, 3)


def test_silent_tier_loses_nothing(wasteful, place, monkeypatch):
    def fails(*given, **named):
        raise BackendError("no answer", is_transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(rewrite_packs, "finish_replacement", fails)
        with pytest.raises(BackendError):
            wasteful.gc_tier(min_age=0)
    assert_restores(wasteful, 2, 3)
    collect_all(wasteful)
    collect_all(wasteful)
    assert_tidy(wasteful, place, 2, 3)


def test_rewriting_works_during_restores(wasteful, monkeypatch):
    copy = rewrite_packs._copy

    def restores_meanwhile(*given):
        assert_restores(wasteful, 2, 3)
        copied = copy(*given)
        assert_restores(wasteful, 2, 3)
        return copied

    monkeypatch.setattr(rewrite_packs, "_copy", restores_meanwhile)
    assert len(wasteful.gc_tier(min_age=0).repacked.pack_ids) == 1


def test_full_disk_of_tier_is_reported(wasteful, monkeypatch):
    def is_full(*given):
        raise ckstore.errors.CapacityError("the disk is full")

    monkeypatch.setattr(rewrite_packs, "_copy", is_full)
    report = wasteful.gc_tier(min_age=0)
    assert "rewriting packs stopped" in report.repacked.troubles[0]
    assert issubclass(ckstore.errors.CapacityError, CkstoreError)
    assert_restores(wasteful, 2, 3)
