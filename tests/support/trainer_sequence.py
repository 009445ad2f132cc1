"""Trainers on one store, one after the other, each ended from outside; and the checks that hold for all of them.

What a trainer printed before its death is what it was promised: durable states exist bit for bit, staged states are
published although it died, and everything else that is visible is complete.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import ckstore
from ckstore._testing import repository_of
from ckstore.format import paths
from ckstore.processes import is_stopped, process_started
from support.trainer_child import digest
from support.trainer_processes import SECONDS_MAX, TrainerRun, Trainers

FATAL = {"SIGKILL", "SIGSTOP", "SIGTERM", "out of memory"}


class TrainerSequence:
    """A store, the lives in it, and the count of what was done to them.

    Args:
        base: A folder of its own.
        task: What is trained: ``numpy`` or ``torch``.
        seed: What decides everything but time.
    """

    def __init__(self, base, task, seed):
        self.place = base / "store"
        self.task, self.seed = task, seed
        self.choice = random.Random(seed)
        self.trainers = Trainers(task, base)
        self.runs = []
        self.kills = Counter()
        self.counts = Counter()
        self.noticed = []
        """Seconds from a saver's death until its trainer reported it."""
        self.step_min = -1
        """The step that a restart must find at least."""
        self._digests = {}
        ckstore.open(self.place).close()

    # Lives

    def start_trainer(self, **options):
        """Start a trainer; the one before is dead, and its saver may still be at work."""
        number = len(self.runs) + 1
        choice = self.choice
        policy = {
            "on_busy": choice.choice(["wait", "wait", "wait", "replace", "skip"]),
            "base_cache": choice.choice(["none", "memory"]),
            "compression": choice.choice(["none", "fast"]),
            "debug_guard": choice.random() < 0.25,
            "saver_nice": 0,
            "threads": 2,
        }
        job = {
            "life": number,
            "seed": choice.randrange(1 << 30),
            "place": str(self.place),
            "task": self.task,
            # Torch fills tensors that are there: their shapes stay.
            "nbytes": choice.choice([1, 5, 9]) << 20 if self.task == "numpy" else 6 << 20,
            "policy": policy | options.pop("policy", {}),
            "steps": 100_000,
            "waits": ["staged", "staged", "result", "none"],
            "pause": choice.choice([0, 0, 0.01]),
            "patience": 10.0,
            "loaders": [choice.randrange(3)] if choice.random() < 0.15 else [],
            "limit_at": -1,
            "exit_at": -1,
            "exit_how": "",
        }
        assert options.keys() <= job.keys()
        trainer = TrainerRun(number, job | options)
        self.runs.append(trainer)
        self.trainers.start(trainer)
        return trainer

    def wait_for_end(self, trainer):
        """Wait for the end of a trainer, and note what it was promised."""
        self.wait(lambda: trainer.is_over, f"the end of life {trainer.number}")
        for step, content in trainer.facts("begin"):
            self._digests[trainer.number, int(step)] = content
        for step, owner, content in trainer.facts("restored"):
            self._check_restored(trainer, int(step), int(owner), content)
        durable, staged = trainer.promised_steps()
        self.counts["acknowledged"] += len(durable)
        self.counts["staged"] += len(trainer.steps("staged"))
        self.counts["orphaned"] += len(set(staged) - set(durable))
        self.step_min = max([self.step_min, *durable, *staged])

    def _check_restored(self, trainer, step, owner, content):
        assert step >= self.step_min, f"life {trainer.number} resumed step {step}, and {self.step_min} was promised"
        assert step == -1 or self._digests[owner, step] == content, f"life {trainer.number} resumed a wrong step {step}"
        self.step_min = step
        self.counts["resumed"] += 1

    def wait(self, condition, what, seconds=SECONDS_MAX, error=None):
        self.trainers.wait(condition, what, seconds, error)

    def wait_for_event(self, trainer, event, count=1):
        """Wait until a life has said a word so often, or is over."""
        self.wait(lambda: trainer.is_over or len(trainer.facts(event)) >= count, f"{count} times {event!r}")

    def pause(self):
        """Wait for a random time, mostly a short one."""
        time.sleep(10 ** self.choice.uniform(-4, -0.4))

    # Strokes

    @property
    def killed(self):
        """How often a process was killed, stopped, asked to end, or left without memory."""
        return sum(count for kind, count in self.kills.items() if kind.partition(" ")[2] in FATAL)

    def signal_trainer(self, trainer, number):
        """Send a signal to the trainer."""
        self.kills[f"trainer {signal.Signals(number).name}"] += 1
        os.kill(trainer.pid, number)

    def interrupt(self, trainer):
        """Send what Ctrl-C sends to the group of a trainer, and to its saver, which is in no such group."""
        assert os.getpgid(trainer.pid) == trainer.pid
        before = len(trainer.facts("interrupted"))
        pid = self.saver_of(trainer)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                assert os.getpgid(pid) != trainer.pid
                os.kill(pid, signal.SIGINT)
        while len(trainer.facts("interrupted")) == before:
            # Python loses it where it cannot raise: in hooks of fork, and of collecting garbage.
            os.killpg(trainer.pid, signal.SIGINT)
            self.kills["trainer SIGINT"] += 1
            with contextlib.suppress(TimeoutError):
                self.wait(lambda: len(trainer.facts("interrupted")) > before, "a stop", 5, TimeoutError)

    def steps(self):
        """Return the steps that are published."""
        with ckstore.open(self.place) as store:
            return store.steps()

    def saver_of(self, trainer):
        """Return the saver that a trainer has now, from its first moment on; None: it has none."""
        children = []
        with contextlib.suppress(OSError):
            # A child is its thread's until that ends, and then another one's: it may be missed in between.
            for task in Path(f"/proc/{trainer.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    children += map(int, (task / "children").read_text().split())
        for pid in sorted(children, reverse=True):
            with contextlib.suppress(OSError):
                if b"ckstore.background.saver" in Path(f"/proc/{pid}/cmdline").read_bytes() and process_started(pid):
                    return pid
        return None

    def signal_saver(self, trainer, number):
        """Send a signal to the saver of a trainer that lives; return its pid, or None if there is none."""
        pid = self.saver_of(trainer)
        if pid is None:
            return None
        if number == signal.SIGKILL:
            trainer.failed_savers.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.kills[f"saver {signal.Signals(number).name}"] += 1
            return pid
        return None

    def stop_saver(self, trainer):
        """Stop the saver of a trainer that has one; return its pid when it stands still."""
        pids = []
        self.wait(lambda: pids.append(self.signal_saver(trainer, signal.SIGSTOP)) or pids[-1], "a saver")
        self.wait(lambda: is_stopped(pids[-1]), "the stop")
        return pids[-1]

    def kill_saver(self, trainer):
        """Kill a saver, and measure how long its trainer takes to notice."""
        before = len(trainer.facts("failed"))
        # The same clock in every process of this machine, and one that is never set.
        begun = time.monotonic()
        pid = self.signal_saver(trainer, signal.SIGKILL)
        if pid is None:
            return
        self.wait(lambda: trainer.is_over or pid in self.trainers.dead or not Path(f"/proc/{pid}").exists(), "a death")
        self.wait_for_event(trainer, "submitted", len(trainer.facts("submitted")) + 1)
        for step, kind, when, text in trainer.facts("failed")[before:]:
            if kind == "SaverError" and f"(pid {pid}) was killed by SIGKILL" in text:
                self.noticed.append((float(when) - begun, step))

    # What must hold

    def wait_alone(self, seconds=SECONDS_MAX):
        """Wait until of all that trainers have started only data loaders are left, and end those."""
        deadline = time.monotonic() + seconds
        while descendants := self.trainers.descendants().keys() - (loaders := self._loaders()):
            assert time.monotonic() < deadline, f"left behind: {descendants}, {self.trainers.descendants()}"
            time.sleep(0.01)
        for pid in loaders & self.trainers.descendants().keys():
            assert "ckstore-arena" not in Path(f"/proc/{pid}/maps").read_text()
            assert not [link for link in links_of(pid) if "ckstore-arena" in link]
            self.counts["loaders that outlived their trainer"] += 1
            os.kill(pid, signal.SIGKILL)
        assert not (self.place / paths.lease_name("main")).exists() or self._lease_is_free()

    def _loaders(self):
        return {int(pid) for trainer in self.runs for (pid,) in trainer.facts("loader")}

    def _lease_is_free(self):
        with ckstore.open(self.place) as store:
            holder = repository_of(store).lease.holder()
            return holder is None or process_started(holder.pid) != holder.process_started

    def check(self):
        """Check everything that is stored, after the last process has ended."""
        durable = {(trainer.number, step) for trainer in self.runs for step in trainer.steps("durable")}
        with ckstore.open(self.place) as store:
            entries = [(info.seq, info.step, int(info.metrics["life"])) for info in reversed(store.log())]
            steps = [step for _, step, _ in entries]
            assert steps == sorted(set(steps)), f"an older state was resumed and then overtaken: {entries}"
            assert max(steps, default=-1) >= self.step_min, f"step {self.step_min} was promised; there are {steps}"
            lost = durable - {(trainer, step) for _, step, trainer in entries}
            assert not lost, f"acknowledged and not there: {lost}"
            for seq, step, trainer in entries:
                assert digest(store.restore(f"seq:{seq}")) == self._digests[trainer, step], f"step {step} is wrong"
            report = store.verify("decode")
            assert not report.damage, report.damage
        self.counts["half-staged and not visible"] += sum(self._is_left_out(trainer, entries) for trainer in self.runs)
        self.counts["checked"] += len(entries)
        self.counts["published without being heard"] += len(entries) - len(durable)

    @staticmethod
    def _is_left_out(trainer, entries):
        """Whether the last thing of a life was a state that never got whole."""
        begun = trainer.steps("begin")
        accounted_for = {*trainer.steps("refused"), *trainer.steps("failed"), *trainer.steps("staged")}
        return (
            bool(begun)
            and begun[-1] not in accounted_for
            and all(entry[1:] != (begun[-1], trainer.number) for entry in entries)
        )

    def check_next(self):
        """The next trainer takes the lease and commits, without any repair."""
        trainer = self.start_trainer(steps=2, waits=["result"], pause=0, loaders=[])
        self.wait_for_end(trainer)
        assert trainer.facts("closed"), (trainer.events[-8:], self.trainers.errors()[-2000:])
        assert len(trainer.steps("durable")) == 2

    def __str__(self):
        kills = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.kills.items()))
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        slowest = max((seconds for seconds, _ in self.noticed), default=0.0)
        return (
            f"{self.task}, seed {self.seed}: {len(self.runs)} lives, {self.kills.total()} strokes ({kills}), "
            f"{self.killed} of them fatal; {counts}; "
            f"{len(self.noticed)} deaths of savers noticed within {slowest:.2f} s"
        )

    def close(self):
        self.trainers.close()


def links_of(pid):
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(path.readlink()))
    return found
