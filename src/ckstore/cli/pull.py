"""``ckstore pull``: bring checkpoints back from other tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath, opened, report_of
from ckstore.cli.output import Column
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CorruptError

if TYPE_CHECKING:
    from ckstore.pull import PullEntry, PullReport

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("lies in", worth=0),
    Column("packs there", is_number=True),
)


def run(
    path: StorePath,
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="REF...", help="Which checkpoints; all of the run otherwise.")
    ] = None,
    run: Run = "main",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Bring checkpoints back from other tiers.

    What lies there stays there. Where packs of a checkpoint are not what was pushed, it stays as it is, all others
    come, and the command ends with code 12.
    """
    begun = SYSTEM_CLOCK.monotonic()
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store, output.progress("pulling") as tell:
        damage: CorruptError | None = None
        try:
            report = store.pull(refs or None, dry_run=dry_run, on_progress=tell)
        except CorruptError as error:
            damage, report = error, report_of(error)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        output.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)
    if damage is not None:
        # All others came through; which did not is told last, and by the exit code.
        raise damage


def _print(report: PullReport, seconds: float) -> None:
    if not report.entries:
        output.say(f"Everything asked for of run {report.run} lies here.")
        return
    would = "would come" if report.is_dry_run else "came"
    entries = [entry for entry in report.entries if not entry.problem]
    plural = "" if len(entries) == 1 else "s"
    title = f"run {report.run}: {len(entries)} checkpoint{plural} {would} back"
    output.print_table(_COLUMNS, [_cells(entry) for entry in entries], title=title)
    output.say("")
    if report.is_dry_run:
        output.say(f"At most {output.size(report.bytes_to_pull)} to copy.")
        return
    plural = "" if report.packs_copied == 1 else "s"
    output.say(
        f"{report.packs_copied} pack{plural} copied, {output.size(report.bytes_copied)} in {output.duration(seconds)}."
    )


def _cells(entry: PullEntry) -> list[str]:
    return [str(entry.seq), str(entry.step), ", ".join(entry.tiers), output.size(entry.packs_nbytes)]


def _json_of(report: PullReport, seconds: float) -> dict[str, Any]:
    facts = {name: getattr(report, name) for name in type(report).__slots__ if name != "entries"}
    entries = [{name: getattr(entry, name) for name in type(entry).__slots__} for entry in report.entries]
    return {**facts, "seconds": seconds, "checkpoints": entries}
