"""Run a scenario with one call that fails, for each call that has its turn, and check what must hold afterwards."""

from __future__ import annotations

from ckstore.errors import CkstoreError
from support import crash_scenarios
from support.crash_states import CheckedStates, crash_states
from support.faults import Fault, FaultyBackend
from support.invariants import order_violations
from support.simfs import SimFS


class Run:
    """One scenario with one fault; afterwards everything promised is checked."""

    def __init__(self, prepared, scenario, fault):
        tree, self.acks = (None, []) if scenario == "first" else prepared
        self.disk = SimFS(tree)
        self.backend = FaultyBackend(self.disk, fault)
        self.new_acks: list[str] = []
        self.error = None
        try:
            crash_scenarios.SCENARIOS[scenario](self.backend, self.ack)
        except CkstoreError as error:
            self.error = error
        self.disturbed = self.backend.disturbed

    def ack(self, line):
        self.new_acks.append(line)
        self.disk.note(line)

    def check(self, *, cuts, goes_on=True):
        acks = [*self.acks, *self.new_acks]
        rules = [violation for violation in order_violations(self.disk.log) if "may" not in violation]
        assert rules == []
        states = crash_states(self.disk, seed=3, samples=0, singles_max=0, points={len(self.disk.log)}) if cuts else ()
        checked = CheckedStates()
        disks = (state.disk for state in states if checked.is_new(state)) if goes_on else (self.disk.settled(),)
        for disk in disks:
            with crash_scenarios.open_store(disk) as store:
                crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of(acks))
        if goes_on:
            crash_scenarios.check_store(self.disk.settled(), acks, level="read")


def failing_runs(prepared, scenario, numbers, points_of=list, *, for_ever=False, sites=None, is_late=False):
    """Yield a run for each errno and each call that fails with it, and last one past the last call, which is untouched.

    Args:
        prepared: A disk with a store, and the acknowledgements of its checkpoints.
        scenario: What is run.
        numbers: The errnos that calls fail with.
        points_of: Takes a list of pairs of errno and call, and returns those that have their turn.
        for_ever: Every later call fails too.
        sites: Only calls of these kinds count; None: all.
        is_late: A call is carried out before it fails.
    """
    undisturbed = Run(prepared, scenario, None)
    count = sum(sites is None or call in sites for call in undisturbed.backend.calls)
    points = points_of([(number, at) for number in numbers for at in range(1, count + 1)])
    assert points, f"no call of {scenario} was made to fail"
    for number, at in points:
        run = Run(prepared, scenario, Fault(at, number, for_ever=for_ever, sites=sites, is_late=is_late))
        assert run.disturbed, f"{scenario} made {count} calls, and fewer than {at} when it was to be disturbed"
        yield run
    last = Run(prepared, scenario, Fault(count + 1, numbers[0], for_ever=for_ever, sites=sites, is_late=is_late))
    assert not last.disturbed, f"{scenario} made {count} calls, and more when it was to be disturbed"
    assert last.error is None
    yield last


def check_each(runs, *, cuts=lambda number: True, goes_on=lambda number: True):
    """Check each run; return how many had a failing call.

    Args:
        runs: From ``failing_runs``.
        cuts: Says of an errno whether a power cut follows.
        goes_on: Says of an errno whether another commit follows.
    """
    count, failures = 0, []
    for run in runs:
        fault = run.backend.fault
        count += bool(run.disturbed)
        try:
            run.check(cuts=cuts(fault.errno), goes_on=goes_on(fault.errno))
        except Exception as error:
            failures.append(f"{fault} failed {run.disturbed[:2]}, raised {run.error!r}: {error!r}")
    assert not failures, "\n".join(failures)
    return count


def crash_points(prepared, scenario, *, every=1):
    """Return the calls at which a process may die, each ``every``-th one, by their numbers."""
    count = len(Run(prepared, scenario, None).backend.calls)
    # Making the folders of a store is hundreds of calls alike: begin shortly before it becomes one.
    return range(count - 50 if scenario == "first" else 1, count + 1, every)


def crash_then_continue_then_cut(prepared, scenario, at):
    """Let a process die at a call, another one go on, and then the power fail; return the states and the losses."""
    # Every later call fails too: for the disk that is a process that has died here, with nothing synced since.
    run = Run(prepared, scenario, Fault(at, for_ever=True, forgets=False))
    assert run.disturbed
    states, lost, checked = 0, [], CheckedStates()
    acks = [*run.acks, *run.new_acks]
    try:
        with crash_scenarios.open_store(run.disk) as store:
            crash_scenarios.commit(store, 300, 300, acks.append)
    except CkstoreError as error:
        lost.append(f"died at call {at} ({run.disturbed[0]}), the next process failed: {error!r}")
    for state in crash_states(run.disk, seed=at, samples=2, singles_max=8, points={len(run.disk.log)}):
        states += 1
        if not checked.is_new(state):
            continue
        try:
            with crash_scenarios.open_store(state.disk) as store:
                crash_scenarios.check_acknowledged(store, crash_scenarios.Acknowledged.of(acks))
        except (CkstoreError, AssertionError) as error:
            lost.append(f"died at call {at} ({run.disturbed[0]}), {state.label}: {error!r}")
    return states, lost
