"""Protects collections and drops from everything that ends them: SIGKILL, failing calls, power cuts, at every point.

The scenario drops by rules, rewrites a pack, brings a dropped checkpoint back and empties the trash. Whatever ends it,
acknowledged checkpoints that were not dropped come back bit for bit, dropped ones stay dropped, the next commit works,
and the next collection finds its way.
"""

from __future__ import annotations

import errno
from functools import partial

import pytest

from ckstore._testing import repository_of
from ckstore.api import Store
from ckstore.errors import CkstoreError
from ckstore.store.repository import Repository
from support import crash_scenarios
from support.crash_states import CheckedStates, crash_states
from support.failing_calls import Run, check_each, failing_runs
from support.faults import Fault, SyncSkippingBackend
from support.invariants import order_violations
from support.power_cuts import SEED, in_words, losses, recorded
from support.simfs import SimFS
from support.strace_sweep import strike_everywhere

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]

CHANGING_CALLS = (
    *("write", "pwrite64", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync", "link", "linkat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "io_uring_enter"),
)
"""Calls that change files. The others only read, hundreds of times alike: each 41st is killed in a deep run."""

READING_CALLS = ("openat", "close")

LOOKING_SITES = frozenset({"list_names", "stat"})
"""How often these are called depends on the random names of trash folders: a pack may lie in the first or the last."""

CHANGING_SITES = frozenset(
    {"create", "create sync", "link", "rename", "rename_new", "unlink", "remove_folder", "make_folder", "sync_file"}
    | {"sync_folder", "create_pack", "pack.write", "pack.finish", "read_bytes", "read_head", "read_ranges", "open_read"}
)


@pytest.fixture(scope="module")
def prepared():
    disk = SimFS()
    acks = crash_scenarios.prepare(disk)
    return disk.settled().base, acks


def collect_again(disk):
    """Do as the next collection does, whatever the one before has left."""
    with crash_scenarios.open_store(disk) as store:
        repository = Repository(repository_of(store).backend, repository_of(store).record, crash_scenarios.RUN)
        report = Store(repository, crash_scenarios.QUIET_POLICY).gc(min_age=0, now=True)
        assert report.done.stop == ""
        assert not any(plan.blocked for plan in report.runs)
    return report


# SIGKILL


@pytest.mark.deep(parts=3)
@pytest.mark.timeout(1200)
@pytest.mark.strace
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(
    ("engine", "calls", "every", "struck_min"),
    [
        pytest.param("uring", CHANGING_CALLS, 1, 150, marks=pytest.mark.uring, id="changes-uring"),
        pytest.param("pwrite", CHANGING_CALLS, 1, 150, id="changes-pwrite"),
        pytest.param("pwrite", READING_CALLS, 41, 20, id="reads"),
    ],
)
def test_collection_killed_at_any_call_keeps_its_promises(tmp_path, sample, note, engine, calls, every, struck_min):
    tally, said = strike_everywhere(tmp_path, sample, "collect", engine, calls=calls, every=every, parts=8)
    note(said)
    assert tally.struck >= (struck_min if sample.is_whole else 1)


# Power cuts


def test_collection_keeps_the_order_of_syncs():
    disk, _ = recorded("collect")
    assert order_violations(disk.log) == []
    notes = [op.mark for op in disk.log if op.kind == "note"]
    assert "replaced 2" in notes, "what is disturbed here must do everything when it is not"
    assert {"deleted 0", "deleted 1", "deleted 2", "undeleted 5 80 2006"} <= set(notes)


@pytest.mark.parametrize("skips", ["folder claims", "folder manifests"])
def test_collection_without_one_sync_breaks_the_ordering_rules(skips):
    disk, _ = recorded("collect", wrap=lambda disk: SyncSkippingBackend(disk, [skips]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
def test_acknowledged_checkpoints_survive_cuts_at_any_point_of_a_collection(sample, note):
    disk, acks = recorded("collect")
    points = sample.part(range(0, len(disk.log) + 1, 2), parts=20)
    counters, found = losses(disk, acks, samples=3, points=set(points), commit_every=8)
    note(f"simulated power cuts, collect: seed {SEED}, {len(disk.log)} steps, {in_words(counters)}")
    assert found == []
    assert counters["states"] >= (2000 if sample.is_whole else len(points)) > 0


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
def test_next_collection_finds_its_way_after_a_cut_at_any_point(sample, note):
    disk, acks = recorded("collect")
    points = sample.part(range(0, len(disk.log) + 1, 6), parts=10)
    states, checked = 0, CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=1, singles_max=8, points=set(points)):
        states += 1
        if not checked.is_new(state):
            continue
        collect_again(state.disk)
        with crash_scenarios.open_store(state.disk) as store:
            crash_scenarios.check_kept(store, crash_scenarios.Promises.of([*acks, *state.marks]))
        assert collect_again(state.disk).plan.is_empty, "what a collection leaves, the next one need not do"
    note(f"collections after simulated power cuts: seed {SEED}, {states} states, {len(checked)} different disks")
    assert states >= (100 if sample.is_whole else len(points)) > 0


# Failing calls


@pytest.mark.deep(parts=4)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_collection_with_a_failing_call_loses_nothing(prepared, sample, note, number, for_ever):
    points_of = partial(sample.part, parts=10)
    runs = failing_runs(prepared, "collect", [number], points_of, for_ever=for_ever, sites=CHANGING_SITES)
    points = check_each(runs, cuts=lambda number: False, goes_on=lambda number: number == errno.EIO)
    note(f"failing calls, collect, {errno.errorcode[number]}, for ever {for_ever}: {points} points")
    assert points >= (200 if sample.is_whole else 1)


def test_collection_that_cannot_list_a_folder_stops_and_loses_nothing(prepared):
    struck = []
    for at in range(1, 700, 37):
        run = Run(prepared, "collect", Fault(at, sites=LOOKING_SITES))
        run.check(cuts=False, goes_on=False)
        assert not run.struck or run.error is not None, "what could not be listed must not be taken for empty"
        struck += [at] if run.struck else []
    assert len(struck) > 3


@pytest.mark.deep
def test_next_collection_finishes_what_a_failed_one_began(prepared, sample):
    sites = frozenset({"rename", "unlink", "sync_folder", "create"})
    for run in failing_runs(prepared, "collect", [errno.EIO], partial(sample.part, parts=8), sites=sites):
        report = collect_again(run.disk)
        assert report.done.stop == ""
        assert collect_again(run.disk).plan.is_empty
        with crash_scenarios.open_store(run.disk) as store:
            crash_scenarios.check_kept(store, crash_scenarios.Promises.of([*run.acks, *run.new_acks]))


def test_error_of_a_collection_is_one_of_ckstore(prepared):
    seen = set()
    for at in (1, 300, 500, 700, 900):
        run = Run(prepared, "collect", Fault(at, for_ever=True))
        seen.add(type(run.error))
        assert run.error is None or isinstance(run.error, CkstoreError)
    assert seen - {type(None)}
