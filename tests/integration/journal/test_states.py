"""Protects points of unusual states: each has the keyframe that its record says."""

from __future__ import annotations

import itertools
from dataclasses import replace

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
        store.wait()
        assert [(info.step, info.fidelity) for info in store.log()][:2] == [(6, "exact"), (4, "exact")]
    with ckstore.open(place, create=False) as store:
        for step, weight in expected.items():
            assert torch.equal(store.restore(step)["model"]["weight"], weight), step


class Adapter:
    """A small parameter next to frozen weights."""

    def __init__(self):
        torch.manual_seed(0)
        self.base = torch.randn(500_000)
        self.adapter = torch.nn.Parameter(torch.randn(1000))
        self.optimizer = torch.optim.AdamW([self.adapter])

    @property
    def state(self):
        return {"base": self.base, "adapter": self.adapter, "optimizer": self.optimizer}

    def train(self, step):
        torch.manual_seed(step)
        self.adapter.grad = torch.randn(1000)
        self.optimizer.step()
        self.optimizer.zero_grad()


def journal_nbytes(place):
    return sum(path.stat().st_size for path in (place / "journals").rglob("*.ckj"))


def test_frozen_weights_are_never_stored_in_the_journal(tmp_path):
    place, expected = tmp_path / "store", {}
    for begin in (0, 3, 6):
        training = Adapter()
        with ckstore.open(place) as store:
            store.journal(training.optimizer)
            if begin:
                store.restore(into=training.state)
            for step in range(begin + 1, begin + 4):
                training.train(step)
                store.commit_async(training.state, step).result()
                expected[step] = training.adapter.detach().clone()
    assert journal_nbytes(place) < training.base.nbytes // 4
    with ckstore.open(place, create=False) as store:
        assert [info.step for info in store.log()] == [1], "no restart has stored the whole state"
        for step, adapter in expected.items():
            state = store.restore(step)
            assert torch.equal(state["adapter"], adapter), step
            assert torch.equal(state["base"], training.base), step
    training = Adapter()
    training.base.zero_()
    with ckstore.open(place, create=False) as store:
        store.journal(training.optimizer)
        store.restore(into=training.state)
    assert torch.equal(training.base, state["base"])
    assert torch.equal(training.adapter, expected[9])


def test_large_changes_begin_a_chain_and_are_stored_once(tmp_path):
    place, expected = tmp_path / "store", {}
    training = Adapter()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        store._journal._options = replace(store._journal._options, rest_nbytes_max=1 << 20)
        for step in range(1, 7):
            training.train(step)
            if step == 4:
                training.base = torch.randn(500_000)
            store.commit_async(training.state, step).result()
            expected[step] = training.base, training.adapter.detach().clone()
        assert sorted(info.step for info in store.log()) == [1, 4]
    assert journal_nbytes(place) < training.base.nbytes // 4
    with ckstore.open(place, create=False) as store:
        for step, (base, adapter) in expected.items():
            state = store.restore(step)
            assert torch.equal(state["adapter"], adapter), step
            assert torch.equal(state["base"], base), step


def test_restarts_do_not_make_replays_longer(tmp_path):
    for begin in (0, 2, 4):
        training = Adapter()
        with ckstore.open(tmp_path / "store") as store:
            store.journal(training.optimizer, keyframe_every=4)
            if begin:
                store.restore(into=training.state)
            for step in (begin + 1, begin + 2):
                training.train(step)
                store.commit_async(training.state, step).result()
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert sorted(info.step for info in store.log()) == [1, 5]


def test_state_without_a_storage_of_its_own_for_the_parameters(tmp_path):
    torch.manual_seed(0)
    flat = torch.randn(20)
    # It begins where the whole storage does, which has another shape.
    parameter = torch.nn.Parameter(flat[:10])
    optimizer = torch.optim.SGD([parameter], 0.1)
    expected = {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(optimizer)
        for step in range(1, 5):
            parameter.grad = torch.randn(10)
            optimizer.step()
            optimizer.zero_grad()
            store.commit_async({"flat": flat, "parameter": parameter, "optimizer": optimizer}, step).result()
            expected[step] = flat.clone()
        assert [info.step for info in store.log()] == [1]
    with ckstore.open(tmp_path / "store", create=False) as store:
        for step, each in expected.items():
            assert torch.equal(store.restore(step)["flat"], each), step
