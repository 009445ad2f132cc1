"""Protects objects of all kinds: ``restore(into=)`` has the effect of ``load_state_dict`` with the restored values."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn.utils import prune

import ckstore
from ckstore.adapters.torch_state import TorchAdapter
from ckstore.capture import capture
from ckstore.errors import UsageError
from ckstore.testing.states import Kept, difference

ADAPTERS = (TorchAdapter(),)


def keep(state):
    return Kept.of(capture(state, ADAPTERS))


def fill(kept, **options):
    return kept.fill(kept.place(adapters=ADAPTERS, **options))


# Objects of users


class Resetting:
    """Begins anew when it is asked for its state, as torchdata's loader does."""

    def __init__(self):
        self.position, self.asked, self.loads = 0, 0, 0

    def advance(self):
        self.position += 3

    def state_dict(self):
        self.asked += 1
        return {"position": self.position}

    def load_state_dict(self, state):
        self.loads += 1
        # Asked before it loads, it has no place to go on from.
        self.position = state["position"] if not self.asked else 0

    def observe(self):
        return self.position, self.loads


class Elsewhere:
    """Loads what belongs to its folder only, as Lightning's ModelCheckpoint does."""

    def __init__(self, folder="here"):
        self.folder, self.best = folder, {}

    def advance(self):
        self.folder, self.best = "there", {"there/a": torch.ones(1)}

    def state_dict(self):
        return {"folder": self.folder, "best": self.best}

    def load_state_dict(self, state):
        if state["folder"] == self.folder:
            self.best = state["best"]

    def observe(self):
        return {"folder": self.folder, "best": self.best}


class Translating:
    """Stores centimetres and holds metres: what is loaded twice is wrong."""

    def __init__(self):
        self.tensor, self.sum = torch.zeros(3), 0.0

    def advance(self):
        self.tensor = self.tensor + 2
        self.sum += 5

    def state_dict(self):
        return {"tensor": self.tensor, "sum": self.sum * 100}

    def load_state_dict(self, state):
        self.sum = state["sum"] / 100
        self.tensor = self.tensor + state["tensor"].mul_(2) / 2

    def observe(self):
        return self.tensor, self.sum


class Averages:
    """A moving average that keeps the difference to its former self."""

    def __init__(self):
        self.shadow, self.jump = [torch.zeros(4)], torch.zeros(4)

    def advance(self):
        self.shadow = [each + 1.5 for each in self.shadow]

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.jump = state["shadow"][0] - self.shadow[0]
        self.shadow = list(state["shadow"])

    def observe(self):
        return self.shadow, self.jump


class Sampler:
    """Has a list as its state, and takes it apart while it loads."""

    def __init__(self):
        self.order = [1, 2, 3]

    def advance(self):
        self.order = [*self.order[1:], torch.tensor(7), (4, 5)]

    def state_dict(self):
        return self.order

    def load_state_dict(self, state):
        self.order = []
        while state:
            self.order.append(state.pop(0))

    def observe(self):
        return self.order


class Whole:
    """Holds a model and its optimizer, and counts."""

    def __init__(self):
        self.model, self.loads = linear(), 0
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def advance(self):
        step(self.model, self.optimizer)

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "loads": self.loads}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loads = state["loads"] + 1

    def observe(self):
        return copy.deepcopy(self.state_dict())


# Modules


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


class Compiled(torch.nn.Module):
    """Has the keys of a module that was compiled; importing the compiler itself takes long."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.two.weight = self.one.weight


class Renaming(torch.nn.Module):
    """Has other keys in its state than in itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def state_dict(self, *args, **kwargs):
        return {"old_weight": self.weight.detach()}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({"weight": state_dict["old_weight"]}, strict, assign)


class Reshaping(torch.nn.Module):
    """Stores its parameter flat."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(2, 3))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "table"] = self.table.detach().reshape(-1)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "table"] = state_dict[prefix + "table"].reshape(2, 3)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Adding(torch.nn.Module):
    """Loads in two ways of its own: an instance's hook changes the state in place, another one looks at the old one."""

    def __init__(self):
        super().__init__()
        self.weight, self.jump = torch.nn.Parameter(torch.ones(3)), 0.0
        self._register_load_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "jump", module.jump + 1))

    def _before(self, state_dict, prefix, *_):
        self.jump = float((state_dict[prefix + "weight"] - self.weight.detach()).sum())
        state_dict[prefix + "weight"].mul_(2)


