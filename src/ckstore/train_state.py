"""A model and its optimizer as one state whose optimizer part is keyed by the parameters' names.

torch.optim numbers its parameters; the numbers mean nothing without the order in which they were handed over. By
name, a weight and its moments are paired however the groups were made, and a checkpoint says what is what.

Invariants:
- Nothing here imports torch: a model is whatever has ``named_parameters``, an optimizer whatever has ``param_groups``.
- What is restored goes by name too: an optimizer whose groups have another order gets its own moments back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckstore.capture import has_state_dict
from ckstore.errors import UsageError

_MODEL, _OPTIMIZER = "model", "optimizer"


class TrainState:
    """What a training run commits and restores: ``store.commit(TrainState(model, optimizer), step)``.

    ``state_dict`` gives ``{"model": ..., "optimizer": {"state": {name: ...}, "param_groups": [...]}, **others}``, where
    ``params`` of the groups are names; ``store.restore(into=TrainState(model, optimizer))`` puts it back.

    Args:
        model: Has ``named_parameters``, ``state_dict`` and ``load_state_dict``.
        optimizer: One of torch.optim, or one that looks like it.
        **others: More of the state, by name: objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a data
            loader), or plain values, dicts, lists and tensors, which come back in ``others``.

    Raises:
        UsageError: The model or the optimizer lacks what is needed, or another part has their name.
    """

    def __init__(self, model: Any, optimizer: Any, **others: Any) -> None:
        if not has_state_dict(model) or not callable(getattr(model, "named_parameters", None)):
            raise UsageError(f"a {type(model).__name__} is no model", todo="give a torch.nn.Module")
        if not has_state_dict(optimizer) or not isinstance(getattr(optimizer, "param_groups", None), list):
            raise UsageError(f"a {type(optimizer).__name__} is no optimizer", todo="give one of torch.optim")
        self.model = model
        self.optimizer = optimizer
        self.others = dict(others)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors are the live ones."""
        parts = {_MODEL: self.model.state_dict(), _OPTIMIZER: self._named_optimizer()}
        for name, part in self.others.items():
            parts[name] = part.state_dict() if has_state_dict(part) else part
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back: the model's by ``load_state_dict``, the optimizer's by the names of its parameters.

        Raises:
            UsageError: Model or optimizer are missing from it, or it has parameters that this optimizer lacks.
        """
        missing = {_MODEL, _OPTIMIZER} - state.keys()
        if missing:
            raise UsageError(f"the state has no {sorted(missing)[0]}", todo="commit a TrainState to restore one")
        numbered = self._numbered_optimizer(state[_OPTIMIZER])
        self.model.load_state_dict(state[_MODEL])
        self.optimizer.load_state_dict(numbered)
        for name, part in state.items():
            if name in (_MODEL, _OPTIMIZER):
                continue
            if has_state_dict(self.others.get(name)):
                self.others[name].load_state_dict(part)
            else:
                self.others[name] = part

    def _names(self) -> list[str]:
        """Return the name of each parameter of the optimizer, in its order."""
        by_id: dict[int, str] = {}
        for name, parameter in self.model.named_parameters():
            by_id.setdefault(id(parameter), name)
        names: list[str] = []
        for group_number, group in enumerate(self.optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                # Parameters that are not the model's are told by their place.
                names.append(by_id.get(id(parameter), f"param_groups.{group_number}.{number}"))
        if len(set(names)) != len(names):
            raise UsageError("a parameter stands twice in the optimizer", todo="hand each parameter over once")
        return names

    def _named_optimizer(self) -> dict[str, Any]:
        numbered, names = self.optimizer.state_dict(), self._names()
        named = dict(numbered)
        named["state"] = {names[key] if type(key) is int else key: entry for key, entry in numbered["state"].items()}
        named["param_groups"] = [
            {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
        ]
        return named

    def _numbered_optimizer(self, named: Mapping[str, Any]) -> dict[str, Any]:
        number_of = {name: number for number, name in enumerate(self._names())}
        listed = [name for group in named["param_groups"] for name in group["params"]]
        unknown = [name for name in listed if name not in number_of]
        if unknown or len(listed) != len(number_of):
            lost = unknown or sorted(set(number_of) - set(listed))
            raise UsageError(
                f"the optimizer of the state and this one do not have the same parameters: {lost[0]!r}, for one",
                where=f"{len(listed)} parameters in the state, {len(number_of)} here",
                todo="make the optimizer with the parameters that it had when it was committed",
            )
        numbered = dict(named)
        numbered["state"] = {number_of.get(key, key): entry for key, entry in named["state"].items()}
        group_of = {name: number for number, group in enumerate(named["param_groups"]) for name in group["params"]}
        names, groups = list(number_of), []
        for own in self.optimizer.state_dict()["param_groups"]:
            theirs = {group_of[names[number]] for number in own["params"]}
            if len(theirs) > 1:
                raise UsageError(
                    "a group of this optimizer has parameters of several groups of the state",
                    todo="make the groups as they were when it was committed",
                )
            facts = named["param_groups"][theirs.pop()] if theirs else {}
            groups.append({**own, **{key: value for key, value in facts.items() if key != "params"}})
        numbered["param_groups"] = groups
        return numbered
