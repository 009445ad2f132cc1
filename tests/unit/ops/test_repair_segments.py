"""Protects repairs of journals: a damaged record comes back from a copy, and lost points are named."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckstore
from ckstore.cli.main import run as run_command
from support.journaled_runs import JournaledRun
from support.journals import steps_of


@pytest.fixture
def run(folder):
    made = JournaledRun(folder)
    yield made
    made.stop()
    made.store.close()


@pytest.fixture
def segment(run):
    """A segment with a keyframe and four points."""
    name, run.last = run.segment(0, 1, 2, 3, 4)
    return name


@pytest.fixture
def copy(run, segment, tmp_path):
    place = str(tmp_path / "copy")
    run.store.mirror(place)
    return place


def file_of(run, name):
    return Path(run.repository.backend.location_of(name.path))


def flip(run, name, offset):
    with file_of(run, name).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def offsets_of(run, name):
    return [record.offset for record in run.journals.read().records(name).records]


def in_quarantine(folder):
    return [path.name for path in folder.glob("quarantine/journals/main/*")]


@pytest.mark.parametrize("part", [40, 300], ids=["head", "body"])
@pytest.mark.parametrize("number", range(5))
def test_a_damaged_record_comes_back(run, segment, copy, folder, number, part):
    before = file_of(run, segment).read_bytes()
    # The end of a segment may be torn; here the next one shows that it was acknowledged.
    run.start(run.last)
    run.stop()
    flip(run, segment, offsets_of(run, segment)[number] + part)
    planned = run.store.repair(sources=[copy])
    (found,) = planned.segments
    assert f"record {number + 1} is damaged" in found.problem
    assert (found.sources, found.is_lost, found.is_done) == ((copy,), False, False)
    assert not in_quarantine(folder)
    (done,) = run.store.repair(dry_run=False, sources=[copy]).segments
    assert done.is_done
    assert file_of(run, segment).read_bytes() == before
    assert in_quarantine(folder) == [segment.file]
    assert run.store.repair().is_clean
    assert run.store.verify("read").is_clean


def test_a_damaged_header_comes_back(run, segment, copy):
    flip(run, segment, 100)
    assert run.store.repair(dry_run=False, sources=[copy]).segments[0].is_done
    assert steps_of(run.journals.read(), segment) == [0, 1, 2, 3, 4]


def test_tiers_are_searched(run, segment, tmp_path):
    run.store.push(str(tmp_path / "attic"), keep_local=0)
    flip(run, segment, offsets_of(run, segment)[1] + 300)
    assert run.store.repair(dry_run=False).segments[0].is_done
    assert run.store.verify("read").is_clean


def test_records_of_several_copies_are_joined(run, tmp_path):
    """The copy is older than the last records, and damaged itself."""
    name = run.start()
    run.keyframe(0)
    run.points(1, 2)
    run.store.mirror(str(tmp_path / "copy"))
    run.points(3, 4)
    run.stop()
    before, offsets = file_of(run, name).read_bytes(), offsets_of(run, name)
    flip(run, name, offsets[1] + 40)
    with (tmp_path / "copy" / name.path).open("r+b") as file:
        file.seek(offsets[0] + 300)
        file.write(b"damage")
    assert run.store.repair(dry_run=False, sources=[tmp_path / "copy"]).segments[0].is_done
    assert file_of(run, name).read_bytes() == before


def test_without_a_copy_the_lost_points_are_named(run, segment, folder, capsys):
    run.segment(5, 6)
    flip(run, segment, offsets_of(run, segment)[2] + 300)
    before = file_of(run, segment).read_bytes()
    (found,) = run.store.repair(dry_run=False).segments
    assert (found.lost_steps, found.is_lost, found.is_done) == ((2, 3, 4), True, False)
    assert "--from COPY" in found.todo
    assert file_of(run, segment).read_bytes() == before
    assert run_command(["repair", str(folder)]) == 12
    assert "lost points: 3 steps, 2 to 4" in capsys.readouterr().out


def test_points_of_segments_behind_a_damaged_one_are_named(run, segment):
    run.start(run.last)
    run.points(5, 6)
    run.stop()
    flip(run, segment, offsets_of(run, segment)[1] + 40)
    (found,) = run.store.repair().segments
    assert found.lost_steps == (2, 3, 4, 5, 6)
    assert "the records behind it are lost with it" in found.problem


@pytest.mark.parametrize(("part", "lost_steps"), [(300, (3, 4)), (40, (4,))], ids=["body", "head"])
def test_what_is_repaired_in_part_keeps_the_rest(run, segment, copy, part, lost_steps):
    offsets = offsets_of(run, segment)
    with (Path(copy) / segment.path).open("r+b") as file:
        file.truncate(offsets[2])
    flip(run, segment, offsets[1] + 300)
    flip(run, segment, offsets[3] + part)
    before = file_of(run, segment).read_bytes()
    (found,) = run.store.repair(dry_run=False, sources=[copy]).segments
    assert (found.is_done, found.is_lost, found.lost_steps) == (True, True, lost_steps)
    flip(run, segment, offsets[1] + 300)
    assert file_of(run, segment).read_bytes() == before


def test_a_torn_end_is_no_damage(run, segment):
    with file_of(run, segment).open("r+b") as file:
        file.truncate(offsets_of(run, segment)[-1] + 5000)
    assert run.store.repair().is_clean


def test_a_last_record_that_a_copy_has_comes_back(run, segment, copy):
    before = file_of(run, segment).read_bytes()
    flip(run, segment, offsets_of(run, segment)[-1] + 300)
    (found,) = run.store.repair(dry_run=False, sources=[copy]).segments
    assert (found.is_done, found.is_lost) == (True, False)
    assert file_of(run, segment).read_bytes() == before


@pytest.mark.parametrize("torn_nbytes", [0, 300])
def test_records_that_the_store_never_had_stay_away(run, segment, copy, torn_nbytes):
    """The store was set back."""
    with file_of(run, segment).open("r+b") as file:
        file.truncate(offsets_of(run, segment)[3] + torn_nbytes)
    assert run.store.repair(sources=[copy]).is_clean


def test_a_segment_that_is_written_stays(run, copy):
    name = run.start()
    run.keyframe(5)
    run.points(6, 7)
    flip(run, name, offsets_of(run, name)[1] + 300)
    (found,) = run.store.repair(sources=[copy]).segments
    assert (found.sources, found.lost_steps) == ((), (6, 7))
    assert "stop the trainer" in found.todo


def test_a_mirror_is_repaired_from_its_store(run, segment, copy):
    path = Path(copy) / segment.path
    before = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offsets_of(run, segment)[2] + 300)
        file.write(b"damage")
    path.chmod(0o600)
    report = ckstore.repair_store(copy, dry_run=False, sources=[run.repository.backend.root])
    assert report.segments[0].is_done
    assert path.read_bytes() == before
