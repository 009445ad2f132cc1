"""What ckstore exports loads in transformers and PEFT, bit for bit, and has the files that their own saving makes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckstore
from ckstore.errors import UnsupportedError, UsageError
from ckstore.integrations.model_parts import model_parts
from ckstore.ops.interop.weights import shards_of

TINY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(transformers):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **TINY)
    return transformers.GPT2LMHeadModel(config)


def t5(transformers):
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **TINY
    )
    return transformers.T5ForConditionalGeneration(config)


def qwen3_moe(transformers):
    config = transformers.Qwen3MoeConfig(
        hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=32, **TINY,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


MODELS = [gpt2, t5, qwen3_moe]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request, transformers):
    torch.manual_seed(0)
    return request.param(transformers)


def files_of(model):
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return {"config.json": json.dumps(config).encode(), "generation_config.json": b"{}"}


def check_loads(folder, model):
    """Check that a folder loads completely, and with the bits of a model."""
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    found, wanted = loaded.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def names_in(folder):
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("max_shard_nbytes", [10**9, 3000])
def test_exported_model_loads_with_the_same_bits(store, tmp_path, model, max_shard_nbytes):
    store.commit({"model": model.state_dict(), "files": files_of(model), "epoch": 1}, 1)
    exported = store.export_hf("latest", tmp_path / "out", max_shard_nbytes=max_shard_nbytes)
    check_loads(tmp_path / "out", model)
    model.save_pretrained(tmp_path / "reference", max_shard_size=max_shard_nbytes)
    assert names_in(tmp_path / "out") == names_in(tmp_path / "reference")
    assert exported.tensor_count == len(names_in(tmp_path / "reference"))
    weights = [name for name in exported.files if "safetensors" in name]
    assert weights == sorted(path.name for path in (tmp_path / "reference").glob("model*.safetensors*"))
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert safe_open(file, "pt").metadata() == {"format": "pt"}


def test_state_without_files_loads_with_the_config_of_its_model(store, tmp_path, model):
    store.commit(model.state_dict(), 1)
    exported = store.export_hf("latest", tmp_path / "out")
    assert "no config.json" in exported.notes[0]
    model.config.save_pretrained(tmp_path / "out")
    check_loads(tmp_path / "out", model)


def test_config_without_a_class_is_enough(store, tmp_path, model):
    files = {"config.json": json.dumps({**model.config.to_dict(), "architectures": None}).encode()}
    store.commit({"model": model.state_dict(), "files": files}, 1)
    store.export_hf("latest", tmp_path / "out")
    check_loads(tmp_path / "out", model)
    model.save_pretrained(tmp_path / "reference")
    assert names_in(tmp_path / "out") == names_in(tmp_path / "reference")


def test_exported_dtype_is_the_dtype_that_loads(store, tmp_path, model):
    files = {"config.json": json.dumps({**model.config.to_dict(), "dtype": "float32"}).encode()}
    store.commit({"model": model.state_dict(), "files": files}, 1)
    store.export_hf("latest", tmp_path / "out", dtype="bf16")
    check_loads(tmp_path / "out", model.bfloat16())


def test_imported_folder_of_a_model_is_exported_again(store, tmp_path, model):
    model.save_pretrained(tmp_path / "saved", max_shard_size=3000)
    store.import_from(tmp_path / "saved", step=3)
    exported = store.export_hf(3, tmp_path / "out")
    check_loads(tmp_path / "out", model)
    assert exported.notes == (), "the hub's layout of the import is recognized, and nothing is converted"
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_conversion_by_transformers_is_named_with_its_memory(store, tmp_path, transformers):
    model = qwen3_moe(transformers)
    store.commit({"model": model.state_dict(), "files": files_of(model)}, 1)
    notes = store.export_hf("latest", tmp_path / "out").notes
    assert "the layout of the hub" in notes[0]
    assert "held in memory" in notes[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strip_prefix": ""}, r"29 missing \(transformer\.wte\.weight"),
        ({"only": "model.transformer.*"}, None),
        ({"only": "model.transformer.h.*"}, r"5 missing \(transformer\.wte\.weight"),
        ({"only": ["model.*", "more"], "strip_prefix": None}, r"1 unexpected \(more\)"),
    ],
)
def test_weights_that_are_not_those_of_the_class_are_refused(store, tmp_path, transformers, options, problem):
    model = gpt2(transformers)
    store.commit({"model": model.state_dict(), "more": torch.ones(1), "files": files_of(model)}, 1)
    if problem is None:
        store.export_hf("latest", tmp_path / "out", **options)
        check_loads(tmp_path / "out", model)
        return
    with pytest.raises(UsageError, match=rf"not those of GPT2LMHeadModel.*{problem}"):
        store.export_hf("latest", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_weight_of_another_shape_is_refused(store, tmp_path, transformers):
    model = gpt2(transformers)
    state = {**model.state_dict(), "transformer.ln_f.bias": torch.ones(3)}
    store.commit({"model": state, "files": files_of(model)}, 1)
    with pytest.raises(UsageError, match=r"1 of another shape \(transformer\.ln_f\.bias\)"):
        store.export_hf("latest", tmp_path / "out")


@pytest.mark.parametrize("config", [b"not json", b"{}", b'{"model_type": "unheard_of"}'])
def test_config_that_transformers_does_not_read_is_named(store, tmp_path, transformers, config):
    store.commit({"model": gpt2(transformers).state_dict(), "files": {"config.json": config}}, 1)
    exported = store.export_hf("latest", tmp_path / "out")
    assert "names of the weights were not checked" in exported.notes[0]
    assert (tmp_path / "out" / "config.json").read_bytes() == config


def test_code_in_a_checkpoint_is_not_executed(store, tmp_path, transformers):
    model = gpt2(transformers)
    config = {**model.config.to_dict(), "model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}
    code = f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Config: pass\n"
    files = {"config.json": json.dumps(config).encode(), "evil.py": code.encode()}
    store.commit({"model": model.state_dict(), "files": files}, 1)
    store.export_hf("latest", tmp_path / "out")
    assert not (tmp_path / "owned").exists()


def test_export_leaves_random_states_and_settings_alone(store, tmp_path, transformers):
    model = qwen3_moe(transformers)
    store.commit({"model": model.state_dict(), "files": files_of(model)}, 1)
    log = transformers.utils.logging
    before = torch.random.get_rng_state(), log.get_verbosity(), log.is_progress_bar_enabled()
    store.export_hf("latest", tmp_path / "out")
    after = torch.random.get_rng_state(), log.get_verbosity(), log.is_progress_bar_enabled()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("max_shard_nbytes", [1, 500, 1500, 4000, 10**9])
def test_shards_are_those_of_huggingface_hub(store, tmp_path, transformers, huggingface_hub, max_shard_nbytes):
    model = t5(transformers)
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    del state["lm_head.weight"]
    store.commit({"model": state}, 1)
    store.export_hf("latest", tmp_path / "out", max_shard_nbytes=max_shard_nbytes)
    split = huggingface_hub.split_torch_state_dict_into_shards(state, max_shard_size=max_shard_nbytes)
    for name, tensors in split.filename_to_tensors.items():
        assert set(load_file(tmp_path / "out" / name)) == set(tensors)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == split.is_sharded
    if split.is_sharded:
        wanted = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        assert json.loads(index.read_text()) == wanted
        assert index.read_text() == json.dumps(wanted, indent=2, sort_keys=True) + "\n"


def test_random_sizes_are_split_like_in_huggingface_hub(huggingface_hub):
    generator = torch.Generator().manual_seed(3)
    for limit in (1, 7, 30, 100):
        for _ in range(50):
            count = int(torch.randint(1, 12, (1,), generator=generator))
            sizes = {str(k): int(torch.randint(1, 40, (1,), generator=generator)) for k in range(count)}
            state = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
            split = huggingface_hub.split_torch_state_dict_into_shards(state, max_shard_size=limit)
            assert shards_of(sizes, limit) == list(split.filename_to_tensors.values())


def lora(peft, transformers, **options):
    torch.manual_seed(1)
    model = peft.get_peft_model(
        gpt2(transformers), peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, **options)
    )
    return model


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("is_saved_layout", [False, True])
def test_exported_adapter_loads_with_the_same_bits(store, tmp_path, transformers, peft, options, is_saved_layout):
    model = lora(peft, transformers, **options)
    model.save_pretrained(tmp_path / "reference")
    files = {"adapter_config.json": (tmp_path / "reference" / "adapter_config.json").read_bytes()}
    state = peft.get_peft_model_state_dict(model) if is_saved_layout else model.state_dict()
    store.commit({"model": state, "files": files}, 1)
    store.export_hf("latest", tmp_path / "out")
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "reference"))
    assert mine.keys() == theirs.keys()
    torch.manual_seed(1)
    loaded = peft.PeftModel.from_pretrained(gpt2(transformers), tmp_path / "out")
    found, wanted = loaded.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_two_adapters_are_exported_to_the_folders_of_peft(store, tmp_path, transformers, peft):
    model = lora(peft, transformers)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["c_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "reference")
    names = ("adapter_config.json", "second/adapter_config.json")
    files = {name: (tmp_path / "reference" / name).read_bytes() for name in names}
    store.commit({"model": model.state_dict(), "files": files}, 1)
    store.export_hf("latest", tmp_path / "out")
    for folder in (".", "second"):
        file = f"{folder}/adapter_model.safetensors"
        mine, theirs = load_file(tmp_path / "out" / file), load_file(tmp_path / "reference" / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_adapter_that_was_added_to_a_model_in_place_is_exported(store, tmp_path, transformers, peft):
    model = lora(peft, transformers)
    model.save_pretrained(tmp_path / "reference")
    files = {"adapter_config.json": (tmp_path / "reference" / "adapter_config.json").read_bytes()}
    # As model.add_adapter() of transformers makes it: without the wrappers of PeftModel.
    store.commit({"model": model.base_model.model.state_dict(), "files": files}, 1)
    store.export_hf("latest", tmp_path / "out")
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "reference"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.fixture
def base(transformers):
    """Return a function that makes the base model of `lora` again."""

    def make():
        torch.manual_seed(1)
        return gpt2(transformers)

    return make


def train_with_ckstore(transformers, model, folder):
    """Train two steps; the Trainer saves into the store ``folder/ckstore``."""
    data = [{"input_ids": row, "labels": row} for row in torch.arange(8 * 12).reshape(8, 12) % 64]
    options = {"max_steps": 2, "save_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(folder), learning_rate=0.1, **options), train_dataset=data
    )
    ckstore.transformers.attach(trainer)
    trainer.train()


def check_adapters(found, wanted):
    """Check that a model has the same adapters as another, bit for bit, and of the same tensors."""
    found, wanted = found.state_dict(), wanted.state_dict()
    assert found.keys() == wanted.keys()
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert differing == []


def commit_parts(store, peft, model, folder):
    """Commit a model as the door into the Trainer does, with the configs that PEFT writes to a folder."""
    model.save_pretrained(folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("adapter_config.json")}
    store.commit({**model_parts(model), "files": files}, 1)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["ln_f"]}], ids=["matrices", "whole modules"])
def test_adapter_that_a_trainer_saved_loads_with_the_same_bits(tmp_path, transformers, peft, base, options):
    model = lora(peft, transformers, **options)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_with_ckstore(transformers, model, tmp_path / "run")
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in model.state_dict().items())
    with ckstore.open(tmp_path / "run" / "ckstore", create=False) as store:
        exported = store.export_hf("latest", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("adapter*")} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip
    assert exported.notes == ()
    check_adapters(peft.PeftModel.from_pretrained(base(), tmp_path / "out"), model)
    model.save_pretrained(tmp_path / "reference")
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "reference"))
    assert mine.keys() == theirs.keys()


def test_adapters_that_a_trainer_saved_are_exported_to_the_folders_of_peft(tmp_path, transformers, peft, base):
    model = lora(peft, transformers)
    # Its matrices have the names of the first adapter's, and other shapes.
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False))
    train_with_ckstore(transformers, model, tmp_path / "run")
    with ckstore.open(tmp_path / "run" / "ckstore", create=False) as store:
        store.export_hf("latest", tmp_path / "out")
        second = store.export_hf("latest", tmp_path / "second", only="adapters.second.*")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
    loaded.load_adapter(tmp_path / "out" / "second", "second")
    check_adapters(loaded, model)
    model.save_pretrained(tmp_path / "reference")
    for name in ("adapter_model.safetensors", "second/adapter_model.safetensors"):
        assert load_file(tmp_path / "out" / name).keys() == load_file(tmp_path / "reference" / name).keys()
    # Alone, it has its own config, and the folder does not look like that of the first adapter.
    assert not list((tmp_path / "second").glob("adapter*"))
    assert second.left_out["files.adapter_config.json"] == "of an adapter that is not exported"
    alone = peft.PeftModel.from_pretrained(base(), tmp_path / "second" / "second", adapter_name="second")
    model.delete_adapter("default")
    check_adapters(alone, model)


def test_trained_weights_beside_an_adapter_are_refused_by_name(store, tmp_path, transformers, peft, base):
    model = lora(peft, transformers)
    name = "base_model.model.transformer.ln_f.weight"
    model.get_parameter(name).requires_grad_(True)
    commit_parts(store, peft, model, tmp_path / "reference")
    with pytest.raises(UnsupportedError, match=rf"{name}.*--only 'adapters"):
        store.export_hf("latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    store.export_hf("latest", tmp_path / "out", only="adapters.*")
    check_adapters(peft.PeftModel.from_pretrained(base(), tmp_path / "out"), model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig", "IA3Config"])
def test_adapters_of_other_kinds_load_with_the_same_bits(store, tmp_path, transformers, peft, base, kind):
    options = {"target_modules": ["c_attn"], "feedforward_modules": []} if kind == "IA3Config" else {}
    if kind != "IA3Config":
        options = {"num_virtual_tokens": 3}
    model = peft.get_peft_model(base(), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.rand_like(parameter))
    commit_parts(store, peft, model, tmp_path / "reference")
    store.export_hf("latest", tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
    found, wanted = (peft.get_peft_model_state_dict(each) for each in (loaded, model))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_imported_trainer_folder_is_exported_again(store, tmp_path, transformers):
    model = gpt2(transformers)
    folder = tmp_path / "run" / "checkpoint-7"
    model.save_pretrained(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    (folder / "tokenizer.json").write_text("{}")
    torch.save({"state": {}}, folder / "optimizer.pt")
    (folder / "training_args.bin").write_bytes(b"not read")
    report = store.import_from(tmp_path / "run")
    assert list(report.entries[0].without_state) == ["checkpoint-7/training_args.bin"]
    exported = store.export_hf(7, tmp_path / "out")
    assert exported.files == ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
    assert set(exported.left_out) == {"files.trainer_state.json"}
    check_loads(tmp_path / "out", model)
