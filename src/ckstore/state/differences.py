"""Keys that a checkpoint and a live state do not have in common, in words: both sides, and a prefix with its cause.

Invariants:
- Pure: texts from keys; nothing here reads a state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckstore.format.tree import Path, format_path

NAMED_MAX = 5
"""Most places that a message names."""

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel, DistributedDataParallel or AveragedModel",
    "model": "an object that holds the model as `model`",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_model": "PEFT",
}
"""What puts a part of its own into the keys of the module inside, by that part."""


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """Two words for one place: the keys that only one side has.

    Args:
        path: The module or dict whose keys they are.
        missing: Keys of the state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the state lacks.
    """

    path: Path
    missing: tuple[Path, ...]
    unexpected: tuple[Path, ...]


def describe_differences(found: Sequence[KeyDifference]) -> tuple[str, str, str]:
    """Return what differs, where, and what to do."""
    missing = [format_path(path) for each in found for path in each.missing]
    unexpected = [format_path(path) for each in found for path in each.unexpected]
    if missing:
        what = f"the state has {_leaves(missing)} that the checkpoint lacks"
        where = listed(missing)
        if unexpected:
            where += f"; the checkpoint has {len(unexpected)} that the state lacks: {listed(unexpected)}"
        todo = "take them out of the state, or choose with only="
    else:
        what = f"the checkpoint has {_leaves(unexpected)} that the state lacks"
        where = listed(unexpected)
        todo = "make the state as it was when it was committed, or choose with only="
    advice = next((text for each in found if (text := _prefix_advice(each)) is not None), None)
    return what, where, advice or todo


def listed(places: Sequence[str]) -> str:
    """Return the first places, and how many more there are."""
    named = ", ".join(places[:NAMED_MAX])
    return named if len(places) <= NAMED_MAX else f"{named} and {len(places) - NAMED_MAX} more"


def added_part(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """Return what all the shorter keys need to become some of the longer ones: ``module.``; None: nothing does."""
    if not longer or not shorter:
        return None
    theirs, sample = set(longer), next(iter(shorter))
    for key in longer:
        prefix = key.removesuffix(sample)
        if prefix != key and prefix.endswith(".") and all(prefix + other in theirs for other in shorter):
            return prefix
    for word in _WRAPPERS:
        if {_without(key, word) for key in longer if word in key.split(".")} >= set(shorter):
            return f"{word}."
    return None


def _leaves(places: Sequence[str]) -> str:
    return "1 leaf" if len(places) == 1 else f"{len(places)} leaves"


def _without(key: str, word: str) -> str:
    return ".".join(part for part in key.split(".") if part != word)


def _prefix_advice(found: KeyDifference) -> str | None:
    ours = [format_path(path[len(found.path) :]) for path in found.missing]
    theirs = [format_path(path[len(found.path) :]) for path in found.unexpected]
    part, place = added_part(theirs, ours), format_path(found.path)
    if part is not None:
        keys = f"state[{place!r}]" if place else "state"
        return (
            f"the keys of the checkpoint have {part!r} in addition{_cause(part)}: restore into a model that is "
            f"wrapped as it was then, or take it out by hand: load_state_dict({{key.replace({part!r}, '', 1): value "
            f"for key, value in {keys}.items()}}) with state = store.restore()"
        )
    part = added_part(ours, theirs)
    if part is not None:
        inner = part.rstrip(".")
        return (
            f"the keys of the state have {part!r} in addition{_cause(part)}: restore into the model inside of it, "
            f"which is its attribute {inner!r}"
        )
    return None


def _cause(part: str) -> str:
    causes = [_WRAPPERS[word] for word in part.split(".") if word in _WRAPPERS]
    return f", from {' in '.join(causes)}" if causes else ""
