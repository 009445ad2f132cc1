"""Protects the order of a step: the guard runs before anything that changes parameters, in every wrapper."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from ckstore.errors import UsageError
from support.fake_saver import FakeSaver
from support.guarded_trainer import Trainer, bytes_of, commit_and

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def store(quick_saver_store):
    return quick_saver_store


class Decaying(torch.optim.Optimizer):
    """An optimizer around another one, which changes parameters before the inner one steps."""

    def __init__(self, optimizer, *, is_complete=True):
        if is_complete:
            super().__init__(optimizer.param_groups, {})
        else:
            self.param_groups, self.state = optimizer.param_groups, {}
        self.optimizer = optimizer

    def step(self, closure=None):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        self.optimizer.step(closure)


def test_wrapper_that_changes_parameters_waits(store, held):
    trainer = Trainer()
    wrapper = Decaying(trainer.optimizer)
    store.attach(wrapper)
    trainer.step = wrapper.step
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_wrapper_without_hooks_is_guarded_by_its_optimizer(store, held):
    trainer = Trainer()
    wrapper = Decaying(trainer.optimizer, is_complete=False)
    wrapper.optimizer.optimizer = wrapper
    store.attach(wrapper)
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_other_hooks_that_change_parameters_wait(store, held):
    trainer = Trainer()

    def decay(optimizer, *_):
        for parameter in trainer.model.parameters():
            parameter.data.mul_(0.5)

    trainer.optimizer.register_step_pre_hook(decay)
    store.attach(trainer.optimizer)
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


STEPS_WITH_CLOSURES = [
    partial(torch.optim.AdamW, foreach=True),
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.LBFGS, max_iter=2),
]


@pytest.mark.parametrize("optimizer", STEPS_WITH_CLOSURES, ids=["for each", "fused", "LBFGS"])
def test_commit_inside_a_step_is_copied_in_the_call(store, held, optimizer):
    """The guard has already run for that step, and the step is about to change the committed memory."""
    trainer = Trainer()
    trainer.optimizer = optimizer(trainer.model.parameters())
    store.attach(trainer.optimizer)
    wanted, pendings = [], []

    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer.model(torch.randn(8, 96)).square().mean()
        loss.backward()
        if not pendings:
            wanted.extend(bytes_of(trainer.state()))
            pendings.append(store.commit_async(trainer.state(), 1))
            assert pendings[0].is_staged
        return loss

    trainer.optimizer.step(closure)
    assert pendings[0].result().step == 1
    assert FakeSaver.started[-1].content(1) == wanted
    assert not store.commit_async(trainer.state(), 2).is_staged, "between two steps it is guarded again"


def test_commit_after_failed_step_is_copied_in_the_call(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)

    def closure():
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        trainer.optimizer.step(closure)
    assert store.commit_async(trainer.state(), 1).is_staged
    trainer.train()
    assert not store.commit_async(trainer.state(), 2).is_staged


def test_optimizer_that_lost_its_hooks_must_be_reattached(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    trainer.optimizer.__init__(trainer.model.parameters(), lr=1e-4)
    assert store.commit_async(trainer.state(), 1).is_staged
    store.attach(trainer.optimizer)
    trainer.train()
    assert not store.commit_async(trainer.state(), 2).is_staged


class Forwarding:
    """A wrapper that forwards every attribute, hooks included, to its optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


def test_deleted_wrapper_leaves_no_hooks(store, held):
    trainer = Trainer()
    for _ in range(3):
        store.attach(Forwarding(trainer.optimizer))
    gc.collect()
    assert len(trainer.optimizer._optimizer_step_pre_hooks) == len(trainer.optimizer._optimizer_step_post_hooks) == 1
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1
    trainer.train()


@dataclass
class Compared:
    optimizer: torch.optim.Optimizer


class Slotted:
    __slots__ = ("optimizer",)

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def register_step_pre_hook(self, hook):
        raise AssertionError("nobody can refer to this weakly, so it is never asked")


@pytest.mark.parametrize("wrap", [Compared, Slotted])
def test_wrapper_without_weakref_is_guarded_by_its_optimizer(store, held, wrap):
    trainer = Trainer()
    wrapper = wrap(trainer.optimizer)
    for _ in range(2):
        store.attach(wrapper)
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_optimizer_with_failing_hooks_is_refused_unchanged(store, held):
    class Half(torch.optim.SGD):
        def register_step_post_hook(self, hook):
            raise AttributeError("no such thing")

    trainer, half = Trainer(), Half([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    store.attach(trainer.optimizer)
    with pytest.raises(UsageError, match="no such thing"):
        store.attach(half)
    half.step()
    assert not half._optimizer_step_pre_hooks
    assert not store.commit_async(trainer.state(), 1).is_staged, "the other optimizer is still guarded"
