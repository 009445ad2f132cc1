"""Torch modules and optimizers: whether loading only copies, what does not fit, and which tensors they have.

``restore(into=)`` has the effect of ``load_state_dict(restore())``. If loading only copies tensors, they may be
written in place before ``load_state_dict`` is called, which saves a second copy of the state. Other loading code could
observe the restored values too early. So this module checks that loading only copies.

Invariants:
- Loading only copies if all methods involved are torch's own and there are no hooks.
- ``current_tensors`` reads attributes. It calls no method that a user may have overridden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import Path as KeyPath

_TORCH_FOLDER = str(Path(torch.__file__).parent)

_SHARDING_FOLDER = f"{_TORCH_FOLDER}/distributed/fsdp/_fully_shard/"

_MODULE_METHODS = (
    "load_state_dict",
    "_load_from_state_dict",
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_MODULE_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_OPTIMIZER_METHODS = ("load_state_dict", "state_dict", "_process_value_according_to_param_policy")
_OPTIMIZER_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_LIKE_THE_PARAMETER = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev"),
    )
)
"""Tensors that torch's own optimizers make in the shape of the parameter."""

_SCHEDULER_KEYS = frozenset(["initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"])
"""Keys that schedulers add to groups."""


def known_object(item: object) -> TorchModule | TorchOptimizer | None:
    """Return what can be predicted about a torch module or optimizer; None: it is neither."""
    if isinstance(item, torch.nn.Module):
        return TorchModule(item)
    if isinstance(item, torch.optim.Optimizer):
        return TorchOptimizer(item)
    return None


class TorchModule:
    """A module, inspected without changing it."""

    kind: Literal["module", "optimizer"] = "module"

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def copyable_state(self) -> Mapping[Any, Any] | None:
        """Return the state if loading only copies into its tensors; None: loading may do more."""
        if torch.__future__.get_swap_module_params_on_conversion():
            return None
        if not all(map(_only_copies, _modules_of(self._module))):
            return None
        found: Mapping[Any, Any] = self._module.state_dict()
        return found if all(map(_is_usual, found.values())) else None

    def owns(self, tensor: object) -> bool:
        """Return True: all tensors of the state belong to the module."""
        return True

    def mismatches(self, state: Mapping[Any, Any]) -> list[tuple[KeyPath, str]]:
        """Return what would go wrong without an exception from load_state_dict."""
        return [
            ((name,), "is on the meta device, where loading has no effect; call to_empty(device=...) first")
            for name, tensor in self.current_tensors().items()
            if tensor.is_meta and name in state
        ]

    def current_tensors(self) -> Mapping[Any, Any]:
        """Return the parameters and buffers by the keys of the state."""
        found: dict[str, Any] = {}
        for prefix, module in _named_modules_of(self._module):
            for part in (vars(module).get("_parameters"), vars(module).get("_buffers")):
                for name, tensor in (part or {}).items():
                    if isinstance(tensor, torch.Tensor):
                        found[prefix + name] = tensor
        return found

    def parameters(self) -> Mapping[Any, Any]:
        """Return nothing: a module's state is about itself."""
        return {}


