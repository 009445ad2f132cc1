"""Protects commits on a full disk: only disposable data is freed, and the commit fails only without any."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CapacityError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from ckstore.ops.gc.run import GcLimits
from support.gc_histories import packs_in_place
from support.memory_files import flip

NBYTES = 1 << 19
PLAIN = ckstore.Policy(compression="none", threads=1)


class Disk(MemoryBackend):
    """A folder in memory that counts the packs that were begun, and records when folders were made."""

    def __init__(self, clock):
        super().__init__(clock=clock)
        self.packs_begun = 0
        self._clock_of_folders, self._made_ns = clock, {}

    def make_folder(self, name):
        self._made_ns.setdefault(name, self._clock_of_folders.now_ns())
        return super().make_folder(name)

    def stat(self, name):
        info = super().stat(name)
        return replace(info, modified_ns=self._made_ns[name]) if info and name in self._made_ns else info

    def create_pack(self, name, *, nbytes_expected):
        self.packs_begun += 1
        return super().create_pack(name, nbytes_expected=nbytes_expected)


def noise(step):
    return {"w": np.random.default_rng(step).integers(0, 256, NBYTES, np.uint8)}


@pytest.fixture
def disk(clock):
    return Disk(clock)


@pytest.fixture
def store(disk, clock):
    with ckstore.open(disk, policy=PLAIN, clock=clock) as opened:
        yield opened


def fill(disk, nbytes_free=NBYTES // 2):
    """Leave this much free space."""
    disk.nbytes_max = None
    disk.nbytes_max = sum(len(content) for content in disk.files().values()) + nbytes_free


def drop(store, clock, steps):
    """Move these steps to the trash, an hour apart."""
    for step in steps:
        store.delete(step)
        store.gc(min_age=0)
        clock.now += 3600


def test_full_disk_frees_the_oldest_trash(store, disk, clock):
    for step in range(8):
        store.commit(noise(step), step)
    drop(store, clock, range(6))
    fill(disk)
    receipt = store.commit(noise(8), 8)
    assert len([line for line in receipt.warnings if line.startswith("the disk was full: ")]) == 1
    assert np.array_equal(store.restore()["w"], noise(8)["w"])
    assert [store.undelete(step).step for step in (4, 5)] == [4, 5], "only as much is freed as is likely to be needed"
    with pytest.raises(ckstore.CkstoreError):
        store.undelete(0)
    assert store.verify("decode").is_clean


def test_no_retry_if_nothing_was_freed(store, disk):
    store.commit(noise(0), 0)
    fill(disk)
    begun = disk.packs_begun
    with pytest.raises(CapacityError, match="the trash of the store contains nothing that could be freed") as caught:
        store.commit(noise(1), 1)
    assert disk.packs_begun == begun + 1
    assert "ckstore gc" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert store.steps() == [0]


def test_commit_is_retried_once(store, disk, clock):
    for step in range(3):
        store.commit(noise(step), step)
    drop(store, clock, [0, 1])
    fill(disk)
    begun = disk.packs_begun
    large = {"w": np.random.default_rng(9).integers(0, 256, 8 * NBYTES, np.uint8)}
    with pytest.raises(CapacityError, match="even after space was freed") as caught:
        store.commit(large, 9)
    assert disk.packs_begun == begun + 2
    assert "emptied" in str(caught.value)
    assert store.steps() == [2]
    assert np.array_equal(store.restore()["w"], noise(2)["w"])


def test_needed_packs_are_rescued_not_freed(store, disk, clock):
    for step in range(4):
        store.commit(noise(step), step)
    drop(store, clock, [0])
    parts = repository_of(store)
    # The state that a killed or overtaken collector leaves.
    needed = paths.parse_pack_file(sorted(packs_in_place(disk))[0].rpartition("/")[2])
    parts.trash.move_packs([needed], parts.trash.new_packs_folder())
    fill(disk)
    store.commit(noise(4), 4)
    assert store.steps() == [1, 2, 3, 4]
    assert store.verify("decode").is_clean


def test_unreadable_manifest_stops_freeing(store, disk, clock, caplog):
    for step in range(4):
        store.commit(noise(step), step)
    drop(store, clock, [0, 1])
    name = repository_of(store).manifests.listing().names[0].path
    flip(disk, name, len(disk.files()[name]) // 2)
    fill(disk)
    there = {path for path in disk.files() if path.startswith("trash/")}
    with pytest.raises(CapacityError, match="contains nothing that could be freed"):
        store.commit(noise(4), 4)
    assert there <= disk.files().keys()
    assert "nothing of the trash was freed" in caplog.text


def test_retention_rules_are_applied_on_full_disk(disk, clock):
    with ckstore.open(
        disk, policy=PLAIN, clock=clock, retention=ckstore.Retention(keep_last=2), gc_every=1000
    ) as store:
        for step in range(6):
            store.commit(noise(step), step)
        store.tag(1, "good")
        fill(disk)
        receipt = store.commit(noise(6), 6)
        assert "after retention= deleted 3 checkpoints" in receipt.warnings[0]
        assert store.steps() == [1, 4, 5, 6]
        assert store.verify("decode").is_clean


def test_other_runs_are_left_alone(disk, clock):
    with ckstore.open(disk, run="other", policy=PLAIN, clock=clock) as other:
        for step in range(4):
            other.commit(noise(100 + step), step)
        with ckstore.open(disk, policy=PLAIN, clock=clock, retention={"keep_last": 1}, gc_every=1000) as store:
            for step in range(3):
                store.commit(noise(step), step)
            fill(disk)
            store.commit(noise(3), 3)
            assert store.steps() == [2, 3]
        assert other.steps() == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ENOMEM, errno.EMFILE])
def test_other_errors_free_nothing(store, disk, clock, number, monkeypatch):
    for step in range(3):
        store.commit(noise(step), step)
    drop(store, clock, [0, 1])
    before = set(disk.files())

    def refuse(name, *, nbytes_expected):
        raise CapacityError("no", errno=number)

    monkeypatch.setattr(disk, "create_pack", refuse)
    with pytest.raises(CapacityError):
        store.commit(noise(3), 3)
    assert before <= disk.files().keys()


def test_quota_counts_as_full_disk(store, disk, clock, monkeypatch):
    for step in range(3):
        store.commit(noise(step), step)
    drop(store, clock, [0, 1])
    make, refused = disk.create_pack, []

    def refuse_once(name, *, nbytes_expected):
        if not refused:
            refused.append(name)
            raise CapacityError("no", errno=errno.EDQUOT)
        return make(name, nbytes_expected=nbytes_expected)

    monkeypatch.setattr(disk, "create_pack", refuse_once)
    assert "the disk was full" in store.commit(noise(3), 3).warnings[0]


@pytest.mark.parametrize("folder", ["claims", "manifests", "tmp", "leases"])
def test_full_disk_for_small_files_is_handled(disk, clock, folder, monkeypatch):
    with ckstore.open(disk, policy=PLAIN, clock=clock) as store:
        for step in range(3):
            store.commit(noise(step), step)
        drop(store, clock, [0, 1])
    refused = []
    for verb in ("create", "link", "rename", "rename_new"):
        make = getattr(disk, verb)

        def refuse_once(*names, _make=make, **options):
            if not refused and any(str(name).startswith(folder) for name in names[:2]):
                refused.append(names)
                raise CapacityError("no", errno=errno.ENOSPC)
            return _make(*names, **options)

        monkeypatch.setattr(disk, verb, refuse_once)
    with ckstore.open(disk, policy=PLAIN, clock=clock) as store:
        assert "the disk was full" in store.commit(noise(3), 3).warnings[0]
        assert refused
        assert store.restore(3)["w"][0] == noise(3)["w"][0]
        assert store.verify("decode").is_clean


# How long the trash is kept


def test_trash_duration_is_from_open_store_or_default(disk, clock):
    with ckstore.open(disk, clock=clock) as store:
        assert store.trash_for is None
        assert store.gc().limits.trash_seconds == GcLimits().trash_seconds == 86_400
        store.set_trash_for("90m")
        assert store.trash_for == "1h30m"
        assert store.gc().limits.trash_seconds == 5400
        assert store.gc(trash_for="2h").limits.trash_seconds == 7200
    with ckstore.open(disk, clock=clock, trash_for="3h") as store:
        assert store.gc().limits.trash_seconds == 10_800
        assert store.gc(trash_for=0).limits.trash_seconds == 0
        store.set_trash_for(None)
        assert store.trash_for is None
        store.set_trash_for(0)
        assert store.trash_for == "0s"
    with ckstore.open(disk, clock=clock) as store:
        assert store.gc().limits.frees_immediately


def test_setting_trash_duration_keeps_other_rules(store):
    store.set_retention({"keep_last": 3})
    store.set_demotion({"keep_newest": 5})
    store.set_trash_for("2h")
    assert store.retention == ckstore.Retention(keep_last=3)
    assert store.demotion.keep_newest == 5
    store.set_demotion(None)
    assert store.trash_for == "2h"


@pytest.mark.parametrize("span", ["later", -1, float("nan"), "7days"])
def test_invalid_duration_is_refused_at_open(disk, clock, span):
    with pytest.raises(ckstore.UsageError, match=r"span of time|duration"):
        ckstore.open(disk, clock=clock, trash_for=span)


def test_gc_after_commit_uses_duration_from_open(disk, clock):
    with ckstore.open(
        disk, policy=PLAIN, clock=clock, retention=ckstore.Retention(keep_last=1), gc_every=1, trash_for="1h"
    ) as store:
        for step in range(4):
            store.commit(noise(step), step)
            clock.now += 2 * 3600
        assert len([entry for entry in store.trash() if entry.manifests]) == 1
