"""Random states of every library come back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import UsageError
from ckstore.integrations import random_states
from ckstore.integrations.random_states import capture_rng, gather_rng, put_own_rng, put_rng


def draws():
    return random.random(), np.random.random(), torch.rand(3).tolist()


def test_states_survive_a_store(tmp_path):
    with ckstore.open(tmp_path) as store:
        store.commit({"random": gather_rng()}, 1)
        expected = draws()
        draws()
        put_own_rng(store.restore()["random"])
    assert draws() == expected


def test_state_that_does_not_fit_is_refused():
    states = capture_rng()
    with pytest.raises(UsageError, match="cannot be restored"):
        put_rng({**states, "torch": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(UsageError, match="KeyError"):
        put_rng({"python": states["python"]})


class Device:
    def __init__(self, count):
        self.states = [torch.full((4,), number, dtype=torch.uint8) for number in range(count)]

    def is_available(self):
        return True

    def device_count(self):
        return len(self.states)

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states):
        for number, state in enumerate(states):
            self.states[number] = state


def test_states_of_devices_come_back(monkeypatch, caplog):
    monkeypatch.setattr(torch, "npu", Device(2), raising=False)
    states = capture_rng()
    assert len(states["npu"]) == 2
    torch.npu.states[1].zero_()
    put_rng(states)
    assert torch.npu.states[1].tolist() == [1] * 4
    monkeypatch.setattr(torch, "npu", Device(1), raising=False)
    put_rng(states)
    assert "2 npu devices, and this process has 1" in caplog.text
    monkeypatch.delattr(torch, "npu")
    put_rng(states)
    assert "this process has none" in caplog.text


def test_each_rank_gets_its_own(monkeypatch, caplog):
    ranks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ranks.append(capture_rng())
    torch.manual_seed(2)
    expected = torch.rand(3).tolist()
    monkeypatch.setattr(random_states, "rank_and_size", lambda: (1, 2))
    put_own_rng(ranks)
    assert torch.rand(3).tolist() == expected
    monkeypatch.setattr(random_states, "rank_and_size", lambda: (2, 3))
    before = torch.get_rng_state()
    put_own_rng(ranks)
    assert torch.equal(torch.get_rng_state(), before)
    assert "2 ranks, and this run has 3" in caplog.text


def test_all_ranks_are_gathered(monkeypatch):
    def gather(into, own):
        into[:] = [own, "the other"]

    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
        all_gather_object=gather,
    )
    monkeypatch.setattr(torch, "distributed", fake)
    gathered = gather_rng()
    assert gathered[0]["python"] == random.getstate()
    assert gathered[1] == "the other"
