"""The training run with which every ratio is measured; this bench trains it once and stores it in the cache folder.

A byte-level GPT (12.8 M parameters, 4 layers of width 512; AdamW, lr 6e-4 after a warm-up, then a cosine
to a tenth of it at the end, betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1) learns the standard
library's sources. Stored files:

- ``step-<n>.npz``: weights and both moments in fp32 at step 300, at 301 and 310 (gaps 1 and 10), and then at
  every 25th step to 775: a history of twenty checkpoints, and the pair of gap 100. 154 MB each.
- ``rl-<k>.npz``: bf16 weights of five successive further steps with lr 5e-7, as in reinforcement fine-tuning:
  about one value in a hundred changes per step.
- ``lora-<k>.npz``: adapters and their moments, every tenth further step with the base frozen.

A bf16 model with an fp32 master is not stored: its weights are the exact roundings of the fp32 ones, as mixed
precision makes them. One thread and fixed seeds: the same machine and libraries make the same bits again.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.train_gpt import Settings, Trainer
from torch import nn

from bench import machine

Log = Callable[[str], None]
Arrays = dict[str, np.ndarray]
"""Path of a tensor, for example ``exp_avg/h.0.ln_1.weight`` -> its values; bf16 as ``uint16`` patterns."""

BETAS = (0.9, 0.95)
RL_COUNT, RL_WARM_STEPS, RL_RATE = 6, 20, 5e-7
LORA_COUNT, LORA_GAP, LORA_RANK, LORA_RATE = 5, 10, 16, 2e-4
ROLES = ("model", "exp_avg", "exp_avg_sq")
DONE = "training.json"


@dataclass(frozen=True)
class Plan:
    """The training parameters, and the steps whose states are kept."""

    name: str
    settings: Settings
    first: int
    gap: int
    count: int
    pair_gaps: tuple[int, ...] = (1, 10, 100)

    @property
    def history(self) -> list[int]:
        """The steps of the history."""
        return [self.first + self.gap * number for number in range(self.count)]

    @property
    def kept(self) -> list[int]:
        """Every step whose whole state is kept."""
        return sorted({*self.history, *(self.first + gap for gap in self.pair_gaps)})


REAL = Plan(
    "training-gpt-4x512",
    Settings(layers=4, width=512, heads=8, batch=6, dropout=0.0, noise=0.0, learning_rate=6e-4, warmup=50, horizon=775),
    first=300,
    gap=25,
    count=20,
)
SMALL = Plan(
    "training-small",
    Settings(layers=1, width=128, heads=2, batch=2, dropout=0.0, noise=0.0, learning_rate=6e-4, warmup=5, horizon=110),
    first=10,
    gap=10,
    count=11,
)


def rne_bf16(values: np.ndarray) -> np.ndarray:
    """Return the nearest bf16 patterns of fp32 values, ties to even, as torch rounds them."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


class Run(Trainer):
    """The training of ``examples/train_gpt.py`` with the usual optimizer of large language models."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.restart(self.model.parameters(), settings.learning_rate, self._warm_up_then_cosine)

    def restart(
        self, parameters: Iterator[nn.Parameter], rate: float, schedule: Callable[[int], float] = lambda _: 1.0
    ) -> None:
        """Train these parameters from here on, with fresh moments."""
        self.optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def arrays(self) -> Arrays:
        """Return the trained tensors and their moments, by path; views of the living tensors."""
        found: Arrays = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                moments = self.optimizer.state[parameter]
                found[f"model/{name}"] = parameter.detach().numpy()
                found |= {f"{role}/{name}": moments[role].numpy() for role in ROLES[1:]}
        return found


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the output of the adapter."""
        return self.base(x) + 2.0 * (x @ self.lora_a.T) @ self.lora_b.T


