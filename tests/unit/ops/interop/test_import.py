"""Protects imports: each state is imported bit for bit, with the right step, in the right order."""

from __future__ import annotations

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

import ckstore
from ckstore.errors import ConflictError, CorruptError, NotFoundError, UnsupportedError, UsageError
from support import foreign_checkpoints
from support.states import difference


def check_restored(store, states):
    for step, state in states.items():
        assert difference(store.restore(step), state) is None, f"step {step}"


def test_nanogpt_files_are_imported_in_step_order(store, tmp_path):
    # In the order of names, 1000 comes before 250.
    states = foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(0, 250, 1000))
    report = store.import_from(tmp_path / "out")
    assert [(entry.step, entry.seq, entry.action) for entry in report.entries] == [
        (0, 0, "import"), (250, 1, "import"), (1000, 2, "import")
    ]  # fmt: skip
    assert store.latest().step == 1000
    assert store.log()[0].parent == 1
    check_restored(store, states)
    assert store.verify("decode").is_clean


def test_import_reports_the_saving(store, tmp_path):
    foreign_checkpoints.write_nanogpt(tmp_path / "out")
    report = store.import_from(tmp_path / "out")
    files = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert report.bytes_before == files
    assert report.bytes_stored == sum(info.bytes_written for info in store.log())
    assert report.ratio == files / report.bytes_stored


def test_step_and_metric_are_read_from_content(store, tmp_path):
    states = foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(750,), name="ckpt.pt")
    entry = store.import_from(tmp_path / "out").entries[0]
    assert (entry.step, entry.reason) == (750, "iter_num in its content")
    assert entry.metrics == {"best_val_loss": pytest.approx(float(states[750]["best_val_loss"]))}
    assert store.info("best:best_val_loss").step == 750


def test_lightning_metric_is_read_from_the_name(store, tmp_path):
    states = foreign_checkpoints.write_lightning(tmp_path / "checkpoints")
    report = store.import_from(tmp_path / "checkpoints")
    assert [(entry.name, entry.action) for entry in report.entries] == [
        ("epoch=1-step=100-val_loss=0.100.ckpt", "import"),
        ("epoch=2-step=200-val_loss=0.200.ckpt", "import"),
        ("last.ckpt", "skip"),
    ]
    assert store.info("best:val_loss").step == 100
    check_restored(store, states)


@pytest.mark.parametrize("shards", [1, 3])
def test_trainer_folders_have_a_key_per_file(store, tmp_path, shards):
    states = foreign_checkpoints.write_trainer(tmp_path / "out", shards=shards)
    # The Trainer also leaves the final model next to the checkpoint folders.
    save_file({"w": torch.ones(2)}, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "trainer_state.json").write_text("{}")
    report = store.import_from(tmp_path / "out")
    assert [(entry.step, entry.name) for entry in report.entries] == [
        (500, "checkpoint-500"), (1000, "checkpoint-1000")
    ]  # fmt: skip
    assert [list(entry.without_state) for entry in report.entries] == [
        ["checkpoint-500/training_args.bin"], ["checkpoint-1000/training_args.bin"]
    ]  # fmt: skip
    # Neither the name nor the content gives the step of that model.
    assert set(report.left_out) == {"model.safetensors"}
    for step, state in states.items():
        restored = store.restore(step)
        assert set(restored) == {"model", "optimizer", "scheduler", "rng_state", "trainer_state", "files"}
        assert set(restored["files"]) == {"config.json", "trainer_state.json"}
        for key, wanted in state.items():
            if key == "model":
                assert restored[key].keys() == wanted.keys()
                assert all(torch.equal(restored[key][name], wanted[name]) for name in wanted)
            else:
                assert difference(restored[key], wanted) is None, key
        assert isinstance(restored["rng_state"]["numpy"][1], np.ndarray)
    assert store.info(500).metrics.keys() == {"loss", "eval_loss"}


def test_dcp_keeps_its_nesting(store, tmp_path):
    states = foreign_checkpoints.write_dcp(tmp_path / "dcp")
    report = store.import_from(tmp_path / "dcp")
    assert [(entry.step, entry.kinds) for entry in report.entries] == [(10, ("dcp",)), (20, ("dcp",))]
    restored = store.restore(20)
    for key in ("model", "history", "step"):
        assert difference({key: restored[key]}, {key: _plain(states[20][key])}) is None, key
    # torch.distributed.checkpoint turns integer keys of a dict into strings. An optimizer needs integers.
    assert difference(restored["optimizer"]["state"], states[20]["optimizer"]["state"]) is None


def _plain(state):
    return dict(state) if isinstance(state, dict) else state


def test_dcp_of_several_ranks_is_assembled(store, tmp_path):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    whole = torch.arange(40.0).reshape(8, 5)
    _write_split_dcp(tmp_path / "ranks", whole, ChunkStorageMetadata)
    store.import_from(tmp_path / "ranks", step=3)
    assert torch.equal(store.restore(3)["w"], whole)


