"""Protects objects of all kinds: ``restore(into=)`` has the effect of ``load_state_dict`` with the restored values."""

from __future__ import annotations

import copy

import pytest
import torch

import ckstore
from ckstore.errors import UsageError
from support.loadables import (
    ADAPTERS,
    MODULES,
    OPTIMIZERS,
    SCHEDULERS,
    FolderBound,
    ModelAndOptimizer,
    MovingAverage,
    Resetting,
    Sampler,
    UnitConverting,
    change,
    fill,
    keep,
    lazy,
    linear,
    pair,
    seen_of_module,
    seen_of_optimizer,
    step,
)
from support.states import difference


def in_dict(item):
    return {"x": item, "n": 5}


def in_list(item):
    return [torch.ones(2), item]


def deep(item):
    return {"a": {"b": [({"c": item},)]}}


def itself(item):
    return item


NESTS = [in_dict, in_list, deep, itself]
PICK = {
    in_dict: lambda state: state["x"],
    in_list: lambda state: state[1],
    deep: lambda state: state["a"]["b"][0][0]["c"],
    itself: itself,
}


def assert_same_effect(source, plain, into, observe, nest=in_dict):
    """Load the source's state into two equal objects, by ``load_state_dict`` and by ``restore``."""
    kept = keep(nest(source))
    plain.load_state_dict(PICK[nest](fill(kept)))
    holder = nest(into)
    assert fill(kept, into=holder) is holder
    assert difference(observe(into), observe(plain)) is None


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("kind", [Resetting, FolderBound, UnitConverting, MovingAverage, Sampler, ModelAndOptimizer])
def test_user_objects_load_like_load_state_dict(kind, times, nest):
    source, plain, into = kind(), kind(), kind()
    source.advance()
    for other in (plain, into):
        for _ in range(times):
            other.advance()
    assert_same_effect(source, plain, into, kind.observe, nest)


@pytest.mark.parametrize("nest", [in_dict, deep])
@pytest.mark.parametrize("kind", MODULES)
def test_modules_load_like_load_state_dict(kind, nest):
    source, plain, into = MODULES[kind](), MODULES[kind](), MODULES[kind]()
    into.load_state_dict(copy.deepcopy(source.state_dict()))
    plain.load_state_dict(copy.deepcopy(source.state_dict()))
    change(source)
    assert_same_effect(source, plain, into, seen_of_module, nest)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32")])
def test_module_of_another_dtype_converts_with_warning(dtypes):
    source, plain, into = (linear().to(getattr(torch, dtypes[index])) for index in (0, 1, 1))
    change(source)
    assert_same_effect(source, plain, into, seen_of_module)
    kept = keep({"m": source})
    placement = kept.place(into={"m": into}, adapters=ADAPTERS)
    kept.fill(placement)
    assert f"load_state_dict of Sequential changed m.0.weight from {dtypes[0]} to {dtypes[1]}." in placement.warnings


def test_lazy_module_is_materialized_by_loading():
    source = lazy()
    source(torch.ones(1, 4))
    change(source)
    for into in (lazy(), lazy()):
        fill(keep({"m": source}), into={"m": into})
        assert difference(dict(into.state_dict()), dict(source.state_dict())) is None


def test_norm_accepts_checkpoint_without_counter():
    source = linear().state_dict()
    del source["1.num_batches_tracked"]
    source._metadata.pop("1")
    into = linear(1)
    fill(keep({"m": source}), into={"m": into})
    assert torch.equal(into[0].weight, source["0.weight"])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_optimizers_load_like_load_state_dict(kind, before, after):
    torch.manual_seed(0)
    source, plain, into = pair(kind), pair(kind), pair(kind)
    for other in (source, plain, into):
        other[0].load_state_dict(source[0].state_dict())
    for times, one in ((before, source), (after, plain), (after, into)):
        for _ in range(times):
            step(*one)
    kept = keep({"o": source[1]})
    plain[1].load_state_dict(fill(kept)["o"])
    fill(kept, into={"o": into[1]})
    assert difference(seen_of_optimizer(*into), seen_of_optimizer(*plain)) is None


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_schedulers_load_like_load_state_dict(kind):
    made = []
    for times in (3, 0, 5):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        for _ in range(times):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
        made.append(scheduler)
    assert_same_effect(*made, lambda scheduler: copy.deepcopy(scheduler.state_dict()))


def test_scaler_loads_like_load_state_dict():
    source, plain, into = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0, 2.0))
    assert_same_effect(source, plain, into, torch.amp.GradScaler.state_dict)


@pytest.mark.parametrize("kind", ["momentum", "amsgrad", "own-setstate", "own-load"])
@pytest.mark.parametrize("steps", [0, 2])
def test_train_state_loads_like_load_state_dict(kind, steps):
    states = []
    for times in (1, steps, steps):
        torch.manual_seed(times)
        model, optimizer = pair(kind)
        loader = Resetting()
        for _ in range(times):
            step(model, optimizer)
            loader.advance()
        states.append((ckstore.TrainState(model, optimizer, loader=loader, epoch=times), model, optimizer))
    kept = keep(states[0][0])
    states[1][0].load_state_dict(fill(kept))
    fill(kept, into=states[2][0])
    seen = [
        {"m": dict(model.state_dict()), "o": optimizer.state_dict(), "l": state.others["loader"].position}
        for state, model, optimizer in states[1:]
    ]
    assert difference(*seen) is None
    assert states[2][0].others["loader"].asked == 0
    assert states[2][0].others["epoch"] == 1


