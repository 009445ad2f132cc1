"""Protects README's loop, verbatim: it stores the end of training and resumes from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckstore

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def loop(folder, monkeypatch):
    """Run README's loop in a temporary folder, with a model that learns to count."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    (source,) = re.findall(r"## In a training loop\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)

    def train_one_step(model, optimizer):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return float(model.weight.detach()[0, 0])

    def run(steps=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        names = {"model": model, "optimizer": optimizer, "train_one_step": train_one_step}
        words = source if steps is None else source.replace("steps = 10_000", f"steps = {steps}")
        assert steps is None or words != source
        exec(compile(words, "README.md", "exec"), names)
        return model

    return run


def test_loop_stores_the_end_of_training_and_resumes(loop):
    part = loop(30)
    with ckstore.open("checkpoints", create=False) as store:
        assert store.latest().step == 29
        assert torch.equal(store.restore(only="model.weight")["model"]["weight"], part.weight.detach())
    whole = loop()
    with ckstore.open("checkpoints", create=False) as store:
        assert store.latest().step == 9_999
        state = store.restore()
        assert state["step"] == 10_000
        assert torch.equal(state["model"]["weight"], whole.weight.detach())
        assert state["optimizer"]["state"][0]["momentum_buffer"] is not None
        count = len(store.log())
    loop()
    with ckstore.open("checkpoints", create=False) as store:
        assert len(store.log()) == count, "a training that has ended has nothing to add"
        assert store.verify("decode").is_clean
