"""Describe checkpoints: ``show``, ``diff`` (two of them) and ``stats`` (sizes, entropy); and ``du``: a whole store."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, Only, PointedPath, PointedRef, Run, Shared, StorePath, followed, opened
from ckstore.cli.render import (
    NOTHING,
    SEQ,
    STEP,
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
from ckstore.errors import CorruptError
from ckstore.store.refs import describe_best

if TYPE_CHECKING:
    from ckstore.format.many_ranks import MeshFacts
    from ckstore.ops.inspect.contents import Contents
    from ckstore.ops.inspect.diff import Diff, TensorDiff
    from ckstore.ops.inspect.stats import Coding, Stats
    from ckstore.ops.inspect.usage import Usage
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
_RANKS = Table(
    Column("rank", lambda row: row[0], is_number=True),
    Column("host", lambda row: row[1].host or None, is_elastic=True),
    Column("bytes", lambda row: row[1].nbytes, size, is_number=True),
    Column("written", lambda row: row[1].written, size, is_number=True),
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
    path: PointedPath,
    ref: PointedRef = None,
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
    written    bytes of packs that a rank wrote; "bytes": of the state it stored
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
    path, run, named = followed(path, run, ref)
    ref = named or "latest"
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if codec:
            _print_coding(store.coding(ref), ref, limit, as_json=as_json)
            return
        contents = store.contents(ref)
    if as_json:
        render.print_json(_json_of_contents(contents))
        return
    chosen = [("chosen as", words)] if (words := describe_best(ref)) else []
    render.print_facts([*chosen, *_facts(contents.info, contents.base_nbytes), *_facts_of_ranks(contents)])
    _print_tables(contents, render.row_limit(limit))


def _facts(info: Info, base_nbytes: int) -> list[tuple[str, str]]:
    own_nbytes = info.bytes_stored - base_nbytes
    facts = [
        ("run", info.run),
        ("step", str(info.step)),
        ("seq", str(info.seq)),
        ("id", info.checkpoint_id),
        *([("form", info.form)] if info.form != "whole" else []),
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


def _facts_of_ranks(contents: Contents) -> list[tuple[str, str]]:
    world = contents.world
    if world is None:
        return []
    hosts = len({rank.host for rank in world.ranks})
    facts = [("ranks", f"{world.size}" + (f" on {hosts} host{'s' if hosts > 1 else ''}" if hosts else ""))]
    if world.meshes:
        facts.append(("meshes", "; ".join(dict.fromkeys(map(_mesh, world.meshes)))))
    return facts


def _mesh(mesh: MeshFacts) -> str:
    """Return the dimensions of a mesh, such as ``dp 2 x tp 4``."""
    names = mesh.names or ("",) * len(mesh.shape)
    return " x ".join(f"{name} {length}".strip() for name, length in zip(names, mesh.shape, strict=False))


def _print_tables(contents: Contents, limit: int | None) -> None:
    has_shared = any(row.shares_with is not None for row in contents.tensors)
    tensors = Table(*(_TENSORS if has_shared else _TENSORS[:-1]))
    if contents.groups:
        render.say("")
        _GROUPS.print(contents.groups, title="groups")
    if contents.tensors:
        render.say("")
        tensors.print(contents.tensors, title="tensors", limit=limit)
    if contents.world is not None and contents.world.ranks:
        render.say("")
        _RANKS.print(list(enumerate(contents.world.ranks)), title="ranks", limit=limit)
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


def _json_of_contents(contents: Contents) -> dict[str, Any]:
    found = {**json_of_info(contents.info), **json_of(contents, "groups", "tensors", "packs", "base_nbytes", "losses")}
    if (world := contents.world) is not None:
        rows = {"meshes": [json_of(mesh) for mesh in world.meshes], "ranks": [json_of(rank) for rank in world.ranks]}
        found["world"] = {"size": world.size, "attempt": world.attempt, **rows}
    return found


def _changed_share(row: TensorDiff) -> float | None:
    if row.status not in ("equal", "changed"):
        return None
    return row.changed_count / row.elements if row.elements else 0.0


_DIFF_TENSORS = Table(
    Column("path", lambda row: row.path or WHOLE_STATE, is_elastic=True),
    Column("status"),
    Column("dtype", lambda row: row.dtype or "bytes", worth=2),
    Column("shape", "shape", shape, worth=1),
    Column("changed", _changed_share, "{:.1%}".format, is_number=True, worth=3),
    Column("relative", "relative", three_digits, is_number=True),
    Column("max abs", "max_abs", three_digits, is_number=True),
)
_DIFF_VALUES = Table(
    Column("path", is_elastic=True),
    Column("status"),
    Column("before", lambda row: row.before or None),
    Column("after", lambda row: row.after or None),
)


def diff(
    path: StorePath,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The checkpoint to compare with, as in `ckstore show`.", autocompletion=completion.refs
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The checkpoint to compare.", autocompletion=completion.refs)
    ] = "latest",
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
        render.print_json(_json_of_diff(found))
    else:
        _print_diff(found, render.row_limit(limit), show_all=show_all)


def _print_diff(found: Diff, limit: int | None, *, show_all: bool) -> None:
    rows = [row for row in found.tensors if show_all or row.status != "equal"]
    if rows:
        _DIFF_TENSORS.print(rows, title="tensors", limit=limit)
    if found.values:
        _DIFF_VALUES.print(found.values, title="values", limit=limit)
    counts = Counter(row.status for row in found.tensors)
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"
    render.say(
        f"step {found.first.step} (seq {found.first.seq}, {found.first.fidelity}) -> "
        f"step {found.second.step} (seq {found.second.seq}, {found.second.fidelity})"
    )
    render.say(f"tensors: {statuses}; values: {len(found.values)} of {found.value_count} differ")
    if found.is_equal:
        render.say("The two checkpoints are equal, bit for bit.")


def _json_of_diff(found: Diff) -> dict[str, Any]:
    return {
        "first": json_of_info(found.first),
        "second": json_of_info(found.second),
        **json_of(found, "is_equal", "tensors", "values", "value_count", "bytes_read"),
    }


_SIZES = (
    Column("elements", "share.elements", is_number=True, worth=1),
    Column("bytes", "share.nbytes", size, is_number=True, worth=3),
    Column("stored", "share.stored_nbytes", size, is_number=True, worth=4),
    Column("bits", "share.stored_bits", bits, is_number=True),
    Column("order-0", "share.bound_bits", bits, is_number=True),
    Column("full", "share.full_bits", bits, is_number=True, worth=5),
)
_STATS_GROUPS = Table(
    Column("group", lambda row: row.key or WHOLE_STATE, is_elastic=True),
    Column("tensors", "tensor_count", is_number=True, worth=2),
    Column("modes", is_elastic=True, worth=6),
    *_SIZES,
)
_STATS_TENSORS = Table(
    Column("path", lambda row: row.coding.path or WHOLE_STATE, is_elastic=True),
    Column("dtype", "coding.dtype", worth=2),
    Column("mode", "coding.mode"),
    *_SIZES,
    Column("delta", "delta_bits", bits, is_number=True, worth=5),
)
_SHARE = ("elements", "nbytes", "stored_nbytes", "stored_bits", "bound_bits", "full_bits")


def stats(
    path: PointedPath,
    ref: PointedRef = None,
    run: Run = "main",
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure every element. [default: a sample of each chunk, at most 16 KiB]")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, metavar="N",
            help="Show the first N tensors; 0: all. [default: 50 on a terminal, all otherwise]",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:  # fmt: skip
    """Show the stored size of tensors and their order-0 entropy.

    Every chunk is read and decoded. In bits per element:

    \b
    bits     as stored
    order-0  entropy of a chunk's byte planes, in the form that needs fewer bits
    full     entropy without a base
    delta    entropy of the difference from the base

    The entropy is for comparison; it is not a lower limit. Runs, repeats and chunks of unlike parts can take fewer
    bits. For a tensor stored with a loss it is the entropy of the restored values, far above the stored bits.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    path, run, named = followed(path, run, ref)
    ref = named or "latest"
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("measuring") as on_progress,
    ):
        found = store.stats(ref, exact=exact, on_progress=on_progress)
    if as_json:
        render.print_json(_json_of_stats(found))
    else:
        _print_stats(found, ref, render.row_limit(limit))


