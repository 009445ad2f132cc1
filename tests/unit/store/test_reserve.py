"""Protects the reserve: its files free real space, even if the disk was full when they were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.errors import CapacityError
from ckstore.io.local import LocalBackend
from ckstore.store.reserve import FILE_COUNT, FILE_NBYTES, fill_reserve, give_up_reserve

WHOLE = [FILE_NBYTES] * FILE_COUNT


class FillingDisk(LocalBackend):
    """A folder with a limited number of bytes. A file that does not fit is left partially written."""

    room = 1 << 60

    def create(self, name, content, *, sync):
        written = content[: self.room]
        super().create(name, written, sync=sync)
        self.room -= len(written)
        if len(written) < len(content):
            raise CapacityError("the disk is full", where=self.root)


@pytest.fixture
def disk(tmp_path):
    return FillingDisk(tmp_path)


def sizes(backend):
    return [path.stat().st_size for path in sorted(Path(backend.root, "reserve").glob("*"))]


@pytest.mark.parametrize(
    ("room", "count"),
    [(0, 0), (1, 0), (FILE_NBYTES - 1, 0), (3 * FILE_NBYTES, 3), (3 * FILE_NBYTES + 100, 3)],
)
def test_reserve_keeps_whole_files_and_is_completed_later(disk, room, count):
    disk.room = room
    for _ in range(2 * FILE_COUNT):
        fill_reserve(disk)
    assert sizes(disk) == WHOLE[:count]
    disk.room = 1 << 60
    fill_reserve(disk)
    assert sizes(disk) == WHOLE


@pytest.mark.parametrize("short", [{0: 0}, {15: 4095}, dict.fromkeys(range(16), 0), {3: 0, 4: 1, 9: 100}])
def test_short_reserve_files_are_rewritten(disk, short):
    fill_reserve(disk)
    for number, nbytes in short.items():
        Path(disk.root, "reserve", f"{number:02d}").write_bytes(bytes(nbytes))
    fill_reserve(disk)
    assert sizes(disk) == WHOLE


def test_whole_reserve_files_are_kept(disk):
    fill_reserve(disk)
    before = {path: path.read_bytes() for path in Path(disk.root, "reserve").glob("*")}
    fill_reserve(disk)
    assert {path: path.read_bytes() for path in before} == before
    assert give_up_reserve(disk)
    disk.room = 0
    fill_reserve(disk)
    assert not give_up_reserve(disk), "an empty file would count as reserved space"