class Extra(torch.nn.Module):
    """Has more to its state than tensors."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.sets = torch.nn.Parameter(torch.ones(3)), 1, 0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale, self.sets = state["scale"], self.sets + 1


def patched():
    """Return a module one instance of which loads in its own way."""
    module = torch.nn.Linear(3, 3)
    plain = module.load_state_dict

    def load_state_dict(state):
        module.was = module.weight.detach().clone()
        plain(state)

    module.load_state_dict = load_state_dict
    module.was = None
    return module


def hooked_below():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), Adding())
    module[0].register_state_dict_post_hook(lambda *_: None)
    return module


def normed(norm):
    torch.manual_seed(3)
    return norm(torch.nn.Linear(3, 3))


def change(module):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
                tensor.add_(1)


def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))


MODULES = {
    "plain": linear,
    "tied": Tied,
    "average": lambda: torch.optim.swa_utils.AveragedModel(linear()),
    "compiled": lambda: Compiled(linear()),
    "renaming": Renaming,
    "reshaping": Reshaping,
    "hooks": Adding,
    "hooks-below": hooked_below,
    "extra-state": Extra,
    "instance": patched,
    "weight_norm": lambda: normed(torch.nn.utils.parametrizations.weight_norm),
    "spectral_norm": lambda: normed(torch.nn.utils.spectral_norm),
    "pruned": lambda: prune.l1_unstructured(torch.nn.Linear(3, 3), "weight", 1),
}


def seen_of_module(module):
    more = {name: getattr(module, name, None) for name in ("jump", "scale", "sets", "was")}
    return {"state": dict(module.state_dict()), **more}


# Optimizers


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3).to(next(model.parameters()).dtype)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


class Loading(torch.optim.SGD):
    def load_state_dict(self, state):
        self.before = {key: value.clone() for key, value in enumerate(self.buffers())}
        super().load_state_dict(state)

    def buffers(self):
        return [entry["momentum_buffer"] for entry in self.state.values() if entry.get("momentum_buffer") is not None]


class Setting(torch.optim.Adam):
    def __setstate__(self, state):
        self.first = [entry["exp_avg"].clone() for entry in self.state.values() if "exp_avg" in entry]
        super().__setstate__(state)


class KeepsGradients(torch.optim.SGD):
    """Its state is the gradient itself."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"gradient": parameter.grad}


def doubling(parameters):
    optimizer = torch.optim.Adam(parameters)

    def before(optimizer, state):
        for entry in state["state"].values():
            entry["exp_avg"].mul_(2)

    optimizer.register_load_state_dict_pre_hook(before)
    return optimizer


def counting(parameters):
    optimizer = torch.optim.Adam(parameters)
    optimizer.before = 0
    optimizer.register_load_state_dict_post_hook(lambda self: setattr(self, "before", self.before + 1))
    return optimizer


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2),
    "own-load": lambda p: Loading(p, lr=0.01, momentum=0.9),
    "own-setstate": Setting,
    "gradients": lambda p: KeepsGradients(p, lr=0.01),
    "pre-hook": doubling,
    "post-hook": counting,
}


def pair(kind):
    model = torch.nn.Linear(3, 2)
    return model, OPTIMIZERS[kind](model.parameters())


def seen_of_optimizer(model, optimizer):
    return {
        "state": copy.deepcopy(optimizer.state_dict()),
        "grads": [None if each.grad is None else each.grad.clone() for each in model.parameters()],
        "before": getattr(optimizer, "before", None),
        "first": getattr(optimizer, "first", None),
    }


# Everything else of torch

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Sloping()),
}


class Sloping:
    def __init__(self):
        self.slope = 0.1

    def __call__(self, epoch):
        return 1 - self.slope * epoch


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
    """Load the source's state into two equal objects, in both ways."""
    kept = keep(nest(source))
    plain.load_state_dict(PICK[nest](fill(kept)))
    holder = nest(into)
    assert fill(kept, into=holder) is holder
    assert difference(observe(into), observe(plain)) is None


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("kind", [Resetting, Elsewhere, Translating, Averages, Sampler, Whole])
def test_objects_of_users_load_as_if_called_by_hand(kind, times, nest):
    source, plain, into = kind(), kind(), kind()
    source.advance()
    for other in (plain, into):
        for _ in range(times):
            other.advance()
    assert_same_effect(source, plain, into, kind.observe, nest)


@pytest.mark.parametrize("nest", [in_dict, deep])
@pytest.mark.parametrize("kind", MODULES)
def test_modules_load_as_if_called_by_hand(kind, nest):
    source, plain, into = MODULES[kind](), MODULES[kind](), MODULES[kind]()
    into.load_state_dict(copy.deepcopy(source.state_dict()))
    plain.load_state_dict(copy.deepcopy(source.state_dict()))
    change(source)
    assert_same_effect(source, plain, into, seen_of_module, nest)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32")])
