"""Which checkpoints of a source were not finished, although their names are those of finished ones.

Only what would become the newest of a history is suspected: training would resume from it. In older ones people delete
optimizers on purpose.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckstore.importing.discover import Found
from ckstore.importing.names import number_of_name, step_of_name

_POINTER_FILES = ("latest", "latest_checkpointed_iteration.txt", "last_checkpoint")
"""What DeepSpeed, Megatron and detectron2 write when a checkpoint is complete: its name, or its step."""

_POINTER_NBYTES_MAX = 4096
_BY_IMPORTING_IT = "import it by its own path if you want it"


def unfinished(source: Path, checkpoints: Sequence[tuple[Found, int]]) -> Iterator[tuple[str, str]]:
    """Yield the names of checkpoints whose save was not finished, and how that is seen.

    Args:
        source: The folder that they are in.
        checkpoints: Each with its step, in any order.
    """
    pointer = _pointer_in(source)
    ordered = sorted(checkpoints, key=lambda each: each[1], reverse=True)
    if len(ordered) < 2:
        return
    if pointer is not None and any(step == pointer[1] for _, step in ordered):
        for found, step in ordered:
            if step > pointer[1]:
                why = f"the file {pointer[0]} names step {pointer[1]}: the save of step {step} was not finished"
                yield found.name, f"{why}; {_BY_IMPORTING_IT}"
        ordered = [each for each in ordered if each[1] <= pointer[1]]
    for index, (found, _) in enumerate(ordered[:-1]):
        before = ordered[index + 1][0]
        keys, wanted = _keys_of(found), _keys_of(before)
        if not keys < wanted or "" in keys | wanted:
            return
        names = ", ".join(sorted(wanted - keys)[:4])
        why = f"it would be the newest, and lacks {names}, which {before.name} has: perhaps its save was not finished"
        yield found.name, f"{why}; {_BY_IMPORTING_IT}"


def _keys_of(found: Found) -> set[str]:
    """Return the keys of the parts; numbers in them may be steps, and are not told apart."""
    keys = {re.sub(r"[0-9]+", "N", part.key) for part in found.parts}
    return keys | ({"trainer_state"} if found.trainer_state is not None else set())


def _pointer_in(source: Path) -> tuple[str, int] | None:
    for name in _POINTER_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (source / name).stat().st_size <= _POINTER_NBYTES_MAX:
                text = (source / name).read_text().strip()
                step = step_of_name(text) if step_of_name(text) is not None else number_of_name(text)
                if step is not None:
                    return name, step
    return None
