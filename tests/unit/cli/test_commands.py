"""Protects every command: what it does, prints and returns, and that its JSON keeps its keys."""

from __future__ import annotations

import fcntl
import json
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest

import ckstore
from support.cli_stores import flip_byte

INFO_KEYS = {
    *("step", "seq", "checkpoint_id", "run", "time_ns", "time", "parent", "origin_id", "generation", "is_archival"),
    *("fidelity", "metrics", "tags", "bytes_state", "bytes_stored", "bytes_written", "tensor_count", "chunk_count"),
    *("chunks_new", "chunks_reused", "depth_max", "warnings", "tiers", "form"),
}


def pack_of_weights(store):
    """Return the pack that holds most of step 300."""
    with ckstore.open(store, create=False) as opened:
        row = max(opened.contents(300).packs, key=lambda row: row.used_nbytes)
    return next(store.glob(f"packs/*/{row.pack_id}.pack"))


def test_init_makes_a_store_once(call, tmp_path):
    code, out, _ = call("init", tmp_path / "new")
    assert code == 0
    assert out.startswith("Made a store")
    code, out, _ = call("init", tmp_path / "new", "--json")
    assert code == 0
    assert json.loads(out) == {"path": str(tmp_path / "new"), "is_new": False}


def test_init_refuses_a_folder_with_foreign_files(call, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    code, out, err = call("init", tmp_path)
    assert (code, out) == (2, "")
    assert "thesis.tex" in err


def test_ls_lists_all_runs_newest_first(call, readonly_store):
    code, out, _ = call("ls", readonly_store)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "run main: 3 checkpoints"
    assert [line.split()[1] for line in lines[2:5]] == ["300", "200", "100"]
    assert "good" in lines[3]
    assert "run other: 1 checkpoint" in lines


def test_ls_as_json_has_every_field(call, readonly_store):
    code, out, _ = call("ls", readonly_store, "--run", "main", "--json", "--limit", 2)
    assert code == 0
    (log,) = json.loads(out)["runs"]
    assert (log["run"], log["count"], log["damaged_tags"]) == ("main", 3, [])
    assert [entry["step"] for entry in log["entries"]] == [300, 200]
    assert set(log["entries"][0]) == INFO_KEYS | {"damage", "refused", "points"}
    assert log["entries"][1]["tags"] == ["good"]


@pytest.mark.parametrize("arguments", [["--limit=1", "--run=main"], ["-n", "1", "--run", "main"]])
def test_ls_options_are_equal_without_argparse(call, readonly_store, arguments):
    code, out, _ = call("ls", readonly_store, *arguments, "--json")
    (log,) = json.loads(out)["runs"]
    assert (code, [entry["step"] for entry in log["entries"]]) == (0, [300])


def test_ls_of_an_empty_store_says_so(call, tmp_path):
    call("init", tmp_path / "new")
    assert call("ls", tmp_path / "new")[:2] == (0, "No checkpoint yet: nothing was committed to this store.\n")


def test_ls_lists_undamaged_entries_next_to_damaged_ones(call, store):
    flip_byte(sorted(store.glob("manifests/main/*.ckm"))[1], 140)
    (store / "tags/main/good").write_text("garbage")
    code, out, err = call("ls", store, "--run", "main")
    assert code == 12
    assert err.count("\n") == 1
    assert "DAMAGED seq 1" in out
    assert "DAMAGED tag good" in out
    assert [line.split()[1] for line in out.splitlines()[2:5]] == ["300", "200", "100"]
    code, out, _ = call("ls", store, "--run", "main", "--json")
    assert code == 12
    assert [bool(entry["damage"]) for entry in json.loads(out)["runs"][0]["entries"]] == [False, True, False]


def test_show_lists_tensors_groups_and_packs(call, readonly_store):
    code, out, _ = call("show", readonly_store, 200)
    assert code == 0
    assert "model.weights" in out
    assert "good" in out
    code, out, _ = call("show", readonly_store, "good", "--json")
    shown = json.loads(out)
    assert code == 0
    assert set(shown) == INFO_KEYS | {"groups", "tensors", "packs", "base_nbytes", "losses"}
    tensors = {row["path"]: row for row in shown["tensors"]}
    assert tensors["model.weights"]["nbytes"] == 200_000
    assert tensors["model.tied"]["shares_with"] == "model.weights"
    assert [(row["key"], row["tensor_count"], row["value_count"]) for row in shown["groups"]] == [
        ("model", 3, 0),
        ("optimizer", 1, 1),
        ("note", 0, 1),
    ]
    # Every stored byte belongs to a group or to bases. Frame headers add to the payload.
    stored_nbytes = sum(row["stored_nbytes"] for row in shown["groups"]) + shown["base_nbytes"]
    assert stored_nbytes >= shown["bytes_stored"]
    assert sum(row["used_nbytes"] for row in shown["packs"]) == stored_nbytes


@pytest.mark.parametrize("level", ["quick", "read", "decode"])
def test_verify_of_an_undamaged_store_finds_no_damage(call, readonly_store, level):
    code, out, err = call("verify", readonly_store, "--level", level)
    assert (code, err) == (0, "")
    assert out.startswith(f"No damage. Level {level}: 4 checkpoints")


def test_verify_names_pack_offset_and_checkpoints(call, store):
    pack = pack_of_weights(store)
    with ckstore.open(store, create=False) as opened:
        packs = {step: {row.pack_id for row in opened.contents(step).packs} for step in (100, 200, 300)}
    users = [step for step in packs if pack.stem in packs[step]]
    flip_byte(pack, 4096 + 192 + 5000)
    code, out, err = call("verify", store)
    assert code == 12
    assert f"{pack}, offset 4096" in out
    assert f"needed  {', '.join(f'main/{step // 100 - 1} (step {step})' for step in users)}\n" in out
    assert err.startswith("ckstore: 1 damaged place found")
    code, out, _ = call("verify", store, "latest", "--json")
    report = json.loads(out)
    assert code == 12
    assert not report["is_clean"]
    assert report["damage"][0]["checkpoints"] == ["main/2 (step 300)"]
    assert report["checkpoint_count"] == 1


@pytest.mark.parametrize("options", [["--decode"], ["--decode", "--level", "decode"], ["--level", "decode"]])
def test_verify_decode_option_means_level_decode(call, readonly_store, options):
    code, out, _ = call("verify", readonly_store, *options, "--json")
    assert (code, json.loads(out)["level"]) == (0, "decode")
    assert "--decode" in call("verify", "--help")[1]


@pytest.mark.parametrize("level", ["quick", "read"])
def test_verify_refuses_two_different_levels(call, readonly_store, level):
    code, out, err = call("verify", readonly_store, "--decode", "--level", level)
    assert (code, out) == (2, "")
    assert f"--level {level}" in err


def test_verify_refuses_an_unknown_level(call, readonly_store):
    assert call("verify", readonly_store, "--level", "thorough")[0] == 2


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt"])
def test_restore_writes_a_file_for_torch(call, readonly_store, tmp_path, suffix):
    torch = pytest.importorskip("torch")
    assert call("restore", readonly_store, 100, "-o", tmp_path / f"state{suffix}")[0] == 0
    loaded = torch.load(tmp_path / f"state{suffix}", weights_only=True)
    with ckstore.open(readonly_store, create=False) as store:
        assert np.array_equal(loaded["model"]["head"], store.restore(100)["model"]["head"])


def test_restore_writes_npz(call, readonly_store, tmp_path):
    target = tmp_path / "state.npz"
    code, out, _ = call("restore", readonly_store, 100, "-o", target, "--json")
    assert code == 0
    assert json.loads(out)["step"] == 100
    with np.load(target, allow_pickle=False) as found:
        assert set(found) == {
            "model.weights",
            "model.tied",
            "model.head",
            "optimizer.0.lr",
            "optimizer.0.moment",
            "note",
        }
        with ckstore.open(readonly_store, create=False) as store:
            assert np.array_equal(found["model.head"], store.restore(100)["model"]["head"])
        assert str(found["note"]) == "hello"


def test_restore_without_ref_takes_newest_complete(call, store, tmp_path):
    sorted(store.glob("manifests/main/*.ckm"))[-1].write_bytes(b"torn")
    code, out, _ = call("restore", store, "-o", tmp_path / "x.npz", "--only", "model.head")
    assert code == 0
    assert "step 200" in out
    with np.load(tmp_path / "x.npz") as found:
        assert list(found) == ["model.head"]


def test_restore_overwrites_only_with_force(call, readonly_store, tmp_path):
    target = tmp_path / "x.npz"
    target.write_text("precious")
    code, _, err = call("restore", readonly_store, "-o", target)
    assert code == 2
    assert "--force" in err
    assert target.read_text() == "precious"
    assert call("restore", readonly_store, "-o", target, "--force")[0] == 0
    with np.load(target) as found:
        assert "note" in found


def test_restore_replaces_a_link_not_its_target(call, readonly_store, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "x.npz").symlink_to(tmp_path / "precious")
    assert call("restore", readonly_store, "-o", tmp_path / "x.npz")[0] == 2
    assert call("restore", readonly_store, "-o", tmp_path / "x.npz", "--force")[0] == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "x.npz").is_symlink()


