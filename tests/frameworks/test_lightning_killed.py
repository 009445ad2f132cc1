"""A Lightning run that is killed during a save starts again with ``ckpt_path="last"``, and continues bit for bit."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
EPOCHS, STEPS_PER_EPOCH, SAVES = 4, 3, 8
TRIALS, PARTS = 200, 18
DELAY_MAX = 0.15


@pytest.fixture(scope="module")
def run():
    """A function that runs one job of ``support/lightning_trainers.py``."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "lightning_trainers.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def run(folder, **job):
        server.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield run
    server.stdin.close()
    server.wait(60)


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    result = run(tmp_path_factory.mktemp("undisturbed"), seed=0)
    assert result["status"] == 0, result["error"]
    assert result["events"].count("save") == SAVES
    losses = losses_in(result["events"])
    assert list(losses) == list(range(EPOCHS * STEPS_PER_EPOCH))
    return losses


def losses_in(events):
    return {int(step): loss for step, loss in (event.split() for event in events if event != "save")}


def check_resumed(run, folder, killed, undisturbed, *, earliest):
    """Resume a killed run, and compare all losses with those of the undisturbed one."""
    resumed = run(folder, seed=0)
    assert resumed["status"] == 0, resumed["error"]
    events = resumed["events"][len(killed["events"]) :]
    losses = losses_in(events)
    first = min(losses, default=EPOCHS * STEPS_PER_EPOCH)
    assert losses == {step: loss for step, loss in undisturbed.items() if step >= first}
    assert first >= earliest


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_run_that_is_killed_during_a_save_continues_exactly(run, undisturbed, tmp_path, sample):
    chance = random.Random(7)
    trials = [
        (number, 1 + number % SAVES, chance.uniform(0, DELAY_MAX), number // SAVES % 2) for number in range(TRIALS)
    ]
    for number, save, delay, saver_too in sample.part(trials, parts=PARTS):
        folder = tmp_path / str(number)
        killed = run(folder, seed=0, save=save, delay=delay, saver_too=bool(saver_too))
        assert killed["status"] in (0, -9), killed["error"]
        # The epoch before the save is staged, and the one before that is durable.
        epoch = (save - 1) // 2 - bool(saver_too)
        check_resumed(run, folder, killed, undisturbed, earliest=max(0, epoch * STEPS_PER_EPOCH))


@pytest.mark.parametrize(("lost", "last"), [(3, 3), (4, 4), (3, 4)])
def test_run_whose_saves_are_lost_resumes_from_the_one_before(run, undisturbed, tmp_path, lost, last):
    killed = run(tmp_path, seed=0, lost=lost, last=last)
    assert killed["status"] == -9, killed["error"]
    check_resumed(run, tmp_path, killed, undisturbed, earliest=STEPS_PER_EPOCH)


def test_without_the_older_checkpoints_such_a_run_does_not_start(run, tmp_path):
    killed = run(tmp_path, seed=0, lost=3, last=4, unprotected=True)
    assert killed["status"] == -9, killed["error"]
    resumed = run(tmp_path, seed=0, unprotected=True)
    assert resumed["status"] == 1
    assert "did not become durable" in resumed["error"]
