"""Run a scenario once for each system call that has its turn, and kill the process or fail the call there."""

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


class StraceRunner:
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

    def disturb(self, server, call, number, fault):
        """Disturb a child at one point and check; return whether it made so many calls."""
        label = f"{self.scenario}-{self.engine}-{call}-{number}"
        trace = self.base / f"{label}.trace"
        code, place, acks = self.run(server, label, inject=f"{call}:{fault}:when={number}", trace_path=trace)
        is_disturbed = code == -9 or "(INJECTED)" in trace.read_text(errors="replace")
        trace.unlink()
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
            self.tally.disturbed += is_disturbed
            self.tally.untouched += not is_disturbed
            self.tally.acks += len(acks) - len(self.acks)
            if trouble:
                self.tally.failures.append(f"{label}: {trouble}")
        shutil.rmtree(place, ignore_errors=True)
        return is_disturbed

    def disturb_until_unreached(self, server, call, number, fault):
        """Disturb children at this point and later ones until one makes fewer calls."""
        while self.disturb(server, call, number, fault):
            number += 1


def disturb_everywhere(tmp_path, sample, scenario, engine, *, parts, fault="signal=KILL", every=1, calls=None):
    """Kill or fail a child at each point that has its turn; return the tally, and what was done in words.

    The points are the calls that an undisturbed child makes, and for each kind of call one more, which no child
    reaches.

    Args:
        tmp_path: Where to work, if there is no memory to work in.
        sample: Which points have their turn.
        scenario: What the child does.
        engine: What moves packs.
        parts: Into how many parts the points are divided in ``make test``.
        fault: What strace injects.
        every: Only each ``every``-th call of a kind counts.
        calls: Only calls of these kinds count; None: of all.
    """
    with fast_folder(tmp_path) as base, ThreadPoolExecutor(LANES) as lanes:
        servers = [ChildServer() for _ in range(LANES)]
        try:
            runner = StraceRunner(base, scenario, engine)
            most = {call: n for call, n in runner.count(servers[0]).items() if calls is None or call in calls}
            points = sample.part(
                [(call, n) for call in sorted(most) for n in (*range(1, most[call] + 1, every), most[call] + 1)],
                parts=parts,
            )

            def work(lane):
                for call, number in points[lane::LANES]:
                    disturb = runner.disturb if number <= most[call] else runner.disturb_until_unreached
                    disturb(servers[lane], call, number, fault)

            reachable = sum(number <= most[call] for call, number in points)

            list(lanes.map(work, range(LANES)))
        finally:
            for server in servers:
                server.close()
    assert not runner.tally.failures, "\n".join(runner.tally.failures)
    # Threads take turns by chance: a child may make fewer calls than the one that was counted.
    assert runner.tally.disturbed > reachable // 2 or reachable < 4
    made = sum(most.values())
    assert not sample.is_whole or every > 1 or runner.tally.points > made, f"{runner.tally} for {made} calls"
    return runner.tally, f"strace, {scenario}, {engine}, {fault}: {made} calls, {runner.tally}"
