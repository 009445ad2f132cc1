"""Protects checkpoints in an unreachable tier: that is an error, never "not found", an older step or a new tier."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import ckstore
from ckstore.errors import CorruptError, MissingChunkError, NotFoundError, UnreachableError
from ckstore.format import paths
from ckstore.io.local import LocalBackend
from support.push_states import assert_restores, pack_of, state_of


def unconfigure(folder, tier_folder):
    (folder / "config.json").unlink()


def unmount(folder, tier_folder):
    """Leave the bare mount point."""
    tier_folder.rename(tier_folder.with_name("disk"))
    tier_folder.mkdir()


def unmount_to(folder, tier_folder, *, has_folders):
    """Leave a mount point in which another process has made the folders of a store."""
    unmount(folder, tier_folder)
    for name in paths.TOP_FOLDERS if has_folders else ():
        (tier_folder / name).mkdir()


def remove(folder, tier_folder):
    shutil.rmtree(tier_folder)


def exchange(folder, tier_folder):
    shutil.rmtree(tier_folder)
    ckstore.open(tier_folder).close()


def forbid(folder, tier_folder):
    """Make the folder writable by others, which is refused."""
    tier_folder.chmod(0o777)


FAULTS = [unconfigure, unmount, remove, exchange, forbid]


@pytest.fixture
def tier_folder(tmp_path):
    return tmp_path / "tier_folder"


@pytest.fixture(params=[0, 1], ids=["all there", "oldest here"])
def tiered_store(request, folder, tier_folder):
    """A store of three checkpoints in a tier. One may also be local. Local packs are freed."""
    with ckstore.open(folder) as store:
        for step in range(3):
            store.commit(state_of(step), step)
        store.push(str(tier_folder), keep_local=0)
        store.gc(now=True, min_age=0)
        if request.param:
            store.pull("seq:0")
    return folder


@pytest.mark.parametrize("break_tier", FAULTS)
def test_unreachable_newest_checkpoint_is_named(tiered_store, tier_folder, break_tier):
    break_tier(tiered_store, tier_folder)
    with ckstore.open(tiered_store) as store:
        for call in (store.latest, store.restore):
            with pytest.raises(UnreachableError, match=r"seq 2 \(step 2\) is the newest .* tier 'remote'"):
                call()
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.restore(2)
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.pull(2)
        assert [info.step for info in store.log()] == [2, 1, 0]


@pytest.mark.parametrize("break_tier", FAULTS)
def test_tier_lost_while_open_is_noticed(tiered_store, tier_folder, break_tier):
    with ckstore.open(tiered_store) as store:
        assert store.latest().step == 2
        break_tier(tiered_store, tier_folder)
        if break_tier is unconfigure or break_tier is forbid:
            # An opened tier stays open.
            assert store.latest().step == 2
            return
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.latest()


def test_missing_pack_in_reachable_tier_is_damage(tiered_store, tier_folder):
    with ckstore.open(tiered_store) as store:
        (tier_folder / pack_of(store, 2)).unlink()
        assert store.latest().step == 1
        with pytest.raises(MissingChunkError):
            store.restore(2)


@pytest.mark.parametrize("break_tier", FAULTS)
def test_mirror_copies_the_rest_and_names_unreachable(tiered_store, tier_folder, break_tier, tmp_path):
    with ckstore.open(tiered_store) as store:
        store.commit(state_of(3), 3)
        here = {0, 1, 2, 3} - {info.step for info in store.log() if "remote" in info.tiers}
        break_tier(tiered_store, tier_folder)
        with ckstore.open(tiered_store) as again, pytest.raises(UnreachableError) as caught:
            again.mirror(str(tmp_path / "copy"))
        assert "not copied: " in str(caught.value)
        assert "seq 2 (step 2) of run main" in str(caught.value)
        (run,) = caught.value.report.runs
        assert (run.copied_count, run.unreachable_count) == (len(here), 4 - len(here))
    with ckstore.open(tmp_path / "copy") as copy:
        assert set(copy.steps()) == here
        assert_restores(copy, *here)


@pytest.mark.parametrize("break_tier", FAULTS)
@pytest.mark.parametrize("remote", [False, True])
def test_verify_names_the_unreachable_tier(tiered_store, tier_folder, break_tier, remote):
    break_tier(tiered_store, tier_folder)
    with ckstore.open(tiered_store) as store:
        report = store.verify("quick", remote=remote)
        assert (report.is_clean, report.damage) == (False, [])
        (tier,) = report.unreachable
        assert "'remote'" in tier.what
        assert "main/2 (step 2)" in tier.checkpoints


# A used tier is never created again


@pytest.mark.parametrize("break_tier", [unmount, remove])
def test_used_tier_is_not_recreated(tiered_store, tier_folder, break_tier):
    with ckstore.open(tiered_store) as store:
        break_tier(tiered_store, tier_folder)
        store.commit(state_of(3), 3)
        for call in (
            lambda: store.push(str(tier_folder), keep_local=0),
            lambda: store.push(keep_local=0),
            lambda: store.mirror(str(tier_folder)),
            lambda: store.gc_tier(min_age=0),
        ):
            with pytest.raises(UnreachableError, match="'remote'"):
                call()
        assert not (tier_folder / paths.STORE_FILE).exists()
        store.gc(now=True, min_age=0)
        if break_tier is unmount:
            tier_folder.rmdir()
            tier_folder.with_name("disk").rename(tier_folder)
            assert_restores(store, 0, 1, 2, 3)


@pytest.mark.parametrize("has_folders", [False, True])
def test_disk_lost_during_push_frees_nothing(folder, tier_folder, at_first_copy, has_folders):
    """Packs copied to the bare mount point are not in the tier when the disk is mounted again."""
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tier_folder), keep_local=0)
        store.commit(state_of(1), 1)
        at_first_copy.append(lambda: unmount_to(folder, tier_folder, has_folders=has_folders))
        with pytest.raises(UnreachableError, match="the tier 'remote' is empty"):
            store.push(str(tier_folder), keep_local=0)
        assert not at_first_copy
        store.gc(now=True, min_age=0)
        shutil.rmtree(tier_folder)
        tier_folder.with_name("disk").rename(tier_folder)
        assert_restores(store, 0, 1)


@pytest.fixture
def at_first_copy(monkeypatch):
    """Call a function before the first pack is written to a draft, as copies to a folder are."""
    acts, real = [], LocalBackend.create_pack

    def create_pack(backend, name, **facts):
        if acts and name.startswith("tmp/"):
            acts.pop()()
        return real(backend, name, **facts)

    monkeypatch.setattr(LocalBackend, "create_pack", create_pack)
    return acts


def test_empty_tier_can_be_recreated(folder, tier_folder):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tier_folder), keep_local=0)
        store.pull()
        store.gc(now=True, min_age=0)
        shutil.rmtree(tier_folder)
        store.push(str(tier_folder), keep_local=0)
        assert store.tiers() == {"remote": str(tier_folder)}
        assert_restores(store, 0)


def test_unknown_tier_is_not_found(folder):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        with pytest.raises(NotFoundError, match="no tier 'tier_folder'"):
            store.gc_tier("tier_folder")


def test_missing_profile_is_an_error_and_not_an_empty_run(folder, monkeypatch, tmp_path):
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tmp_path / "tier_folder"), keep_local=0)
        store.gc(now=True, min_age=0)
    config = (folder / "config.json").read_text()
    body = config[config.index('"body"') :].replace(str(tmp_path / "tier_folder"), "s3://bucket/prefix")
    (folder / "config.json").write_text('{"kind": "config", "xxh3": null, ' + body)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with ckstore.open(folder) as store:
        for call in (store.latest, store.restore):
            with pytest.raises(UnreachableError, match=r"tier 'remote' .*profile 'nobody' does not exist"):
                call()


def test_damage_and_unreachable_tiers_are_both_reported(tiered_store, tier_folder, tmp_path):
    with ckstore.open(tiered_store) as store:
        store.commit(state_of(3), 3)
        path = tiered_store / pack_of(store, 3)
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
        remove(tiered_store, tier_folder)
        with pytest.raises(CorruptError) as caught:
            store.mirror(str(tmp_path / "copy"))
        (run,) = caught.value.report.runs
        assert (run.damaged_count, run.unreachable_count) == (1, 2 if run.copied_count else 3)
        assert np.all([str(step) in str(caught.value.checkpoints) for step in (2, 3)])
