"""Protects a replay in another environment: other bytes are noticed, and the message names what is different."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.errors import ReplayError

STEPS = 8


class NormedDescent(torch.optim.SGD):
    """Divides by a sum over all elements, whose last bits depend on how many threads add them."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.square().sum())


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def training():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(300_001))
    return {"weight": parameter, "optimizer": NormedDescent([parameter], 1.0)}


def test_another_thread_count_is_noticed_and_named(tmp_path, thread_count, caplog):
    thread_count(1)
    state = training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(state["optimizer"])
        for step in range(STEPS):
            state["weight"].grad = torch.randn(300_001)
            state["optimizer"].step()
            store.commit_async(state, step).result()
    expected = state["weight"].detach().clone()
    other = training()
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(other["optimizer"])
        store.restore(STEPS - 1, into=other)
        assert torch.equal(other["weight"], expected)
        thread_count(2)
        with pytest.raises(ReplayError, match=r"weight has other bytes .*\(threads 1 then, 2 now\).*earlier step"):
            store.restore(STEPS - 1, into=other)
        store.restore(into=other)
        assert store.restored.step < STEPS - 1
        assert "this is an earlier state" in caplog.text
