"""A training state with many kinds of content, and many ways to change it, each of which a capture must notice."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import numpy as np
import torch
from torch import nn


class Holder:
    """An object with a state, that counts how often it was asked."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        return {"held": self.tensor.detach(), "asked": 7}

    def load_state_dict(self, state):
        self.tensor.copy_(state["held"])


class Point:
    def __init__(self, x):
        self.x = x


class Case:
    """A training state with a little of everything, to be changed."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()
        self.pool = torch.arange(64.0)
        self.tied = torch.ones(3, 4)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "holder": Holder(torch.zeros(2, requires_grad=True)),
            "views": {"a": self.pool[:8], "b": self.pool[8:24].view(4, 4).t(), "far": torch.zeros(3)},
            "ties": [self.tied, self.tied, self.tied.t()],
            "arrays": (np.arange(7), np.float32(1.5), np.zeros((2, 3))[:, ::2]),
            "plain": [1, True, None, 2.5, -0.0, float("nan"), 3 + 4j, "word", b"bytes", 1 << 70, torch.bfloat16],
            "kinds": {"o": OrderedDict(a=1), "c": Counter("aab"), "d": defaultdict(list, k=[1])},
            "empty": {"none": torch.empty(0, 3), "dict": {}, "list": []},
            "rng": torch.get_rng_state(),
            "point": Point(torch.ones(2)),
            "long": b"x" * (70 << 10),
            "text": "y" * (70 << 10),
            "step": 1,
        }

    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().sum().backward()
        self.optimizer.step()


def put(path, make):
    """Return a change that replaces one part of the state."""

    def change(case):
        *outer, last = path
        part = case.state
        for key in outer:
            part = part[key]
        part[last] = make(part[last])

    return change


def reordered(part):
    return dict(reversed(part.items()))


def with_data(tensor, other):
    tensor.data = other
    return tensor


def untie_module(case):
    case.model[2].weight = nn.Parameter(case.model[2].weight.detach().clone())


def without_gradient(case):
    case.model[0].weight.requires_grad_(requires_grad=False)


def lazy_state(case):
    other = nn.Linear(3, 3)
    case.optimizer.add_param_group({"params": other.parameters()})


def resized(case):
    case.state["views"]["far"].untyped_storage().resize_(64)


def moved_over_another(case):
    # It is now in the allocation of other tensors, and shares their storage.
    case.state["views"]["far"] = case.pool[24:27]


def moved_next_to_itself(case):
    case.state["views"]["far"].set_(torch.ones(3).untyped_storage(), 0, (3,), (1,))


CHANGES = {
    "a tensor is another one of the same kind": put(("views", "far"), lambda old: old.clone() + 1),
    "a storage is swapped through .data": put(("views", "far"), lambda old: with_data(old, torch.full((3,), 9.0))),
    "a storage is swapped through set_": moved_next_to_itself,
    "a parameter gets another storage": lambda case: with_data(case.model[0].weight, torch.randn(5, 6)),
    "a parameter is another object": untie_module,
    "a tensor moves into the storage of another": moved_over_another,
    "a storage is resized": resized,
    "a dtype is another one of the same width": put(("views", "far"), lambda old: torch.zeros(3, dtype=torch.int32)),
    "the same bytes get another dtype": put(("views", "a"), lambda old: old.view(torch.int32)),
    "a shape is another one": put(("views", "a"), lambda old: old.view(2, 4)),
    "strides are others": put(("views", "b"), lambda old: old.t()),
    "a view begins elsewhere": put(("views", "a"), lambda old: old.as_strided((8,), (1,), 1)),
    "a view ends elsewhere": put(("views", "a"), lambda old: old.as_strided((9,), (1,), 0)),
    "a view spans others": put(("views", "a"), lambda old: old.as_strided((2,), (40,), 0)),
    "a tensor is a parameter": put(("views", "far"), lambda old: nn.Parameter(old, requires_grad=False)),
    "a tensor wants a gradient": put(("views", "far"), lambda old: old.requires_grad_()),
    "a parameter wants none any more": without_gradient,
    "a tensor is conjugated": put(("views", "far"), lambda old: torch.tensor([1 + 2j]).conj()),
    "a tensor is negated lazily": put(("views", "far"), lambda old: torch.tensor([1 + 2j] * 3).conj().imag),
    "ties are cut": put(("ties", 1), lambda old: old.clone()),
    "ties are views only": put(("ties", 1), lambda old: old.view(3, 4)),
    "ties are more": put(("ties",), lambda old: [*old, old[0]]),
    "ties are fewer": put(("ties",), lambda old: old[:2]),
    "ties are with another one": put(("ties",), lambda old: [old[0], other := torch.ones(3, 4), other.t()]),
    "ties are made": lambda case: case.state["views"].update(far=case.tied),
    "an array is another one": put(("views", "far"), lambda old: np.ones(3, np.float32)),
    "a tensor becomes a number": put(("views", "far"), lambda old: 3),
    "a number becomes a tensor": put(("plain", 0), lambda old: torch.ones(1)),
    "a number is another one": put(("plain", 0), lambda old: 2),
    "a number becomes a truth": put(("plain", 0), lambda old: True),
    "a truth becomes a number": put(("plain", 1), lambda old: 1),
    "nothing becomes something": put(("plain", 2), lambda old: 0),
    "a zero loses its sign": put(("plain", 4), lambda old: 0.0),
    "a float becomes an int": put(("plain", 3), lambda old: 2),
    "a nan has another payload": put(
        ("plain", 5), lambda old: float(np.array([0x7FF8000000000001]).view(np.float64)[0])
    ),
    "a word is another": put(("plain", 7), lambda old: "sword"),
    "a word becomes bytes": put(("plain", 7), lambda old: b"word"),
    "a word becomes long": put(("plain", 7), lambda old: "w" * (70 << 10)),
    "bytes become long": put(("plain", 8), lambda old: b"w" * (70 << 10)),
    "a dtype as a value changes": put(("plain", 10), lambda old: torch.float16),
    "a dtype as a value becomes a device": put(("plain", 10), lambda old: torch.device("cpu")),
    "a scalar of numpy changes": put(("arrays",), lambda old: (old[0], np.float64(1.5), old[2])),
    "an array has other strides": put(("arrays",), lambda old: (old[0], old[1], np.zeros((2, 2)))),
    "long bytes are others": put(("long",), lambda old: b"z" * (70 << 10)),
    "long bytes are short": put(("long",), lambda old: b"z"),
    "a long text is another": put(("text",), lambda old: "z" * (70 << 10)),
    "a long text is short": put(("text",), lambda old: "z"),
    "a key is added": put(("views",), lambda old: {**old, "new": 1}),
    "a key is gone": put(("views",), lambda old: {"a": old["a"], "b": old["b"]}),
    "a key has another name": put(("views",), lambda old: {"a": old["a"], "c": old["b"], "far": old["far"]}),
    "keys change places": put(("views",), reordered),
    "a key is a number": put(("kinds", "o"), lambda old: OrderedDict({1: 1})),
    "a dict becomes an ordered one": put(("views",), OrderedDict),
    "an ordered dict becomes a plain one": put(("kinds", "o"), dict),
    "a default is another": put(("kinds", "d"), lambda old: defaultdict(int, k=[1])),
    "a list becomes a tuple": put(("plain",), tuple),
    "a list is longer": put(("plain",), lambda old: [*old, 1]),
    "a list is shorter": put(("plain",), lambda old: old[:-1]),
    "an empty list has something": put(("empty", "list"), lambda old: [torch.ones(1)]),
    "an empty tensor is larger": put(("empty", "none"), lambda old: torch.ones(1, 3)),
    "an object becomes its state": put(("holder",), lambda old: old.state_dict()),
    "an object has another tensor": put(("holder",), lambda old: Holder(torch.ones(2, requires_grad=True))),
    "an object has a larger tensor": put(("holder",), lambda old: Holder(torch.ones(3))),
    "a converted one has another tensor": put(("point",), lambda old: Point(torch.zeros(2))),
    "a converted one has something else": put(("point",), lambda old: Point(3)),
    "a converted one becomes its state": put(("point",), lambda old: {"x": old.x}),
    "the optimizer has new parameters": lazy_state,
    "the optimizer's state is made": lambda case: case.train(),
    "a learning rate changes": lambda case: case.optimizer.param_groups[0].update(lr=0.5),
    "the step is the next": put(("step",), lambda old: old + 1),
    "metadata of a model changes": lambda case: setattr(case.model[1], "_version", 3),
    "a buffer is not stored any more": lambda case: case.model[1]._non_persistent_buffers_set.add("running_mean"),
}
