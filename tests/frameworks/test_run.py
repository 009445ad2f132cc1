"""Scripts that know nothing of ckstore save into a store when they are started through it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import ckstore

ACCELERATE = """
import accelerate, sys, torch
accelerator = accelerate.Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 1))
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
accelerator.end_training()
"""
TRANSFORMERS = """
import sys, torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}

def trainer(steps):
    arguments = TrainingArguments(sys.argv[1], max_steps=steps, save_steps=2, use_cpu=True, report_to=[])
    return Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 64)

trainer(4).train()
trainer(6).train(resume_from_checkpoint=True)
"""
LIGHTNING = """
import lightning.pytorch, sys, torch

class Model(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.pytorch.Trainer(default_root_dir=sys.argv[1], max_steps=4, accelerator="cpu", logger=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
assert any(type(each).__name__ == "ExactResume" for each in trainer.callbacks)
"""


@pytest.mark.parametrize(
    ("framework", "script", "steps"),
    [("accelerate", ACCELERATE, [0]), ("transformers", TRANSFORMERS, [2, 4, 6]), ("lightning", LIGHTNING, [4])],
)
def test_script_without_a_changed_line(framework, script, steps, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "-m", "ckstore.run", "--store", tmp_path / "store"]
    subprocess.run([*command, tmp_path / "script.py", tmp_path / "out"], check=True)
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert store.steps() == steps
    written = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not written & {"model.safetensors", "optimizer.pt", "optimizer.bin", "rng_state.pth", "random_states_0.pkl"}
