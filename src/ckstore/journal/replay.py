"""Replay of steps: the user's own optimizer is called with stored gradients and hyper-parameters.

So every optimizer works whose step depends on nothing else. Whether it did is not assumed: the caller compares
checksums of all that the steps have made.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ckstore.errors import UnsupportedError, UsageError
from ckstore.format.points import OptimizerFacts
from ckstore.format.tree import DictNode, ListNode, Node, TensorNode, TupleNode, ValueNode
from ckstore.journal.gradients import SeenGradient
from ckstore.state.values import decode_plain

_TORCH_OPTIMIZERS = "torch.optim."
"""Classes of this package are made again from their arguments. No other code is called because a file names it."""


class LoadedGradient(NamedTuple):
    """A gradient to replay: the index of its parameter, counted over all groups, and a tensor of the host."""

    parameter: int
    tensor: Any


def loaded(gradient: SeenGradient) -> LoadedGradient:
    """Return a gradient as a tensor, which shares the memory of the arrays. On any thread."""
    return LoadedGradient(gradient.parameter, _tensor_of(gradient))


def replay_step(optimizer: Any, groups: Node, gradients: Iterable[LoadedGradient]) -> None:
    """Call an optimizer's step once, as it was called when the step was recorded.

    Args:
        optimizer: The optimizer. The gradients of its parameters are replaced.
        groups: Hyper-parameters: a list of one mapping for each group.
        gradients: What it saw.

    Raises:
        UsageError: It has other groups or parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _set_groups(optimizer, groups)
    for parameter in parameters:
        parameter.grad = None
    for gradient in gradients:
        shape = tuple(gradient.tensor.shape)
        if gradient.parameter >= len(parameters) or tuple(parameters[gradient.parameter].shape) != shape:
            raise UsageError(
                f"the journal has a gradient of shape {shape} for parameter {gradient.parameter}, and the "
                f"{type(optimizer).__name__} does not have such a parameter",
                todo="restore into the optimizer, model and groups of the run, in the order of store.journal",
            )
        parameter = parameters[gradient.parameter]
        parameter.grad = _laid_out_like(gradient.tensor, parameter)
    optimizer.step()


def _laid_out_like(gradient: Any, parameter: Any) -> Any:
    """Return a gradient with the device and strides of its parameter, as the run had it; fused kernels rely on them."""
    if gradient.is_sparse or parameter.is_contiguous():
        return gradient.to(parameter.device)
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


@contextmanager
def kept_gradients(optimizers: Sequence[Any]) -> Iterator[None]:
    """Give all parameters back the gradients that they have now."""
    kept = [
        (parameter, parameter.grad)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _set_groups(optimizer: Any, groups: Node) -> None:
    stored = groups.children if isinstance(groups, ListNode) else ()
    if len(stored) != len(optimizer.param_groups):
        raise UsageError(
            f"the journal has {len(stored)} groups of parameters, and the {type(optimizer).__name__} has "
            f"{len(optimizer.param_groups)}",
            todo="restore into an optimizer with the groups of the run",
        )
    for group, node in zip(optimizer.param_groups, stored, strict=True):
        assert isinstance(node, DictNode), "checked when the point was decoded"
        for name, value in zip(node.keys, node.children, strict=True):
            group[name] = _value_of(value, group.get(name))


def _value_of(node: Node, live: object) -> Any:
    """Return a hyper-parameter. Where the live one is a tensor, that tensor gets the number and is returned."""
    if isinstance(node, (ListNode, TupleNode)):
        is_like = isinstance(live, (list, tuple)) and len(live) == len(node.children)
        items: Sequence[object] = live if is_like else [None] * len(node.children)  # type: ignore[assignment]
        values = [_value_of(child, item) for child, item in zip(node.children, items, strict=True)]
        return values if isinstance(node, ListNode) else tuple(values)
    assert isinstance(node, ValueNode), "hyper-parameters are plain values"
    value: Any = decode_plain(node)
    return live.fill_(value) if isinstance(live, torch.Tensor) else value


def _tensor_of(gradient: SeenGradient) -> Any:
    dtype = getattr(torch, gradient.dtype)
    values = torch.from_numpy(gradient.values)
    if values.dtype != dtype:
        values = values.view(dtype)
    if gradient.indices is None:
        return values
    indices = torch.from_numpy(gradient.indices)
    # Neither sorted nor summed again: the optimizer sees what it saw.
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True)


def made_again(facts: OptimizerFacts, tensors: Callable[[int], Any]) -> Any:
    """Return an optimizer of torch, made from what the journal says.

    Args:
        facts: The class, its arguments, its parameters and its state.
        tensors: Returns the tensor of an index of the point's tensors, in the state that is being restored.

    Raises:
        UnsupportedError: It is not a class of torch.optim, or takes other arguments now.
    """
    module, _, name = facts.kind.rpartition(".")
    found = None
    if module.startswith(_TORCH_OPTIMIZERS) or f"{module}." == _TORCH_OPTIMIZERS:
        found = getattr(sys.modules.get(module) or importlib.import_module("torch.optim"), name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UnsupportedError(
            f"this point needs an optimizer of the class {facts.kind}, which is not one of torch.optim",
            todo="call store.journal(optimizer) and then restore(into=state): then your own optimizer is called",
        )
    assert isinstance(facts.defaults, DictNode), "checked when the point was decoded"
    nodes = {str(key): node for key, node in zip(facts.defaults.keys, facts.defaults.children, strict=True)}
    shared = {name: tensors(node.tensor) for name, node in nodes.items() if isinstance(node, TensorNode)}
    defaults = shared | {name: _value_of(node, None) for name, node in nodes.items() if name not in shared}
    # Some defaults are no arguments: AdamW has one that its base class takes.
    accepted = inspect.signature(found).parameters
    arguments = {name: value for name, value in defaults.items() if name in accepted}
    groups = [{"params": [tensors(index).requires_grad_() for index in group]} for group in facts.groups]
    try:
        optimizer = found(groups, **arguments)
    except TypeError as error:
        raise UnsupportedError(
            f"torch's {name} does not take the arguments of the stored one: {error}",
            todo="use the version of torch that the journal names, or restore(into=state)",
        ) from error
    for group in optimizer.param_groups:
        # Each group has a value of its own, which a replay sets.
        group.update({name: tensor.clone() for name, tensor in shared.items() if name in group})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, names in zip(parameters, facts.state, strict=True):
        if names:
            optimizer.state[parameter] = {key: tensors(index) for key, index in names.items()}
    return optimizer
