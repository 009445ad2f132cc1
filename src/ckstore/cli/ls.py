"""``ckstore ls``: list the checkpoints of a store, newest first, without importing numpy, torch or typer.

`quick` runs the plain forms of the command without the parser, because importing it takes longer than reading a
thousand checkpoints. All other forms, including --help and mistakes, go to the parser. For the same reason, a plain
store is read by ``store.plain_listing``.
"""

from __future__ import annotations

from ckstore.cli import render
from ckstore.cli.render import (
    SEQ,
    STEP,
    Column,
    Table,
    age,
    count,
    json_of,
    json_of_info,
    local_time,
    metrics_of,
    ratio,
    size,
)
from ckstore.errors import BackendError, CorruptError
from ckstore.store.plain_listing import PlainEntry, PlainLog, plain_logs

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ckstore.results import Info
    from ckstore.store.listing import Entry, RunLog
    from ckstore.store.plain_listing import PlainInfo

ROWS_ON_TERMINAL = 30


def _time_or_problem(entry: Entry | PlainEntry) -> str:
    if entry.info is None:
        return "NO ACCESS" if entry.refused else "DAMAGED"
    return local_time(entry.info.time_ns)


def _step_and_points(entry: Entry | PlainEntry) -> str:
    return f"{entry.step} +{len(entry.points)}" if entry.points else str(entry.step)


def _tags(entry: Entry | PlainEntry) -> tuple[str, ...]:
    """Return the tags of a checkpoint, and those of its points with their steps."""
    of_points = (f"{name} ({point.step})" for point in entry.points for name in point.tags)
    return (*(entry.info.tags if entry.info is not None else ()), *of_points)


def _how_stored(info: Info | PlainInfo) -> str:
    return info.fidelity if info.form == "whole" else info.form


_COLUMNS = (
    SEQ,
    Column("step", _step_and_points, is_number=True),
    Column("time (local)", _time_or_problem, worth=8),
    Column("age", "info.time_ns", age, is_number=True, worth=3),
    Column("state", "info.bytes_state", size, is_number=True),
    Column("written", "info.bytes_written", size, is_number=True, worth=7),
    Column("ratio", "info", lambda info: ratio(info.bytes_state, info.bytes_written), is_number=True, worth=4),
    Column("new/reused", "info", lambda info: f"{info.chunks_new}/{info.chunks_reused}", is_number=True, worth=1),
    Column("metrics", "info.metrics", metrics_of, worth=6, is_elastic=True),
    Column("tags", _tags, worth=9, is_elastic=True),
    Column("fidelity", "info", lambda info: f"{_how_stored(info)}{', archival' * info.is_archival}", worth=5),
    Column("parent", "info.parent", is_number=True, worth=2),
    Column("lies in", "info.tiers", worth=5),
)
_LOCAL = ("local",)
_POINTS = Table(
    STEP,
    Column("time (local)", "time_ns", local_time),
    Column("written", "nbytes", size, is_number=True),
    Column("tags"),
)


def quick(arguments: Sequence[str]) -> bool:
    """Run ``ls`` if its arguments have a plain form; otherwise return False."""
    options: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--json", "--allow-shared-folder"):
            options["as_json" if argument == "--json" else "allow_shared_folder"] = True
        elif argument in ("--run", "--limit", "-n"):
            value = next(rest, "-")
            if value.startswith("-") or (argument != "--run" and not (value.isascii() and value.isdigit())):
                return False
            options["run" if argument == "--run" else "limit"] = value if argument == "--run" else int(value)
        elif argument.startswith("-") or not argument or "path" in options:
            return False
        else:
            options["path"] = argument
    if "path" not in options:
        return False
    print_log(**options)
    return True


def print_log(
    path: str,
    *,
    run: str | None = None,
    limit: int | None = None,
    as_json: bool = False,
    points: bool = False,
    allow_shared_folder: bool = False,
) -> None:
    """Print the newest ``limit`` entries of one run or of all, and with ``points`` the points after each.

    Without a limit, a terminal shows ROWS_ON_TERMINAL entries of each run, and a pipe all.

    Raises:
        NotFoundError: There is no store, or no such run.
        CorruptError: Something is damaged. The rest was printed.
        BackendError: This user may not read something. The rest was printed.
    """
    if limit is None and not as_json and render.is_terminal():
        limit = ROWS_ON_TERMINAL
    logs = _logs_of(path, run, limit or None, allow_shared_folder=allow_shared_folder)
    if as_json:
        render.print_json({"path": path, "runs": [_json_of(log) for log in logs]})
    elif not logs:
        render.say("No checkpoint yet: nothing was committed to this store.")
    else:
        for number, log in enumerate(logs):
            if number:
                render.say("")
            _print(log)
            if points:
                _print_points(log)
    _raise_for_unread(path, logs)