def _print_stats(stats: Stats, ref: str, limit: int | None) -> None:
    info = stats.info
    how = "every element" if stats.is_exact else "samples (see --exact)"
    facts = [("checkpoint", f"{name_of(info, ref)} of run {info.run}"), *base_facts(stats.coding), ("measured", how)]
    render.print_facts(facts)
    if not stats.groups:
        render.say("The checkpoint contains no tensor.")
        return
    total = replace(stats.groups[0], key="all", tensor_count=len(stats.tensors), share=stats.total, modes=())
    render.say("")
    _STATS_GROUPS.print([*stats.groups, total], title="groups")
    render.say("")
    _STATS_TENSORS.print(stats.tensors, title="tensors", limit=limit)


def _json_of_stats(stats: Stats) -> dict[str, Any]:
    coding = json_of_coding(stats.coding)
    return {
        **coding,
        "is_exact": stats.is_exact,
        "total": json_of(stats.total, *_SHARE),
        "groups": [
            {**json_of(group, "key", "tensor_count", "modes"), **json_of(group.share, *_SHARE)}
            for group in stats.groups
        ],
        "tensors": [
            {
                **of_coding,
                **json_of(tensor.share, *_SHARE),
                "estimated_full_bits": tensor.coding.full_bits,
                "delta_bits": tensor.delta_bits,
            }
            for of_coding, tensor in zip(coding["tensors"], stats.tensors, strict=True)
        ],
    }


