"""Protects replay form on the command line: demote --to replay, verify --replay, and what ls and show print."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore

SCRIPT = """
import numpy as np
from factor import FACTOR

def train_until(state, step):
    for number in range(state["step"], step):
        state["w"] *= FACTOR
    state["step"] = step
"""


@pytest.fixture
def run(tmp_path):
    """A store of four checkpoints, and the script that trains them."""
    (tmp_path / "factor.py").write_text("import numpy as np\nFACTOR = np.float32(1.01)\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    w = np.arange(500, dtype=np.float32)
    with ckstore.open(tmp_path / "store") as store:
        for step in range(1, 5):
            w = w * np.float32(1.01)
            store.commit({"w": w, "step": step}, step)
    return tmp_path / "store", script


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch):
    """Scripts of different tests import different modules of one name."""
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "factor", raising=False)


def test_checkpoints_are_put_in_replay_form_and_listed(call, run):
    place, script = run
    options = ("--to", "replay", "--replay", script, "--keep-newest", 1, "--keep-every", 0)
    code, out, _ = call("demote", place, *options, "--dry-run")
    assert (code, "would be demoted to replay form" in out) == (0, True)
    code, out, err = call("demote", place, *options)
    assert code == 0, err
    assert "2 of 4 checkpoints were demoted to replay form" in out
    assert "restore(STEP, replay=train_until)" in out
    lines = [line for line in call("ls", place)[1].splitlines() if "replay, from step 1" in line]
    assert [line.split()[0] for line in lines] == ["2", "1"]
    out = call("show", place, 2)[1]
    assert "replay, from step 1" in out
    entries = json.loads(call("ls", place, "--json")[1])["runs"][0]["entries"]
    assert [entry["form"] for entry in entries] == ["whole", "replay, from step 1", "replay, from step 1", "whole"]
    code, _, err = call("restore", place, 2, "-o", place.parent / "never.npz")
    assert code == 2
    assert "replay form" in err


def test_verify_trains_again_and_finds_a_difference(call, run):
    place, script = run
    code, out, _ = call("verify", place, 3, "--replay", script)
    assert code == 0
    assert "Training from step 2 to step 3 makes the same 1 tensors again." in out
    facts = json.loads(call("verify", place, 3, "--replay", script, "--json")[1])
    assert facts["replayed"].startswith("training from step 2")
    script.write_text(SCRIPT.replace("*= FACTOR", "*= FACTOR * np.float32(1.0000001)"))
    code, _, err = call("verify", place, 3, "--replay", script)
    assert code == 19
    assert "w has other bytes than it had then, after training from step 2 to step 3" in err
    code, _, err = call("demote", place, 2, "--to", "replay", "--replay", script)
    assert code == 19
    assert json.loads(call("ls", place, "--json")[1])["runs"][0]["entries"][2]["form"] == "whole"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "replay"), "need each other"),
        (("--replay", "{script}"), "need each other"),
        (("--to", "zip"), "hoose lossy or replay"),
        (("--to", "replay", "--replay", "{script}", "--fidelity", "near"), "nothing with a loss"),
        (("--to", "replay", "--replay", "{script}", "--keep-newest", 2, "--save-policy"), "nothing with a loss"),
        (("--to", "replay", "--replay", "missing.py"), "not a Python file"),
        (("--to", "replay", "--replay", "{empty}"), "has no function train_until"),
    ],
)
def test_wrong_options_say_what_to_do(call, run, tmp_path, arguments, words):
    place, script = run
    empty = tmp_path / "empty.py"
    empty.write_text("")
    given = [str(each).format(script=script, empty=empty) for each in arguments]
    code, _, err = call("demote", place, *given)
    assert code == 2
    assert words in err
