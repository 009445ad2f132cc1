"""Protects the order in which a step happens: first the guard, then whatever changes parameters, at every level."""

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
    """An optimizer around another one, which changes parameters before that one steps."""

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


def test_wrapper_that_changes_parameters_itself_waits_too(store, held):
    trainer = Trainer()
    wrapper = Decaying(trainer.optimizer)
    store.attach(wrapper)
    trainer.step = wrapper.step
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_wrapper_without_hooks_of_its_own_guards_as_its_optimizer_does(store, held):
    trainer = Trainer()
    wrapper = Decaying(trainer.optimizer, is_complete=False)
    wrapper.optimizer.optimizer = wrapper
    store.attach(wrapper)
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_hooks_of_others_that_change_parameters_wait_too(store, held):
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
def test_commit_inside_a_step_is_copied_before_it_returns(store, held, optimizer):
    """The guard has let that step pass, and it is about to change what was committed."""
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


def test_step_that_failed_has_the_next_state_copied_at_once_and_the_one_after_guarded(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)

    def closure():
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        trainer.optimizer.step(closure)
    assert store.commit_async(trainer.state(), 1).is_staged
    trainer.train()
    assert not store.commit_async(trainer.state(), 2).is_staged


def test_optimizer_that_has_forgotten_its_hooks_guards_nothing_until_it_is_attached_again(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    trainer.optimizer.__init__(trainer.model.parameters(), lr=1e-4)
    assert store.commit_async(trainer.state(), 1).is_staged
    store.attach(trainer.optimizer)
    trainer.train()
    assert not store.commit_async(trainer.state(), 2).is_staged


class Forwarding:
    """A wrapper whose hooks, and all else, are those of the optimizer in it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


def test_wrapper_that_is_gone_leaves_nothing_in_the_optimizer_that_it_was_around(store, held):
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
def test_wrapper_that_cannot_be_referred_to_weakly_guards_as_its_optimizer_does(store, held, wrap):
    trainer = Trainer()
    wrapper = wrap(trainer.optimizer)
    for _ in range(2):
        store.attach(wrapper)
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_optimizer_that_can_only_half_be_hooked_is_refused_and_left_as_it_was(store, held):
    class Half(torch.optim.SGD):
        def register_step_post_hook(self, hook):
            raise AttributeError("no such thing")

    trainer, half = Trainer(), Half([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    store.attach(trainer.optimizer)
    with pytest.raises(UsageError, match="no such thing"):
        store.attach(half)
    half.step()
    assert not half._optimizer_step_pre_hooks
    assert not store.commit_async(trainer.state(), 1).is_staged, "the other one is guarded as before"
