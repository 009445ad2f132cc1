"""Protects residual checkpoints of torch: every kind of trainer state is restored within its recorded errors."""

from __future__ import annotations

import math

import pytest

import ckstore
from ckstore._testing import repository_of
from support.synthetic_training import losses, lossy_policy

torch = pytest.importorskip("torch")


def make(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 280), torch.nn.Tanh(), torch.nn.Linear(280, 300)).to(dtype)


def train(model, optimizer, count, seed=1):
    rng = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    loss = torch.zeros(())
    for _ in range(count):
        x = torch.randn(16, 300, generator=rng).to(dtype)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.fixture
def opened(tmp_path):
    with ckstore.open(tmp_path / "store", policy=lossy_policy()) as store:
        yield store


@pytest.mark.parametrize("is_named", [True, False])
def test_training_from_residual_matches_exact_closely(opened, is_named):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        train(model, optimizer, 10, seed=step)
        state = {"model": model, "optimizer": optimizer}
        opened.commit(ckstore.TrainState(model, optimizer) if is_named else state, step)
    assert len(losses(opened)) == 6
    again = make(5)
    its = torch.optim.AdamW(again.parameters(), lr=1e-3)
    opened.restore(into=ckstore.TrainState(again, its) if is_named else {"model": again, "optimizer": its})
    expected, found = train(model, optimizer, 10, seed=9), train(again, its, 10, seed=9)
    assert math.isclose(expected, found, rel_tol=0.05)
    assert opened.verify("decode").damage == []


def test_bf16_weights_stay_roundings_of_masters(opened):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        train(model, optimizer, 5, seed=step)
        masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        halves = {name: master.to(torch.bfloat16) for name, master in masters.items()}
        receipt = opened.commit({"model": halves, "optimizer": {**optimizer.state_dict(), "master": masters}}, step)
        assert receipt.chunks_derived >= 2
    found, recorded = opened.restore(), losses(opened)
    for name in ("0.weight", "2.weight"):
        assert recorded[f"model.{name}"].role == "rounded"
        assert recorded[f"optimizer.master.{name}"].role == "weight"
        assert torch.equal(found["model"][name], found["optimizer"]["master"][name].to(torch.bfloat16))
        error = (found["model"][name].float() - halves[name].float()).abs().max()
        assert math.isclose(error, recorded[f"model.{name}"].max_abs, rel_tol=1e-5)
    assert opened.verify("decode").damage == []


def test_a_state_in_bf16_is_quantized_in_bf16(opened):
    model = make(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        train(model, optimizer, 5, seed=step)
        opened.commit({"model": model, "optimizer": optimizer}, step)
    found, recorded = opened.restore(), losses(opened)
    assert found["model"]["0.weight"].dtype == torch.bfloat16
    assert recorded["model.0.weight"].hops == 2
    second = found["optimizer"]["state"][0]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    kept = optimizer.state[next(model.parameters())]["exp_avg_sq"]
    assert bool((second[kept > 0] > 0).all())
    assert opened.verify("decode").damage == []


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_other_optimizers_are_exact(opened, name):
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):
        train(model, optimizer, 3, seed=step)
        opened.commit(ckstore.TrainState(model, optimizer), step)
    assert set(losses(opened)) == {"model.0.weight", "model.2.weight"}
    again = make(5)
    its = OPTIMIZERS[name](again.parameters())
    opened.restore(into=ckstore.TrainState(again, its))
    for mine, theirs in zip(optimizer.state.values(), its.state.values(), strict=True):
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
def test_adam_variants_are_quantized(opened, name):
    model = make()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    for step in range(2):
        train(model, optimizer, 3, seed=step)
        opened.commit(ckstore.TrainState(model, optimizer), step)
    assert len(losses(opened)) == 6


def test_amsgrad_keeps_its_maximum(opened):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for step in range(2):
        train(model, optimizer, 3)
        opened.commit(ckstore.TrainState(model, optimizer), step)
    entry = opened.restore()["optimizer"]["state"]["0.weight"]
    assert torch.equal(entry["max_exp_avg_sq"], optimizer.state[model[0].weight]["max_exp_avg_sq"])
    assert "optimizer.state.0.weight.exp_avg_sq" in losses(opened)


def test_background_commit_has_the_same_errors(opened):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ckstore.open(repository_of(opened).backend.root, run="other", policy=lossy_policy()) as other:
        for step in range(2):
            train(model, optimizer, 3, seed=step)
            receipt = opened.commit_async(ckstore.TrainState(model, optimizer), step).result(60)
            assert (receipt.fidelity, receipt.warnings) == ("near" if step else "exact", ())
            other.commit(ckstore.TrainState(model, optimizer), step)
        assert losses(opened)["model.0.weight"].hops == 1
        assert losses(other) == losses(opened)


FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("lies", ["whole", "strided", "repeated"])
@pytest.mark.parametrize("dtype", [*FLOATS, "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_divergence_warns_for_all_floats_and_layouts(opened, dtype, lies):
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    held = torch.full((12, 20), 2.0)
    wrong = held.clone()
    wrong[4, 6] = math.nan

    def state(values):
        values = values.to(kind)
        shown = {"whole": values, "strided": values[2::2, ::3], "repeated": values[4, :, None].expand(20, 5)}[lies]
        return {"model": {"odd": shown, "w": torch.full((80, 80), 1.5)}}

    assert opened.commit(state(held), 0).warnings == ()
    (warning,) = opened.commit(state(wrong), 1).warnings
    assert warning == "model.odd holds NaN or infinity: the run may have diverged"


def test_nan_between_elements_is_not_divergence(opened):
    held = torch.full((12, 20), math.nan)
    held[::2, ::3] = 1.0
    assert opened.commit({"model": {"odd": held[::2, ::3], "w": torch.full((80, 80), 1.5)}}, 0).warnings == ()
