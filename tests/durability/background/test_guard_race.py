"""Protects the check of the guard: a thread that changes tensors without the guard is always detected.

Whether a change comes before, during or after the copy is random. A change comes in each round, so a check that misses
one of these cases would fail within a few rounds.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

import ckstore
from ckstore.errors import CorruptError
from support.fake_saver import DelayedCopy

pytestmark = pytest.mark.usefixtures("no_threads_left", "quiet_log")

ROUNDS = 16
"""Rounds of a deep run."""
SECONDS_MAX = 60.0


@pytest.fixture
def store(folder):
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=True, compression="none", saver_nice=0)) as opened:
        yield opened


class Training:
    """Three parameters of more than one unit each, with an optimizer."""

    def __init__(self, store):
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(1100, 1000)) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-3)
        store.attach(self.optimizer)

    @property
    def state(self):
        return {"parameters": list(self.parameters)}

    def step(self):
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


class UnguardedWriter:
    """A thread that keeps changing one element without the guard.

    It restores the old value only with probability 2**-32.
    """

    def __init__(self, parameter, place):
        self.changes = 0
        self._element = parameter.detach().view(-1)[place : place + 1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer")

    def __enter__(self):
        self._thread.start()
        self.wait()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()

    def wait(self):
        """Wait until it has made another change."""
        seen, deadline = self.changes, time.monotonic() + SECONDS_MAX
        while self.changes == seen:
            assert time.monotonic() < deadline
            time.sleep(0.0002)

    def _run(self):
        while not self._stop.is_set():
            self._element += 1
            self.changes += 1
            time.sleep(0.0005)


@pytest.fixture(params=["host", "device"])
def place(request):
    """Where the parameters are: in host memory, or in simulated device memory, whose copies come at any time."""
    if request.param == "device":
        device, choice = request.getfixturevalue("on_device"), random.Random(7)
        wait = device.wait

        def wait_a_while(self, mark):
            time.sleep(choice.choice([0, 0.001, 0.01, 0.03]))
            wait(self, mark)

        request.getfixturevalue("monkeypatch").setattr(device, "wait", wait_a_while)
        device.may_copy.set()
    return request.param


@pytest.mark.deep(parts=2)
def test_changing_thread_is_detected_in_every_round(place, store, sample, note):
    rounds, seed = sample.count(ROUNDS, parts=4), sample.seed(4)
    choice = random.Random(seed)
    training = Training(store)
    changes = 0
    for number in range(rounds):
        which = choice.randrange(3)
        with UnguardedWriter(training.parameters[which], choice.randrange(1_100_000)) as writer:
            pending = store.commit_async(training.state, number)
            time.sleep(choice.choice([0, 0, 0.001, 0.01]))
            # At least one change comes between the end of the call and the guard.
            writer.wait()
            training.step()
            changes += writer.changes
        with pytest.raises(CorruptError, match="was changed between commit_async and the guard") as caught:
            pending.result()
        assert caught.value.path == ("parameters", which)
    assert store.steps() == []
    # A commit without such changes is not refused.
    assert store.commit_async(training.state, rounds).result().step == rounds
    caught_count = f"{rounds} of {rounds} commits with {changes} changes from outside"
    note(f"guard race, memory of a {place}, seed {seed}: {caught_count} were caught")


@pytest.mark.deep(parts=2)
def test_rounds_without_changes_are_stored_unchanged(place, store, sample):
    training = Training(store)
    for number in range(sample.count(ROUNDS // 2, parts=4)):
        wanted = [parameter.detach().clone() for parameter in training.parameters]
        pending = store.commit_async(training.state, number)
        training.step()
        assert pending.result().step == number
        for one, other in zip(store.restore()["parameters"], wanted, strict=True):
            assert torch.equal(one, other)


def test_change_between_call_and_copy_is_detected(store, monkeypatch):
    # A single change before anything behind the guard was copied: source and copy are equal, and both are wrong.
    held = DelayedCopy(monkeypatch)
    training = Training(store)
    pending = store.commit_async(training.state, 1)
    assert held.held
    with torch.no_grad():
        training.parameters[1][700, 3] += 1
    training.step()
    with pytest.raises(CorruptError, match=r"parameters\.1|parameters\[1\]") as caught:
        pending.result()
    assert caught.value.path == ("parameters", 1)
    store.commit_async(training.state, 2).result()
    assert store.steps() == [2]
