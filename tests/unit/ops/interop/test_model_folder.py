"""An export to a folder: which weights it contains, under which names, and that it is never loadable too early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckstore
from ckstore.errors import CapacityError, NotFoundError, UnsupportedError, UsageError
from ckstore.integrations.checkpoint_folders import FILES as FILES_KEY
from ckstore.ops.interop import discover, hub_model, model_folder, target_folder

MODEL = {
    "emb": torch.arange(12.0).reshape(4, 3),
    "layer.w": torch.arange(20.0).reshape(4, 5).t(),
    "layer.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "count": torch.tensor(7),
}
STATE = {"model": MODEL, "optimizer": {"m": torch.ones(3)}, "step": 4}
WEIGHT_FILES = {"model.safetensors", "model.safetensors.index.json"}


def weights_in(folder):
    """Return all tensors of a folder, as a reader of its index or its only file finds them."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    found = {}
    for name in names:
        tensors = load_file(folder / name)
        assert not index.exists() or all(weight_map[key] == name for key in tensors)
        found |= tensors
    return found


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_part_model_is_exported_without_its_key(store, tmp_path):
    store.commit(STATE, 4)
    exported = store.export_hf("latest", tmp_path / "out")
    check_equal(weights_in(tmp_path / "out"), MODEL)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (exported.files, exported.tensor_count, exported.info.step) == (("model.safetensors",), 5, 4)
    assert exported.notes[0].startswith("The checkpoint has no config.json")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}


def test_flat_state_is_exported_whole(store, tmp_path):
    store.commit({**MODEL, "model.head": torch.ones(2)}, 4)
    store.export_hf(4, tmp_path / "out")
    check_equal(weights_in(tmp_path / "out"), {**MODEL, "model.head": torch.ones(2)})


