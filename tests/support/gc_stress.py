"""Writers, collectors and readers in separate processes, killed and stopped at random; nothing may be lost.

    PYTHONPATH=src:tests python -m support.gc_stress --count 5000 --seed 1

Each writer has its own run and shares chunks with all others. It records acknowledgements in a file outside the store.
Two collectors work at the same time, without the lock that would separate them. The last line printed is a JSON
document of counters; the exit status is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from support import gc_stress_broken, gc_stress_check, gc_stress_roles

WRITERS, COLLECTORS, READERS = 8, 2, 2
TICK_SECONDS = 0.02
KILL_CHANCE, STOP_CHANCE = 0.04, 0.12
STOP_SECONDS_MAX = 0.8
COLLECTED = ("dropped", "packs moved", "files freed", "rescued", "manifests replaced", "blocked")
"""What collectors note, in this order."""


class Child:
    """One process; it is started again whenever it has ended."""

    def __init__(self, role, index, folder, seed):
        self.role, self.index, self.folder, self.seed = role, index, folder, seed
        self.lives = 0
        self.start()

    def start(self):
        self.lives += 1
        self.resume_at = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            # The parent's death must not leave anybody behind.
            gc_stress_roles.die_with_parent()
            rng = random.Random(f"{self.seed}:{self.role}:{self.index}:{self.lives}")
            gc_stress_roles.run(self.role, self.index, Path(self.folder), rng)

    def has_ended(self):
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        return pid != 0

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def stop(self, seconds):
        os.kill(self.pid, signal.SIGSTOP)
        self.resume_at = time.monotonic() + seconds

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)
        self.resume_at = None


class Counters(collections.Counter):
    """What happened, by name."""


def disturb(children, rng, counters):
    """Kill, stop, resume and start again, as chance has it."""
    now = time.monotonic()
    for child in children:
        if child.has_ended():
            counters["ended by themselves"] += 1
            child.start()
        elif child.resume_at is not None and child.resume_at <= now:
            child.resume()
    if rng.random() < KILL_CHANCE:
        child = rng.choice(children)
        child.kill()
        counters[f"{child.role} killed"] += 1
        child.start()
    if rng.random() < STOP_CHANCE:
        child = rng.choice(children)
        if child.resume_at is None:
            child.stop(rng.random() * STOP_SECONDS_MAX)
            counters[f"{child.role} stopped"] += 1


def acks_of(folder):
    """Return all lines that children have noted, but for a last one that is not whole."""
    lines = []
    for path in sorted((folder / "acks").iterdir()):
        content = path.read_text()
        lines += content[: content.rfind("\n") + 1].splitlines()
    return lines


def run(folder, *, count, seed, seconds_max):
    """Let all work until so many commits were acknowledged; return counters and what went wrong."""
    gc_stress_roles.prepare(folder)
    rng, counters = random.Random(seed), Counters()
    roles = [("writer", n) for n in range(WRITERS)]
    roles += [("collector", n) for n in range(COLLECTORS)] + [("reader", n) for n in range(READERS)]
    children = [Child(role, index, folder, seed) for role, index in roles]
    begun = time.monotonic()
    committed = 0
    try:
        while committed < count and time.monotonic() - begun < seconds_max:
            for _ in range(25):
                disturb(children, rng, counters)
                time.sleep(TICK_SECONDS)
            committed = sum(line.startswith("commit ") for line in acks_of(folder))
    finally:
        for child in children:
            child.kill()
    counters["commits"] = committed
    counters["lives"] = sum(child.lives for child in children)
    acks = acks_of(folder)
    for line in acks:
        verb, *facts = line.split()
        if verb == "collected":
            for name, number in zip(COLLECTED, facts, strict=True):
                counters[name] += int(number)
        if verb not in ("commit", "FAIL"):
            counters[verb] += 1
    failures = [line for line in acks if line.startswith("FAIL")]
    failures += gc_stress_check.check(folder, acks, counters)
    counters["seconds"] = round(time.monotonic() - begun)
    return counters, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="commits to be acknowledged")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without", choices=gc_stress_broken.BROKEN, help="leave a step of the protocol out: must be found"
    )
    parser.add_argument("--seconds-max", type=float, default=3600)
    parser.add_argument("--folder", type=Path, default=None, help="where; /dev/shm if there is one")
    given = parser.parse_args()
    if given.without:
        gc_stress_broken.BROKEN[given.without]()
    shm = Path("/dev/shm")
    base = given.folder or (shm if shm.is_dir() else None)
    folder = Path(tempfile.mkdtemp(prefix="ckstore-stress-", dir=base))
    try:
        counters, failures = run(folder, count=given.count, seed=given.seed, seconds_max=given.seconds_max)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for failure in failures[:20]:
        print(failure)
    print(json.dumps({"seed": given.seed, **counters, "failures": len(failures)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
