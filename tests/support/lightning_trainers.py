"""A process that forks the Lightning trainers that are killed: everything is imported once.

It reads one JSON job per line, runs a trainer in a forked child, kills it as the job says, and prints the result as one
JSON line. A trainer writes ``save`` when a save begins, and each step's loss as ``STEP LOSS``, to ``events`` in its
folder. A line is one write, so that it is complete even before a SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import lightning.pytorch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import ckstore
from ckstore._testing import saver_of
from ckstore.integrations import lightning as door
from ckstore.integrations.pointer_store import PointerStore

PR_SET_CHILD_SUBREAPER = 36
EPOCHS, STEPS_PER_EPOCH = 4, 3
SAVES = 2 * EPOCHS
"""At the end of each epoch, a named checkpoint and ``last.ckpt``."""


class Model(lightning.pytorch.LightningModule):
    """A model with dropout that reports its losses."""

    def __init__(self, report):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.2), torch.nn.Linear(512, 64))
        self.report = report

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.report(f"{self.global_step} {loss.item().hex()}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Plugin(ckstore.lightning.CheckpointIO):
    """Reports saves. Those from the number ``lost`` on are never staged; the process dies after ``last``."""

    def prepare(self, report, lost, last):
        self.report, self.lost, self.last, self.count = report, lost, last, 0
        return self

    def save_checkpoint(self, *args, **options):
        self.report("save")
        self.count += 1
        if self.count == self.lost:
            self.store.commit_async = lambda *_, **__: Unstaged()
        super().save_checkpoint(*args, **options)
        if self.count == self.last:
            kill(os.getpid(), saver_of(self.store).pid)


class Unstaged:
    """A commit that is still in flight when its process dies."""

    is_done = False


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def train(folder, job):
    """Train to the end, from the last checkpoint if there is one."""
    descriptor = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def report(text):
        os.write(descriptor, f"{text}\n".encode())

    if job.get("unprotected"):
        door._is_needed_to_resume = lambda file, **how: False
        door.CheckpointIO._newest_in_folder_of = lambda self, file: None
        record = PointerStore._record
        PointerStore._record = lambda self, file, step, replaces=None: record(self, file, step)
    torch.manual_seed(job["seed"])
    saving = ModelCheckpoint(dirpath=folder / "checkpoints", filename="{step}", save_top_k=1, save_last=True)
    trainer = lightning.pytorch.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Plugin(folder / "store").prepare(report, job.get("lost"), job.get("last"))],
        callbacks=[saving, ckstore.lightning.ExactResume()],
    )
    data = TensorDataset(torch.linspace(-1, 1, 12 * 64).reshape(12, 64))
    trainer.fit(Model(report), DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last")


def fork_trainer(folder, job):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(folder, job)
            status = 0
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    return child


def savers_of(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill_in_save(child, folder, job):
    """Kill a trainer some time after its n-th save has begun, and its saver too if the job says so."""
    events = folder / "events"
    while not (events.exists() and events.read_text().count("save") >= job["save"]):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)
    time.sleep(job["delay"])
    kill(child, *(savers_of(child) if job["saver_too"] else ()))


def run(job):
    folder = Path(job["folder"])
    folder.mkdir(exist_ok=True)
    child = fork_trainer(folder, job)
    if "save" in job:
        kill_in_save(child, folder, job)
    _, status = os.waitpid(child, 0)
    error = folder / "error"
    return {
        "status": os.waitstatus_to_exitcode(status),
        "events": (folder / "events").read_text().splitlines() if (folder / "events").exists() else [],
        "error": error.read_text() if error.exists() else "",
    }


def main():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        result = run(json.loads(line))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        os.write(out, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