def test_committed_module_is_exported_like_its_state_dict(store, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    store.commit({"model": module, "optimizer": torch.optim.Adam(module.parameters())}, 4)
    store.export_hf(4, tmp_path / "out")
    check_equal(weights_in(tmp_path / "out"), module.state_dict())


def test_single_tensor_is_not_a_model(store, tmp_path):
    store.commit(torch.ones(3), 4)
    with pytest.raises(UsageError, match="without a name"):
        store.export_hf(4, tmp_path / "out")


def test_key_of_small_files_is_that_of_the_integrations():
    assert discover.SMALL_FILES_KEY == FILES_KEY == "files"


def test_state_of_several_parts_needs_a_choice(store, tmp_path):
    store.commit({"net": MODEL, "optimizer": {"m": torch.ones(3)}}, 4)
    with pytest.raises(UsageError, match=r"no part 'model'; it contains net, optimizer.*--only 'net\.\*'"):
        store.export_hf(4, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    store.export_hf(4, tmp_path / "out", only="net.*", strip_prefix="net.")
    check_equal(weights_in(tmp_path / "out"), MODEL)


def test_prefix_is_removed_from_all_names_or_refused(store, tmp_path):
    store.commit({"state_dict": {"net.a": torch.ones(1), "loss.a": torch.ones(2)}}, 4)
    with pytest.raises(UsageError, match=r"does not begin with 'state_dict\.net\.'.*state_dict\.loss\.a"):
        store.export_hf(4, tmp_path / "out", only="*", strip_prefix="state_dict.net.")
    store.export_hf(4, tmp_path / "out", only="state_dict.net.*", strip_prefix="state_dict.net.")
    check_equal(weights_in(tmp_path / "out"), {"a": torch.ones(1)})


def test_two_tensors_of_one_name_are_refused(store, tmp_path):
    store.commit({"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, 4)
    with pytest.raises(UsageError, match=r"same name: a\.b"):
        store.export_hf(4, tmp_path / "out")


def test_selection_without_a_tensor_is_refused(store, tmp_path):
    store.commit(STATE, 4)
    with pytest.raises(NotFoundError, match="no tensor to export"):
        store.export_hf(4, tmp_path / "out", only="step")


def test_plain_values_are_listed(store, tmp_path):
    store.commit({"model": {"w": torch.ones(1), "_extra_state": b"x" * 5000, "n": 3}}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    assert set(exported.left_out) == {"model._extra_state", "model.n"}


def test_dtype_that_safetensors_lacks_is_refused(store, tmp_path):
    store.commit({"model": {"w": torch.ones(1), "z": torch.ones(1, dtype=torch.complex128)}}, 4)
    with pytest.raises(UnsupportedError, match="no dtype complex128: z"):
        store.export_hf(4, tmp_path / "out")


def test_arrays_of_numpy_are_weights_too(store, tmp_path):
    store.commit({"model": {"w": np.arange(6, dtype=">f4").reshape(2, 3), "n": np.array([1, 2])}}, 4)
    store.export_hf(4, tmp_path / "out", dtype="bf16")
    wanted = torch.arange(6.0).reshape(2, 3).bfloat16()
    check_equal(weights_in(tmp_path / "out"), {"w": wanted, "n": torch.tensor([1, 2])})


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtype_converts_floating_point_weights_only(store, tmp_path, dtype, wanted):
    eight_bits = torch.arange(4.0).to(torch.float8_e4m3fn)
    config = {"dtype": "float64", "hidden": 3}
    store.commit({"model": {**MODEL, "fp8": eight_bits}, "files": {"config.json": json.dumps(config)}}, 4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hub_model.importlib.util, "find_spec", lambda name: None)
        store.export_hf(4, tmp_path / "out", dtype=dtype)
    floats = {name: MODEL[name].to(getattr(torch, wanted)) for name in ("emb", "layer.w", "layer.b")}
    found = weights_in(tmp_path / "out")
    assert torch.equal(found.pop("fp8").view(torch.uint8), eight_bits.view(torch.uint8))
    check_equal(found, {**MODEL, **floats})
    # from_pretrained converts to the dtype in the config.
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "dtype": wanted}


def test_value_that_becomes_infinite_is_refused(store, tmp_path):
    store.commit({"model": {"small": torch.ones(2), "large": torch.tensor([1.0, 1e5, float("inf")])}}, 4)
    with pytest.raises(UsageError, match=r"too large for torch\.float16: large"):
        store.export_hf(4, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    store.export_hf(4, tmp_path / "out", dtype="bf16")


def test_unknown_dtype_is_refused(store, tmp_path):
    store.commit(STATE, 4)
    with pytest.raises(UsageError, match="Use fp32, bf16, fp16"):
        store.export_hf(4, tmp_path / "out", dtype="float16")


def test_tied_weights_are_written_once_under_their_first_name(store, tmp_path):
    shared = torch.arange(8.0).reshape(2, 4)
    views = {"first": shared, "again": shared, "transposed": shared.t(), "row": shared[1]}
    store.commit({"model": views}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    assert exported.tied == {"again": "first"}
    check_equal(weights_in(tmp_path / "out"), {name: views[name] for name in ("first", "transposed", "row")})


def test_weights_that_the_config_does_not_tie_are_written_twice(store, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_model.importlib.util, "find_spec", lambda name: None)
    shared = torch.arange(8.0)
    store.commit({"model": {"a": shared, "b": shared}, "files": {"config.json": b'{"tie_word_embeddings": false}'}}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    assert exported.tied == {}
    check_equal(weights_in(tmp_path / "out"), {"a": shared, "b": shared})
    assert exported.notes == ("transformers is not installed, so the names of the weights were not checked.",)


def test_shards_are_filled_in_the_order_of_the_state(store, tmp_path):
    sizes = {"a": 6, "b": 6, "c": 2, "big": 11, "d": 6, "e": 2, "f": 2}
    store.commit({"model": {name: torch.full((size,), 1, dtype=torch.uint8) for name, size in sizes.items()}}, 4)
    exported = store.export_hf(4, tmp_path / "out", max_shard_nbytes=10)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    numbers = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert numbers == {"a": 1, "big": 2, "b": 3, "c": 3, "d": 4, "e": 4, "f": 4}
    assert index["metadata"] == {"total_size": 35}
    assert exported.files[-1] == "model.safetensors.index.json"
    assert len(weights_in(tmp_path / "out")) == 7


MEASURE = """
import sys, torch, ckstore
from pathlib import Path

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def growth(work):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = field("VmRSS")
    work()
    return field("VmHWM") - before

store_path, out = sys.argv[1:]
with ckstore.open(store_path, create=False) as store:
    store.export_hf(1, out + "/warm")
    print(growth(lambda: store.export_hf(2, out + "/large", max_shard_nbytes=32 << 20)))
    print(growth(lambda: store.export_hf(2, out + "/half", max_shard_nbytes=32 << 20, dtype="bf16")))
    print(growth(lambda: store.restore(2)))
"""


def test_memory_of_an_export_is_bounded_by_a_shard(store, tmp_path):
    tensor_nbytes, count, bound = 16 << 20, 16, (32 << 20) + (200 << 20)
    policy = ckstore.Policy(compression="none")
    block = torch.arange(tensor_nbytes // 4, dtype=torch.float32)
    store.commit({"model": MODEL}, 1)
    store.commit({"model": {f"w{number}": block + number for number in range(count)}}, 2, policy=policy)
    store.close()
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "store"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    exported, converted, restored = map(int, done.stdout.split())
    assert max(exported, converted) <= bound
    assert restored >= tensor_nbytes * count > bound, "the whole state would be seen"
    with safe_open(tmp_path / "large" / "model-00008-of-00008.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w15"), block + 15)


FILES = {
    "config.json": b"{}",
    "tokenizer.model": b"\x00\xff",
    "unet/config.json": b"[]",
    "trainer_state.json": b"{}",
    "model.safetensors": b"not this",
    "../outside.json": b"x",
    "/tmp/ckstore-outside.json": b"x",
    ".hidden": b"x",
    "a//b": b"x",
    "": b"x",
    "unet": b"a file where a folder is needed",
}


def test_small_files_are_written_inside_of_the_folder_only(store, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_model.importlib.util, "find_spec", lambda name: None)
    store.commit({"model": MODEL, "files": FILES}, 4)
    (tmp_path / "deep").mkdir()
    out = tmp_path / "deep" / "out"
    exported = store.export_hf(4, out)
    written = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert set(written) == {"config.json", "tokenizer.model", "unet/config.json", "model.safetensors"}
    assert all(written[name].read_bytes() == FILES[name] for name in written if name != "model.safetensors")
    assert set(exported.left_out) == {f"files.{name}" for name in set(FILES) - set(written)} | {
        "files.model.safetensors"
    }
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"out"}
    check_equal(weights_in(out), MODEL)


def test_part_with_the_key_of_small_files_may_hold_tensors(store, tmp_path):
    store.commit({"model": MODEL, "files": {"w": torch.ones(1)}}, 4)
    store.export_hf(4, tmp_path / "out", only="files.*", strip_prefix="files.")
    check_equal(weights_in(tmp_path / "out"), {"w": torch.ones(1)})


@pytest.mark.parametrize(
    "present", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json"]
)
def test_file_is_replaced_only_with_force(store, tmp_path, monkeypatch, present):
    monkeypatch.setattr(hub_model.importlib.util, "find_spec", lambda name: None)
    store.commit({"model": MODEL, "files": {"config.json": b"{}"}}, 4)
    out = tmp_path / "out"
    out.mkdir()
    (out / present).write_text("mine")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=rf"contains {present} already.*--force"):
        store.export_hf(4, out)
    assert {path.name for path in out.iterdir()} == {present, "notes.txt"}
    store.export_hf(4, out, force=True)
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "notes.txt"}
    check_equal(weights_in(out), MODEL)


@pytest.mark.parametrize("present", ["pytorch_model.bin", "adapter_config.json"])
def test_folder_from_which_something_else_would_be_loaded_is_refused(store, tmp_path, present):
    store.commit(STATE, 4)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / present).write_text("{}")
    with pytest.raises(UsageError, match="could be loaded instead"):
        store.export_hf(4, tmp_path / "out", force=True)


def test_target_must_be_a_folder_in_a_folder(store, tmp_path):
    store.commit(STATE, 4)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a folder"):
        store.export_hf(4, tmp_path / "file")
    with pytest.raises(NotFoundError, match="no such folder"):
        store.export_hf(4, tmp_path / "missing" / "out")
    for place in ("/proc", "/proc/out"):
        with pytest.raises(NotFoundError, match="no folder can be created"):
            store.export_hf(4, place)


class Interrupted(BaseException):
    """Stands for the end of the process."""


def interrupt_after(monkeypatch, count):
    """Interrupt at the ``count``-th change of the target folder."""
    calls = iter(range(count))

    def counted(name):
        original = getattr(target_folder, name)

        def act(*args, **kwargs):
            if next(calls, None) is None:
                raise Interrupted
            return original(*args, **kwargs)

        monkeypatch.setattr(target_folder, name, act)

    counted("give_name")
    counted("sync_folder")


@pytest.mark.parametrize("max_shard_nbytes", [10**9, 60])
def test_interrupted_export_leaves_the_new_weights_or_none_that_load(store, tmp_path, monkeypatch, max_shard_nbytes):
    monkeypatch.setattr(hub_model.importlib.util, "find_spec", lambda name: None)
    old = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    for step, weights in ((1, old), (2, MODEL)):
        store.commit({"model": weights, "files": {"config.json": str(step).encode()}}, step)
    seen = set()
    for count in range(100):
        out = tmp_path / f"out-{count}"
        store.export_hf(1, out, max_shard_nbytes=60)
        with pytest.MonkeyPatch.context() as patched:
            interrupt_after(patched, count)
            try:
                store.export_hf(2, out, max_shard_nbytes=max_shard_nbytes, force=True)
                is_done = True
            except Interrupted:
                is_done = False
        loadable = WEIGHT_FILES & {path.name for path in out.iterdir()}
        seen.add(bool(loadable))
        if loadable:
            check_equal(weights_in(out), MODEL)
            assert (out / "config.json").read_bytes() == b"2"
        if is_done:
            break
    assert is_done
    assert seen == {True, False}, "some interruptions leave nothing that loads"


def test_interruption_test_finds_weights_that_get_their_name_too_early(store, tmp_path, monkeypatch):
    original = target_folder.TargetFolder.publish
    monkeypatch.setattr(
        target_folder.TargetFolder, "publish", lambda self, draft, names: original(self, draft, names[::-1])
    )
    with pytest.raises((AssertionError, FileNotFoundError, OSError)):
        test_interrupted_export_leaves_the_new_weights_or_none_that_load(store, tmp_path, monkeypatch, 60)


def test_full_disk_leaves_the_folder_as_it_was(store, tmp_path, monkeypatch):
    store.commit(STATE, 4)
    out = tmp_path / "out"
    store.export_hf(4, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(path, blocks):
        raise CapacityError("the disk is full", where=path)

    monkeypatch.setattr(model_folder, "write_synced", full)
    with pytest.raises(CapacityError):
        store.export_hf(4, out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_draft_of_a_killed_export_is_named(store, tmp_path):
    store.commit(STATE, 4)
    (tmp_path / "out" / ".ckstore-0123abcd.draft").mkdir(parents=True)
    exported = store.export_hf(4, tmp_path / "out")
    assert "left from an interrupted export" in " ".join(exported.notes)


def test_loss_is_named(tmp_path):
    with ckstore.open(tmp_path / "lossy", policy=ckstore.Policy(fidelity=ckstore.Residual.near())) as store:
        for step in (1, 2):
            moments = {"exp_avg": torch.rand(64, 64), "exp_avg_sq": torch.rand(64, 64)}
            optimizer = {"state": {0: moments}, "param_groups": [{"betas": (0.9, 0.999), "params": [0]}]}
            store.commit({"model": {"w": torch.randn(64, 64)}, "optimizer": optimizer}, step)
        exported = store.export_hf(2, tmp_path / "out")
        check_equal(weights_in(tmp_path / "out"), dict(store.restore(2)["model"]))
    assert exported.info.fidelity != "exact"
    assert any("stored with a loss" in note for note in exported.notes)


LORA = {
    "base_model.model.q.base_layer.weight": torch.ones(2, 2),
    "base_model.model.q.lora_A.default.weight": torch.full((1, 2), 2.0),
    "base_model.model.q.lora_B.default.weight": torch.full((2, 1), 3.0),
    "base_model.model.q.lora_magnitude_vector.default.weight": torch.full((2,), 4.0),
    "base_model.model.e.lora_embedding_A.default": torch.full((2,), 5.0),
}
SAVED = {
    "base_model.model.q.lora_A.weight": 2.0,
    "base_model.model.q.lora_B.weight": 3.0,
    "base_model.model.q.lora_magnitude_vector": 4.0,
    "base_model.model.e.lora_embedding_A": 5.0,
}
CONFIG = json.dumps({"peft_type": "LORA", "bias": "none"}).encode()


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_adapter_is_exported_as_peft_saves_it(store, tmp_path, adapter):
    state = {name.replace("default", adapter): tensor for name, tensor in LORA.items()}
    store.commit({"model": state, "files": {"adapter_config.json": CONFIG}}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    assert exported.files == ("adapter_config.json", "adapter_model.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tensor.flatten()[0].item() for name, tensor in found.items()} == SAVED
    assert exported.left_out == {"base_model.model.q.base_layer.weight": "of the base model, not of an adapter"}


def test_second_adapter_gets_a_folder(store, tmp_path):
    second = {name.replace("default", "second"): tensor + 1 for name, tensor in LORA.items() if "lora" in name}
    files = {"adapter_config.json": CONFIG, "second/adapter_config.json": CONFIG}
    store.commit({"model": {**LORA, **second}, "files": files}, 4)
    store.export_hf(4, tmp_path / "out")
    for folder, more in ((tmp_path / "out", 0), (tmp_path / "out" / "second", 1)):
        found = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor.flatten()[0].item() for name, tensor in found.items()} == {
            name: value + more for name, value in SAVED.items()
        }


def test_saved_adapter_is_exported_as_it_is(store, tmp_path):
    state = {name: torch.full((2,), value) for name, value in SAVED.items()}
    store.commit({"model": state, "files": {"adapter_config.json": b'{"peft_type": "LORA", "bias": "all"}'}}, 4)
    store.export_hf(4, tmp_path / "out")
    check_equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), state)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"checkpoint has no adapter_config\.json"),
        ({"adapter_config.json": b'{"peft_type": "IA3"}'}, "of type 'IA3' cannot be exported"),
        ({"adapter_config.json": b'{"peft_type": "LORA", "bias": "all"}'}, "with bias cannot be exported"),
        ({"adapter_config.json": b'{"peft_type": "LORA", "modules_to_save": ["h"]}'}, "with modules_to_save"),
        ({"adapter_config.json": b"[]"}, "not a JSON object"),
    ],
)
def test_adapter_that_would_not_load_is_refused(store, tmp_path, files, message):
    store.commit({"model": LORA, "files": files} if files else {"model": LORA}, 4)
    with pytest.raises(UnsupportedError, match=message):
        store.export_hf(4, tmp_path / "out")
    assert not (tmp_path / "out").exists()


SAVED_STATE = {name: torch.full((2,), value) for name, value in SAVED.items()}


def test_adapters_part_is_exported_as_it_is(store, tmp_path):
    second = {name: tensor + 1 for name, tensor in SAVED_STATE.items()}
    files = {"adapter_config.json": CONFIG, "second/adapter_config.json": b'{"peft_type": "IA3"}'}
    optimizer = {"m": torch.ones(3)}
    store.commit({"adapters": {"default": SAVED_STATE, "second": second}, "optimizer": optimizer, "files": files}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    for folder, state in (("", SAVED_STATE), ("second/", second)):
        check_equal(load_file(tmp_path / "out" / f"{folder}adapter_model.safetensors"), state)
        config = f"{folder}adapter_config.json"
        assert (tmp_path / "out" / config).read_bytes() == files[config]
    assert (exported.tensor_count, exported.left_out, exported.notes) == (8, {}, ())


def test_adapter_without_the_name_of_the_default_is_in_its_folder(store, tmp_path):
    files = {"mine/adapter_config.json": CONFIG}
    store.commit({"adapters": {"mine": SAVED_STATE}, "files": files}, 4)
    exported = store.export_hf(4, tmp_path / "out")
    assert exported.files == ("mine/adapter_config.json", "mine/adapter_model.safetensors")
    assert exported.notes == ("PEFT loads each adapter from its own folder: mine.",)


def test_adapters_part_of_another_kind_is_not_exported(store, tmp_path):
    store.commit({"model": MODEL, "adapters": {"default": {"w": torch.ones(2)}, "count": 1}}, 4)
    store.export_hf(4, tmp_path / "out")
    check_equal(weights_in(tmp_path / "out"), MODEL)


@pytest.mark.parametrize("more", [{"model": {"head": torch.ones(2)}}, {"model": {"prompt_encoder.w": torch.ones(2)}}])
def test_weights_outside_of_adapters_are_refused_by_name(store, tmp_path, more):
    state = {"adapters": {"default": SAVED_STATE}, **more, "files": {"adapter_config.json": CONFIG}}
    store.commit(state, 4)
    with pytest.raises(UnsupportedError, match=rf"outside of the adapters.*{next(iter(more['model']))}"):
        store.export_hf(4, tmp_path / "out")
    store.export_hf(4, tmp_path / "out", only="adapters.*")
    check_equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), SAVED_STATE)
    assert store.export_hf(4, tmp_path / "rest", only="model.*").files == ("model.safetensors",)
    check_equal(load_file(tmp_path / "rest" / "model.safetensors"), more["model"])


