"""Protects diff, demote and what ls and show say of a loss: what they tell is what the library says."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore

SHAPE = (260, 300)


@pytest.fixture
def aged(tmp_path):
    """A store with six exact checkpoints and one that was committed with a loss."""
    place = tmp_path / "aged"
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(SHAPE)
    with ckstore.open(place) as store:
        for step in range(7):
            weights = weights + rng.standard_normal(SHAPE) * 1e-3
            second = np.exp(rng.standard_normal(SHAPE)).astype(np.float32)
            entry = {"exp_avg": (rng.standard_normal(SHAPE) / 3).astype(np.float32), "exp_avg_sq": second}
            groups = [{"betas": (0.9, 0.999), "params": [0]}]
            state = {
                "model": {"w": weights.astype(np.float32), "bias": np.arange(5.0)},
                "optimizer": {"state": {0: entry}, "param_groups": groups},
                "epoch": step,
            }
            fidelity = ckstore.Residual.near() if step == 3 else "exact"
            store.commit(state, step, policy=ckstore.Policy(fidelity=fidelity))
    return place


def test_ls_and_show_say_what_was_lost(call, aged):
    out = call("ls", aged)[1]
    line = next(line for line in out.splitlines() if line.split()[:2] == ["3", "3"])
    assert "near" in line
    code, out, _ = call("show", aged, 3)
    assert code == 0
    assert "stored with a loss" in out
    assert "fidelity  near" in out
    facts = json.loads(call("show", aged, 3, "--json")[1])
    assert {loss["path"] for loss in facts["losses"]} == {
        *("model.w", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq")
    }
    assert set(facts["losses"][0]) == {
        *("path", "role", "method", "numbers", "bits", "max_abs", "rel_rms", "kept", "hops", "spike")
    }
    assert "stored with a loss" not in call("show", aged, 2)[1]
    assert json.loads(call("show", aged, 2, "--json")[1])["losses"] == []
    assert "residual" in call("show", aged, 3, "--codec")[1]


def test_diff_prints_what_differs(call, aged):
    code, out, _ = call("diff", aged, 3, 4)
    assert code == 0
    assert "model.w" in out
    assert "model.bias" not in out
    assert "tensors: 3 changed, 1 equal; values: 1 of 4 differ" in out
    assert "step 3 (seq 3, near) -> step 4 (seq 4, exact)" in out
    assert "model.bias" in call("diff", aged, 3, 4, "--all")[1]
    assert "... and 2 more" in call("diff", aged, 3, 4, "--limit", 1)[1]
    code, out, _ = call("diff", aged, 4, 4)
    assert "equal, bit for bit" in out


def test_diff_as_json_holds_every_fact(call, aged):
    facts = json.loads(call("diff", aged, 3, "--only", "model.*", "--json")[1])
    assert set(facts) == {"first", "second", "is_equal", "tensors", "values", "value_count", "bytes_read"}
    assert (facts["first"]["step"], facts["second"]["step"]) == (3, 6)
    assert [row["status"] for row in facts["tensors"]] == ["changed", "equal"]
    assert set(facts["tensors"][0]) == {
        *("path", "status", "dtype", "shape", "elements", "changed_count", "relative", "rms", "max_abs")
    }


def test_diff_of_nothing_is_not_found(call, aged):
    assert call("diff", aged, 77, 4)[0] == 10
    assert call("diff", aged, 3, 4, "--only", "nothing")[0] == 10


def test_demote_does_what_its_dry_run_says(call, aged):
    options = ("--keep-newest", 2, "--keep-every", 5)
    planned = json.loads(call("demote", aged, *options, "--dry-run", "--json")[1])
    code, out, _ = call("demote", aged, *options, "--json")
    assert code == 0
    done = json.loads(out)
    assert set(done) == {
        *("run", "is_dry_run", "packs_before", "packs_after", "bytes_written", "seconds", "warnings", "checkpoints"),
    }
    assert [entry["action"] for entry in planned["checkpoints"]] == [entry["action"] for entry in done["checkpoints"]]
    assert [entry["seq"] for entry in done["checkpoints"] if entry["is_done"]] == [4, 2, 1]
    assert set(done["checkpoints"][0]) == {
        *("seq", "step", "action", "reason", "fidelity", "bytes_state", "stored_before", "stored_after"),
        *("worst_rel_rms", "is_done", "is_final"),
    }
    with ckstore.open(aged) as store:
        assert [info.fidelity for info in store.log()] == ["exact", "exact", "small", "near", "small", "small", "exact"]
        assert store.verify("decode").damage == []
    assert call("verify", aged, "--level", "decode")[0] == 0


def test_demote_tells_people_what_it_did(call, aged):
    out = call("demote", aged, "--dry-run")[1]
    assert "checkpoints would be demoted" in out
    assert "it is among the newest 3" in out
    code, out, _ = call("demote", aged, 1, "--fidelity", "near")
    assert code == 0
    assert "1 of 7 checkpoints were demoted" in out
    assert "`ckstore gc` frees" in out
    code, out, _ = call("show", aged, 1)
    assert "made from" in out


def test_demote_refuses_what_it_must(call, aged):
    assert call("demote", aged, "--fidelity", "exact")[0] == 2
    assert call("demote", aged, 77)[0] == 10
    call("tag", aged, 2, "good")
    code, _, err = call("demote", aged, 2)
    assert code == 11
    assert "'good'" in err


def test_demote_goes_by_the_rules_that_were_saved(call, aged):
    assert call("demote", aged, "--save-policy")[0] == 2
    assert call("demote", aged, "--keep-newest", 5, "--keep-every", 0, "--save-policy", "--dry-run")[0] == 0
    with ckstore.open(aged) as store:
        assert store.demotion is None
    assert call("demote", aged, "--keep-newest", 5, "--keep-every", 0, "--fidelity", "near", "--save-policy")[0] == 0
    with ckstore.open(aged) as store:
        assert store.demotion == ckstore.DemotePolicy(keep_newest=5, keep_every=0, fidelity=ckstore.Residual.near())
        store.commit({"w": 1}, 7)
    done = json.loads(call("demote", aged, "--json")[1])
    assert [(entry["seq"], entry["fidelity"]) for entry in done["checkpoints"] if entry["is_done"]] == [(2, "near")]
    assert call("demote", aged, "--forget-policy", "--dry-run")[0] == 0
    assert call("demote", aged, "--forget-policy", 99)[0] == 10
    with ckstore.open(aged) as store:
        assert store.demotion is None


def test_demote_warns_of_stored_rules_that_name_nothing(call, aged):
    rules = (("modle.*", "exact"), ("model.*", "exact"))
    with ckstore.open(aged) as store:
        store.set_demotion(ckstore.DemotePolicy(fidelity=ckstore.Residual.small(rules=rules)))
    for options in (("--dry-run",), ()):
        out = call("demote", aged, *options)[1]
        assert "Warning: the rule for 'modle.*' names nothing in this state; the nearest path is model." in out
        assert "'model.*'" not in out


def test_an_empty_run_is_said_to_be_empty(call, tmp_path):
    call("init", tmp_path / "new")
    assert "no checkpoint" in call("demote", tmp_path / "new")[1]
