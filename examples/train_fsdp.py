"""Train a small byte-level GPT on several ranks with FSDP2, and commit its state with ckstore every few steps.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --store checkpoints --steps 40
    torchrun --nproc-per-node 2 examples/train_fsdp.py --store checkpoints --steps 60   # resumes with two ranks

All ranks commit one checkpoint together. Weights and moments are sharded over the ranks. Each rank has random states
and a place in the data of its own, which come back to it. So a job that was killed and is started again with as many
ranks prints the same losses, bit for bit, as one that was never stopped.

With ``--events`` every step and commit is printed as a line of JSON, which ``examples/demo_ranks.py`` reads.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, Report, Settings, digest_of, print_event, read_corpus

import ckstore

RUN = "fsdp"


class Trainer:
    """One rank of the training."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self.settings = settings
        self.corpus = read_corpus(settings.corpus_nbytes)
        torch.manual_seed(settings.seed)
        self.model = GPT(settings)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for block in self.model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.step_done = 0
        # From here on, each rank draws other crops and other dropout.
        torch.manual_seed(1000 + dist.get_rank())
        self.numpy_rng = np.random.default_rng(dist.get_rank())

    def train_one_step(self) -> float:
        """Take one optimizer step and return the loss of this rank's batch."""
        window = self.settings.window
        begins = self.numpy_rng.integers(0, len(self.corpus) - window - 1, self.settings.batch)
        crops = np.stack([self.corpus[begin : begin + window + 1] for begin in begins]).astype(np.int64)
        self.optimizer.zero_grad()
        loss = self.model(torch.from_numpy(crops[:, :-1]), torch.from_numpy(crops[:, 1:]))
        loss.backward()
        self.optimizer.step()
        self.step_done += 1
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """Return everything on which the rest of the run depends."""
        own = {"torch": torch.get_rng_state(), "numpy": self.numpy_rng.bit_generator.state}
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "own": ckstore.PerRank(own),
            "step": self.step_done,
        }

    def restore(self, store: ckstore.Store) -> None:
        """Restore the newest checkpoint: shards in place, and what belongs to this rank."""
        state = store.restore(into=self.state())
        own = state["own"].value
        torch.set_rng_state(own["torch"])
        self.numpy_rng.bit_generator.state = own["numpy"]
        self.step_done = state["step"]

    def digest(self) -> str:
        """Return a digest of the whole weights and moments, the same for any number of ranks. All ranks call this."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return digest_of([model, optimizer["state"]] if dist.get_rank() == 0 else None)


def print_progress(event: str, **facts: Any) -> None:
    """Print progress for a person, on rank 0."""
    if dist.get_rank() == 0 and event in ("restored", "trained", "committed"):
        loss = f"  loss {facts['loss']:.4f}" if event == "trained" else ""
        print(f"{event:10} step {facts['step']}{loss}", flush=True)


def train(trainer: Trainer, store: ckstore.Store | None, *, steps: int, every: int, report: Report) -> None:
    """Train up to ``steps``."""
    rank = dist.get_rank()
    while trainer.step_done < steps:
        loss = trainer.train_one_step()
        step = trainer.step_done
        report("trained", rank=rank, step=step, loss=loss, loss_hex=loss.hex())
        if store is not None and step % every == 0:
            report("commit begins", rank=rank, step=step, digest=trainer.digest())
            receipt = store.commit(trainer.state(), step)
            report("committed", rank=rank, step=step, seconds=receipt.seconds["total"])


def main(arguments: list[str] | None = None) -> int:
    """Train; resume from the newest checkpoint if there is one."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", help="folder or URL of the store; without it nothing is committed")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--every", type=int, default=5, help="commit every so many steps")
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--width", type=int, default=usual.width)
    parser.add_argument("--events", action="store_true", help="JSON lines on stdout")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    report: Report = print_event if given.events else print_progress
    dist.init_process_group("gloo")
    trainer = Trainer(Settings(layers=given.layers, width=given.width, batch=4))
    store = None
    if given.store is not None:
        # With more ranks than before, new ones begin with the random states of others.
        ranks = ckstore.Ranks.of_torch(per_rank="nearest")
        store = ckstore.open(given.store, run=RUN, ranks=ranks)
        if store.latest() is not None:
            trainer.restore(store)
            report("restored", rank=dist.get_rank(), step=trainer.step_done, digest=trainer.digest())
    report("ready", rank=dist.get_rank(), pid=os.getpid())
    train(trainer, store, steps=given.steps, every=given.every, report=report)
    report("finished", rank=dist.get_rank(), step=trainer.step_done, digest=trainer.digest())
    if store is not None:
        store.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
