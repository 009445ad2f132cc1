"""What of a foreign state can be stored: without what is to be left out, and with a list of what cannot be.

Invariants:
- A leaf is left out only if a glob of ``skip`` matches it; everything else is captured, or an error names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ckstore.errors import UnsupportedError, UsageError
from ckstore.format.tree import Path, format_path, place_of
from ckstore.state.capture import Captured, capture
from ckstore.state.tensors import LeafAdapter

_BAD_MAX = 1000
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class Loaded:
    """A part of a foreign checkpoint.

    Attributes:
        captured: What can be stored of it.
        left_out: Dotted path -> why it is left out.
    """

    captured: Captured
    left_out: dict[str, str] = field(default_factory=dict)


def skipped_by(path: Path, skip: Sequence[str]) -> str | None:
    """Return why a leaf or a container is left out, by the globs of ``--skip-leaf``; None: it is not."""
    dotted = format_path(path)
    for pattern in skip:
        if path and (dotted == pattern or fnmatchcase(dotted, pattern)):
            return reason_of(pattern)
    return None


def reason_of(pattern: str) -> str:
    """Return why a leaf is left out that a glob matches."""
    return f"as asked for with --skip-leaf {pattern}"


def storable(state: Any, adapters: Sequence[LeafAdapter], *, key: str, skip: Sequence[str], where: str) -> Loaded:
    """Take a state apart, without what is to be left out.

    Args:
        state: The state of one part; it is changed.
        adapters: Libraries of tensors beyond numpy.
        key: The key that the part gets in the whole state; empty: it is the whole.
        skip: Globs over dotted paths in the whole state.
        where: The file, for messages.

    Raises:
        UnsupportedError: Leaves cannot be stored; the message names them.
    """
    prefix: Path = (key,) if key else ()
    left_out: dict[str, str] = {}
    if skip:
        state = _without(state, prefix, skip, left_out)
    bad: list[tuple[Path, str]] = []
    while True:
        try:
            captured = capture(state, adapters)
        except UsageError as error:
            path = error.facts.get("path")
            if not isinstance(path, tuple) or len(bad) >= _BAD_MAX:
                raise
            path = _reachable(state, path)
            bad.append(((*prefix, *path), _kind_at(state, path) or error.what))
            if not path:
                break
            state = _without_path(state, path)
            continue
        break
    if bad:
        raise _cannot_be_stored(bad, where)
    return Loaded(captured, left_out)


def _cannot_be_stored(bad: Sequence[tuple[Path, str]], where: str) -> UnsupportedError:
    named = "; ".join(f"{place_of(path)}: {what}" for path, what in bad[:_NAMED_MAX])
    more = f"; and {len(bad) - _NAMED_MAX} more" if len(bad) > _NAMED_MAX else ""
    options = " ".join(f"--skip-leaf {format_path(path)}" for path, _ in bad[:3] if path)
    return UnsupportedError(
        f"the file holds what cannot be stored ({named}{more})", where=where,
        todo=f"leave it out with {options}, leave out the file with --exclude, or load it where you trust it and save "
        "its state_dicts alone",
    )  # fmt: skip


def _reachable(state: Any, path: Path) -> Path:
    """Return the part of a path that leads through dicts and lists; what lies deeper is left out with its leaf."""
    for index, key in enumerate(path):
        is_there = isinstance(key, (str, int)) and (
            key in state if isinstance(state, dict) else isinstance(state, (list, tuple))
        )
        if not is_there:
            return path[:index]
        state = state[key]
    return path


def _kind_at(state: Any, path: Path) -> str | None:
    """Return what to say of an object at a path; None: it is none that only code can make."""
    for key in path:
        state = state[key]
    kind = getattr(state, "kind", None)
    if kind is None:
        return None
    name = kind if isinstance(kind, str) else f"{kind.module}.{kind.name}"
    return f"an object of {name}, which only code can make"


def _without(item: Any, path: Path, skip: Sequence[str], left_out: dict[str, str]) -> Any:
    """Return a part of a state without what the globs match; in lists None takes its place."""
    if isinstance(item, tuple):
        return tuple(_without(list(item), path, skip, left_out))
    if not isinstance(item, (dict, list)):
        return item
    for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
        why = skipped_by((*path, key), skip)
        if why is None:
            item[key] = _without(child, (*path, key), skip, left_out)
            continue
        left_out[format_path((*path, key))] = why
        if isinstance(item, dict):
            del item[key]
        else:
            item[key] = None
    return item


def _without_path(item: Any, path: Path) -> Any:
    """Return a part of a state without what stands at a path."""
    key = path[0]
    if isinstance(item, tuple):
        return tuple(_without_path(list(item), path))
    if len(path) > 1:
        item[key] = _without_path(item[key], path[1:])
    elif isinstance(item, dict):
        del item[key]
    else:
        item[key] = None
    return item
