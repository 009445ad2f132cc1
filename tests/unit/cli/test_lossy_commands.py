"""Protects diff, demote, and the loss in ls and show: the command line prints what the library returns."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore

SHAPE = (260, 300)


@pytest.fixture
def aged(tmp_path):
    """A store with six exact checkpoints and a lossy one."""
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


def test_ls_and_show_print_the_loss(call, aged):
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


def test_demote_matches_its_dry_run(call, aged):
    options = ("--keep-newest", 2, "--keep-every", 5)
    planned = json.loads(call("demote", aged, *options, "--dry-run", "--json")[1])
    code, out, _ = call("demote", aged, *options, "--json")
    assert code == 0
    done = json.loads(out)
    assert set(done) == {
        *(
            "run",
            "is_dry_run",
            "form",
            "fidelity",
            "packs_before",
            "packs_after",
            "bytes_written",
            "seconds",
            "warnings",
            "checkpoints",
        ),
    }
    assert [entry["action"] for entry in planned["checkpoints"]] == [entry["action"] for entry in done["checkpoints"]]
    assert [entry["seq"] for entry in done["checkpoints"] if entry["is_done"]] == [4, 2, 1]
    assert set(done["checkpoints"][0]) == {
        *("seq", "step", "action", "reason", "form", "fidelity", "bytes_state", "stored_before", "stored_after"),
        *("worst_rel_rms", "is_done", "is_final"),
    }
    with ckstore.open(aged) as store:
        assert [info.fidelity for info in store.log()] == ["exact", "exact", "near", "near", "near", "near", "exact"]
        assert store.verify("decode").damage == []
    assert call("verify", aged, "--level", "decode")[0] == 0


def test_demote_prints_what_it_did(call, aged):
    out = call("demote", aged, "--dry-run")[1]
    assert "checkpoints would be demoted" in out
    assert "it is one of the newest 3" in out
    code, out, _ = call("demote", aged, 1, "--fidelity", "near")
    assert code == 0
    assert "1 of 7 checkpoints were demoted" in out
    assert "`ckstore gc` frees the old packs" in out
    code, out, _ = call("show", aged, 1)
    assert "made from" in out


def test_demote_refuses_wrong_calls(call, aged):
    assert call("demote", aged, "--fidelity", "exact")[0] == 2
    assert call("demote", aged, 77)[0] == 10
    call("tag", aged, 2, "good")
    code, _, err = call("demote", aged, 2)
    assert code == 11
    assert "'good'" in err


def test_demote_uses_the_stored_rules(call, aged):
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


def test_demote_warns_about_stored_rules_without_match(call, aged):
    rules = (("modle.*", "exact"), ("model.*", "exact"))
    with ckstore.open(aged) as store:
        store.set_demotion(ckstore.DemotePolicy(fidelity=ckstore.Residual.small(rules=rules)))
    for options in (("--dry-run",), ()):
        out = call("demote", aged, *options)[1]
        assert "Warning: the rule for 'modle.*' matches nothing in this state; the nearest path is model." in out
        assert "'model.*'" not in out


def test_demote_of_an_empty_run_says_so(call, tmp_path):
    call("init", tmp_path / "new")
    assert "no checkpoint" in call("demote", tmp_path / "new")[1]


class _Terminal:
    """A fake terminal user who gives the same answer to every question."""

    def __init__(self, monkeypatch, answer):
        self.questions = []
        monkeypatch.setattr("ckstore.cli.render.is_terminal", lambda: True)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("typer.confirm", lambda question: self.questions.append(question) or answer)


def fidelities(path):
    with ckstore.open(path, create=False) as store:
        return [info.fidelity for info in store.log()]


def test_demote_asks_on_a_terminal(call, aged, monkeypatch):
    before = fidelities(aged)
    person = _Terminal(monkeypatch, False)
    code, out, _ = call("demote", aged, "--keep-newest", 2)
    assert (code, fidelities(aged)) == (1, before)
    assert "Nothing was demoted" in out
    assert person.questions == ["Store these 3 checkpoints with a loss (near)?"]
    person = _Terminal(monkeypatch, True)
    assert call("demote", aged, 1)[0] == 0
    assert person.questions == ["Store this checkpoint with a loss (near)?"]
    assert fidelities(aged).count("near") == 2
    person = _Terminal(monkeypatch, False)
    assert call("demote", aged, 2, "--yes")[0] == 0
    assert call("demote", aged, "--keep-newest", 7)[0] == 0, "without candidates there is no question"
    assert call("demote", aged, "--dry-run")[0] == 0
    assert person.questions == []


@pytest.mark.parametrize(
    ("options", "question"),
    [
        (("--forget-policy",), "Store these 2 checkpoints with a loss (near)?"),
        (("--forget-policy", 1), "Store this checkpoint with a loss (near)?"),
        (("--forget-policy", "--keep-newest", 5), "Store this checkpoint with a loss (near)?"),
        (("--forget-policy", "--fidelity", "small", "--save-policy"), "Store these 2 checkpoints with a loss (small)?"),
    ],
)
def test_declined_demote_changes_nothing(call, aged, monkeypatch, options, question):
    stored, before = ckstore.DemotePolicy(keep_newest=1), fidelities(aged)
    with ckstore.open(aged) as store:
        store.set_demotion(stored)
    person = _Terminal(monkeypatch, False)
    code, out, _ = call("demote", aged, *options)
    assert (code, person.questions) == (1, [question])
    assert "Nothing was demoted" in out
    with ckstore.open(aged) as store:
        assert (store.demotion, fidelities(aged)) == (stored, before)


@pytest.mark.parametrize("answer", [True, None], ids=["yes", "nobody"])
def test_demote_forget_policy_uses_default_rules(call, aged, monkeypatch, answer):
    with ckstore.open(aged) as store:
        store.set_demotion(ckstore.DemotePolicy(keep_newest=1))
    planned = json.loads(call("demote", aged, "--forget-policy", "--dry-run", "--json")[1])
    if answer:
        _Terminal(monkeypatch, answer)
    assert call("demote", aged, "--forget-policy")[0] == 0
    with ckstore.open(aged) as store:
        assert store.demotion is None
    chosen = sorted(entry["seq"] for entry in planned["checkpoints"] if entry["action"] == "demote")
    assert chosen == [1, 2], "the dry run uses the rules that would apply then"
    assert [seq for seq, name in enumerate(reversed(fidelities(aged))) if name != "exact"] == [*chosen, 3]


def test_demote_dry_run_prints_sizes_and_errors(call, aged):
    out = call("demote", aged, "--keep-newest", 2, "--dry-run")[1]
    assert "checkpoints would be demoted to fidelity near" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:3] == ["2", "2", "demote"])
    assert any(cell.startswith("~") for cell in row)
    assert "become about" in out
    assert "the largest RMS error of a tensor is" in out


def test_demotion_is_undone_by_undelete_and_trash(call, aged):
    call("demote", aged, 1)
    call("demote", aged, 2)
    code, out, _ = call("trash", "ls", aged)
    assert "exact form of a demoted one: main step 1 (seq:1)" in out
    assert "deleted" not in out
    code, out, _ = call("undelete", aged, 1)
    assert code == 0
    assert "Exact again: step 1 (seq 1) of run main" in out
    listed = json.loads(call("trash", "ls", aged, "--json")[1])["trash"]
    folder = next(entry for entry in listed if any(each["kind"] == "demoted" for each in entry["manifests"]))
    code, out, _ = call("trash", "restore", aged, folder["trash_id"][:8])
    assert code == 0
    assert "Exact again: step 2 (seq 2)" in out
    assert fidelities(aged) == ["exact"] * 3 + ["near"] + ["exact"] * 3


def test_trash_restore_of_nothing_fails(call, aged):
    call("demote", aged, 1)
    call("undelete", aged, 1)
    listed = json.loads(call("trash", "ls", aged, "--json")[1])["trash"]
    folder = next(entry for entry in listed if [each["kind"] for each in entry["manifests"]] == ["made exact"])
    code, out, err = call("trash", "restore", aged, folder["trash_id"][:8])
    assert code == 10
    assert "1 older form left in the trash" in out
    assert "nothing was restored" in err
    assert call("undelete", aged, 1)[0] == 10
