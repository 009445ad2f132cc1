"""Protects that an import accounts for every file: a possible state is imported, or listed with a reason."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckstore.errors import CorruptError, NotFoundError, UsageError
from ckstore.ops.interop import scan

WEIGHTS = {"w": torch.arange(4.0)}


def write_checkpoint(folder, step, *, weights=WEIGHTS, parts=("optimizer", "trainer_state")):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    for part in parts:
        if part == "trainer_state":
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        else:
            # The format is detected by content. No child process is needed to read this file.
            save_file({"moments": torch.full((2,), float(step))}, folder / f"{part}.bin")


@pytest.fixture
def out(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path / "out" / f"checkpoint-{step}", step)
    return tmp_path / "out"


def test_whole_history_is_not_partial(store, out):
    (out / "README.md").write_text("x")
    (out / "events.out.tfevents.1").write_bytes(b"x")
    report = store.import_from(out)
    assert [entry.step for entry in report.entries] == [2, 4]
    assert (dict(report.left_out), report.is_partial) == ({}, False)


def test_exclude_matches_the_path_not_the_name(store, out):
    save_file({"w": torch.zeros(4)}, out / "model.safetensors")
    report = store.import_from(out, exclude=["model.safetensors"])
    assert dict(report.left_out) == {"model.safetensors": "as asked for with --exclude model.safetensors"}
    assert report.is_partial
    assert all("model" in store.restore(step) for step in (2, 4))


def test_exclude_at_every_depth_lists_every_file(store, out):
    report = store.import_from(out, exclude=["**/optimizer.bin"])
    assert set(report.left_out) == {"checkpoint-2/optimizer.bin", "checkpoint-4/optimizer.bin"}
    assert set(store.restore(4)) == {"model", "trainer_state", "files"}


def test_excluded_folder_is_listed(store, out):
    report = store.import_from(out, exclude=["checkpoint-4"])
    assert set(report.left_out) == {"checkpoint-4/"}
    assert store.steps() == [2]


def test_exclude_that_matches_nothing_is_reported(store, out):
    report = store.import_from(out, exclude=["optimiser.bin"])
    assert [warning for warning in report.warnings if "optimiser.bin matches nothing" in warning]
    assert not report.is_partial


def test_equal_model_next_to_checkpoints_is_ignored(store, out):
    save_file(WEIGHTS, out / "model.safetensors")
    assert not store.import_from(out).is_partial


def test_other_model_next_to_checkpoints_is_listed(store, out):
    save_file({"w": torch.zeros(4)}, out / "model.safetensors")
    report = store.import_from(out)
    assert store.steps() == [2, 4]
    assert "import it by its own path, with --step" in report.left_out["model.safetensors"]


def test_final_checkpoint_with_own_step_is_imported(store, out):
    write_checkpoint(out, 5, weights={"w": torch.zeros(4)})
    assert not store.import_from(out).is_partial
    assert torch.equal(store.restore(5)["model"]["w"], torch.zeros(4))


def test_final_model_without_optimizer_is_not_latest(store, out):
    write_checkpoint(out, 5, weights={"w": torch.zeros(4)}, parts=("trainer_state",))
    report = store.import_from(out)
    assert store.latest().step == 4
    assert "lacks optimizer, which checkpoint-4 has" in report.left_out["model.safetensors"]


def test_adapter_next_to_a_model_has_its_own_key(store, out):
    save_file({"lora_A": torch.ones(2)}, out / "checkpoint-4" / "adapter_model.safetensors")
    store.import_from(out / "checkpoint-4")
    restored = store.restore(4)
    assert (set(restored["model"]), set(restored["adapter_model"])) == ({"w"}, {"lora_A"})


def test_single_adapter_is_the_model(store, tmp_path):
    write_checkpoint(tmp_path / "checkpoint-4", 4)
    (tmp_path / "checkpoint-4" / "model.safetensors").rename(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    store.import_from(tmp_path / "checkpoint-4")
    assert set(store.restore(4)) == {"model", "optimizer", "trainer_state", "files"}


def test_files_of_one_stem_are_separate_parts(store, out):
    # The names suggest one state in two formats, but nothing has compared them.
    save_file({"w": torch.zeros(9)}, out / "checkpoint-4" / "model.bin")
    save_file({"w": torch.ones(9)}, out / "checkpoint-4" / "pytorch_model.bin")
    store.import_from(out)
    restored = store.restore(4)
    assert [len(restored[key]["w"]) for key in ("model", "model.bin", "pytorch_model")] == [4, 9, 9]


def test_unfinished_folder_is_left_out_and_listed(store, out):
    write_checkpoint(out / "tmp-checkpoint-8", 8, parts=())
    report = store.import_from(out)
    assert store.latest().step == 4
    assert "not finished" in report.left_out["tmp-checkpoint-8/"]


def test_unfinished_folder_is_imported_by_path_with_warning(store, tmp_path):
    write_checkpoint(tmp_path / "tmp-checkpoint-8", 8)
    report = store.import_from(tmp_path / "tmp-checkpoint-8")
    assert store.steps() == [8]
    assert "not finished" in " ".join(report.warnings)


@pytest.mark.parametrize("parts", [(), ("optimizer",), ("trainer_state",)])
def test_incomplete_newest_checkpoint_is_left_out(store, out, parts):
    write_checkpoint(out / "checkpoint-6", 6, parts=parts)
    report = store.import_from(out)
    assert store.latest().step == 4
    assert "which checkpoint-4 has" in report.left_out["checkpoint-6"]


def test_older_checkpoints_without_optimizer_are_imported(store, out):
    (out / "checkpoint-2" / "optimizer.bin").unlink()
    assert not store.import_from(out).is_partial
    assert store.steps() == [2, 4]


def test_newest_unnamed_by_pointer_file_is_left_out(store, tmp_path):
    for step in (100, 200, 300):
        write_checkpoint(tmp_path / "out" / f"global_step{step}", step, parts=())
    (tmp_path / "out" / "latest").write_text("global_step200\n")
    report = store.import_from(tmp_path / "out")
    assert store.steps() == [100, 200]
    assert "latest names step 200" in report.left_out["global_step300"]


def test_dcp_without_metadata_is_listed_as_unfinished(store, out):
    (out / "checkpoint-6").mkdir()
    (out / "checkpoint-6" / "__0_0.distcp").write_bytes(b"x")
    report = store.import_from(out)
    assert "the .metadata is missing" in report.left_out["checkpoint-6/__0_0.distcp"]


def test_files_of_unsupported_formats_are_listed(store, out):
    for name in ("weights.npz", "state.h5", "run.zip"):
        (out / "checkpoint-4" / name).write_bytes(b"x")
    report = store.import_from(out)
    assert set(report.left_out) == {f"checkpoint-4/{name}" for name in ("weights.npz", "state.h5", "run.zip")}
    assert "unpack it" in report.left_out["checkpoint-4/run.zip"]


@pytest.mark.parametrize(
    "name",
    [
        "sampler.json", "scheduler.json", "tokens_seen.json", "metadata.json", "rng/numpy.json",
        "replay.csv", "progress.txt", "loader.yaml", "seen.TSV",
        "latest.npz", "done.h5", "complete.npy", "last_checkpoint.zip",
    ],
)  # fmt: skip
def test_possible_state_in_a_checkpoint_is_listed(store, out, name):
    file = out / "checkpoint-4" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"position": 3}')
    assert set(store.import_from(out).left_out) == {f"checkpoint-4/{name}"}


@pytest.mark.parametrize("name", ["sampler.json", "replay.csv"])
def test_possible_state_in_a_single_folder_is_listed(store, out, name):
    (out / "checkpoint-4" / "inner").mkdir()
    for folder in (out / "checkpoint-4", out / "checkpoint-4" / "inner"):
        (folder / name).write_text("3")
    assert set(store.import_from(out / "checkpoint-4").left_out) == {name, f"inner/{name}"}


def test_settings_tokenizers_and_logs_are_not_listed(store, out):
    names = (
        "config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json", "config.yaml",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja", "spiece.model", "model_index.json",
        "all_results.json", "train_results.json", "eval_results.json", "hparams.yaml", "training_args.json",
        "requirements.txt", "README.md", "LICENSE", "latest", "done", "metrics.csv", "train_log.txt", "zero_to_fp32.py",
        "config_sentence_transformers.json", "modules.json",
    )  # fmt: skip
    for folder in (out / "checkpoint-2", out / "checkpoint-4"):
        for name in names:
            (folder / name).write_text("{}" if name != "latest" else folder.name)
    assert dict(store.import_from(out).left_out) == {}


def test_text_files_outside_checkpoints_are_not_listed(store, out):
    (out / "data").mkdir()
    for name in ("samples.json", "data/train.csv", "data/notes.txt"):
        (out / name).write_text("x")
    assert dict(store.import_from(out).left_out) == {}


def test_files_with_one_reason_are_one_line(store, out):
    (out / "data").mkdir()
    for number in range(20):
        (out / "data" / f"{number}.npy").write_bytes(b"x")
    assert set(store.import_from(out).left_out) == {"data/0.npy and 19 more"}


def test_json_of_a_state_is_imported(store, out):
    (out / "checkpoint-4" / "dataloader_state.json").write_text('{"position": 3}')
    store.import_from(out)
    assert store.restore(4)["dataloader_state"] == {"position": 3}


def test_files_far_below_are_imported(store, out):
    deep = out / "checkpoint-4" / "a" / "b" / "c" / "d" / "e" / "f"
    deep.mkdir(parents=True)
    save_file({"w": torch.ones(1)}, deep / "x.safetensors")
    store.import_from(out)
    assert "a/b/c/d/e/f/x" in store.restore(4)


def test_unreadable_file_without_step_is_listed(store, out):
    (out / "vocabulary.pkl").write_bytes(b"no pickle")
    report = store.import_from(out)
    assert store.steps() == [2, 4]
    assert "a text that begins with 'no pickle'" in report.left_out["vocabulary.pkl"]


def test_other_runs_below_are_listed(store, out):
    write_checkpoint(out / "second" / "checkpoint-7", 7)
    report = store.import_from(out)
    assert store.steps() == [2, 4]
    assert "import it by its own path" in report.left_out["second/"]


def test_links_are_followed_once_or_listed(store, out):
    (out / "latest-link").symlink_to("checkpoint-4")
    (out / "checkpoint-4" / "up").symlink_to("..")
    (out / "checkpoint-4" / "scaler.pt").symlink_to("/nonexistent/blob")
    report = store.import_from(out)
    assert [entry.step for entry in report.entries] == [2, 4]
    assert set(report.left_out) == {"checkpoint-4/scaler.pt"}
    assert "which is missing" in report.left_out["checkpoint-4/scaler.pt"]


def test_links_into_a_cache_outside_are_read(store, tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file(WEIGHTS, tmp_path / "blobs" / "3f2a")
    (tmp_path / "snapshot" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "snapshot" / "checkpoint-3" / "model.safetensors").symlink_to(tmp_path / "blobs" / "3f2a")
    store.import_from(tmp_path / "snapshot")
    assert torch.equal(store.restore(3)["model"]["w"], WEIGHTS["w"])


def test_second_checkpoint_of_a_step_is_refused(store, tmp_path):
    (tmp_path / "out").mkdir()
    save_file(WEIGHTS, tmp_path / "out" / "step_3.safetensors")
    save_file(WEIGHTS, tmp_path / "out" / "copy-step_3.safetensors", metadata={"other": "header"})
    save_file({"w": torch.zeros(4)}, tmp_path / "out" / "other-step_3.safetensors")
    save_file(WEIGHTS, tmp_path / "out" / "step_2.safetensors")
    both = r"copy-step_3\.safetensors and other-step_3\.safetensors are both step 3"
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=rf"{both}.* --exclude 'other-step_3\.safetensors'"):
            store.import_from(tmp_path / "out", dry_run=dry_run)
    assert store.steps() == [], "nothing is committed before the user has chosen"
    report = store.import_from(tmp_path / "out", exclude=["other-step_3.safetensors"])
    assert {entry.name: entry.action for entry in report.entries} == {
        "copy-step_3.safetensors": "import", "step_2.safetensors": "import", "step_3.safetensors": "skip"
    }  # fmt: skip


def test_two_versions_of_one_epoch_are_refused_by_both_names(store, tmp_path):
    (tmp_path / "out").mkdir()
    for name, value in (("epoch=1", 1.0), ("epoch=1-v1", 2.0)):
        torch.save({"global_step": 40, "state_dict": {"w": torch.full((3,), value)}}, tmp_path / "out" / f"{name}.ckpt")
    with pytest.raises(UsageError, match=r"epoch=1-v1\.ckpt and epoch=1\.ckpt are both step 40"):
        store.import_from(tmp_path / "out")
    store.import_from(tmp_path / "out", exclude=["epoch=1-v1.ckpt"])
    assert store.restore(40)["state_dict"]["w"].tolist() == [1.0] * 3


def test_small_files_are_kept_with_the_weights(store, out):
    folder = out / "checkpoint-4"
    (folder / "unet").mkdir()
    kept = {
        "config.json": b"{}",
        "tokenizer.model": b"\x0a\xff",
        "chat_template.jinja": b"x",
        "unet/config.json": b"[]",
    }
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    (folder / "training_args.bin").write_bytes(b"a pickle")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "loss.png").write_bytes(b"x")
    (folder / "tokenizer.json").write_bytes(bytes(9))
    entry = store.import_from(out).entries[1]
    files = store.restore(4, only="files")["files"]
    trainer_state = (folder / "trainer_state.json").read_bytes()
    assert files == {**kept, "trainer_state.json": trainer_state, "tokenizer.json": bytes(9)}
    assert dict(entry.without_state) == {
        "checkpoint-4/training_args.bin": "settings without state (objects that only code can create)",
        "checkpoint-4/loss.png": "a file of this kind is not needed to load the weights",
    }


def test_long_file_next_to_the_weights_is_listed(store, out, monkeypatch):
    monkeypatch.setattr(scan, "SMALL_FILE_NBYTES_MAX", 1 << 20)
    (out / "checkpoint-4" / "tokenizer.json").write_bytes(bytes((1 << 20) + 1))
    entry = store.import_from(out).entries[1]
    assert set(store.restore(4, only="files")["files"]) == {"trainer_state.json"}
    assert "longer than 1 MiB" in entry.without_state["checkpoint-4/tokenizer.json"]


def test_small_files_can_be_left_out(store, out):
    (out / "checkpoint-4" / "config.json").write_text("{}")
    report = store.import_from(out, skip_leaf=["files.trainer_state.json"])
    assert store.restore(4, only="files") == {"files": {"config.json": b"{}"}}
    assert set(report.entries[1].left_out) == {"files.trainer_state.json"}


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json"])
def test_folder_of_one_model_keeps_its_config(store, tmp_path, config):
    folder = tmp_path / "my-model"
    folder.mkdir()
    stem = "model" if config == "config.json" else "adapter_model"
    save_file(WEIGHTS, folder / f"{stem}.safetensors")
    (folder / config).write_text("{}")
    assert not store.import_from(folder, step=7).is_partial
    restored = store.restore(7)
    assert (set(restored), restored["files"]) == ({"model", "files"}, {config: b"{}"})


def test_small_files_next_to_checkpoints_of_one_file_are_named(store, tmp_path):
    (tmp_path / "out").mkdir()
    save_file(WEIGHTS, tmp_path / "out" / "step_1.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "out" / name).write_text("{}")
    report = store.import_from(tmp_path / "out")
    assert "Not imported: config.json, tokenizer.json" in report.warnings[0]
    assert set(store.restore(1)) == {"w"}


def test_part_with_the_key_of_small_files_is_kept_and_the_small_files_are_named(store, out):
    save_file(WEIGHTS, out / "checkpoint-4" / "files.safetensors")
    entry = store.import_from(out / "checkpoint-4").entries[0]
    assert torch.equal(store.restore(4)["files"]["w"], WEIGHTS["w"])
    assert dict(entry.without_state) == {"trainer_state.json": "the state has no free key 'files' for it"}


def test_step_of_another_source_is_skipped(store, out):
    store.commit({"other": np.ones(3)}, 2)
    report = store.import_from(out)
    entry = report.entries[0]
    assert (entry.action, entry.is_compared, report.is_partial) == ("skip", False, True)
    assert "not compared" in entry.reason


def test_second_import_of_the_same_files_is_whole(store, out):
    store.import_from(out)
    report = store.import_from(out)
    assert [entry.action for entry in report.entries] == ["skip", "skip"]
    assert not report.is_partial


def test_checkpoint_time_is_the_modification_time(store, out):
    for number, step in enumerate((2, 4)):
        for file in (out / f"checkpoint-{step}").iterdir():
            os.utime(file, ns=(10**18, 10**18 + number))
    store.import_from(out)
    assert [store.info(step).time_ns for step in (2, 4)] == [10**18, 10**18 + 1]


def test_time_in_the_future_is_now(store, out):
    os.utime(out / "checkpoint-4" / "model.safetensors", ns=(1 << 62, 1 << 62))
    store.import_from(out)
    assert store.info(4).time_ns < 1 << 62


def test_dates_are_not_steps(store, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("run-20240115", "checkpoint_2024-01-16_10-30-00"):
        save_file(WEIGHTS, tmp_path / "out" / f"{name}.safetensors")
    with pytest.raises(UsageError, match="is taken for a date"):
        store.import_from(tmp_path / "out")
    save_file(WEIGHTS, tmp_path / "out" / "checkpoint_7-20240117.safetensors")
    report = store.import_from(tmp_path / "out")
    assert store.steps() == [7]
    assert report.is_partial is False, "the others have the bytes of step 7"


def test_missing_shard_of_an_index_is_an_error(store, tmp_path):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "first.safetensors")
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"second\.safetensors is missing"):
        store.import_from(folder)
    save_file({"b": torch.ones(1)}, folder / "second.safetensors")
    store.import_from(folder)
    assert set(store.restore(5)["model"]) == {"a", "b"}


def test_one_shard_is_not_a_state(store, tmp_path):
    save_file(WEIGHTS, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match="shard 1 of 2"):
        store.import_from(tmp_path / "model-00001-of-00002.safetensors", step=1)


def test_folder_named_by_step_includes_its_folders(store, tmp_path):
    folder = tmp_path / "checkpoint-5"
    write_checkpoint(folder, 5)
    write_checkpoint(folder / "global_step5", 5, parts=())
    store.import_from(folder)
    restored = store.restore(5)
    assert set(restored) == {"model", "optimizer", "global_step5/model", "trainer_state", "files"}
    assert set(restored["files"]) == {"trainer_state.json"}


NATURES = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "git-annex pointer": b"/annex/objects/SHA256E-s1--00\n",
    "HTML page": b"\n<!DOCTYPE html><html><body>Sign in</body></html>",
    "XML document": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "empty": b"",
    "zeros only": bytes(4096),
    "compressed with gzip": b"\x1f\x8b\x08\x00" + bytes(50),
    "a text that begins with": b'{"error": "Repository not found"}',
    "tar archive": b"x" * 257 + b"ustar\x0000" + bytes(300),
    "zip archive that ends early": b"PK\x03\x04" + bytes(22) + b"\x0c\x00\x00\x00archive/data" + bytes(900),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(50),
}


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "bin"])
def test_error_names_what_a_wrong_file_is(store, tmp_path, suffix):
    for nature, content in NATURES.items():
        (tmp_path / f"step_1.{suffix}").write_bytes(content)
        with pytest.raises(CorruptError, match=nature) as raised:
            store.import_from(tmp_path / f"step_1.{suffix}")
        assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_header_whose_length_begins_like_a_pickle_is_read(store, tmp_path, suffix):
    file = tmp_path / f"step_1.{suffix}"
    for length in range(1, 300):
        save_file(WEIGHTS, file, metadata={"filler": "x" * length})
        if file.read_bytes()[0] == 0x80:
            break
    assert file.read_bytes()[0] == 0x80
    store.import_from(file)
    assert torch.equal(store.restore(1)["w"], WEIGHTS["w"])


def test_truncated_safetensors_file_is_named(store, tmp_path):
    save_file({"w" * 3000: torch.ones(3)}, tmp_path / "step_1.safetensors")
    os.truncate(tmp_path / "step_1.safetensors", 2000)
    with pytest.raises(CorruptError, match="ends early"):
        store.import_from(tmp_path / "step_1.safetensors")


def test_archive_error_advises_to_unpack(store, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.zip").write_bytes(b"PK")
    with pytest.raises(UsageError, match="unpack it"):
        store.import_from(tmp_path / "out" / "run.zip")
    with pytest.raises(NotFoundError, match=r"Left out: run\.zip: an archive"):
        store.import_from(tmp_path / "out")


def test_names_in_invalid_unicode_are_imported(store, out):
    name = os.fsdecode(b"caf\xe9")
    save_file(WEIGHTS, out / "x.safetensors")
    (out / "x.safetensors").rename(out / "checkpoint-4" / f"{name}.safetensors")
    (out / "checkpoint-4" / f"{name}.npz").write_bytes(b"x")
    report = store.import_from(out)
    assert torch.equal(store.restore(4)["caf\\xe9"]["w"], WEIGHTS["w"])
    assert [name.endswith(".npz") for name in report.left_out] == [True]