class TorchOptimizer:
    """An optimizer, inspected without changing it."""

    kind: Literal["module", "optimizer"] = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def copyable_state(self) -> Mapping[Any, Any] | None:
        """Return the state if loading only takes over the given tensors; None: loading may do more."""
        return self._optimizer.state_dict() if _only_takes_over(self._optimizer) else None

    def owns(self, tensor: object) -> bool:
        """Whether a tensor of the state shares no memory with a parameter or gradient, which must not be written."""
        if not isinstance(tensor, torch.Tensor) or not _is_usual(tensor) or tensor.is_meta:
            return True
        return _address_of(tensor) not in self._borrowed

    @functools.cached_property
    def _borrowed(self) -> set[int]:
        """Addresses of the parameters and gradients."""
        return {
            _address_of(tensor)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, parameter.grad)
            if tensor is not None and _is_usual(tensor) and not tensor.is_meta
        }

    def mismatches(self, state: Mapping[Any, Any]) -> list[tuple[KeyPath, str]]:
        """Return what load_state_dict refuses, and what it accepts although the next step would fail or be wrong."""
        groups = state.get("param_groups")
        if groups is None or not _loads_as_torch_does(self._optimizer):
            return []
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return [(("param_groups",), "is not a list of groups in the checkpoint")]
        found = list(self._mismatches_of_groups(groups))
        if not found:
            found.extend(self._mismatches_of_state(groups, state.get("state")))
        return found

    def current_tensors(self) -> Mapping[Any, Any]:
        """Return the tensors of the state by its keys."""
        state = self._optimizer.state
        return {"state": {number: state[each] for number, each in self.parameters()["state"].items() if each in state}}

    def parameters(self) -> Mapping[Any, Any]:
        """Return the parameters by the keys of their state."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return {"state": dict(enumerate(parameters))}

    def _mismatches_of_groups(self, groups: list[dict[str, Any]]) -> Iterator[tuple[KeyPath, str]]:
        own = self._optimizer.param_groups
        if len(groups) != len(own):
            theirs = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
            yield ("param_groups",), f"has {theirs} in the checkpoint, {len(own)} in the state"
            return
        for number, (group, live) in enumerate(zip(groups, own, strict=True)):
            path, listed = ("param_groups", number), group.get("params")
            if not isinstance(listed, list) or len(listed) != len(live["params"]):
                count = len(listed) if isinstance(listed, list) else "not a list of"
                yield path, f"has {count} parameters in the checkpoint, {len(live['params'])} in the state"
            elif moved := _moved_name(group.get("param_names"), live.get("param_names")):
                yield (
                    (*path, "param_names"),
                    f"has {moved!r} at another position in the state: moments would be loaded for the wrong parameter; "
                    "build the optimizer with the parameters in the order of the checkpoint, or commit and restore a "
                    "ckstore.TrainState, which matches by name",
                )
        missing = self._missing_settings(groups)
        if missing:
            number, keys = missing
            unknown = sorted(map(str, set(groups[number]) - set(own[number]) - _SCHEDULER_KEYS))
            more = f", and has {', '.join(unknown)}, which it does not have" if unknown else ""
            yield (
                ("param_groups", number),
                f"lacks {', '.join(keys)} of {type(self._optimizer).__qualname__} in the checkpoint{more}: the "
                "checkpoint is of another type of optimizer",
            )

    def _missing_settings(self, groups: list[dict[str, Any]]) -> tuple[int, list[str]] | None:
        """Return the first group that would lack settings after loading, and their names; None: no group does."""
        kind = type(self._optimizer)
        if not _only_takes_over(self._optimizer):
            return None
        # __setstate__ adds settings that older versions of the optimizer lacked.
        trial: Any = object.__new__(kind)
        copies = [{**group, "params": []} for group in groups]
        try:
            trial.__setstate__({"defaults": dict(self._optimizer.defaults), "state": {}, "param_groups": copies})
        except (AttributeError, KeyError, TypeError):
            return 0, sorted(set(self._optimizer.defaults) - set(groups[0])) or ["settings"]
        for number, group in enumerate(trial.param_groups):
            keys = sorted(set(self._optimizer.defaults) & set(self._optimizer.param_groups[number]) - set(group))
            if keys:
                return number, keys
        return None

    def _mismatches_of_state(self, groups: list[dict[str, Any]], state: object) -> Iterator[tuple[KeyPath, str]]:
        if not isinstance(state, dict):
            return
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        by_key = dict(zip((key for group in groups for key in group["params"]), parameters, strict=True))
        for key, entry in state.items():
            if key not in by_key:
                if isinstance(key, str) and key.isascii() and key.isdigit() and int(key) in by_key:
                    yield (
                        ("state", key),
                        "is a str instead of a number in the checkpoint: it would be loaded for no parameter",
                    )
                continue
            if not type(self._optimizer).__module__.startswith("torch.optim.") or not isinstance(entry, dict):
                continue
            for name, spec in entry.items():
                shape = tuple(by_key[key].shape)
                if name in _LIKE_THE_PARAMETER and isinstance(spec, TensorSpec) and spec.shape not in ((), shape):
                    yield ("state", key, name), f"is {spec.shape} in the checkpoint, its parameter is {shape}"


def _moved_name(theirs: object, ours: object) -> str | None:
    """Return the name of a parameter that has another position on the other side; None: no parameter does."""
    if not isinstance(theirs, list) or not isinstance(ours, list) or len(theirs) != len(ours):
        return None
    position_of = {name: position for position, name in enumerate(ours) if isinstance(name, str)}
    return next((name for at, name in enumerate(theirs) if position_of.get(name, at) != at), None)


@functools.cache
def _is_torchs(function: Callable[..., object]) -> bool:
    """Whether a function and all functions that it wraps are defined in torch's own files."""
    while True:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH_FOLDER):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__


