"""``ckstore delete``: drop checkpoints, after asking."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import metrics_of
from ckstore.errors import ConflictError, UsageError
from ckstore.info import Info

if TYPE_CHECKING:
    from ckstore.api import Store

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("time (local)"),
    Column("state", is_number=True),
    Column("metrics", worth=0, is_elastic=True),
    Column("tags", worth=1, is_elastic=True),
)


def run(
    path: StorePath,
    refs: Annotated[
        list[str],
        typer.Argument(metavar="REF...", help="What to delete: a step means every entry of that step, seq:N just one."),
    ],
    run: Run = "main",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Delete checkpoints, after asking.

    What would go is shown first. Tagged checkpoints are refused. Nothing is deleted unless every REF is found and
    free of tags. `ckstore gc` frees their disk space.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        doomed = _doomed(store, refs)
        if not yes:
            _ask(doomed, run, as_json=as_json)
        for info in doomed:
            store.delete(f"seq:{info.seq}")
    if as_json:
        output.print_json({"run": run, "deleted": [{"seq": info.seq, "step": info.step} for info in doomed]})
        return
    plural = "" if len(doomed) == 1 else "s"
    output.say(
        f"Deleted {len(doomed)} checkpoint{plural}. `ckstore gc` frees their disk space; `undelete` brings them back."
    )


def _doomed(store: Store, refs: list[str]) -> list[Info]:
    """Return what the references mean, each entry once, and refuse tagged ones before anything goes."""
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


def _ask(doomed: list[Info], run: str, *, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise UsageError("nobody is there to confirm; nothing was deleted", todo="say --yes if you mean it")
    rows = [
        [
            str(info.seq),
            str(info.step),
            output.local_time(info.time_ns),
            output.size(info.bytes_state),
            metrics_of(info) or NOTHING,
            ", ".join(info.tags) or NOTHING,
        ]
        for info in doomed
    ]
    output.print_table(_COLUMNS, rows, title=f"to be deleted from run {run}")
    if not typer.confirm(f"Delete {'this checkpoint' if len(rows) == 1 else f'these {len(rows)} checkpoints'}?"):
        output.say("Nothing was deleted.")
        raise typer.Exit(1)
