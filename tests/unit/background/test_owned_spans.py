"""Protects which memory a guard may leave for later: whole spans of an optimizer, without gaps between elements."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ckstore.background.optimizer_guard import OptimizerGuard, versions_of
from ckstore.state.capture import capture
from ckstore.state.memory import keeps_of
from ckstore.state.torch_adapter import TorchAdapter


def owned(*parameters):
    """Return the non-empty spans that an optimizer of these parameters owns."""
    guarded = OptimizerGuard(lambda: None)
    optimizer = torch.optim.SGD(list(parameters), lr=0.1)
    guarded.attach(optimizer)
    return [span for span in guarded.spans() if span[0] < span[1]]


def memory_of(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


FLAT = torch.randn(64, 48)


@pytest.mark.parametrize(
    "tensor",
    [
        FLAT,
        FLAT.t(),
        FLAT.view(4, 16, 48).permute(2, 0, 1),
        FLAT.view(4, 16, 1, 48).transpose(1, 2),
        FLAT[3:7],
        FLAT.view(2, 8, 8, 24).to(memory_format=torch.channels_last),
    ],
    ids=["contiguous", "transposed", "permuted", "a dimension of one", "rows", "channels last"],
)
def test_dense_parameter_is_owned_whole(tensor):
    assert owned(nn.Parameter(tensor)) == [memory_of(tensor)]


@pytest.mark.parametrize(
    "tensor",
    [FLAT[:, ::2], FLAT[:, :16], FLAT[::2], FLAT.t()[::2], FLAT.as_strided((3, 3), (2, 2)), FLAT[:1].expand(8, 48)],
    ids=["every second column", "some columns", "every second row", "transposed", "holes and overlaps", "repeated"],
)
def test_parameter_with_gaps_is_not_owned(tensor):
    assert owned(nn.Parameter(tensor)) == []


def test_adjacent_parameters_are_one_span():
    assert owned(nn.Parameter(FLAT[:10]), nn.Parameter(FLAT[10:])) == [memory_of(FLAT)]


def test_parameter_without_memory_has_no_span():
    """Its address is 0. Spans that begin there belong to other objects."""
    assert owned(nn.Parameter(torch.empty(4, device="meta"))) == []


def test_deleted_optimizer_is_not_guarded():
    guarded = OptimizerGuard(lambda: None)
    optimizer = torch.optim.SGD([nn.Parameter(FLAT)], lr=0.1)
    guarded.attach(optimizer)
    assert guarded.spans() == [memory_of(FLAT)]
    del optimizer
    gc.collect()
    assert guarded.spans() == []


def test_capturable_optimizer_is_not_guarded():
    """Replaying a CUDA graph calls no hooks, so the optimizer's memory is copied before the call returns."""
    guarded = OptimizerGuard(lambda: None)
    optimizer = torch.optim.AdamW([nn.Parameter(FLAT)], lr=0.1)
    guarded.attach(optimizer)
    assert guarded.spans() == [memory_of(FLAT)]
    optimizer.param_groups[0]["capturable"] = True
    assert guarded.spans() == []


def test_two_tensors_in_one_storage_both_count():
    whole = torch.zeros(10)
    other = torch.empty(0).set_(whole.untyped_storage(), 0, (10,))
    captured = capture({"alone": torch.zeros(3), "whole": whole, "other": other}, [TorchAdapter()])
    before = versions_of(keeps_of(captured.storages, range(2)))
    assert len(before) == 2
    other.add_(1)
    after = versions_of(keeps_of(captured.storages, range(2)))
    assert [one == two for one, two in zip(before, after, strict=True)] == [True, False]
    whole.add_(1)
    assert versions_of(keeps_of(captured.storages, range(2)))[1] not in (before[1], after[1])
