"""Protects copies of journals against power cuts: a place has the shorter copy or the longer one, and each is whole.

Each negative control leaves out one sync and must fail.
"""

from __future__ import annotations

import pytest

from ckstore._testing import repository_of
from ckstore.ops.repair_segments import plan_segments, replace_segment
from ckstore.tiers.segments import SegmentCopy
from support.crash_states import CheckedStates, crash_states
from support.faults import SyncSkippingBackend
from support.journaled_runs import JournaledRun
from support.simfs import SimFS

SEED = 42

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def run():
    made = JournaledRun(SimFS())
    yield made
    made.stop()
    made.store.close()


@pytest.fixture
def segment(run):
    """A segment with a keyframe and two points."""
    name = run.start()
    run.keyframe(0)
    run.points(1, 2)
    return name


def content_of(disk, name):
    file = disk.open_read(name.path)
    content = bytes(file.read_at(0, file.nbytes))
    file.close()
    return content


def contents_after_cuts(disk, name, *, samples=60):
    """Yield the content of a segment in each state that a power cut can leave, and whether its copy was reported."""
    checked = CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=samples):
        if checked.is_new(state):
            found = state.disk.stat(name.path)
            yield (None if found is None else content_of(state.disk, name)), bool(state.marks)


def copied(run, target, wrap=lambda disk: disk):
    """Copy the journal to a settled disk, and return it with its record."""
    disk = target.settled()
    copy = SegmentCopy(run.repository.backend, wrap(disk), run.repository.limits)
    journal = run.journals.read()
    copy.run(journal, journal.segments)
    assert not copy.problems
    disk.note("copied")
    return disk


@pytest.fixture
def place():
    disk = SimFS()
    disk.make_folder("tmp")
    disk.sync_folder("")
    return disk


@pytest.mark.parametrize("is_first", [True, False])
def test_power_cut_leaves_a_whole_copy(run, segment, place, is_first, note):
    before = None
    if not is_first:
        place = copied(run, place)
        before = content_of(place, segment)
        run.points(3, 4)
    disk = copied(run, place)
    after = content_of(disk, segment)
    states = list(contents_after_cuts(disk, segment))
    note(f"power cuts of a copy of a journal: seed {SEED}, {len(disk.log)} steps, {len(states)} different disks")
    assert {content for content, _ in states} == {before, after}
    assert {content for content, is_reported in states if is_reported} == {after}


@pytest.mark.parametrize("skipped", ["pack data", "folder journals"])
def test_power_cut_finds_a_missing_sync(run, segment, place, skipped):
    place = copied(run, place)
    before = content_of(place, segment)
    run.points(3, 4)
    disk = copied(run, place, lambda inner: SyncSkippingBackend(inner, [skipped]))
    after = content_of(disk, segment)
    states = list(contents_after_cuts(disk, segment))
    assert {content for content, _ in states} > {before, after} or (before, True) in states


def test_power_cut_leaves_a_repaired_segment_or_the_damaged_one(run, segment, place):
    run.points(3)
    run.stop()
    copy = copied(run, place)
    sound = content_of(copy, segment)
    disk = run.repository.backend.settled()
    damaged = bytearray(sound)
    damaged[run.journals.read().records(segment).records[1].offset + 300] ^= 1
    disk.unlink(segment.path)
    disk.create(segment.path, bytes(damaged), sync=True)
    disk = disk.settled()
    reopened = JournaledRun(disk)
    try:
        repository = repository_of(reopened.store)
        (found,) = plan_segments(repository, [copy])
        assert replace_segment(repository, found, [copy])
        disk.note("repaired")
    finally:
        reopened.store.close()
    states = list(contents_after_cuts(disk, segment, samples=20))
    assert {content for content, _ in states} == {bytes(damaged), sound}
    assert {content for content, is_reported in states if is_reported} == {sound}
