"""Protects commits from media that fail: every call in turn, once and for ever, with every errno of the programme.

A commit succeeds or raises an error of ckstore; in either case what was acknowledged stays, with and without a
power cut right afterwards, and the next commit works. The loops end only when a run passes untouched.
"""

from __future__ import annotations

import errno

import pytest
import scenarios

from ckstore.errors import CkstoreError
from ckstore.testing.cuts import Checked, crash_states
from ckstore.testing.faults import SYNC_SITES, WRITE_ERRNOS, Fault, FaultyBackend
from ckstore.testing.invariants import order_violations
from ckstore.testing.simfs import SimFS

THOROUGH = (errno.EIO, errno.ENOSPC)
"""What is on the disk afterwards differs little between errnos: one of each kind is looked at from all sides."""

POINTS_MIN = {"commit": 40, "recommit": 70, "maintain": 100, "repack": 280, "read": 40}
"""How many calls each verb makes at least; each is failed with every errno, once and for ever."""

ERRNOS = {"repack": THOROUGH}
POINTS_MIN_ALL = sum(2 * count * len(ERRNOS.get(verb, WRITE_ERRNOS)) for verb, count in POINTS_MIN.items())
assert POINTS_MIN_ALL >= 5000, "the fault programme asks for 3,000"

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def prepared():
    disk = SimFS()
    acks = scenarios.prepare(disk)
    return disk.settled().base, acks


class Run:
    """One scenario with one fault; afterwards everything promised is checked."""

    def __init__(self, prepared, scenario, fault):
        tree, self.acks = (None, []) if scenario == "first" else prepared
        self.disk = SimFS(tree)
        self.backend = FaultyBackend(self.disk, fault)
        self.new_acks: list[str] = []
        self.error = None
        try:
            scenarios.SCENARIOS[scenario](self.backend, self.ack)
        except CkstoreError as error:
            self.error = error
        self.struck = self.backend.struck

    def ack(self, line):
        self.new_acks.append(line)
        self.disk.note(line)

    def check(self, *, cuts, goes_on=True):
        acks = [*self.acks, *self.new_acks]
        rules = [violation for violation in order_violations(self.disk.log) if "may" not in violation]
        assert rules == []
        states = crash_states(self.disk, seed=3, samples=0, singles_max=0, points={len(self.disk.log)}) if cuts else ()
        checked = Checked()
        disks = (state.disk for state in states if checked.is_new(state)) if goes_on else (self.disk.settled(),)
        for disk in disks:
            with scenarios.open_store(disk) as store:
                scenarios.check_kept(store, scenarios.Promises.of(acks))
        if goes_on:
            scenarios.check_store(self.disk.settled(), acks, level="read")


def fail_each_call(prepared, scenario, number, *, for_ever=False, sites=None, is_late=False, cuts=True, goes_on=True):
    """Fail the first call, then the second, ... until a run passes untouched; return the runs.

    As many must have been struck as calls are made when nothing fails.
    """
    runs, failures = [], []
    undisturbed = Run(prepared, scenario, None)
    count = sum(sites is None or call in sites for call in undisturbed.backend.calls)
    while not runs or runs[-1].struck:
        fault = Fault(len(runs) + 1, number, for_ever=for_ever, sites=sites, is_late=is_late)
        run = Run(prepared, scenario, fault)
        runs.append(run)
        try:
            run.check(cuts=cuts, goes_on=goes_on)
            if not run.struck:
                assert run.error is None
        except Exception as error:
            failures.append(f"{fault} struck {run.struck[:2]}, raised {run.error!r}: {error!r}")
    assert not failures, "\n".join(failures)
    assert len(runs) - 1 == count, f"{len(runs) - 1} points for {count} calls"
    return runs


