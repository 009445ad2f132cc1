"""``ckstore push``: move old checkpoints to a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.render import SEQ, STEP, Column, Table, count, json_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.tiers.push import PushReport


_TABLE = Table(
    SEQ,
    STEP,
    Column("action"),
    Column("packs here", "packs_nbytes", size, is_number=True),
    Column("why", "reason", is_elastic=True, worth=0),
)


def push(
    path: StorePath,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Destination: s3://bucket/prefix (gs, az), or an absolute path. [default: the tier of the store]",
        ),
    ] = None,
    run: Run = "main",
    keep_local: Annotated[int, typer.Option("--keep-local", min=0, metavar="N", help="Keep the newest N here.")] = 1,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="SPAN", help="Push only checkpoints older than this: 12h, 7d, 2w."),
    ] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="NAME", help="Name of the tier, new or existing.")
    ] = None,
    read_back: Annotated[
        bool,
        typer.Option(
            "--read-back",
            help="Read every pushed pack back, and compare, before its local copy may be freed.",
        ),
    ] = False,
    forget: Annotated[
        str | None,
        typer.Option("--forget", metavar="NAME", help="Forget this tier instead. It must not hold a checkpoint."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Move old checkpoints of a run to a bucket.

    They stay in the history, and a restore reads them from there. Local copies are kept until the remote copies have
    been checked; `ckstore gc` then frees them. Commits can continue meanwhile. Credentials come from the environment, a
    profile or the machine's role.
    """
    if forget is not None:
        if address is not None or tier is not None or dry_run:
            raise UsageError("--forget goes with no other tier, and not with --dry-run", where=f"--forget {forget}")
        _forget(path, forget, as_json=as_json, allow_shared_folder=allow_shared_folder)
        return
    begun = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("pushing") as on_progress,
    ):
        rules: dict[str, Any] = {"keep_local": keep_local, "older_than": older_than, "tier": tier}
        report = store.push(address, **rules, read_back=read_back, dry_run=dry_run, on_progress=on_progress)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        render.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)


def _forget(path: str, tier: str, *, as_json: bool, allow_shared_folder: bool) -> None:
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        address = store.forget_tier(tier)
    if as_json:
        render.print_json({"forgotten": tier, "address": address})
    else:
        render.say(f"Tier {tier} is forgotten; what lies at {address} stays.")


def _print(report: PushReport, seconds: float) -> None:
    if not report.entries:
        render.say(f"Run {report.run} has no checkpoint.")
        return
    would = "would go" if report.is_dry_run else "went"
    title = f"run {report.run}: {len(report.pushed)} of {len(report.entries)} checkpoints {would} to {report.address}"
    _TABLE.print(report.entries, title=title)
    render.say("")
    if report.is_dry_run:
        render.say(f"At most {size(report.bytes_to_push)} to copy: what lies there already is not copied again.")
        return
    spent = f"{size(report.bytes_copied)} in {render.duration(seconds)}"
    render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")
    if report.pushed:
        render.say("`ckstore gc` frees what nobody needs here any more.")


def _json_of(report: PushReport, seconds: float) -> dict[str, Any]:
    facts = json_of(report, "run", "tier", "address", "is_dry_run", "bytes_to_push", "bytes_copied", "packs_copied")
    return {**facts, "seconds": seconds, "checkpoints": report.entries}
