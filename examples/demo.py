"""Train, be killed while a checkpoint is on its way, come back, and prove that nothing was lost. Twice.

    python examples/demo.py                     # about a minute; the store stays in ./demo-store

1. A *reference* process trains a small GPT and is left in peace.
2. A *trainer* process does the same and commits its whole state every few steps, in the background. Once a state is
   staged, that is copied, and not yet published, the trainer is killed with SIGKILL. The saver process lives on,
   publishes that checkpoint, and ends.
3. A *second* process restores it and trains on; it commits and waits for each commit. In the middle of one it is
   killed with SIGKILL.
4. A *third* process restores the newest checkpoint and trains on to the end.

Proved, or the exit status is 1: what was staged when the trainer died is there, bit for bit, although nobody was told;
the third process finds, bit for bit, the last acknowledged state (or the one being committed, if that was complete);
the losses after it equal those of the reference; and so does the whole state at the end: weights, moments, schedule,
random number generators, position in the data.
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
    """A proof failed, or a process did what it should not."""


@dataclass
class Process:
    """A training process and everything it has said so far."""

    name: str
    popen: subprocess.Popen[str]
    events: list[Event] = field(default_factory=list)
    listener: threading.Thread | None = None

    @classmethod
    def start(cls, name: str, *arguments: str) -> Process:
        """Start ``train_gpt.py`` and listen to it on a thread."""
        command = [sys.executable, str(HERE / "train_gpt.py"), "--events", *arguments]
        started = cls(name, subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        started.listener = threading.Thread(target=started._listen, daemon=True)
        started.listener.start()
        return started

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            # A process that is killed may leave half a line; what it did not finish saying, it did not say.
            if line.endswith("\n") and line.startswith("{"):
                self.events.append(json.loads(line))

    def wait(self) -> int:
        """Wait for its end, read all it has said, and return its exit status."""
        status = self.popen.wait()
        assert self.listener is not None
        self.listener.join()
        return status

    def kill(self) -> None:
        """Kill it as a power switch would, without a word."""
        self.popen.kill()
        self.wait()

    def said(self, event: str) -> list[Event]:
        """Return every event of a kind, in order."""
        return [told for told in list(self.events) if told["event"] == event]

    def losses(self) -> dict[int, str]:
        """Return the exact loss of each step it has trained."""
        return {told["step"]: told["loss_hex"] for told in self.said("trained")}


def make_way(folder: Path) -> None:
    """Remove the store of an earlier demo, and nothing that could be anything else."""
    if not folder.exists() and not folder.is_symlink():
        return
    entries = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {"?"}
    runs = {path.name for path in (folder / "manifests").glob("*")}
    if entries and not ("store.json" in entries and runs <= {RUN}):
        raise DemoError(f"{folder} is in the way, and is not the store of an earlier demo; move it, or use --store")
    shutil.rmtree(folder)


def files_of(store: Path) -> dict[str, int]:
    """Return the files of a store with their sizes."""
    found = {}
    for root, _, names in os.walk(store):
        for name in names:
            path = Path(root) / name
            # A file may be moved while we look; then it is not there, and that is all.
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(store))] = path.stat().st_size
    return found


def kill_when_staged(trainer: Process, store: Path, *, after_commits: int) -> Event | None:
    """Kill the trainer once its next state is staged; return what it said of it, or None if it was published by then.

    Its saver is what the demo is about: it must be alive then, and is waited for.
    """
    _wait_for(trainer, lambda: len(trainer.said("committed")) >= after_commits)
    begun = len(trainer.said("staged"))
    _wait_for(trainer, lambda: len(trainer.said("staged")) > begun)
    saver = _child_of(trainer.popen.pid)
    trainer.kill()
    staged: Event = trainer.said("staged")[-1]
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
    """Return the process that a process has started, if there is one."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return int(children[0]) if children else None


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()[0]
    except OSError:
        return False
    # One that has ended and that nobody has asked for is a zombie.
    return state not in {"Z", "X"}


def _is_published(store: Path, step: int) -> bool:
    """Say whether there is a manifest of a step; a name is ``<seq>-<step>.<generation>.ckm``."""
    names = [path.name for path in (store / "manifests" / RUN).glob("*.ckm")]
    return any(int(name.split("-")[1].split(".")[0]) == step for name in names)


