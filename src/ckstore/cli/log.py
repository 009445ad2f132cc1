"""What ``ckstore ls`` prints: the entries of runs, newest first; neither numpy nor torch nor typer is needed.

``quick`` takes the plain forms of the command without the parser, whose import alone costs more than reading a
thousand checkpoints. Whatever it does not take, help and mistakes above all, the parser gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckstore.cli import output
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import json_of, metrics_of
from ckstore.errors import BackendError, CorruptError
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
    Column("fidelity", worth=5),
    Column("parent", is_number=True, worth=2),
    Column("lies in", worth=5),
)
_HERE = ("local",)


def quick(arguments: Sequence[str]) -> bool:
    """Do ``ls`` with these arguments if they are of the plain form; otherwise return False."""
    facts: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--json", "--allow-shared-folder"):
            facts["as_json" if argument == "--json" else "allow_shared_folder"] = True
        elif argument in ("--run", "--limit", "-n"):
            value = next(rest, "-")
            if value.startswith("-") or (argument != "--run" and not (value.isascii() and value.isdigit())):
                return False
            facts["run" if argument == "--run" else "limit"] = value if argument == "--run" else int(value)
        elif argument.startswith("-") or not argument or "path" in facts:
            return False
        else:
            facts["path"] = argument
    if "path" not in facts:
        return False
    print_log(**facts)
    return True


def print_log(
    path: str,
    *,
    run: str | None = None,
    limit: int | None = None,
    as_json: bool = False,
    allow_shared_folder: bool = False,
) -> None:
    """Print the newest ``limit`` entries of one run or of all; None: as many as a person wants to see.

    Raises:
        NotFoundError: There is no store, or no such run.
        CorruptError: Something is damaged; the rest was printed.
        BackendError: This user may not read something; the rest was printed.
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
    _raise_what_was_not_read(path, logs)


def _raise_what_was_not_read(path: str, logs: Sequence[RunLog]) -> None:
    damaged = [log.run for log in logs if log.is_damaged]
    if damaged:
        raise CorruptError(
            f"something in run {', '.join(damaged)} is missing or cannot be read",
            where=path,
            todo="the list says what; run `ckstore verify` for all damage",
        )
    refused = [log.run for log in logs if log.is_refused]
    if refused:
        raise BackendError(
            f"something in run {', '.join(refused)} may not be read by this user",
            where=path,
            todo="the list says what; have it given to the store's owner (`chown`)",
            is_refused=True,
        )


def _json_of(log: RunLog) -> dict[str, Any]:
    entries = [
        {"seq": entry.seq, "step": entry.step, "damage": entry.damage or None, "refused": entry.refused or None}
        if entry.info is None
        else {**json_of(entry.info), "damage": None, "refused": None}
        for entry in log.entries
    ]
    tags = [{"name": name, "damage": damage} for name, damage in log.damaged_tags]
    refused = [{"name": name, "refused": why} for name, why in log.refused_tags]
    found = {"entries": entries, "damaged_tags": tags, "refused_tags": refused, "missing": log.missing}
    return {"run": log.run, "count": log.count, **found}


def _print(log: RunLog) -> None:
    plural = "" if log.count == 1 else "s"
    title = f"run {log.run}: {log.count} checkpoint{plural}"
    if not log.entries:
        output.say(title)
    else:
        # Where everything lies here, nobody asks where.
        is_all_here = all(entry.info is None or entry.info.tiers == _HERE for entry in log.entries)
        columns = _COLUMNS[:-1] if is_all_here else _COLUMNS
        output.print_table(columns, [_row(entry)[: len(columns)] for entry in log.entries], title=title)
    missing = log.count - len(log.entries)
    if missing > 0:
        output.say(f"... and {missing} older; --limit 0 shows all")
    for entry in log.entries:
        if entry.damage:
            output.say(f"DAMAGED seq {entry.seq}: {entry.damage}")
        if entry.refused:
            output.say(f"NO ACCESS to seq {entry.seq}: {entry.refused}")
    if log.missing:
        output.say(f"MISSING {log.missing}")
    for name, damage in log.damaged_tags:
        output.say(f"DAMAGED tag {name}: {damage}")
    for name, why in log.refused_tags:
        output.say(f"NO ACCESS to tag {name}: {why}")


def _row(entry: Entry) -> list[str]:
    info = entry.info
    if info is None:
        return [str(entry.seq), str(entry.step), "NO ACCESS" if entry.refused else "DAMAGED", *[NOTHING] * 10]
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
        ", ".join(info.tiers) or NOTHING,
    ]