def test_train_state_without_a_stored_part_is_refused():
    model, optimizer = pair("momentum")
    small = ckstore.TrainState(model, optimizer)
    large = ckstore.TrainState(model, optimizer, loader=Resetting())
    with pytest.raises(UsageError, match=r"the checkpoint lacks: loader"):
        fill(keep(small), into=large)
    with pytest.raises(UsageError, match="the state has no loader"):
        large.load_state_dict(small.state_dict())


# Memory


def is_direct(state, into):
    placement = keep(state).place(into=into, adapters=ADAPTERS)
    return [placement.is_direct(storage) for storage in placement.storages]


@pytest.mark.parametrize("kind", ["plain", "average", "compiled", "pruned"])
def test_plain_modules_need_no_second_copy(kind):
    assert all(is_direct({"m": MODULES[kind]()}, {"m": MODULES[kind]()}))


def test_moments_need_no_second_copy():
    one, other = pair("momentum"), pair("momentum")
    step(*one)
    step(*other)
    assert all(is_direct({"m": one[0], "o": one[1]}, {"m": other[0], "o": other[1]}))
    assert all(is_direct(ckstore.TrainState(*one), ckstore.TrainState(*other)))


@pytest.mark.parametrize("kind", ["renaming", "hooks", "hooks-below", "extra-state", "instance", "weight_norm"])
def test_modules_with_custom_loading_are_not_prefilled(kind):
    assert not any(is_direct({"m": MODULES[kind]()}, {"m": MODULES[kind]()}))


class EncodedChunk(torch.Tensor):
    """A tensor whose values are two other tensors, as in torchao."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(args[0].codes, args[0].scale)
        raise TypeError(function)


def test_tensor_subclass_comes_back_by_converter():
    ckstore.register_converter(
        EncodedChunk,
        "test.coded",
        lambda it: {"codes": it.codes, "scale": it.scale},
        lambda d: EncodedChunk(d["codes"], d["scale"]),
    )
    model, optimizer = pair("momentum")
    coded = EncodedChunk(torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.tensor(2.0))
    optimizer.state[model.weight]["momentum_buffer"] = coded
    for live in (False, True):
        other, into = pair("momentum")
        if live:
            into.state[other.weight]["momentum_buffer"] = EncodedChunk(
                torch.zeros(2, 3, dtype=torch.uint8), torch.tensor(1.0)
            )
        holder = {"o": into, "leaf": None if not live else coded, "step": None}
        fill(keep({"o": optimizer, "leaf": coded, "step": 5}), into=holder)
        assert torch.equal(into.state[other.weight]["momentum_buffer"].codes, coded.codes)
        assert torch.equal(holder["leaf"].codes, coded.codes)
        assert holder["step"] == 5


# only=


def test_selected_part_of_optimizer_is_restored():
    source, into = pair("momentum"), pair("momentum")
    step(*source)
    step(*into)
    into[1].param_groups[0]["lr"] = 0.5
    kept = keep({"o": source[1]})
    fill(kept, into={"o": into[1]}, only="o.state.0")
    assert into[1].param_groups[0]["lr"] == 0.5
    one, other = source[1].state_dict()["state"], into[1].state_dict()["state"]
    assert difference(other[0], one[0]) is None
    assert difference(other[1], one[1]) is not None
    fill(kept, into={"o": into[1]}, only="o.param_groups")
    assert into[1].param_groups[0]["lr"] == 0.01
    state = ckstore.TrainState(*into)
    fill(keep(ckstore.TrainState(*source)), into=state, only="optimizer.state.*")
    assert difference(into[1].state_dict()["state"], one) is None


BORROWED = {
    "parameter": lambda parameter: parameter.detach(),
    "gradient": lambda parameter: parameter.grad,
    "view": lambda parameter: parameter.detach().view(-1)[1:],
    "nested": lambda parameter: [parameter.detach(), {"grad": parameter.grad}],
}


@pytest.mark.parametrize(("only", "lost"), [("state.0.momentum_buffer", 0), ("state.0", 1), ("param_groups", 0)])
@pytest.mark.parametrize("borrow", BORROWED.values(), ids=BORROWED)
@pytest.mark.parametrize("is_named", [False, True])
def test_unselected_parameters_stay_in_an_optimizer(borrow, only, lost, is_named):
    source, into = pair("momentum"), pair("momentum")
    step(*source)
    step(*into)
    parameters = [parameter for group in into[1].param_groups for parameter in group["params"]]
    for parameter in parameters:
        into[1].state[parameter]["borrowed"] = borrow(parameter)
    into[1].param_groups[0]["borrowed"] = borrow(parameters[0])
    if is_named:
        first = next(name for name, _ in into[0].named_parameters())
        state, target = ckstore.TrainState(*source), ckstore.TrainState(*into)
        fill(keep(state), into=target, only="optimizer." + only.replace(".0", f".{first}"))
    else:
        fill(keep({"o": source[1]}), into={"o": into[1]}, only=f"o.{only}")
    for parameter in parameters[:lost]:
        assert "borrowed" not in into[1].state[parameter]
    for parameter in parameters[lost:]:
        assert difference(into[1].state[parameter]["borrowed"], borrow(parameter)) is None
    if only.startswith("state"):
        assert difference(into[1].param_groups[0]["borrowed"], borrow(parameters[0])) is None
