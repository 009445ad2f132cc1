"""Protects verify from missing a damaged byte of a journal, and from calling a torn end damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.format.journal import SEGMENT_HEADER_NBYTES
from support.journaled_runs import JournaledRun

STRIDE = 397
"""Prime, so that all fields of heads and frames are visited over several records."""


@pytest.fixture
def run(tmp_path):
    made = JournaledRun(tmp_path / "store")
    yield made
    made.stop()
    made.store.close()


@pytest.fixture
def path(run):
    """The file of a segment with four records."""
    name, run.last = run.segment(0, 1, 2, 3)
    return run.repository.backend.location_of(name.path)


def flip(path, offset):
    with Path(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def offsets_of(run):
    journal = run.journals.read()
    (name,) = journal.segments
    return [record.offset for record in journal.records(name).records]


def test_a_sound_journal_is_clean(run, path):
    for level in ("quick", "read"):
        report = run.store.verify(level)
        assert report.is_clean
        assert (report.segment_count, report.point_count, report.notes) == (1, 4, [])


def test_every_byte_before_the_last_record_is_read(run, path):
    end = offsets_of(run)[-1]
    for offset in range(0, end, STRIDE):
        flip(path, offset)
        report = run.store.verify("read")
        assert len(report.damage) == 1, offset
        assert path in report.damage[0].where
        flip(path, offset)
    assert run.store.verify("read").is_clean


def test_damage_names_the_record(run, path):
    offset = offsets_of(run)[1]
    flip(path, offset + 300)
    (damage,) = run.store.verify("read").damage
    assert "record 2" in damage.what
    assert "step 1" in damage.what
    assert damage.where == f"{path}, offset {offset}"


def test_quick_reads_heads_only(run, path):
    second = offsets_of(run)[1]
    flip(path, second + 300)
    assert run.store.verify("quick").is_clean
    flip(path, second + 300)
    flip(path, second + 40)
    assert not run.store.verify("quick").is_clean
    flip(path, second + 40)
    flip(path, SEGMENT_HEADER_NBYTES // 2)
    assert not run.store.verify("quick").is_clean


def test_a_torn_end_is_a_note(run, path):
    with Path(path).open("ab") as file:
        file.write(b"CKPOINT\x01" + bytes(5000))
    for level in ("quick", "read"):
        report = run.store.verify(level)
        assert report.is_clean
        assert report.point_count == 4
        (note,) = report.notes
        assert path in note
        assert "5008 bytes" in note


def test_a_damaged_last_record_that_another_segment_continues_is_damage(run, path):
    run.start(run.last)
    run.points(4)
    run.stop()
    flip(path, offsets_of_first(run)[-1] + 300)
    assert run.store.verify("quick").is_clean, "it was durable before another segment continued it, so it is not torn"
    (damage,) = run.store.verify("read").damage
    assert "record 4" in damage.what
    assert damage.where.startswith(path)


def offsets_of_first(run):
    journal = run.journals.read()
    return [record.offset for record in journal.records(next(iter(journal.segments))).records]


def test_a_segment_that_is_being_written_has_no_note(run, path):
    run.start(run.last)
    run.points(4)
    with Path(run.repository.backend.location_of(run.writer.name.path)).open("ab") as file:
        file.write(b"CKPOINT\x01" + bytes(100))
    assert run.store.verify("read").notes == []


def test_one_checkpoint_is_verified_without_the_journal(run, path):
    flip(path, offsets_of(run)[1] + 300)
    assert run.store.verify("read", ref=0).is_clean
