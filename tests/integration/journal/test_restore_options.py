"""Protects the options of a restore of points: no state is returned that was not compared with the run's."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.errors import ReplayError, UnsupportedError, UsageError
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


def test_into_without_a_journal_is_filled_when_the_point_is_proved(place):
    expected = trained(place, JournaledTraining())
    other = JournaledTraining()
    with ckstore.open(place, create=False) as store:
        store.restore(4, into=other.state)
        assert bits(other.state) == expected[4]
        only_model = JournaledTraining()
        state = store.restore(into={"model": only_model.model})
        assert bits(only_model.model) == bits(store.restore()["model"])
        assert list(state) == ["model", "optimizer"]


def test_into_without_a_journal_stays_as_it_is_if_the_point_cannot_be_replayed(place, kick):
    trained(place, kicked())
    other = JournaledTraining(lambda model: torch.optim.SGD(model.parameters(), 0.1))
    before = bits(other.state)
    store = ckstore.open(place, create=False)
    with store, pytest.raises(UnsupportedError, match=r"store\.journal\(optimizer\) and then restore"):
        store.restore(4, into=other.state)
    assert bits(other.state) == before


def test_without_another_environment_a_difference_is_explained_by_the_optimizer(place, kick):
    trained(place, kicked())
    kick(0.25)
    other = kicked()
    with ckstore.open(place, create=False) as store:
        store.journal(other.optimizer)
        with pytest.raises(ReplayError, match=r"after the replayed step 2\. .*No fact of the environment differs"):
            store.restore(4, into=other.state)


def test_new_tensors_are_on_the_device_that_was_asked_for(place, monkeypatch):
    from ckstore.journal import restoring

    asked = []

    def prepare(*arguments, **options):
        asked.append(options["device"])
        return original(*arguments, **options)

    original = restoring.prepare_restore
    monkeypatch.setattr(restoring, "prepare_restore", prepare)
    trained(place, JournaledTraining())
    with ckstore.open(place, create=False) as store:
        store.restore(4, device="cpu")
        store.restore(4)
    assert asked == ["cpu", None]


def test_a_replay_that_is_compared_at_the_end_is_not_repeated_for_each_step(place, kick):
    expected = trained(place, kicked(), steps=12)
    kick(0.25)
    other = kicked()
    with ckstore.open(place, create=False) as store:
        store.journal(other.optimizer)
        store.restore(into=other.state, replay_check="last")
    assert bits(other.state) == expected[1]
    assert Kicked.calls == 11 + 1, "once as asked, and then up to the first step that differs"