def kill_in_commit(trainer: Process, store: Path, *, after_commits: int) -> str | None:
    """Kill the trainer once its next commit has begun to write; say at which stage, or None if it was too late."""

    def is_between_commits() -> bool:
        return after_commits <= len(trainer.said("committed")) == len(trainer.said("commit begins"))

    _wait_for(trainer, is_between_commits)
    # Now it trains; what appears from here on belongs to the next commit.
    manifests, packs = files_of(store / "manifests").keys(), files_of(store / "packs").keys()
    acknowledged = len(trainer.said("committed"))
    _wait_for(trainer, lambda: bool(files_of(store / "packs").keys() - packs))
    # Not always at the same place: a demo that is run often has died everywhere.
    time.sleep(random.uniform(0.0, 0.02))
    trainer.kill()
    if len(trainer.said("committed")) > acknowledged:
        return None
    step = trainer.said("commit begins")[-1]["step"]
    return f"step {step}: {_stage_of(store, manifests, packs)}"


def _wait_for(trainer: Process, condition: Callable[[], bool]) -> None:
    while not condition():
        if trainer.popen.poll() is not None:
            raise DemoError(f"the trainer ended by itself, with exit status {trainer.wait()}")
        time.sleep(0.0005)


def _stage_of(store: Path, manifests_before: Any, packs_before: Any) -> str:
    """Say what the dead commit has left behind."""
    packs = {name: size for name, size in files_of(store / "packs").items() if name not in packs_before}
    if files_of(store / "manifests").keys() - manifests_before:
        return "its manifest was there, its receipt was not: published, not acknowledged"
    if packs:
        return f"its pack was being written ({sum(packs.values()) / 1e6:.1f} MB of it reserved or there), no manifest"
    return "nothing of it was on disk yet"


def prove(statement: str, is_true: bool, detail: str = "") -> None:
    """Print what was proved, or end the demo."""
    verdict = "[green]proved[/]" if is_true else "[red]FAILED[/]"
    console.print(f"  {verdict}  {statement}", soft_wrap=True)
    if not is_true:
        raise DemoError(f"not true: {statement}. {detail}")


def prove_resumed(reference: Process, killed: list[Process], resumed: Process, *, steps: int) -> None:
    """Hold the resumed run against what was acknowledged, and against the run that was left in peace."""
    if not resumed.said("restored"):
        raise DemoError("the new process found no checkpoint, although one had been acknowledged")
    restored = resumed.said("restored")[0]
    begun = {told["step"]: told["digest"] for process in killed for told in process.said("commit begins")}
    acknowledged = max(told["step"] for process in killed for told in process.said("committed"))
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
    final, expected_final = resumed.said("finished")[-1], reference.said("finished")[-1]
    prove(
        f"the whole state at step {steps} equals that of the run that was never killed: {final['digest']}",
        final["digest"] == expected_final["digest"] and final["step"] == expected_final["step"] == steps,
    )


def show_commits(commits: list[Event]) -> None:
    """Print one row a commit."""
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
    """Hold what the next process restored against what was staged when its predecessor died."""
    _wait_for(resumed, lambda: bool(resumed.said("restored")))
    restored, step = resumed.said("restored")[0], staged["step"]
    begun = {told["step"]: told["digest"] for process in killed for told in process.said("commit begins")}
    prove(
        f"a second process restores it, bit for bit, although nobody was told of it: step {step}, {begun[step]}",
        (restored["step"], restored["digest"]) == (step, begun[step]),
        f"restored was step {restored['step']}, {restored['digest']}",
    )


def play(store: Path, started: list[Process], arguments: list[str], *, commits: int) -> list[Process]:
    """Start trainers and kill them: one when a state of it was staged, the next in a commit; return those killed."""
    killed: list[Process] = []

    def start(name: str, *more: str) -> Process:
        if len(killed) >= 2 * TRIES_MAX:
            raise DemoError("so many commits in a row were over before the kill arrived")
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
    """Play the whole demo; raise DemoError if anything that it promises does not hold."""
    make_way(store)
    arguments = ["--steps", str(steps), "--every", str(every), "--run", RUN, *model]
    console.print(f"a small GPT learns the standard library's sources: {steps} steps, a commit every {every}")
    reference = Process.start("reference", *arguments)
    started = [reference]
    try:
        killed = play(store, started, arguments, commits=max(1, (steps // every) // 3))
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
    commits = [told for process in (*killed, resumed) for told in process.said("committed")]
    show_commits(commits)
    losses = [told["loss"] for told in reference.said("trained")]
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when everything was proved."""
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
    # `make demo` runs in an environment of its own, which is not on the PATH.
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
