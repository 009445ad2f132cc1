"""Protects points against the death of a saver: no receipt without a keyframe, and no error that repeats itself."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import ckstore
from ckstore._testing import journal_of, saver_of
from ckstore.errors import SaverError


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


def commit(store, training, step):
    training.train()
    return store.commit_async(training.state, step)


def assert_restorable(place, training, step):
    with ckstore.open(place, create=False) as store:
        assert torch.equal(store.restore(step)["model"]["weight"], training.model.weight)


def test_a_point_is_not_planned_on_one_that_fails_meanwhile(tmp_path):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        commit(store, training, 1)
        store.wait()
        pid = journal_of(store).saver_pid
        os.kill(pid, signal.SIGSTOP)
        second = commit(store, training, 2)
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(SaverError, match="repeat it"):
            commit(store, training, 3)
        killer.join()
        with pytest.raises(SaverError, match="SIGKILL"):
            second.result()
        store.commit_async(training.state, 3).result()
        assert [info.step for info in store.log()] == [3, 1], "the next commit after a lost point is a keyframe"
    assert_restorable(tmp_path / "store", training, 3)


def test_a_point_is_not_planned_on_a_keyframe_that_fails(tmp_path):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        store.prewarm(training.state)
        os.kill(saver_of(store).pid, signal.SIGSTOP)
        commit(store, training, 1)
        threading.Timer(0.3, os.kill, (saver_of(store).pid, signal.SIGKILL)).start()
        with pytest.raises(SaverError, match="repeat it"):
            commit(store, training, 2)
        store.commit_async(training.state, 2).result()
        commit(store, training, 3).result()
        assert [info.step for info in store.log()] == [2]
    assert_restorable(tmp_path / "store", training, 3)


def test_a_point_is_not_planned_on_a_failing_keyframe_of_a_restored_state(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        training = Training()
        store.journal(training.optimizer)
        for step in (1, 2, 3):
            commit(store, training, step).result()
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        store.restore(into=training.state)
        store.prewarm(training.state)
        # As if a layer was reset: the steps of the restored chain no longer lead to this state.
        with torch.no_grad():
            training.model.weight.mul_(0.5)
        os.kill(saver_of(store).pid, signal.SIGSTOP)
        store.commit_async(training.state, 3)
        threading.Timer(0.3, os.kill, (saver_of(store).pid, signal.SIGKILL)).start()
        with pytest.raises(SaverError, match="repeat it"):
            commit(store, training, 4)
        store.commit_async(training.state, 4).result()
        commit(store, training, 5).result()
    assert_restorable(tmp_path / "store", training, 5)
