"""A Lightning run on two spawned ranks, undisturbed and then resumed: ``python two_rank_lightning.py FOLDER``.

``FOLDER/RUN-RANK.json`` gets the losses of each run and rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import ckstore


class Model(pl.LightningModule):
    """A model with dropout. Its ranks draw different random numbers, as they do where their data differ."""

    def __init__(self, losses):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
        self.path, self.losses = losses, {}

    def training_step(self, batch, batch_idx):
        torch.rand(1 + self.global_rank)
        loss = (self.net(batch) - batch).pow(2).mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def on_fit_end(self):
        Path(f"{self.path}-{self.global_rank}.json").write_text(json.dumps(self.losses))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(folder, run, *, seed, resume=None):
    # Not seed_everything: it also decides the order of a DistributedSampler, which is no random state.
    torch.manual_seed(seed)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[ckstore.lightning.CheckpointIO(folder / "store", run=run)],
        callbacks=[
            ModelCheckpoint(dirpath=folder / run, filename="{step}", save_top_k=-1),
            ckstore.lightning.ExactResume(),
        ],
    )
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Model(str(folder / run)), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=resume)


def main(folder):
    fit(folder, "undisturbed", seed=1)
    fit(folder, "resumed", seed=2, resume=folder / "undisturbed" / "step=4.ckpt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