def test_adapters_part_without_a_config_is_refused(store, tmp_path):
    adapters = {"default": SAVED_STATE, "second": SAVED_STATE}
    store.commit({"adapters": adapters, "files": {"adapter_config.json": CONFIG}}, 4)
    with pytest.raises(UnsupportedError, match=r"no second/adapter_config\.json"):
        store.export_hf(4, tmp_path / "out")


@pytest.mark.parametrize("prefix", ["adapters.", "adapters.default."])
def test_prefix_of_adapters_is_refused(store, tmp_path, prefix):
    store.commit({"adapters": {"default": SAVED_STATE}, "files": {"adapter_config.json": CONFIG}}, 4)
    with pytest.raises(UsageError, match="Leave out --strip-prefix"):
        store.export_hf(4, tmp_path / "out", only="adapters.*", strip_prefix=prefix)


@pytest.mark.parametrize("before", ["default.", "model."])
def test_names_that_peft_would_ignore_are_refused(store, tmp_path, before):
    state = {f"{before}{name}": tensor for name, tensor in SAVED_STATE.items()}
    files = {"adapter_config.json": CONFIG}
    for part in ({"model": state}, {"adapters": {"default": state}}):
        store.commit({**part, "files": files}, 4)
        with pytest.raises(UnsupportedError, match=r"does not begin with 'base_model\.'"):
            store.export_hf("latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    store.export_hf("seq:0", tmp_path / "out", strip_prefix=f"model.{before}")
    check_equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), SAVED_STATE)


