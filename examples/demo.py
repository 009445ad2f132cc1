"""Train, kill the trainer during a checkpoint, resume, and check that nothing was lost. Twice.

    python examples/demo.py                     # about a minute; the store stays in ./demo-store

1. A *reference* process trains a small GPT and is not disturbed.
2. A *trainer* process does the same and commits its whole state every few steps, in the background. When a state is
   staged (copied) but not yet published, the trainer is killed with SIGKILL. The saver process keeps running, publishes
   that checkpoint, and ends.
3. A *second* process restores it and trains on; it waits for each commit. During one of them it is killed with SIGKILL.
4. A *third* process restores the newest checkpoint and trains to the end.

The demo checks four things, and exits with status 1 if one of them is false. The state that was staged when the trainer
was killed exists, bit for bit. The third process finds the last acknowledged state, or the one that was being
committed if it was complete, bit for bit. The losses after it equal those of the reference. The whole state at the end
does too: weights, moments, schedule, random number generators, and position in the data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RUN = "demo"
SAVER_SECONDS_MAX = 60.0
TRIES_MAX = 5
Event = dict[str, Any]
console = Console(highlight=False)


class DemoError(Exception):
    """A check failed, or a process did something unexpected."""


@dataclass
class Process:
    """A training process and the events that it has reported."""

    name: str
    popen: subprocess.Popen[str]
    events: list[Event] = field(default_factory=list)
    listener: threading.Thread | None = None

    @classmethod
    def start(cls, name: str, *arguments: str) -> Process:
        """Start ``train_gpt.py``, and read its output on a thread."""
        command = [sys.executable, str(HERE / "train_gpt.py"), "--events", *arguments]
        started = cls(name, subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        started.listener = threading.Thread(target=started._listen, daemon=True)
        started.listener.start()
        return started

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            # A killed process may leave half a line; ignore it.
            if line.endswith("\n") and line.startswith("{"):
                self.events.append(json.loads(line))

    def wait(self) -> int:
        """Wait for its end, read the rest of its output, and return its exit status."""
        status = self.popen.wait()
        assert self.listener is not None
        self.listener.join()
        return status

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.popen.kill()
        self.wait()

    def events_of(self, kind: str) -> list[Event]:
        """Return all events of one kind, in order."""
        return [event for event in list(self.events) if event["event"] == kind]

    def losses(self) -> dict[int, str]:
        """Return the exact loss of each step."""
        return {event["step"]: event["loss_hex"] for event in self.events_of("trained")}


def remove_old_store(folder: Path, *, run: str = RUN) -> None:
    """Remove the store of an earlier demo; refuse to remove anything else."""
    if not folder.exists() and not folder.is_symlink():
        return
    entries = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {"?"}
    runs = {path.name for path in (folder / "manifests").glob("*")}
    if entries and not ("store.json" in entries and runs <= {run}):
        raise DemoError(f"{folder} is in the way, and is not the store of an earlier demo; move it, or use --store")
    shutil.rmtree(folder)


def files_of(store: Path) -> dict[str, int]:
    """Return the files of a store with their sizes."""
    found = {}
    for root, _, names in os.walk(store):
        for name in names:
            path = Path(root) / name
            # Another process may move a file between listing and reading it.
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(store))] = path.stat().st_size
    return found


def kill_when_staged(trainer: Process, store: Path, *, after_commits: int) -> Event | None:
    """Kill the trainer once its next state is staged; return that event, or None if it was already published.

    The saver must still be running at that time; this function waits until it has published.
    """
    _wait_for(trainer, lambda: len(trainer.events_of("committed")) >= after_commits)
    begun = len(trainer.events_of("staged"))
    _wait_for(trainer, lambda: len(trainer.events_of("staged")) > begun)
    saver = _child_of(trainer.popen.pid)
    trainer.kill()
    staged: Event = trainer.events_of("staged")[-1]
    step = staged["step"]
    if _is_published(store, step) or saver is None:
        return None
    console.print(
        f"SIGKILL when step {step} was staged and not published; the saver, process {saver}, lives on", soft_wrap=True
    )
    prove("the saver outlives the trainer", _is_running(saver))
    began = time.perf_counter()
    while _is_running(saver):
        if time.perf_counter() - began > SAVER_SECONDS_MAX:
            raise DemoError(f"the saver, process {saver}, still runs")
        time.sleep(0.001)
    waited = time.perf_counter() - began
    prove(f"it published step {step}, and ended, {1e3 * waited:.0f} ms later", _is_published(store, step))
    return staged


def _child_of(pid: int) -> int | None:
    """Return the child process of a process, or None."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return int(children[0]) if children else None


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()[0]
    except OSError:
        return False
    # A process that has ended, but that nobody has waited for, is a zombie.
    return state not in {"Z", "X"}


