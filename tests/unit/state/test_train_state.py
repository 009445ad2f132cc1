"""Protects resuming by name: every parameter gets its own moments, in any order of the groups."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.errors import UsageError

torch = pytest.importorskip("torch")


def make(seed=0, *, split=False, lr=1e-3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    groups = [{"params": list(model.parameters())}]
    if split:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices}]
    return model, torch.optim.AdamW(groups, lr=lr)


def train(model, optimizer, count, seed=1):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(4, 8, generator=rng)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.fixture
def opened(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize("split", [False, True])
def test_resumed_training_equals_uninterrupted(opened, split):
    model, optimizer = make(split=split)
    train(model, optimizer, 3)
    opened.commit(ckstore.TrainState(model, optimizer, epoch=4), 3)
    train(model, optimizer, 2, seed=9)
    again, its = make(seed=5, split=split)
    state = ckstore.TrainState(again, its, epoch=0)
    opened.restore(into=state)
    train(again, its, 2, seed=9)
    assert equal(model, again)
    assert state.others == {"epoch": 4}


def test_optimizer_state_is_stored_by_name(opened):
    model, optimizer = make(split=True)
    train(model, optimizer, 1)
    opened.commit(ckstore.TrainState(model, optimizer), 1)
    found = opened.restore()["optimizer"]
    assert set(found["state"]) == set(dict(model.named_parameters()))
    assert found["param_groups"][1]["params"] == ["0.weight", "2.weight"]


def test_reordered_groups_get_their_own_moments(opened):
    model, optimizer = make(split=True)
    train(model, optimizer, 3)
    opened.commit(ckstore.TrainState(model, optimizer), 3)
    again, _ = make(seed=5)
    matrices = [p for p in again.parameters() if p.dim() > 1]
    others = [p for p in again.parameters() if p.dim() < 2]
    turned = torch.optim.AdamW([{"params": matrices[::-1]}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
    opened.restore(into=ckstore.TrainState(again, turned))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], turned.state[other]["exp_avg_sq"])
    assert [group["weight_decay"] for group in turned.param_groups] == [0.01, 0.0]
    train(model, optimizer, 2, seed=9)
    train(again, turned, 2, seed=9)
    assert equal(model, again)


def test_scheduler_is_included(opened):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    scheduler.step()
    opened.commit(ckstore.TrainState(model, optimizer, scheduler=scheduler), 1)
    again, its = make(seed=5)
    theirs = torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.5)
    opened.restore(into=ckstore.TrainState(again, its, scheduler=theirs))
    assert theirs.state_dict() == scheduler.state_dict()
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-4


def test_other_parameters_are_refused_before_loading():
    model, optimizer = make()
    train(model, optimizer, 1)
    state = ckstore.TrainState(model, optimizer).state_dict()
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(UsageError, match="parameters of the optimizer differ"):
        ckstore.TrainState(other, torch.optim.AdamW(other.parameters())).load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    mixed, _ = make(split=True)
    groups = [{"params": [p]} for p in mixed.parameters()]
    split_state = ckstore.TrainState(mixed, torch.optim.AdamW(groups)).state_dict()
    with pytest.raises(UsageError, match="several groups"):
        ckstore.TrainState(model, optimizer).load_state_dict(split_state)
    with pytest.raises(UsageError, match="has no optimizer"):
        ckstore.TrainState(model, optimizer).load_state_dict({"model": {}})


def test_wrong_arguments_are_refused():
    model, optimizer = make()
    with pytest.raises(UsageError, match="not a model"):
        ckstore.TrainState({"w": 1}, optimizer)
    with pytest.raises(UsageError, match="not an optimizer"):
        ckstore.TrainState(model, model)
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
    with pytest.raises(UsageError, match="occurs twice"):
        ckstore.TrainState(model, optimizer).state_dict()


def test_foreign_parameters_are_named_by_position():
    model, _ = make()
    extra = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [extra]}], lr=0.1, momentum=0.9)
    extra.grad = torch.ones(4, 4)
    optimizer.step()
    assert set(ckstore.TrainState(model, optimizer).state_dict()["optimizer"]["state"]) == {"param_groups.1.0"}
