"""Record a scenario on a simulated disk, and check every state that a power cut could leave."""

from __future__ import annotations

from collections import Counter

from ckstore.errors import CkstoreError
from support import crash_scenarios
from support.crash_states import CheckedStates, crash_states
from support.invariants import order_violations
from support.simfs import SimFS

SEED = 20260


def recorded(scenario, *, wrap=lambda disk: disk, from_scratch=False):
    """Run a scenario on a fresh disk; return the disk with its record and the acknowledgements before it."""
    disk = SimFS()
    acks = [] if from_scratch else crash_scenarios.prepare(disk)
    disk = disk.settled()
    crash_scenarios.SCENARIOS[scenario](wrap(disk), disk.note)
    return disk, acks


def losses(disk, acks, *, samples, points=None, singles_max=64, stop_at=None, commit_every=4):
    """Check every state, those that nobody can tell apart once; return counters and what was lost, one line each."""
    counters, found, checked = Counter(), [], CheckedStates()
    states = crash_states(disk, seed=SEED, samples=samples, points=points, singles_max=singles_max)
    for number, state in enumerate(states):
        counters["states"] += 1
        goes_on = number % commit_every == 0
        if not checked.is_new(state, level=goes_on):
            continue
        counters["disks"] = len(checked)
        try:
            check_state(state.disk, [*acks, *state.marks], goes_on=goes_on)
        except (CkstoreError, AssertionError) as error:
            found.append(f"cut after {state.point} of {len(disk.log)} steps, {state.label}: {error!r}")
            if stop_at is not None and len(found) >= stop_at:
                break
    return counters, found


def in_words(counters):
    return f"{counters['states']} states, {counters['disks']} different disks"


def check_state(disk, acks, *, goes_on):
    acknowledged = crash_scenarios.Acknowledged.of(acks)
    with crash_scenarios.open_store(disk) as store:
        crash_scenarios.check_acknowledged(store, acknowledged)
        if goes_on:
            crash_scenarios.check_next_commit(store, acknowledged)
    if goes_on:
        assert order_violations(disk.log) == []
