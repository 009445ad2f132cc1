"""Protects commits against I/O errors: every call in turn, once and permanently, with every errno.

A commit succeeds or raises an error of ckstore. In both cases acknowledged checkpoints stay, with and without a power
cut right afterwards, and the next commit works. Each test ends with a run in which no call fails.
"""

from __future__ import annotations

import errno
from functools import partial

import pytest

from ckstore.errors import CkstoreError
from support import crash_scenarios
from support.crash_states import crash_states
from support.failing_calls import Run, check_each, crash_points, crash_then_continue_then_cut, failing_runs
from support.faults import SYNC_SITES, WRITE_ERRNOS, Fault, FaultyBackend
from support.simfs import SimFS

THOROUGH = (errno.EIO, errno.ENOSPC)
"""The disk afterwards differs little between errnos, so one errno of each kind gets the full check."""

POINTS_MIN = {"commit": 40, "recommit": 70, "maintain": 100, "repack": 280, "read": 40}
"""Minimum number of calls of each operation; each call fails with every errno, once and permanently."""

ERRNOS = {"repack": THOROUGH}
POINTS_MIN_ALL = sum(2 * count * len(ERRNOS.get(verb, WRITE_ERRNOS)) for verb, count in POINTS_MIN.items())
assert POINTS_MIN_ALL >= 5000, "the fault programme asks for 3,000"

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def prepared():
    disk = SimFS()
    acks = crash_scenarios.prepare(disk)
    return disk.settled().base, acks


DEATHS = {"commit": 1, "recommit": 1, "maintain": 1, "repack": 7, "first": 1, "collect": 9}
"""Interval of the calls of an operation at which the process dies."""


@pytest.mark.deep(parts=8)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("scenario", POINTS_MIN)
def test_verb_with_a_failing_call_loses_nothing(prepared, sample, note, scenario, for_ever):
    errnos = ERRNOS.get(scenario, WRITE_ERRNOS)
    # A repack makes hundreds of calls; power cuts during a repack have their own test.
    thorough, cut = (THOROUGH[:1], ()) if scenario == "repack" else (THOROUGH, THOROUGH)
    runs = failing_runs(prepared, scenario, errnos, partial(sample.part, parts=8), for_ever=for_ever)
    points = check_each(runs, cuts=cut.__contains__, goes_on=thorough.__contains__)
    how = "for ever" if for_ever else "once"
    note(f"failing calls, {scenario}, {how}: {len(errnos)} errnos, {points} points; {POINTS_MIN_ALL} at least in all")
    assert points >= (POINTS_MIN[scenario] * len(errnos) if sample.is_whole else 1)


@pytest.mark.deep(parts=2)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
@pytest.mark.parametrize(("number", "for_ever"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_failed_init_can_be_repeated(prepared, sample, number, for_ever):
    runs = failing_runs(prepared, "first", [number], partial(sample.part, parts=8), for_ever=for_ever)
    assert check_each(runs, cuts=lambda number: False) > (500 if sample.is_whole else 0)


def test_link_without_answer_is_recognized_or_raises(prepared):
    sites = frozenset({"link", "rename", "rename_new"})
    assert check_each(failing_runs(prepared, "commit", [errno.EIO], sites=sites, is_late=True)) == 2


def test_failed_sync_leads_to_new_pack_or_raises(prepared):
    for run in failing_runs(prepared, "commit", [errno.EIO], sites=SYNC_SITES):
        run.check(cuts=True)
        is_pack = any(disturbed.startswith("pack.finish") for disturbed in run.disturbed)
        if is_pack:
            assert run.error is None, f"{run.disturbed}: the commit did not take a new pack"
            failed = run.disturbed[0].split()[1]
            assert failed not in {op.path for op in run.disk.log if op.kind == "sync data" and op.path == failed}
        else:
            assert run.error is None or not run.new_acks


def test_permanently_failing_sync_raises(prepared):
    for run in failing_runs(prepared, "commit", [errno.EIO], sites=SYNC_SITES, for_ever=True):
        run.check(cuts=True)
        if any(disturbed.startswith("pack.finish") for disturbed in run.disturbed):
            assert run.error is not None
            assert not run.new_acks


def test_handle_works_after_failed_commit(prepared):
    tree, acks = prepared
    for at in range(1, 400):
        disk = SimFS(tree)
        backend = FaultyBackend(disk)
        with crash_scenarios.open_store(backend) as store:
            new_acks: list[str] = []
            backend.fault = Fault(at)
            try:
                crash_scenarios.commit(store, 101, 50, new_acks.append)
            except CkstoreError:
                backend.fault = None
                crash_scenarios.commit(store, 101, 50, new_acks.append)
            backend.fault = None
            crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of([*acks, *new_acks]))
        if not backend.disturbed:
            return
    raise AssertionError("no run passed untouched")


@pytest.mark.deep(parts=len(DEATHS))
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
@pytest.mark.parametrize("scenario", DEATHS)
def test_next_process_works_after_death_at_any_call(prepared, sample, note, scenario):
    points = sample.part(crash_points(prepared, scenario, every=DEATHS[scenario]), parts=10)
    states, lost = 0, []
    for at in points:
        found, losses = crash_then_continue_then_cut(prepared, scenario, at)
        states += found
        lost += losses
    note(f"deaths and then power cuts, {scenario}: {len(points)} deaths, {states} states, {len(lost)} lost")
    assert not lost, "\n".join(lost[:20])
    assert states > len(points) > 0


def test_next_process_syncs_an_unsynced_store(prepared):
    calls = Run(prepared, "first", None).backend.calls
    # The probe links twice; the third link makes store.json, and a sync of the root follows.
    after_link = [number for number, call in enumerate(calls, start=1) if call == "link"][2] + 1
    assert calls[after_link - 1] == "sync_folder"
    run = Run(prepared, "first", Fault(after_link, for_ever=True, forgets=False))
    acks: list[str] = []
    with crash_scenarios.open_store(run.disk) as store:
        crash_scenarios.commit(store, 300, 300, acks.append)
    for state in crash_states(run.disk, seed=1, points={len(run.disk.log)}):
        with crash_scenarios.open_store(state.disk) as store:
            crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of(acks))
