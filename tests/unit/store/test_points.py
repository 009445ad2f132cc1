"""Protects listings of points from reading the records of a journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.io import local
from ckstore.store.journal_needs import needed_keyframes
from ckstore.store.points import find_point, points_by_keyframe
from support.journaled_runs import JournaledRun
from support.journals import append

PAYLOAD_NBYTES = 1 << 20


@pytest.fixture
def run(folder):
    made = JournaledRun(folder)
    yield made
    made.stop()
    made.store.close()


@pytest.fixture
def read_nbytes(monkeypatch):
    """Numbers of bytes that were read from open files."""
    counts = []
    file = local.LocalReadFile
    read_at = file.read_at

    def counted(self, offset, nbytes):
        content = read_at(self, offset, nbytes)
        counts.append(len(content))
        return content

    monkeypatch.setattr(file, "read_at", counted)
    return counts


def write_segments(run, count, *, is_chain):
    """Write segments with a keyframe and a large point each."""
    last = None
    for number in range(count):
        run.start(last if is_chain else None)
        run.keyframe(10 * number)
        append(run.writer, 10 * number + 1, payloads=(b"x" * PAYLOAD_NBYTES,), structure=run.structure)
        last = run.writer.last
    run.stop()


def test_only_the_newest_record_is_read_whole(run, read_nbytes):
    write_segments(run, 4, is_chain=True)
    read_nbytes.clear()
    found = points_by_keyframe(run.repository)
    assert [[point.step for point in points] for points in found.values()] == [[31], [21], [11], [1]]
    assert PAYLOAD_NBYTES < sum(read_nbytes) < PAYLOAD_NBYTES + 100_000


def test_an_end_that_nothing_continues_may_be_torn(run, read_nbytes):
    """The heads of both records are sound, and a power cut has taken blocks of the last one."""
    write_segments(run, 2, is_chain=False)
    first = run.segments()[0]
    record = run.journals.read().records(first).records[-1]
    with Path(run.repository.backend.location_of(first.path)).open("r+b") as file:
        file.seek(record.offset + 8192)
        file.write(bytes(4096))
    found = points_by_keyframe(run.repository)
    assert [[point.step for point in points] for points in found.values()] == [[11]]


@pytest.mark.parametrize(
    "look",
    [lambda run: find_point(run, "latest"), lambda run: find_point(run, 31), needed_keyframes],
    ids=["latest", "a step", "a collection"],
)
def test_points_are_found_without_reading_other_records(run, read_nbytes, look):
    """A long run has a segment for each keyframe, and the last record of each may have gigabytes."""
    write_segments(run, 6, is_chain=True)
    read_nbytes.clear()
    assert look(run.repository)
    assert sum(read_nbytes) < 2 * PAYLOAD_NBYTES
