"""Protects checkpoints in a tier that is out of reach: that is an error, and never none, an older step or a new one."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import ckstore
from ckstore.errors import CorruptError, MissingChunkError, NotFoundError, UnreachableError
from ckstore.format import paths
from ckstore.io.local import LocalBackend
from support.push_states import assert_restores, pack_of, state_of


def unconfigure(folder, attic):
    (folder / "config.json").unlink()


def unmount(folder, attic):
    """Leave the bare mount point."""
    attic.rename(attic.with_name("disk"))
    attic.mkdir()


def unmount_to(folder, attic, *, has_folders):
    """Leave a mount point in which somebody has made the folders of a store."""
    unmount(folder, attic)
    for name in paths.TOP_FOLDERS if has_folders else ():
        (attic / name).mkdir()


def remove(folder, attic):
    shutil.rmtree(attic)


def exchange(folder, attic):
    shutil.rmtree(attic)
    ckstore.open(attic).close()


def forbid(folder, attic):
    """Let others write there, which is refused."""
    attic.chmod(0o777)


LOSSES = [unconfigure, unmount, remove, exchange, forbid]


@pytest.fixture
def attic(tmp_path):
    return tmp_path / "attic"


@pytest.fixture(params=[0, 1], ids=["all there", "oldest here"])
def lost(request, folder, attic):
    """A store of three checkpoints in a tier, of which one may be here again, and packs here are freed."""
    with ckstore.open(folder) as store:
        for step in range(3):
            store.commit(state_of(step), step)
        store.push(str(attic), keep_local=0)
        store.gc(now=True, min_age=0)
        if request.param:
            store.pull("seq:0")
    return folder


@pytest.mark.parametrize("lose", LOSSES)
def test_newest_checkpoint_out_of_reach_is_an_error_that_names_it(lost, attic, lose):
    lose(lost, attic)
    with ckstore.open(lost) as store:
        for call in (store.latest, store.restore):
            with pytest.raises(UnreachableError, match=r"seq 2 \(step 2\) is the newest .* tier 'remote'"):
                call()
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.restore(2)
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.pull(2)
        assert [info.step for info in store.log()] == [2, 1, 0]


@pytest.mark.parametrize("lose", LOSSES)
def test_tier_that_goes_while_the_handle_is_open_is_noticed(lost, attic, lose):
    with ckstore.open(lost) as store:
        assert store.latest().step == 2
        lose(lost, attic)
        if lose is unconfigure or lose is forbid:
            # What was opened stays open.
            assert store.latest().step == 2
            return
        with pytest.raises(UnreachableError, match="tier 'remote'"):
            store.latest()


def test_missing_pack_in_a_tier_that_is_there_is_damage_and_passed_over(lost, attic):
    with ckstore.open(lost) as store:
        (attic / pack_of(store, 2)).unlink()
        assert store.latest().step == 1
        with pytest.raises(MissingChunkError):
            store.restore(2)


@pytest.mark.parametrize("lose", LOSSES)
def test_mirror_copies_the_rest_and_names_what_is_out_of_reach(lost, attic, lose, tmp_path):
    with ckstore.open(lost) as store:
        store.commit(state_of(3), 3)
        here = {0, 1, 2, 3} - {info.step for info in store.log() if "remote" in info.tiers}
        lose(lost, attic)
        with ckstore.open(lost) as again, pytest.raises(UnreachableError) as caught:
            again.mirror(str(tmp_path / "copy"))
        assert "not copied: " in str(caught.value)
        assert "seq 2 (step 2) of run main" in str(caught.value)
        (run,) = caught.value.report.runs
        assert (run.copied_count, run.unreachable_count) == (len(here), 4 - len(here))
    with ckstore.open(tmp_path / "copy") as copy:
        assert set(copy.steps()) == here
        assert_restores(copy, *here)


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("remote", [False, True])
def test_verify_says_which_tier_is_out_of_reach_and_who_needs_it(lost, attic, lose, remote):
    lose(lost, attic)
    with ckstore.open(lost) as store:
        report = store.verify("quick", remote=remote)
        assert (report.is_clean, report.damage) == (False, [])
        (tier,) = report.unreachable
        assert "'remote'" in tier.what
        assert "main/2 (step 2)" in tier.checkpoints


# A tier that was used before is never made anew


@pytest.mark.parametrize("lose", [unmount, remove])
def test_tier_that_checkpoints_are_in_is_not_made_anew(lost, attic, lose):
    with ckstore.open(lost) as store:
        lose(lost, attic)
        store.commit(state_of(3), 3)
        for call in (
            lambda: store.push(str(attic), keep_local=0),
            lambda: store.push(keep_local=0),
            lambda: store.mirror(str(attic)),
            lambda: store.gc_tier(min_age=0),
        ):
            with pytest.raises(UnreachableError, match="'remote'"):
                call()
        assert not (attic / paths.STORE_FILE).exists()
        store.gc(now=True, min_age=0)
        if lose is unmount:
            attic.rmdir()
            attic.with_name("disk").rename(attic)
            assert_restores(store, 0, 1, 2, 3)


@pytest.mark.parametrize("has_folders", [False, True])
def test_disk_that_goes_in_the_middle_of_a_push_frees_nothing_here(folder, attic, at_first_copy, has_folders):
    """What was copied to the bare mount point proves nothing when the disk is back."""
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(attic), keep_local=0)
        store.commit(state_of(1), 1)
        at_first_copy.append(lambda: unmount_to(folder, attic, has_folders=has_folders))
        with pytest.raises(UnreachableError, match="the tier 'remote' is empty"):
            store.push(str(attic), keep_local=0)
        assert not at_first_copy
        store.gc(now=True, min_age=0)
        shutil.rmtree(attic)
        attic.with_name("disk").rename(attic)
        assert_restores(store, 0, 1)


@pytest.fixture
def at_first_copy(monkeypatch):
    """Calls a test back before the first pack is written to a draft, as copies to a folder are."""
    acts, real = [], LocalBackend.create_pack

    def create_pack(backend, name, **facts):
        if acts and name.startswith("tmp/"):
            acts.pop()()
        return real(backend, name, **facts)

    monkeypatch.setattr(LocalBackend, "create_pack", create_pack)
    return acts


def test_tier_that_nothing_is_in_may_be_made_anew(folder, attic):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(attic), keep_local=0)
        store.pull()
        store.gc(now=True, min_age=0)
        shutil.rmtree(attic)
        store.push(str(attic), keep_local=0)
        assert store.tiers() == {"remote": str(attic)}
        assert_restores(store, 0)


def test_name_of_no_tier_is_not_found(folder):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        with pytest.raises(NotFoundError, match="no tier 'attic'"):
            store.gc_tier("attic")


def test_missing_profile_is_an_error_and_not_an_empty_run(folder, monkeypatch, tmp_path):
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tmp_path / "attic"), keep_local=0)
        store.gc(now=True, min_age=0)
    config = (folder / "config.json").read_text()
    body = config[config.index('"body"') :].replace(str(tmp_path / "attic"), "s3://bucket/prefix")
    (folder / "config.json").write_text('{"kind": "config", "xxh3": null, ' + body)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with ckstore.open(folder) as store:
        for call in (store.latest, store.restore):
            with pytest.raises(UnreachableError, match=r"tier 'remote' .*profile 'nobody' does not exist"):
                call()


def test_damage_and_what_is_out_of_reach_are_told_together(lost, attic, tmp_path):
    with ckstore.open(lost) as store:
        store.commit(state_of(3), 3)
        path = lost / pack_of(store, 3)
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
        remove(lost, attic)
        with pytest.raises(CorruptError) as caught:
            store.mirror(str(tmp_path / "copy"))
        (run,) = caught.value.report.runs
        assert (run.damaged_count, run.unreachable_count) == (1, 2 if run.copied_count else 3)
        assert np.all([str(step) in str(caught.value.checkpoints) for step in (2, 3)])
