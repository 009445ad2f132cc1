"""A checkpoint in words and in JSON, as several commands show it."""

from __future__ import annotations

from typing import Any

from ckstore.cli import output
from ckstore.info import Info
from ckstore.store.references import words_of


def json_of(info: Info) -> dict[str, Any]:
    """Return a checkpoint for programs: every field of Info, and the time in words."""
    facts = {name: getattr(info, name) for name in Info.__slots__}
    facts["time"] = output.iso_time(info.time_ns)
    return facts


def name_of(info: Info, ref: str | None = None) -> str:
    """Return a checkpoint for people, and which value made it the best: ``step 300 (seq 2), the lowest loss``."""
    words = "" if ref is None else words_of(ref)
    return f"step {info.step} (seq {info.seq}){f', {words}' if words else ''}"


def metrics_of(info: Info) -> str:
    """Return all metrics in one cell."""
    return " ".join(f"{name}={output.number(value)}" for name, value in sorted(info.metrics.items()))
