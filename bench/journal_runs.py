"""Trainings whose gradients the journal cases store: precisions, optimizers, clipping, micro-batches, idle experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from examples.train_gpt import GPT, Settings, Trainer
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bench.training import Arrays

OPTIMIZERS = ("AdamW", "SGD", "Lion", "Muon")
RATES = {"AdamW": 6e-4, "SGD": 0.05, "Lion": 1e-4, "Muon": 0.01}


@dataclass(frozen=True)
class Kind:
    """How a training makes gradients.

    Attributes:
        is_bf16: Whether forward and backward run in bf16 autocast.
        optimizer: One of ``OPTIMIZERS``.
        clip: The largest norm of all gradients; None: they are not clipped.
        micro_count: Batches whose gradients are added in fp32.
        beta2: AdamW's.
        experts: Experts of a MoE layer; each sequence has one. 0: there is no such layer.
    """

    is_bf16: bool = True
    optimizer: str = "AdamW"
    clip: float | None = None
    micro_count: int = 1
    beta2: float = 0.95
    experts: int = 0


class Lion(torch.optim.Optimizer):
    """Lion, as its authors' pseudocode says: https://arxiv.org/abs/2302.06675, algorithm 2."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = average.mul(beta1).add_(parameter.grad, alpha=1 - beta1).sign_()
                parameter.mul_(1 - lr * decay).add_(update, alpha=-lr)
                average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


class Experts(nn.Module):
    """An MLP for each expert, in stacked weights. A router chooses one expert for each sequence."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) * (0.02 / width**0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a batch of sequences (batch, time, width)."""
        shares = self.router(x.mean(1)).softmax(-1)
        chosen = shares.argmax(-1)
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().flatten()
            hidden = functional.gelu(x[rows] @ self.up[expert])
            found = hidden @ self.down[expert] * shares[rows, expert].view(-1, 1, 1)
            made = made.index_copy(0, rows, found.to(x.dtype))
        return x + made


class RoundedProducts(TorchDispatchMode):
    """Compute products of bf16 matrices in fp32, and round them once, as GPUs do.

    torch's own kernel takes 20 times as long on processors without instructions for bf16.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator of torch."""
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.bfloat16:
            return torch.mm(args[0].float(), args[1].float()).bfloat16()
        if func is torch.ops.aten.addmm.default and args[0].dtype == torch.bfloat16:
            return torch.addmm(*(each.float() for each in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


class Seen(NamedTuple):
    """A gradient: as backward made it, and as the optimizer saw it."""

    made: np.ndarray
    seen: np.ndarray


class JournaledRun:
    """A training on the text of ``examples/train_gpt.py``.

    Args:
        settings: Size of the model and of a batch.
        kind: How it makes gradients.
        arrays: Weights to begin with, and AdamW's moments; None: train from the beginning.
        options: Further arguments of torch's AdamW.
    """

    def __init__(
        self, settings: Settings, kind: Kind, arrays: Arrays | None = None, options: dict[str, bool] | None = None
    ) -> None:
        self._data = Trainer(settings)
        self.kind = kind
        self.model: GPT = self._data.model
        if kind.experts:
            self.model.h.append(Experts(settings.width, kind.experts))
        named = dict(self.model.named_parameters())
        if arrays is not None:
            with torch.no_grad():
                for name, parameter in named.items():
                    if f"model/{name}" in arrays:
                        parameter.copy_(torch.from_numpy(arrays[f"model/{name}"]))
        self.optimizers = optimizers_of(kind, self.model, options or {})
        if arrays is not None and kind.optimizer == "AdamW":
            _load_moments(self.optimizers[0], named, arrays)
        self.step_done = 0
        self.on_gradients: Callable[[], object] = lambda: None
        """Called after backward, before the gradients are clipped."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, by name."""
        return dict(self.model.named_parameters())

    @property
    def count(self) -> int:
        """How many numbers the parameters have."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        """What is committed."""
        return {
            "model": self.model,
            "optimizers": self.optimizers,
            "rng": torch.get_rng_state(),
            "step": self.step_done,
        }

    def backward(self) -> None:
        """Make the gradients of a step, and clip them."""
        import ckstore

        for _ in range(self.kind.micro_count):
            tokens, targets = self._data._next_batch()
            with RoundedProducts() if self.kind.is_bf16 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.kind.is_bf16):
                    loss = self.model(tokens, targets)
                (loss / self.kind.micro_count).backward()
        self.on_gradients()
        if self.kind.clip is not None:
            ckstore.clip_grad_norm_(self.model.parameters(), self.kind.clip)

    def update(self) -> None:
        """Take the steps of the optimizers."""
        with self.fast_products():
            for optimizer in self.optimizers:
                optimizer.step()
        self.step_done += 1

    def fast_products(self) -> contextlib.AbstractContextManager[object]:
        """Return the mode in which the optimizers step, here and in a replay. Muon multiplies bf16 matrices."""
        return RoundedProducts() if self.kind.optimizer == "Muon" else contextlib.nullcontext()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Take one step."""
        self.backward()
        self.update()
        self.zero_grad()


def optimizers_of(kind: Kind, model: nn.Module, options: dict[str, bool]) -> list[torch.optim.Optimizer]:
    """Return new optimizers of this kind, with further arguments of torch's AdamW."""
    rate = RATES[kind.optimizer]
    if kind.optimizer == "SGD":
        return [torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=0.01)]
    if kind.optimizer == "Lion":
        return [Lion(model.parameters(), rate)]
    adamw: dict[str, Any] = {"lr": RATES["AdamW"], "betas": (0.9, kind.beta2), "weight_decay": 0.1, **options}
    if kind.optimizer == "AdamW":
        return [torch.optim.AdamW(model.parameters(), **adamw)]
    named = list(model.named_parameters())
    hidden = [value for name, value in named if name.startswith("h.") and value.dim() == 2]
    rest = [value for name, value in named if not (name.startswith("h.") and value.dim() == 2)]
    return [torch.optim.Muon(hidden, lr=rate), torch.optim.AdamW(rest, **adamw)]


def _load_moments(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], arrays: Arrays) -> None:
    for name, parameter in named.items():
        if f"exp_avg/{name}" in arrays:
            moments = {role: torch.from_numpy(arrays[f"{role}/{name}"].copy()) for role in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(300.0), **moments}


@contextlib.contextmanager
def noted_gradients(run: JournaledRun) -> Iterator[dict[str, Seen]]:
    """Yield a mapping that holds copies of the gradients of the last step, by parameter."""
    made: dict[str, np.ndarray] = {}
    found: dict[str, Seen] = {}

    def note() -> None:
        made.clear()
        made.update(
            {name: value.grad.numpy().copy() for name, value in run.parameters.items() if value.grad is not None}
        )

    update = run.update

    def noting() -> None:
        found.clear()
        for name, parameter in run.parameters.items():
            if parameter.grad is not None:
                found[name] = Seen(made[name], parameter.grad.numpy().copy())
        update()

    run.on_gradients = note
    run.update = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        run.on_gradients = lambda: None
        run.update = update  # type: ignore[method-assign]


def settings_of(size: str) -> Settings:
    """Return the settings of a model: ``12.8 M``, ``31.7 M``, or ``small``."""
    base = Settings(layers=4, width=512, heads=8, batch=6, dropout=0.0, noise=0.0)
    return {"12.8 M": base, "31.7 M": replace(base, layers=10), "small": Settings(1, 64, 2, 32, 2, 0.0, 0.0)}[size]
