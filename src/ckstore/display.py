"""How values are shown to people: sizes and durations with units, one-line reprs, and tables for notebooks.

Invariants:
- Text from a store, such as tags and metric names, is escaped in HTML, and unprintable characters are replaced.
"""

from __future__ import annotations

from ckstore.errors import counted

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def one_line(text: object) -> str:
    """Return the text without characters that could control a terminal or break a line."""
    line = str(text)
    return line if line.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in line)


def size(nbytes: int) -> str:
    """Return a size with three digits: ``1.25 GiB``."""
    amount, unit = float(nbytes), 0
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    if unit == 0:
        return f"{nbytes} B"
    return f"{amount:.{2 if amount < 9.995 else 1 if amount < 99.95 else 0}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a duration: ``0.31 s``, ``42 s``, ``3 min 20 s``."""
    if seconds < 9.95:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def number(value: float) -> str:
    """Return a metric with five digits."""
    return f"{value:.5g}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return all metrics in one line: ``acc=0.5 loss=0.31``; empty if there are none."""
    return " ".join(f"{name}={number(value)}" for name, value in sorted(metrics.items()))


def changed_fields(record: Any, base: Any = None) -> str:
    """Return the fields of a dataclass that differ from their defaults, or from ``base``: ``a=1, b='x'``."""
    # Not at module level: `ckstore ls` must start quickly, and does not need it.
    import dataclasses

    shown = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if base is not None:
            usual = getattr(base, field.name)
        else:
            usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != usual:
            shown.append(f"{field.name}={value!r}")
    return ", ".join(shown)


def repr_of_changes(record: Any) -> str:
    """Return the repr of a dataclass of settings: only what differs from the defaults."""
    return f"{type(record).__name__}({changed_fields(record)})"


_ITEMS_MAX = 3
_SUMMARY_LENGTH_MAX = 400


def repr_of_summary(record: Any) -> str:
    """Return the repr of a dataclass of results in one line: sizes with units, and long lists as a number of items."""
    # Not at module level: `ckstore ls` must start quickly, and does not need it.
    import dataclasses

    shown = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is None or value == "" or (isinstance(value, _CONTAINERS) and not value):
            continue
        shown.append(f"{field.name}={_short(field.name, value)}")
    text = one_line(", ".join(shown))
    cut = text if len(text) <= _SUMMARY_LENGTH_MAX else f"{text[:_SUMMARY_LENGTH_MAX]}..."
    return f"<ckstore.{type(record).__name__}: {cut}>"


_CONTAINERS = (list, tuple, dict, set, frozenset)


def _short(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes_" in name or name.endswith("nbytes")):
        return size(value)
    if isinstance(value, _CONTAINERS):
        is_short = len(value) <= _ITEMS_MAX and all(isinstance(each, (str, int, float)) for each in value)
        return repr(value) if is_short and not isinstance(value, dict) else counted(len(value), "item")
    return repr(value)


def html_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table for a notebook. Every text is escaped."""
    from html import escape

    def cells(tag: str, texts: Sequence[object]) -> str:
        return "".join(f"<{tag}>{escape(one_line(text))}</{tag}>" for text in texts)

    head = f"<thead><tr>{cells('th', headings)}</tr></thead>" if headings else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><caption>{escape(one_line(title))}</caption>{head}<tbody>{body}</tbody></table>"
