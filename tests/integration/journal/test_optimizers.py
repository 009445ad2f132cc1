"""Protects journals of several optimizers: sparse gradients, frozen parameters, and steps that are not in turn."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.errors import UnsupportedError, UsageError
from support.journaled_training import JournaledTraining, bits

STEPS = 6


class Training:
    """An embedding with sparse gradients, a head with a frozen bias, and a critic that is trained every other step."""

    def __init__(self):
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(20, 4, sparse=True)
        self.head = torch.nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.critic = torch.nn.Linear(2, 1)
        self.optimizers = [
            torch.optim.SparseAdam(self.table.parameters(), 0.1),
            torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9),
            torch.optim.Adagrad(self.critic.parameters(), 0.1),
        ]

    @property
    def state(self):
        return {"table": self.table, "head": self.head, "critic": self.critic, "optimizers": self.optimizers}

    def train(self, step):
        torch.manual_seed(step)
        made = self.head(self.table(torch.randint(0, 20, (8,))))
        made.square().mean().backward()
        # The critic's turn comes first, last, or not at all.
        turns = [[0, 1, 2], [2, 1, 0], [1, 0]][step % 3]
        self.critic(made.detach()).square().mean().backward()
        for index in turns:
            self.optimizers[index].step()
            self.optimizers[index].zero_grad()


def test_every_step_comes_back(tmp_path):
    training, expected = Training(), {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(*training.optimizers)
        for step in range(1, STEPS + 1):
            training.train(step)
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
        whole = sorted(info.step for info in store.log())
    assert whole == [1]
    other = Training()
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(*other.optimizers)
        for step, found in expected.items():
            store.restore(step, into=other.state)
            assert bits(other.state) == found
        with pytest.raises(UnsupportedError, match=r"SparseAdam cannot be made again .*restore\(into=state\)"):
            store.restore(STEPS)


class OldSGD(torch.optim.Optimizer):
    """Adds weight decay to ``p.grad.data``, as torch did before 1.5."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.data
                gradient.add_(parameter.data, alpha=0.1)
                parameter.data.add_(gradient, alpha=-group["lr"])


def test_an_optimizer_that_changes_gradients_in_its_step_loses_no_commit(tmp_path, caplog):
    training = JournaledTraining(lambda model: OldSGD(model.parameters(), 0.1))
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 4))
        assert len(store.log()) == 3
    with ckstore.open(tmp_path / "store", create=False) as store:
        for step, expected in training.expected.items():
            assert bits(store.restore(step)) == expected
    assert [record.message.count("inside the step") for record in caplog.records] == [1]


class Convolution(JournaledTraining):
    """Weights whose strides are not in the order of their dimensions."""

    def __init__(self, options):
        super().__init__()
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(72, 5))
        self.model = model.to(memory_format=torch.channels_last)
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **options)

    def train(self, step):
        torch.manual_seed(step)
        self.model(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)).square().mean().backward()
        assert self.model[2].weight.grad.stride() == self.model[2].weight.stride() == (1, 5)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_gradients_are_replayed_with_the_strides_that_the_run_had(tmp_path, options):
    training = Convolution(options)
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 4))
        assert len(store.log()) == 1
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert bits(store.restore(3)) == training.expected[3]
        other = Convolution(options)
        store.journal(other.optimizer)
        store.restore(3, into=other.state)
        assert bits(other.state) == training.expected[3]


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_gradients_of_other_strides_are_noticed(tmp_path, options, caplog):
    training = JournaledTraining(lambda model: torch.optim.AdamW(model.parameters(), 1e-2, **options))
    weight = training.model.weight
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in range(1, 3):
            weight.grad = torch.randn(5, 3).t()
            training.optimizer.step()
            store.commit_async(training.state, step).result()
            training.expected[step] = bits(training.state)
        assert len(store.log()) == 2
        assert bits(store.restore(2)) == training.expected[2]
    assert [record.message.count("other strides") for record in caplog.records] == [1]


def test_optimizers_may_be_added_and_replaced_in_a_run(tmp_path):
    training, critic = JournaledTraining(), torch.nn.Linear(3, 2)
    of_critic = torch.optim.Adam(critic.parameters(), 0.1)
    state, expected = {**training.state, "critic": critic, "of_critic": of_critic}, {}

    def run(store, steps):
        for step in steps:
            training.train(step)
            critic(torch.ones(2, 3)).sum().backward()
            state["of_critic"].step()
            state["of_critic"].zero_grad()
            store.commit_async(state, step).result()
            expected[step] = bits(state)

    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer, keyframe_every=50)
        run(store, [1])
        with pytest.raises(UsageError, match="first call only"):
            store.journal(of_critic, keyframe_every=2)
        store.journal(of_critic)
        run(store, [2, 3])
        state["of_critic"] = of_critic = torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)
        with pytest.raises(UsageError, match=r"no longer exists"):
            store.commit_async(state, 4)
        store.journal(of_critic)
        run(store, [4, 5])
        assert sorted(info.step for info in store.log()) == [1, 2, 4]
    with ckstore.open(tmp_path / "store", create=False) as store:
        for step, found in expected.items():
            assert bits(store.restore(step)) == found
        with pytest.raises(UsageError):
            store.journal(object())
        store.journal(training.optimizer, of_critic)
        store.restore(into=state)
        assert bits(state) == expected[5]
