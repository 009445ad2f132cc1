"""Synthetic training: states that change like those of a real one, for tests of lossy checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ckstore
from ckstore.ops.inspect.contents import LossRow

W, M, V = "model.w", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"
"""What an AdamRun has of a weight, its first and its second moment."""

LARGE = (260, 260)
"""Tensors of this size have chunks of their own under every policy."""


def lossy_policy(fidelity: object = None, **changes: Any) -> ckstore.Policy:
    """Return a policy that loses something, on two threads."""
    return ckstore.Policy(**{"fidelity": fidelity or ckstore.Residual.near(), "threads": 2, **changes})


def leaf(state: Any, path: str) -> Any:
    """Return the part of a state at a dotted path."""
    for key in path.split("."):
        state = state[int(key) if key.isdigit() else key]
    return state


def losses(store: ckstore.Store, ref: int | str = "latest") -> dict[str, LossRow]:
    """Return what a checkpoint lost, by path."""
    return {row.path: row for row in store.contents(ref).losses}


class AdamRun:
    """A pretended training with Adam, whose gradients have rows and columns of different sizes."""

    def __init__(
        self,
        seed: int = 1,
        *,
        shape: tuple[int, int] = (96, 160),
        dtype: Any = np.float32,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape, self.dtype, self.betas, self.steps = shape, dtype, betas, 0
        self.w: NDArray[np.float32] = (self.rng.standard_normal(shape) * 0.02).astype(np.float32)
        self.m, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.sizes = np.exp(self.rng.standard_normal((shape[0], 1)) + self.rng.standard_normal((1, shape[1])))

    def train(self, count: int = 5) -> AdamRun:
        """Make so many steps."""
        one, two = self.betas
        for _ in range(count):
            gradient = self.rng.standard_normal(self.shape) * self.sizes * 1e-4
            self.m = (one * self.m + (1 - one) * gradient).astype(np.float32)
            self.v = (two * self.v + (1 - two) * gradient**2).astype(np.float32)
            self.steps += 1
            self.w = (self.w - 1e-3 * self.m / np.sqrt(self.v + 1e-16)).astype(np.float32)
        return self

    def state(self) -> dict[str, Any]:
        """Return what is committed: the model, the optimizer as torch has it, and more that must stay exact."""
        entry = {"step": np.array(float(self.steps), np.float32)}
        entry |= {"exp_avg": self.m.astype(self.dtype), "exp_avg_sq": self.v.astype(self.dtype)}
        return {
            "model": {"w": self.w.astype(self.dtype), "bias": self.w[0].copy()},
            "optimizer": {"state": {0: entry}, "param_groups": [{"lr": 1e-3, "betas": self.betas, "params": [0]}]},
            "rng": np.arange(5000, dtype=np.uint8),
            "epoch": 3,
        }
