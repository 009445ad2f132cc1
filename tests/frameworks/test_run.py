"""Scripts that know nothing of ckstore save into a store when they are started through it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import ckstore
from ckstore.integrations.launch import run_of

ACCELERATE = """
import accelerate, sys, torch
import ckstore
for name, count in ("a", 2), ("b", 1), ("own", 1):
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    if name == "own":
        ckstore.accelerate.attach(accelerator, sys.argv[1] + "/own/store")
    for number in range(count):
        accelerator.save_state(f"{sys.argv[1]}/{name}/step_{number}")
    accelerator.load_state(f"{sys.argv[1]}/{name}/step_0")
    accelerator.end_training()
"""
TRANSFORMERS = """
import ckstore, importlib.util, sys, torch
importlib.util.find_spec("transformers.trainer")
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}

def trainer(name, steps):
    arguments = TrainingArguments(sys.argv[1] + "/" + name, max_steps=steps, save_steps=2, use_cpu=True, report_to=[])
    return Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 64)

trainer("a", 4).train()
trainer("b", 2).train()
trainer("a", 6).train(resume_from_checkpoint=True)
own = trainer("own", 2)
ckstore.transformers.attach(own, sys.argv[1] + "/own/store")
own.train()
"""
LIGHTNING = """
import ckstore, lightning.pytorch, sys, torch

class Model(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(name, steps, **options):
    folder = sys.argv[1] + "/" + name
    options = {"accelerator": "cpu", "logger": False, **options}
    trainer = lightning.pytorch.Trainer(default_root_dir=folder, max_steps=steps, **options)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    return any(type(each).__name__ == "ExactResume" for each in trainer.callbacks)

assert trainer("a", 4)
assert trainer("b", 2)
assert not trainer("own", 2, plugins=[ckstore.lightning.CheckpointIO(sys.argv[1] + "/own/store")])
"""


@pytest.mark.parametrize(
    ("framework", "script", "steps"),
    [
        ("accelerate", ACCELERATE, ([0, 1], [0], [0])),
        ("transformers", TRANSFORMERS, ([2, 4, 6], [2], [2])),
        ("lightning", LIGHTNING, ([4], [2], [2])),
    ],
)
def test_script_without_a_changed_line(framework, script, steps, tmp_path):
    """Each output folder gets its own run; what the script attaches itself is left alone."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "-m", "ckstore.run", "--store", tmp_path / "store"]
    subprocess.run([*command, tmp_path / "script.py", tmp_path / "out"], check=True)
    found = []
    for name in ("a", "b"):
        with ckstore.open(tmp_path / "store", run=run_of(tmp_path / "out" / name), create=False) as store:
            found.append(store.steps())
            assert len(store.runs()) == 2
    with ckstore.open(tmp_path / "out" / "own" / "store", create=False) as store:
        found.append(store.steps())
    assert tuple(found) == steps
    written = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not written & {"model.safetensors", "optimizer.pt", "optimizer.bin", "rng_state.pth", "random_states_0.pkl"}
