"""Jobs of many ranks in which one process is killed or stopped at one step of a commit, and what they leave.

``python -m support.killed_ranks LANES`` reads one JSON ``Point`` per line and prints one JSON result per line, in the
order of their ends. ckstore is imported once; trainers and savers are forks, so a job takes about a second. Trainers
and savers run the real code over real sockets. The hooks are wrappers around its functions, put there in the children.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import ckstore
from ckstore.errors import CkstoreError
from support.rank_processes import ANSWER_SECONDS, COMMITS, WORLD, Job, in_child, state_of

TRAINER_STEPS = ("submit", "submitted", "staged", "promised")
"""Steps of a trainer that commits in the background."""

RANK_STEPS = ("call", "begin", "begun", "content", "write", "packing", "flushing", "packed", "sent", "end")
"""Steps of every rank: of its trainer, or of its saver if it commits in the background."""

ROOT_STEPS = (
    *("plan", "planned", "merge", "merged"),
    *("publish", "claimed", "drafted", "linked", "synced", "rescued", "acknowledge"),
)
"""Steps of rank 0 for all ranks."""


@dataclass(frozen=True)
class Point:
    """What is done to a job.

    Args:
        step: When: the step of the commit.
        by: The process that reaches the step: ``trainer 0``, ``saver 2``.
        victims: The processes that are disturbed.
        signal: ``SIGKILL`` or ``SIGSTOP``.
        is_async: Whether the job commits in the background.
        seed: Decides in which commit, how long after the step, and what becomes of a stopped process.
        fault: A protection that is taken away: ``removes packs`` or ``forgets promises``. Empty: none.
        is_as_shipped: Whether the job has the times of a user's job. Else they are shorter.
    """

    step: str
    by: str
    victims: tuple[str, ...]
    signal: str
    is_async: bool
    seed: int
    fault: str = ""
    is_as_shipped: bool = False

    @property
    def occurrence(self):
        """Which time the step is reached. A content is sent for the first commit only."""
        return 1 if self.step == "content" else 1 + self.seed % COMMITS

    @property
    def delay(self):
        """Seconds from the step to the signal."""
        mean = 0.1 if self.step == "submit" else 0.01
        is_immediate = self.seed < COMMITS or self.step == "promised"
        return 0.0 if is_immediate else random.Random(repr(self)).expovariate(1 / mean)

    @property
    def is_continued(self):
        """Whether a stopped process goes on later. Else it is killed."""
        return self.seed // COMMITS % 2 == 0


def points_of(seeds):
    """Return all points, for these seeds."""
    found = []
    for seed, name in itertools.product(seeds, ("SIGKILL", "SIGSTOP")):
        for rank in range(WORLD):
            trainer, saver = f"trainer {rank}", f"saver {rank}"
            for step in (*RANK_STEPS, *ROOT_STEPS):
                by = 0 if step in ROOT_STEPS else rank
                found.append(Point(step, f"trainer {by}", (trainer,), name, False, seed))
                found += [Point(step, f"saver {by}", (victim,), name, True, seed) for victim in (trainer, saver)]
            for step in TRAINER_STEPS:
                found += [Point(step, trainer, (victim,), name, True, seed) for victim in (trainer, saver)]
    return found


def points_as_shipped():
    """Return a few points of jobs with the times of a user's job: one of each kind that others wait for."""
    found = []
    for rank, step in ((0, "begin"), (2, "begin"), (0, "packed"), (2, "sent"), (1, "submit")):
        trainer, saver = f"trainer {rank}", f"saver {rank}"
        by = trainer if step in TRAINER_STEPS else saver
        found += [Point(step, by, (victim,), "SIGSTOP", True, 0, "", True) for victim in (trainer, saver)]
    found += [
        Point("submit", "trainer 1", (victim,), "SIGKILL", True, 0, "", True) for victim in ("trainer 1", "saver 1")
    ]
    found += [Point("write", f"trainer {rank}", (f"trainer {rank}",), "SIGSTOP", False, 0, "", True) for rank in (0, 3)]
    return found


TRAINERS = tuple(f"trainer {rank}" for rank in range(WORLD))


def promised_points(count, fault=""):
    """Return points at which all trainers are killed as soon as one of them is promised its checkpoint."""
    return [Point("promised", TRAINERS[seed % WORLD], TRAINERS, "SIGKILL", True, seed, fault) for seed in range(count)]


def random_points(seeds):
    """Return points at which all trainers are killed at a random moment after one of them begins a commit."""
    return [Point("submit", TRAINERS[seed % WORLD], TRAINERS, "SIGKILL", True, seed) for seed in seeds]


def difference(found, step, ranks):
    """Say how a restored checkpoint differs from the one that was committed; None: it does not."""
    states = [state_of(rank, step) for rank in range(ranks)]
    if found["step"] != step or not np.array_equal(found["weights"], states[0]["weights"]):
        return f"step {step} has other values"
    if ranks == 1:
        # What only one rank has is no value of a rank.
        found = {name: {0: found[name]} for name in ("rank", "own")}
    for rank, state in enumerate(states):
        if found["rank"][rank] != rank or not np.array_equal(found["own"][rank], state["own"]):
            return f"step {step} has other values on rank {rank}"
    return None


def check_store(place, worlds, wanted):
    """Return what is wrong with a store.

    Args:
        place: The store.
        worlds: Number of ranks by step.
        wanted: Checkpoints that must be there: by step their seq, or None if it is not known.
    """
    problems = []
    with ckstore.open(place, create=False) as store:
        report = store.verify(level="decode")
        problems += [f"verify: {error}" for error in report.damage]
        infos = {info.step: info for info in store.log()}
        for step in infos:
            try:
                found = difference(store.restore(step), step, worlds[step])
            except CkstoreError as error:
                found = f"restore: {error}"
            problems += [found] if found else []
        for step, seq in wanted.items():
            if step not in infos or (seq is not None and infos[step].seq != seq):
                problems.append(f"step {step} (seq {seq}) is not there: {sorted(infos)}")
    return problems


