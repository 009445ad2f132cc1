"""A model and its optimizer as one state in which the optimizer's entries are keyed by parameter name.

torch.optim numbers parameters in the order in which they were passed to it. Names stay valid when that order or the
groups change, and they show in a checkpoint which moments belong to which weight.

Invariants:
- Nothing here imports torch: a model is any object with ``named_parameters``, an optimizer any with ``param_groups``.
- Restoring matches by name: an optimizer with its groups in another order gets the right moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckstore.errors import UsageError
from ckstore.state.capture import has_state_dict

_MODEL, _OPTIMIZER = "model", "optimizer"


class TrainState:
    """The state of a training run, for example ``store.commit(TrainState(model, optimizer), step)``.

    ``state_dict`` returns ``{"model": ..., "optimizer": {"state": {name: ...}, "param_groups": [...]}, **others}``.
    ``params`` of the groups are names. ``store.restore(into=TrainState(model, optimizer))`` restores it.

    Args:
        model: An object with ``named_parameters``, ``state_dict`` and ``load_state_dict``.
        optimizer: A torch.optim optimizer, or an object with the same interface.
        **others: Further parts by name. Objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a data
            loader) are restored in place; plain values, dicts, lists and tensors are restored in ``others``.

    Raises:
        UsageError: The model or the optimizer lacks a needed attribute.
    """

    def __init__(self, model: Any, optimizer: Any, **others: Any) -> None:
        if not has_state_dict(model) or not callable(getattr(model, "named_parameters", None)):
            raise UsageError(f"a {type(model).__name__} is not a model", todo="give a torch.nn.Module")
        if not has_state_dict(optimizer) or not isinstance(getattr(optimizer, "param_groups", None), list):
            raise UsageError(f"a {type(optimizer).__name__} is not an optimizer", todo="give a torch.optim optimizer")
        self.model = model
        self.optimizer = optimizer
        self.others = dict(others)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the live tensors."""
        return {name: part.state_dict() if has_state_dict(part) else part for name, part in self.parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state: the model with ``load_state_dict``, the optimizer by parameter name.

        Raises:
            UsageError: A part is missing, or the optimizer has other parameters.
        """
        parts = self.parts()
        missing = [name for name in parts if name not in state]
        if missing:
            raise UsageError(
                f"the state has no {missing[0]}",
                where=f"it has {', '.join(map(str, state)) or 'nothing'}",
                todo="commit and restore a TrainState with the same parts",
            )
        # Refuse an optimizer state that does not fit before the model is loaded.
        parts[_OPTIMIZER].numbered(state[_OPTIMIZER])
        loaded: dict[str, Any] = {}
        for name, part in state.items():
            if has_state_dict(parts.get(name)):
                parts[name].load_state_dict(part)
            else:
                loaded[name] = part
        self.take(loaded)

    def parts(self) -> dict[str, Any]:
        """Return the model, the optimizer (keyed by parameter name) and the other parts, by state key."""
        return {_MODEL: self.model, _OPTIMIZER: NamedOptimizer(self.model, self.optimizer), **self.others}

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Store the loaded parts except the model and the optimizer in ``others``."""
        self.others.update({name: part for name, part in loaded.items() if name not in (_MODEL, _OPTIMIZER)})


class NamedOptimizer:
    """An optimizer whose state is keyed by parameter name.

    Args:
        model: Gives the names of the parameters.
        optimizer: An object with ``param_groups``, ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, keyed by name."""
        return self.named(self.optimizer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that is keyed by name.

        Raises:
            UsageError: The state has other parameters.
        """
        self.optimizer.load_state_dict(self.numbered(state))

    def named(self, numbered: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state with names in place of parameter numbers."""
        named, names = dict(numbered), self._names()
        named["state"] = {names[key] if type(key) is int else key: entry for key, entry in numbered["state"].items()}
        if "param_groups" in numbered:
            named["param_groups"] = [
                {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
            ]
        return named

    def numbered(self, named: Mapping[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
        """Return a copy of a state with this optimizer's parameter numbers in place of names.

        Args:
            named: The state; not changed.
            is_whole: Take settings that the state lacks from the optimizer's groups.

        Raises:
            UsageError: The state has other parameters, or other groups.
        """
        number_of = {name: number for number, name in enumerate(self._names())}
        listed = [name for group in named["param_groups"] for name in group["params"]]
        unknown = [name for name in listed if name not in number_of]
        if unknown or len(listed) != len(number_of):
            differing = unknown or sorted(set(number_of) - set(listed))
            raise UsageError(
                f"the parameters of the optimizer differ from those in the state, for example {differing[0]!r}",
                where=f"{len(listed)} parameters in the state, {len(number_of)} here",
                todo="build the optimizer with the parameters that it had when it was committed",
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
                    "a group of the optimizer has parameters of several groups in the state",
                    todo="build the groups as they were when the state was committed",
                )
            facts = named["param_groups"][theirs.pop()] if theirs else {}
            settings = {**own, **facts} if is_whole or not facts else dict(facts)
            groups.append({**settings, "params": own["params"]})
        numbered["param_groups"] = groups
        return numbered

    def _names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in its order."""
        by_id: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            by_id.setdefault(id(parameter), name)
        names: list[str] = []
        for group_number, group in enumerate(self.optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                # A parameter outside the model is named by its position.
                names.append(by_id.get(id(parameter), f"param_groups.{group_number}.{number}"))
        if len(set(names)) != len(names):
            raise UsageError("a parameter occurs twice in the optimizer", todo="pass each parameter once")
        return names
