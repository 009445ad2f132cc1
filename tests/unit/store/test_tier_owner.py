"""Protects a store's ownership of its tier: failed turns do not close the tier, and a refusal says what to do."""

from __future__ import annotations

import dataclasses

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import BackendError, ConflictError
from ckstore.io.memory import MemoryBackend
from ckstore.store.tier_checks import TURNS_MAX, begin_turn, require_owner
from support.push_states import state_of

TIER = "attic"


class FailingTier(MemoryBackend):
    """A tier where a rename fails: before it is done, or after it, as when an answer is lost."""

    fault = ""

    def rename(self, source, target):
        if self.fault == "before":
            raise BackendError("no answer", where=target)
        super().rename(source, target)
        if self.fault == "after":
            raise BackendError("no answer", where=target)


@pytest.fixture
def repository(store):
    store.commit({"n": 0}, 0)
    return repository_of(store)


@pytest.fixture
def tier():
    made = FailingTier()
    made.make_folder("tmp")
    return made


def fail(repository, tier, count, fault):
    tier.fault = fault
    for _ in range(count):
        with pytest.raises(BackendError, match="no answer"):
            begin_turn(repository, TIER, tier)
    tier.fault = ""


@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("count", [1, TURNS_MAX - 1, TURNS_MAX, TURNS_MAX + 1, 5 * TURNS_MAX])
def test_tier_stays_open_after_failed_turns(repository, tier, count, fault):
    begin_turn(repository, TIER, tier)
    fail(repository, tier, count, fault)
    require_owner(repository, TIER, tier)
    begin_turn(repository, TIER, tier)
    require_owner(repository, TIER, tier)


def test_tier_stays_open_with_failures_between_turns(repository, tier):
    for count in (3, 14, 15, 16, 40):
        begin_turn(repository, TIER, tier)
        fail(repository, tier, count, "before")
        fail(repository, tier, 1, "after")
        fail(repository, tier, count, "before")
    require_owner(repository, TIER, tier)


def test_first_turn_may_fail_repeatedly(repository, tier):
    fail(repository, tier, 2 * TURNS_MAX, "before")
    begin_turn(repository, TIER, tier)


def test_rolled_back_store_is_detected_after_failures(repository, tier):
    begin_turn(repository, TIER, tier)
    before = repository.backend.read_bytes("home.json", nbytes_max=1 << 20)
    begin_turn(repository, TIER, tier)
    fail(repository, tier, 2 * TURNS_MAX, "before")
    repository.backend.unlink("home.json")
    repository.backend.create("home.json", before, sync=True)
    with pytest.raises(ConflictError, match="reset to an older state"):
        begin_turn(repository, TIER, tier)


def remount(repository, monkeypatch, inode):
    """Give the folders of a store other inodes, as network file systems do at each mount."""
    stat = repository.backend.stat
    monkeypatch.setattr(repository.backend, "stat", lambda name: dataclasses.replace(stat(name), inode=inode))


@pytest.mark.parametrize("inode", [7, 1 << 63])
@pytest.mark.parametrize("check", [require_owner, begin_turn])
def test_remounted_store_gets_reason_and_advice(repository, tier, monkeypatch, inode, check):
    remount(repository, monkeypatch, 1234567)
    begin_turn(repository, TIER, tier)
    remount(repository, monkeypatch, inode)
    with pytest.raises(ConflictError, match="moved or remounted") as caught:
        check(repository, TIER, tier)
    assert f"inode 1234567 before, inode {inode} now" in str(caught.value)
    assert "`ckstore adopt --as-original` if this folder is the original" in str(caught.value)


def test_store_without_inodes_gets_advice(repository, tier, monkeypatch):
    remount(repository, monkeypatch, 5)
    begin_turn(repository, TIER, tier)
    remount(repository, monkeypatch, 0)
    with pytest.raises(ConflictError, match="moved or remounted") as caught:
        begin_turn(repository, TIER, tier)
    assert f"inode 5 before, {repository.backend.root} now" in str(caught.value)


def test_failed_pushes_do_not_close_the_tier(folder, tmp_path):
    attic = tmp_path / "attic"
    with ckstore.open(folder) as store:
        store.commit(state_of(0, count=3000), 0)
        store.push(str(attic), tier=TIER, keep_local=0)
        (attic / "tmp").rename(attic / "away")
        (attic / "tmp").write_bytes(b"no folder")
        store.commit(state_of(1, count=3000), 1)
        for _ in range(TURNS_MAX + 4):
            with pytest.raises(ckstore.CkstoreError):
                store.push(tier=TIER, keep_local=0)
        (attic / "tmp").unlink()
        (attic / "away").rename(attic / "tmp")
        store.push(tier=TIER, keep_local=0)
