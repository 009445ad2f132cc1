"""Objects with ``load_state_dict`` of every kind: users' classes, modules, optimizers, schedulers; and round trips."""

from __future__ import annotations

import copy

import torch
from torch.nn.utils import prune

from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter
from support.states import CopiedState

ADAPTERS = (TorchAdapter(),)


def keep(state):
    return CopiedState.of(capture(state, ADAPTERS))


def fill(kept, **options):
    return kept.fill(kept.place(adapters=ADAPTERS, **options))


# Objects of users


class Resetting:
    """Restarts when it is asked for its state, as torchdata's loader does."""

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


class FolderBound:
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


class UnitConverting:
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


class MovingAverage:
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


class ModelAndOptimizer:
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
    """Loads with two hooks: one changes the state in place, the other one reads the old state."""

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
