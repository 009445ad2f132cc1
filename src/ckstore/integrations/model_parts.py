"""A model as parts of a state. Of a model with adapters (PEFT), only what training can change.

``adapters`` maps the name of each adapter to its tensors. ``model`` is the whole ``state_dict``; with adapters it has
only trainable parameters and buffers that belong to none of them, and it is missing if there are none.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from ckstore.errors import UsageError


def has_adapters(model: Any) -> bool:
    """Say whether this is a model of PEFT."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def model_parts(model: Any) -> dict[str, Any]:
    """Return the parts of a state that belong to a model, with its live tensors."""
    if not has_adapters(model):
        return {"model": model.state_dict()}
    adapters = _adapters_of(model)
    rest = _rest_of(model, adapters)
    return {"adapters": adapters, **({"model": rest} if rest else {})}


def put_adapters(model: Any, saved: Mapping[str, Any], *, where: object) -> None:
    """Restore the parts of a model with adapters strictly.

    Args:
        model: A model of PEFT.
        saved: The parts of the checkpoint: ``adapters`` and ``model``, each if the checkpoint has it.
        where: The checkpoint, for errors.

    Raises:
        UsageError: Adapters, names, shapes or dtypes differ. Nothing was written.
    """
    if "adapters" not in saved:
        raise UsageError("the model has adapters, and the checkpoint has none", where=where)
    adapters = _adapters_of(model)
    rest = _rest_of(model, adapters)
    _require_equal(_flat(adapters), _flat(saved["adapters"]), where)
    _require_equal(rest, saved.get("model", {}), where)
    owned = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for adapter, tensors in adapters.items():
        if all(tensor.data_ptr() in owned for tensor in tensors.values()):
            _copy(tensors, saved["adapters"][adapter])
        else:
            # Prompt learning returns computed tensors.
            _peft().set_peft_model_state_dict(model, dict(saved["adapters"][adapter]), adapter_name=adapter)
    _copy(rest, saved.get("model", {}))


def _peft() -> Any:
    return importlib.import_module("peft")


def _adapters_of(model: Any) -> dict[str, dict[str, Any]]:
    return {name: _peft().get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config}


def _rest_of(model: Any, adapters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what training can change outside the adapters: trainable parameters and buffers."""
    covered = {tensor.data_ptr() for tensors in adapters.values() for tensor in tensors.values()}
    changing = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    changing.update(name for name, _ in model.named_buffers())
    state = model.state_dict()
    return {name: state[name] for name in state if name in changing and state[name].data_ptr() not in covered}


def _flat(adapters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{adapter}: {name}": tensor for adapter, tensors in adapters.items() for name, tensor in tensors.items()}


def _require_equal(live: Mapping[str, Any], saved: Mapping[str, Any], where: object) -> None:
    def described(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    here, there = described(live), described(saved)
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differing:
        name = differing[0]
        raise UsageError(
            f"{len(differing)} tensors of the model and the checkpoint differ; the first is {name!r}: "
            f"{here.get(name, 'missing')} in the model, {there.get(name, 'missing')} in the checkpoint",
            where=where,
            todo="make the model, with all its adapters, as the run that saved it did",
        )


@torch.no_grad()
def _copy(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, tensor in live.items():
        tensor.copy_(saved[name])