def _write_split_dcp(folder, whole, chunk_type, *, cut=(0, 3, 8)):
    """Write a tensor in two parts, as two ranks do that each have some of its rows."""
    import pickle

    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    chunks, places = [], {}
    for rank, (begin, end) in enumerate(pairwise(cut)):
        offset = torch.Size((begin, 0))
        chunks.append(chunk_type(offset, torch.Size((end - begin, whole.shape[1]))))
        file = folder / f"__{rank}_0.distcp"
        torch.save(whole[begin:end].clone(), file)
        places[MetadataIndex("w", offset, rank)] = filesystem._StorageInfo(file.name, 0, file.stat().st_size)
    properties = TensorProperties(dtype=whole.dtype)
    entry = TensorStorageMetadata(properties, whole.shape, chunks)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata({"w": entry}, None, places), file)


@pytest.mark.parametrize("cut", [(0, 3, 7), (0, 3)])
def test_dcp_with_a_missing_part_is_refused(store, tmp_path, cut):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    _write_split_dcp(tmp_path / "ranks", torch.ones(8, 5), ChunkStorageMetadata, cut=cut)
    with pytest.raises(CorruptError, match="leave a gap"):
        store.import_from(tmp_path / "ranks", step=3)
    assert store.log() == []


def test_safetensors_are_read_without_torch(store, tmp_path):
    bf16 = torch.randn(7, 300).to(torch.bfloat16)
    save_file({"w": bf16, "b": torch.zeros(0, 3)}, tmp_path / "step_5.safetensors", metadata={"format": "pt"})
    array = np.arange(12, dtype=">i4").reshape(3, 4).astype("<i4")
    save_numpy({"a": array}, tmp_path / "step_6.safetensors", metadata={"format": "np"})
    store.import_from(tmp_path, exclude=["store"])
    restored = store.restore(5)
    assert torch.equal(restored["w"], bf16)
    assert restored["b"].shape == (0, 3)
    assert isinstance(store.restore(6)["a"], np.ndarray)
    assert np.array_equal(store.restore(6)["a"], array)


def test_files_of_several_steps_are_several_checkpoints_whatever_their_folder_is_called(store, tmp_path):
    for folder, steps in (("run-1it1s", (5, 6)), ("step_70", (8, 9))):
        (tmp_path / folder).mkdir()
        for step in steps:
            save_numpy({"a": np.full(4, step)}, tmp_path / folder / f"step_{step}.safetensors")
        store.import_from(tmp_path / folder)
    assert [store.restore(step)["a"][0] for step in (5, 6, 8, 9)] == [5, 6, 8, 9]


def test_exported_safetensors_keep_tied_tensors(store, tmp_path):
    from ckstore.ops.interop.export import export_safetensors

    embedding = torch.randn(50, 4)
    export_safetensors({"head": embedding, "embed": embedding}, tmp_path / "step_1.safetensors")
    store.import_from(tmp_path / "step_1.safetensors")
    restored = store.restore(1)
    assert restored["head"].data_ptr() == restored["embed"].data_ptr()
    assert torch.equal(restored["head"], embedding)


def load_file_of_torch(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F8_E4M3FNUZ", [8]), ("F8_E5M2FNUZ", [2, 4]), ("F8_E8M0", [8]), ("F4", [2, 8])]
)
def test_small_float_safetensors_round_trip(store, tmp_path, dtype, shape):
    from ckstore.ops.interop.export import export_safetensors

    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8], "note": "unknown"}}).encode()
    file = tmp_path / "step_1.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(8)))
    store.import_from(file)
    restored = store.restore(1)["a"]
    assert restored.view(torch.uint8).flatten().tolist() == list(range(8))
    exported = export_safetensors({"a": restored}, tmp_path / "again.safetensors")
    assert not exported.left_out
    content = (tmp_path / "again.safetensors").read_bytes()
    again = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])["a"]
    assert (again["dtype"], again["shape"]) == (dtype, shape)
    if dtype != "F8_E8M0":  # The reader's own table for torch lacks it.
        theirs = load_file_of_torch(file)["a"]
        assert (theirs.dtype, theirs.shape) == (restored.dtype, restored.shape)


