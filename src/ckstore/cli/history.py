"""Commands that change the history of a run: ``tag``, ``untag``, ``delete`` and ``rewind``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, confirm, opened, require_terminal
from ckstore.cli.render import (
    SEQ,
    STEP,
    Column,
    Table,
    count,
    json_of,
    json_of_info,
    local_time,
    metrics_of,
    name_of,
    size,
)
from ckstore.errors import ConflictError
from ckstore.results import Info

if TYPE_CHECKING:
    from ckstore.api import Store


_TO_DELETE = Table(
    SEQ,
    STEP,
    Column("time (local)", "time_ns", local_time),
    Column("state", "bytes_state", size, is_number=True),
    Column("metrics", "metrics", metrics_of, worth=0, is_elastic=True),
    Column("tags", worth=1, is_elastic=True),
)


def tag(
    path: StorePath,
    ref: Ref,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag. An existing tag is moved.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Give a checkpoint a name. Tagged checkpoints are never deleted."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.tag(ref, name)
        info = store.info(name)
    if as_json:
        render.print_json(json_of_info(info))
    else:
        render.say(f"Tagged {name_of(info, ref)} of run {run} as {name}.")


def untag(
    path: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag to remove.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Remove a tag. The checkpoint stays, but is no longer protected by this name."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.untag(name)
    if as_json:
        render.print_json({"run": run, "removed": name})
    else:
        render.say(f"Removed tag {name} from run {run}. The checkpoint stays.")


def delete(
    path: StorePath,
    refs: Annotated[
        list[str],
        typer.Argument(
            metavar="REF...", help="What to delete. A step means every checkpoint of that step, seq:N exactly one."
        ),
    ],
    run: Run = "main",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Delete checkpoints, after asking.

    They are listed first. If a REF is not found, or a checkpoint has a tag, nothing is deleted. `ckstore gc` frees the
    disk space.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        chosen = _chosen(store, refs)
        if not yes:
            _ask(chosen, run, as_json=as_json)
        for info in chosen:
            store.delete(f"seq:{info.seq}")
    if as_json:
        render.print_json({"run": run, "deleted": [json_of(info, "seq", "step") for info in chosen]})
        return
    deleted = count(len(chosen), "checkpoint")
    render.say(f"Deleted {deleted}. `ckstore gc` frees the disk space; until then `ckstore undelete` restores them.")


def _chosen(store: Store, refs: list[str]) -> list[Info]:
    """Return the checkpoints that the references name, each once. Refuse tagged ones before anything is deleted."""
    entries: dict[int, Info] = {}
    for ref in refs:
        info = store.info(ref)
        entries[info.seq] = info
        if ref.isdigit():
            entries.update({other.seq: other for other in store.log() if other.step == info.step})
    for info in entries.values():
        if info.tags:
            raise ConflictError(
                f"seq {info.seq} (step {info.step}) has the tag {info.tags[0]!r}; nothing was deleted",
                todo="remove the tag with `ckstore untag` first",
            )
    return [entries[seq] for seq in sorted(entries)]


def _ask(chosen: list[Info], run: str, *, as_json: bool) -> None:
    require_terminal(unchanged="nothing was deleted", as_json=as_json)
    _TO_DELETE.print(chosen, title=f"to be deleted from run {run}")
    these = "this checkpoint" if len(chosen) == 1 else f"these {len(chosen)} checkpoints"
    confirm(f"Delete {these}?", unchanged="nothing was deleted")


def rewind(
    path: StorePath,
    ref: Ref,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make an older checkpoint the newest again.

    Training then resumes from it. It is published again under a new seq, without copying data. The newer checkpoints
    stay in the history. Refused while a trainer is writing to this run.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        before = store.info(ref)
        info = store.rewind(f"seq:{before.seq}")
    if as_json:
        render.print_json(json_of_info(info))
    else:
        render.say(f"Rewound run {run}: {name_of(before, ref)} is the newest again, as seq {info.seq}.")
