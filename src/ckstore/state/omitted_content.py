"""Warnings about content that a commit does not store, or that a restore will give back in another form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckstore.format.tree import Path, place_of


class OmittedContent:
    """Content of a state that is not stored or is restored in another form; one warning for each kind."""

    def __init__(self) -> None:
        self._attributes: dict[tuple[str, str], list[Path]] = {}
        self._classes: dict[type, list[Path]] = {}

    def note_attribute(self, owner: str, name: str, path: Path) -> None:
        """Record an attribute that is not a plain value."""
        self._attributes.setdefault((owner, name), []).append(path)

    def note_class(self, kind: type, path: Path) -> None:
        """Record an object whose class would not be found when restoring."""
        self._classes.setdefault(kind, []).append(path)

    def add(self, other: OmittedContent) -> None:
        """Add what another walk recorded."""
        for attribute, paths in other._attributes.items():
            self._attributes.setdefault(attribute, []).extend(paths)
        for kind, paths in other._classes.items():
            self._classes.setdefault(kind, []).extend(paths)

    def sentences(self) -> Iterator[str]:
        """Yield one warning for each attribute and class."""
        for (owner, name), paths in self._attributes.items():
            yield f"The attribute {name!r} of {owner} is not a plain value and was not stored: {_paths(paths)}."
        for kind, paths in self._classes.items():
            yield (
                f"Objects of {kind.__module__}.{kind.__qualname__} will be restored as ckstore.StandIn, because no "
                f"module contains their class under this name: {_paths(paths)}."
            )


def _paths(paths: Sequence[Path]) -> str:
    first = place_of(paths[0])
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more"
