"""What commands print: tables and sentences for people, JSON for programs.

Invariants:
- Unprintable characters in text from a store are replaced: no colours, no cursor movements, no second line.
- rich is imported only if stdout is a terminal. Piped output is plain text, one row per line, and complete.
- numpy, torch, typer and dataclasses are not imported, so `ckstore ls` starts without them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import contextmanager

from ckstore import display
from ckstore.clock import SYSTEM_CLOCK, local_text
from ckstore.errors import counted

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, Literal

    from ckstore.ops.inspect.stats import Coding
    from ckstore.results import Info

    Advance = Callable[[int, int], None]
    """Called with the amount done and the total amount."""


_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))
_BASES = {
    "previous": "the previous",
    "keyframe": "the keyframe",
    "mixed": "the previous for some tensors, the keyframe for others",
}
NOTHING = "-"
WHOLE_STATE = "(the state itself)"
"""Shown in place of an empty path."""
ROWS_ON_TERMINAL = 50
"""Rows of tensors on a terminal without --limit."""
GAP = 2
ELASTIC_MIN = 16
"""Minimal width of an elastic column, in characters."""


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def row_limit(limit: int | None) -> int | None:
    """Return how many rows of tensors to print; None for all."""
    return ROWS_ON_TERMINAL if limit is None and is_terminal() else limit or None


def say(text: str) -> None:
    """Print a line for people."""
    sys.stdout.write(_writable(one_line(text)) + "\n")


def json_of(record: Any, *names: str) -> dict[str, Any]:
    """Return attributes of a record as a JSON object; without names, all fields of a dataclass or named tuple."""
    return {name: getattr(record, name) for name in names or _fields_of(record)}


def _fields_of(record: Any) -> Sequence[str]:
    if isinstance(record, tuple):
        return tuple(record._fields)  # type: ignore[attr-defined]
    import dataclasses

    return [field.name for field in dataclasses.fields(record)]


def print_json(content: Any) -> None:
    """Print one JSON document.

    Dataclasses become objects, and bytes become hexadecimal text. Numbers that JSON lacks become strings.
    """
    import json

    # Only people need indentation, and it makes json use its slow Python encoder.
    indent = 2 if is_terminal() else None
    sys.stdout.write(json.dumps(_jsonable(content), indent=indent, allow_nan=False) + "\n")


def _jsonable(content: Any) -> Any:
    if content is None or isinstance(content, (str, int)):
        return content
    if isinstance(content, float) and content - content != 0:
        # It is infinite, or not a number.
        return str(content)
    if hasattr(content, "__dataclass_fields__"):
        content = json_of(content)
    if isinstance(content, Mapping):
        return {str(key): _jsonable(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_jsonable(value) for value in content]
    return content.hex() if isinstance(content, bytes) else content


def text(value: Any) -> str:
    """Return a value as text, and a sequence as a comma-separated list."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value) or NOTHING
    return str(value)


def size(nbytes: int | None) -> str:
    """Return a size with three digits: ``1.25 GiB``."""
    return NOTHING if nbytes is None else display.size(nbytes)


def rate(nbytes: int, seconds: float) -> str:
    """Return a rate: ``1.25 GiB/s``."""
    return f"{size(int(nbytes / max(seconds, 1e-9)))}/s"


def ratio(large: int, small: int) -> str:
    """Return the ratio of two sizes: ``3.1x``."""
    return f"{large / small:.{2 if large < 9.995 * small else 0}f}x" if small else NOTHING


def compared(nbytes: int, state_nbytes: int) -> str:
    """Return how a size compares with that of the state: ``1.35x smaller than the state``."""
    if nbytes == state_nbytes or not nbytes or not state_nbytes:
        return "as large as the state" if nbytes == state_nbytes else NOTHING
    is_smaller = nbytes < state_nbytes
    times = ratio(state_nbytes, nbytes) if is_smaller else ratio(nbytes, state_nbytes)
    return f"{times} {'smaller' if is_smaller else 'larger'} than the state"


