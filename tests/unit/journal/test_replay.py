"""Protects notes of steps and their replay: the same bits for every optimizer, or a reason why not."""

from __future__ import annotations

import copy
import gc
import struct

import numpy as np
import pytest
import torch

from ckstore.errors import UnsupportedError, UsageError
from ckstore.format.points import OptimizerFacts
from ckstore.format.tree import DictNode, ValueNode
from ckstore.journal.gradients import GradientMemory, SeenGradient
from ckstore.journal.recorder import StepRecorder, owned_tensors
from ckstore.journal.replay import kept_gradients, loaded, made_again, replay_step

STEPS = 5


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, as in arXiv:2302.06675."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter)
                update = state["m"].mul(first).add(parameter.grad, alpha=1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["m"].mul_(second).add_(parameter.grad, alpha=1 - second)


OPTIMIZERS = {
    "AdamW for-loop": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "AdamW lr tensor": lambda groups: torch.optim.AdamW(groups, torch.tensor(1e-2), foreach=False),
    "Adam amsgrad": lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True, weight_decay=0.1, maximize=True),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, 0.01, momentum=0.5),
    "Lion": Lion,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda groups: torch.optim.Muon(groups, 1e-2)


def model_of(name):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 5, bias=False)]
    if name != "Muon":
        layers[1] = torch.nn.Linear(8, 5)
    return torch.nn.Sequential(*layers)


def setting(name):
    model = model_of(name)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.05}]
    return model, OPTIMIZERS[name](groups)


def train_step(model, optimizer, number):
    torch.manual_seed(number)
    model(torch.randn(4, 6)).square().mean().backward()
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.9)
        else:
            group["lr"] *= 0.9
    optimizer.step()
    optimizer.zero_grad()


def bits_of(optimizer):
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in owned_tensors(optimizer)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def seen_of(reference):
    tensor = reference.tensor
    return SeenGradient(reference.parameter, "float32", tuple(tensor.shape), tensor.numpy())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_give_the_same_bits(name):
    model, optimizer = setting(name)
    recorder = StepRecorder()
    recorder.attach(optimizer)
    train_step(model, optimizer, 0)
    assert recorder.take()[1] is None
    begin = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps = []
    for number in range(1, STEPS):
        train_step(model, optimizer, number)
        taken, problem = recorder.take()
        assert problem is None
        steps += taken
    expected = bits_of(optimizer)

    other, fresh = setting(name)
    other.load_state_dict(begin[0])
    fresh.load_state_dict(begin[1])
    for step in steps:
        replay_step(fresh, step.groups, [loaded(seen_of(each)) for each in step.gradients])
    assert same(bits_of(fresh), expected)
    assert str(fresh.param_groups[0]["lr"]) == str(optimizer.param_groups[0]["lr"])


def recorded():
    model, optimizer = setting("AdamW for-loop")
    recorder = StepRecorder()
    recorder.attach(optimizer)
    train_step(model, optimizer, 0)
    assert recorder.take()[1] is None
    return model, optimizer, recorder


def test_a_parameter_without_a_gradient_stays_without_one():
    model, optimizer, recorder = recorded()
    model[0].weight.requires_grad_(False)
    recorder.take()
    train_step(model, optimizer, 1)
    (step,), problem = recorder.take()
    assert problem is None
    assert [each.parameter for each in step.gradients] == [1, 2]


def test_several_steps_and_none_between_two_commits():
    model, optimizer, recorder = recorded()
    assert recorder.take() == ((), None)
    for number in range(3):
        train_step(model, optimizer, number)
    steps, problem = recorder.take()
    assert (len(steps), problem) == (3, None)


def test_a_loop_that_does_not_commit_keeps_few_gradients():
    model, optimizer, recorder = recorded()
    counts = []
    for number in range(10):
        train_step(model, optimizer, number)
        counts.append(len(recorder._steps))
    assert max(counts) == 3, "AdamW owns three numbers for each gradient"
    assert counts[-1] == 0
    assert "gradients of 4 steps" in recorder.take()[1]
    train_step(model, optimizer, 11)
    assert len(recorder.take()[0]) == 1


