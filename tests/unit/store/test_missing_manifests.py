"""Protects packs of missing manifests: the gap is reported and nothing is freed. Normal use reports no gap."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run as run_command
from ckstore.errors import BackendError, ConflictError, CorruptError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend


def state_of(number):
    return {"w": np.random.default_rng(number).standard_normal(2000)}


def remove_manifests(folder, *seqs):
    for seq in seqs:
        for file in folder.glob(f"manifests/main/{seq:08d}-*"):
            file.unlink()


@pytest.fixture
def folder_of_five(folder):
    with ckstore.open(folder) as store:
        for step in range(5):
            store.commit(state_of(step), step)
    return folder


def packs_in(folder):
    return sorted(folder.glob("packs/*/*.pack"))


GAPS = [(4,), (1, 2), (0,), (3, 4), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("gap", GAPS)
def test_gap_is_reported_and_stops_gc(folder_of_five, gap, caplog, capsys):
    remove_manifests(folder_of_five, *gap)
    packs = packs_in(folder_of_five)
    with ckstore.open(folder_of_five) as store:
        (damage,) = store.verify("quick").damage
        assert all(str(seq) in damage.what for seq in gap)
        assert "committed, but" in damage.what
        store.log()
        assert damage.what in caplog.text
        assert damage.what in store.gc(now=True, min_age=0).stop
        with pytest.raises(ConflictError, match="Nothing was freed"):
            store.purge()
    assert packs_in(folder_of_five) == packs
    assert run_command(["ls", str(folder_of_five)]) == 12
    assert f"MISSING {damage.what}" in capsys.readouterr().out
    assert run_command(["gc", str(folder_of_five)]) == 12
    assert "--accept-missing" in capsys.readouterr().err


@pytest.mark.parametrize("gap", GAPS)
def test_retention_stops_at_a_gap_until_confirmed(folder_of_five, gap):
    remove_manifests(folder_of_five, *gap)
    left = sorted(set(range(5)) - set(gap))
    with ckstore.open(folder_of_five) as store:
        assert store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0).stop
        assert store.steps() == left
        assert store.accept_missing() == {"main": gap}
        report = store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0)
        assert (report.stop, store.steps()) == ("", left[-1:])
        assert store.verify().is_clean
        assert store.gc(now=True).stop == ""
    assert len(packs_in(folder_of_five)) == len(left[-1:])


def test_run_without_any_manifest_is_not_empty(folder_of_five):
    shutil.rmtree(folder_of_five / "manifests/main")
    with ckstore.open(folder_of_five) as store:
        with pytest.raises(CorruptError, match="were committed, but their manifests are missing"):
            store.latest()
        with pytest.raises(CorruptError, match="were committed, but their manifests are missing"):
            store.restore()
        assert not store.verify("quick").is_clean
        assert store.gc(now=True, min_age=0).stop


def test_latest_warns_of_a_newer_missing_manifest(folder_of_five):
    remove_manifests(folder_of_five, 3, 4)
    with ckstore.open(folder_of_five) as store:
        latest = store.latest()
        assert latest.step == 2
        assert "seq 3, 4 of run 'main' were committed, but their manifests are missing" in latest.warnings


def test_returned_manifests_work_again(folder_of_five):
    shutil.copytree(folder_of_five / "manifests", folder_of_five / "saved")
    remove_manifests(folder_of_five, 3, 4)
    with ckstore.open(folder_of_five) as store:
        assert store.gc(now=True, min_age=0).stop
        shutil.copytree(folder_of_five / "saved", folder_of_five / "manifests", dirs_exist_ok=True)
        assert store.gc(now=True, min_age=0).stop == ""
        assert store.verify("decode").is_clean
        assert store.steps() == [0, 1, 2, 3, 4]


def test_gap_keeps_all_packs_and_blocks_drops_in_its_run(folder_of_five):
    with ckstore.open(folder_of_five, run="other") as other:
        for step in range(3):
            other.commit(state_of(step + 10), step)
    remove_manifests(folder_of_five, 2)
    with ckstore.open(folder_of_five) as store:
        report = store.gc(ckstore.Retention(keep_last=1), all_runs=True, now=True, min_age=0)
        assert "run 'main'" in report.stop
        assert store.steps() == [0, 1, 3, 4]
    with ckstore.open(folder_of_five, run="other") as other:
        assert other.steps() == [2]


# Normal use


def reports_no_gap(store):
    return store.verify("quick").is_clean and not store.gc(now=True, min_age=0).stop


def test_dropped_and_replaced_checkpoints_are_no_gap(folder_of_five):
    with ckstore.open(folder_of_five) as store:
        store.delete(1)
        assert reports_no_gap(store)
        store.rewind(0)
        store.repack()
        store.gc(ckstore.Retention(keep_last=2), now=True, min_age=0)
        assert reports_no_gap(store)
        store.commit(state_of(9), 9)
        store.delete(9)
        store.undelete(9)
        assert reports_no_gap(store)
        assert store.latest().warnings == ()


def test_pushed_and_pulled_checkpoints_are_no_gap(folder_of_five, tmp_path):
    with ckstore.open(folder_of_five) as store:
        store.push(str(tmp_path / "attic"), keep_local=0)
        assert reports_no_gap(store)
        store.pull()
        assert reports_no_gap(store)
    with ckstore.open(tmp_path / "attic") as attic:
        assert attic.verify().is_clean


def test_quarantined_manifest_is_no_gap(folder_of_five):
    file = next(folder_of_five.glob("manifests/main/00000002-*"))
    file.write_bytes(file.read_bytes()[:50])
    with ckstore.open(folder_of_five) as store:
        store.quarantine(dry_run=False)
        assert store.verify("quick").is_clean
        assert store.gc(now=True, min_age=0).stop == ""


class FailingBackend(MemoryBackend):
    """Fail to create names with a given prefix."""

    prefix = None

    def create(self, name, content, *, sync):
        if self.prefix is not None and name.startswith(self.prefix):
            raise BackendError("it failed", where=name)
        super().create(name, content, sync=sync)

    def link(self, source, target):
        if self.prefix is not None and target.startswith(self.prefix):
            raise BackendError("it failed", where=target)
        super().link(source, target)


@pytest.mark.parametrize("prefix", ["tmp/", "manifests/"])
def test_failed_commit_leaves_no_gap(prefix):
    backend = FailingBackend()
    with ckstore.open(backend) as store:
        store.commit(state_of(0), 0)
        for step in range(1, 4):
            backend.prefix = prefix
            with pytest.raises(BackendError, match="it failed"):
                store.commit(state_of(step), step)
            backend.prefix = None
        store.commit(state_of(4), 4)
        assert [name.seq for name in repository_of(store).manifests.listing().names] == [0, 4]
        assert reports_no_gap(store)


def test_claim_of_killed_commit_is_no_gap(folder_of_five):
    with ckstore.open(folder_of_five) as store:
        repository_of(store).manifests.claim(5)
        assert reports_no_gap(store)


def test_commit_succeeds_without_its_mark():
    backend = FailingBackend()
    with ckstore.open(backend) as store:
        store.commit(state_of(0), 0)
        backend.prefix = paths.published_mark_name("main", 1)
        store.commit(state_of(1), 1)
        assert store.steps() == [0, 1]
        assert reports_no_gap(store)


def test_gap_without_mark_is_not_seen(folder_of_five):
    """Stores of older versions have no such mark."""
    for file in folder_of_five.glob("claims/main/*.published"):
        file.unlink()
    remove_manifests(folder_of_five, 3)
    with ckstore.open(folder_of_five) as store:
        assert store.verify("quick").is_clean
