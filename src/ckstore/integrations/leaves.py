"""Leaves that ckstore cannot store, as hyper-parameters have them: configurations of OmegaConf, functions, objects.

A configuration of OmegaConf becomes plain dicts and lists, and ``rebuilt`` makes a configuration of them again. What is
left can be dropped, or stored as text. Nothing is left out silently: every change is returned with its path.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckstore.errors import LeafTypeError, UsageError
from ckstore.state.capture import KINDS, capture, loaded_adapters

OnUnstorable = Literal["raise", "drop", "text"]

_MODES = ("raise", "drop", "text")
_TEXT_MAX = 4096
_SIMPLE = frozenset((type(None), bool, int, float, complex, str, bytes))


@dataclass(frozen=True, slots=True)
class Storable:
    """A state that can be stored, and how it differs from the given one.

    Args:
        state: The state. Parts that did not change are the given objects.
        configs: The paths of the configurations of OmegaConf that became plain.
        notes: One sentence for each leaf that was dropped or changed to text.
    """

    state: Any
    configs: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_mode(on_unstorable: str) -> None:
    """Raise UsageError for an unknown mode."""
    if on_unstorable not in _MODES:
        raise UsageError("on_unstorable must be 'raise', 'drop' or 'text'", where=f"on_unstorable={on_unstorable!r}")


def storable(state: Any, on_unstorable: OnUnstorable = "raise") -> Storable:
    """Return a state without leaves that cannot be stored.

    Args:
        state: Nested dicts, lists and tuples. It is not changed.
        on_unstorable: ``"raise"`` leaves other leaves than configurations in place, so that a commit raises
            LeafTypeError. ``"drop"`` removes them from dicts and puts None in lists and tuples. ``"text"`` puts their
            repr. In both cases objects of subclasses of dict become plain dicts.
    """
    found = Storable(state)
    if on_unstorable == "raise" and "omegaconf" not in sys.modules:
        return found
    walk = _Walk(on_unstorable, found)
    return Storable(walk.converted(state, ()), found.configs, found.notes)


def rebuilt(state: Any, configs: Sequence[Sequence[Any]]) -> Any:
    """Return a restored state with configurations of OmegaConf where they were; plain if it is not installed."""
    if not configs:
        return state
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return state
    for path in configs:
        if not path:
            return OmegaConf.create(state)
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = OmegaConf.create(holder[path[-1]])
    return state


_DROPPED = object()


class _Walk:
    """One walk over a state; records what it changes."""

    def __init__(self, on_unstorable: OnUnstorable, found: Storable) -> None:
        self._mode = on_unstorable
        self._found = found
        self._ancestors: set[int] = set()
        # A configuration in a tuple stays plain: it cannot be assigned back.
        self._tuple_depth = 0

    def converted(self, item: Any, path: tuple[Any, ...]) -> Any:
        kind = type(item)
        # A container that contains itself is refused by the commit.
        if kind in _SIMPLE or _is_tensor(item) or id(item) in self._ancestors:
            return item
        config = _plain_config(item)
        if config is not None:
            if not self._tuple_depth:
                self._found.configs.append(list(path))
            return self.converted(config, path)
        if kind in KINDS or kind in (list, tuple):
            self._ancestors.add(id(item))
            made = self._mapping(item, path) if kind in KINDS else self._sequence(item, path)
            self._ancestors.discard(id(item))
            return made
        return item if self._mode == "raise" else self._leaf(item, path)

    def _mapping(self, items: Any, path: tuple[Any, ...]) -> Any:
        changed = {}
        for key, child in items.items():
            new = self.converted(child, (*path, key))
            if new is not child:
                changed[key] = new
        if not changed:
            return items
        made = copy.copy(items)
        for key, new in changed.items():
            if new is _DROPPED:
                del made[key]
            else:
                made[key] = new
        return made

    def _sequence(self, items: Any, path: tuple[Any, ...]) -> Any:
        self._tuple_depth += type(items) is tuple
        made = [self.converted(child, (*path, index)) for index, child in enumerate(items)]
        self._tuple_depth -= type(items) is tuple
        if all(new is child for new, child in zip(made, items, strict=True)):
            return items
        return type(items)(None if new is _DROPPED else new for new in made)

    def _leaf(self, item: Any, path: tuple[Any, ...]) -> Any:
        try:
            capture(item, loaded_adapters())
        except LeafTypeError as error:
            name = f"{type(item).__module__}.{type(item).__qualname__}"
            if isinstance(item, dict):
                self._note(path, f"a {name} is stored as a dict")
                return self._mapping(dict(item), path)
            if error.path:
                # It contains the leaf, for example as a field of a dataclass.
                name += f" ({error.what})"
            if self._mode == "drop":
                self._note(path, f"a {name} cannot be stored and is left out")
                return _DROPPED
            self._note(path, f"a {name} cannot be stored; its text is stored")
            return _text_of(item)
        return item

    def _note(self, path: tuple[Any, ...], what: str) -> None:
        self._found.notes.append(f"{'.'.join(map(str, path)) or 'the state'}: {what}")


def _is_tensor(item: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.Tensor)


def _plain_config(item: Any) -> Any:
    """Return the content of a configuration of OmegaConf, interpolations unresolved; None: not a configuration."""
    if not type(item).__module__.startswith("omegaconf."):
        return None
    from omegaconf import Container, OmegaConf

    if not isinstance(item, Container):
        return None
    return OmegaConf.to_container(item, resolve=False)


def _text_of(item: Any) -> str:
    try:
        return repr(item)[:_TEXT_MAX]
    except Exception:
        # The repr of a user's class may raise anything.
        return f"a {type(item).__qualname__}"


def with_hint(error: LeafTypeError, hint: str) -> LeafTypeError:
    """Return the error of a commit with one more thing that the user can do."""
    facts: Mapping[str, object] = error.facts
    return LeafTypeError(error.what, where=error.where, todo=f"{error.todo}; or {hint}", **facts)
