"""Protects collections in a tier: what was dropped for good goes there too, and never what anybody still needs."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError
from ckstore.format import layout
from ckstore.ids import new_token
from ckstore.io.address import backend_for
from ckstore.store import tier_gc
from ckstore.store.tiers import LIST_FILE, lists_in


def state_of(seed, count=40_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "shared": np.arange(9_000), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])
        assert np.array_equal(store.restore(step)["shared"], np.arange(9_000))


@pytest.fixture(params=["bucket", "folder"])
def place(request, tmp_path, address):
    return address if request.param == "bucket" else str(tmp_path / "attic")


@pytest.fixture
def pushed(folder, place):
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        store.gc(now=True)
        yield store


def packs_at(place):
    there = backend_for(place)
    return {file for folder in layout.pack_folders() for file in there.list_names(folder)}


def manifests_at(place):
    return backend_for(place).list_names("manifests/main")


def test_dropped_checkpoint_goes_when_the_trash_has_it_no_more(pushed, place):
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
    assert lists_in(backend_for(place)) == []
    assert_restores(pushed, 1, 3)
    with ckstore.open(place) as there:
        assert there.steps() == [1]
        assert there.verify("decode").is_clean


def test_pack_that_others_share_stays(pushed, place):
    pushed.delete(1)
    pushed.gc(now=True)
    pushed.gc_tier(min_age=0)
    # The chunk that all share lies in the pack of the first.
    assert len(packs_at(place)) == 2
    assert_restores(pushed, 2, 3)


def test_young_packs_and_packs_of_others_in_the_trash_stay(pushed, place):
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


def test_lower_generation_goes_when_the_higher_one_is_whole(pushed, place):
    pushed.pull()
    pushed.push(keep_local=1)
    assert len(manifests_at(place)) == 4
    report = pushed.gc_tier(min_age=0)
    assert len(report.superseded) == 2
    assert report.packs == {}
    assert len(manifests_at(place)) == 2
    pushed.gc(now=True)
    assert_restores(pushed, 1, 2, 3)


def test_manifest_that_cannot_be_read_stops_the_removal_of_packs(pushed, place):
    pushed.delete(2)
    pushed.gc(now=True)
    there = backend_for(place)
    name = f"manifests/main/{layout.ManifestName('main', 7, 7, 0).file}"
    there.create(name, b"torn", sync=True)
    report = pushed.gc_tier(min_age=0)
    assert report.stop
    assert report.packs == {}
    assert len(packs_at(place)) == 2
    there.unlink(name)
    assert len(pushed.gc_tier(min_age=0).packs) == 1


def test_push_sees_what_a_collector_is_about_to_remove(folder, place):
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
        pack_ids = [pack.pack_id for pack in store.contents(1).packs]
        there = backend_for(place)
        store.push(place, keep_local=1, dry_run=True)
        if not isinstance(there, type(backend_for(str(folder)))):
            there.create(f"trash/{new_token()}/{LIST_FILE}", pack_ids[0].encode(), sync=True)
            with pytest.raises(ConflictError):
                store.push(place, keep_local=0)
            assert {pack.tier for pack in store.contents(1).packs} == {"local"}
            assert_restores(store, 1)


def test_collector_sees_a_manifest_that_was_published_after_its_plan(pushed, place, monkeypatch):
    """A push of the same packs comes between the list and the last look."""
    pushed.delete(2)
    pushed.gc(now=True)
    there = backend_for(place)
    kept = next(file for file in manifests_at(place) if "-000000000002." in file)
    content = there.read_bytes(f"manifests/main/{kept}", nbytes_max=1 << 30)
    put_small = tier_gc.put_small

    def publishes_again(backend, name, written):
        put_small(backend, name, written)
        if name.endswith(LIST_FILE):
            there.create(f"manifests/main/{kept}", content, sync=True)

    monkeypatch.setattr(tier_gc, "put_small", publishes_again)
    report = pushed.gc_tier(min_age=0)
    assert report.packs == {}
    assert len(packs_at(place)) == 2