_KINDS = Table(
    Column("what", "kind"),
    Column("files", is_number=True),
    Column("size", "nbytes", size, is_number=True),
)
_RUNS = Table(
    Column("run"),
    Column("checkpoints", "count", is_number=True, worth=2),
    Column("packs here", "nbytes", size, is_number=True),
    Column("only this run", "own_nbytes", size, is_number=True, worth=3),
    Column("in other tiers", "elsewhere_nbytes", size, is_number=True, worth=1),
)
_LARGEST = Table(
    Column("run"),
    SEQ,
    STEP,
    Column("needs", "nbytes", size, is_number=True, worth=2),
    Column("deleting frees", "own_nbytes", size, is_number=True),
    Column("tags", worth=1, is_elastic=True),
)
_TIERS = Table(
    Column("tier"),
    Column("packs", is_number=True),
    Column("size", "nbytes", size, is_number=True),
    Column("address", is_elastic=True),
)
_DU_ROWS = 10


def du(
    path: StorePath,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, metavar="N", help="Show the N largest checkpoints; 0: all.")
    ] = _DU_ROWS,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Show where the bytes of a store are.

    They are shown by kind of file, run, checkpoint and tier. Manifests are read, and no tensor. Tags, claims and
    quarantine are not counted.

    \b
    packs of one checkpoint       deleting that checkpoint frees them
    packs of several checkpoints  freed when all of these are deleted
    packs no checkpoint needs     `ckstore gc` frees them, if they are old enough
    trash                         `ckstore gc` frees it, if it is old enough
    deleting frees                packs that no other checkpoint needs
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        usage = store.usage()
    if as_json:
        render.print_json(_json_of_usage(path, usage))
    else:
        _print_usage(usage, limit or None)
    if usage.problem:
        raise CorruptError(
            f"some packs may be counted wrongly: {usage.problem}", where=path, todo="`ckstore verify` shows the damage"
        )


def _json_of_usage(path: str, usage: Usage) -> dict[str, Any]:
    return {"path": path, **json_of(usage, "nbytes", "kinds", "runs", "checkpoints", "tiers", "problem")}


def _print_usage(usage: Usage, limit: int | None) -> None:
    _KINDS.print(usage.kinds, title=f"{size(usage.nbytes)} in this store")
    if usage.runs:
        render.say("")
        _RUNS.print(usage.runs, title="runs")
    if usage.checkpoints:
        render.say("")
        _LARGEST.print(usage.checkpoints, title="checkpoints", limit=limit)
    if usage.tiers:
        render.say("")
        _TIERS.print(usage.tiers, title="needed in other tiers")