def test_restore_of_damage_leaves_no_file(call, store, tmp_path):
    flip_byte(pack_of_weights(store), 4096 + 192 + 5000)
    out_folder = tmp_path / "out"
    out_folder.mkdir()
    code, _, err = call("restore", store, "latest", "-o", out_folder / "x.npz")
    assert code == 12
    assert "model.weights" in err
    assert list(out_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["state", "state.zip", "missing/state.npz"])
def test_restore_refuses_targets_before_it_reads(call, readonly_store, tmp_path, name):
    assert call("restore", readonly_store, "-o", tmp_path / name)[0] in (2, 10)


def test_restored_file_loads_with_weights_only(call, tmp_path):
    torch = pytest.importorskip("torch")
    tied = torch.randn(4, 3)
    state = {"a": tied, "b": tied, "half": torch.ones(2, dtype=torch.bfloat16), "seed": np.arange(3), "n": np.int8(3)}
    with ckstore.open(tmp_path / "s") as store:
        store.commit(state, 1)
    code, out, _ = call("restore", tmp_path / "s", "-o", tmp_path / "x.pt", "--json")
    assert code == 0
    assert set(json.loads(out)["notes"]) == {"seed", "n"}
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(found["a"], tied)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["half"].dtype == torch.bfloat16
    assert found["seed"].tolist() == [0, 1, 2]
    assert found["n"] == 3
    assert call("restore", tmp_path / "s", "-o", tmp_path / "x.npz")[0] == 2