def test_safetensors_with_null_metadata_are_read(store, tmp_path):
    header = json.dumps({"__metadata__": None, "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "step_1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x01\x02")
    store.import_from(tmp_path / "step_1.safetensors")
    assert store.restore(1)["a"].tolist() == [1, 2]


@pytest.mark.parametrize("metadata", [{"note": "bias", "modelspec.predict_key": "weight"}, {"head.weight": "weight"}])
def test_safetensors_metadata_is_reported(store, tmp_path, metadata):
    save_file({"weight": torch.ones(2), "bias": torch.zeros(2)}, tmp_path / "step_1.safetensors", metadata=metadata)
    report = store.import_from(tmp_path / "step_1.safetensors")
    assert set(store.restore(1)) == {"weight", "bias"}
    assert next(iter(metadata)) in " ".join(report.entries[0].warnings)


def test_file_format_follows_its_content(store, tmp_path):
    (tmp_path / "out").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "out" / "step_1.bin")
    torch.save({"w": torch.zeros(2)}, tmp_path / "out" / "step_2.safetensors")
    store.import_from(tmp_path / "out")
    assert [store.restore(step)["w"].tolist() for step in (1, 2)] == [[1, 1], [0, 0]]


def test_second_import_skips_existing_steps(store, tmp_path):
    foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1, 2))
    first = store.import_from(tmp_path / "out")
    foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1, 2, 3))
    report = store.import_from(tmp_path / "out")
    assert [entry.action for entry in report.entries] == ["skip", "skip", "import"]
    assert report.bytes_before > first.bytes_before
    assert [info.step for info in store.log()] == [3, 2, 1]


def test_dry_run_returns_the_same_plan(store, tmp_path):
    foreign_checkpoints.write_nanogpt(tmp_path / "out", name="model{step}.pt")
    planned = store.import_from(tmp_path / "out", dry_run=True)
    assert store.log() == []
    done = store.import_from(tmp_path / "out")
    plans = [
        [(entry.name, entry.step, entry.action, entry.reason) for entry in report.entries] for report in (planned, done)
    ]
    assert plans[0] == plans[1]


def test_older_steps_never_become_latest(store, tmp_path):
    store.commit({"a": np.arange(3)}, 400)
    foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(300, 500))
    with pytest.raises(UsageError, match="step 300 would be committed after step 400"):
        store.import_from(tmp_path / "out")
    assert store.latest().step == 400


def test_interrupted_import_keeps_what_was_committed(store, tmp_path):
    states = foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1, 2, 3))
    broken = tmp_path / "out" / "ckpt_3.pt"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match=r"ckpt_3\.pt \(step 3\)"):
        store.import_from(tmp_path / "out")
    assert store.steps() == [1, 2]
    broken.write_bytes(whole)
    store.import_from(tmp_path / "out")
    check_restored(store, states)


def test_commit_after_import_follows_the_last_one(store, tmp_path):
    states = foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1, 2))
    store.import_from(tmp_path / "out")
    receipt = store.commit(states[2], 3)
    assert receipt.chunks_new == 0
    assert store.info(3).parent == store.info(2).seq


def test_import_without_a_step_asks_for_one(store, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="neither name nor content"):
        store.import_from(tmp_path / "weights.pt")
    store.import_from(tmp_path / "weights.pt", step=9)
    assert store.steps() == [9]


def test_numbered_import_uses_natural_name_order(store, tmp_path):
    for name in ("b10", "b9", "a"):
        torch.save({"name": name}, tmp_path / f"{name}.pt")
    store.import_from(tmp_path, numbered=True, exclude=["store"])
    assert [store.restore(step)["name"] for step in store.steps()] == ["a", "b9", "b10"]


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda path: path.mkdir(), NotFoundError, "no checkpoint found in the folder"),
        (lambda path: path.with_suffix(".txt").write_text("x"), NotFoundError, "no such file"),
    ],
)
def test_sources_without_checkpoints_are_refused(store, tmp_path, make, kind, words):
    make(tmp_path / "source")
    with pytest.raises(kind, match=words):
        store.import_from(tmp_path / "source")


def test_error_for_parent_folder_names_the_right_one(store, tmp_path):
    foreign_checkpoints.write_lightning(tmp_path / "logs" / "version_0" / "checkpoints")
    with pytest.raises(NotFoundError, match=r"[Dd]id you mean .*logs/version_0/checkpoints\?"):
        store.import_from(tmp_path / "logs")


def test_missing_shard_is_found_before_any_commit(store, tmp_path):
    foreign_checkpoints.write_trainer(tmp_path / "out", shards=3)
    (tmp_path / "out" / "checkpoint-1000" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptError, match="shard 2 of 3"):
        store.import_from(tmp_path / "out")
    assert store.log() == []


def test_import_into_run_with_live_writer_is_refused(tmp_path, store):
    store.commit({"a": 1}, 0)
    foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1,))
    with ckstore.open(tmp_path / "store") as other, pytest.raises(ConflictError):
        other.import_from(tmp_path / "out")


def test_torch_that_runs_code_of_files_is_unsupported(monkeypatch):
    from ckstore.ops.interop.torch_files import check_torch

    for version in ("2.5.1", "2.9.1+cu128", "1.13", "nightly"):
        with pytest.raises(UnsupportedError, match="CVE-2026-24747"):
            check_torch(version)
    for version in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1"):
        check_torch(version)
