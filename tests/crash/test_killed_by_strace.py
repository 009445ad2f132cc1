"""Protects the promise of commit against SIGKILL: before every system call that changes a file or enters a ring.

A child runs a scenario under strace, which kills it at the entry of the N-th call of one kind in a thread; N rises
until a run passes untouched. Afterwards every acknowledged checkpoint must come back bit for bit, verify must find
no damage, and the next commit must work without repair.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import scenarios
from harness import ChildServer, Tally, copy_store, count_calls, run_traced

pytestmark = [pytest.mark.strace, pytest.mark.usefixtures("strace"), pytest.mark.filterwarnings("ignore")]

# In /dev/shm nothing waits for a disk; what survives SIGKILL does not depend on the file system.
FAST_FOLDER = Path("/dev/shm")
LANES = 2


@contextmanager
def fast_folder(tmp_path):
    base = FAST_FOLDER / f"ckstore-{tmp_path.name}-{time.monotonic_ns()}" if FAST_FOLDER.is_dir() else tmp_path / "fast"
    base.mkdir(mode=0o700)
    try:
        yield base
    finally:
        shutil.rmtree(base)


class Killer:
    """Kills children of one scenario and engine, and checks what they leave."""

    def __init__(self, base, scenario, engine):
        self.base, self.scenario, self.engine = base, scenario, engine
        self.template = base / f"template-{scenario}-{engine}"
        self.acks = [] if scenario == "first" else scenarios.prepare(self.template)
        self.tally = Tally()

    def run(self, server, label, *, inject=None, trace_path=None):
        """Run one child on a fresh copy; return its exit code, its folder, and all acknowledgements."""
        place = self.base / label
        if self.acks:
            copy_store(self.template, place)
        ack_path = self.base / f"{label}.acks"
        job = {"scenario": self.scenario, "place": str(place), "acks": str(ack_path), "engine": self.engine}
        code = run_traced(server, job, inject=inject, trace_path=trace_path)
        return code, place, [*self.acks, *scenarios.read_acks(ack_path)]

    def count(self, server):
        """Return how often each call is entered by one thread, in a run that nobody disturbs."""
        trace = self.base / "trace"
        code, place, _ = self.run(server, "counted", trace_path=trace)
        assert code == 0, (self.base / "counted.acks.error").read_text()
        shutil.rmtree(place)
        return count_calls(trace)

    def strike(self, server, call, number):
        """Kill a child at one point and check; return whether it was killed."""
        label = f"{self.scenario}-{self.engine}-{call}-{number}"
        code, place, acks = self.run(server, label, inject=f"{call}:signal=KILL:when={number}")
        trouble = None
        try:
            if code not in (0, -9):
                error = self.base / f"{label}.acks.error"
                trouble = f"exit code {code}: {error.read_text() if error.exists() else ''}"
            else:
                scenarios.check_store(place, acks, engine="pwrite")
        except Exception as error:
            trouble = repr(error)
        with self.tally.lock:
            self.tally.points += 1
            self.tally.killed += code == -9
            self.tally.untouched += code == 0
            self.tally.acks += len(acks) - len(self.acks)
            if trouble:
                self.tally.failures.append(f"{label}: {trouble}")
        shutil.rmtree(place, ignore_errors=True)
        return code == -9


def kill_everywhere(tmp_path, scenario, engine, *, stride=1, calls=None):
    """Kill at every call, or at every ``stride``-th; each kind ends with a run that passes untouched."""
    with fast_folder(tmp_path) as base, ThreadPoolExecutor(LANES) as lanes:
        servers = [ChildServer() for _ in range(LANES)]
        try:
            killer = Killer(base, scenario, engine)
            counts = killer.count(servers[0])
            points = [(call, n) for call, most in sorted(counts.items()) for n in range(1, most + 1, stride)]
            points = [point for point in points if calls is None or point[0] in calls]
            shares = [points[lane::LANES] for lane in range(LANES)]

            def work(lane):
                for call, number in shares[lane]:
                    killer.strike(servers[lane], call, number)

            list(lanes.map(work, range(LANES)))
            for call in {call for call, _ in points}:
                number = counts[call] + 1
                while killer.strike(servers[0], call, number):
                    number += 1
        finally:
            for server in servers:
                server.close()
    print(f"{scenario}, {engine}, calls {dict(sorted(counts.items()))}: {killer.tally}")
    assert killer.tally.failures == []
    return killer.tally


@pytest.mark.parametrize("engine", ["uring", "pwrite"])
def test_commit_killed_at_some_calls_keeps_its_promises(tmp_path, engine):
    tally = kill_everywhere(tmp_path, "commit", engine, stride=7)
    assert tally.killed >= 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["uring", "pwrite"])
@pytest.mark.parametrize("scenario", ["first", "commit", "recommit", "maintain"])
def test_every_verb_killed_at_every_call_keeps_its_promises(tmp_path, scenario, engine):
    # Making a store repeats three calls for each of 256 folders.
    tally = kill_everywhere(tmp_path, scenario, engine, stride=3 if scenario == "first" else 1)
    assert tally.killed >= 50
