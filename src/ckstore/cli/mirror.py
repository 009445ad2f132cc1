"""``ckstore mirror``: keep a second copy of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath, opened, report_of
from ckstore.cli.render import Column, Table, count, json_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CkstoreError, CorruptError, UnreachableError

if TYPE_CHECKING:
    from ckstore.tiers.mirror import MirrorReport


_TABLE = Table(
    Column("run", is_elastic=True),
    Column("checkpoints", "checkpoint_count", is_number=True),
    Column("copied", "copied_count", is_number=True),
    Column("partial", "partial_count", is_number=True, worth=0),
    Column("damaged", "damaged_count", is_number=True),
    Column("out of reach", "unreachable_count", is_number=True, worth=0),
    Column("only there", "kept_count", is_number=True, worth=1),
    Column("tags", "tag_count", is_number=True, worth=2),
)


def mirror(
    path: StorePath,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Where the copy is: s3://bucket/prefix (gs, az), or a folder.")
    ],
    read_back: Annotated[bool, typer.Option("--read-back", help="Read every copied pack back, and compare.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be copied.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Copy a store with all its runs to a second place.

    The copy is a store of its own: `ckstore ls ADDRESS`, `ckstore verify ADDRESS`. This store is not changed, and
    nothing is removed from the copy: checkpoints that were deleted here stay there.

    \b
    copied        checkpoints that the copy lacked, or had in an older form
    partial       checkpoints with lost tensors: not copied
    damaged       damaged checkpoints: not copied, listed at the end, and the
                  exit code is 12
    out of reach  checkpoints in a tier that cannot be reached: not copied,
                  listed at the end, and the exit code is 15
    only there    checkpoints that no longer exist here
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    begun = SYSTEM_CLOCK.monotonic()
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        damage: CkstoreError | None = None
        try:
            report = store.mirror(address, read_back=read_back, dry_run=dry_run)
        except (CorruptError, UnreachableError) as error:
            damage, report = error, report_of(error)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        render.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)
    if damage is not None:
        # The other checkpoints were copied. The error comes last and names those that were not.
        raise damage


def _print(report: MirrorReport, seconds: float) -> None:
    if not report.runs:
        render.say("No checkpoint yet: nothing was committed to this store.")
        return
    would = "would be copied" if report.is_dry_run else "copied"
    _TABLE.print(report.runs, title=f"{would} to {report.address}")
    if not report.is_dry_run:
        spent = f"{render.size(report.bytes_copied)} in {render.duration(seconds)}"
        render.say("")
        render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")


def _json_of(report: MirrorReport, seconds: float) -> dict[str, Any]:
    facts = json_of(report, "address", "is_dry_run", "bytes_copied", "packs_copied")
    return {**facts, "seconds": seconds, "runs": report.runs}