def zoned_time(time_ns: int) -> str:
    """Return a local time with its zone."""
    from datetime import datetime

    try:
        return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"


def iso_time(time_ns: int) -> str | None:
    """Return a time in UTC for programs, or None if it is beyond the calendar."""
    from datetime import datetime, timezone

    try:
        return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def age(time_ns: int) -> str:
    """Return how long ago a time was: ``5 min``."""
    seconds = (SYSTEM_CLOCK.now_ns() - time_ns) / 1e9
    if seconds < 0:
        return "future"
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return f"{int(seconds)} s"


def bits(value: float) -> str:
    """Return bits per element: ``26.56``."""
    return f"{value:.2f}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.3g}"


def shape(lengths: Sequence[int]) -> str:
    """Return the shape of a tensor: ``260x300``."""
    return "x".join(str(length) for length in lengths) or "scalar"


local_time = local_text
"""Returns a time in the time zone of this machine: ``2026-11-29 01:10:02``."""
count = counted
"""Returns a number of things: ``1 pack``, ``2 packs``."""
duration = display.duration
"""Returns a duration: ``0.31 s``, ``42 s``, ``3 min 20 s``."""
one_line = display.one_line
"""Returns a text without characters that could control a terminal or break a line."""


def _writable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class Column:
    """A column of a table.

    Args:
        name: Its heading.
        value: Attribute of a record (dots allowed), or function of it. Default: the attribute ``name``.
        show: Turns the value into text. None is shown as NOTHING.
        is_number: Align to the right.
        worth: On a narrow terminal, columns with the lowest worth are dropped first; None: never.
        is_elastic: May be shortened with an ellipsis.
    """

    def __init__(
        self,
        name: str,
        value: str | Callable[[Any], Any] = "",
        show: Callable[[Any], str] = text,
        *,
        is_number: bool = False,
        worth: int | None = None,
        is_elastic: bool = False,
    ) -> None:
        self.name = name
        self.value = value
        self.show = show
        self.is_number = is_number
        self.worth = worth
        self.is_elastic = is_elastic

    def cell(self, record: Any) -> str:
        """Return the cell of a record as one printable line."""
        value = record
        if callable(self.value):
            value = self.value(record)
        else:
            for name in (self.value or self.name).split("."):
                value = None if value is None else getattr(value, name)
        return NOTHING if value is None else one_line(self.show(value))


SEQ = Column("seq", is_number=True)
STEP = Column("step", is_number=True)


