"""Protects what cron jobs and operators ask: where the bytes are, and how old the newest checkpoint is; completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from support.cli_stores import environment, flip_byte

HOUR_NS = 3600 * 10**9


class Shifted:
    """The system's clock, set forward or back."""

    def __init__(self, hours):
        self.shift_ns = int(hours * HOUR_NS)

    def now_ns(self):
        return SYSTEM_CLOCK.now_ns() + self.shift_ns

    def monotonic(self):
        return SYSTEM_CLOCK.monotonic()

    def sleep(self, seconds):
        SYSTEM_CLOCK.sleep(seconds)


def commit(path, step, *, run="main", hours=0.0, seed=None, shared=True):
    """Commit 400 KB that no other step has, and 400 KB that all have."""
    own = np.random.default_rng(step if seed is None else seed).standard_normal(50_000)
    state = {"own": own} | ({"shared": np.random.default_rng(99).standard_normal(50_000)} if shared else {})
    with ckstore.open(path, run=run, clock=Shifted(hours)) as store:
        return store.commit(state, step, policy=ckstore.Policy(delta=False))


def du(call, path, *options):
    code, out, err = call("du", path, "--json", *options)
    return code, json.loads(out), err


def kinds_of(found):
    return {kind["kind"]: (kind["files"], kind["nbytes"]) for kind in found["kinds"]}


def pack_bytes(path):
    return sum(file.stat().st_size for file in Path(path).glob("packs/*/*.pack"))


def test_du_counts_every_pack_once_and_names_what_deleting_frees(call, tmp_path):
    receipts = [commit(tmp_path, step) for step in range(3)]
    code, found, _ = du(call, tmp_path)
    assert code == 0
    kinds = kinds_of(found)
    assert kinds["packs of several checkpoints"] == (1, receipts[0].bytes_written)
    assert kinds["packs of one checkpoint"] == (2, receipts[1].bytes_written + receipts[2].bytes_written)
    assert kinds["packs no checkpoint needs"] == kinds["trash"] == kinds["unfinished files"] == (0, 0)
    assert sum(kinds[kind][1] for kind in kinds if kind.startswith("packs")) == pack_bytes(tmp_path)
    assert found["nbytes"] == sum(nbytes for _, nbytes in kinds.values())
    frees = {each["seq"]: each["own_nbytes"] for each in found["checkpoints"]}
    assert frees == {0: 0, 1: receipts[1].bytes_written, 2: receipts[2].bytes_written}
    assert found["checkpoints"][-1]["seq"] == 0


def test_du_agrees_with_what_deleting_and_collecting_frees(call, tmp_path):
    for step in range(3):
        commit(tmp_path, step)
    before = du(call, tmp_path)[1]
    own = next(each["own_nbytes"] for each in before["checkpoints"] if each["seq"] == 1)
    with ckstore.open(tmp_path) as store:
        store.delete("seq:1")
    deleted = du(call, tmp_path)[1]
    assert kinds_of(deleted)["packs no checkpoint needs"] == (1, own)
    with ckstore.open(tmp_path) as store:
        store.gc(min_age=0)
    collected = du(call, tmp_path)[1]
    assert kinds_of(collected)["packs no checkpoint needs"] == (0, 0)
    assert kinds_of(collected)["trash"][1] >= own
    with ckstore.open(tmp_path) as store:
        assert store.gc(now=True).freed_nbytes >= own
    assert before["nbytes"] - du(call, tmp_path)[1]["nbytes"] >= own


def test_du_tells_runs_apart(call, tmp_path):
    first = commit(tmp_path, 1, run="a")
    second = commit(tmp_path, 2, run="b")
    alone = commit(tmp_path, 3, run="b", shared=False)
    runs = {run["run"]: run for run in du(call, tmp_path)[1]["runs"]}
    assert runs["a"] | {"own_nbytes": 0} == runs["a"]
    assert runs["a"]["nbytes"] == first.bytes_written
    assert runs["b"]["own_nbytes"] == second.bytes_written + alone.bytes_written
    assert runs["b"]["nbytes"] == runs["b"]["own_nbytes"] + first.bytes_written
    assert [runs[run]["count"] for run in "ab"] == [1, 2]


def test_du_shows_what_other_tiers_hold(call, tmp_path):
    path = tmp_path / "store"
    receipts = [commit(path, step, shared=False) for step in range(3)]
    with ckstore.open(path) as store:
        store.push(str(tmp_path / "attic"), keep_local=1, tier="attic")
        store.gc(min_age=0, now=True)
    _, found, _ = du(call, path)
    pushed = receipts[0].bytes_written + receipts[1].bytes_written
    (tier,) = found["tiers"]
    assert tier == {"tier": "attic", "address": str(tmp_path / "attic"), "packs": 2, "nbytes": pushed}
    assert found["runs"][0]["elsewhere_nbytes"] == pushed
    assert kinds_of(found)["packs of one checkpoint"] == (1, receipts[2].bytes_written)
    assert "attic" in call("du", path)[1]