def test_a_module_of_another_dtype_converts_and_tells(dtypes):
    source, plain, into = (linear().to(getattr(torch, dtypes[index])) for index in (0, 1, 1))
    change(source)
    assert_same_effect(source, plain, into, seen_of_module)
    kept = keep({"m": source})
    placement = kept.place(into={"m": into}, adapters=ADAPTERS)
    kept.fill(placement)
    assert f"load_state_dict of Sequential changed m.0.weight from {dtypes[0]} to {dtypes[1]}." in placement.warnings


def test_a_lazy_module_is_made_by_its_own_loading():
    source = lazy()
    source(torch.ones(1, 4))
    change(source)
    for into in (lazy(), lazy()):
        fill(keep({"m": source}), into={"m": into})
        assert difference(dict(into.state_dict()), dict(source.state_dict())) is None


def test_a_tied_module_takes_the_last_of_untied_values_as_torch_does():
    state = {key: torch.full_like(value, number) for number, (key, value) in enumerate(Tied().state_dict().items())}
    for order in (list(state), list(state)[::-1]):
        plain, into = Tied(), Tied()
        plain.load_state_dict({key: state[key] for key in order})
        fill(keep({key: state[key] for key in order}), into=into)
        assert difference(dict(into.state_dict()), dict(plain.state_dict())) is None


def test_a_norm_takes_a_checkpoint_of_before_it_counted():
    source = linear().state_dict()
    del source["1.num_batches_tracked"]
    source._metadata.pop("1")
    into = linear(1)
    fill(keep({"m": source}), into={"m": into})
    assert torch.equal(into[0].weight, source["0.weight"])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_optimizers_load_as_if_called_by_hand_whatever_they_held(kind, before, after):
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
def test_schedulers_load_as_if_called_by_hand(kind):
    made = []
    for times in (3, 0, 5):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        for _ in range(times):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
        made.append(scheduler)
    assert_same_effect(*made, lambda scheduler: copy.deepcopy(scheduler.state_dict()))


def test_a_scaler_loads_as_if_called_by_hand():
    source, plain, into = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0, 2.0))
    assert_same_effect(source, plain, into, torch.amp.GradScaler.state_dict)