def test_restore_replaces_or_names_unloadable_leaves(call, tmp_path):
    torch = pytest.importorskip("torch")
    from ckstore.ops.interop.export import write_state

    state = {"history": {"losses": defaultdict(list, train=[np.float32(1)])}, "n": [OrderedDict(a=1), Counter("aab")]}
    with ckstore.open(tmp_path / "s") as store:
        store.commit(state, 1)
    code, out, _ = call("restore", tmp_path / "s", "-o", tmp_path / "x.pt", "--json")
    assert code == 0
    assert "defaultdict, written as a dict" in json.loads(out)["notes"]["history.losses"]
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found == {"history": {"losses": {"train": [1.0]}}, "n": [OrderedDict(a=1), Counter("aab")]}
    notes = write_state({"q": deque([1]), "f": frozenset([2])}, tmp_path / "y.pt")
    assert set(notes) == {"q", "f"}
    assert torch.load(tmp_path / "y.pt", weights_only=True) == {"q": [1], "f": {2}}
    with pytest.raises(
        ckstore.errors.UsageError, match=r"type builtins\.object cannot be in a \.pt file .*: a\.where"
    ) as caught:
        write_state({"a": {"n": 1, "where": object()}}, tmp_path / "z.pt")
    assert "trust" not in str(caught.value)