def _logs_of(
    path: str, run: str | None, limit: int | None, *, allow_shared_folder: bool
) -> Sequence[RunLog | PlainLog]:
    plain = plain_logs(path, run=run, limit=limit)
    if plain is not None:
        return plain
    # Not at module level: importing these takes longer than listing a plain store.
    from ckstore.cli.warnings import show_warnings
    from ckstore.store.listing import log_of_store

    show_warnings()
    return log_of_store(path, run=run, limit=limit, allow_shared_folder=allow_shared_folder)


def _raise_for_unread(path: str, logs: Sequence[RunLog | PlainLog]) -> None:
    damaged = [log.run for log in logs if log.is_damaged]
    if damaged:
        raise CorruptError(
            f"run {', '.join(damaged)} has missing or damaged entries",
            where=path,
            todo="the list shows them; `ckstore verify` finds all damage",
        )
    refused = [log.run for log in logs if log.is_refused]
    if refused:
        raise BackendError(
            f"run {', '.join(refused)} has entries that this user may not read",
            where=path,
            todo="the list shows them; give the files to the store's owner (`chown`)",
            is_refused=True,
        )


def _json_of(log: RunLog | PlainLog) -> dict[str, Any]:
    return {
        **json_of(log, "run", "count"),
        "entries": [_json_of_entry(entry) for entry in log.entries],
        "damaged_tags": [{"name": name, "damage": damage} for name, damage in log.damaged_tags],
        "refused_tags": [{"name": name, "refused": why} for name, why in log.refused_tags],
        "missing": log.missing,
    }


def _json_of_entry(entry: Entry | PlainEntry) -> dict[str, Any]:
    facts = json_of(entry, "seq", "step") if entry.info is None else json_of_info(entry.info)
    points = [json_of(point) for point in entry.points]
    return {**facts, "damage": entry.damage or None, "refused": entry.refused or None, "points": points}


def _print_points(log: RunLog | PlainLog) -> None:
    for entry in log.entries:
        if entry.points:
            render.say("")
            _POINTS.print(entry.points, title=f"points after step {entry.step} (seq {entry.seq})")


def _print_total(log: RunLog | PlainLog) -> None:
    """Print the sums of a run's table, if it has more than one row to add up."""
    infos = [entry.info for entry in log.entries if entry.info is not None]
    if len(infos) < 2:
        return
    state, written = sum(info.bytes_state for info in infos), sum(info.bytes_written for info in infos)
    of_all = "" if len(infos) == log.count else f" of {log.count}"
    ratios = f", ratio {ratio(state, written)}" if written else ""
    render.say(f"total of {len(infos)}{of_all} checkpoints: state {size(state)}, written {size(written)}{ratios}")


def _print(log: RunLog | PlainLog) -> None:
    title = f"run {log.run}: {count(log.count, 'checkpoint')}"
    if not log.entries:
        render.say(title)
    else:
        # If all checkpoints are local, the column of tiers is useless.
        are_local = all(entry.info is None or entry.info.tiers == _LOCAL for entry in log.entries)
        columns = _COLUMNS[:-1] if are_local else _COLUMNS
        Table(*columns).print(log.entries, title=title)
        _print_total(log)
    missing = log.count - len(log.entries)
    if missing > 0:
        render.say(f"... and {missing} older; --limit 0 shows all")
    for entry in log.entries:
        if entry.damage:
            render.say(f"DAMAGED seq {entry.seq}: {entry.damage}")
        if entry.refused:
            render.say(f"NO ACCESS to seq {entry.seq}: {entry.refused}")
    if log.missing:
        render.say(f"MISSING {log.missing}")
    for name, damage in log.damaged_tags:
        render.say(f"DAMAGED tag {name}: {damage}")
    for name, why in log.refused_tags:
        render.say(f"NO ACCESS to tag {name}: {why}")
