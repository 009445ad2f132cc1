"""A state for a file: what ``restore`` and ``export`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckstore.cli import output
from ckstore.cli.options import opened
from ckstore.info import Info


def restored(
    path: str,
    ref: str | None,
    *,
    only: Sequence[str] | None,
    run: str,
    allow_shared_folder: bool,
    fallback: bool = False,
) -> tuple[Any, Info]:
    """Restore a state, with a bar where someone looks; return it and what is known of it."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        with output.progress("restoring") as on_progress:
            state = store.restore(ref, only=only or None, fallback=fallback, on_progress=on_progress)
        info = store.restored
        assert info is not None, "a restore says what it restored"
    return state, info


def origin_of(info: Info) -> dict[str, Any]:
    """Return which checkpoint a file came from, for programs."""
    return {"seq": info.seq, "step": info.step, "checkpoint_id": info.checkpoint_id, "run": info.run}
