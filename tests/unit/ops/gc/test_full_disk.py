"""Protects freeing space on a disk or quota without a free block or inode."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CapacityError
from ckstore.io.local import LocalBackend
from ckstore.store.reserve import FILE_COUNT, FILE_NBYTES
from support.gc_histories import other_handle

BLOCK = 4096


class SmallDisk(LocalBackend):
    """A folder with limited blocks and inodes. Each name takes an inode, as in tmpfs.

    Args:
        root: The folder.
        number: The errno of a full disk.
    """

    def __init__(self, root, number=errno.ENOSPC):
        super().__init__(root)
        self.number = number
        self.inodes_max = self.blocks_max = 1 << 60
        self.is_refusing = False

    def used(self):
        paths = list(Path(self.root).rglob("*"))
        return len(paths), sum(-(-path.lstat().st_size // BLOCK) for path in paths if path.is_file())

    def fill_up(self, *, inodes=True, blocks=True):
        """Limit the disk to what it holds now."""
        used = self.used()
        self.inodes_max = used[0] if inodes else self.inodes_max
        self.blocks_max = used[1] if blocks else self.blocks_max

    def _take(self, blocks):
        if min(self.inodes_max, self.blocks_max) == 1 << 60:
            return
        inodes_used, blocks_used = self.used()
        if inodes_used + 1 > self.inodes_max or blocks_used + blocks > self.blocks_max:
            raise CapacityError("the disk is full", where=self.root, errno=self.number)

    def make_folder(self, name):
        if self.stat(name) is None:
            self._take(1)
        return super().make_folder(name)

    def create(self, name, content, *, sync):
        self._take(-(-len(content) // BLOCK))
        super().create(name, content, sync=sync)

    def link(self, source, target):
        self._take(0)
        super().link(source, target)

    def create_pack(self, name, *, nbytes_expected):
        self._take(-(-nbytes_expected // BLOCK) + 1)
        return super().create_pack(name, nbytes_expected=nbytes_expected)


def state_of(step):
    return {"x": np.random.default_rng(step).standard_normal(20_000)}


@pytest.fixture
def disk(tmp_path):
    return SmallDisk(tmp_path / "store")


@pytest.fixture
def full(disk):
    with ckstore.open(disk) as store:
        for step in range(6):
            store.commit(state_of(step), step)
        yield store


def fill_up(store, **what):
    repository_of(store).backend.fill_up(**what)


@pytest.mark.parametrize(
    ("what", "number"),
    [({"blocks": False}, errno.ENOSPC), ({"inodes": False}, errno.EDQUOT), ({}, errno.ENOSPC)],
    ids=["inodes", "blocks of a quota", "both"],
)
def test_gc_frees_space_on_a_full_disk(full, disk, what, number):
    disk.number = number
    fill_up(full, **what)
    with pytest.raises(CapacityError):
        disk.create("tmp/full", b"x" * BLOCK, sync=False)
    blocks = disk.used()[1]
    other_handle(full).gc({"keep_last": 2}, now=True, min_age=0)
    assert disk.used()[1] < blocks - 20_000 * 8 // BLOCK
    assert len(disk.list_names("reserve")) > FILE_COUNT // 2, "filled again with what was freed"
    assert other_handle(full).gc({"keep_last": 2}, now=True, min_age=0).obstacles == ()
    assert full.steps() == [4, 5]
    disk.inodes_max = disk.blocks_max = 1 << 60
    for step in (4, 5):
        assert np.array_equal(full.restore(step)["x"], state_of(step)["x"])
    full.commit(state_of(6), 6)


def test_delete_and_gc_free_space_on_a_full_disk(full, disk):
    fill_up(full)
    full.delete(0)
    blocks = disk.used()[1]
    other_handle(full).gc(now=True, min_age=0)
    assert disk.used()[1] < blocks
    assert full.steps() == [1, 2, 3, 4, 5]


def test_error_without_reserve_has_advice(full, disk):
    for name in disk.list_names("reserve"):
        disk.unlink(f"reserve/{name}")
    fill_up(full)
    for call in (lambda: full.delete(0), lambda: other_handle(full).gc({"keep_last": 2}, now=True)):
        with pytest.raises(CapacityError, match="Remove any file of 64 KiB or more"):
            call()
    assert full.steps() == [0, 1, 2, 3, 4, 5]
    disk.inodes_max = disk.blocks_max = 1 << 60
    other_handle(full).gc({"keep_last": 2}, now=True)
    assert full.steps() == [4, 5]


def test_first_commit_makes_the_reserve(full, disk):
    names = disk.list_names("reserve")
    assert len(names) == FILE_COUNT
    assert {disk.stat(f"reserve/{name}").nbytes for name in names} == {FILE_NBYTES}


def test_memory_error_keeps_the_reserve(full, disk, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("too many open files", errno=errno.EMFILE)

    monkeypatch.setattr(disk, "create", refuse)
    with pytest.raises(CapacityError, match="too many"):
        full.delete(0)
    assert len(disk.list_names("reserve")) == FILE_COUNT