def test_du_of_a_damaged_store_prints_and_exits_with_12(call, tmp_path):
    for step in range(2):
        commit(tmp_path, step)
    flip_byte(min(tmp_path.glob("manifests/main/*.ckm")), 40)
    code, found, err = du(call, tmp_path)
    assert code == 12
    assert found["problem"]
    assert err.startswith("ckstore: some packs may be counted wrongly: ")
    assert kinds_of(found)["packs of several checkpoints"][0] + kinds_of(found)["packs of one checkpoint"][0] == 2


def test_du_shows_the_largest_and_says_how_many_more(call, tmp_path):
    for step in range(4):
        commit(tmp_path, step)
    _, out, _ = call("du", tmp_path, "-n", "2")
    assert "... and 2 more; --limit 0 shows all" in out
    assert out.splitlines()[0].endswith("in this store")


@pytest.mark.parametrize(
    ("hours", "span", "code"), [(-3, "2h", 4), (-1, "2h", 0), (3, "2h", 4), (-0.5, "20m", 4), (-30, "1d12h", 0)]
)
def test_status_exits_with_4_if_the_newest_is_too_old_or_in_the_future(call, tmp_path, hours, span, code):
    commit(tmp_path, 7, hours=hours)
    found, out, err = call("status", tmp_path, "--max-age", span)
    assert (found, err) == (code, "")
    assert ("STALE" in out) == (code == 4)
    status = json.loads(call("status", tmp_path, "--max-age", span, "--json")[1])
    assert status["is_stale"] == (code == 4)
    (run,) = status["runs"]
    assert run["newest"]["step"] == 7
    assert abs(run["age_seconds"] + hours * 3600) < 600


def test_status_takes_the_newest_of_all_runs_or_of_one(call, tmp_path):
    commit(tmp_path, 1, run="old", hours=-5)
    commit(tmp_path, 2, run="young")
    assert call("status", tmp_path, "--max-age", "1h")[0] == 0
    assert call("status", tmp_path, "--max-age", "1h", "--run", "old")[0] == 4
    assert call("status", tmp_path, "--max-age", "1h", "--run", "young")[0] == 0
    commit(tmp_path, 3, run="young", hours=50)
    assert call("status", tmp_path, "--max-age", "1d")[0] == 0, "the old run is five hours old"


def test_status_without_checkpoint_is_an_error_only_if_an_age_is_asked_for(call, tmp_path):
    ckstore.open(tmp_path).close()
    assert call("status", tmp_path)[0] == 0
    assert call("status", tmp_path, "--max-age", "1h")[0] == 10
    assert call("status", tmp_path / "nowhere", "--max-age", "1h")[0] == 10


def test_status_of_a_damaged_newest_checkpoint_exits_with_12(call, tmp_path):
    for step in range(2):
        commit(tmp_path, step)
    flip_byte(max(tmp_path.glob("manifests/main/*.ckm")), 40)
    code, out, err = call("status", tmp_path, "--max-age", "1h")
    assert code == 12
    assert err.startswith("ckstore: run main: ")
    assert "main" in out


def test_status_skips_what_was_restored_from_the_trash(call, tmp_path):
    commit(tmp_path, 1, hours=-9)
    commit(tmp_path, 2, hours=-8)
    with ckstore.open(tmp_path) as store:
        store.delete(1)
        assert store.undelete("seq:0").is_archival
    status = json.loads(call("status", tmp_path, "--json")[1])
    assert status["runs"][0]["newest"]["step"] == 2


