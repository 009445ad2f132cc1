"""Protects the way to free a full disk: a push, then an ordinary collection, loses nothing."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.io.url import backend_for
from support.push_states import assert_restores, state_of


def filled(folder, count):
    store = ckstore.open(folder)
    for step in range(1, count + 1):
        store.commit(state_of(step), step)
    return store


def packs_in(folder):
    return {file.stem for file in folder.glob("packs/*/*.pack")}


def test_collection_frees_only_pushed_packs(folder, address):
    with filled(folder, 4) as store:
        before = packs_in(folder)
        assert store.gc(now=True).freed_nbytes == 0
        store.push(address, keep_local=1)
        report = store.gc(now=True)
        assert report.freed_nbytes > 3 * 200_000
        assert len(before) - len(packs_in(folder)) == 3
        assert_restores(store, 1, 2, 3, 4)
        store.pull(2)
        assert store.gc(now=True).dropped_count == 0
        assert_restores(store, 1, 2, 3, 4)


def test_a_tier_may_be_a_path(folder, tmp_path):
    with filled(folder, 2) as store:
        assert store.push(tmp_path / "attic", keep_local=1).address == str(tmp_path / "attic")
        assert store.mirror(tmp_path / "mirror").runs[0].copied_count == 2


def test_collection_keeps_packs_if_bucket_is_empty(folder, address, monkeypatch):
    """A push was killed after it had published, and then the bucket was emptied."""
    from ckstore.tiers import push

    with filled(folder, 2) as store:
        monkeypatch.setattr(push, "finish_replacement", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.push(address, keep_local=1)
        there = backend_for(address)
        for pack in store.contents(1).packs:
            there.unlink(f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack")
        store.gc(now=True)
        assert_restores(store, 1, 2)


def test_dropped_checkpoint_of_tier_is_gone(folder, address):
    with filled(folder, 3) as store:
        store.push(address, keep_local=1)
        store.delete(1)
        store.gc(now=True)
        assert store.steps() == [2, 3]
        assert_restores(store, 2, 3)