@pytest.mark.parametrize(("number", "for_ever"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_failing_call_in_a_commit_loses_nothing(prepared, number, for_ever):
    runs = fail_each_call(prepared, "commit", number, for_ever=for_ever, cuts=False)
    assert len(runs) > 20


def test_lost_answer_of_a_link_is_recognized_or_loud(prepared):
    fail_each_call(prepared, "commit", errno.EIO, sites=frozenset({"link", "rename", "rename_new"}), is_late=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize("scenario", POINTS_MIN)
def test_every_failing_call_of_every_verb_loses_nothing(prepared, tell, scenario, for_ever):
    points, errnos = 0, ERRNOS.get(scenario, WRITE_ERRNOS)
    for number in errnos:
        # A repack makes hundreds of calls; power cuts during one have a programme of their own.
        is_thorough = number in THOROUGH[:1] if scenario == "repack" else number in THOROUGH
        cuts = is_thorough and scenario != "repack"
        runs = fail_each_call(prepared, scenario, number, for_ever=for_ever, cuts=cuts, goes_on=is_thorough)
        points += len(runs) - 1
    how = "for ever" if for_ever else "once"
    tell(f"failing calls, {scenario}, {how}: {len(errnos)} errnos, {points} points; {POINTS_MIN_ALL} at least in all")
    assert points >= POINTS_MIN[scenario] * len(errnos)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nothing_aside")
@pytest.mark.parametrize(("number", "for_ever"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_every_failing_call_of_making_a_store_leaves_one_that_can_be_made(prepared, number, for_ever):
    fail_each_call(prepared, "first", number, for_ever=for_ever, cuts=False)


def test_sync_that_fails_once_leads_to_a_new_pack_or_is_loud(prepared):
    for run in fail_each_call(prepared, "commit", errno.EIO, sites=SYNC_SITES):
        is_pack = any(struck.startswith("pack.finish") for struck in run.struck)
        if is_pack:
            assert run.error is None, f"{run.struck}: the commit did not take a new pack"
            failed = run.struck[0].split()[1]
            assert failed not in {op.path for op in run.disk.log if op.kind == "sync data" and op.path == failed}
        else:
            assert run.error is None or not run.new_acks


def test_syncs_that_fail_for_ever_are_loud(prepared):
    for run in fail_each_call(prepared, "commit", errno.EIO, sites=SYNC_SITES, for_ever=True):
        if any(struck.startswith("pack.finish") for struck in run.struck):
            assert run.error is not None
            assert not run.new_acks


def test_handle_commits_again_after_a_failed_commit(prepared):
    tree, acks = prepared
    for at in range(1, 400):
        disk = SimFS(tree)
        backend = FaultyBackend(disk)
        with scenarios.open_store(backend) as store:
            new_acks: list[str] = []
            backend.fault = Fault(at)
            try:
                scenarios.commit(store, 101, 50, new_acks.append)
            except CkstoreError:
                backend.fault = None
                scenarios.commit(store, 101, 50, new_acks.append)
            backend.fault = None
            scenarios.check_kept(store, scenarios.Promises.of([*acks, *new_acks]))
        if not backend.struck:
            return
    raise AssertionError("no run passed untouched")


def die_then_go_on_then_cut(prepared, scenario, *, stride=1):
    """Let a process die at each call, another one go on, and then the power fail; return points and losses."""
    # Making the folders of a store is hundreds of calls alike: begin shortly before it becomes one.
    at = len(Run(prepared, scenario, None).backend.calls) - 50 if scenario == "first" else 1
    first, states, lost = at, 0, []
    while True:
        # Every later call fails too: for the disk that is a process that has died here, with nothing synced since.
        run = Run(prepared, scenario, Fault(at, for_ever=True, forgets=False))
        if not run.struck:
            return (at - first) // stride, states, lost
        acks = [*run.acks, *run.new_acks]
        try:
            with scenarios.open_store(run.disk) as store:
                scenarios.commit(store, 300, 300, acks.append)
        except CkstoreError as error:
            lost.append(f"died at call {at} ({run.struck[0]}), the next process failed: {error!r}")
        checked = Checked()
        for state in crash_states(run.disk, seed=at, samples=2, singles_max=8, points={len(run.disk.log)}):
            states += 1
            if not checked.is_new(state):
                continue
            try:
                with scenarios.open_store(state.disk) as store:
                    scenarios.check_kept(store, scenarios.Promises.of(acks))
            except (CkstoreError, AssertionError) as error:
                lost.append(f"died at call {at} ({run.struck[0]}), {state.label}: {error!r}")
        at += stride


@pytest.mark.parametrize(
    ("scenario", "stride"),
    [
        ("commit", 3),
        pytest.param("commit", 1, marks=pytest.mark.slow),
        pytest.param("recommit", 1, marks=pytest.mark.slow),
        pytest.param("maintain", 1, marks=pytest.mark.slow),
        pytest.param("repack", 7, marks=pytest.mark.slow),
        ("first", 4),
        pytest.param("first", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("nothing_aside")
def test_what_a_dead_process_left_unsynced_costs_the_next_one_nothing(prepared, tell, scenario, stride):
    points, states, lost = die_then_go_on_then_cut(prepared, scenario, stride=stride)
    tell(f"deaths and then power cuts, {scenario}: {points} deaths, {states} states, {len(lost)} lost")
    assert not lost, "\n".join(lost[:20])


def test_store_that_a_dead_process_did_not_sync_is_made_durable_by_the_next(prepared):
    calls = Run(prepared, "first", None).backend.calls
    # The probe links twice; the third link makes store.json, and a sync of the root follows.
    after_link = [number for number, call in enumerate(calls, start=1) if call == "link"][2] + 1
    assert calls[after_link - 1] == "sync_folder"
    run = Run(prepared, "first", Fault(after_link, for_ever=True, forgets=False))
    acks: list[str] = []
    with scenarios.open_store(run.disk) as store:
        scenarios.commit(store, 300, 300, acks.append)
    for state in crash_states(run.disk, seed=1, points={len(run.disk.log)}):
        with scenarios.open_store(state.disk) as store:
            scenarios.check_kept(store, scenarios.Promises.of(acks))
