"""Lightning on two ranks: rank 0 commits, every rank gets its own random states back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckstore

PROGRAM = Path(__file__).parent.parent / "support" / "two_rank_lightning.py"
STEPS_PER_EPOCH, EPOCHS = 4, 3


@pytest.mark.deep(parts=16)
def test_two_ranks_resume_bit_equally(tmp_path):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(losses) == 4
    for rank in (0, 1):
        undisturbed, resumed = losses[f"undisturbed-{rank}"], losses[f"resumed-{rank}"]
        assert list(map(int, undisturbed)) == list(range(STEPS_PER_EPOCH * EPOCHS))
        assert resumed == {step: loss for step, loss in undisturbed.items() if int(step) >= STEPS_PER_EPOCH}
    assert losses["undisturbed-0"] != losses["undisturbed-1"]
    for run, steps in (("undisturbed", [4, 8, 12]), ("resumed", [8, 12])):
        with ckstore.open(tmp_path / "store", run=run, create=False) as store:
            assert store.steps() == steps
            states = store.restore()["callbacks"]["ckstore.ExactResume"]["random"]
        assert len(states) == 2
        assert not torch.equal(states[0]["torch"], states[1]["torch"])