@pytest.mark.parametrize("kind", ["momentum", "amsgrad", "own-setstate", "own-load"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_train_state_loads_as_if_called_by_hand(kind, steps):
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


def test_a_train_state_lacks_no_part_that_it_had():
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
def test_modules_that_only_copy_take_no_second_copy(kind):
    assert all(is_direct({"m": MODULES[kind]()}, {"m": MODULES[kind]()}))


def test_moments_take_no_second_copy_in_and_below_a_train_state():
    one, other = pair("momentum"), pair("momentum")
    step(*one)
    step(*other)
    assert all(is_direct({"m": one[0], "o": one[1]}, {"m": other[0], "o": other[1]}))
    assert all(is_direct(ckstore.TrainState(*one), ckstore.TrainState(*other)))


@pytest.mark.parametrize("kind", ["renaming", "hooks", "hooks-below", "extra-state", "instance", "weight_norm"])
def test_modules_that_do_more_are_not_written_to_beforehand(kind):
    assert not any(is_direct({"m": MODULES[kind]()}, {"m": MODULES[kind]()}))


# What does not fit


class Failing:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise KeyError("epoch")


def test_a_load_that_fails_says_what_was_written_and_how_to_go_on():
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


class Odd:
    pass


def test_a_converter_that_fails_says_what_was_written():
    ckstore.register_converter(Odd, "test.odd", lambda odd: {"a": 1}, lambda state: state["b"])
    kept = keep({"n": Resetting(), "odd": Odd(), "z": 1})
    with pytest.raises(UsageError, match="a converter raised KeyError: 'b': odd") as caught:
        fill(kept, into={"n": Resetting(), "odd": None, "z": 0})
    assert (caught.value.written, caught.value.not_written) == (("n",), ("z",))


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
def test_a_prefix_is_named_with_its_cause_and_the_way_out_on_both_sides(wrap, part, cause):
    told = refusal({"m": wrap(linear())}, {"m": linear()})
    assert f"the checkpoint has 7 that the state lacks: m.{part}0.weight" in told
    assert f"The keys of the checkpoint have {part!r} in addition" in told
    assert cause in told
    told = refusal({"m": linear()}, {"m": wrap(linear())})
    assert f"lacks: m.{part}0.weight" in told
    assert f"The keys of the state have {part!r} in addition" in told
    with pytest.raises(UsageError, match=f"the checkpoint have '{part}'"):
        fill(keep({"m": wrap(linear()).state_dict()}), into={"m": linear().state_dict()})


def test_the_advice_for_a_prefix_works():
    kept, into = keep({"m": Compiled(linear(1))}), linear()
    state = fill(kept)
    into.load_state_dict({key.replace("_orig_mod.", "", 1): value for key, value in state["m"].items()})
    assert torch.equal(into[0].weight, linear(1)[0].weight)


def test_a_compiled_part_in_the_middle_is_named():
    compiled = torch.nn.Sequential(Compiled(linear()))
    assert "'_orig_mod.' in addition, from torch.compile" in refusal(
        {"m": compiled}, {"m": torch.nn.Sequential(linear())}
    )


def test_other_keys_are_listed_from_both_sides():
    told = refusal({"m": torch.nn.Linear(3, 3, bias=False)}, {"m": torch.nn.Embedding(3, 3), "net": linear()})
    assert "7 leaves" not in told
    told = refusal({"net": 1}, {"model": linear()})
    assert (
        "the state has 1 leaf that the checkpoint lacks: model; the checkpoint has 1 that the state lacks: net" in told
    )


def moved(optimizer_of, names=None):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    named = list(model.named_parameters())
    optimizer = optimizer_of([named[index] for index in (names or (0, 1))])
    step(model, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("source", "target", "told"),
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
def test_what_an_optimizer_cannot_use_is_told_before_anything_is_written(source, target, told):
    one, other = linear(), linear()
    state = {"m": one, "o": source(list(one.parameters())[:2])}
    into = {"m": other, "o": target(list(other.parameters())[:2])}
    if told is None:
        fill(keep(state), into=into)
    else:
        assert re.search(told, refusal(state, into))


def test_parameters_in_another_order_are_told_by_their_names():
    told = refusal({"o": moved(torch.optim.Adam)}, {"o": moved(torch.optim.Adam, (1, 0))})
    assert "'0.weight' at another place in the state" in told
    fill(keep({"o": moved(torch.optim.Adam)}), into={"o": moved(torch.optim.Adam)})


def test_an_optimizer_of_another_kind_is_told_in_a_train_state_too():
    one, other = linear(), linear()
    state = ckstore.TrainState(one, torch.optim.AdamW(one.parameters()))
    with pytest.raises(UsageError, match=r"optimizer\.param_groups\.0 lacks dampening, momentum"):
        fill(keep(state), into=ckstore.TrainState(other, torch.optim.SGD(other.parameters())))


def test_moments_of_another_shape_and_numbers_that_are_text_are_told():
    model, optimizer = pair("momentum")
    step(model, optimizer)
    wide = torch.nn.Linear(4, 2)
    told = refusal({"o": optimizer}, {"o": torch.optim.SGD(wide.parameters(), lr=0.1, momentum=0.9)})
    assert "o.state.0.momentum_buffer is (2, 3) in the checkpoint, its parameter is (2, 4)" in told
    texts = {
        **optimizer.state_dict(),
        "state": {str(key): value for key, value in optimizer.state_dict()["state"].items()},
    }
    told = refusal({"o": texts}, {"o": pair("momentum")[1]})
    assert "o.state.0 has a text for a number" in told


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"m\.weight is on the meta device.* to_empty"):
        fill(keep({"m": torch.nn.Linear(3, 3)}), into={"m": empty})


class Coded(torch.Tensor):
    """A tensor whose values are two others, as torchao's are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(function)


def test_state_that_is_a_tensor_subclass_comes_back_by_its_converter():
    ckstore.register_converter(
        Coded, "test.coded", lambda it: {"codes": it.codes, "scale": it.scale}, lambda d: Coded(d["codes"], d["scale"])
    )
    model, optimizer = pair("momentum")
    coded = Coded(torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.tensor(2.0))
    optimizer.state[model.weight]["momentum_buffer"] = coded
    for live in (False, True):
        other, into = pair("momentum")
        if live:
            into.state[other.weight]["momentum_buffer"] = Coded(torch.zeros(2, 3, dtype=torch.uint8), torch.tensor(1.0))
        holder = {"o": into, "leaf": None if not live else coded, "step": None}
        fill(keep({"o": optimizer, "leaf": coded, "step": 5}), into=holder)
        assert torch.equal(into.state[other.weight]["momentum_buffer"].codes, coded.codes)
        assert torch.equal(holder["leaf"].codes, coded.codes)
        assert holder["step"] == 5


# only=


def test_only_a_part_of_an_optimizer_is_restored_and_the_rest_stays():
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