def check_garbage(place):
    """Collect what no manifest names, and return what is left of it."""
    with ckstore.open(place, create=False) as store:
        store.gc(now=True, min_age=0)
        named = {pack.hex() for info in store.log() for pack in _packs_of(store, info.seq)}
        found = {path.stem for path in (place / "packs").rglob("*.pack")}
        problems = [f"not collected: {sorted(found - named)}"] if found - named else []
        return problems + ([] if found >= named else [f"gone: {sorted(named - found)}"])


def _packs_of(store, seq):
    return [pack.pack_id for pack in store._manifest(f"seq:{seq}").packs]


def check_answers(job):
    """Return what is wrong with the answers of a job."""
    point, problems = job.point, list(job.problems)
    victims = set() if job.struck_at is None else set(point.victims)
    for step, answers in job.acks.items():
        if len(set(answers.values())) > 1:
            problems.append(f"step {step} has several receipts: {answers}")
    for step, answers in job.failures.items():
        for rank, text in answers.items():
            if job.struck_at is None:
                problems.append(f"rank {rank} failed without a cause: {text}")
            elif not re.search(r"rank \d", text) and f"saver {rank}" not in victims:
                problems.append(f"the error of rank {rank} for step {step} names no rank: {text}")
    silent = [name for name in job._trainers() if name not in job.ended and name not in victims]
    problems += [f"{name} has no answer: {job.acks} {job.failures}" for name in silent]
    if job.longest > ANSWER_SECONDS:
        problems.append(f"an answer came after {job.longest:.1f} s")
    return problems


def run_point(point, folder):
    """Run a job with a point, the job that comes after it, and check what is there. Return the problems."""
    place = folder / "store"
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    worlds = dict.fromkeys(range(1, COMMITS + 2), WORLD)
    job = Job(place, WORLD, list(worlds), output, is_async=point.is_async, point=point)
    job.run()
    problems = check_answers(job)
    wanted = {step: next(iter(answers.values()))[0] for step, answers in job.acks.items()}
    # A saver that is killed or stopped breaks the promise of its commit, and of no other one.
    if not any(victim.startswith("saver") for victim in point.victims):
        wanted |= {step: wanted.get(step) for step in job.promised}
    if place.exists():
        problems += in_child(lambda: check_store(place, worlds, wanted), output)
        is_saver = point.victims[0].startswith("saver") and point.signal == "SIGKILL"
        last = job.acks.get(COMMITS + 1, {})
        if is_saver and job.struck_at is not None and len(last) < WORLD and COMMITS + 1 not in job.failures:
            problems.append(f"no commit succeeded after the death of a saver: {job.failures}")
        other = WORLD - 1 - point.seed % 3
        after = Job(place, other, [100], output, is_async=point.is_async)
        after.run()
        problems += [f"the next job: {problem}" for problem in check_answers(after)]
        if len(after.acks.get(100, {})) != other or len(set(after.opened.values())) != 1:
            problems.append(f"the next job: {after.opened} {after.acks} {after.failures}")
        worlds[100] = other
        problems += in_child(lambda: check_garbage(place), output)
        problems += in_child(lambda: check_store(place, worlds, {**wanted, 100: None}), output)
    os.close(output)
    return {
        "problems": problems,
        "was_struck": job.struck_at is not None,
        "seconds": round(job.longest, 2),
        "acks": {step: sorted(answers) for step, answers in job.acks.items()},
        "failures": job.failures,
        "promised": sorted(job.promised),
    }


def run_all(lines, lanes, base):
    """Run points in forked runners, several at a time, and print their results."""
    running = {}
    for line in itertools.chain(lines, [None] * lanes):
        while len(running) >= lanes or (line is None and running):
            pid, _ = os.waitpid(-1, 0)
            point, folder = running.pop(pid)
            report(point, folder)
        if line is not None:
            facts = json.loads(line)
            point = Point(**{**facts, "victims": tuple(facts["victims"])})
            folder = base / f"{time.monotonic_ns()}"
            folder.mkdir()
            pid = os.fork()
            if pid == 0:
                run_one(point, folder)
            running[pid] = point, folder


def run_one(point, folder):
    try:
        result = run_point(point, folder)
        (folder / "result.json").write_text(json.dumps(result))
    except BaseException:
        (folder / "result.json").write_text(json.dumps({"problems": [traceback.format_exc()]}))
    finally:
        os._exit(0)


def report(point, folder):
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"problems": ["the runner has died"]}
    if result["problems"]:
        result["output"] = (folder / "output.txt").read_text()[-20000:]
    shutil.rmtree(folder)
    print(json.dumps({"point": asdict(point), **result}), flush=True)


def main(lanes, base):
    os.environ.update(LOCAL_WORLD_SIZE="4", WORLD_SIZE="4")
    for name in ("api", "background.saver.__main__", "background.saver.job", "background.trainer", "ranks.job"):
        importlib.import_module(f"ckstore.{name}")
    for name in ("verify", "gc.run", "commit"):
        importlib.import_module(f"ckstore.ops.{name}")
    assert "torch" not in sys.modules
    gc.collect()
    gc.freeze()
    run_all(sys.stdin, lanes, base)


def results_of(points, base, *, lanes):
    """Run points in another process. Return their results."""
    command = [sys.executable, "-m", "support.killed_ranks", str(lanes), str(base)]
    lines = "".join(json.dumps(asdict(point)) + "\n" for point in points)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, input=lines, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
