"""Protects checkpoints that are pushed and pulled: nothing is freed locally before it was verified in the tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, MissingChunkError, UnreachableError, UsageError
from ckstore.format import manifest, zstd
from ckstore.io.local import LocalBackend
from ckstore.io.url import backend_for
from support.push_states import free_local_packs

SECONDS_A_DAY = 86_400


def state_of(seed, count=100_000):
    source = np.random.default_rng(seed)
    return {"model": {"w": source.standard_normal(count).astype(np.float32), "b": np.arange(7) + seed}, "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["model"]["w"], wanted["model"]["w"])
        assert np.array_equal(got["model"]["b"], wanted["model"]["b"])


def filled(folder, count, clock=None):
    store = ckstore.open(folder, **({} if clock is None else {"clock": clock}))
    for step in range(1, count + 1):
        store.commit(state_of(step), step)
        if clock is not None:
            clock.now += SECONDS_A_DAY
    return store


def tiers_of(store, step):
    return {pack.tier for pack in store.contents(step).packs}


def test_pushed_checkpoints_are_listed_and_restored(folder, address):
    with filled(folder, 4) as store:
        report = store.push(address, keep_local=1)
        assert [(entry.step, entry.action, entry.is_done) for entry in report.entries] == [
            (1, "push", True),
            (2, "push", True),
            (3, "push", True),
            (4, "keep", False),
        ]
        assert report.packs_copied == 3
        assert report.bytes_copied == report.bytes_to_push > 0
        assert store.tiers() == {"remote": address}
        assert [tiers_of(store, step) for step in (1, 2, 3, 4)] == [{"remote"}, {"remote"}, {"remote"}, {"local"}]
        assert_restores(store, 1, 2, 3, 4)
    with ckstore.open(folder) as store:
        assert free_local_packs(store) == 3
        assert store.steps() == [1, 2, 3, 4]
        assert_restores(store, 1, 2, 3, 4)
        part = store.restore(2, only="model.b")
        assert np.array_equal(part["model"]["b"], np.arange(7) + 2)


def test_bucket_can_be_opened_as_a_store(folder, address):
    with filled(folder, 3) as store:
        store.push(address, keep_local=0)
    with ckstore.open(address, create=False) as there:
        assert there.steps() == [1, 2, 3]
        assert_restores(there, 1, 2, 3)
        assert there.verify("decode").is_clean


def test_push_follows_its_plan(folder, address):
    with filled(folder, 3) as store:
        planned = store.push(address, keep_local=1, dry_run=True)
        assert planned.is_dry_run
        assert [entry.action for entry in planned.entries] == ["push", "push", "keep"]
        assert store.tiers() == {}
        assert backend_for(address).list_names("") == []
        done = store.push(address, keep_local=1)
        assert [entry.action for entry in done.entries] == [entry.action for entry in planned.entries]
        assert done.bytes_to_push == planned.bytes_to_push == done.bytes_copied


def test_age_is_counted_from_commit(folder, address, clock):
    with filled(folder, 5, clock) as store:
        report = store.push(address, keep_local=0, older_than="2d12h")
        assert [entry.action for entry in report.entries] == ["push", "push", "push", "keep", "keep"]
        assert {entry.reason for entry in report.entries if entry.action == "keep"} == {"too young"}
        clock.now -= 100 * SECONDS_A_DAY
        again = store.push(address, keep_local=0, older_than="1d")
        assert [entry.action for entry in again.entries] == ["keep"] * 5, "a clock that jumped back lets nothing go"


def test_second_push_copies_only_what_is_new(folder, address):
    with filled(folder, 3) as store:
        store.push(address)
        again = store.push(address)
        assert (again.packs_copied, [entry.action for entry in again.entries]) == (0, ["there", "there", "keep"])
        store.commit(state_of(9), 9)
        report = store.push()
        assert (report.packs_copied, [entry.step for entry in report.pushed]) == (1, [3])


def test_shared_pack_is_pushed_once_and_stays_local(folder, address):
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(7), step)
        report = store.push(address, keep_local=1)
        assert report.packs_copied == 1
        assert free_local_packs(store) == 0, "the newest still names it here"
        assert_restores_seven(store)


def assert_restores_seven(store):
    for step in store.steps():
        assert np.array_equal(store.restore(step)["model"]["w"], state_of(7)["model"]["w"])


def test_interrupted_push_continues(folder, address, monkeypatch):
    with filled(folder, 3) as store:
        publish = type(repository_of(store).manifests).publish

        def fails_at_second(manifests, manifest):
            if manifest.header.seq == 1:
                raise KeyboardInterrupt
            return publish(manifests, manifest)

        monkeypatch.setattr(type(repository_of(store).manifests), "publish", fails_at_second)
        with pytest.raises(KeyboardInterrupt):
            store.push(address, keep_local=0)
        monkeypatch.undo()
    with ckstore.open(folder) as store:
        assert [tiers_of(store, step) for step in (1, 2, 3)] == [{"remote"}, {"local"}, {"local"}]
        monkeypatch.setenv("AWS_ENDPOINT_URL", server_of(store))
        report = store.push(keep_local=0)
        assert report.packs_copied == 1, "the pack of the second one was there already"
        free_local_packs(store)
        assert_restores(store, 1, 2, 3)


def server_of(store):
    """The endpoint of the session's server; undoing other patches must not remove it."""
    import os

    return os.environ["AWS_ENDPOINT_URL"]


