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

from ckstore.errors import UsageError
from ckstore.state.capture import has_state_dict

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
        return {name: part.state_dict() if has_state_dict(part) else part for name, part in self.parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back: the model's by ``load_state_dict``, the optimizer's by the names of its parameters.

        Raises:
            UsageError: A part is missing from it, or it has parameters that this optimizer lacks.
        """
        parts = self.parts()
        missing = [name for name in parts if name not in state]
        if missing:
            raise UsageError(
                f"the state has no {missing[0]}",
                where=f"it has {', '.join(map(str, state)) or 'nothing'}",
                todo="commit a TrainState with the same parts to restore one",
            )
        # What does not fit is refused before the model is loaded.
        parts[_OPTIMIZER].numbered(state[_OPTIMIZER])
        loaded: dict[str, Any] = {}
        for name, part in state.items():
            if has_state_dict(parts.get(name)):
                parts[name].load_state_dict(part)
            else:
                loaded[name] = part
        self.take(loaded)

    def parts(self) -> dict[str, Any]:
        """Return model, optimizer (by the names of its parameters) and the others, by the keys of the state."""
        return {_MODEL: self.model, _OPTIMIZER: NamedOptimizer(self.model, self.optimizer), **self.others}

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Keep what is neither the model nor the optimizer."""
        self.others.update({name: part for name, part in loaded.items() if name not in (_MODEL, _OPTIMIZER)})


class NamedOptimizer:
    """An optimizer whose state goes by the names of its parameters.

    Args:
        model: Says what the parameters are called.
        optimizer: Has ``param_groups``, ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, by names."""
        return self.named(self.optimizer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that goes by names.

        Raises:
            UsageError: It is of other parameters.
        """
        self.optimizer.load_state_dict(self.numbered(state))

    def named(self, numbered: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state that goes by numbers with names in their place."""
        named, names = dict(numbered), self._names()
        named["state"] = {names[key] if type(key) is int else key: entry for key, entry in numbered["state"].items()}
        if "param_groups" in numbered:
            named["param_groups"] = [
                {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
            ]
        return named

    def numbered(self, named: Mapping[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
        """Return a state that goes by names with the numbers of this optimizer in their place.

        Args:
            named: The state; left as it is.
            is_whole: Take settings that it lacks from the groups as they are.

        Raises:
            UsageError: It is of other parameters, or its groups are other ones.
        """
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
        numbered["state"] = {number_of.get(key, key): entry for key, entry in named.get("state", {}).items()}
        group_of = {name: number for number, group in enumerate(named["param_groups"]) for name in group["params"]}
        names, groups, first = list(number_of), [], 0
        for live in self.optimizer.param_groups:
            own = {**live, "params": list(range(first, first + len(live["params"])))}
            first += len(live["params"])
            theirs = {group_of[names[number]] for number in own["params"]}
            if len(theirs) > 1:
                raise UsageError(
                    "a group of this optimizer has parameters of several groups of the state",
                    todo="make the groups as they were when it was committed",
                )
            facts = named["param_groups"][theirs.pop()] if theirs else {}
            settings = {**own, **facts} if is_whole or not facts else dict(facts)
            groups.append({**settings, "params": own["params"]})
        numbered["param_groups"] = groups
        return numbered

    def _names(self) -> list[str]:
        """Return the name of each parameter of the optimizer, in its order."""
        by_id: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            by_id.setdefault(id(parameter), name)
        names: list[str] = []
        for group_number, group in enumerate(self.optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                # Parameters that are not the model's are told by their place.
                names.append(by_id.get(id(parameter), f"param_groups.{group_number}.{number}"))
        if len(set(names)) != len(names):
            raise UsageError("a parameter stands twice in the optimizer", todo="hand each parameter over once")
        return names
