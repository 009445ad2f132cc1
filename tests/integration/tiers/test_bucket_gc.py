"""Protects collections of a store in a bucket: rules apply, needed data stays, races lose nothing."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run
from ckstore.errors import CkstoreError, ConflictError, UsageError
from ckstore.format import paths
from ckstore.io.url import backend_for
from ckstore.opening import open_existing
from ckstore.ops.gc import collect
from ckstore.store import pending_deletes
from ckstore.store.pending_deletes import deletion_lists

LAST_ONE = ckstore.Retention(keep_last=1)


def state_of(seed, count=40_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "shared": np.arange(9_000), "step": seed}


def assert_restores(store, *steps):
    assert store.steps() == list(steps)
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])
        assert np.array_equal(store.restore(step)["shared"], np.arange(9_000))


@pytest.fixture
def store(address):
    """Three checkpoints in a bucket."""
    with ckstore.open(address) as opened:
        for step in (1, 2, 3):
            opened.commit(state_of(step), step)
        yield opened


def packs_at(address):
    return {name.rpartition("/")[2] for name, _ in backend_for(address).list_deep("packs")}


def test_rules_drop_checkpoints_and_purge_frees_packs(store, address):
    planned = store.gc(LAST_ONE, dry_run=True)
    report = store.gc(LAST_ONE)
    assert planned.plan.drops == report.plan.drops
    assert [name.step for name in report.done.dropped] == [1, 2]
    assert (report.freed_nbytes, len(packs_at(address))) == (0, 3)
    assert report.later_nbytes == planned.later_nbytes > 100_000
    assert_restores(store, 3)
    with open_existing(address) as collecting:
        assert collecting.undelete(1).is_archival
    assert_restores(store, 1, 3)
    freed = store.gc(now=True)
    # The pack of the first checkpoint holds the shared chunks.
    assert (len(packs_at(address)), freed.freed_nbytes > 100_000) == (2, True)
    assert freed.plan.is_final
    assert deletion_lists(backend_for(address)) == []
    assert_restores(store, 1, 3)
    assert store.verify("decode").is_clean
    store.commit(state_of(4), 4)
    assert_restores(store, 1, 3, 4)


def test_trash_of_a_bucket_has_an_age(store, address):
    store.delete(2)
    assert store.gc(trash_for="1h").plan.waiting_nbytes > 0
    assert len(packs_at(address)) == 3
    assert store.gc(trash_for=0).freed_nbytes > 100_000
    assert len(packs_at(address)) == 2
    assert_restores(store, 1, 3)


def test_young_garbage_is_kept(store, address):
    backend_for(address).create(paths.pack_name(bytes(16)), b"of a writer that is at work", sync=True)
    report = store.gc(now=True)
    assert (report.plan.moves, report.plan.young_nbytes) == ((), 27)
    assert store.gc(now=True, min_age=0).freed_nbytes == 27
    assert_restores(store, 1, 2, 3)


def test_purge_frees_what_was_dropped(store, address):
    store.delete(2)
    store.delete(3)
    with open_existing(address) as collecting:
        entries = collecting.trash()
        assert [len(entry.manifests) for entry in entries] == [1, 1]
        collecting.purge(entries[0].trash_id)
        collecting.purge(entries[1].trash_id)
        assert collecting.trash() == []
    store.gc(min_age=0)
    assert len(packs_at(address)) == 1
    assert_restores(store, 1)


def state_with_little_of_its_own(seed):
    return {"w": state_of(seed)["w"], "shared": np.random.default_rng(0).standard_normal(30_000), "step": seed}


@pytest.fixture
def wasteful(address):
    """A bucket with one pack: two thirds are needed by other checkpoints, a third is garbage."""
    with ckstore.open(address, policy=ckstore.Policy(compression="none")) as opened:
        for step in (1, 2, 3):
            opened.commit(state_with_little_of_its_own(step), step)
        opened.delete(1)
        yield opened


def assert_is_whole(store, *steps):
    assert store.steps() == list(steps)
    for step in steps:
        got, wanted = store.restore(step), state_with_little_of_its_own(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])
    assert store.verify("decode").is_clean


def nbytes_at(address):
    return sum(info.nbytes for _, info in backend_for(address).list_deep("packs"))


def test_wasteful_pack_is_rewritten(wasteful, address):
    before = nbytes_at(address)
    planned = wasteful.gc(now=True, min_age=0, dry_run=True)
    report = wasteful.gc(now=True, min_age=0)
    assert [each.pack_id for each in planned.plan.rewrites] == report.done.repacked.pack_ids
    assert report.done.repacked.manifests == 2
    assert report.done.repacked.troubles == []
    assert before - nbytes_at(address) == pytest.approx(160_000, abs=20_000)
    # The replaced manifests are included.
    assert 0 < report.freed_nbytes - planned.freed_nbytes < 10_000
    assert len(packs_at(address)) == 3
    assert deletion_lists(backend_for(address)) == []
    assert_is_whole(wasteful, 2, 3)
    assert wasteful.gc(now=True, min_age=0).plan.is_empty
    wasteful.commit(state_with_little_of_its_own(4), 4)
    assert_is_whole(wasteful, 2, 3, 4)


def test_rewritten_pack_is_freed_with_its_manifests(wasteful, address):
    assert wasteful.gc(min_age=0, dry_run=True).plan.rewrites == (), "what was dropped can still be brought back"
    wasteful.gc(now=True, min_age=0, repack_nbytes_max=0)
    before = packs_at(address)
    planned = wasteful.gc(min_age=0, dry_run=True)
    report = wasteful.gc(min_age=0)
    assert report.done.repacked.manifests == 2
    assert (report.freed_nbytes, planned.freed_nbytes) == (0, 0)
    assert report.later_nbytes >= planned.plan.rewritten_nbytes > 300_000
    assert before < packs_at(address)
    assert_is_whole(wasteful, 2, 3)
    assert wasteful.gc(now=True, min_age=0).freed_nbytes > 300_000
    assert len(packs_at(address)) == len(before)
    assert_is_whole(wasteful, 2, 3)


def test_rewriting_budget_applies_in_a_bucket(wasteful, address):
    before = packs_at(address)
    assert wasteful.gc(now=True, min_age=0, repack_nbytes_max=0).plan.rewrites == ()
    assert packs_at(address) == before
    assert wasteful.gc(now=True, min_age=0, waste_max=0.9).plan.rewrites == ()


def test_rewriting_withdraws_for_another_collector(wasteful, address, monkeypatch, quiet_log):
    """Another collector has the new pack in its list, as garbage, so the replacement is withdrawn."""
    create_pack, listed = repository_of(wasteful).backend.create_pack, []

    def lists_it(name, **expected):
        packs = {bytes.fromhex(name.rpartition("/")[2].removesuffix(".pack")): 1}
        listed.append(pending_deletes._write_list(backend_for(address), repository_of(wasteful).clock, packs))
        return create_pack(name, **expected)

    monkeypatch.setattr(repository_of(wasteful).backend, "create_pack", lists_it)
    report = wasteful.gc(now=True, min_age=0)
    assert len(listed) == 1
    assert report.done.repacked.manifests == 0
    assert len(report.done.repacked.troubles) == 2
    assert_is_whole(wasteful, 2, 3)
    pending_deletes._LISTS_IN_USE.clear()
    backend_for(address).unlink(listed[0])
    monkeypatch.undo()
    assert wasteful.gc(now=True, min_age=0).done.repacked.manifests == 2
    assert_is_whole(wasteful, 2, 3)


def test_damaged_pack_is_not_rewritten_and_stays(wasteful, address, quiet_log):
    there = backend_for(address)
    wasteful.gc(now=True, min_age=0, repack_nbytes_max=0)
    (rewrite,) = wasteful.gc(now=True, min_age=0, dry_run=True).plan.rewrites
    name = paths.pack_name(rewrite.pack_id)
    content = bytearray(there.read_bytes(name, nbytes_max=1 << 30))
    sound = bytes(content)
    for offset in range(5000, len(content) - 9000, 1000):
        content[offset] ^= 1
    there.unlink(name)
    there.create(name, bytes(content), sync=True)
    report = wasteful.gc(now=True, min_age=0)
    assert report.done.repacked.pack_ids == []
    assert "was not rewritten" in report.done.repacked.troubles[0]
    there.unlink(name)
    there.create(name, sound, sync=True)
    assert_is_whole(wasteful, 2, 3)


def test_command_collects_a_bucket(store, address, capsys):
    assert run(["gc", address, "--keep-last", "1", "--now", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [name["step"] for name in done["done"]["dropped"]] == [1, 2]
    assert done["freed_nbytes"] > 100_000
    assert run(["gc", address, "--dry-run"]) == 0
    assert "Nothing to do" in capsys.readouterr().out


def test_handle_collects_a_bucket_every_n_commits(address, caplog):
    with ckstore.open(address, retention={"keep_last": 1}, gc_every=2) as store:
        for step in (1, 2):
            store.commit({"w": np.arange(1000) + step}, step)
        deadline = time.monotonic() + 240
        while store.steps() != [2] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.steps() == [2]
    assert "the collection after a commit" not in caplog.text


def test_tier_of_another_store_is_refused(folder, address):
    with ckstore.open(folder) as home:
        for step in (1, 2):
            home.commit(state_of(step), step)
        home.push(address, keep_local=1)
    with ckstore.open(address) as there:
        assert "another store" in there.gc(LAST_ONE, dry_run=True).refused
        with pytest.raises(UsageError, match="Open the store without retention"):
            ckstore.open(address, retention=LAST_ONE)
        with pytest.raises(UsageError, match="only that store knows"):
            there.gc(LAST_ONE, now=True, min_age=0)
        assert_restores(there, 1)


def test_collection_continues_during_commits(store, address, monkeypatch):
    """A commit between the plan and the last check is seen, and its packs stay."""
    write_list = pending_deletes._write_list

    def commits_meanwhile(*arguments):
        path = write_list(*arguments)
        with ckstore.open(address, run="other") as other:
            other.commit(state_of(2), 2)
        return path

    store.delete(2)
    monkeypatch.setattr(pending_deletes, "_write_list", commits_meanwhile)
    store.gc(now=True, min_age=0)
    with ckstore.open(address, run="other") as other:
        assert_restores(other, 2)
    assert_restores(store, 1, 3)


# One of the two sees the other


def test_publish_before_check_keeps_pack(store, address, monkeypatch):
    """An undelete publishes after the list was written: the collector sees that the pack is named."""
    store.delete(2)
    with open_existing(address) as collecting:
        (entry,) = collecting.trash()
    manifest = repository_of(store).trash.read_folder(entry.trash_id).manifests[0]
    content = repository_of(store).backend.read_bytes(manifest.path, nbytes_max=1 << 30)
    named, published = collect._BucketCollector._named, []

    def republished(self, planned):
        assert planned, "the pack was about to go"
        name = paths.ManifestName("main", 1, 2, 0)
        repository_of(store).backend.create(name.path, content, sync=True)
        published.append(name)
        return named(self, planned)

    monkeypatch.setattr(collect._BucketCollector, "_named", republished)
    assert store.gc(now=True, min_age=0).freed_nbytes < 100_000
    assert len(packs_at(address)) == 3
    assert published


def test_publish_after_check_is_withdrawn(store, address, monkeypatch, quiet_log):
    """An undelete publishes between the collector's check and its removal: it sees the list, and withdraws."""
    store.delete(2)
    with open_existing(address) as collecting:
        (entry,) = collecting.trash()
        kept = repository_of(store).trash.read_folder(entry.trash_id).manifests[0]
    content = repository_of(store).backend.read_bytes(kept.path, nbytes_max=1 << 30)
    remove, refused = pending_deletes._remove, []

    def undeletes_first(backend, clock, packs):
        there = backend_for(address)
        there.create(kept.path, content, sync=True)
        with open_existing(address) as collecting, pytest.raises(CkstoreError) as caught:
            collecting.undelete(2)
        refused.append(caught.value)
        there.unlink(kept.path)
        return remove(backend, clock, packs)

    monkeypatch.setattr(pending_deletes, "_remove", undeletes_first)
    store.gc(now=True, min_age=0)
    assert len(refused) == 1
    assert len(packs_at(address)) == 2
    assert_restores(store, 1, 3)
    assert store.verify("decode").is_clean


def test_commit_rewrites_packs_listed_for_removal(address, quiet_log):
    with ckstore.open(address) as store:
        store.commit(state_of(1), 1)
        packs = {bytes.fromhex(pack.pack_id): 1 for pack in store.contents(1).packs}
        path = pending_deletes._write_list(backend_for(address), repository_of(store).clock, packs)
        store.commit(state_of(1) | {"step": 2}, 2)
        assert packs.keys().isdisjoint(bytes.fromhex(pack.pack_id) for pack in store.contents(2).packs)
        pending_deletes._LISTS_IN_USE.discard(path)
        with pytest.raises(ConflictError):
            store.rewind(1)
        backend_for(address).unlink(path)
        store.rewind(1)
        assert store.verify("decode").is_clean