def test_pull_brings_checkpoints_back(folder, address):
    with filled(folder, 3) as store:
        store.push(address, keep_local=1)
        free_local_packs(store)
        planned = store.pull(dry_run=True)
        assert [(entry.step, entry.tiers, entry.is_done) for entry in planned.entries] == [
            (2, ("remote",), False),
            (1, ("remote",), False),
        ]
        one = store.pull(1)
        assert [(entry.step, entry.is_done) for entry in one.entries] == [(1, True)]
        assert [tiers_of(store, step) for step in (1, 2, 3)] == [{"local"}, {"remote"}, {"local"}]
        rest = store.pull()
        assert [entry.step for entry in rest.entries] == [2]
        assert rest.bytes_copied == rest.bytes_to_pull > 0
        assert store.verify("decode").is_clean
    (folder / "config.json").unlink()
    with ckstore.open(folder) as store:
        assert_restores(store, 1, 2, 3)


def test_pulled_checkpoint_can_be_pushed_again(folder, address):
    with filled(folder, 2) as store:
        for _ in range(2):
            store.push(address, keep_local=0)
            free_local_packs(store)
            store.pull()
        assert store.info(1).generation == 4
        assert_restores(store, 1, 2)


def test_commits_go_on_after_a_push(folder, address):
    with filled(folder, 3) as store:
        store.push(address, keep_local=0)
        free_local_packs(store)
        # The same bytes again: a commit does not reuse chunks that are only in the tier.
        receipt = store.commit(state_of(3), 4)
        assert receipt.chunks_new > 0
        assert tiers_of(store, 4) == {"local"}
        assert_restores(store, 1, 2, 3)
        assert np.array_equal(store.restore(4)["model"]["w"], state_of(3)["model"]["w"])


def test_another_store_in_the_bucket_is_refused(folder, address, tmp_path):
    with filled(folder, 2) as store, filled(tmp_path / "other", 2) as other:
        store.push(address, keep_local=0)
        with pytest.raises(UsageError, match="another store"):
            other.push(address, keep_local=0)
        assert_restores(other, 1, 2)


def test_prefix_with_other_things_is_refused(folder, address):
    backend_for(address).create("holiday.jpg", b"sun", sync=True)
    with filled(folder, 2) as store, pytest.raises(UsageError, match="holiday"):
        store.push(address)


def test_diverged_copies_do_not_mix_in_a_bucket(folder, address, tmp_path):
    import shutil

    with filled(folder, 1) as store:
        pass
    shutil.copytree(folder, tmp_path / "copy")
    with ckstore.open(folder) as store, ckstore.open(tmp_path / "copy") as copy:
        store.commit(state_of(2), 2)
        copy.commit(state_of(3), 3)
        store.push(address, keep_local=0)
        with pytest.raises(ConflictError, match="owned by another folder"):
            copy.push(address, keep_local=0)
        copy.adopt(is_original=True)
        with pytest.raises(ConflictError, match="another checkpoint there"):
            copy.push(address, keep_local=0)
        assert tiers_of(copy, 3) == {"local"}
        assert_restores(copy, 3)


def test_changed_pack_in_tier_keeps_local_packs(folder, address):
    with filled(folder, 1) as store:
        pack = store.contents(1).packs[0]
        there = backend_for(address)
        name = f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack"
        there.bucket.put_over(name, b"other bytes" * 1000)
        with pytest.raises(CorruptError):
            store.push(address, keep_local=0)
        there.bucket.put_over(name, bytes(pack.nbytes))
        with pytest.raises(CorruptError):
            store.push(address, keep_local=0)
        assert tiers_of(store, 1) == {"local"}
        assert_restores(store, 1)


