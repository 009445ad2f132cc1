"""``ckstore diff``: how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Only, Run, Shared, StorePath, opened
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import json_of
from ckstore.diff import Diff, TensorDiff

_TENSORS = (
    Column("path", is_elastic=True),
    Column("status"),
    Column("dtype", worth=2),
    Column("shape", worth=1),
    Column("changed", is_number=True, worth=3),
    Column("relative", is_number=True),
    Column("max abs", is_number=True),
)
_VALUES = (Column("path", is_elastic=True), Column("status"), Column("before"), Column("after"))
ROWS_ON_TERMINAL = 50


def run(
    path: StorePath,
    first: Annotated[str, typer.Argument(metavar="A", help="Which checkpoint to compare with; see `ckstore show`.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Which checkpoint to compare.")] = "latest",
    run: Run = "main",
    only: Only = None,
    show_all: Annotated[bool, typer.Option("--all", help="Tensors that are equal, too.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, metavar="N",
            help="Show the first N rows; 0: all. [default: 50 on a terminal, all otherwise]",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:  # fmt: skip
    """Show how checkpoint B differs from A.

    Bits are compared; what both store as the same chunks is not read.

    \b
    changed   share of the elements whose bits differ
    relative  RMS of B - A in the RMS of A
    max abs   greatest difference of an element
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        output.progress("comparing") as on_progress,
    ):
        found = store.diff(first, second, only=only, on_progress=on_progress)
    if as_json:
        output.print_json(_json_of(found))
        return
    if limit is None and output.is_terminal():
        limit = ROWS_ON_TERMINAL
    _print(found, limit or None, show_all=show_all)


def _print(found: Diff, limit: int | None, *, show_all: bool) -> None:
    rows = [row for row in found.tensors if show_all or row.status != "equal"]
    if rows:
        output.print_table(_TENSORS, [_cells(row) for row in rows[:limit]], title="tensors")
        if limit is not None and limit < len(rows):
            output.say(f"... and {len(rows) - limit} more; --limit 0 shows all")
    if found.values:
        cells = [[row.path, row.status, row.before or NOTHING, row.after or NOTHING] for row in found.values[:limit]]
        output.print_table(_VALUES, cells, title="values")
        if limit is not None and limit < len(found.values):
            output.say(f"... and {len(found.values) - limit} more; --limit 0 shows all")
    counts: dict[str, int] = {}
    for row in found.tensors:
        counts[row.status] = counts.get(row.status, 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    output.say(
        f"step {found.first.step} (seq {found.first.seq}, {found.first.fidelity}) -> "
        f"step {found.second.step} (seq {found.second.seq}, {found.second.fidelity})"
    )
    output.say(f"tensors: {told}; values: {len(found.values)} of {found.value_count} differ")
    if found.is_equal:
        output.say("The two are equal, bit for bit.")


def _cells(row: TensorDiff) -> list[str]:
    share = row.changed_count / row.elements if row.elements else 0.0
    return [
        row.path or "(the state itself)",
        row.status,
        row.dtype or "bytes",
        "x".join(str(length) for length in row.shape) or "scalar",
        f"{share:.1%}" if row.status in ("equal", "changed") else NOTHING,
        NOTHING if row.relative is None else f"{row.relative:.3g}",
        NOTHING if row.max_abs is None else f"{row.max_abs:.3g}",
    ]


def _json_of(found: Diff) -> dict[str, Any]:
    return {
        "first": json_of(found.first),
        "second": json_of(found.second),
        "is_equal": found.is_equal,
        "tensors": [_fields(row) for row in found.tensors],
        "values": [_fields(row) for row in found.values],
        "value_count": found.value_count,
        "bytes_read": found.bytes_read,
    }


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}