def _is_published(store: Path, step: int) -> bool:
    """Return whether a step has a manifest; its name is ``<seq>-<step>.<generation>.ckm``."""
    names = [path.name for path in (store / "manifests" / RUN).glob("*.ckm")]
    return any(int(name.split("-")[1].split(".")[0]) == step for name in names)


def kill_in_commit(trainer: Process, store: Path, *, after_commits: int) -> str | None:
    """Kill the trainer once its next commit has begun to write; return the stage, or None if it was too late."""

    def is_between_commits() -> bool:
        return after_commits <= len(trainer.events_of("committed")) == len(trainer.events_of("commit begins"))

    _wait_for(trainer, is_between_commits)
    # The trainer is between commits now, so new files belong to the next commit.
    manifests, packs = files_of(store / "manifests").keys(), files_of(store / "packs").keys()
    acknowledged = len(trainer.events_of("committed"))
    _wait_for(trainer, lambda: bool(files_of(store / "packs").keys() - packs))
    # Kill at a random time, so that repeated demos cover all stages.
    time.sleep(random.uniform(0.0, 0.02))
    trainer.kill()
    if len(trainer.events_of("committed")) > acknowledged:
        return None
    step = trainer.events_of("commit begins")[-1]["step"]
    return f"step {step}: {_stage_of(store, manifests, packs)}"


def _wait_for(trainer: Process, condition: Callable[[], bool]) -> None:
    while not condition():
        if trainer.popen.poll() is not None:
            raise DemoError(f"the trainer ended by itself, with exit status {trainer.wait()}")
        time.sleep(0.0005)


def _stage_of(store: Path, manifests_before: Any, packs_before: Any) -> str:
    """Describe what the interrupted commit has left on disk."""
    packs = {name: size for name, size in files_of(store / "packs").items() if name not in packs_before}
    if files_of(store / "manifests").keys() - manifests_before:
        return "its manifest was there, its receipt was not: published, not acknowledged"
    if packs:
        return f"its pack was being written ({sum(packs.values()) / 1e6:.1f} MB of it reserved or there), no manifest"
    return "nothing of it was on disk yet"


def prove(statement: str, is_true: bool, detail: str = "") -> None:
    """Print a check that holds, or end the demo."""
    verdict = "[green]proved[/]" if is_true else "[red]FAILED[/]"
    console.print(f"  {verdict}  {statement}", soft_wrap=True)
    if not is_true:
        raise DemoError(f"not true: {statement}. {detail}")


def prove_resumed(reference: Process, killed: list[Process], resumed: Process, *, steps: int) -> None:
    """Compare the resumed run with what was acknowledged, and with the undisturbed run."""
    if not resumed.events_of("restored"):
        raise DemoError("the new process found no checkpoint, although one was acknowledged")
    restored = resumed.events_of("restored")[0]
    begun = {event["step"]: event["digest"] for process in killed for event in process.events_of("commit begins")}
    acknowledged = max(event["step"] for process in killed for event in process.events_of("committed"))
    step = restored["step"]
    which = "the last acknowledged" if step == acknowledged else "a newer, complete"
    prove(f"nothing acknowledged is lost: step {acknowledged} was, step {step} is there", step >= acknowledged)
    prove(
        f"the restored state is, bit for bit, {which} one: step {step}, {restored['digest']}",
        restored["digest"] == begun.get(step),
        f"committed was {begun.get(step)}",
    )
    undisturbed, after = reference.losses(), resumed.losses()
    expected = {number: undisturbed[number] for number in range(step + 1, steps + 1)}
    different = [number for number in expected if after.get(number) != expected[number]]
    prove(
        f"the losses of the {len(expected)} steps after it equal those of the run that was never killed",
        bool(expected) and not different,
        f"first difference at step {different[0] if different else '?'}",
    )
    final, expected_final = resumed.events_of("finished")[-1], reference.events_of("finished")[-1]
    prove(
        f"the whole state at step {steps} equals that of the run that was never killed: {final['digest']}",
        final["digest"] == expected_final["digest"] and final["step"] == expected_final["step"] == steps,
    )