def test_export_lists_shared_and_left_out_leaves(call, readonly_store, tmp_path):
    reader = pytest.importorskip("safetensors.numpy")
    target = tmp_path / "x.safetensors"
    code, out, _ = call("export", readonly_store, "good", "-o", target, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["shared"] == {"model.tied": "model.weights"}
    assert set(document["left_out"]) == {"optimizer.0.lr", "note"}
    found = reader.load_file(target)
    assert set(found) == {"model.weights", "model.head", "optimizer.0.moment"}
    with ckstore.open(readonly_store, create=False) as store:
        assert np.array_equal(found["model.weights"], store.restore("good")["model"]["weights"])
    code, out, _ = call("export", readonly_store, "good", "-o", target)
    assert code == 2
    code, out, _ = call("export", readonly_store, "good", "-o", target, "--force", "--only", "model.head")
    assert (code, set(reader.load_file(target))) == (0, {"model.head"})


def test_export_without_a_tensor_makes_no_file(call, readonly_store, tmp_path):
    assert call("export", readonly_store, "good", "-o", tmp_path / "x.safetensors", "--only", "note")[0] == 10
    assert list(tmp_path.iterdir()) == []


def test_export_strips_a_prefix(call, readonly_store, tmp_path):
    reader = pytest.importorskip("safetensors.numpy")
    target = tmp_path / "x.safetensors"
    only = ["--only", "model.*", "--strip-prefix", "model."]
    code, out, _ = call("export", readonly_store, "good", "-o", target, *only, "--json")
    assert (code, set(reader.load_file(target))) == (0, {"weights", "head"})
    assert json.loads(out)["shared"] == {"tied": "weights"}
    code, _, err = call("export", readonly_store, "good", "-o", target, "--force", "--strip-prefix", "model.")
    assert (code, "does not begin with 'model.'" in err) == (2, True)


def test_export_to_a_folder(call, readonly_store, tmp_path):
    reader = pytest.importorskip("safetensors.numpy")
    code, out, _ = call(
        "export", readonly_store, "good", "--hf", tmp_path / "m", "--dtype", "fp32", "--max-shard", "1KB"
    )
    assert code == 0
    assert "tied: tied to weights, written once" in out
    assert "no config.json" in out
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"weights", "head"}
    for name, file in index["weight_map"].items():
        assert reader.load_file(tmp_path / "m" / file)[name].dtype == np.float32
    code, _, err = call("export", readonly_store, "good", "--hf", tmp_path / "m")
    assert (code, "--force" in err) == (2, True)
    assert call("export", readonly_store, "good", "--hf", tmp_path / "m", "--force")[0] == 0
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name one target"),
        (["-o", "x.safetensors", "--hf", "y"], "name one target"),
        (["-o", "x.safetensors", "--dtype", "bf16"], "apply to a folder only"),
        (["--hf", "y", "--max-shard", "five"], "write for example 5GB"),
        (["--hf", "y", "--max-shard", "0"], "write for example 5GB"),
        (["--hf", "y", "--dtype", "int8"], "use fp32, bf16, fp16"),
    ],
)
def test_export_refuses_options_that_do_not_fit(call, readonly_store, options, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("export", readonly_store, "good", *options)
    assert (code, message.lower() in err.lower()) == (2, True), err
    assert list(tmp_path.glob("[xy]*")) == []


def test_sizes_of_shards_are_those_of_transformers():
    from ckstore.cli.files import shard_nbytes

    texts = {"5GB": 5 * 10**9, "1.5gb": 15 * 10**8, "200MB": 2 * 10**8, "10 KB": 10**4, "4GiB": 4 << 30, "77": 77}
    assert {text: shard_nbytes(text) for text in texts} == texts


def test_tag_and_untag(call, store):
    code, out, _ = call("tag", store, 300, "v1.0", "--json")
    assert (code, json.loads(out)["tags"]) == (0, ["v1.0"])
    assert call("untag", store, "v1.0")[0] == 0
    assert call("untag", store, "v1.0")[0] == 10
    assert call("tag", store, 12345, "v2")[0] == 10
    assert call("tag", store, 300, "../../evil")[0] == 2


def test_delete_without_a_terminal_needs_yes(call, store):
    code, _, err = call("delete", store, 100)
    assert code == 2
    assert "--yes" in err
    assert "100" in call("ls", store)[1]


def test_delete_removes_only_the_named_checkpoints(call, store):
    code, out, _ = call("delete", store, 100, "latest", "--yes", "--json")
    assert code == 0
    assert [entry["step"] for entry in json.loads(out)["deleted"]] == [100, 300]
    with ckstore.open(store, create=False) as opened:
        assert opened.steps() == [200]


def test_delete_is_all_or_nothing(call, store):
    code, _, err = call("delete", store, 100, 200, "--yes")
    assert code == 11
    assert "good" in err
    assert call("delete", store, 100, 999, "--yes")[0] == 10
    with ckstore.open(store, create=False) as opened:
        assert opened.steps() == [100, 200, 300]


def test_rewind_makes_an_old_entry_the_newest(call, store):
    code, out, _ = call("rewind", store, 100, "--json")
    assert (code, json.loads(out)["seq"], json.loads(out)["step"]) == (0, 3, 100)
    with ckstore.open(store, create=False) as opened:
        assert opened.latest().step == 100


def test_doctor_describes_machine_and_store(call, store):
    with ckstore.open(store, create=False) as opened:
        opened.delete(100)
    (store / "tmp" / ("0" * 32 + ".ckm")).write_bytes(b"left by a crash")
    code, out, _ = call("doctor", store, "--json")
    assert code == 0
    found = [(one["topic"], one["found"]) for one in json.loads(out)["findings"]]
    topics = {topic for topic, _ in found}
    assert {"ckstore", "python", "loops", "torch", "file system", "free", "O_DIRECT", "engine", "store"} <= topics
    assert ("run main", "deleted checkpoints (drop marks): 1") in found
    assert any(topic == "tmp" and "1 ckm" in text for topic, text in found)


def test_doctor_names_the_live_writer(call, store):
    with ckstore.open(store, create=False) as opened:
        opened.commit({"a": np.arange(2)}, 1)
        found = [one["found"] for one in json.loads(call("doctor", store, "--json")[1])["findings"]]
    assert any("being written by pid" in text and "alive" in text for text in found)


def test_doctor_reports_trash_and_running_collections(call, store):
    def found():
        return {one["topic"]: one["found"] for one in json.loads(call("doctor", store, "--json")[1])["findings"]}

    with ckstore.open(store, create=False) as opened:
        opened.delete(100)
        opened.gc(min_age=0)
        assert "MiB; list them with `ckstore trash ls`" in found()["trash"]
        opened.gc(now=True, min_age=0)
    # The lock file stays, and so do trash folders for a while.
    assert (store / "gc.lock").exists()
    assert list((store / "trash").iterdir())
    assert found()["trash"] == "empty"
    assert "gc.lock" not in found()
    with (store / "gc.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a collection is running" in found()["gc.lock"]


def test_doctor_of_a_folder_without_store(call, tmp_path):
    code, out, _ = call("doctor", tmp_path)
    assert code == 0
    assert "there is no store here" in out
    assert call("doctor", tmp_path / "nowhere")[0] == 10
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_timings_and_removes_its_files(call, tmp_path):
    code, out, _ = call("bench", tmp_path, "--size", 16, "--json")
    assert code == 0
    assert [row["what"] for row in json.loads(out)["timings"]][:2] == ["plain write + fsync", "commit, first"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"], ["show"], ["verify"], ["tag", "100", "x"], ["untag", "x"], ["delete", "100", "--yes"],
        ["rewind", "100"], ["restore", "-o", "x.npz"], ["export", "100", "-o", "x.safetensors"],
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_path_without_store_is_not_found_and_not_changed(call, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    code, out, err = call(name, tmp_path / "nowhere", *rest)
    assert (code, out) == (10, "")
    assert err.startswith("ckstore: there is no store here")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
