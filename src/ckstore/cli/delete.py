"""``ckstore delete``: delete checkpoints, after asking."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.render import SEQ, STEP, Column, Table, count, json_of, local_time, metrics_of, size
from ckstore.errors import ConflictError, UsageError
from ckstore.results import Info

if TYPE_CHECKING:
    from ckstore.api import Store


_TABLE = Table(
    SEQ,
    STEP,
    Column("time (local)", "time_ns", local_time),
    Column("state", "bytes_state", size, is_number=True),
    Column("metrics", "metrics", metrics_of, worth=0, is_elastic=True),
    Column("tags", worth=1, is_elastic=True),
)


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
    render.say(f"Deleted {deleted}. `ckstore gc` frees their disk space; `undelete` brings them back.")


def _chosen(store: Store, refs: list[str]) -> list[Info]:
    """Return the checkpoints that the references name, each once; refuse tagged ones before anything is deleted."""
    entries: dict[int, Info] = {}
    for ref in refs:
        info = store.info(ref)
        entries[info.seq] = info
        if ref.isdigit():
            entries.update({other.seq: other for other in store.log() if other.step == info.step})
    for info in entries.values():
        if info.tags:
            raise ConflictError(
                f"seq {info.seq} (step {info.step}) carries the tag {info.tags[0]!r}; nothing was deleted",
                todo="`ckstore untag` it first if it is to go",
            )
    return [entries[seq] for seq in sorted(entries)]


def _ask(chosen: list[Info], run: str, *, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise UsageError("nobody is there to confirm; nothing was deleted", todo="say --yes if you mean it")
    _TABLE.print(chosen, title=f"to be deleted from run {run}")
    if not typer.confirm(f"Delete {'this checkpoint' if len(chosen) == 1 else f'these {len(chosen)} checkpoints'}?"):
        render.say("Nothing was deleted.")
        raise typer.Exit(1)
