"""``ckstore show``: what one checkpoint holds, as its manifest says."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.coded import ROWS_ON_TERMINAL, show_coding
from ckstore.cli.options import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import json_of, metrics_of
from ckstore.contents import Contents, LossRow, TensorRow
from ckstore.info import Info
from ckstore.store.references import words_of

_TENSORS = (
    Column("path", is_elastic=True),
    Column("dtype"),
    Column("shape"),
    Column("bytes", is_number=True),
    Column("stored", is_number=True, worth=1),
    Column("shares memory with", worth=0, is_elastic=True),
)
_GROUPS = (
    Column("group", is_elastic=True),
    Column("tensors", is_number=True),
    Column("values", is_number=True),
    Column("bytes", is_number=True),
    Column("stored", is_number=True),
    Column("ratio", is_number=True),
)
_LOSSES = (
    Column("path", is_elastic=True),
    Column("as"),
    Column("method"),
    Column("bits", is_number=True),
    Column("rms error", is_number=True),
    Column("max error", is_number=True, worth=2),
    Column("kept", is_number=True, worth=1),
    Column("hops", is_number=True, worth=0),
    Column("next step", is_number=True, worth=3),
)
_PACKS = (
    Column("pack"),
    Column("size", is_number=True),
    Column("used", is_number=True),
    Column("frames", is_number=True, worth=1),
    Column("tier", worth=0),
)


def run(
    path: StorePath,
    ref: Ref = "latest",
    run: Run = "main",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, metavar="N",
            help="Show the first N tensors; 0: all. [default: 50 on a terminal, all otherwise]",
        ),
    ] = None,
    codec: Annotated[
        bool, typer.Option("--codec", help="How each tensor is coded, and why: what the samples of it promised.")
    ] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:  # fmt: skip
    """Show what one checkpoint holds; no tensor is read.

    \b
    stored     bytes on disk; "-" where a tensor shares a stored chunk with others
    used       how much of a pack this checkpoint needs
    rms error  of a tensor that was stored with a loss, in the RMS of its values
    kept       elements that were not quantized to zero; all of outer products
    hops       checkpoints with a loss since the tensor was exact
    next step  the largest that Adam could make from here, in learning rates

    \b
    With --codec, in bits per element:
    stored    on disk
    full      estimate: coded whole
    previous  estimate: as the difference from the checkpoint before it
    keyframe  estimate: as the difference from the last keyframe
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if codec:
            show_coding(store.coding(ref), ref, limit, as_json=as_json)
            return
        contents = store.contents(ref)
    if as_json:
        output.print_json(_json_of(contents))
        return
    if limit is None and output.is_terminal():
        limit = ROWS_ON_TERMINAL
    chosen = [("chosen as", words)] if (words := words_of(ref)) else []
    output.print_facts([*chosen, *_facts(contents.info, contents.base_nbytes)])
    _print_groups(contents)
    _print_tensors(contents, limit or len(contents.tensors))
    _print_losses(contents, limit or len(contents.losses))
    output.say("")
    packs = [
        [pack.pack_id, output.size(pack.nbytes), output.size(pack.used_nbytes), str(pack.frame_count), pack.tier]
        for pack in contents.packs
    ]
    if packs:
        output.print_table(_PACKS, packs, title="packs")


def _facts(info: Info, base_nbytes: int) -> list[tuple[str, str]]:
    own_nbytes = info.bytes_stored - base_nbytes
    facts = [
        ("run", info.run),
        ("step", str(info.step)),
        ("seq", str(info.seq)),
        ("id", info.checkpoint_id),
        ("time", f"{output.zoned_time(info.time_ns)} ({output.age(info.time_ns)} ago)"),
        ("parent", NOTHING if info.parent is None else f"seq {info.parent}"),
        ("tags", ", ".join(info.tags) or NOTHING),
        ("metrics", metrics_of(info) or NOTHING),
        ("fidelity", info.fidelity),
        ("state", f"{output.size(info.bytes_state)}; tensors: {info.tensor_count}, chunks: {info.chunk_count}"),
        ("stored", f"{output.size(own_nbytes)} of its own chunks ({output.compared(own_nbytes, info.bytes_state)})"),
        ("bases", f"{output.size(base_nbytes)} of chunks of other checkpoints" if base_nbytes else NOTHING),
        ("restore", f"reads {output.size(info.bytes_stored)}, bases included"),
        ("written", f"{output.size(info.bytes_written)}; chunks: {info.chunks_new} new, {info.chunks_reused} reused"),
        ("depth", str(info.depth_max)),
        ("lies in", ", ".join(info.tiers) or NOTHING),
    ]
    if info.origin_id is not None:
        facts.append(("made from", f"id {info.origin_id}"))
    if info.is_archival:
        facts.append(("archival", "yes: brought back from the trash, skipped by latest"))
    return facts


def _print_groups(contents: Contents) -> None:
    rows = [
        [
            group.key or "(the state itself)",
            str(group.tensor_count),
            str(group.value_count),
            output.size(group.nbytes),
            output.size(group.stored_nbytes),
            output.ratio(group.nbytes, group.stored_nbytes),
        ]
        for group in contents.groups
    ]
    if rows:
        output.say("")
        output.print_table(_GROUPS, rows, title="groups")


def _print_tensors(contents: Contents, limit: int) -> None:
    if not contents.tensors:
        return
    shown = contents.tensors[:limit]
    columns = _TENSORS if any(row.shares_with is not None for row in contents.tensors) else _TENSORS[:-1]
    output.say("")
    output.print_table(columns, [_cells(row)[: len(columns)] for row in shown], title="tensors")
    if len(shown) < len(contents.tensors):
        output.say(f"... and {len(contents.tensors) - len(shown)} more; --limit 0 shows all")


def _print_losses(contents: Contents, limit: int) -> None:
    if not contents.losses:
        return
    output.say("")
    output.print_table(_LOSSES, [_loss_cells(row) for row in contents.losses[:limit]], title="stored with a loss")
    if limit < len(contents.losses):
        output.say(f"... and {len(contents.losses) - limit} more; --limit 0 shows all")


def _loss_cells(row: LossRow) -> list[str]:
    return [
        row.path or "(the state itself)",
        row.role,
        row.method,
        f"{row.bits:.2f}",
        f"{row.rel_rms:.3g}",
        f"{row.max_abs:.3g}",
        f"{row.kept:.1%}",
        str(row.hops),
        NOTHING if row.spike is None else f"{row.spike:.3g}",
    ]


def _cells(row: TensorRow) -> list[str]:
    return [
        row.path or "(the state itself)",
        row.dtype or row.library,
        "x".join(str(length) for length in row.shape) or "scalar",
        output.size(row.nbytes),
        output.size(row.stored_nbytes),
        NOTHING if row.shares_with is None else row.shares_with,
    ]


def _json_of(contents: Contents) -> dict[str, Any]:
    return {
        **json_of(contents.info),
        "groups": [_fields(group) for group in contents.groups],
        "tensors": [_fields(tensor) for tensor in contents.tensors],
        "packs": [_fields(pack) for pack in contents.packs],
        "base_nbytes": contents.base_nbytes,
        "losses": [_fields(loss) for loss in contents.losses],
    }


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}
