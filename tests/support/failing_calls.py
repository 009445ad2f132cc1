"""Run a scenario with one call that fails, at every call in turn, and check what must hold afterwards."""

from __future__ import annotations

from ckstore.errors import CkstoreError
from ckstore.testing.cuts import Checked, crash_states
from ckstore.testing.faults import Fault, FaultyBackend
from ckstore.testing.invariants import order_violations
from ckstore.testing.simfs import SimFS
from support import crash_scenarios


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
            with crash_scenarios.open_store(disk) as store:
                crash_scenarios.check_kept(store, crash_scenarios.Promises.of(acks))
        if goes_on:
            crash_scenarios.check_store(self.disk.settled(), acks, level="read")


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
            with crash_scenarios.open_store(run.disk) as store:
                crash_scenarios.commit(store, 300, 300, acks.append)
        except CkstoreError as error:
            lost.append(f"died at call {at} ({run.struck[0]}), the next process failed: {error!r}")
        checked = Checked()
        for state in crash_states(run.disk, seed=at, samples=2, singles_max=8, points={len(run.disk.log)}):
            states += 1
            if not checked.is_new(state):
                continue
            try:
                with crash_scenarios.open_store(state.disk) as store:
                    crash_scenarios.check_kept(store, crash_scenarios.Promises.of(acks))
            except (CkstoreError, AssertionError) as error:
                lost.append(f"died at call {at} ({run.struck[0]}), {state.label}: {error!r}")
        at += stride
