"""Protects what manifests that are gone may need: their loss is told, nothing is freed, and ordinary life is quiet."""

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
def five(folder):
    with ckstore.open(folder) as store:
        for step in range(5):
            store.commit(state_of(step), step)
    return folder


def packs_in(folder):
    return sorted(folder.glob("packs/*/*.pack"))


GAPS = [(4,), (1, 2), (0,), (3, 4), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("gap", GAPS)
def test_gap_is_told_by_verify_log_and_ls_and_stops_gc(five, gap, caplog, capsys):
    remove_manifests(five, *gap)
    packs = packs_in(five)
    with ckstore.open(five) as store:
        (damage,) = store.verify("quick").damage
        assert all(str(seq) in damage.what for seq in gap)
        assert "committed, but" in damage.what
        store.log()
        assert damage.what in caplog.text
        assert damage.what in store.gc(now=True, min_age=0).stop
        with pytest.raises(ConflictError, match="Nothing was freed"):
            store.purge()
    assert packs_in(five) == packs
    assert run_command(["ls", str(five)]) == 12
    assert f"MISSING {damage.what}" in capsys.readouterr().out
    assert run_command(["gc", str(five)]) == 12
    assert "--accept-missing" in capsys.readouterr().err


@pytest.mark.parametrize("gap", GAPS)
def test_retention_drops_nothing_beside_a_gap_until_somebody_says_so(five, gap):
    remove_manifests(five, *gap)
    left = sorted(set(range(5)) - set(gap))
    with ckstore.open(five) as store:
        assert store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0).stop
        assert store.steps() == left
        assert store.accept_missing() == {"main": gap}
        report = store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0)
        assert (report.stop, store.steps()) == ("", left[-1:])
        assert store.verify().is_clean
        assert store.gc(now=True).stop == ""
    assert len(packs_in(five)) == len(left[-1:])


def test_loss_of_all_manifests_is_no_empty_run(five):
    shutil.rmtree(five / "manifests/main")
    with ckstore.open(five) as store:
        with pytest.raises(CorruptError, match="were committed, but their manifests are missing"):
            store.latest()
        with pytest.raises(CorruptError, match="were committed, but their manifests are missing"):
            store.restore()
        assert not store.verify("quick").is_clean
        assert store.gc(now=True, min_age=0).stop


def test_latest_says_that_a_newer_one_is_missing(five):
    remove_manifests(five, 3, 4)
    with ckstore.open(five) as store:
        latest = store.latest()
        assert latest.step == 2
        assert "seq 3, 4 of run 'main' were committed, but their manifests are missing" in latest.warnings


def test_manifests_that_come_back_are_as_they_were(five):
    shutil.copytree(five / "manifests", five / "saved")
    remove_manifests(five, 3, 4)
    with ckstore.open(five) as store:
        assert store.gc(now=True, min_age=0).stop
        shutil.copytree(five / "saved", five / "manifests", dirs_exist_ok=True)
        assert store.gc(now=True, min_age=0).stop == ""
        assert store.verify("decode").is_clean
        assert store.steps() == [0, 1, 2, 3, 4]


def test_gap_in_one_run_keeps_packs_of_all_and_blocks_drops_of_its_own(five):
    with ckstore.open(five, run="other") as other:
        for step in range(3):
            other.commit(state_of(step + 10), step)
    remove_manifests(five, 2)
    with ckstore.open(five) as store:
        report = store.gc(ckstore.Retention(keep_last=1), all_runs=True, now=True, min_age=0)
        assert "run 'main'" in report.stop
        assert store.steps() == [0, 1, 3, 4]
    with ckstore.open(five, run="other") as other:
        assert other.steps() == [2]


# Ordinary life


def is_quiet(store):
    return store.verify("quick").is_clean and not store.gc(now=True, min_age=0).stop


def test_dropped_rewound_demoted_and_repacked_checkpoints_are_no_gap(five):
    with ckstore.open(five) as store:
        store.delete(1)
        assert is_quiet(store)
        store.rewind(0)
        store.repack()
        store.gc(ckstore.Retention(keep_last=2), now=True, min_age=0)
        assert is_quiet(store)
        store.commit(state_of(9), 9)
        store.delete(9)
        store.undelete(9)
        assert is_quiet(store)
        assert store.latest().warnings == ()


def test_pushed_and_pulled_checkpoints_are_no_gap(five, tmp_path):
    with ckstore.open(five) as store:
        store.push(str(tmp_path / "attic"), keep_local=0)
        assert is_quiet(store)
        store.pull()
        assert is_quiet(store)
    with ckstore.open(tmp_path / "attic") as attic:
        assert attic.verify().is_clean


def test_quarantined_manifest_is_no_gap(five):
    file = next(five.glob("manifests/main/00000002-*"))
    file.write_bytes(file.read_bytes()[:50])
    with ckstore.open(five) as store:
        store.quarantine(dry_run=False)
        assert store.verify("quick").is_clean
        assert store.gc(now=True, min_age=0).stop == ""


class FailingBackend(MemoryBackend):
    """Fails to make whatever has a certain beginning."""

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
def test_commit_that_fails_after_its_claim_leaves_no_gap(prefix):
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
        assert is_quiet(store)


def test_claim_of_a_commit_that_was_killed_is_no_gap(five):
    with ckstore.open(five) as store:
        repository_of(store).manifests.claim(5)
        assert is_quiet(store)


def test_commit_whose_mark_cannot_be_made_is_acknowledged():
    backend = FailingBackend()
    with ckstore.open(backend) as store:
        store.commit(state_of(0), 0)
        backend.prefix = paths.published_mark_name("main", 1)
        store.commit(state_of(1), 1)
        assert store.steps() == [0, 1]
        assert is_quiet(store)


def test_without_its_mark_a_gap_is_not_seen(five):
    """As in stores that older versions wrote."""
    for file in five.glob("claims/main/*.published"):
        file.unlink()
    remove_manifests(five, 3)
    with ckstore.open(five) as store:
        assert store.verify("quick").is_clean