@pytest.mark.parametrize("name", ["..", "a/b", "../x", "{folder}", ".x"])
def test_adapter_is_not_written_outside_of_the_folder(store, tmp_path, name):
    name = name.format(folder=tmp_path / "other")
    files = {"adapter_config.json": CONFIG, f"{name}/adapter_config.json": CONFIG}
    store.commit({"adapters": {"default": SAVED_STATE, name: SAVED_STATE}, "files": files}, 4)
    with pytest.raises(UnsupportedError, match="not a name of a folder"):
        store.export_hf(4, tmp_path / "out")
    assert not (tmp_path / "other").exists()


def test_adapter_of_a_model_is_not_written_outside_of_the_folder(store, tmp_path):
    name = str(tmp_path / "other")
    state = {key.replace("default", name): tensor for key, tensor in LORA.items()}
    files = {"adapter_config.json": CONFIG, f"{name}/adapter_config.json": CONFIG}
    store.commit({"model": {**LORA, **state}, "files": files}, 4)
    with pytest.raises(UnsupportedError, match="not a name of a folder"):
        store.export_hf(4, tmp_path / "out")
    assert not (tmp_path / "other").exists()


def test_folder_is_durable_before_the_last_name(store, tmp_path, monkeypatch):
    store.commit({"model": MODEL}, 4)
    events = []
    give_name, fsync = target_folder.give_name, os.fsync

    def noted_name(draft, target, *, force):
        events.append(target.name)
        give_name(draft, target, force=force)

    def noted_fsync(fd):
        events.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(target_folder, "give_name", noted_name)
    monkeypatch.setattr(target_folder.os, "fsync", noted_fsync)
    files = list(store.export_hf(4, tmp_path / "out", max_shard_nbytes=60).files)
    assert len(files) > 2
    # Content of all files, then all names but the last, then the last; the folder is synced before and after it.
    assert events == [*files, *files[:-1], "out", files[-1], "out", tmp_path.name]
