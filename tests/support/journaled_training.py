"""A small training whose every step is committed to a store with a journal, and the bits of each state."""

from __future__ import annotations

import torch

from ckstore.state.capture import capture, loaded_adapters


def bits(state):
    """Return the structure and all bytes of a state."""
    captured = capture(state, loaded_adapters())
    return captured.tree, [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]


class JournaledTraining:
    """A model and an optimizer, trained on random numbers that depend on ``seed`` and the step."""

    def __init__(self, make=lambda model: torch.optim.AdamW(model.parameters(), 1e-2)):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = make(self.model)
        self.seed = 0
        self.expected = {}

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, step):
        """Train one step."""
        torch.manual_seed(1000 * self.seed + step)
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, store, steps, **metrics):
        """Train and commit each of these steps; remember the bits."""
        for step in steps:
            self.train(step)
            store.commit_async(self.state, step, metrics={name: of(step) for name, of in metrics.items()}).result()
            self.expected[step] = bits(self.state)
