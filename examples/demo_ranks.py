"""Train on four ranks, kill all of them at a random moment, resume with four and with two, and compare.

    python examples/demo_ranks.py               # about a minute; the store stays in ./demo-ranks-store

1. A *reference* job of four ranks trains a small GPT with FSDP2 and is not disturbed.
2. A *first* job does the same and commits every few steps. During a commit, all its ranks are killed with SIGKILL.
3. A *second* job of four ranks restores the newest checkpoint and trains to the end.
4. A *third* job of two ranks restores what the second one committed last.

The demo checks, and exits with status 1 if one of it is false: no acknowledged checkpoint is lost; the restored state
is the committed one, bit for bit; the losses of all ranks after it equal those of the reference; two ranks have the
state that four ranks have committed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import DemoError, console, prove, remove_old_store

HERE = Path(__file__).resolve().parent
RUN = "fsdp"
TRIES_MAX = 5
HIDDEN = ("tensors", "packs")
"""Sections of ``ckstore show`` that are long."""
Event = dict[str, Any]


class Job:
    """The ranks of a training, and the events that they have reported.

    Args:
        name: For messages.
        world: Number of ranks.
        arguments: Of ``train_fsdp.py``.
    """

    def __init__(self, name: str, world: int, *arguments: str) -> None:
        self.name, self.world = name, world
        self.events: list[Event] = []
        with socket.create_server(("127.0.0.1", 0)) as end:
            port = end.getsockname()[1]
        # What torchrun sets.
        common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(HERE / "train_fsdp.py"), "--events", *arguments]
        self.ranks = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **{key: str(value) for key, value in common.items()}, "RANK": str(rank)},
            )
            for rank in range(world)
        ]
        self._listeners = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self.ranks]
        for listener in self._listeners:
            listener.start()

    def _listen(self, rank: subprocess.Popen[str]) -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            # A killed process may leave half a line; ignore it.
            if line.endswith("\n") and line.startswith("{"):
                self.events.append(json.loads(line))

    def wait(self) -> None:
        """Wait for the end of all ranks, and read the rest of their output."""
        for rank in self.ranks:
            rank.wait()
        for listener in self._listeners:
            listener.join()

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for rank in self.ranks:
            rank.kill()
        self.wait()

    def finish(self) -> None:
        """Wait for the end of all ranks, which must succeed."""
        self.wait()
        codes = [rank.returncode for rank in self.ranks]
        if any(codes):
            raise DemoError(f"the {self.name} job failed; exit statuses {codes}")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not condition():
            if any(rank.poll() is not None for rank in self.ranks):
                self.kill()
                raise DemoError(f"a rank of the {self.name} job ended by itself")
            time.sleep(0.001)

    def events_of(self, kind: str) -> list[Event]:
        """Return all events of one kind."""
        return [event for event in list(self.events) if event["event"] == kind]

    def steps_of(self, kind: str) -> dict[int, Event]:
        """Return the events of rank 0 of one kind, by step."""
        return {event["step"]: event for event in self.events_of(kind) if event["rank"] == 0}

    def losses(self) -> dict[tuple[int, int], str]:
        """Return the exact loss of each step and rank."""
        return {(event["step"], event["rank"]): event["loss_hex"] for event in self.events_of("trained")}


def kill_in_commit(job: Job, *, after_commits: int) -> int | None:
    """Kill all ranks during a commit; return its step, or None if it was acknowledged before."""
    job.wait_for(lambda: len(job.steps_of("committed")) >= after_commits)
    begun = len(job.steps_of("commit begins"))
    job.wait_for(lambda: len(job.steps_of("commit begins")) > begun)
    # A random time, so that repeated demos cover all stages.
    time.sleep(random.uniform(0.0, 0.1))
    job.kill()
    step = max(job.steps_of("commit begins"))
    return None if any(event["step"] == step for event in job.events_of("committed")) else step


def prove_resumed(reference: Job, first: list[Job], second: Job, *, steps: int, every: int) -> None:
    """Compare the second job with what was committed, and with the reference."""
    restored = second.steps_of("restored")
    if not restored:
        raise DemoError("the second job found no checkpoint, although one was acknowledged")
    (step,) = restored
    begun = {number: event["digest"] for job in first for number, event in job.steps_of("commit begins").items()}
    acknowledged = max(number for job in first for number in job.steps_of("committed"))
    prove(f"nothing acknowledged is lost: step {acknowledged} was, step {step} is there", step >= acknowledged)
    prove(
        f"four ranks restored it, bit for bit: step {step}, {restored[step]['digest']}",
        restored[step]["digest"] == begun.get(step),
    )
    undisturbed, after = reference.losses(), second.losses()
    expected = {key: loss for key, loss in undisturbed.items() if key[0] > step}
    prove(
        f"the losses of {steps - step} steps on 4 ranks equal those of the job that was never killed",
        bool(expected) and after == expected,
    )
    final, expected_final = second.steps_of("finished")[steps], reference.steps_of("finished")[steps]
    prove(f"so does the state at step {steps}: {final['digest']}", final["digest"] == expected_final["digest"])


def prove_resharded(second: Job, third: Job) -> None:
    """Compare what two ranks restored with what four ranks committed last."""
    ((step, restored),) = third.steps_of("restored").items()
    committed = second.steps_of("commit begins")[step]["digest"]
    prove(f"two ranks restored what four had committed: step {step}, {committed}", restored["digest"] == committed)
    losses = [event["loss"] for event in third.events_of("trained")]
    console.print(f"they train on: losses {losses[0]:.3f} to {losses[-1]:.3f}", soft_wrap=True)


def show_store(tool: list[str], store: Path) -> None:
    """Print what the command line says about the store."""
    for command in (["ls", str(store)], ["show", str(store), "latest", "--run", RUN]):
        console.print(f"\n$ ckstore {' '.join(command)}", style="cyan", markup=False, soft_wrap=True)
        found = subprocess.run([*tool, *command], capture_output=True, text=True)
        if found.returncode:
            raise DemoError(f"ckstore {command[0]} failed: {found.stderr}")
        for section in found.stdout.strip().split("\n\n"):
            name = section.partition("\n")[0]
            text = f"({name}: left out here)" if name in HIDDEN else section
            console.print(f"{text}\n", markup=False, soft_wrap=True)


def run(store: Path, *, steps: int, every: int, model: list[str]) -> None:
    """Run the whole demo; raise DemoError if any check fails."""
    remove_old_store(store, run=RUN)
    common = ["--every", str(every), *model]
    started: list[Job] = []

    def start(name: str, world: int, *arguments: str) -> Job:
        started.append(Job(name, world, *common, *arguments))
        return started[-1]

    try:
        console.print(f"4 ranks train a small GPT with FSDP2: {steps} steps, a commit every {every}")
        reference = start("reference", 4, "--steps", str(steps))
        first: list[Job] = []
        killed: int | None = None
        while killed is None:
            if len(first) == TRIES_MAX:
                raise DemoError("too many commits in a row ended before the kill arrived")
            first.append(start("first", 4, "--store", str(store), "--steps", str(steps)))
            killed = kill_in_commit(first[-1], after_commits=1)
        console.print(f"SIGKILL to all 4 ranks in the commit of step {killed}")
        reference.finish()
        console.print("a second job of 4 ranks restores the newest checkpoint and trains on")
        second = start("second", 4, "--store", str(store), "--steps", str(steps))
        second.finish()
        prove_resumed(reference, first, second, steps=steps, every=every)
        console.print("a third job has 2 ranks")
        third = start("third", 2, "--store", str(store), "--steps", str(steps + every))
        third.finish()
        prove_resharded(second, third)
    finally:
        for job in started:
            job.kill()


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if all checks hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, default=Path("demo-ranks-store"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        model = ["--layers", str(given.layers), "--width", str(given.width)]
        run(given.store, steps=given.steps, every=given.every, model=model)
        show_store([sys.executable, "-m", "ckstore"], given.store)
    except DemoError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"all proved, in {time.perf_counter() - began:.0f} s. Next, try:", style="bold")
    place = given.store
    # `make demo-ranks` uses a virtual environment that is not on the PATH.
    scripts = Path(sys.executable).parent
    tool, torchrun = (
        name if shutil.which(name) == str(scripts / name) else os.path.relpath(scripts / name)
        for name in ("ckstore", "torchrun")
    )
    example = os.path.relpath(HERE / "train_fsdp.py")
    for command, what in (
        (f"{tool} verify {place} --level decode", "read and decode every byte"),
        (f"{tool} restore {place} latest --run {RUN} --only 'model.*' -o model.pt", "whole tensors for one process"),
        (f"{torchrun} --nproc-per-node 3 {example} --store {place} --steps 40", "train on with three ranks"),
    ):
        console.print(f"  {command}", style="cyan", markup=False, soft_wrap=True)
        console.print(f"      {what}", style="dim", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