def test_status_loads_neither_numpy_nor_torch(tmp_path):
    commit(tmp_path, 1)
    program = (
        "import sys; from ckstore.cli.main import run; code = run(sys.argv[1:])\n"
        "print(code, sorted({'numpy', 'torch', 'rich'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program, "status", tmp_path, "--max-age", "1h"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_wrong_span_is_named(call, tmp_path):
    commit(tmp_path, 1)
    code, out, err = call("status", tmp_path, "--max-age", "7days")
    assert (code, out) == (2, "")
    assert "Not a duration" in err or "not a duration" in err


def test_ls_adds_up_what_it_shows(call, tmp_path):
    receipts = [commit(tmp_path, step) for step in range(3)]
    state, written = 3 * receipts[0].bytes_state, sum(receipt.bytes_written for receipt in receipts)
    last = call("ls", tmp_path)[1].splitlines()[-1]
    assert last.startswith("total of 3 checkpoints: state ")
    from ckstore.display import size

    assert f"state {size(state)}, written {size(written)}, ratio " in last
    assert "total of 2 of 3 checkpoints" in call("ls", tmp_path, "-n", "2")[1]
    assert "total" not in call("ls", tmp_path, "-n", "1")[1]


def test_quiet_gc_prints_nothing_and_collects(call, tmp_path):
    for step in range(3):
        commit(tmp_path, step)
    assert call("gc", tmp_path, "--keep-last", "1", "--quiet") == (0, "", "")
    with ckstore.open(tmp_path) as store:
        assert store.steps() == [2]


def test_quiet_gc_still_says_what_is_wrong(call, tmp_path):
    for step in range(2):
        commit(tmp_path, step)
    flip_byte(min(tmp_path.glob("manifests/main/*.ckm")), 40)
    code, out, err = call("gc", tmp_path, "--keep-last", "1", "-q")
    assert (code, out) == (12, "")
    assert err.startswith("ckstore: packs were not collected")
    for option in ("--dry-run", "--json"):
        code, out, err = call("gc", tmp_path, "-q", option)
        assert (code, out) == (2, "")
        assert "--quiet" in err


def complete(path, line, shell="bash", **extra):
    """Complete the end of a line as the script of a shell does; return the candidates."""
    words = line.split(" ")
    asked = {
        "_CKSTORE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    program = (
        "import os, sys; from ckstore.cli.main import run; sys.argv = ['ckstore']; code = run([])\n"
        "sys.stdout.flush(); os.write(2, repr(sorted({'numpy', 'torch', 'rich'} & {*sys.modules})).encode())"
    )
    env = environment(**asked, **extra)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=path, timeout=120, check=True
    )
    assert done.stderr == "[]"
    return done.stdout.split()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A folder with a store of two runs, tags and metrics."""
    folder = tmp_path_factory.mktemp("completion")
    for run, steps in (("main", (100, 200)), ("other", (7,))):
        with ckstore.open(folder / "store", run=run) as store:
            for step in steps:
                store.commit({"a": step}, step, metrics={f"loss_{run}": 1.0, "odd $(name)": 2.0}, tags=[f"t{step}"])
    return folder


def test_references_of_the_named_store_are_completed(described):
    found = complete(described, "ckstore show store ")
    assert found[:3] == ["latest", "t100", "t200"]
    assert {"best:loss_main", "200", "100", "seq:0", "seq:1"} <= set(found)
    assert not any("$" in each or "name" in each for each in found)
    assert complete(described, "ckstore show store t2") == ["t200"]
    assert complete(described, "ckstore diff store 100 2") == ["200"]
    assert complete(described, "ckstore delete store 100 seq:") == ["seq:1", "seq:0"]


def test_runs_tags_and_metrics_are_completed(described):
    assert complete(described, "ckstore ls store --run ") == ["main", "other"]
    assert complete(described, "ckstore show --run other store t") == ["t7"]
    assert complete(described, "ckstore untag store ") == ["t100", "t200"]
    assert complete(described, "ckstore gc store --keep-best ") == ["loss_main"]


def test_commands_are_completed(described):
    assert complete(described, "ckstore st") == ["status", "stats"]


@pytest.mark.parametrize("line", ["ckstore show nowhere ", "ckstore show s3://bucket/run ", "ckstore show . "])
def test_completion_of_what_is_no_store_prints_nothing(described, line):
    assert complete(described, line) == []


def test_completion_of_a_damaged_store_prints_what_it_can(described, tmp_path):
    commit(tmp_path / "store", 1)
    commit(tmp_path / "store", 2)
    flip_byte(max((tmp_path / "store").glob("manifests/main/*.ckm")), 40)
    (tmp_path / "store/tags/main").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store/tags/main/bad").write_text("garbage")
    assert {"latest", "1", "2"} <= set(complete(tmp_path, "ckstore show store "))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_is_printed(shell):
    done = subprocess.run(
        [sys.executable, "-m", "ckstore"],
        capture_output=True, text=True, env=environment(_CKSTORE_COMPLETE=f"source_{shell}"), timeout=120, check=True,
    )  # fmt: skip
    assert "_CKSTORE_COMPLETE" in done.stdout
    assert done.stderr == ""


def test_bash_completes_with_that_script(described):
    """The whole way: bash reads the script, calls the command, and gets the words."""
    folder = Path(sys.executable).parent
    program = (
        'source <(_CKSTORE_COMPLETE=source_bash ckstore)\nCOMP_WORDS=(ckstore untag store "")\nCOMP_CWORD=3\n'
        '_ckstore_completion ckstore\necho "${COMPREPLY[*]}"'
    )
    env = environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, env=env, cwd=described, timeout=120, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["t100", "t200"], "")
