"""Trainers that are forked to be killed: their jobs, their output, and the process that forks them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ckstore

FOLDER = Path(__file__).parents[1]
SOURCE = Path(ckstore.__file__).parent.parent

SECONDS_MAX = 100.0
"""Longer than anything here takes, on a machine that others use too."""


class TrainerRun:
    """One trainer: its job, its output, and the faults that hit it."""

    def __init__(self, number, job):
        self.number, self.job = number, job
        self.events = []
        self.failed_savers = set()
        """Savers that were killed or kept from memory."""
        self.is_over = False

    def facts(self, event):
        """Return the facts of each line with this word, in order."""
        return [facts for kind, *facts in self.events if kind == event]

    def steps(self, event):
        """Return the steps that a word was said of."""
        return [int(facts[0]) for facts in self.facts(event)]

    @property
    def pid(self):
        return int(self.facts("started")[0][0])

    def saver_of(self):
        """Return for each step the saver that got it."""
        return {int(step): int(pid) for step, pid in self.facts("submitted")}

    def promised_steps(self):
        """Return the steps that were promised to survive, whatever happens to the trainer."""
        durable, failed, begun = self.steps("durable"), set(self.steps("failed")), self.steps("begin")
        savers = self.saver_of()
        staged = [
            step
            for step in self.steps("staged")
            if step not in failed
            and savers.get(step) not in self.failed_savers
            # A later state may have replaced it, as the policy wants.
            and (self.job["policy"].get("on_busy") != "replace" or step == begun[-1])
        ]
        return durable, staged


class Trainers:
    """The process that forks trainers, and a thread that hears what all of them say."""

    def __init__(self, task, base):
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        self.runs = {}
        self.dead = {}
        self._changed = threading.Condition()
        self._errors = base / "stderr"
        path = os.pathsep.join([str(SOURCE), str(FOLDER)])
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"CKSTORE_TEST_TOKEN": self.token, "PYTHONFAULTHANDLER": "1"}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.trainer_child", task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        self.pid = self._process.pid
        self.is_ready = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self.is_ready.wait(SECONDS_MAX), self.errors()

    def start(self, trainer):
        """Let a trainer be born."""
        self.runs[trainer.number] = trainer
        self._process.stdin.write(json.dumps(trainer.job).encode() + b"\n")
        self._process.stdin.flush()
        self.wait(lambda: trainer.facts("started"), "the birth of a trainer")

    def wait(self, condition, what, seconds=SECONDS_MAX, error=None):
        """Wait until something was said; whatever does not come hangs, which is a fault."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not condition():
                # Not all that is waited for is said.
                self._changed.wait(0.01)
                if time.monotonic() > deadline and error is not None:
                    raise error(what)
                if time.monotonic() > deadline:
                    last = [trainer.events[-12:] for trainer in list(self.runs.values())[-2:]]
                    raise AssertionError(f"{what} did not come; last said: {last}; stderr: {self.dump_stacks()}")

    def dump_stacks(self):
        """Let everybody say where its threads are, and die."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        return self.errors()[-20000:]

    def errors(self):
        return self._errors.read_text(errors="replace")

    def descendants(self):
        """Return every process that came from this one: pid to command line."""
        found = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdecimal() or int(place.name) == self.pid:
                continue
            with contextlib.suppress(OSError):
                if self.token.encode() in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def close(self):
        """End all of it, whatever lives."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(SECONDS_MAX)
        self._listener.join(SECONDS_MAX)
        self._process.stdout.close()

    def _listen(self):
        for line in self._process.stdout:
            number, event, *facts = line.decode(errors="replace").rstrip("\n").split(" ", 5)
            if event == "ready":
                self.is_ready.set()
                continue
            with self._changed:
                if event == "dead":
                    self.dead[int(facts[0])] = int(facts[1])
                if int(number):
                    trainer = self.runs[int(number)]
                    trainer.events.append((event, *facts))
                    trainer.is_over = trainer.is_over or event == "dead"
                self._changed.notify_all()