@dataclass(frozen=True)
class Training:
    """The stored states of a run, in a folder."""

    folder: Path
    plan: Plan

    def step(self, number: int) -> Arrays:
        """Return weights and moments, fp32, of a step."""
        return read(self.folder / f"step-{number}.npz")

    def rl(self) -> list[Arrays]:
        """Return the bf16 weights of successive steps with a tiny learning rate."""
        return [read(self.folder / f"rl-{number}.npz") for number in range(RL_COUNT)]

    def lora(self) -> list[Arrays]:
        """Return states of a frozen bf16 base with fp32 adapters and their moments."""
        base = read(self.folder / "lora-base.npz")
        return [{**base, **read(self.folder / f"lora-{number}.npz")} for number in range(LORA_COUNT)]

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: parameters, losses, libraries, seconds."""
        return json.loads((self.folder / DONE).read_text())


def read(path: Path) -> Arrays:
    """Return the content of a state file, in the order in which it was written."""
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def write(path: Path, arrays: Arrays) -> None:
    """Write arrays, uncompressed."""
    named: dict[str, Any] = dict(arrays)
    np.savez(path, **named)


def ensure(cache: Path, plan: Plan = REAL, *, log: Log = print) -> Training:
    """Return the states of a run; train it (seven minutes of one core) if it is not cached."""
    folder = cache / plan.name
    if (folder / DONE).exists():
        return Training(folder, plan)
    if plan is REAL:
        log(f"training a GPT, once (some minutes); its states (3.5 GB) go to {folder}")
        machine.check_space(cache, 4_000_000_000)
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    began, threads = time.perf_counter(), torch.get_num_threads()
    try:
        facts = _train_all(draft, log, plan)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    facts["seconds"] = time.perf_counter() - began
    (draft / DONE).write_text(json.dumps(facts, indent=1) + "\n")
    draft.rename(folder)
    return Training(folder, plan)


def _train_all(folder: Path, log: Log, plan: Plan) -> dict[str, object]:
    run, last = Run(plan.settings), deque[float](maxlen=25)
    losses: dict[int, float] = {}
    while run.step_done < plan.kept[-1]:
        last.append(run.train_one_step())
        if run.step_done % 50 == 0:
            log(f"  step {run.step_done}: loss {statistics.fmean(last):.3f}")
        if run.step_done in plan.kept:
            losses[run.step_done] = statistics.fmean(last)
            write(folder / f"step-{run.step_done}.npz", run.arrays())
    changed = _train_rl(run, folder)
    log(f"  rl-like: {changed[-1]:.2%} of the bf16 values change a step")
    loss = _train_lora(run, folder)
    log(f"  lora: loss {loss:.3f}")
    count = sum(parameter.numel() for parameter in run.model.parameters() if not parameter.requires_grad)
    return {"parameters": count, "losses": losses, "rl_changed": changed, "versions": machine.versions()}


def _train_rl(run: Run, folder: Path) -> list[float]:
    """Train on with a tiny learning rate; return the share of bf16 values that each kept step changed."""
    run.restart(run.model.parameters(), RL_RATE)
    for _ in range(RL_WARM_STEPS):
        run.train_one_step()
    changed: list[float] = []
    last: Arrays = {}
    for number in range(RL_COUNT):
        run.train_one_step()
        now = {f"model/{name}": rne_bf16(values.detach().numpy()) for name, values in run.model.named_parameters()}
        if last:
            count = sum(int(np.count_nonzero(now[path] != last[path])) for path in now)
            changed.append(count / sum(values.size for values in now.values()))
        write(folder / f"rl-{number}.npz", now)
        last = now
    return changed


def _train_lora(run: Run, folder: Path) -> float:
    """Train adapters on every linear layer of the blocks, with all else frozen; return the last loss."""
    base = {f"model/{name}": rne_bf16(values.detach().numpy()) for name, values in run.model.named_parameters()}
    write(folder / "lora-base.npz", base)
    run.model.requires_grad_(False)
    for block in run.model.h:
        for layers in (block.get_submodule("attn"), block.get_submodule("mlp")):
            for name, layer in list(layers.named_children()):
                assert isinstance(layer, nn.Linear)
                layers.register_module(name, Adapted(layer, LORA_RANK))
    run.restart((values for values in run.model.parameters() if values.requires_grad), LORA_RATE)
    loss = 0.0
    for number in range(LORA_COUNT):
        for _ in range(LORA_GAP):
            loss = run.train_one_step()
        write(folder / f"lora-{number}.npz", run.arrays())
    return loss
