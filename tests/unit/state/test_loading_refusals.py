"""Protects live states that do not fit: errors come before the first write, or list what was written."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

import ckstore
from ckstore.errors import BackendError, MalformedError, UnsupportedError, UsageError
from ckstore.state import values
from support.loadables import (
    Compiled,
    Resetting,
    Setting,
    Tied,
    fill,
    keep,
    linear,
    pair,
    step,
)
from support.states import difference


class Failing:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise KeyError("epoch")


def test_failed_load_lists_what_was_written():
    model, optimizer = pair("momentum")
    step(model, optimizer)

    def state(loader):
        return {"first": Resetting(), "m": model, "w": torch.ones(2), "bad": loader, "o": optimizer, "epoch": 3}

    kept = keep(state(Failing()))
    with pytest.raises(UsageError, match="load_state_dict of Failing raised KeyError: 'epoch': bad") as caught:
        fill(kept, into=state(Failing()))
    error = caught.value
    assert error.path == ("bad",)
    assert set(error.written) == {"first", "m", "w"}
    assert error.partly_written == ("o",)
    assert error.not_written == ("epoch",)
    assert "nothing was written" not in str(error).lower()
    assert "restore again" in str(error)
    assert isinstance(error.__cause__, KeyError)


class Strange(torch.nn.Linear):
    """A module with its own loading hook, so that only torch can report what is wrong."""

    def __init__(self, width):
        super().__init__(width, 2)
        self.register_load_state_dict_post_hook(lambda *_: None)


def test_torch_error_of_module_with_hooks_is_kept():
    with pytest.raises(UsageError, match=r"of Strange raised RuntimeError: .* size mismatch for weight"):
        fill(keep({"m": Strange(3)}), into={"m": Strange(4)})


class Odd:
    pass


def test_failed_converter_lists_what_was_written():
    ckstore.register_converter(Odd, "test.odd", lambda odd: {"a": 1}, lambda state: state["b"])
    kept = keep({"n": Resetting(), "odd": Odd(), "z": 1})
    with pytest.raises(UsageError, match="a converter raised KeyError: 'b': odd") as caught:
        fill(kept, into={"n": Resetting(), "odd": None, "z": 0})
    assert (caught.value.written, caught.value.not_written) == (("n",), ("z",))


def _raising(error):
    def make(state):
        raise error

    return make


def _log_with(odd):
    return [odd, *[None] * 10_000]


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError("no such codec", where="here", todo="install it"),
        BackendError("the folder is gone", todo="mount it", is_transient=True, errno=116),
        MalformedError("no table"),
    ],
)
def test_our_error_keeps_its_class_and_lists_writes(error, is_long):
    ckstore.register_converter(Odd, "test.odd", lambda odd: {"a": 1}, _raising(error))
    made = _log_with(Odd()) if is_long else Odd()
    model, live = linear(0), linear(1)
    kept = keep({"m": model, "w": torch.ones(2), "log": made, "end": 1})
    with pytest.raises(type(error), match=error.what) as caught:
        fill(kept, into={"m": live, "w": torch.zeros(2), "log": None, "end": 0})
    expected = caught.value
    assert (expected.path, expected.written, expected.partly_written, expected.not_written) == (
        ("log",),
        ("m", "w"),
        (),
        ("end",),
    )
    assert "already written: m, w" in str(expected)
    assert (error.todo or "restore again") in str(expected).lower()
    assert expected.where == error.where
    assert error.facts.items() <= expected.facts.items()
    assert pickle.loads(pickle.dumps(expected)).written == expected.written


def test_partly_written_object_is_listed():
    ckstore.register_converter(Odd, "test.odd", lambda odd: {"a": 1}, _raising(UnsupportedError("too new")))
    one, other = pair("momentum"), pair("momentum")
    for each in (one, other):
        step(*each)
    one[1].state[one[0].weight]["odd"] = Odd()
    with pytest.raises(UnsupportedError, match="Could not build o, which is partly written; nothing else was loaded"):
        fill(keep({"o": one[1]}), into={"o": other[1]})


@pytest.mark.parametrize("is_long", [False, True])
def test_missing_converter_of_long_value_lists_writes(is_long, monkeypatch):
    ckstore.register_converter(Odd, "test.odd", lambda odd: {"a": 1}, lambda state: Odd())
    kept = keep({"w": torch.ones(2), "log": _log_with(Odd()) if is_long else Odd()})
    monkeypatch.setattr(values, "_BY_NAME", {})
    target = {"w": torch.zeros(2), "log": None}
    with pytest.raises(UnsupportedError, match=r"test\.odd") as caught:
        fill(kept, into=target)
    assert caught.value.facts.get("written") == (("w",) if is_long else None)
    assert target["w"].tolist() == ([1, 1] if is_long else [0, 0])


def refusal(state, into):
    before = [copy.deepcopy(dict(part.state_dict())) for part in into.values() if hasattr(part, "state_dict")]
    with pytest.raises(UsageError) as caught:
        fill(keep(state), into=into)
    after = [dict(part.state_dict()) for part in into.values() if hasattr(part, "state_dict")]
    assert difference(after, before) is None
    assert "Nothing was written" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrap", "part", "cause"),
    [
        (Compiled, "_orig_mod.", "torch.compile"),
        (torch.nn.DataParallel, "module.", "DataParallel"),
        (lambda module: torch.nn.ModuleDict({"model": module}), "model.", "holds the model"),
        (lambda module: torch.nn.DataParallel(Compiled(module)), "module._orig_mod.", "in torch.compile"),
        (lambda module: torch.nn.ModuleDict({"net": module}), "net.", ""),
    ],
)
def test_prefix_is_named_with_cause_and_advice(wrap, part, cause):
    expected = refusal({"m": wrap(linear())}, {"m": linear()})
    assert f"the checkpoint has 7 that the state lacks: m.{part}0.weight" in expected
    assert f"The keys of the checkpoint have an extra {part!r}" in expected
    assert cause in expected
    expected = refusal({"m": linear()}, {"m": wrap(linear())})
    assert f"lacks: m.{part}0.weight" in expected
    assert f"The keys of the state have an extra {part!r}" in expected
    with pytest.raises(UsageError, match=f"the checkpoint have an extra '{part}'"):
        fill(keep({"m": wrap(linear()).state_dict()}), into={"m": linear().state_dict()})


def test_the_advice_for_a_prefix_works():
    kept, into = keep({"m": Compiled(linear(1))}), linear()
    state = fill(kept)
    into.load_state_dict({key.replace("_orig_mod.", "", 1): value for key, value in state["m"].items()})
    assert torch.equal(into[0].weight, linear(1)[0].weight)


def test_compiled_submodule_is_named():
    compiled = torch.nn.Sequential(Compiled(linear()))
    assert "an extra '_orig_mod.', from torch.compile" in refusal({"m": compiled}, {"m": torch.nn.Sequential(linear())})


def test_differing_keys_are_listed_from_both_sides():
    expected = refusal({"m": torch.nn.Linear(3, 3, bias=False)}, {"m": torch.nn.Embedding(3, 3), "net": linear()})
    assert "7 leaves" not in expected
    expected = refusal({"net": 1}, {"model": linear()})
    assert (
        "the state has 1 leaf that the checkpoint lacks: model; the checkpoint has 1 that the state lacks: net"
        in expected
    )


def moved(optimizer_of, names=None):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    named = list(model.named_parameters())
    optimizer = optimizer_of([named[index] for index in (names or (0, 1))])
    step(model, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (
            torch.optim.AdamW,
            torch.optim.SGD,
            r"o\.param_groups\.0 lacks dampening, momentum .*of SGD .*has amsgrad, betas",
        ),
        (torch.optim.SGD, torch.optim.AdamW, r"lacks betas, eps of AdamW .*has dampening, momentum"),
        (torch.optim.Adam, torch.optim.RMSprop, r"lacks alpha of RMSprop"),
        (torch.optim.Adam, Setting, None),
        (torch.optim.Adam, torch.optim.AdamW, None),
        (lambda p: torch.optim.Adam(p[:1]), torch.optim.Adam, r"has 1 parameters in the checkpoint, 2 in the state"),
        (
            lambda p: torch.optim.Adam([{"params": [x]} for x in p]),
            torch.optim.Adam,
            r"has 2 groups in the checkpoint, 1",
        ),
    ],
)
def test_unusable_optimizer_state_is_refused_first(source, target, expected):
    one, other = linear(), linear()
    state = {"m": one, "o": source(list(one.parameters())[:2])}
    into = {"m": other, "o": target(list(other.parameters())[:2])}
    if expected is None:
        fill(keep(state), into=into)
    else:
        assert re.search(expected, refusal(state, into))


def test_other_parameter_order_is_reported_by_name():
    expected = refusal({"o": moved(torch.optim.Adam)}, {"o": moved(torch.optim.Adam, (1, 0))})
    assert "'0.weight' at another position in the state" in expected
    fill(keep({"o": moved(torch.optim.Adam)}), into={"o": moved(torch.optim.Adam)})


def test_other_optimizer_in_train_state_is_reported():
    one, other = linear(), linear()
    state = ckstore.TrainState(one, torch.optim.AdamW(one.parameters()))
    with pytest.raises(UsageError, match=r"optimizer\.param_groups\.0 lacks dampening, momentum"):
        fill(keep(state), into=ckstore.TrainState(other, torch.optim.SGD(other.parameters())))


def test_wrong_moments_and_numbers_are_reported():
    model, optimizer = pair("momentum")
    step(model, optimizer)
    wide = torch.nn.Linear(4, 2)
    expected = refusal({"o": optimizer}, {"o": torch.optim.SGD(wide.parameters(), lr=0.1, momentum=0.9)})
    assert "o.state.0.momentum_buffer is (2, 3) in the checkpoint, its parameter is (2, 4)" in expected
    texts = {
        **optimizer.state_dict(),
        "state": {str(key): value for key, value in optimizer.state_dict()["state"].items()},
    }
    expected = refusal({"o": texts}, {"o": pair("momentum")[1]})
    assert "o.state.0 is a str instead of a number" in expected


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"m\.weight is on the meta device.* to_empty"):
        fill(keep({"m": torch.nn.Linear(3, 3)}), into={"m": empty})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_module_refuses_untied_values(dtype):
    state = {key: value.clone() for key, value in Tied().state_dict().items()}
    assert "m.two.weight shares memory with m.one.weight only in the state" in refusal(
        {"m": state}, {"m": Tied().to(dtype)}
    )
