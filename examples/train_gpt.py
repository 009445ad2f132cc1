"""Train a small byte-level GPT and commit its whole training state with ckstore every few steps.

    python examples/train_gpt.py --store checkpoints --steps 60 --every 5
    python examples/train_gpt.py --store checkpoints --steps 120 --every 5     # resumes where the first one ended

The text is the source of Python's standard library, so nothing is downloaded. Model, optimizer, learning-rate schedule,
three random number generators and the position in the data are all part of the state, and all of them affect the
losses: dropout uses torch's generator, cropping uses ``random``, and byte noise uses numpy. Therefore a run that is
killed and restarted must print the same losses, bit for bit, as one that was never stopped.

Commits run in the background: training waits for a copy, and the saver process writes. Parameters and moments are
copied while training continues, because the optimizer is attached and its step waits for the rest. On SIGTERM, which
schedulers send before they kill a job, the run makes one last commit after the current step.

With ``--events`` every step and commit is printed as a line of JSON, which ``examples/demo.py`` reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

RUN = "gpt"
VOCABULARY = 256
Report = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that determines the course of a run."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    window: int = 128
    batch: int = 8
    dropout: float = 0.1
    noise: float = 0.01
    learning_rate: float = 1e-3
    warmup: int = 20
    horizon: int = 1000
    corpus_nbytes: int = 4_000_000
    threads: int = 1
    seed: int = 1


def read_corpus(nbytes_max: int) -> np.ndarray:
    """Return the first bytes of the standard library's sources, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or len(text) >= nbytes_max:
            continue
        text += path.read_bytes()
    return np.frombuffer(bytes(text[:nbytes_max]), dtype=np.uint8)


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and around a residual connection."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.dropout = settings.dropout
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=False), "c_proj": nn.Linear(width, width, bias=False)}
        )
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=False), "c_proj": nn.Linear(4 * width, width, bias=False)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a batch of sequences (batch, time, width)."""
        batch, time_steps, width = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(batch, time_steps, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.attn["c_proj"](mixed.transpose(1, 2).reshape(batch, time_steps, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        hidden = self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return x + functional.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, settings.width)
        self.wpe = nn.Embedding(settings.window, settings.width)
        self.h = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.ln_f = nn.LayerNorm(settings.width)
        self.lm_head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * settings.layers) if is_last else 1.0))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of predicting ``targets``, in nats per byte."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """A training run whose whole state can be saved and restored."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        self.numpy_rng = np.random.default_rng(settings.seed)
        self.settings = settings
        self.corpus = read_corpus(settings.corpus_nbytes)
        self.model = GPT(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._warm_up_then_cosine)
        self.step_done = 0
        self.epoch = 0
        self.position = 0
        self._order: np.ndarray | None = None

    def _warm_up_then_cosine(self, step: int) -> float:
        warmup, horizon = self.settings.warmup, self.settings.horizon
        if step < warmup:
            return (step + 1) / warmup
        share = min(1.0, (step - warmup) / max(1, horizon - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * share))

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        window, batch = self.settings.window, self.settings.batch
        window_count = len(self.corpus) // window - 2
        if self._order is None or self.position + batch > window_count:
            if self._order is not None:
                self.epoch, self.position = self.epoch + 1, 0
            # The order of an epoch depends only on its number, so that only the position needs to be stored.
            self._order = np.random.default_rng((self.settings.seed, self.epoch)).permutation(window_count)
        starts = self._order[self.position : self.position + batch] * window
        self.position += batch
        begins = [int(start) + random.randrange(window) for start in starts]
        crops = np.stack([self.corpus[begin : begin + window + 1] for begin in begins])
        inputs = crops[:, :-1].astype(np.int64)
        is_noise = self.numpy_rng.random(inputs.shape) < self.settings.noise
        inputs[is_noise] = self.numpy_rng.integers(0, VOCABULARY, int(is_noise.sum()))
        return torch.from_numpy(inputs), torch.from_numpy(crops[:, 1:].astype(np.int64))

    def train_one_step(self) -> float:
        """Take one optimizer step and return its loss."""
        tokens, targets = self._next_batch()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step_done += 1
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """Return everything on which the rest of the run depends."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": self.numpy_rng.bit_generator.state,
            },
            "data": {"epoch": self.epoch, "position": self.position},
            "step": self.step_done,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned, in this or another process."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        self.numpy_rng.bit_generator.state = state["rng"]["numpy"]
        self.epoch, self.position = state["data"]["epoch"], state["data"]["position"]
        self._order = np.random.default_rng((self.settings.seed, self.epoch)).permutation(
            len(self.corpus) // self.settings.window - 2
        )
        self.step_done = state["step"]


def digest_of(state: object) -> str:
    """Return a digest of every bit of a state: structure, types, order of keys, dtypes, shapes, values."""
    hasher = hashlib.blake2b(digest_size=16)

    def visit(node: object) -> None:
        if isinstance(node, torch.Tensor):
            hasher.update(f"tensor {node.dtype} {tuple(node.shape)}".encode())
            hasher.update(node.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(node, Mapping):
            hasher.update(f"{type(node).__name__} {len(node)}".encode())
            for key, child in node.items():
                hasher.update(f"{type(key).__name__} {key!r}".encode())
                visit(child)
        elif isinstance(node, (list, tuple)):
            hasher.update(f"{type(node).__name__} {len(node)}".encode())
            for child in node:
                visit(child)
        else:
            hasher.update(f"{type(node).__name__} {node.hex() if isinstance(node, float) else repr(node)}".encode())

    visit(state)
    return hasher.hexdigest()


def print_event(event: str, **facts: object) -> None:
    """Print one line of JSON, for another program."""
    # A single write, because a background commit reports its end from another thread.
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def print_progress(event: str, **facts: Any) -> None:
    """Print progress for a person."""
    if event == "restored":
        print(f"restored step {facts['step']} (state {facts['digest']})")
    elif event == "trained" and facts["step"] % 5 == 0:
        print(f"step {facts['step']:5d}  loss {facts['loss']:.4f}")
    elif event == "committed":
        share = facts["bytes_written"] / max(1, facts["bytes_state"])
        print(
            f"step {facts['step']:5d}  waited {1e3 * facts['stall_seconds']:.1f} ms for its commit, durable after "
            f"{facts['wall_seconds']:.3f} s, {share:.0%} of the state written"
        )


class Commits:
    """The commits of a run, every few steps and at the end, and their reports.

    Args:
        store: The store.
        every: Number of steps between two commits.
        is_async: Commit in the background; otherwise training waits until each commit is durable.
        report: Called when a commit begins and ends.
        reports_all: Also report digests, and wait until each commit is staged to report that; only the demo needs this.
    """

    def __init__(self, store: Any, *, every: int, is_async: bool, report: Report, reports_all: bool) -> None:
        self.store, self.every, self.is_async = store, every, is_async
        self.report, self.reports_all = report, reports_all

    def commit(self, trainer: Trainer, loss: float) -> None:
        """Commit the whole state of a run."""
        state, step = trainer.state(), trainer.step_done
        self.report("commit begins", step=step, digest=digest_of(state) if self.reports_all else "")
        began = time.perf_counter()
        if not self.is_async:
            receipt = self.store.commit(state, step, metrics={"loss": loss})
            self._report_end(receipt, began, receipt.seconds["total"])
            return
        pending = self.store.commit_async(state, step, metrics={"loss": loss})
        pending.when_done(lambda ended: self._report_pending(ended, began))
        if self.reports_all and pending.wait_staged():
            self.report("staged", step=step)

    def _report_pending(self, pending: Any, began: float) -> None:
        receipt = pending.receipt_or_none()
        if receipt is not None:
            self._report_end(receipt, began, pending.stall_seconds)

    def _report_end(self, receipt: Any, began: float, stall_seconds: float) -> None:
        self.report(
            "committed",
            step=receipt.step,
            seq=receipt.seq,
            bytes_state=receipt.bytes_state,
            bytes_written=receipt.bytes_written,
            chunks_new=receipt.chunks_new,
            chunks_reused=receipt.chunks_reused,
            seconds=dict(receipt.seconds),
            stall_seconds=stall_seconds,
            wall_seconds=time.perf_counter() - began,
            engine=receipt.engine,
            warnings=[str(warning) for warning in receipt.warnings],
        )


def train(
    trainer: Trainer, commits: Commits | None, *, steps: int, report: Report, check: Callable[[int], object]
) -> None:
    """Train up to ``steps``; after each step ``check`` may make a last commit and end the run."""
    while trainer.step_done < steps:
        loss = trainer.train_one_step()
        step = trainer.step_done
        report("trained", step=step, loss=loss, loss_hex=loss.hex())
        if commits is not None and (step % commits.every == 0 or step == steps):
            commits.commit(trainer, loss)
        check(step)


def main(arguments: list[str] | None = None) -> int:
    """Train; resume from the newest checkpoint if there is one."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", help="folder or URL of the store; without it nothing is committed")
    parser.add_argument("--run", default=RUN)
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--every", type=int, default=5, help="commit every so many steps")
    parser.add_argument("--threads", type=int, default=usual.threads)
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--width", type=int, default=usual.width)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--sync", action="store_true", help="wait for each commit until it is durable")
    parser.add_argument("--events", action="store_true", help="JSON lines on stdout")
    given = parser.parse_args(arguments)
    report: Report = print_event if given.events else print_progress
    trainer = Trainer(Settings(layers=given.layers, width=given.width, threads=given.threads, seed=given.seed))
    if given.store is None:
        train(trainer, None, steps=given.steps, report=report, check=lambda step: None)
    else:
        import ckstore

        logging.basicConfig(format="%(message)s")
        with ckstore.open(given.store, run=given.run) as store:
            if store.latest() is not None:
                trainer.load(store.restore())
                report("restored", step=trainer.step_done, digest=digest_of(trainer.state()))
            store.attach(trainer.optimizer)
            commits = Commits(
                store, every=given.every, is_async=not given.sync, report=report, reports_all=given.events
            )
            with store.commit_on_signal(trainer.state) as last:
                train(trainer, commits, steps=given.steps, report=report, check=last.check)
    report("finished", step=trainer.step_done, digest=digest_of(trainer.state()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
