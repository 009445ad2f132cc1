"""Run a scenario once for every system call it makes, and kill it or fail it there."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support import crash_scenarios
from support.strace_harness import ChildServer, Tally, copy_store, count_calls, run_traced

# In /dev/shm nothing waits for a disk; what survives SIGKILL does not depend on the file system.
FAST_FOLDER = Path("/dev/shm")
# The workers of pytest-xdist are lanes already.
LANES = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


@contextmanager
def fast_folder(tmp_path):
    base = FAST_FOLDER / f"ckstore-{tmp_path.name}-{time.monotonic_ns()}" if FAST_FOLDER.is_dir() else tmp_path / "fast"
    base.mkdir(mode=0o700)
    try:
        yield base
    finally:
        shutil.rmtree(base)


class Striker:
    """Disturbs children of one scenario and engine, and checks what they leave."""

    def __init__(self, base, scenario, engine):
        self.base, self.scenario, self.engine = base, scenario, engine
        self.template = base / f"template-{scenario}-{engine}"
        # "first" commits into a store that has been made, which takes a call or two for each of 256 folders.
        count = {"init": None, "first": 0}.get(scenario, 2)
        self.acks = [] if count is None else crash_scenarios.prepare(self.template, count)
        self.tally = Tally()

    def run(self, server, label, *, inject=None, trace_path=None):
        """Run one child on a fresh copy; return its exit code, its folder, and all acknowledgements."""
        place = self.base / label
        if self.template.exists():
            copy_store(self.template, place)
        ack_path = self.base / f"{label}.acks"
        job = {"scenario": self.scenario, "place": str(place), "acks": str(ack_path), "engine": self.engine}
        code = run_traced(server, job, inject=inject, trace_path=trace_path)
        return code, place, [*self.acks, *crash_scenarios.read_acks(ack_path)]

    def count(self, server):
        """Return how often each call is entered by one thread, in a run that nobody disturbs."""
        trace = self.base / "trace"
        code, place, _ = self.run(server, "counted", trace_path=trace)
        assert code == 0, (self.base / "counted.acks.error").read_text()
        shutil.rmtree(place)
        return count_calls(trace)

    def strike(self, server, call, number, fault):
        """Disturb a child at one point and check; return whether it ended by that."""
        label = f"{self.scenario}-{self.engine}-{call}-{number}"
        code, place, acks = self.run(server, label, inject=f"{call}:{fault}:when={number}")
        error = self.base / f"{label}.acks.error"
        text = error.read_text() if error.exists() else ""
        try:
            # A disturbed child may die of the signal, or raise an error of ckstore and nothing else.
            is_loud = code == 3 and fault.startswith("error") and "\nckstore.errors." in text
            assert code in (0, -9) or is_loud, f"exit code {code}: {text}"
            crash_scenarios.check_store(place, acks, engine="pwrite")
            trouble = None
        except Exception as error:
            trouble = repr(error)
        with self.tally.lock:
            self.tally.points += 1
            self.tally.struck += code != 0
            self.tally.untouched += code == 0
            self.tally.acks += len(acks) - len(self.acks)
            if trouble:
                self.tally.failures.append(f"{label}: {trouble}")
        shutil.rmtree(place, ignore_errors=True)
        return code != 0


def strike_everywhere(tmp_path, scenario, engine, *, fault="signal=KILL", stride=1, calls=None):
    """Kill or fail every call, or every ``stride``-th; each kind ends with a run that passes untouched.

    Returns the tally, and what was done in words.
    """
    with fast_folder(tmp_path) as base, ThreadPoolExecutor(LANES) as lanes:
        servers = [ChildServer() for _ in range(LANES)]
        try:
            striker = Striker(base, scenario, engine)
            counts = striker.count(servers[0])
            points = [(call, n) for call, most in sorted(counts.items()) for n in range(1, most + 1, stride)]
            points = [point for point in points if calls is None or point[0] in calls]
            shares = [points[lane::LANES] for lane in range(LANES)]

            def work(lane):
                for call, number in shares[lane]:
                    striker.strike(servers[lane], call, number, fault)

            list(lanes.map(work, range(LANES)))
            for call in {call for call, _ in points}:
                number = counts[call] + 1
                while striker.strike(servers[0], call, number, fault):
                    number += 1
        finally:
            for server in servers:
                server.close()
    assert not striker.tally.failures, "\n".join(striker.tally.failures)
    made = sum(count for call, count in counts.items() if calls is None or call in calls)
    assert stride > 1 or striker.tally.points > made, f"{striker.tally.points} points for {made} calls"
    return striker.tally, f"strace, {scenario}, {engine}, {fault}: {made} calls, {striker.tally}"
