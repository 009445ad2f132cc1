"""Protects collections and drops from everything that ends them: SIGKILL, failing calls, power cuts, at every point.

The scenario drops by rules, rewrites a pack, brings a dropped checkpoint back and empties the trash. Whatever ends it,
acknowledged checkpoints that were not dropped come back bit for bit, dropped ones stay dropped, the next commit works,
and the next collection finds its way.
"""

from __future__ import annotations

import errno

import pytest

from ckstore._testing import repository_of
from ckstore.errors import CkstoreError
from ckstore.keeping import Keeping
from ckstore.store.parts import Parts
from ckstore.testing.cuts import Checked, crash_states
from ckstore.testing.faults import Fault, ForgetfulBackend
from ckstore.testing.invariants import order_violations
from ckstore.testing.simfs import SimFS
from support import crash_scenarios
from support.failing_calls import Run, die_then_go_on_then_cut, fail_each_call
from support.power_cuts import SEED, in_words, losses, recorded
from support.strace_sweep import strike_everywhere

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]

CHANGING_CALLS = (
    *("write", "pwrite64", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync", "link", "linkat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "io_uring_enter"),
)
"""Calls that change files; the others only look, hundreds of times alike, and are killed now and then."""

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
        parts = Parts(repository_of(store).backend, repository_of(store).record, crash_scenarios.RUN)
        report = Keeping(parts, crash_scenarios.QUIET_POLICY).gc(min_age=0, now=True)
        assert report.done.stop == ""
        assert not any(plan.blocked for plan in report.runs)
    return report


# SIGKILL


@pytest.mark.strace
@pytest.mark.usefixtures("strace")
def test_collection_killed_at_some_calls_keeps_its_promises(tmp_path):
    tally, _ = strike_everywhere(
        tmp_path, "collect", "pwrite", stride=9, calls=("renameat2", "rename", "unlink", "fsync")
    )
    assert tally.struck >= 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.strace
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_collection_killed_at_every_changing_call_keeps_its_promises(tmp_path, tell, engine):
    tally, said = strike_everywhere(tmp_path, "collect", engine, calls=CHANGING_CALLS)
    tell(said)
    assert tally.struck >= 150


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.strace
@pytest.mark.usefixtures("strace")
def test_collection_killed_while_it_looks_keeps_its_promises(tmp_path, tell):
    tally, said = strike_everywhere(tmp_path, "collect", "pwrite", stride=41, calls=("openat", "close"))
    tell(said)
    assert tally.struck >= 20


# Power cuts


def test_collection_keeps_the_order_of_syncs():
    disk, _ = recorded("collect")
    assert order_violations(disk.log) == []
    notes = [op.mark for op in disk.log if op.kind == "note"]
    assert "replaced 2" in notes, "what is disturbed here must do everything when it is not"
    assert {"deleted 0", "deleted 1", "deleted 2", "undeleted 5 80 2006"} <= set(notes)


@pytest.mark.parametrize("skips", ["folder claims", "folder manifests"])
def test_collection_without_one_sync_breaks_the_ordering_rules(skips):
    disk, _ = recorded("collect", wrap=lambda disk: ForgetfulBackend(disk, [skips]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


@pytest.mark.parametrize(
    ("stride", "samples"), [(19, 1), pytest.param(2, 3, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.usefixtures("nothing_aside")
def test_acknowledged_checkpoints_survive_cuts_at_any_point_of_a_collection(tell, stride, samples):
    disk, acks = recorded("collect")
    points = set(range(0, len(disk.log) + 1, stride))
    counters, found = losses(disk, acks, samples=samples, points=points, commit_every=8)
    tell(f"simulated power cuts, collect: seed {SEED}, {len(disk.log)} steps, {in_words(counters)}")
    assert found == []
    assert counters["states"] >= 4000 // stride


@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize("stride", [31, pytest.param(6, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_next_collection_finds_its_way_after_a_cut_at_any_point(tell, stride):
    disk, acks = recorded("collect")
    states, checked = 0, Checked()
    for state in crash_states(
        disk, seed=SEED, samples=1, singles_max=8, points=set(range(0, len(disk.log) + 1, stride))
    ):
        states += 1
        if not checked.is_new(state):
            continue
        collect_again(state.disk)
        with crash_scenarios.open_store(state.disk) as store:
            crash_scenarios.check_kept(store, crash_scenarios.Promises.of([*acks, *state.marks]))
        assert collect_again(state.disk).plan.is_empty, "what a collection leaves, the next one need not do"
    tell(f"collections after simulated power cuts: seed {SEED}, {states} states, {len(checked)} different disks")
    assert states >= 600 // stride


# Failing calls


@pytest.mark.parametrize(
    "sites",
    [{"rename", "rename_new"}, {"unlink", "remove_folder"}, {"sync_folder"}],
    ids=lambda sites: " or ".join(sorted(sites)),
)
def test_failing_call_in_a_collection_loses_nothing(prepared, sites):
    fail_each_call(prepared, "collect", errno.EIO, sites=frozenset(sites), cuts=False, goes_on=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_failing_call_of_a_collection_loses_nothing(prepared, tell, number, for_ever):
    runs = fail_each_call(
        prepared, "collect", number, for_ever=for_ever, sites=CHANGING_SITES, cuts=False, goes_on=number == errno.EIO
    )
    tell(f"failing calls, collect, {errno.errorcode[number]}, for ever {for_ever}: {len(runs) - 1} points")
    assert len(runs) > 200


def test_failing_look_stops_a_collection_and_loses_nothing(prepared):
    for at in range(1, 700, 37):
        run = Run(prepared, "collect", Fault(at, sites=LOOKING_SITES))
        run.check(cuts=False, goes_on=False)
        assert not run.struck or run.error is not None, "what could not be listed must not be taken for empty"


def test_next_collection_finishes_what_a_failed_one_began(prepared):
    for at in range(1, 80, 3):
        run = Run(prepared, "collect", Fault(at, sites=frozenset({"rename", "unlink", "sync_folder", "create"})))
        report = collect_again(run.disk)
        assert report.done.stop == ""
        assert collect_again(run.disk).plan.is_empty
        with crash_scenarios.open_store(run.disk) as store:
            crash_scenarios.check_kept(store, crash_scenarios.Promises.of([*run.acks, *run.new_acks]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
def test_what_a_dead_collector_left_unsynced_costs_the_next_process_nothing(prepared, tell):
    points, states, lost = die_then_go_on_then_cut(prepared, "collect", stride=9)
    tell(f"deaths and then power cuts, collect: {points} deaths, {states} states, {len(lost)} lost")
    assert not lost, "\n".join(lost[:20])


def test_error_of_a_collection_is_one_of_ckstore(prepared):
    seen = set()
    for at in (1, 300, 500, 700, 900):
        run = Run(prepared, "collect", Fault(at, for_ever=True))
        seen.add(type(run.error))
        assert run.error is None or isinstance(run.error, CkstoreError)
    assert seen - {type(None)}
