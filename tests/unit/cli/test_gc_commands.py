"""Protects ``gc``, ``trash`` and ``undelete``: they print what they do, and mistakes name the option."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from ckstore.cli.gc import nbytes_of
from ckstore.errors import UsageError
from ckstore.store.reachability import Marker
from support.gc_histories import replace_by_itself


@pytest.fixture
def store(store):
    """Add two checkpoints. The older of them shares nothing."""
    with ckstore.open(store) as opened:
        for step in (400, 500):
            opened.commit({"own": np.random.default_rng(step).standard_normal(9000)}, step, metrics={"loss": 0.5})
    return store


def documents(call, *arguments):
    code, out, err = call(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def steps_of(path):
    with ckstore.open(path, create=False) as store:
        return store.steps()


def test_dry_run_prints_the_plan(call, store):
    rules = ("gc", store, "--run", "main", "--keep-last", "1")
    dry = documents(call, *rules, "--dry-run")
    assert steps_of(store) == [100, 200, 300, 400, 500]
    real = documents(call, *rules)
    assert (dry["is_dry_run"], real["is_dry_run"]) == (True, False)
    assert dry["runs"] == real["runs"]
    assert {**dry["plan"], "drafts": []} == {**real["plan"], "drafts": []}
    assert real["done"]["dropped"] == dry["plan"]["drops"]
    assert [name["step"] for name in dry["plan"]["drops"]] == [100, 300, 400]
    assert steps_of(store) == [200, 500], "step 200 carries a tag"
    assert real["later_nbytes"] > 0
    assert real["later_time"] is not None


def test_gc_table_shows_reasons_to_keep_and_delete(call, store):
    code, out, _ = call("gc", store, "--keep-last", "1", "--keep-best", "loss:1:max", "--dry-run")
    assert code == 0
    assert "run main: 3 kept, 2 deleted by keep_last 1, keep_best loss:1:max (highest)" in out
    assert "tag good" in out
    assert "3 is number 1" in out
    code, out, _ = call("gc", store, "--keep-last", "1", "--dry-run")
    assert "delete  keep_last 1: number 3 from the newest" in out
    assert "3 checkpoints would be deleted." in out
    assert "would move to the trash" in out


def test_gc_prints_moved_and_freed_bytes(call, store):
    code, out, _ = call("gc", store, "--keep-last", "1")
    assert code == 0
    assert "3 checkpoints deleted" in out
    assert "moved to the trash" in out
    assert "0 B freed." in out
    assert "frees all of it; --now frees it immediately." in out
    code, out, _ = call("gc", store, "--now")
    assert "No rules: no checkpoint is deleted" in out
    assert "freed." in out
    assert "0 B freed." not in out
    code, out, _ = call("gc", store, "--dry-run")
    assert "Nothing to do." in out


def test_rules_are_applied_to_every_run_or_to_one(call, store):
    with ckstore.open(store, run="other") as other:
        other.commit({"n": 1}, 8)
    call("gc", store, "--run", "other", "--keep-last", "1")
    assert steps_of(store) == [100, 200, 300, 400, 500]
    assert [plan["run"] for plan in documents(call, "gc", store, "--keep-last", "1")["runs"]] == ["main", "other"]
    assert steps_of(store) == [200, 500]


def test_policy_is_saved_used_and_removed(call, store):
    code, _, err = call("gc", store, "--save-policy")
    assert (code, "needs rules" in err) == (2, True)
    call("gc", store, "--keep-last", "1", "--save-policy", "--dry-run")
    assert documents(call, "gc", store, "--dry-run")["runs"][0]["rules"] == ""
    call("gc", store, "--keep-last", "4", "--keep-best", "loss", "--save-policy")
    assert documents(call, "gc", store, "--dry-run")["runs"][0]["rules"] == "keep_last 4, keep_best loss:1:min (lowest)"
    assert documents(call, "gc", store, "--keep-every", "7", "--dry-run")["runs"][0]["rules"] == "keep_every 7"
    call("gc", store, "--forget-policy")
    assert documents(call, "gc", store, "--dry-run")["runs"][0]["rules"] == ""
    assert call("verify", store)[0] == 0


def test_trash_for_is_saved_used_and_removed(call, store):
    call("gc", store, "--keep-last", "4")
    assert documents(call, "gc", store, "--dry-run")["plan"]["waiting_nbytes"] > 0
    assert documents(call, "gc", store, "--trash-for", "0", "--dry-run")["plan"]["waiting_nbytes"] == 0
    call("gc", store, "--trash-for", "2h", "--save-policy")
    with ckstore.open(store, create=False) as opened:
        assert (opened.trash_for, opened.retention) == ("2h", None)
    call("gc", store, "--keep-last", "3", "--save-policy")
    with ckstore.open(store, create=False) as opened:
        assert (opened.trash_for, str(opened.retention)) == ("2h", "keep_last 3")
        opened.set_trash_for(0)
    assert documents(call, "gc", store, "--dry-run")["plan"]["waiting_nbytes"] == 0
    call("gc", store, "--forget-policy", "--trash-for", "9h")
    with ckstore.open(store, create=False) as opened:
        assert (opened.trash_for, opened.retention) == (None, None)
    assert call("gc", store, "--trash-for", "7days")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep-lst", "3"], "--keep-last"),
        (["--keep-best", "loss:2:mn"], "Did you mean 'min'"),
        (["--keep-within", "later"], "not a duration"),
        (["--time-zone", "CET", "--keep-daily", "3"], "fixed offset"),
        (["--keep-last", "0"], "keep-last"),
        (["--repack-max", "much"], "not a size"),
        (["--time-zone", "UTC"], "needs at least one rule"),
        (["--keep-last", "1", "--max-delete", "0"], "max_delete is 0"),
        (["--run", "none", "--keep-last", "1"], "there is no run 'none'"),
    ],
)
def test_mistakes_are_named_and_change_nothing(call, store, arguments, said):
    code, _, err = call("gc", store, *arguments)
    assert code == (10 if arguments[0] == "--run" else 2)
    assert said in err
    assert "Traceback" not in err
    assert steps_of(store) == [100, 200, 300, 400, 500]


def test_gc_of_a_damaged_store_exits_with_12(call, store):
    manifest = next((store / "manifests" / "main").glob("00000000-*"))
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-1])
    code, out, err = call("gc", store, "--keep-last", "1")
    assert code == 12
    assert "packs were not collected" in err
    assert "nothing of this run is deleted" in out
    manifest.write_bytes(whole)
    tag = store / "tags" / "main" / "good"
    tag.write_bytes(b"{}")
    code, _, err = call("gc", store, "--keep-last", "1")
    assert code == 12
    assert "no checkpoint of run main was deleted" in err


def test_gc_with_damage_while_collecting_exits_with_12(call, store, monkeypatch):
    with ckstore.open(store) as opened:
        manifest = store / replace_by_itself(opened, 500)
    looks, look = [], Marker.mark

    def damaging_read(marker):
        looks.append(1)
        if len(looks) == 2:
            manifest.write_bytes(manifest.read_bytes()[:-1])
        return look(marker)

    monkeypatch.setattr(Marker, "mark", damaging_read)
    code, _, err = call("gc", store, "--keep-last", "1")
    assert code == 12
    assert "packs were not collected" in err


def test_trash_is_listed_restored_and_purged(call, store):
    assert "The trash is empty." in call("trash", "ls", store)[1]
    call("gc", store, "--keep-last", "1")
    listed = documents(call, "trash", "ls", store)["trash"]
    assert any(manifest["step"] == 100 for entry in listed for manifest in entry["manifests"])
    code, out, _ = call("trash", "ls", store)
    assert "main step 100 (seq:0)" in out
    identities = [entry["trash_id"][:12] for entry in listed]
    restored = documents(call, "trash", "restore", store, *identities)
    assert [info["step"] for info in restored["undeleted"]] == [100, 300, 400]
    assert steps_of(store) == [100, 200, 300, 400, 500]
    code, _, err = call("trash", "purge", store, "--all")
    assert (code, "cannot ask for confirmation" in err) == (2, True)
    assert documents(call, "trash", "purge", store, "--all", "--yes")["freed_nbytes"] > 0
    assert documents(call, "trash", "ls", store)["trash"] == []
    assert call("verify", store, "--level", "decode")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["restore"], 2),
        (["purge", "--yes"], 2),
        (["restore", "ffff"], 10),
        (["purge", "ffff", "--yes"], 10),
        (["burn"], 2),
    ],
)
def test_mistakes_with_the_trash_are_named(call, store, arguments, code):
    action, *rest = arguments
    assert call("trash", action, store, *rest)[0] == code


def test_undelete_restores_a_deleted_checkpoint(call, store):
    call("delete", store, "100", "--yes")
    code, out, _ = call("undelete", store, "100")
    assert (code, out) == (0, "Restored: step 100 (seq 5) of run main, as a new entry that `latest` skips.\n")
    assert documents(call, "undelete", store, "seq:0")["undeleted"][0]["is_archival"] is True
    assert "archival" in call("ls", store)[1]
    code, _, err = call("undelete", store, "999")
    assert code == 10
    assert "100" in err, "it lists what exists"


def test_size_texts_become_bytes():
    assert [nbytes_of(text) for text in ("0", "4G", "512MiB", "1k", "3 TB", "7b")] == [
        0, 4 << 30, 512 << 20, 1 << 10, 3 << 40, 7
    ]  # fmt: skip
    for text in ("", "-1", "1.5G", "G", "1P"):
        with pytest.raises(UsageError, match="not a size"):
            nbytes_of(text)


def test_collecting_loads_no_torch(store):
    from support.cli_stores import environment

    program = (
        "import sys; from ckstore.cli.main import run\n"
        f"code = run(['gc', {str(store)!r}, '--keep-last', '1', '--dry-run'])\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\nsys.exit(code)"
    )
    import subprocess
    import sys

    assert subprocess.run([sys.executable, "-c", program], env=environment(), check=False).returncode == 0


# In a tier


def test_tier_is_collected_by_name(call, store, tmp_path):
    attic = str(tmp_path / "attic")
    documents(call, "push", store, attic, "--keep-local", "1", "--tier", "attic")
    documents(call, "delete", store, "400", "--yes")
    documents(call, "gc", store, "--now")
    dry = documents(call, "gc", store, "--tier", "attic", "--min-age", "0", "--dry-run")
    real = documents(call, "gc", store, "--tier", "attic", "--min-age", "0")
    assert [name["step"] for name in dry["dropped"]] == [name["step"] for name in real["dropped"]] == [400]
    assert real["packs"] == dry["packs"] != []
    assert (dry["is_dry_run"], real["is_dry_run"]) == (True, False)
    code, out, _ = call("gc", store, "--tier", "attic", "--clear-lists")
    assert (code, out.splitlines()[0]) == (0, f"0 deleted checkpoints removed from {attic}.")
    assert 400 not in steps_of(attic)
    assert set(steps_of(attic)) < set(steps_of(store))


def test_packs_of_a_tier_are_rewritten_within_budget(call, tmp_path):
    store, attic, shared = tmp_path / "store", str(tmp_path / "attic"), np.arange(9000)
    with ckstore.open(store) as opened:
        for step in (100, 200, 300):
            opened.commit({"own": np.random.default_rng(step).standard_normal(9000), "shared": shared}, step)
    documents(call, "push", store, attic, "--keep-local", "1", "--tier", "attic")
    # The shared chunks are in the first pack.
    documents(call, "delete", store, "100", "--yes")
    documents(call, "gc", store, "--now")
    asked = ("gc", store, "--tier", "attic", "--min-age", "0")
    assert documents(call, *asked, "--dry-run", "--repack-max", "0")["rewrites"] == []
    dry = documents(call, *asked, "--dry-run")
    (rewrite,) = dry["rewrites"]
    assert (dry["repacked"], dry["renewed_manifests"]) == ([], 0)
    code, out, _ = call(*asked, "--dry-run")
    assert (code, "1 pack there would be rewritten: " in out) == (0, True)
    code, out, _ = call(*asked)
    assert (code, "1 pack there rewritten into " in out) == (0, True)
    documents(call, "gc", store, "--now")
    last = documents(call, *asked)
    assert [pack["pack_id"] for pack in last["packs"]] == [rewrite["pack_id"]]


def test_unsuitable_options_for_a_tier_are_refused(call, store):
    for wrong in (("--keep-last", "3"), ("--now",), ("--run", "main")):
        code, _, err = call("gc", store, "--tier", "attic", *wrong)
        assert code == 2
        assert "cannot be combined with --tier" in err
    code, _, err = call("gc", store, "--clear-lists")
    assert (code, "needs --tier" in err) == (2, True)
    code, _, err = call("gc", store, "--tier", "attic")
    assert (code, "no tier 'attic'" in err) == (10, True)
