"""SIGKILL at random moments of saves: training always resumes, and no later loss differs from the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import CkstoreError
from ckstore.integrations.pointers import read_pointer
from support.killed_trainers import Warm

pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 24
KILLS = 200


@pytest.fixture(scope="module")
def warm():
    server = Warm()
    yield server
    server.close()


class Run:
    """A run that is killed and resumed until it ends."""

    def __init__(self, warm, folder):
        self.warm = warm
        self.output_dir = folder / "out"
        self.journal = folder / "journal"
        folder.mkdir()

    def words(self):
        return [line.split() for line in self.journal.read_text().splitlines()] if self.journal.exists() else []

    def losses(self):
        return [(int(step), loss) for kind, step, *loss in self.words() if kind == "loss"]

    def saves(self):
        return sum(kind == "save" for kind, *_ in self.words())

    def start(self, **options):
        described = {"folder": str(self.output_dir), "journal": str(self.journal), "steps": STEPS, **options}
        return self.warm.ask(train=described)

    def is_ended(self):
        """Say whether the last step is saved: transformers would train one more step."""
        return self.durable_step() == STEPS

    def durable_step(self):
        """Return the highest step whose pointer says that it is durable."""
        found = [0]
        for folder in self.output_dir.glob("checkpoint-*"):
            try:
                record = read_pointer(folder)
            except CkstoreError:
                continue
            if record.seq is not None:
                found.append(record.step)
        return max(found)

    def live(self, chance):
        """Start or resume, and kill after a random save; say whether it was killed before it ended."""
        before, durable, lives = self.saves(), self.durable_step(), len(self.starts())
        # Before anything is durable there is nothing to resume from, as in any training script.
        pid = self.start(resume=durable > 0)
        saves = before + chance.randint(1, 3)
        while self.saves() < saves and not self.is_over(pid):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.3)
        os.kill(pid, signal.SIGKILL)
        status = self.warm.ask(wait=pid)
        assert status in (0, signal.SIGKILL), self.journal.with_suffix(".txt").read_text()[-3000:]
        assert len(self.starts()) == lives + 1
        assert self.starts()[-1] >= durable
        return status != 0

    def starts(self):
        return [int(step) for kind, step, *_ in self.words() if kind == "start"]

    def is_over(self, pid):
        """Say whether the process has ended; the warm process has not waited for it yet."""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.deep(parts=1)
def test_killed_run_equals_undisturbed_run(warm, tmp_path, sample):
    undisturbed = Run(warm, tmp_path / "undisturbed")
    assert warm.ask(wait=undisturbed.start(resume=False)) == 0
    expected = dict(undisturbed.losses())
    assert len(expected) == STEPS
    chance = random.Random(sample.seed(38))
    kills, runs, wanted = 0, 0, sample.count(KILLS, parts=100)
    while kills < wanted:
        runs += 1
        run = Run(warm, tmp_path / f"run-{runs}")
        while kills < wanted and not run.is_ended():
            kills += run.live(chance)
        if not run.is_ended():
            assert warm.ask(wait=run.start(resume=run.durable_step() > 0)) == 0
        check_ended(run, expected)
    print(f"{kills} kills in {runs} runs")


def check_ended(run, expected):
    wrong = [(step, loss, expected[step]) for step, loss in run.losses() if expected[step] != loss]
    assert wrong == []
    assert {step for step, _ in run.losses()} == set(expected)
    with ckstore.open(run.output_dir / "ckstore", create=False) as store:
        stored = {info.step for info in store.log()}
    left = {int(path.name.rpartition("-")[2]) for path in run.output_dir.glob("checkpoint-*")}
    if run.words()[-1][0] == "end":
        assert stored == left == {STEPS - 2, STEPS}
    else:
        # Killed after the last save, before or in the rotation.
        assert {STEPS - 2, STEPS} <= left <= stored


def test_rule_of_transformers_would_not_resume(warm, tmp_path):
    """Without the rule of the store, a run that is killed between two files of a save does not start again."""
    run = Run(warm, tmp_path / "run")
    assert run.warm.ask(wait=run.start(resume=False, stops_at=4)) == signal.SIGKILL
    assert run.durable_step() == 2
    assert run.warm.ask(wait=run.start(resume=True, is_control=True)) != 0
    assert "did not become durable" in run.journal.with_suffix(".txt").read_text()
    assert run.warm.ask(wait=run.start(resume=True)) == 0
    assert run.starts() == [0, 2]
