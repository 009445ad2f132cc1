"""Protects the reserve: what it holds is room that can be given up, also after the disk was full while it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.errors import CapacityError
from ckstore.io.local import LocalBackend
from ckstore.store.reserve import FILE_COUNT, FILE_NBYTES, fill_reserve, give_up_reserve

WHOLE = [FILE_NBYTES] * FILE_COUNT


class FillingDisk(LocalBackend):
    """A folder with so many bytes of room as a test says; a file that does not fit is left as far as it was written."""

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
def test_a_disk_that_gets_full_keeps_whole_files_only_and_gets_the_rest_when_there_is_room(disk, room, count):
    disk.room = room
    for _ in range(2 * FILE_COUNT):
        fill_reserve(disk)
    assert sizes(disk) == WHOLE[:count]
    disk.room = 1 << 60
    fill_reserve(disk)
    assert sizes(disk) == WHOLE


@pytest.mark.parametrize("short", [{0: 0}, {15: 4095}, dict.fromkeys(range(16), 0), {3: 0, 4: 1, 9: 100}])
def test_short_files_that_were_left_are_written_anew(disk, short):
    fill_reserve(disk)
    for number, nbytes in short.items():
        Path(disk.root, "reserve", f"{number:02d}").write_bytes(bytes(nbytes))
    fill_reserve(disk)
    assert sizes(disk) == WHOLE


def test_whole_files_are_left_alone_and_an_empty_reserve_is_none(disk):
    fill_reserve(disk)
    before = {path: path.read_bytes() for path in Path(disk.root, "reserve").glob("*")}
    fill_reserve(disk)
    assert {path: path.read_bytes() for path in before} == before
    assert give_up_reserve(disk)
    disk.room = 0
    fill_reserve(disk)
    assert not give_up_reserve(disk), "an empty file would be taken for room that could be had"
