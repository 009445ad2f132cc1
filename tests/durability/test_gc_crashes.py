"""Protects collections and drops against crashes at every point: SIGKILL, failing calls, power cuts.

The scenario drops by rules, rewrites a pack, undeletes a dropped checkpoint and empties the trash. Wherever it is
interrupted, acknowledged checkpoints that were not dropped restore bit for bit, dropped ones stay dropped, the next
commit works, and the next collection completes the work.
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
from support.strace_sweep import disturb_everywhere

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]

CHANGING_CALLS = (
    *("write", "pwrite64", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync", "link", "linkat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "io_uring_enter"),
)
"""Calls that change files. There are hundreds of read calls; a deep run kills at every 41st."""

READING_CALLS = ("openat", "close")

LOOKING_SITES = frozenset({"list_names", "stat"})
"""The number of these calls depends on the random names of trash folders: a pack may be in the first or the last."""

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
    """Do what the next collection does."""
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
    ("engine", "calls", "every", "disturbed_min"),
    [
        pytest.param("uring", CHANGING_CALLS, 1, 150, marks=pytest.mark.uring, id="changes-uring"),
        pytest.param("pwrite", CHANGING_CALLS, 1, 150, id="changes-pwrite"),
        pytest.param("pwrite", READING_CALLS, 41, 20, id="reads"),
    ],
)
def test_killed_collection_loses_nothing(tmp_path, sample, note, engine, calls, every, disturbed_min):
    how = {"calls": calls, "every": every, "parts": 20 if every == 1 else 8}
    tally, summary = disturb_everywhere(tmp_path, sample, "collect", engine, **how)
    note(summary)
    assert tally.disturbed >= (disturbed_min if sample.is_whole else 1)


# Power cuts


def test_collection_follows_sync_order():
    disk, _ = recorded("collect")
    assert order_violations(disk.log) == []
    notes = [op.mark for op in disk.log if op.kind == "note"]
    assert "replaced 2" in notes, "what is disturbed here must do everything when it is not"
    assert {"deleted 0", "deleted 1", "deleted 2", "undeleted 5 80 2006"} <= set(notes)


@pytest.mark.parametrize("skips", ["folder claims", "folder manifests"])
def test_collection_without_one_sync_breaks_order(skips):
    disk, _ = recorded("collect", wrap=lambda disk: SyncSkippingBackend(disk, [skips]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
def test_power_cut_in_collection_loses_nothing(sample, note):
    disk, acks = recorded("collect")
    points = sample.part(range(0, len(disk.log) + 1, 2), parts=60)
    counters, found = losses(disk, acks, samples=3, points=set(points), commit_every=8)
    note(f"simulated power cuts, collect: seed {SEED}, {len(disk.log)} steps, {in_words(counters)}")
    assert found == []
    assert counters["states"] >= (2000 if sample.is_whole else len(points)) > 0


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
def test_next_collection_works_after_power_cut(sample, note):
    disk, acks = recorded("collect")
    points = sample.part(range(0, len(disk.log) + 1, 6), parts=30)
    states, checked = 0, CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=1, singles_max=8, points=set(points)):
        states += 1
        if not checked.is_new(state):
            continue
        collect_again(state.disk)
        with crash_scenarios.open_store(state.disk) as store:
            crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of([*acks, *state.marks]))
        assert collect_again(state.disk).plan.is_empty, "what a collection leaves, the next one need not do"
    note(f"collections after simulated power cuts: seed {SEED}, {states} states, {len(checked)} different disks")
    assert states >= (100 if sample.is_whole else len(points)) > 0


# Failing calls


@pytest.mark.deep(parts=4)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_collection_with_a_failing_call_loses_nothing(prepared, sample, note, number, for_ever):
    points_of = partial(sample.part, parts=10)
    runs = failing_runs(prepared, "collect", [number], points_of, for_ever=for_ever, sites=CHANGING_SITES)
    points = check_each(runs, cuts=lambda number: False, goes_on=lambda number: number == errno.EIO)
    note(f"failing calls, collect, {errno.errorcode[number]}, for ever {for_ever}: {points} points")
    assert points >= (200 if sample.is_whole else 1)


def test_collection_with_unlistable_folder_stops(prepared):
    disturbed = []
    for at in range(1, 700, 37):
        run = Run(prepared, "collect", Fault(at, sites=LOOKING_SITES))
        run.check(cuts=False, goes_on=False)
        assert not run.disturbed or run.error is not None, "what could not be listed must not be taken for empty"
        disturbed += [at] if run.disturbed else []
    assert len(disturbed) > 3


@pytest.mark.deep
def test_next_collection_completes_a_failed_one(prepared, sample):
    sites = frozenset({"rename", "unlink", "sync_folder", "create"})
    for run in failing_runs(prepared, "collect", [errno.EIO], partial(sample.part, parts=8), sites=sites):
        report = collect_again(run.disk)
        assert report.done.stop == ""
        assert collect_again(run.disk).plan.is_empty
        with crash_scenarios.open_store(run.disk) as store:
            crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of([*run.acks, *run.new_acks]))


def test_collection_raises_ckstore_errors(prepared):
    seen = set()
    for at in (1, 300, 500, 700, 900):
        run = Run(prepared, "collect", Fault(at, for_ever=True))
        seen.add(type(run.error))
        assert run.error is None or isinstance(run.error, CkstoreError)
    assert seen - {type(None)}
