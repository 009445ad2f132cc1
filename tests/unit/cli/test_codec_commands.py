"""Protects stats, show --codec and repack: the command line prints what the library returns."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from support.cli_stores import on_terminal

SIZE = 100_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with a keyframe and a delta of large tensors. No test changes it."""
    path = tmp_path_factory.mktemp("trained") / "store"
    fill(path, ckstore.Policy())
    return path


@pytest.fixture
def plain(tmp_path):
    """A store of the same states, stored without compression."""
    fill(tmp_path / "plain", ckstore.Policy(compression="none"))
    return tmp_path / "plain"


def fill(path, policy):
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(SIZE).astype(np.float32)
    with ckstore.open(path, policy=policy) as store:
        for step in (10, 20):
            weights = weights + rng.standard_normal(SIZE).astype(np.float32) * np.float32(1e-5)
            moment = rng.standard_normal(SIZE).astype(np.float32)
            state = {"model": {"w": weights}, "opt": {"state": {0: {"exp_avg": moment}}}, "epoch": step}
            store.commit(state, step)


def test_show_codec_explains_the_choice(call, trained):
    code, out, err = call("show", trained, 20, "--codec")
    assert (code, err) == (0, "")
    assert "base        seq 0" in out
    assert "why" in out
    row = next(line for line in out.splitlines() if line.startswith("model.w"))
    assert row.split()[2:4] == ["delta", "delta+planes"]
    code, out, _ = call("show", trained, 10, "--codec")
    assert "none: it is a keyframe" in out


def test_show_codec_as_json_keeps_its_shape(call, trained):
    code, out, _ = call("show", trained, 20, "--codec", "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["base_seq"], shown["keyframe_seq"]) == (0, 0)
    assert set(shown) >= {"base", "base_seq", "keyframe_seq", "reason", "tensors", "step", "checkpoint_id"}
    assert set(shown["tensors"][0]) == {
        *("path", "dtype", "elements", "nbytes", "stored_nbytes", "mode", "steps", "depth"),
        *("full_bits", "previous_bits", "keyframe_bits", "stored_bits"),
    }


def test_show_codec_without_a_choice_says_so(call, plain):
    code, out, _ = call("show", plain, 20, "--codec")
    assert code == 0
    assert "its manifest does not say" in out


@pytest.mark.parametrize("exact", [[], ["--exact"]])
def test_stats_prints_groups_tensors_and_the_total(call, trained, exact):
    code, out, err = call("stats", trained, *exact)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    begin = lines.index("groups")
    assert [line.split()[0] for line in lines[begin + 2 : begin + 5]] == ["model", "opt.state.*.exp_avg", "all"]
    assert ("every element" in out) == bool(exact)


def test_stats_as_json_keep_their_shape(call, trained):
    code, out, _ = call("stats", trained, 20, "--json", "--exact")
    shown = json.loads(out)
    assert code == 0
    assert shown["is_exact"] is True
    bits = {"elements", "nbytes", "stored_nbytes", "stored_bits", "bound_bits", "full_bits"}
    assert set(shown["total"]) == bits
    assert set(shown["groups"][0]) == bits | {"key", "tensor_count", "modes"}
    (weights,) = [row for row in shown["tensors"] if row["path"] == "model.w"]
    assert weights["stored_bits"] < weights["full_bits"]
    assert weights["delta_bits"] == weights["bound_bits"]


def test_stats_of_a_state_without_tensors_says_so(call, tmp_path):
    with ckstore.open(tmp_path / "s") as store:
        store.commit({"lr": 0.1}, 1)
    code, out, _ = call("stats", tmp_path / "s")
    assert code == 0
    assert "no tensor" in out


@pytest.mark.parametrize("command", [["stats"], ["show", "--codec"], ["repack", "--dry-run"]])
def test_tables_fit_a_narrow_terminal(trained, command):
    code, drawn = on_terminal(60, command[0], trained, *command[1:])
    assert code == 0
    rows = [line for line in drawn.splitlines() if line.startswith(("model.w", "opt.state", "  1 ", "  0 "))]
    assert rows
    assert max(map(len, rows)) <= 60


def test_repack_dry_run_prints_the_plan(call, plain):
    files = sorted(plain.rglob("*"))
    code, out, err = call("repack", plain, "--dry-run")
    assert (code, err) == (0, "")
    assert sorted(plain.rglob("*")) == files
    lines = out.splitlines()
    assert lines[0] == "run main: 2 of 2 checkpoints would be rewritten"
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "20", "keyframe"], ["0", "10", "delta"]]
    assert "about" in lines[-2]
    assert lines[-1] == "Checkpoints for which a rewrite saves less than 3% are not changed."


def test_repack_does_what_its_dry_run_says(call, plain):
    planned = json.loads(call("repack", plain, "--dry-run", "--json")[1])
    code, out, _ = call("repack", plain, "--json")
    done = json.loads(out)
    assert code == 0
    assert set(done) == {
        *("run", "is_dry_run", "saving_min", "packs_before", "packs_after", "bytes_written", "superseded_count"),
        *("seconds", "checkpoints"),
    }
    assert (planned["is_dry_run"], done["is_dry_run"]) == (True, False)
    for before, after in zip(planned["checkpoints"], done["checkpoints"], strict=True):
        assert (before["seq"], before["action"], before["base_seq"]) == (
            after["seq"],
            after["action"],
            after["base_seq"],
        )
        assert (before["is_done"], after["is_done"]) == (False, True)
    assert call("verify", plain, "--level", "decode")[0] == 0
    assert "0 of 2 checkpoints were rewritten" in call("repack", plain)[1]


def test_repack_takes_its_policy_from_options(call, plain):
    code, out, _ = call("repack", plain, "--keyframes", 2, "--best", "--saving", 1, "--json")
    assert code == 0
    assert [entry["action"] for entry in json.loads(out)["checkpoints"]] == ["keyframe", "keyframe"]
    assert call("repack", plain, "--keyframes", -1)[0] == 2
    assert call("repack", plain, "--saving", 200)[0] == 2


def test_repack_with_a_live_writer_is_a_conflict(call, plain):
    with ckstore.open(plain) as store:
        store.commit({"a": 1}, 30)
        code, _, err = call("repack", plain)
    assert code == 11
    assert "being written" in err


def test_repack_of_an_empty_run_says_so(call, tmp_path):
    call("init", tmp_path / "new")
    assert call("repack", tmp_path / "new")[:2] == (0, "Run main has no checkpoint.\n")
