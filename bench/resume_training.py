"""Two real training runs, and training resumed from any of their states, exact or lossy.

The byte-level GPT of ``bench/training.py`` (12.8 million parameters, the standard library's sources) is trained with
AdamW, once with beta2 0.95 and once with 0.999: lr 6e-4 after a warm-up of 50 steps, then a cosine that would reach a
tenth of it at step 2000, weight decay 0.1, gradients clipped at 1, fp32, 768 bytes per batch. The states of a chain are
kept (a keyframe at step 1000, then every 25th step to 1250), and the losses of 100 more steps. These losses are those
of an exact resume: a restored state gives the same losses bit for bit, and ``check_exact`` verifies this before
anything is compared.

Weights and moments are in ``state-<step>.npz``. The order of the data follows from the seeds, and a resume draws it
again from the start without training. Two threads: the same machine and libraries give the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.train_gpt import Settings, Trainer, read_corpus

from bench import machine
from bench.training import Arrays, Log, read, write

ROLES = ("w", "m", "v")
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
DONE = "resume.json"
PAUSE_VARIABLE = "CKSTORE_BENCH_PAUSE_FILE"
HELD_OUT_NBYTES = 200_000
HELD_OUT_BATCHES = 4


@dataclass(frozen=True)
class Plan:
    """The training parameters, the steps of the chain, and how many steps a resumed run takes."""

    name: str
    settings: Settings
    beta2: float
    first: int = 1000
    gap: int = 25
    residuals: int = 10
    resumed: int = 100

    @property
    def chain(self) -> list[int]:
        """Steps of the keyframe and of every residual."""
        return [self.first + self.gap * number for number in range(self.residuals + 1)]

    @property
    def points(self) -> tuple[int, int]:
        """Steps from which training is resumed: in the middle and at the end of the chain."""
        return self.chain[self.residuals // 2], self.chain[-1]


GPT = Settings(
    layers=4,
    width=512,
    heads=8,
    batch=6,
    dropout=0.0,
    noise=0.0,
    learning_rate=6e-4,
    warmup=50,
    horizon=2000,
    threads=2,
)
V_MIN = replace(GPT, layers=1, width=64, heads=2, window=32, batch=2, warmup=5, horizon=80, corpus_nbytes=300_000)
PLANS = {beta2: Plan(f"resume-gpt-4x512-{beta2}", GPT, beta2) for beta2 in (0.95, 0.999)}
TINY_PLANS = {
    beta2: Plan(f"resume-tiny-{beta2}", V_MIN, beta2, first=10, gap=3, residuals=2, resumed=4)
    for beta2 in (0.95, 0.999)
}


@dataclass
class Resumed:
    """The result of training resumed from a state."""

    losses: list[float]
    held_out_before: float
    held_out_after: float
    first_update: float
    """Largest |change of a weight| / lr of the first step, without weight decay."""


class Run(Trainer):
    """The training of ``examples/train_gpt.py`` with the usual optimizer of large language models."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.settings)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=plan.settings.learning_rate, betas=(0.9, plan.beta2), weight_decay=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._warm_up_then_cosine)

    def arrays(self) -> Arrays:
        """Return weights and moments by role and name; views of the living tensors."""
        found: Arrays = {}
        for name, parameter in self.model.named_parameters():
            found[f"w/{name}"] = parameter.detach().numpy()
            for role, key in MOMENTS.items():
                found[f"{role}/{name}"] = self.optimizer.state[parameter][key].numpy()
        return found

    def put(self, arrays: Arrays, step: int) -> None:
        """Set the run to its state after ``step`` steps, but with these weights and moments."""
        # Draw the batches of the skipped steps, because the order of the data is part of the state.
        for _ in range(step - self.step_done):
            self._next_batch()
        self.step_done = step
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.from_numpy(arrays[f"w/{name}"]))
                moments = {key: torch.from_numpy(arrays[f"{role}/{name}"].copy()) for role, key in MOMENTS.items()}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        rate = self.settings.learning_rate * self._warm_up_then_cosine(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scheduler.last_epoch = step

    def skip_batches(self, count: int) -> None:
        """Continue with later data: another order of the same text."""
        for _ in range(count):
            self._next_batch()

    def held_out_loss(self) -> float:
        """Return the mean loss on held-out text."""
        settings = self.settings
        text = read_corpus(settings.corpus_nbytes + HELD_OUT_NBYTES)[settings.corpus_nbytes :]
        length = settings.window + 1
        rows = text[: HELD_OUT_BATCHES * 16 * length].reshape(HELD_OUT_BATCHES, 16, length).astype(np.int64)
        with torch.no_grad():
            losses = [
                self.model(torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])).item() for batch in rows
            ]
        return float(np.mean(losses))


