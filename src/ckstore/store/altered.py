"""Checkpoints that a copy could not take, because packs are altered or out of reach: all others go first."""

from __future__ import annotations

from collections.abc import Mapping

from ckstore.errors import CorruptError, MissingChunkError, UnreachableError
from ckstore.format.layout import ManifestName

_NAMED_MAX = 10


def damaged_error(
    what_was_not: str, damaged: Mapping[ManifestName, CorruptError | UnreachableError], report: object
) -> CorruptError | UnreachableError:
    """Return one error that names every checkpoint, and says of the first what is wrong with it.

    Args:
        what_was_not: What did not happen to them: ``"pulled"``.
        damaged: Each checkpoint, and why not.
        report: What became of the others; a fact of the error, beside those of the first.
    """
    names = sorted(damaged, reverse=True)
    first = damaged[names[0]]
    labels = [f"seq {name.seq} (step {name.step}) of run {name.run}" for name in names]
    rest = f" and {len(labels) - _NAMED_MAX} more" if len(labels) > _NAMED_MAX else ""
    facts = {**first.facts, "checkpoints": tuple(labels), "report": report}
    what = f"not {what_was_not}: {', '.join(labels[:_NAMED_MAX])}{rest}; of the first, {first.what}"
    # The class says what is wrong with all of them; damage is worse than what may be reached another time.
    kinds = (UnreachableError, MissingChunkError)
    kind = next((k for k in kinds if all(isinstance(error, k) for error in damaged.values())), CorruptError)
    facts = {name: value for name, value in facts.items() if name != "is_transient" or kind is UnreachableError}
    return kind(what, where=first.where, todo=first.todo, **facts)  # type: ignore[arg-type]
