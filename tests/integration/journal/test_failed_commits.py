"""Protects points behind a commit that failed or is not in the journal: a step with a receipt comes back."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore._testing import journal_of
from ckstore.background import journal as journal_module
from ckstore.errors import CapacityError, UsageError


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self):
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_with(place, commit_third):
    """Commit five steps, the third in another way. Return the weights after each step, and the whole checkpoints."""
    training, weights = Training(), {}
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        for step in range(1, 6):
            training.train()
            if step == 3:
                commit_third(store, training)
            else:
                store.commit_async(training.state, step).result()
            weights[step] = training.model.weight.detach().clone()
        whole = sorted(info.step for info in store.log())
    return weights, whole


def assert_restorable(place, weights, steps):
    with ckstore.open(place, create=False) as store:
        for step in steps:
            assert torch.equal(store.restore(step)["model"]["weight"], weights[step]), step


def interrupted_in(monkeypatch, owner, name, call):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_points_go_on_after_a_commit_of_another_state(tmp_path, caplog):
    def commit_weights(store, training):
        store.commit({"weights": training.model.weight}, 3)

    weights, whole = run_with(tmp_path / "store", commit_weights)
    assert whole == [1, 3, 4]
    assert_restorable(tmp_path / "store", weights, [1, 2, 4, 5])
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert torch.equal(store.restore(3)["weights"], weights[3])
    assert "a commit is not in the journal" in caplog.text


def test_background_commit_of_another_state_is_refused_and_loses_no_point(tmp_path):
    def commit_weights(store, training):
        with pytest.raises(UsageError, match="the state lacks a tensor"):
            store.commit_async({"weights": training.model.weight}, 3)

    weights, whole = run_with(tmp_path / "store", commit_weights)
    assert whole == [1, 4]
    assert_restorable(tmp_path / "store", weights, [1, 2, 4, 5])


def test_points_go_on_after_a_commit_that_found_no_room(tmp_path, monkeypatch):
    def commit(store, training):
        def fail(*_):
            raise CapacityError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "_committed", fail)
            with pytest.raises(CapacityError):
                store.commit(training.state, 3)

    weights, whole = run_with(tmp_path / "store", commit)
    assert whole == [1, 4]
    assert_restorable(tmp_path / "store", weights, [1, 2, 4, 5])


@pytest.mark.parametrize("place", ["planning", "submitting"])
@pytest.mark.parametrize("name", ["commit", "commit_async"])
def test_points_go_on_after_an_interrupted_commit(tmp_path, monkeypatch, place, name):
    def commit(store, training):
        owner, patched = (journal_module, "draft_point") if place == "planning" else (journal_of(store), "submit")
        interrupted_in(monkeypatch, owner, patched, lambda: getattr(store, name)(training.state, 3))

    weights, _ = run_with(tmp_path / "store", commit)
    assert_restorable(tmp_path / "store", weights, [1, 2, 4, 5])


def test_commit_succeeds_if_only_its_record_fails(tmp_path, monkeypatch, caplog):
    def commit(store, training):
        def fail(*_):
            raise CapacityError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(journal_of(store), "submit", fail)
            assert store.commit(training.state, 3).seq == 1
        assert "gets no record in the journal" in caplog.text

    weights, whole = run_with(tmp_path / "store", commit)
    assert whole == [1, 3, 4]
    assert_restorable(tmp_path / "store", weights, range(1, 6))


def test_keyframe_that_was_not_submitted_is_repeated(tmp_path, monkeypatch):
    training, weights = Training(), {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer, keyframe_every=3)
        for step in range(1, 7):
            training.train()
            if step == 4:
                owner = store._background
                interrupted_in(monkeypatch, owner, "submit", lambda step=step: store.commit_async(training.state, step))
            else:
                store.commit_async(training.state, step).result()
            weights[step] = training.model.weight.detach().clone()
        assert sorted(info.step for info in store.log()) == [1, 5]
    assert_restorable(tmp_path / "store", weights, range(1, 7))
