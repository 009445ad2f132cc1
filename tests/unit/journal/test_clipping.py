"""Protects ``ckstore.clip_grad_norm_``: the same bits as torch's, and the factor that the journal needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ckstore
from ckstore.journal import clipping, forms
from ckstore.journal.clipping import take_factors


def parameters(scale=1.0):
    torch.manual_seed(3)
    found = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 30), (30,), (7,))]
    for each in found[:2]:
        each.grad = (scale * torch.randn(each.shape)).to(torch.bfloat16).float()
    return found


@pytest.fixture(autouse=True)
def nothing_noted():
    take_factors()


@pytest.mark.parametrize("options", [{}, {"norm_type": float("inf")}, {"foreach": False}, {"norm_type": 1}])
@pytest.mark.parametrize("max_norm", [0.1, 1, 1e9])
def test_result_and_gradients_have_the_bits_of_torch(options, max_norm):
    ours, theirs = parameters(), parameters()
    norm = ckstore.clip_grad_norm_(iter(ours), max_norm, **options)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, **options))
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is b.grad or torch.equal(a.grad, b.grad)


def test_noted_factor_makes_the_gradients(monkeypatch):
    clipped, plain = parameters(), parameters()
    ckstore.clip_grad_norm_(clipped, 0.5)
    (factor,) = take_factors()
    assert np.array_equal(plain[0].grad.numpy() * factor, clipped[0].grad.numpy())
    assert take_factors() == []
    monkeypatch.setattr(forms, "factors_of", lambda *_: [])
    gradient = clipped[0].grad.numpy()
    assert forms.form_of(gradient, [factor]).kind == "bf16"
    assert forms.form_of(gradient).kind == "plain", "without the factor, a search is needed"


def test_factors_that_change_nothing_are_left_out_and_few_are_kept():
    ckstore.clip_grad_norm_(parameters(), 1e9)
    assert take_factors() == []
    for number in range(2 * clipping._FACTORS_MAX):
        ckstore.clip_grad_norm_(parameters(), 0.1 + number)
    factors = take_factors()
    assert len(factors) == clipping._FACTORS_MAX
    assert factors[0] > factors[-1], "the newest first"


def test_norm_that_is_not_finite():
    found = parameters()
    found[0].grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        ckstore.clip_grad_norm_(found, 1.0, error_if_nonfinite=True)
    assert torch.isnan(ckstore.clip_grad_norm_(found, 1.0))
    assert len(take_factors()) <= 1


def test_a_point_takes_the_factor(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckstore.open(tmp_path / "store") as store:
        store.journal(optimizer)
        model(100 * torch.ones(2, 4)).sum().backward()
        norm = ckstore.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        record = store._journal.plan({"model": model, "optimizer": optimizer}, metrics={}, tags=())
    expected = np.float32(torch.clamp(1.0 / (norm + 1e-6), max=1.0).item())
    assert record.drafted.draft.factors == [expected.tobytes()]
