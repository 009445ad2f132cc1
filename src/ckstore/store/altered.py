"""Checkpoints that a copy could not take because their packs are not what was committed: all others go first."""

from __future__ import annotations

from collections.abc import Mapping

from ckstore.errors import CorruptError, MissingChunkError
from ckstore.format.layout import ManifestName

_NAMED_MAX = 10


def damaged_error(what_was_not: str, damaged: Mapping[ManifestName, CorruptError], report: object) -> CorruptError:
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
    # Whoever asks for what is missing, and nothing else is wrong, is told by the class that it is missing.
    is_missing = all(isinstance(error, MissingChunkError) for error in damaged.values())
    kind = MissingChunkError if is_missing else CorruptError
    return kind(what, where=first.where, todo=first.todo, **facts)