class Table:
    """Columns that are filled from records, one row each."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def print(self, records: Sequence[Any], *, title: str = "", limit: int | None = None) -> None:
        """Print the first ``limit`` records (None: all), and how many more there are.

        On a terminal the table is drawn to fit. Otherwise it is plain text, one row per line.
        """
        rows = [[column.cell(record) for column in self.columns] for record in records[:limit]]
        if is_terminal():
            self._draw(rows, title)
        else:
            self._write(rows, title)
        if len(rows) < len(records):
            say(f"... and {len(records) - len(rows)} more; --limit 0 shows all")

    def _write(self, rows: Sequence[Sequence[str]], title: str) -> None:
        if title:
            say(title)
        table = [[column.name for column in self.columns], *rows]
        widths = [max(len(row[index]) for row in table) for index in range(len(self.columns))]
        for row in table:
            cells = [
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for column, cell, width in zip(self.columns, row, widths, strict=True)
            ]
            sys.stdout.write(_writable("  ".join(cells).rstrip()) + "\n")

    def _draw(self, rows: Sequence[Sequence[str]], title: str) -> None:
        import shutil

        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        columns = self.columns
        screen = shutil.get_terminal_size().columns
        needs = [
            max(cell_len(column.name), *(cell_len(row[index]) for row in rows), 1)
            for index, column in enumerate(columns)
        ]
        is_empty = [all(row[index] == NOTHING for row in rows) for index in range(len(columns))]
        widths = fit(columns, needs, is_empty, screen)
        # One space of padding and one of the box add up to GAP, which fit assumes.
        table = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left"
        )
        if title:
            table.title = Text(one_line(title), "bold")
        for index, width in widths.items():
            justify: Literal["left", "right"] = "right" if columns[index].is_number else "left"
            table.add_column(Text(columns[index].name), justify=justify, no_wrap=True, overflow="ellipsis", width=width)
        for row in rows:
            table.add_row(*(Text(row[index]) for index in widths))
        console = Console(width=max(screen, 20), highlight=False, emoji=False)
        console.print(table)
        left_out = [column.name for index, column in enumerate(columns) if index not in widths and not is_empty[index]]
        if left_out:
            console.print(Text(f"columns not shown (terminal too narrow): {', '.join(left_out)}", "dim"))


def fit(columns: Sequence[Column], needs: Sequence[int], is_empty: Sequence[bool], screen: int) -> dict[int, int]:
    """Return the columns to show and their widths, so that the table fits the screen.

    Empty columns are dropped first, then those with the lowest worth. Elastic columns that are still too wide are cut.

    Args:
        columns: The columns.
        needs: Width that each column needs.
        is_empty: Whether a column has no content.
        screen: Width of the screen, in characters.
    """
    shown = list(range(len(columns)))
    least = [min(need, ELASTIC_MIN) if columns[index].is_elastic else need for index, need in enumerate(needs)]
    while sum(least[index] + GAP for index in shown) - GAP > screen:
        droppable = [
            (-1 if is_empty[index] else worth, index) for index in shown if (worth := columns[index].worth) is not None
        ]
        if not droppable:
            break
        shown.remove(min(droppable)[1])
    spare = screen + GAP - sum(least[index] + GAP for index in shown)
    widths = {}
    for index in shown:
        more = max(0, min(needs[index] - least[index], spare))
        widths[index] = least[index] + more
        spare -= more
    return widths


def json_of_info(info: Info) -> dict[str, Any]:
    """Return a checkpoint for programs: every field of Info, and its time as text."""
    return {**json_of(info), "time": iso_time(info.time_ns)}


def json_of_coding(coding: Coding) -> dict[str, Any]:
    """Return how a checkpoint is coded, for programs."""
    return {
        **json_of_info(coding.info),
        "base": coding.base or None,
        **json_of(coding, "base_seq", "keyframe_seq", "reason"),
        "tensors": [{**json_of(row), "stored_bits": row.stored_bits} for row in coding.tensors],
    }


def name_of(info: Info, ref: str | None = None) -> str:
    """Return the name of a checkpoint, and for `best:` why it is the best: ``step 300 (seq 2), the lowest loss``."""
    # Not at module level: importing it takes longer than listing a store.
    from ckstore.store.refs import describe_best

    words = "" if ref is None else describe_best(ref)
    which = f"seq {info.seq}" if info.form == "whole" else info.form
    return f"step {info.step} ({which}){f', {words}' if words else ''}"


def metrics_of(metrics: Mapping[str, float]) -> str:
    """Return all metrics in one cell."""
    return display.metrics_text(metrics) or NOTHING


def base_facts(coding: Coding) -> list[tuple[str, str]]:
    """Return the base of a checkpoint, and why it was chosen."""
    if not coding.base:
        return [("base", NOTHING), ("why", "its manifest does not say, because there was no choice")]
    is_keyframe = coding.base_seq is None
    base = (
        "none: it is a keyframe" if is_keyframe else f"seq {coding.base_seq} ({_BASES.get(coding.base, coding.base)})"
    )
    facts = [("base", base), ("why", coding.reason)]
    if not is_keyframe and coding.keyframe_seq != coding.base_seq:
        facts.insert(1, ("keyframe", f"seq {coding.keyframe_seq}"))
    return facts


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print pairs of name and value, one per line."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        say(f"{name.ljust(width)}  {value}")


@contextmanager
def progress(label: str) -> Iterator[Advance | None]:
    """Draw a progress bar on stderr during the block; yield None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