def show_commits(commits: list[Event]) -> None:
    """Print one row per commit."""
    seconds = {stage: None for commit in commits for stage in commit["seconds"] if stage != "total"}
    table = Table(title="what was committed", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("step", "state", "stored", "new", "reused", *seconds, "total", "waited"):
        table.add_column(heading, justify="right")
    for commit in commits:
        table.add_row(
            str(commit["step"]),
            f"{commit['bytes_state'] / 1e6:.2f}",
            f"{commit['bytes_written'] / 1e6:.2f}",
            str(commit["chunks_new"]),
            str(commit["chunks_reused"]),
            *(f"{1e3 * commit['seconds'].get(stage, 0.0):.0f}" for stage in seconds),
            f"{1e3 * commit['wall_seconds']:.0f}",
            f"{1e3 * commit['stall_seconds']:.0f}",
        )
    console.print(table)
    engine = commits[-1]["engine"]
    console.print(
        "state and stored in MB; new and reused chunks; stages in ms, the last is what training waited for; "
        f"engine {engine}",
        style="dim",
        soft_wrap=True,
    )


def prove_published(staged: Event, killed: list[Process], resumed: Process) -> None:
    """Compare what the next process restored with what was staged when the first one was killed."""
    _wait_for(resumed, lambda: bool(resumed.events_of("restored")))
    restored, step = resumed.events_of("restored")[0], staged["step"]
    begun = {event["step"]: event["digest"] for process in killed for event in process.events_of("commit begins")}
    prove(
        f"a second process restores it, bit for bit, although it was not acknowledged: step {step}, {begun[step]}",
        (restored["step"], restored["digest"]) == (step, begun[step]),
        f"restored was step {restored['step']}, {restored['digest']}",
    )


def train_and_kill(store: Path, started: list[Process], arguments: list[str], *, commits: int) -> list[Process]:
    """Start and kill trainers: one after staging a state, the next during a commit; return the killed ones."""
    killed: list[Process] = []

    def start(name: str, *more: str) -> Process:
        if len(killed) >= 2 * TRIES_MAX:
            raise DemoError("too many commits in a row ended before the kill arrived")
        started.append(Process.start(name, "--store", str(store), *arguments, *more))
        return started[-1]

    staged: Event | None = None
    while staged is None:
        killed.append(start("trainer"))
        staged = kill_when_staged(killed[-1], store, after_commits=commits if len(killed) == 1 else 1)
    died: str | None = None
    while died is None:
        second = start("second", "--sync")
        if staged is not None:
            prove_published(staged, killed, second)
            staged = None
        killed.append(second)
        died = kill_in_commit(second, store, after_commits=1)
    console.print(f"SIGKILL in the commit of {died}", soft_wrap=True)
    return killed


def run(store: Path, *, steps: int, every: int, model: list[str]) -> None:
    """Run the whole demo; raise DemoError if any check fails."""
    remove_old_store(store)
    arguments = ["--steps", str(steps), "--every", str(every), "--run", RUN, *model]
    console.print(f"a small GPT learns the standard library's sources: {steps} steps, a commit every {every}")
    reference = Process.start("reference", *arguments)
    started = [reference]
    try:
        killed = train_and_kill(store, started, arguments, commits=max(1, (steps // every) // 3))
        console.print("a third process restores the newest checkpoint and trains on")
        resumed = Process.start("resumed", "--store", str(store), *arguments)
        started.append(resumed)
        for process in (resumed, reference):
            if process.wait():
                raise DemoError(f"the {process.name} process failed with exit status {process.popen.returncode}")
        prove_resumed(reference, killed, resumed, steps=steps)
    finally:
        for process in started:
            if process.popen.poll() is None:
                process.kill()
    commits = [event for process in (*killed, resumed) for event in process.events_of("committed")]
    show_commits(commits)
    losses = [event["loss"] for event in reference.events_of("trained")]
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if all checks hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, default=Path("demo-store"))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        model = ["--layers", str(given.layers), "--width", str(given.width)]
        run(given.store, steps=given.steps, every=given.every, model=model)
    except DemoError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"\nall proved, in {time.perf_counter() - began:.0f} s. Next, try:", style="bold")
    place = given.store
    # `make demo` uses a virtual environment that is not on the PATH.
    tool = "ckstore" if shutil.which("ckstore") else os.path.relpath(Path(sys.executable).parent / "ckstore")
    for command, what in (
        (f"{tool} ls {place}", "the history of the run"),
        (f"{tool} show {place} latest --run {RUN}", "one checkpoint: its tensors and where they lie"),
        (f"{tool} verify {place} --level decode", "read and decode every byte"),
        (f"{tool} restore {place} latest --run {RUN} --only 'model.*' -o model.pt", "get a part out"),
    ):
        console.print(f"  {command}", style="cyan", markup=False, soft_wrap=True)
        console.print(f"      {what}", style="dim", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