def test_reading_back_finds_a_byte_that_differs(folder, address):
    with filled(folder, 1) as store:
        pack = store.contents(1).packs[0]
        name = f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack"
        content = bytearray((folder / name).read_bytes())
        content[5000] ^= 1
        backend_for(address).bucket.put_over(name, bytes(content))
        with pytest.raises(CorruptError, match="offset 0"):
            store.push(address, keep_local=0, read_back=True)
        assert tiers_of(store, 1) == {"local"}
        (folder / "config.json").unlink()


def test_damaged_pack_is_not_pushed(folder, tmp_path):
    store = filled(folder, 3)
    (pack,) = {pack.pack_id for pack in store.contents(2).packs} - {pack.pack_id for pack in store.contents(1).packs}
    file = f"packs/{pack[:2]}/{pack}.pack"
    path = Path(folder) / file
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with store, pytest.raises(CorruptError, match="damaged and was not copied"):
        store.push(str(tmp_path / "tier"), keep_local=1)
    assert not (tmp_path / "tier" / file).exists()


def test_emptied_bucket_reports_missing_chunks(folder, address):
    with filled(folder, 2) as store:
        store.push(address, keep_local=1)
        free_local_packs(store)
        there = backend_for(address)
        pack = store.contents(1).packs[0]
        there.unlink(f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack")
        with pytest.raises(MissingChunkError) as caught:
            store.restore(1)
        assert address in str(caught.value)
        with pytest.raises(MissingChunkError):
            store.pull(1)
        assert_restores(store, 2)


def test_tier_that_is_not_configured_is_named(folder, address):
    with filled(folder, 2) as store:
        store.push(address, tier="attic")
        free_local_packs(store)
    (folder / "config.json").unlink()
    with ckstore.open(folder) as store:
        with pytest.raises(UnreachableError, match="attic"):
            store.restore(1)
        assert_restores(store, 2)


def test_name_of_a_tier_keeps_its_meaning(folder, address):
    with filled(folder, 2) as store:
        store.push(address, tier="attic")
        with pytest.raises(UsageError, match="another address"):
            store.push(f"{address}/deeper", tier="attic", keep_local=0)
        with pytest.raises(UsageError):
            store.push(f"{address}/deeper", tier="local", keep_local=0)
        store.push(f"{address}/deeper", keep_local=0)
        assert store.tiers() == {"attic": address, "remote": f"{address}/deeper"}
        with pytest.raises(UsageError, match="several tiers"):
            store.push()


def test_folder_can_be_a_tier(folder, tmp_path):
    with filled(folder, 3) as store:
        store.push(str(tmp_path / "attic"))
        free_local_packs(store)
        assert_restores(store, 1, 2, 3)
        store.pull(2)
        assert tiers_of(store, 2) == {"local"}
    assert LocalBackend(tmp_path / "attic").list_names("tmp") == []
    with ckstore.open(tmp_path / "attic") as there:
        assert_restores(there, 1, 2)


def test_push_continues_with_another_zstd_library(folder, tmp_path, monkeypatch):
    """The manifest in the tier has other bytes than this process would write, and the same content."""

    def is_interrupted(manifests, entry):
        raise KeyboardInterrupt

    tier = tmp_path / "tier"
    with filled(folder, 1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(type(repository_of(store).manifests), "publish", is_interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.push(str(tier), keep_local=0)
        (there,) = tier.glob("manifests/main/*.ckm")
        content = there.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(zstd, "stored_section", lambda plain: plain)
            patch.setattr(manifest, "stored_section", lambda plain: plain)
            assert store.push(keep_local=0).packs_copied == 0
        assert there.read_bytes() == content
        sizes = [path.stat().st_size for path in folder.glob("manifests/main/*.1.ckm")]
        assert sizes > [len(content)], "this library compresses nothing"
        assert tiers_of(store, 1) == set(store.tiers())
        assert_restores(store, 1)


def test_checkpoint_dropped_during_push_stays_dropped(folder, address, monkeypatch):
    from ckstore.tiers import push

    with filled(folder, 2) as store:
        finish_replacement = push.finish_replacement

        def drops_first(parts, manifest, name):
            store.delete(1)
            finish_replacement(parts, manifest, name)

        monkeypatch.setattr(push, "finish_replacement", drops_first)
        report = store.push(address, keep_local=1)
        assert [entry.is_done for entry in report.entries] == [False, False]
        assert store.steps() == [2]
