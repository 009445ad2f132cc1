"""Undo what torch.distributed.checkpoint does to keys: it writes each key of a dict as text, and no empty dict.

Where torch itself says what a dict's keys must be, they become that again: those of an optimizer's ``state`` are the
numbers that its ``param_groups`` list, and a scheduler's ``milestones`` count steps. Elsewhere text stays text, since
a key of the user may have been the text ``"0"``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


def with_keys_of_torch(state: Any) -> Any:
    """Return the state with the keys that optimizers and schedulers need; dicts are changed where they are."""
    if isinstance(state, dict):
        if _is_optimizer(state):
            _mend_optimizer(state)
        if "last_epoch" in state and isinstance(state.get("milestones"), dict):
            _mend_milestones(state)
        for child in state.values():
            with_keys_of_torch(child)
    elif isinstance(state, (list, tuple)):
        for child in state:
            with_keys_of_torch(child)
    return state


def _is_optimizer(state: dict[Any, Any]) -> bool:
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _mend_optimizer(state: dict[Any, Any]) -> None:
    numbers = {number for group in state["param_groups"] for number in group["params"] if type(number) is int}
    # Before its first step, and for ever without momentum, an optimizer's state is empty, and was not written.
    moments = state.setdefault("state", {})
    if isinstance(moments, dict) and numbers:
        names = {str(number): number for number in numbers}
        mended = {names.get(key, key): value for key, value in moments.items()}
        moments.clear()
        moments.update(mended)


def _mend_milestones(state: dict[Any, Any]) -> None:
    milestones = state["milestones"]
    if all(isinstance(key, str) and key.isascii() and key.isdigit() for key in milestones):
        state["milestones"] = Counter({int(key): count for key, count in milestones.items()})


def keys_left_as_text(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of dicts whose keys are numbers as text: nothing says whether they were numbers once."""
    found: list[tuple[Any, ...]] = []
    if isinstance(state, dict):
        if state and all(isinstance(key, str) and key.isascii() and key.isdigit() for key in state):
            found.append(path)
        for key, child in state.items():
            found += keys_left_as_text(child, (*path, key))
    elif isinstance(state, (list, tuple)):
        for index, child in enumerate(state):
            found += keys_left_as_text(child, (*path, index))
    return found
