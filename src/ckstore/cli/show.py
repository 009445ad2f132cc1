"""``ckstore show``: show the contents of one checkpoint, read from its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.render import (
    NOTHING,
    WHOLE_STATE,
    Column,
    Table,
    base_facts,
    bits,
    json_of,
    json_of_coding,
    json_of_info,
    metrics_of,
    name_of,
    ratio,
    shape,
    size,
    three_digits,
)
from ckstore.store.refs import describe_best

if TYPE_CHECKING:
    from ckstore.ops.inspect.contents import Contents
    from ckstore.ops.inspect.stats import Coding
    from ckstore.results import Info


_TENSORS = (
    Column("path", lambda row: row.path or WHOLE_STATE, is_elastic=True),
    Column("dtype", lambda row: row.dtype or row.library),
    Column("shape", "shape", shape),
    Column("bytes", "nbytes", size, is_number=True),
    Column("stored", "stored_nbytes", size, is_number=True, worth=1),
    Column("shares memory with", "shares_with", worth=0, is_elastic=True),
)
_GROUPS = Table(
    Column("group", lambda row: row.key or WHOLE_STATE, is_elastic=True),
    Column("tensors", "tensor_count", is_number=True),
    Column("values", "value_count", is_number=True),
    Column("bytes", "nbytes", size, is_number=True),
    Column("stored", "stored_nbytes", size, is_number=True),
    Column("ratio", lambda row: ratio(row.nbytes, row.stored_nbytes), is_number=True),
)
_LOSSES = Table(
    Column("path", lambda row: row.path or WHOLE_STATE, is_elastic=True),
    Column("as", "role"),
    Column("method"),
    Column("bits", "bits", bits, is_number=True),
    Column("rms error", "rel_rms", three_digits, is_number=True),
    Column("max error", "max_abs", three_digits, is_number=True, worth=2),
    Column("kept", "kept", "{:.1%}".format, is_number=True, worth=1),
    Column("hops", is_number=True, worth=0),
    Column("next step", "spike", three_digits, is_number=True, worth=3),
)
_PACKS = Table(
    Column("pack", "pack_id"),
    Column("size", "nbytes", size, is_number=True),
    Column("used", "used_nbytes", size, is_number=True),
    Column("frames", "frame_count", is_number=True, worth=1),
    Column("tier", worth=0),
)
_CODING = Table(
    Column("path", lambda row: row.path or WHOLE_STATE, is_elastic=True),
    Column("dtype", worth=2),
    Column("mode"),
    Column("codecs", "steps", worth=3, is_elastic=True),
    Column("depth", is_number=True, worth=1),
    Column("stored", "stored_bits", bits, is_number=True),
    Column("full", "full_bits", bits, is_number=True, worth=6),
    Column("previous", "previous_bits", bits, is_number=True, worth=5),
    Column("keyframe", "keyframe_bits", bits, is_number=True, worth=4),
)


def show(
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
        bool, typer.Option("--codec", help="Show how each tensor is coded, and the estimates behind it.")
    ] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:  # fmt: skip
    """Show the contents of one checkpoint; no tensor is read.

    \b
    stored     bytes on disk; "-": the tensor shares a stored chunk with others
    used       bytes of a pack that this checkpoint needs
    rms error  of a tensor stored with a loss, relative to the RMS of its values
    kept       share of elements not quantized to zero; 100% with method outer
    hops       lossy checkpoints since the tensor was exact
    next step  largest update that Adam could make next, in learning rates

    \b
    With --codec, in bits per element:
    stored    on disk
    full      estimate without a base
    previous  estimate as a difference from the previous checkpoint
    keyframe  estimate as a difference from the last keyframe
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if codec:
            _print_coding(store.coding(ref), ref, limit, as_json=as_json)
            return
        contents = store.contents(ref)
    if as_json:
        render.print_json(_json_of(contents))
        return
    chosen = [("chosen as", words)] if (words := describe_best(ref)) else []
    render.print_facts([*chosen, *_facts(contents.info, contents.base_nbytes)])
    _print_tables(contents, render.row_limit(limit))


def _facts(info: Info, base_nbytes: int) -> list[tuple[str, str]]:
    own_nbytes = info.bytes_stored - base_nbytes
    facts = [
        ("run", info.run),
        ("step", str(info.step)),
        ("seq", str(info.seq)),
        ("id", info.checkpoint_id),
        ("time", f"{render.zoned_time(info.time_ns)} ({render.age(info.time_ns)} ago)"),
        ("parent", NOTHING if info.parent is None else f"seq {info.parent}"),
        ("tags", ", ".join(info.tags) or NOTHING),
        ("metrics", metrics_of(info.metrics)),
        ("fidelity", info.fidelity),
        ("state", f"{render.size(info.bytes_state)}; tensors: {info.tensor_count}, chunks: {info.chunk_count}"),
        ("stored", f"{render.size(own_nbytes)} of its own chunks ({render.compared(own_nbytes, info.bytes_state)})"),
        ("bases", f"{render.size(base_nbytes)} of chunks of other checkpoints" if base_nbytes else NOTHING),
        ("restore", f"reads {render.size(info.bytes_stored)}, bases included"),
        ("written", f"{render.size(info.bytes_written)}; chunks: {info.chunks_new} new, {info.chunks_reused} reused"),
        ("depth", str(info.depth_max)),
        ("tiers", ", ".join(info.tiers) or NOTHING),
    ]
    if info.origin_id is not None:
        facts.append(("made from", f"id {info.origin_id}"))
    if info.is_archival:
        facts.append(("archival", "yes: restored from the trash, skipped by latest"))
    return facts


def _print_tables(contents: Contents, limit: int | None) -> None:
    has_shared = any(row.shares_with is not None for row in contents.tensors)
    tensors = Table(*(_TENSORS if has_shared else _TENSORS[:-1]))
    if contents.groups:
        render.say("")
        _GROUPS.print(contents.groups, title="groups")
    if contents.tensors:
        render.say("")
        tensors.print(contents.tensors, title="tensors", limit=limit)
    if contents.losses:
        render.say("")
        _LOSSES.print(contents.losses, title="stored with a loss", limit=limit)
    render.say("")
    if contents.packs:
        _PACKS.print(contents.packs, title="packs")


def _print_coding(coding: Coding, ref: str, limit: int | None, *, as_json: bool) -> None:
    if as_json:
        render.print_json(json_of_coding(coding))
        return
    info = coding.info
    render.print_facts([("checkpoint", f"{name_of(info, ref)} of run {info.run}"), *base_facts(coding)])
    if coding.tensors:
        render.say("")
        _CODING.print(coding.tensors, title="tensors, in bits per element", limit=render.row_limit(limit))


def _json_of(contents: Contents) -> dict[str, Any]:
    return {**json_of_info(contents.info), **json_of(contents, "groups", "tensors", "packs", "base_nbytes", "losses")}
