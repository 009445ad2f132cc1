"""``ckstore diff``: show how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Only, Run, Shared, StorePath, opened
from ckstore.cli.render import WHOLE_STATE, Column, Table, json_of, json_of_info, shape, three_digits

if TYPE_CHECKING:
    from ckstore.ops.inspect.diff import Diff, TensorDiff


def _changed_share(row: TensorDiff) -> float | None:
    if row.status not in ("equal", "changed"):
        return None
    return row.changed_count / row.elements if row.elements else 0.0


_TENSORS = Table(
    Column("path", lambda row: row.path or WHOLE_STATE, is_elastic=True),
    Column("status"),
    Column("dtype", lambda row: row.dtype or "bytes", worth=2),
    Column("shape", "shape", shape, worth=1),
    Column("changed", _changed_share, "{:.1%}".format, is_number=True, worth=3),
    Column("relative", "relative", three_digits, is_number=True),
    Column("max abs", "max_abs", three_digits, is_number=True),
)
_VALUES = Table(
    Column("path", is_elastic=True),
    Column("status"),
    Column("before", lambda row: row.before or None),
    Column("after", lambda row: row.after or None),
)


def diff(
    path: StorePath,
    first: Annotated[str, typer.Argument(metavar="A", help="The checkpoint to compare with, as in `ckstore show`.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare.")] = "latest",
    run: Run = "main",
    only: Only = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list tensors that are equal.")] = False,
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

    Bits are compared. Chunks that both checkpoints share are not read.

    \b
    changed   share of the elements whose bits differ
    relative  RMS of B - A, relative to the RMS of A
    max abs   largest difference of an element
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("comparing") as on_progress,
    ):
        found = store.diff(first, second, only=only, on_progress=on_progress)
    if as_json:
        render.print_json(_json_of(found))
    else:
        _print(found, render.row_limit(limit), show_all=show_all)


def _print(found: Diff, limit: int | None, *, show_all: bool) -> None:
    rows = [row for row in found.tensors if show_all or row.status != "equal"]
    if rows:
        _TENSORS.print(rows, title="tensors", limit=limit)
    if found.values:
        _VALUES.print(found.values, title="values", limit=limit)
    counts = Counter(row.status for row in found.tensors)
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"
    render.say(
        f"step {found.first.step} (seq {found.first.seq}, {found.first.fidelity}) -> "
        f"step {found.second.step} (seq {found.second.seq}, {found.second.fidelity})"
    )
    render.say(f"tensors: {statuses}; values: {len(found.values)} of {found.value_count} differ")
    if found.is_equal:
        render.say("The two checkpoints are equal, bit for bit.")


def _json_of(found: Diff) -> dict[str, Any]:
    return {
        "first": json_of_info(found.first),
        "second": json_of_info(found.second),
        **json_of(found, "is_equal", "tensors", "values", "value_count", "bytes_read"),
    }
