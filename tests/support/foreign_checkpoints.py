"""Checkpoints as other tools write them: nanoGPT, Lightning, transformers' Trainer, torch.distributed.checkpoint."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def trained(steps, *, width=96):
    """Yield (step, model, optimizer, scheduler, loss) while a small model is trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in steps:
        loss = (model(torch.randn(32, width)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield step, model, optimizer, scheduler, loss.detach()


def copied(state):
    """Return a state with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        made = type(state)((key, copied(child)) for key, child in state.items())
        return made
    if isinstance(state, (list, tuple)):
        return type(state)(copied(child) for child in state)
    return state


def write_nanogpt(folder, steps=(0, 250, 500), *, name="ckpt_{step}.pt"):
    """Write a file a step, as nanoGPT's train.py does; return the states."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {}
    for step, model, optimizer, _, loss in trained(steps):
        states[step] = copied(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "model_args": {"n_layer": 2, "bias": False},
                "iter_num": step,
                "best_val_loss": loss,
                "config": {"learning_rate": 1e-4, "dtype": "float32"},
            }
        )
        torch.save(states[step], folder / name.format(step=step))
    return states


def write_lightning(folder, steps=(100, 200)):
    """Write files as Lightning's ModelCheckpoint does, with a last.ckpt; return the states."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {}
    for step, model, optimizer, scheduler, loss in trained(steps):
        states[step] = copied(
            {
                "epoch": step // 100,
                "global_step": step,
                "pytorch-lightning_version": "2.5.0",
                "state_dict": model.state_dict(),
                "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
                "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": loss, "last": "x"}},
                "optimizer_states": [optimizer.state_dict()],
                "lr_schedulers": [scheduler.state_dict()],
            }
        )
        torch.save(states[step], folder / f"epoch={step // 100}-step={step}-val_loss=0.{step}.ckpt")
    torch.save(states[steps[-1]], folder / "last.ckpt")
    return states


def write_trainer(folder, steps=(500, 1000), *, shards=1):
    """Write folders as transformers' Trainer does; return what an import should make of them."""
    states, log = {}, []
    for step, model, optimizer, scheduler, loss in trained(steps):
        inside = folder / f"checkpoint-{step}"
        inside.mkdir(parents=True)
        weights = copied(dict(model.state_dict()))
        _write_model(inside, weights, shards)
        torch.save(optimizer.state_dict(), inside / "optimizer.pt")
        torch.save(scheduler.state_dict(), inside / "scheduler.pt")
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
        torch.save(rng, inside / "rng_state.pth")
        # As TrainingArguments are: an object of a class, which only code can make.
        torch.save(random.Random(0), inside / "training_args.bin")
        log += [{"step": step, "loss": float(loss), "grad_norm": 1.0}, {"step": step, "eval_loss": float(loss) / 2}]
        trainer = {"global_step": step, "epoch": step / 1000, "log_history": list(log)}
        (inside / "trainer_state.json").write_text(json.dumps(trainer))
        (inside / "config.json").write_text("{}")
        states[step] = copied({"model": weights, "optimizer": optimizer.state_dict(), "trainer_state": trainer})
    return states


def _write_model(inside, weights, shards):
    names = sorted(weights)
    if shards == 1:
        save_file(weights, inside / "model.safetensors", metadata={"format": "pt"})
        return
    for number in range(shards):
        part = {name: weights[name] for name in names[number::shards]}
        save_file(part, inside / f"model-{number + 1:05d}-of-{shards:05d}.safetensors", metadata={"format": "pt"})
    (inside / "model.safetensors.index.json").write_text("{}")


def write_dcp(folder, steps=(10, 20)):
    """Write folders as torch.distributed.checkpoint does on one rank; return the states."""
    states = {}
    for step, model, optimizer, _, _ in trained(steps):
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "history": [{"a": torch.full((3,), float(step))}, {"b": "text"}],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=str(folder / f"step-{step}"), no_dist=True)
        states[step] = copied(state)
    return states
