"""How a checkpoint is coded, and why, in tables and in JSON: what ``show --codec`` and ``stats`` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckstore.cli import output
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import json_of, name_of

if TYPE_CHECKING:
    from ckstore.coding import Coding, TensorCoding

ROWS_ON_TERMINAL = 50

_BASES = {
    "previous": "the previous",
    "keyframe": "the keyframe",
    "mixed": "the previous for some tensors, what was last stored whole for others",
}

_COLUMNS = (
    Column("path", is_elastic=True),
    Column("dtype", worth=2),
    Column("mode"),
    Column("codecs", worth=3, is_elastic=True),
    Column("depth", is_number=True, worth=1),
    Column("stored", is_number=True),
    Column("full", is_number=True, worth=6),
    Column("previous", is_number=True, worth=5),
    Column("keyframe", is_number=True, worth=4),
)


def bits(value: float | None) -> str:
    """Return bits per element: ``26.56``."""
    return NOTHING if value is None else f"{value:.2f}"


def base_facts(coding: Coding) -> list[tuple[str, str]]:
    """Return what the checkpoint is coded against, and why."""
    if not coding.base:
        return [("base", NOTHING), ("why", "its manifest does not say: nothing was to be chosen")]
    is_keyframe = coding.base_seq is None
    base = (
        "none: it is a keyframe" if is_keyframe else f"seq {coding.base_seq} ({_BASES.get(coding.base, coding.base)})"
    )
    facts = [("base", base), ("why", coding.reason)]
    if not is_keyframe and coding.keyframe_seq != coding.base_seq:
        facts.insert(1, ("keyframe", f"seq {coding.keyframe_seq}"))
    return facts


def show_coding(coding: Coding, ref: str, limit: int | None, *, as_json: bool) -> None:
    """Print how each tensor is coded, with the estimates that decided it."""
    if as_json:
        output.print_json(json_of_coding(coding))
        return
    info = coding.info
    output.print_facts([("checkpoint", f"{name_of(info, ref)} of run {info.run}"), *base_facts(coding)])
    if limit is None and output.is_terminal():
        limit = ROWS_ON_TERMINAL
    shown = coding.tensors[: limit or len(coding.tensors)]
    if shown:
        output.say("")
        output.print_table(_COLUMNS, [_cells(row) for row in shown], title="tensors, in bits per element")
    print_rest(len(coding.tensors) - len(shown))


def print_rest(missing: int) -> None:
    """Say how many rows were left out."""
    if missing > 0:
        output.say(f"... and {missing} more; --limit 0 shows all")


def _cells(row: TensorCoding) -> list[str]:
    estimates = [bits(value) for value in (row.full_bits, row.previous_bits, row.keyframe_bits)]
    return [
        row.path or "(the state itself)",
        row.dtype,
        row.mode,
        ", ".join(row.steps) or NOTHING,
        str(row.depth),
        bits(row.stored_bits),
        *estimates,
    ]


def json_of_coding(coding: Coding) -> dict[str, Any]:
    """Return it for programs."""
    return {
        **json_of(coding.info),
        "base": coding.base or None,
        "base_seq": coding.base_seq,
        "keyframe_seq": coding.keyframe_seq,
        "reason": coding.reason,
        "tensors": [json_of_tensor(row) for row in coding.tensors],
    }


def json_of_tensor(row: TensorCoding) -> dict[str, Any]:
    """Return a tensor for programs."""
    return {**{name: getattr(row, name) for name in type(row).__slots__}, "stored_bits": row.stored_bits}
