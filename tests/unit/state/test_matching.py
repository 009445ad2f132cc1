"""Protects objects in a state: modules, optimizers, schedulers and converted leaves are filled and loaded right."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

from ckstore.errors import UsageError
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter
from ckstore.state.values import register_converter
from support.states import CopiedState, difference
from support.states import round_trip as round_trip_with

ADAPTERS = (TorchAdapter(),)


def round_trip(state, **options):
    return round_trip_with(state, adapters=ADAPTERS, **options)


def place(state, **options):
    return CopiedState.of(capture(state, ADAPTERS)).place(adapters=ADAPTERS, **options)


def _model(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]
    return torch.nn.Sequential(*layers)


def _train(model, optimizer, scheduler, steps):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 100, cycle_momentum=False),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        milestones=[2],
    ),
}


def _trio(optimizer, scheduler, seed=0):
    model = _model(seed)
    made = OPTIMIZERS[optimizer](model.parameters())
    return {"model": model, "opt": made, "sched": SCHEDULERS[scheduler](made)}


PAIRS = [
    (optimizer, scheduler)
    for optimizer in OPTIMIZERS
    for scheduler in SCHEDULERS
    if (optimizer, scheduler) != ("tensor-lr", "onecycle")  # torch requires capturable for it
]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_training_resumes_exactly(optimizer, scheduler, steps_before):
    trio = _trio(optimizer, scheduler)
    _train(*trio.values(), 4)
    kept = CopiedState.of(capture(trio, ADAPTERS))
    losses = _train(*trio.values(), 3)
    other = _trio(optimizer, scheduler, seed=1)
    _train(*other.values(), steps_before)
    placement = kept.place(into=other, adapters=ADAPTERS)
    assert kept.fill(placement) is other
    assert placement.warnings == []
    assert difference(round_trip(other), kept.fill(kept.place(adapters=ADAPTERS))) is None
    assert _train(*other.values(), 3) == losses


def test_objects_and_state_dicts_give_equal_checkpoints():
    model = _model()
    assert difference(round_trip({"m": model}), {"m": model.state_dict()}) is None
    other = _model(1)
    assert round_trip(model.state_dict(), into=other) is other
    assert difference(other.state_dict(), model.state_dict()) is None


def test_module_is_filled_directly_or_refused_first():
    model, other = _model(), _model(1)
    placement = place({"m": model}, into={"m": other})
    assert all(placement.is_direct(storage) for storage in placement.storages)
    small = torch.nn.Sequential(torch.nn.Linear(4, 4))
    before = small[0].weight.clone()
    with pytest.raises(UsageError, match=r"the checkpoint has 7 leaves that the state lacks: m\.1\.weight"):
        place({"m": model}, into={"m": small})
    with pytest.raises(UsageError, match=r"the checkpoint lacks: m\.1\.weight"):
        place({"m": small}, into={"m": model})
    assert torch.equal(small[0].weight, before)


def test_selected_part_of_module_is_restored():
    model, other = _model(), _model(1)
    bias = other[0].bias.clone()
    round_trip({"m": model, "step": 5}, into={"m": other}, only="m.0.weight")
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[0].bias, bias)


@pytest.mark.filterwarnings("ignore")
def test_optimizer_that_rounds_on_load_warns():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = torch.ones(2, dtype=torch.float32)
    kept = CopiedState.of(capture({"opt": optimizer}, ADAPTERS))
    fresh = torch.optim.Adam([parameter])
    placement = kept.place(into={"opt": fresh}, adapters=ADAPTERS)
    kept.fill(placement)
    assert placement.warnings == [
        "load_state_dict of Adam changed opt.state.0.exp_avg from float32 to bfloat16.",
    ]


class Counting:
    """Return copies, as objects on other devices do, and count its loads."""

    def __init__(self):
        self.loads = 0
        self.state = {"a": torch.zeros(2)}

    def state_dict(self):
        return {**self.state, "a": self.state["a"].clone()}

    def load_state_dict(self, state):
        self.loads += 1
        self.state = state


def test_load_state_dict_is_called_once():
    source, target = Counting(), Counting()
    source.state = {"a": torch.ones(2), "new": 5}
    round_trip([source], into=[target])
    assert target.loads == 1
    assert difference(target.state, source.state) is None
    untouched = Counting()
    round_trip({"o": source, "x": 1}, into={"o": untouched, "x": 0}, only="x")
    assert untouched.loads == 0


class Alias:
    """Return one list and one tensor at two places, as fresh schedulers do."""

    def __init__(self, tie):
        tensor, items = torch.zeros(2), [0]
        self.state = {"a": [tensor, items], "b": [tensor, items] if tie else [torch.ones(2), [1]]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_ties_inside_an_object_are_undone():
    target = Alias(tie=True)
    round_trip({"o": Alias(tie=False)}, into={"o": target})
    assert difference(target.state, Alias(tie=False).state) is None


def test_container_at_two_places_is_copied():
    shared = {"x": [0]}
    target = {"a": shared, "b": shared, "c": shared}
    back = round_trip({"a": {"x": [1]}, "b": {"x": [2]}, "c": {"x": [1]}}, into=target)
    assert back == {"a": {"x": [1]}, "b": {"x": [2]}, "c": {"x": [1]}}
    assert back["a"] is shared
    assert back["c"] is shared


class Box:
    def __init__(self, inside):
        self.inside = inside


def test_converted_leaves_are_recreated():
    register_converter(Box, "test.box", lambda box: box.inside, Box)
    target = {"box": Box(torch.zeros(2)), "none": None}
    back = round_trip({"box": Box(torch.ones(2)), "none": Box(1)}, into=target)
    assert back["box"].inside.tolist() == [1, 1]
    assert back["none"].inside == 1
    with pytest.raises(UsageError, match="plain value"):
        place({"box": Box(1)}, into={"box": torch.ones(1)})


def test_long_text_and_bytes_are_replaced():
    state = {"text": "x" * 100_000, "raw": b"y" * 100_000, "list": [b"z" * 100_000]}
    assert round_trip(state, into={"text": "", "raw": b"", "list": []}) == state
    with pytest.raises(UsageError, match="plain value"):
        place(state, into={"text": torch.ones(1)})


def _with_metadata(mapping):
    mapping._metadata = {"": {"version": 3}}
    return mapping


@pytest.mark.parametrize(
    "stored",
    [
        OrderedDict(a=1, b=2),
        _with_metadata(OrderedDict(a=1, b=2)),
        {"b": 2, "a": 1},
        Counter(a=1, b=2),
        defaultdict(int, a=1, b=2),
        defaultdict(list, b=2, a=1),
    ],
)
@pytest.mark.parametrize(
    "live",
    [{}, {"b": 5, "a": 7}, OrderedDict(b=0), Counter(b=9), defaultdict(int, a=0), defaultdict(lambda: None, b=3)],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_live_dict_becomes_equal_to_the_stored_one(stored, live, is_inside):
    live, tensor = copy.copy(live), torch.zeros(2)
    live["t"] = tensor
    stored = copy.copy(stored)
    stored["t"] = torch.ones(2)
    back = round_trip([stored] if is_inside else stored, into=[live] if is_inside else live)
    back = back[0] if is_inside else back
    assert difference(back, stored) is None
    assert getattr(back, "_metadata", None) == getattr(stored, "_metadata", None)
    assert back["t"] is tensor
    assert (back is live) is (type(live) is type(stored))
    # Iterating over the live dict gives the new values too.
    assert list(live.items()) == list(back.items())


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        ({}, {"b": []}),
        ({"a": {}}, {"a": {"b": {"c": ()}}}),
        ({"a": torch.ones(1)}, {"a": torch.zeros(1), "log": {}}),
        ([torch.ones(1)], [torch.zeros(1), []]),
        ({True: 5}, {1.0: []}),
        ({1: {}}, {True: {}}),
    ],
)
def test_unknown_empty_container_is_refused(stored, live):
    with pytest.raises(UsageError, match="Nothing was written"):
        place(stored, into=live)


def test_selected_part_keeps_rest_of_a_live_dict():
    stored = OrderedDict(a=1, b=OrderedDict(x=1, y=2), c=3)
    live = {"c": [], "b": {"y": 0, "x": 0}, "own": {}}
    assert (
        difference(
            round_trip(stored, into=live, only=["a", "b"]), {"c": [], "b": OrderedDict(x=1, y=2), "own": {}, "a": 1}
        )
        is None
    )
    assert difference(round_trip(stored, into=live, only="b.y"), live) is None


@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter])
def test_long_plain_dict_is_filled_in_place(kind):
    stored = {"log": defaultdict(int, {f"key {number}": number for number in range(10_000)})}
    live = defaultdict(list, other=[1])
    assert round_trip(stored, into={"log": live})["log"] is live
    assert difference(live, stored["log"]) is None
    other = kind(other=1)
    back = round_trip(stored, into={"log": other})["log"]
    assert difference(back, stored["log"]) is None
    assert list(other.items()) == list(back.items())


@pytest.mark.parametrize("stored", [deque([1, 2, 3, 4, 5], 5), deque([1, 2]), deque([torch.ones(2), torch.zeros(2)])])
@pytest.mark.parametrize("length", [2, 7, None])
def test_deque_of_other_maxlen_is_replaced(stored, length):
    queue = deque([torch.zeros(2), torch.ones(2)] if isinstance(stored[0], torch.Tensor) else [0], length)
    back = round_trip({"log": {"queue": stored}}, into={"log": {"queue": queue}})["log"]["queue"]
    assert difference(back, stored) is None
    assert (back is queue) is (stored.maxlen == length)