@dataclass(frozen=True)
class Trained:
    """A chain of states of a run, stored in a folder."""

    folder: Path
    plan: Plan

    def state(self, step: int) -> Arrays:
        """Return weights and moments of a step."""
        return read(self.folder / f"state-{step}.npz")

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run: parameters, losses by step, libraries, seconds."""
        return json.loads((self.folder / DONE).read_text())

    def exact_losses(self, step: int) -> list[float]:
        """Return the losses of the original run after a step."""
        losses = self.facts()["losses"]
        return losses[step : step + self.plan.resumed]

    def resume(self, arrays: Arrays, step: int, *, count: int | None = None, skipped_batches: int = 0) -> Resumed:
        """Train on from a state with the data that the original run saw next, or with later data."""
        with deterministic():
            run = Run(self.plan)
            run.put(arrays, step)
            run.skip_batches(skipped_batches)
            before = run.held_out_loss()
            rate = float(run.optimizer.param_groups[0]["lr"])
            weights = {name: values.detach().clone() for name, values in run.model.named_parameters()}
            losses = [_train(run)]
            first = max(
                float((values.detach() - weights[name] * (1 - 0.1 * rate)).abs().max()) / rate
                for name, values in run.model.named_parameters()
            )
            losses += [_train(run) for _ in range((count or self.plan.resumed) - 1)]
            return Resumed(losses, before, run.held_out_loss(), first)


@contextmanager
def deterministic() -> Iterator[None]:
    """Restore torch's thread count and choice of algorithms afterwards."""
    threads, was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        torch.set_num_threads(threads)


def pause() -> None:
    """Wait while the file named by ``CKSTORE_BENCH_PAUSE_FILE`` exists, because another measurement is running."""
    path = os.environ.get(PAUSE_VARIABLE)
    while path and Path(path).exists():
        time.sleep(2.0)


def ensure(cache: Path, plan: Plan, *, log: Log = print) -> Trained:
    """Return the chain of a run; train it (five to ten minutes of two cores) if it is not cached."""
    folder = cache / plan.name
    if (folder / DONE).exists():
        return Trained(folder, plan)
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    machine.check_space(cache, 2_500_000_000 if plan.settings is GPT else 10_000_000)
    began = time.perf_counter()
    with deterministic():
        run = Run(plan)
        losses: list[float] = []
        while run.step_done < plan.chain[-1] + plan.resumed:
            losses.append(_train(run))
            if run.step_done % 50 == 0:
                log(f"  {plan.name} step {run.step_done}: loss {np.mean(losses[-25:]):.3f}")
            if run.step_done in plan.chain:
                write(draft / f"state-{run.step_done}.npz", run.arrays())
    facts = {
        "parameters": sum(values.numel() for values in run.model.parameters()),
        "losses": losses,
        "seconds": time.perf_counter() - began,
        "versions": machine.versions(),
    }
    (draft / DONE).write_text(json.dumps(facts, indent=1) + "\n")
    draft.rename(folder)
    return Trained(folder, plan)


def check_exact(trained: Trained, *, count: int = 5) -> None:
    """Check that an exact state resumes with exactly the losses of the original run.

    Raises:
        AssertionError: The losses differ; then no gap is meaningful.
    """
    for step in trained.plan.points:
        expected = trained.exact_losses(step)[:count]
        found = trained.resume(trained.state(step), step, count=len(expected)).losses
        if found != expected:
            raise AssertionError(f"the exact state of step {step} resumes with {found}, the run had {expected}")


def _train(run: Run) -> float:
    pause()
    return run.train_one_step()
