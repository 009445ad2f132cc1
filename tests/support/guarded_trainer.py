"""A trainer whose optimizer is attached, and what of its state was saved; for the tests of the guard."""

from __future__ import annotations

import torch
from torch import nn

from ckstore.state.capture import capture
from support.fake_saver import FakeSaver


class Trainer:
    """A model with buffers, an optimizer and a running average of the weights."""

    def __init__(self, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(96, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Linear(700, 96))
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.step = None
        self.train()

    def backward(self):
        self.model(torch.randn(8, 96)).square().mean().backward()

    def train(self):
        self.optimizer.zero_grad()
        self.backward()
        (self.step or self.optimizer.step)()
        self.average.update_parameters(self.model)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
        }


def bytes_of(state):
    """Return the bytes of each storage of a state, as a commit would take them now."""
    from ckstore.state.torch_adapter import TorchAdapter

    return [bytes(storage.read(0, storage.nbytes)) for storage in capture(state, [TorchAdapter()]).storages]


def commit_and(store, state, then, step=1):
    """Commit a state, call a function immediately, and return the state at the call and the staged one."""
    wanted = bytes_of(state)
    pending = store.commit_async(state, step)
    then()
    assert pending.wait_staged()
    saver = FakeSaver.started[-1]
    return wanted, saver.content(max(saver.begun))
