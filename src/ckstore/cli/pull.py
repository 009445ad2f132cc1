"""``ckstore pull``: bring checkpoints back from other tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened, report_of
from ckstore.cli.render import SEQ, STEP, Column, Table, count, json_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CorruptError

if TYPE_CHECKING:
    from ckstore.tiers.pull import PullReport


_TABLE = Table(
    SEQ,
    STEP,
    Column("lies in", lambda entry: ", ".join(entry.tiers), worth=0),
    Column("packs there", "packs_nbytes", size, is_number=True),
)


def pull(
    path: StorePath,
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="REF...", help="Which checkpoints. [default: all of the run]")
    ] = None,
    run: Run = "main",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Bring checkpoints back from other tiers.

    The copies in the tiers are not removed. If packs of a checkpoint differ from what was pushed, it stays where it is,
    all others are copied, and the exit code is 12.
    """
    begun = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("pulling") as on_progress,
    ):
        damage: CorruptError | None = None
        try:
            report = store.pull(refs or None, dry_run=dry_run, on_progress=on_progress)
        except CorruptError as error:
            damage, report = error, report_of(error)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        render.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)
    if damage is not None:
        # The other checkpoints were copied. The error comes last and names those that were not.
        raise damage


def _print(report: PullReport, seconds: float) -> None:
    if not report.entries:
        render.say(f"Everything asked for of run {report.run} lies here.")
        return
    would = "would come" if report.is_dry_run else "came"
    entries = [entry for entry in report.entries if not entry.problem]
    _TABLE.print(entries, title=f"run {report.run}: {count(len(entries), 'checkpoint')} {would} back")
    render.say("")
    if report.is_dry_run:
        render.say(f"At most {size(report.bytes_to_pull)} to copy.")
        return
    spent = f"{size(report.bytes_copied)} in {render.duration(seconds)}"
    render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")


def _json_of(report: PullReport, seconds: float) -> dict[str, Any]:
    facts = json_of(report, "run", "is_dry_run", "bytes_to_pull", "bytes_copied", "packs_copied")
    return {**facts, "seconds": seconds, "checkpoints": report.entries}
