"""Trainers of transformers with models of a few thousand parameters, made from configs: nothing is downloaded."""

from __future__ import annotations

import functools
import gc

import torch

LENGTH, VOCABULARY = 12, 48


class Tokens(torch.utils.data.Dataset):
    """Sequences of tokens that each index determines."""

    def __init__(self, count=48):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@functools.cache
def spare_modules(kind):
    """Each training collects garbage: do not let it search the modules that this kind of model has loaded."""
    gc.collect()
    gc.freeze()


def make_model(kind):
    """Return a model with dropout; equal for equal kinds."""
    import transformers

    transformers.set_seed(7)
    model = _model(kind, transformers)
    spare_modules(kind)
    return model


def _model(kind, transformers):
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "moe":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.Qwen3MoeConfig(**common, **sizes, **heads, num_experts=4, num_experts_per_tok=2)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**common, **sizes))
    config = transformers.GPT2Config(**common, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    if kind == "frozen":
        model.transformer.h[0].requires_grad_(False)
    if kind == "lora":
        import peft

        def adapter(rank, target):
            return peft.LoraConfig(r=rank, target_modules=[target], fan_in_fan_out=True, lora_dropout=0.1)

        model = peft.get_peft_model(model, adapter(2, "c_attn"))
        model.add_adapter("second", adapter(3, "c_proj"))
    return model


def make_trainer(model, output_dir, *, kind=None, **options):
    """Return a trainer that logs every step and saves every second one.

    Args:
        model: As for ``make_model``.
        output_dir: Where it saves.
        kind: Its class; None: the one that fits the model.
        options: Training arguments.
    """
    import transformers

    is_seq2seq = model == "t5"
    arguments = transformers.Seq2SeqTrainingArguments if is_seq2seq else transformers.TrainingArguments
    defaults = {
        **{"max_steps": 8, "save_steps": 2, "save_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-2},
        **{"per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3},
    }
    args = arguments(str(output_dir), **{**defaults, **options})
    kind = kind or (transformers.Seq2SeqTrainer if is_seq2seq else transformers.Trainer)
    return kind(make_model(model), args, train_dataset=Tokens(), eval_dataset=Tokens(8))


def losses_of(trainer):
    """Return the logged loss of each step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def differences(first, second, path="state"):
    """Return the paths at which two restored states differ, bit for bit."""
    if type(first) is not type(second):
        return [path]
    if isinstance(first, torch.Tensor):
        is_equal = first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
        return [] if is_equal else [path]
    if isinstance(first, dict):
        if list(first) != list(second):
            return [path]
        return [found for key in first for found in differences(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [path]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for place, (one, two) in pairs for found in differences(one, two, f"{path}.{place}")]
    if hasattr(first, "tobytes"):
        return [] if first.dtype == second.dtype and first.tobytes() == second.tobytes() else [path]
    return [] if first == second else [path]
