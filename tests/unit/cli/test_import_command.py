"""Protects ``ckstore import``: what it leaves out is printed, and its exit code says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def source(tmp_path):
    (tmp_path / "out").mkdir()
    for step in (1, 2):
        save_file({"w": np.full(4, step, np.float32)}, tmp_path / "out" / f"step_{step}.safetensors")
    return tmp_path / "out"


def test_whole_import_exits_with_0(call, tmp_path, source):
    code, out, _ = call("import", tmp_path / "store", source)
    assert (code, "left out" in out) == (0, False)
    assert out.splitlines()[0] == "run main: 2 of 2 checkpoints were imported"


def test_partial_import_exits_with_3(call, tmp_path, source):
    (source / "step_3.safetensors.tmp").write_bytes(b"x")
    code, out, _ = call("import", tmp_path / "store", source, "--exclude", "step_2.safetensors")
    assert code == 3
    assert "left out: step_2.safetensors: as asked for with --exclude step_2.safetensors" in out.splitlines()
    assert "left out: step_3.safetensors.tmp: its name says that its save was not finished" in out.splitlines()
    assert "exit code 3" in out


def test_skipped_leaf_is_printed(call, tmp_path, source):
    code, out, _ = call("import", tmp_path / "store", source / "step_1.safetensors", "--skip-leaf", "w")
    assert code == 3
    assert "left out of step 1: w: as asked for with --skip-leaf w" in out.splitlines()


def test_dry_run_prints_the_same(call, tmp_path, source):
    code, out, _ = call("import", tmp_path / "store", source, "--exclude", "step_2.safetensors", "--dry-run")
    assert code == 3
    assert "left out: step_2.safetensors" in out
    assert not (tmp_path / "store").exists()


def test_json_lists_what_was_left_out(call, tmp_path, source):
    code, out, _ = call("import", tmp_path / "store", source, "--exclude", "step_2.safetensors", "--json")
    printed = json.loads(out)
    assert code == 3
    assert printed["is_partial"] is True
    assert list(printed["left_out"]) == ["step_2.safetensors"]
    assert printed["checkpoints"][0]["left_out"] == {}
