"""``make demo-ranks`` proves what it says; here with a small model and few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "demo_ranks.py"
SMALL = ("--steps", "6", "--every", "2", "--layers", "1", "--width", "48")


@pytest.mark.deep(parts=8)
def test_demo_of_many_ranks_proves_everything(tmp_path):
    command = [sys.executable, str(DEMO), "--store", str(tmp_path / "store"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("proved  ") == 5
    assert "FAILED" not in done.stdout
    assert "meshes    fsdp 2" in done.stdout
