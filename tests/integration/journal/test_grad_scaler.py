"""Protects journals of runs with a GradScaler: unscaled gradients, skipped steps, and fused optimizers."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.state.capture import capture, loaded_adapters

STEPS, INFINITE = 6, 4


class Training:
    """A run with a scaler, which finds infinite gradients in one step."""

    def __init__(self, *, fused, unscales):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.unscales = unscales
        self.counter = {"step": 0}

    @property
    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler.state_dict()}
        return {**parts, "counter": self.counter}

    def train(self):
        self.counter["step"] += 1
        torch.manual_seed(self.counter["step"])
        loss = self.model(torch.randn(8, 6)).square().mean()
        if self.counter["step"] == INFINITE:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
            ckstore.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def bits(state):
    captured = capture(state, loaded_adapters())
    return captured.tree, [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]


@pytest.mark.parametrize(
    ("fused", "unscales", "whole"),
    [
        (False, False, [1]),
        (False, True, [1]),
        (True, True, [1]),
        # The kernel unscales gradients itself, so what it has seen is not known.
        (True, False, list(range(1, STEPS + 1))),
    ],
    ids=["plain", "clipped", "fused, clipped", "fused"],
)
def test_every_step_comes_back(tmp_path, fused, unscales, whole):
    training, expected, scales = Training(fused=fused, unscales=unscales), {}, []
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in range(1, STEPS + 1):
            training.train()
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
            scales.append(training.scaler.get_scale())
        assert sorted(info.step for info in store.log()) == whole
    assert scales[INFINITE - 1] < scales[INFINITE - 2], "the step was skipped"
    assert expected[INFINITE][1] == expected[INFINITE - 1][1], "and has changed no tensor"
    other = Training(fused=fused, unscales=unscales)
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(other.optimizer)
        for step in range(1, STEPS + 1):
            other.counter = store.restore(step, into=other.state)["counter"]
            assert bits({**other.state, "scaler": 0})[1] == expected[step][1], step


def test_state_that_is_made_in_a_skipped_step_is_stored_whole(tmp_path):
    training = Training(fused=True, unscales=True)
    training.counter["step"] = INFINITE - 1
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        store.commit_async(training.state, 1).result()
        training.train()
        store.commit_async(training.state, 2).result()
        assert sorted(info.step for info in store.log()) == [1, 2]
        expected = bits(training.state)
        assert bits(store.restore(2))[1] == expected[1]
