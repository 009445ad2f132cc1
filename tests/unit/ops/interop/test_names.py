"""Protects steps in names: a date, a model size or a version is not taken for a step."""

from __future__ import annotations

import pytest

from ckstore.ops.interop.scan import dates_in_name, is_unfinished, matches, number_of_name, shard_of_name, step_of_name


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("epoch=3-step=1200", 1200),
        ("epoch=1-step=100-v1", 100),
        ("ba100", 100),
        ("iter_0000100", 100),
        ("global_step500", 500),
        ("5000it", 5000),
        ("step_10k", 10_000),
        ("ckpt_1.5M", 1_500_000),
        ("model_7b_step100", 100),
        ("step100_ckpt_2024-01-15", 100),
        ("checkpoint-500-20240115", 500),
        ("ep1-ba100-rank0", 100),
        ("it=250", 250),
        ("model_10k-it", 10_000),
        ("epoch3step100", 100),
        ("epoch3iter100", 100),
        ("model100steps", 100),
        # Random names.
        ("ckstore-tests-vyz51ba0", None),
        ("ckstore-tests-51ba0", None),
        ("ckstore-tests-ba0x3f", None),
        ("x-it7kq", None),
        ("run-vyz51ba", None),
        ("run-vyz51it", None),
        ("51it_0", 51),
        ("run-51it7", None),
        # The word says what the number is.
        ("step_20240115", 20240115),
        ("run-20240115", None),
        ("checkpoint-20240115", None),
        ("checkpoint_20240115_103000", None),
        ("ckpt-2024-01-15T10:30:00", None),
        ("ckpt-15.01.2024", None),
        ("checkpoint-1705312800", None),
    ],
)
def test_step_of_name_reads_step_words(name, step):
    assert step_of_name(name) == step


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model_1000", 1000),
        ("model250", 250),
        ("12", 12),
        ("epoch=3", 3),
        ("run-20240115", None),
        ("model-1705312800", None),
        ("resnet50", None),
        ("llama-7b", None),
        ("gpt2", None),
        ("fp16", None),
        ("model_1_2", None),
    ],
)
def test_number_of_name_ignores_dates_and_parts_of_words(name, number):
    assert number_of_name(name) == number


def test_dates_are_named():
    assert dates_in_name("run-20240115_103045-x") == ["20240115_103045"]
    assert dates_in_name("checkpoint-500") == []


@pytest.mark.parametrize(
    ("name", "is_torn"),
    [
        ("tmp-checkpoint-8", True),
        ("checkpoint-8.tmp", True),
        ("checkpoint_8.orbax-checkpoint-tmp-12", True),
        ("model.safetensors.incomplete", True),
        (".tmp-checkpoint-3", True),
        ("model.pt.part", True),
        ("checkpoint-8", False),
        ("temperature-8", False),
        ("partial_fc", True),
        ("template.pt", False),
    ],
)
def test_unfinished_names(name, is_torn):
    assert is_unfinished(name) is is_torn


def test_shards_of_any_width():
    assert shard_of_name("model-00002-of-00003") == ("model", 2, 3)
    assert shard_of_name("model-1-of-3") == ("model", 1, 3)
    assert shard_of_name("checkpoint-500") is None


@pytest.mark.parametrize(
    ("path", "pattern", "is_match"),
    [
        ("model.safetensors", "model.safetensors", True),
        ("checkpoint-2/model.safetensors", "model.safetensors", False),
        ("checkpoint-2/model.safetensors", "**/model.safetensors", True),
        ("model.safetensors", "**/model.safetensors", True),
        ("checkpoint-2/model.safetensors", "checkpoint-*/*.safetensors", True),
        ("checkpoint-2/a/b.pt", "checkpoint-*/*.pt", False),
        ("checkpoint-2", "checkpoint-2/", True),
    ],
)
def test_globs_of_paths(path, pattern, is_match):
    assert matches(path, pattern) is is_match
