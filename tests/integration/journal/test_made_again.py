"""Protects restores without the user's objects: torch's optimizers are made again, whatever their state was."""

from __future__ import annotations

import pytest
import torch

import ckstore
from support.journaled_training import JournaledTraining, bits

STEPS = 5


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def check_all(place, training):
    """Check that each step that was committed comes back without live objects."""
    with ckstore.open(place, create=False) as store:
        for step, expected in training.expected.items():
            assert bits(store.restore(step)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters(), 1e-2),
        lambda model: torch.optim.ASGD(model.parameters(), 1e-2),
        lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9),
    ],
    ids=["AdamW", "ASGD", "SGD"],
)
def test_a_run_may_be_committed_before_its_first_step(place, make):
    training = JournaledTraining(make)
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        store.commit_async(training.state, 0).result()
        training.run(store, range(1, STEPS))
        assert [info.step for info in store.log()] == [0]
    check_all(place, training)


def test_a_parameter_may_be_trained_first_after_some_steps(place):
    class LateBias(JournaledTraining):
        def train(self, step):
            torch.manual_seed(step)
            bias = self.model.bias if step > 3 else None
            torch.nn.functional.linear(torch.randn(4, 5), self.model.weight, bias).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    training = LateBias()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 7))
        assert [info.step for info in store.log()] == [1]
    check_all(place, training)


def test_hyper_parameters_may_be_tensors(place):
    def make(model):
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.03)}]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False)

    training = JournaledTraining(make)
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 4))
        training.optimizer.param_groups[0]["lr"].mul_(0.3)
        training.run(store, range(4, 6))
        assert [info.step for info in store.log()] == [1]
    check_all(place, training)


def test_a_run_may_go_back_to_a_point_before_its_first_step(place):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        for step in (0, 1):
            store.commit_async(training.state, step).result()
        training.run(store, range(2, 4))
        store.restore(1, into=training.state)
        training.run(store, range(2, 5))
        assert [info.step for info in store.log()] == [0]
    check_all(place, training)
