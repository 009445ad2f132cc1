"""Protects the options of a restore of points: no state is returned that was not compared with the run's."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.errors import ReplayError, UsageError
from support.journaled_training import JournaledTraining, bits

STEPS = 5


class Kicked(torch.optim.SGD):
    """An optimizer whose step depends on more than gradients, groups and state."""

    kick, calls = 0.0, 0

    @torch.no_grad()
    def step(self, closure=None):
        Kicked.calls += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * 0.1).add_(Kicked.kick)


@pytest.fixture
def kick(monkeypatch):
    """Return a function that changes what the steps of ``Kicked`` do, and counts them from zero."""

    def change(value):
        monkeypatch.setattr(Kicked, "kick", value)
        monkeypatch.setattr(Kicked, "calls", 0)

    change(0.0)
    return change


def kicked():
    return JournaledTraining(lambda model: Kicked(model.parameters(), 0.1))


def trained(place, training, steps=STEPS, **options):
    """Train and commit these steps; return the bits of each."""
    with ckstore.open(place) as store:
        store.journal(training.optimizer, **options)
        training.run(store, range(1, steps + 1))
    return training.expected


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize("check", ["each", "last"])
def test_a_replay_is_compared_after_each_step_or_the_last(place, check, kick):
    expected = trained(place, kicked())
    other = kicked()
    with ckstore.open(place, create=False) as store:
        store.journal(other.optimizer)
        store.restore(4, into=other.state, replay_check=check)
        assert bits(other.state) == expected[4]
        kick(0.25)
        step = {"each": 2, "last": 4}[check]
        with pytest.raises(ReplayError, match=f"other bytes than the run had after the replayed step {step}"):
            store.restore(4, into=other.state, replay_check=check)


@pytest.mark.parametrize("check", ["none", None, True])
def test_another_check_is_refused(place, check):
    with ckstore.open(place) as store:
        store.commit({"x": 1}, 1)
        with pytest.raises(UsageError, match="replay_check is 'each' or 'last'"):
            store.restore(replay_check=check)


def test_after_step_is_called_with_each_replayed_step(place):
    trained(place, JournaledTraining())
    seen = []
    with ckstore.open(place, create=False) as store:
        store.restore(4, after_step=seen.append)
        assert seen == [2, 3, 4]
        store.restore(1, after_step=seen.append)
    assert seen == [2, 3, 4], "a checkpoint is not replayed"
