"""Protects journals from end to end: every commit of a run comes back with the bits that were committed."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.state.capture import capture, loaded_adapters

STEPS = 12


class Training:
    """A run with everything that a state has: a buffer, a scheduler, a random state."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.counter = {"step": 0}

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "random": torch.get_rng_state(),
            "counter": self.counter,
        }

    def train(self):
        self.model(torch.randn(8, 6)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter["step"] += 1

    def restore(self, store, ref=None):
        restored = store.restore(ref, into=self.state)
        torch.set_rng_state(restored["random"])
        self.counter = restored["counter"]


def bits(state):
    captured = capture(state, loaded_adapters())
    return captured.tree, [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A store with a run of which each step was committed, and the bits of each step."""
    place = tmp_path_factory.mktemp("journal") / "store"
    training, expected = Training(), {}
    with ckstore.open(place) as store:
        store.journal(training.optimizer, keyframe_every=5)
        for step in range(1, STEPS + 1):
            training.train()
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
    return place, expected


def test_few_commits_are_whole_checkpoints(history):
    place, _ = history
    with ckstore.open(place, create=False) as store:
        steps = [info.step for info in store.log()]
    assert sorted(steps) == [1, 6, 11]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_every_step_comes_back_into_live_objects(history, step):
    place, expected = history
    other = Training()
    with ckstore.open(place, create=False) as store:
        store.journal(other.optimizer)
        other.restore(store, step)
    assert bits(other.state) == expected[step]


@pytest.mark.parametrize("step", [1, 5, STEPS])
def test_every_step_comes_back_without_live_objects(history, step):
    place, expected = history
    with ckstore.open(place, create=False) as store:
        state = store.restore(step)
    assert bits(state) == expected[step]


def test_the_newest_state_is_the_last_point(history):
    place, expected = history
    other = Training()
    with ckstore.open(place, create=False) as store:
        store.journal(other.optimizer)
        other.restore(store)
    assert bits(other.state) == expected[STEPS]


def test_a_run_that_restarts_at_a_point_goes_on_as_if_it_had_not(tmp_path):
    undisturbed = Training()
    for _ in range(8):
        undisturbed.train()
    for begin, end in ((0, 3), (3, 5), (5, 8)):
        training = Training()
        with ckstore.open(tmp_path / "store") as store:
            store.journal(training.optimizer)
            if begin:
                training.restore(store)
            assert training.counter["step"] == begin
            for step in range(begin + 1, end + 1):
                training.train()
                pending = store.commit_async(training.state, step)
            pending.result()
    assert bits(training.state) == bits(undisturbed.state)
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert [info.step for info in store.log()] == [1], "no other commit was a whole checkpoint"
        assert bits(store.restore()) == bits(store.restore(8))
