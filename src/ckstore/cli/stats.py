"""``ckstore stats``: show the stored size of tensors and their order-0 entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.render import WHOLE_STATE, Column, Table, base_facts, bits, json_of, json_of_coding, name_of, size

if TYPE_CHECKING:
    from ckstore.ops.inspect.stats import Stats


_SIZES = (
    Column("elements", "share.elements", is_number=True, worth=1),
    Column("bytes", "share.nbytes", size, is_number=True, worth=3),
    Column("stored", "share.stored_nbytes", size, is_number=True, worth=4),
    Column("bits", "share.stored_bits", bits, is_number=True),
    Column("order-0", "share.bound_bits", bits, is_number=True),
    Column("full", "share.full_bits", bits, is_number=True, worth=5),
)
_GROUPS = Table(
    Column("group", lambda row: row.key or WHOLE_STATE, is_elastic=True),
    Column("tensors", "tensor_count", is_number=True, worth=2),
    Column("modes", is_elastic=True, worth=6),
    *_SIZES,
)
_TENSORS = Table(
    Column("path", lambda row: row.coding.path or WHOLE_STATE, is_elastic=True),
    Column("dtype", "coding.dtype", worth=2),
    Column("mode", "coding.mode"),
    *_SIZES,
    Column("delta", "delta_bits", bits, is_number=True, worth=5),
)
_SHARE = ("elements", "nbytes", "stored_nbytes", "stored_bits", "bound_bits", "full_bits")


def stats(
    path: StorePath,
    ref: Ref = "latest",
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
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("measuring") as on_progress,
    ):
        found = store.stats(ref, exact=exact, on_progress=on_progress)
    if as_json:
        render.print_json(_json_of(found))
    else:
        _print(found, ref, render.row_limit(limit))


def _print(stats: Stats, ref: str, limit: int | None) -> None:
    info = stats.info
    how = "every element" if stats.is_exact else "samples (see --exact)"
    facts = [("checkpoint", f"{name_of(info, ref)} of run {info.run}"), *base_facts(stats.coding), ("measured", how)]
    render.print_facts(facts)
    if not stats.groups:
        render.say("The checkpoint contains no tensor.")
        return
    total = replace(stats.groups[0], key="all", tensor_count=len(stats.tensors), share=stats.total, modes=())
    render.say("")
    _GROUPS.print([*stats.groups, total], title="groups")
    render.say("")
    _TENSORS.print(stats.tensors, title="tensors", limit=limit)


def _json_of(stats: Stats) -> dict[str, Any]:
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