_COPYING = {
    name: {
        method
        for kind in (torch.nn.Module, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d)
        if _is_torchs(method := getattr(kind, name))
    }
    for name in _MODULE_METHODS
}
"""The versions of each module method that only copy; those of norms also handle older checkpoints."""


def _only_copies(module: torch.nn.Module) -> bool:
    own = vars(module)
    return (
        all(isinstance(own.get(name), dict) for name in ("_modules", "_parameters", "_buffers"))
        and not any(name in own for name in _MODULE_METHODS)
        and all(getattr(type(module), name) in _COPYING[name] for name in _MODULE_METHODS)
        and all(map(_is_sharding_hook, (hook for name in _MODULE_HOOKS for hook in _hooks_of(module, name))))
    )


def _hooks_of(module: torch.nn.Module, name: str) -> list[Any]:
    return list((getattr(module, name, None) or {}).values())


def _is_sharding_hook(hook: Any) -> bool:
    """Whether a hook is one of ``fully_shard``: it frees gathered parameters before the state is read or written."""
    code = getattr(getattr(hook, "hook", hook), "__code__", None)
    return code is not None and code.co_filename.startswith(_SHARDING_FOLDER)


def _loads_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer loads groups and state without modifying them."""
    kind, own = type(optimizer), vars(optimizer)
    return (
        isinstance(own.get("param_groups"), list)
        and isinstance(own.get("state"), dict)
        and not any(name in own for name in _OPTIMIZER_METHODS)
        and all(getattr(kind, name) is getattr(torch.optim.Optimizer, name) for name in _OPTIMIZER_METHODS)
        and all(_is_torchs(getattr(torch.optim.Optimizer, name)) for name in _OPTIMIZER_METHODS)
        and not any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
    )


def _only_takes_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes over the given tensors when it loads, and does nothing else."""
    setters = [vars(kind)["__setstate__"] for kind in type(optimizer).__mro__ if "__setstate__" in vars(kind)]
    return _loads_as_torch_does(optimizer) and "__setstate__" not in vars(optimizer) and all(map(_is_torchs, setters))


def _modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (each for _, each in _named_modules_of(module))


def _named_modules_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and its submodules with the prefixes of their keys; shared ones once for each prefix."""
    pending, open_ids = [("", module, frozenset[int]())], frozenset[int]()
    while pending:
        prefix, each, open_ids = pending.pop()
        yield prefix, each
        inner = open_ids | {id(each)}
        children = vars(each).get("_modules") or {}
        pending.extend(
            (f"{prefix}{name}.", child, inner)
            for name, child in reversed(list(children.items()))
            if isinstance(child, torch.nn.Module) and id(child) not in inner
        )


def _is_usual(tensor: object) -> bool:
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    )


def is_dtensor(item: object) -> bool:
    """Whether an object is a DTensor, without importing torch.distributed."""
    return hasattr(type(item), "_op_dispatcher") and hasattr(item, "_local_tensor") and hasattr(item, "_spec")


def is_sharded_tensor(item: object) -> bool:
    """Whether an object is a ShardedTensor, without importing torch.distributed."""
    return callable(getattr(item, "local_shards", None)) and callable(getattr(item, "metadata", None))


def _address_of(tensor: torch.Tensor) -> int:
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.untyped_storage().data_ptr()
