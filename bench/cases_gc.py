"""The cases gc_*: time and memory of a collection, and its effect on commits."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import long_history, machine
from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench

RULES = ("--keep-last", "10", "--keep-every", "100", "--keep-within", "1d", "--keep-best", "loss:3")
BESIDE_SECONDS = 3.0
BESIDE_NBYTES = (1_000_000, 100_000_000)

PROGRAM = """
import re, sys, time
from pathlib import Path
from ckstore.cli.main import run
began = time.perf_counter()
code = run(sys.argv[1:])
# Not by getrusage: that counts what the process was forked from.
peak = int(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1]) / 1024
print(time.perf_counter() - began, peak, file=sys.stderr)
sys.exit(code)
"""
LOOP = """
import sys
from ckstore.cli.main import main
print("begun", file=sys.stderr, flush=True)
while True:
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def gc_plan(bench: Bench) -> Result:
    """Plan a collection of histories of 300 tensors each, from the command line: seconds, and MiB of the process."""
    count = 2 * bench.count
    result = Result("gc_plan", "s", is_higher_better=False, columns=("peak_mib", "manifests_mib", "inside_seconds"))
    result.setting = {"tensors": long_history.TENSORS, "rounds": bench.rounds, "rules": " ".join(RULES)}
    if bench.has_ckstore is not None:
        result.unusable["ckstore gc"] = bench.has_ckstore
        return result
    participants: dict[str, Participant] = {}
    for part in (count // 4, count // 2, count):
        place = bench.folder / f"history-{part}"
        nbytes = long_history.make(place, part)
        participants[f"{part} checkpoints"] = _planning(place, nbytes, ())
        if part == count:
            participants[f"{part} checkpoints, whole packs"] = _planning(place, nbytes, ("--repack-max", "0"))
    interleave(result, participants, bench.rounds)
    times = [result.median(f"{part} checkpoints") for part in (count // 4, count)]
    result.notes.append(f"{count} checkpoints take {times[1] / times[0]:.2f} times as long as a quarter of them")
    for part in (count // 4, count // 2, count):
        machine.remove_tree(bench.folder / f"history-{part}")
    return result


def _planning(place: Path, manifests_nbytes: int, options: tuple[str, ...]) -> Participant:
    def run() -> Sample:
        began = time.perf_counter()
        command = [sys.executable, "-c", PROGRAM, "gc", str(place), *RULES, *options, "--dry-run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:])
        inside, peak = (float(word) for word in done.stderr.split()[-2:])
        planned = json.loads(done.stdout)["plan"]
        facts: dict[str, Any] = {"peak_mib": peak, "manifests_mib": manifests_nbytes / 2**20, "inside_seconds": inside}
        facts |= {"drops": len(planned["drops"]), "moves": len(planned["moves"]), "rewrites": len(planned["rewrites"])}
        return Sample(seconds, facts)

    return run


def gc_beside(bench: Bench) -> Result:
    """Commit repeatedly, alone and while another process collects again and again."""
    sizes = BESIDE_NBYTES[:1] if bench.is_small else BESIDE_NBYTES
    result = Result("gc_beside", "ms", is_higher_better=False, columns=("p90", "mean", "commits", "dropped_meanwhile"))
    result.setting = {"checkpoints": bench.count, "seconds a sample": BESIDE_SECONDS, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    place = bench.folder / "store"
    long_history.make(place, bench.count)
    seconds = 0.3 if bench.is_small else BESIDE_SECONDS
    participants: dict[str, Participant] = {}
    for nbytes in sizes:
        for has_collector in (False, True):
            name = f"{nbytes // 10**6} MB {'beside a collection' if has_collector else 'alone'}"
            participants[name] = _committing(place, nbytes, seconds, has_collector=has_collector)
    interleave(result, participants, bench.rounds)
    for nbytes in sizes:
        size = f"{nbytes // 10**6} MB"
        result.add_ratios([f"{size} alone"], [f"{size} beside a collection"])
    result.notes.append("a ratio of alone / beside above 1: alone is faster by so much")
    machine.remove_tree(place)
    return result


def _committing(place: Path, nbytes: int, seconds: float, *, has_collector: bool) -> Participant:
    """Return a participant that commits to its own run; another process may collect meanwhile."""
    import ckstore

    counter = iter(range(10**9))
    rules = ("gc", str(place), "--run", "beside", "--keep-last", "3", "--now", "--min-age", "1s", "--json")
    values = np.random.default_rng(nbytes).standard_normal(nbytes // 4).astype(np.float32)

    def commit(store: Any) -> float:
        step = next(counter)
        # Change the values every time, outside the measured section.
        values.view(np.uint32)[:] ^= np.uint32((step + 1) * 2_654_435_761 & 0x7FFFFF)
        began = time.perf_counter()
        store.commit({"w": values}, step)
        return time.perf_counter() - began

    def run() -> Sample:
        # Remove the data of earlier participants, so that nobody pays for their garbage.
        with ckstore.open(place, run="beside") as store:
            commit(store)
        clean = [sys.executable, "-m", "ckstore", *rules]
        subprocess.run(clean, check=True, stdout=subprocess.DEVNULL, env=_environment())
        os.sync()
        with ckstore.open(place, run="beside") as store:
            commit(store)
            before = _count(place)
            collector = _collector(rules) if has_collector else None
            took: list[float] = []
            try:
                end = time.monotonic() + seconds
                while time.monotonic() < end or len(took) < 2:
                    took.append(commit(store))
                left = _count(place)
            finally:
                if collector is not None:
                    collector.kill()
                    collector.communicate()
        dropped = before + len(took) - left
        ordered = sorted(took)
        facts: dict[str, object] = {"p90": 1e3 * ordered[len(ordered) * 9 // 10], "mean": 1e3 * statistics.mean(took)}
        facts |= {"commits": len(took), "dropped_meanwhile": dropped, "seconds": took}
        return Sample(1e3 * statistics.median(took), facts)

    return run


def _count(place: Path) -> int:
    return sum(1 for _ in (place / "manifests" / "beside").iterdir())


def _collector(rules: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start a process that collects in a loop; wait until it begins."""
    command = [sys.executable, "-c", LOOP, *rules]
    collector = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment()
    )
    assert collector.stderr is not None
    collector.stderr.readline()
    return collector


CASES: dict[str, Callable[[Bench], Result]] = {"gc_plan": gc_plan, "gc_beside": gc_beside}
