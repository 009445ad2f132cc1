"""A Trainer on two ranks: rank 0 commits, every rank gets its own random states back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckstore

pytest.importorskip("transformers", reason="transformers is not installed")

PROGRAM = Path(__file__).parent.parent / "support" / "two_rank_trainer.py"


@pytest.mark.deep(parts=16)
def test_two_ranks_resume_bit_equally(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*launch, str(PROGRAM), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0][0][0].keys() == {"1", "2", "3", "4", "5", "6"}
    for undisturbed, resumed, newest, nothing in ranks:
        assert resumed == undisturbed
        assert newest[0].items() >= undisturbed[0].items()
        assert "No valid checkpoint found" in nothing
    # The best model is loaded on every rank.
    assert ranks[0][0][1] == ranks[1][0][1]
    with ckstore.open(tmp_path / "out/ckstore") as store:
        states = store.restore()["random"]
    assert len(states) == 2
    assert not torch.equal(states[0]["torch"], states[1]["torch"])
