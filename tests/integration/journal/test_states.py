"""Protects points of unusual states: each has the keyframe that its record says."""

from __future__ import annotations

import itertools

import pytest
import torch

import ckstore


class Clock:
    """An object whose state differs at each call."""

    def __init__(self):
        self.ticks = itertools.count()

    def state_dict(self):
        tick = next(self.ticks)
        return {"elapsed": tick, "seen": torch.full((3,), tick), "names": "x" * (5000 + tick)}

    def load_state_dict(self, state):
        pass


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.clock = Clock()

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "clock": self.clock}

    def train(self):
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("name", ["commit", "commit_async"])
def test_state_that_differs_at_each_call_is_captured_once(tmp_path, name):
    training, expected = Training(), {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in range(1, 5):
            training.train()
            if step == 1:
                getattr(store, name)(training.state, step)
            else:
                store.commit_async(training.state, step).result()
            expected[step] = training.model.weight.detach().clone()
        assert [info.step for info in store.log()] == [1]
        assert store.steps() == [1, 2, 3, 4]
    with ckstore.open(tmp_path / "store", create=False) as store:
        for step, weight in expected.items():
            state = store.restore(step)
            assert torch.equal(state["model"]["weight"], weight)
            assert state["clock"]["seen"].tolist() == [state["clock"]["elapsed"]] * 3
    other = Training()
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(other.optimizer)
        store.restore(into=other.state)
        assert store.restored.step == 4
    assert torch.equal(other.model.weight, expected[4])


class WideTraining(Training):
    """A run whose parameters are large enough to be stored with a loss."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self):
        self.model(torch.randn(4, 300)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("name", ["commit", "commit_async"])
def test_keyframes_are_exact_with_a_lossy_policy(tmp_path, name):
    place, policy = tmp_path / "store", ckstore.Policy(fidelity="near")
    training, expected = WideTraining(), {}
    with ckstore.open(place, policy=policy) as store:
        for step in (1, 2, 3):
            training.train()
            store.commit(training.state, step)
        assert [info.fidelity for info in store.log()] == ["near", "near", "exact"]
    training = WideTraining()
    with ckstore.open(place, policy=policy) as store:
        store.journal(training.optimizer, keyframe_every=4)
        store.restore(into=training.state)
        for step in range(4, 10):
            training.train()
            if step == 6:
                getattr(store, name)(training.state, step, tags=["six"], policy=policy)
            else:
                store.commit_async(training.state, step).result()
            expected[step] = training.model.weight.detach().clone()
        assert [(info.step, info.fidelity) for info in store.log()][:2] == [(6, "exact"), (4, "exact")]
    with ckstore.open(place, create=False) as store:
        for step, weight in expected.items():
            assert torch.equal(store.restore(step)["model"]["weight"], weight), step
