"""The cases gc_*: what a collection costs in time and memory, and what it costs a commit beside it."""

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
COMMITS_A_ROUND = 15

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
    """Commit 1 MB again and again, alone and beside a collection that begins anew whenever it has ended."""
    result = Result("gc_beside", "ms", is_higher_better=False)
    result.setting = {"checkpoints": bench.count, "commits a round": COMMITS_A_ROUND, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    place = bench.folder / "store"
    long_history.make(place, bench.count)
    beside = ("gc", str(place), "--run", "beside", "--keep-last", "3", "--now", "--min-age", "1s")
    participants = {"alone": _committing(place, None), "beside a collection": _committing(place, beside)}
    interleave(result, participants, bench.rounds)
    result.add_ratios(["alone"], ["beside a collection"])
    result.notes.append("a ratio of alone / beside above 1: alone is faster by so much")
    machine.remove_tree(place)
    return result


def _committing(place: Path, beside: tuple[str, ...] | None) -> Participant:
    """Return what commits to a run of its own while a process of its own does something else."""
    import ckstore

    counter = iter(range(10**9))

    def run() -> Sample:
        other = None
        if beside is not None:
            command = [sys.executable, "-c", LOOP, *beside, "--json"]
            other = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment()
            )
            assert other.stderr is not None
            other.stderr.readline()
        try:
            with ckstore.open(place, run="beside") as store:
                seconds = [_commit(store, next(counter)) for _ in range(COMMITS_A_ROUND)]
        finally:
            if other is not None:
                other.kill()
                other.communicate()
        return Sample(1e3 * statistics.median(seconds[1:]), {"seconds": seconds})

    return run


def _commit(store: Any, step: int) -> float:
    state = {"w": np.random.default_rng(step).standard_normal(250_000).astype(np.float32)}
    began = time.perf_counter()
    store.commit(state, step)
    return time.perf_counter() - began


CASES: dict[str, Callable[[Bench], Result]] = {"gc_plan": gc_plan, "gc_beside": gc_beside}
