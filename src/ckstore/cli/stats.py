"""``ckstore stats``: where the bytes of a checkpoint go, and their order-0 entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.coded import ROWS_ON_TERMINAL, base_facts, bits, json_of_coding, json_of_tensor, print_rest
from ckstore.cli.options import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.output import NOTHING, Column
from ckstore.cli.shown import name_of

if TYPE_CHECKING:
    from ckstore.stats import Share, Stats, TensorStats

_SIZES = (
    Column("elements", is_number=True, worth=1),
    Column("bytes", is_number=True, worth=3),
    Column("stored", is_number=True, worth=4),
)
_BITS = (
    Column("bits", is_number=True),
    Column("order-0", is_number=True),
    Column("full", is_number=True, worth=5),
)
_GROUPS = (
    Column("group", is_elastic=True),
    Column("tensors", is_number=True, worth=2),
    Column("modes", is_elastic=True, worth=6),
    *_SIZES,
    *_BITS,
)
_TENSORS = (
    Column("path", is_elastic=True),
    Column("dtype", worth=2),
    Column("mode"),
    *_SIZES,
    *_BITS,
    Column("delta", is_number=True, worth=5),
)


def run(
    path: StorePath,
    ref: Ref = "latest",
    run: Run = "main",
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure every element; otherwise a sample of each chunk, at most 16 KiB.")
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
    """Show where its bytes go, beside their order-0 entropy.

    Every chunk is read and decoded. In bits per element:

    \b
    bits     as stored
    order-0  entropy of the byte planes of a chunk as a whole, in its better form
    full     that entropy without a base
    delta    that entropy against the base

    The entropy is a yardstick: runs, repeats, and chunks whose parts differ from each other are stored in fewer bits.
    Of a tensor with a loss it is that of what is restored, far above what is stored.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        output.progress("measuring") as on_progress,
    ):
        stats = store.stats(ref, exact=exact, on_progress=on_progress)
    if as_json:
        output.print_json(_json_of(stats))
        return
    if limit is None and output.is_terminal():
        limit = ROWS_ON_TERMINAL
    _print(stats, ref, limit or len(stats.tensors))


def _print(stats: Stats, ref: str, limit: int) -> None:
    info = stats.info
    how = "every element" if stats.is_exact else "samples (see --exact)"
    facts = [("checkpoint", f"{name_of(info, ref)} of run {info.run}"), *base_facts(stats.coding), ("measured", how)]
    output.print_facts(facts)
    groups = [
        [group.key or "(the state itself)", str(group.tensor_count), ", ".join(group.modes), *_cells(group.share)]
        for group in stats.groups
    ]
    if not groups:
        output.say("It holds no tensor.")
        return
    groups.append(["all", str(len(stats.tensors)), NOTHING, *_cells(stats.total)])
    output.say("")
    output.print_table(_GROUPS, groups, title="groups")
    output.say("")
    output.print_table(_TENSORS, [_row(tensor) for tensor in stats.tensors[:limit]], title="tensors")
    print_rest(len(stats.tensors) - limit)


def _cells(share: Share) -> list[str]:
    sizes = [str(share.elements), output.size(share.nbytes), output.size(share.stored_nbytes)]
    return [*sizes, bits(share.stored_bits), bits(share.bound_bits), bits(share.full_bits)]


def _row(tensor: TensorStats) -> list[str]:
    coding = tensor.coding
    return [
        coding.path or "(the state itself)",
        coding.dtype,
        coding.mode,
        *_cells(tensor.share),
        bits(tensor.delta_bits),
    ]


def _json_of(stats: Stats) -> dict[str, Any]:
    return {
        **json_of_coding(stats.coding),
        "is_exact": stats.is_exact,
        "total": _json_of_share(stats.total),
        "groups": [
            {
                "key": group.key,
                "tensor_count": group.tensor_count,
                "modes": group.modes,
                **_json_of_share(group.share),
            }
            for group in stats.groups
        ],
        "tensors": [
            {
                **json_of_tensor(tensor.coding),
                **_json_of_share(tensor.share),
                "estimated_full_bits": tensor.coding.full_bits,
                "delta_bits": tensor.delta_bits,
            }
            for tensor in stats.tensors
        ],
    }


def _json_of_share(share: Share) -> dict[str, Any]:
    return {
        "elements": share.elements,
        "nbytes": share.nbytes,
        "stored_nbytes": share.stored_nbytes,
        "stored_bits": share.stored_bits,
        "bound_bits": share.bound_bits,
        "full_bits": share.full_bits,
    }