def gradients_zeroed_in_place(model, optimizer):
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def stepped_with_a_closure(model, optimizer):
    optimizer.step(lambda: model(torch.ones(1, 6)).sum().backward())


def parameter_changed(model, optimizer):
    train_step(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def parameter_moved(model, optimizer):
    model[0].weight.data = model[0].weight.data.clone()


def group_added(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def state_loaded(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def gradient_replaced(model, optimizer):
    def replace(*_):
        model[0].weight.grad = model[0].weight.grad * 2

    model(torch.ones(1, 6)).sum().backward()
    optimizer.register_step_pre_hook(replace)
    optimizer.step()


def hyper_parameter_is_an_object(model, optimizer):
    optimizer.param_groups[0]["scheme"] = object()
    train_step(model, optimizer, 1)


def step_failed(model, optimizer):
    def fail(*_):
        raise ArithmeticError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    handle.remove()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (gradients_zeroed_in_place, "changed between the step and the commit"),
        (stepped_with_a_closure, "closure"),
        (parameter_changed, "outside of a step"),
        (parameter_moved, "outside of a step"),
        (group_added, "groups or parameters"),
        (state_loaded, "outside of a step"),
        (gradient_replaced, "replaced"),
        (hyper_parameter_is_an_object, "neither a number nor a text"),
        (step_failed, "begun and not ended"),
    ],
)
def test_what_steps_do_not_explain_is_said_once(change, reason):
    model, optimizer, recorder = recorded()
    change(model, optimizer)
    assert reason in recorder.take()[1]
    assert recorder.take() == ((), None), "the state of the last commit is the new begin"


def test_attached_optimizers_are_not_kept_alive_and_not_attached_twice():
    model, optimizer, recorder = recorded()
    with pytest.raises(UsageError, match="in the journal already"):
        recorder.attach(optimizer)
    with pytest.raises(UsageError, match="not an optimizer"):
        recorder.attach(object())
    del optimizer, model
    gc.collect()
    with pytest.raises(UsageError, match="no longer exists"):
        recorder.take()


class Wrapper(torch.optim.Optimizer):
    """Like accelerate's, it does not call the constructor of its base class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_of_a_wrapper_the_optimizer_inside_is_noted():
    model, optimizer = setting("SGD")
    recorder, wrapper = StepRecorder(), Wrapper(optimizer)
    recorder.attach(wrapper)
    assert recorder.optimizers == [optimizer]
    train_step(model, wrapper, 0)
    assert len(recorder.take()[0]) == 1
    with pytest.raises(UsageError, match="in the journal already"):
        recorder.attach(optimizer)


def test_an_optimizer_that_cannot_be_noted_leaves_the_journal_as_it_was():
    model, optimizer, recorder = recorded()
    half = type("Half", (torch.optim.SGD,), {"__init__": lambda self: None})()
    half.param_groups, half.state = [], {}
    with pytest.raises(UsageError, match=r"no hooks around its steps.*super"):
        recorder.attach(half)
    train_step(model, optimizer, 1)
    assert [step.optimizer for step in recorder.take()[0]] == [0]


def test_an_optimizer_takes_the_place_of_one_that_no_longer_exists():
    model, optimizer, recorder = recorded()
    head = torch.nn.Linear(3, 3)
    other = torch.optim.SGD(head.parameters(), 0.1)
    recorder.attach(other)
    assert recorder.take() == ((), "an optimizer was added")
    train_step(model, optimizer, 1)
    del optimizer
    gc.collect()
    with pytest.raises(UsageError, match=r"no longer exists.*store\.journal"):
        recorder.take()
    fresh = torch.optim.SGD(model.parameters(), 0.1)
    recorder.attach(fresh)
    assert recorder.optimizers == [fresh, other], "a loop that starts again names them in this order"
    assert recorder.take() == ((), "an optimizer was replaced by another one")
    train_step(model, fresh, 2)
    head(torch.ones(1, 3)).sum().backward()
    other.step()
    steps, problem = recorder.take()
    assert problem is None
    assert [(step.optimizer, len(step.gradients)) for step in steps] == [(0, 3), (1, 2)]


def test_released_recorders_leave_no_hook():
    _, optimizer, recorder = recorded()
    recorder.release()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_replay_gives_gradients_back_and_is_not_noted():
    model, optimizer, recorder = recorded()
    train_step(model, optimizer, 1)
    (step,), _ = recorder.take()
    model(torch.ones(1, 6)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    recorder.is_paused = True
    with kept_gradients([optimizer]):
        replay_step(optimizer, step.groups, [loaded(seen_of(each)) for each in step.gradients])
    recorder.is_paused = False
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))


def test_other_groups_and_shapes_are_refused():
    model, optimizer, recorder = recorded()
    train_step(model, optimizer, 1)
    (step,), _ = recorder.take()
    gradients = [loaded(seen_of(each)) for each in step.gradients]
    _, other = setting("Adagrad")
    other.param_groups.pop()
    with pytest.raises(UsageError, match="groups"):
        replay_step(other, step.groups, gradients)
    with pytest.raises(UsageError, match="does not have such a parameter"):
        replay_step(optimizer, step.groups, [gradients[0]._replace(parameter=7)])


def test_sparse_gradients_are_replayed_as_they_were():
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    recorder = StepRecorder()
    recorder.attach(optimizer)

    def train(words):
        table(torch.tensor(words)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train([1, 2, 2])
    assert recorder.take()[1] is None
    begin = copy.deepcopy((table.state_dict(), optimizer.state_dict()))
    train([3, 7, 7, 1])
    (step,), problem = recorder.take()
    assert problem is None
    expected = bits_of(optimizer)
    (reference,) = step.gradients
    sparse = reference.tensor
    seen = SeenGradient(0, "float32", (50, 4), sparse._values().numpy(), sparse._indices().numpy())
    table.load_state_dict(begin[0])
    optimizer.load_state_dict(begin[1])
    recorder.is_paused = True
    replay_step(optimizer, step.groups, [loaded(seen)])
    assert same(bits_of(optimizer), expected)


def facts_of(optimizer, kind=None):
    defaults = {name: value for name, value in optimizer.defaults.items() if isinstance(value, (bool, float))}
    nodes = tuple(
        ValueNode("bool", value) if isinstance(value, bool) else ValueNode("float", struct.pack("<d", value))
        for value in defaults.values()
    )
    kind = kind or f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return OptimizerFacts(kind, DictNode("dict", tuple(defaults), nodes), ((0, 1),), ({}, {}))


def test_torchs_own_optimizers_are_made_again_and_no_others():
    tensors = [torch.zeros(2), torch.ones(3)]
    made = made_again(facts_of(torch.optim.SGD([torch.zeros(1)], 0.25, momentum=0.5)), tensors.__getitem__)
    assert type(made) is torch.optim.SGD
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.25, 0.5)
    assert made.param_groups[0]["params"][1] is tensors[1]
    for kind in ("os.system", "torch.optim.os.system", "torch.nn.Linear", "torch.optim.adamw.nothing", "builtins.eval"):
        with pytest.raises(UnsupportedError, match=r"store\.journal"):
            made_again(facts_of(made, kind), tensors.__getitem__)


def test_memory_of_a_gradient_is_used_again_only_when_nothing_refers_to_it():
    memory = GradientMemory()

    def tensor_of(value):
        values = memory.take(12).view(np.float32)
        values[:] = value
        return loaded(SeenGradient(0, "float32", (3,), values)).tensor

    kept = tensor_of(1)
    view, address = kept[1:].detach(), kept.data_ptr()
    del kept
    other = tensor_of(2)
    assert other.data_ptr() != address
    assert view.tolist() == [1, 1]
    array = view.numpy()
    del view
    assert tensor_of(3).data_ptr() != address
    assert array.tolist() == [1, 1]
    del array
    assert tensor_of(4).data_ptr() == address
