"""``ckstore ls``: the checkpoints of a store, newest first; starts without numpy and torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Shared, StorePath, json_of, metrics_of
from ckstore.cli.output import NOTHING, Column
from ckstore.errors import CorruptError
from ckstore.listing import Entry, RunLog, log_of_store

ROWS_ON_TERMINAL = 30

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("time (local)", worth=8),
    Column("age", is_number=True, worth=3),
    Column("state", is_number=True),
    Column("written", is_number=True, worth=7),
    Column("ratio", is_number=True, worth=4),
    Column("new/reused", is_number=True, worth=1),
    Column("metrics", worth=6, is_elastic=True),
    Column("tags", worth=9, is_elastic=True),
    Column("fidelity", worth=0),
    Column("parent", is_number=True, worth=2),
)


def run(
    path: StorePath,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only this run; all runs otherwise.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            metavar="N",
            help="Show the newest N of each run; 0: all. [default: 30 on a terminal, all otherwise]",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """List checkpoints, newest first.

    \b
    state       bytes of all tensors
    written     bytes that this commit added to the disk
    ratio       state / written
    new/reused  chunks written / chunks that were stored already
    parent      the seq that training went on from
    """
    if limit is None and not as_json and output.is_terminal():
        limit = ROWS_ON_TERMINAL
    logs = log_of_store(path, run=run, limit=limit or None, allow_shared_folder=allow_shared_folder)
    if as_json:
        output.print_json({"path": path, "runs": [_json_of(log) for log in logs]})
    elif not logs:
        output.say("No checkpoint yet: nothing was committed to this store.")
    else:
        for number, log in enumerate(logs):
            if number:
                output.say("")
            _print(log)
    damaged = [log.run for log in logs if log.is_damaged]
    if damaged:
        raise CorruptError(
            f"something in run {', '.join(damaged)} cannot be read",
            where=path,
            todo="the list says what; run `ckstore verify` for all damage",
        )


def _json_of(log: RunLog) -> dict[str, Any]:
    entries = [
        {"seq": entry.seq, "step": entry.step, "damage": entry.damage}
        if entry.info is None
        else {**json_of(entry.info), "damage": None}
        for entry in log.entries
    ]
    tags = [{"name": name, "damage": damage} for name, damage in log.damaged_tags]
    return {"run": log.run, "count": log.count, "entries": entries, "damaged_tags": tags}


def _print(log: RunLog) -> None:
    plural = "" if log.count == 1 else "s"
    title = f"run {log.run}: {log.count} checkpoint{plural}"
    if not log.entries:
        output.say(title)
    else:
        output.print_table(_COLUMNS, [_row(entry) for entry in log.entries], title=title)
    missing = log.count - len(log.entries)
    if missing > 0:
        output.say(f"... and {missing} older; --limit 0 shows all")
    for entry in log.entries:
        if entry.info is None:
            output.say(f"DAMAGED seq {entry.seq}: {entry.damage}")
    for name, damage in log.damaged_tags:
        output.say(f"DAMAGED tag {name}: {damage}")


def _row(entry: Entry) -> list[str]:
    info = entry.info
    if info is None:
        return [str(entry.seq), str(entry.step), "DAMAGED", *[NOTHING] * 9]
    fidelity = f"{info.fidelity}, archival" if info.is_archival else info.fidelity
    return [
        str(info.seq),
        str(info.step),
        output.local_time(info.time_ns),
        output.age(info.time_ns),
        output.size(info.bytes_state),
        output.size(info.bytes_written),
        output.ratio(info.bytes_state, info.bytes_written),
        f"{info.chunks_new}/{info.chunks_reused}",
        metrics_of(info) or NOTHING,
        ", ".join(info.tags) or NOTHING,
        fidelity,
        NOTHING if info.parent is None else str(info.parent),
    ]
