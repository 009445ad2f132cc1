"""``ckstore repack``: rewrite a run for fast restores and less disk space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.render import SEQ, STEP, Column, Table, json_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import RepackPolicy

if TYPE_CHECKING:
    from ckstore.ops.repack import RepackReport


_TABLE = Table(
    SEQ,
    STEP,
    Column("action"),
    Column("base", "base_seq", is_number=True),
    Column("stored now", "stored_before", size, is_number=True),
    Column("then", "stored_after", size, is_number=True),
    Column("read now", "read_before", size, is_number=True, worth=2),
    Column("then", "read_after", size, is_number=True, worth=1),
    Column("why", "reason", is_elastic=True, worth=0),
)


def repack(
    path: StorePath,
    run: Run = "main",
    keyframes: Annotated[
        int,
        typer.Option(
            "--keyframes", min=0, metavar="N", help="Store the newest N as keyframes, which need no other checkpoint."
        ),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Spend more time on compression, for fewer bytes.")] = False,
    amplification: Annotated[
        float,
        typer.Option(
            "--read-amplification",
            min=1,
            metavar="X",
            help="A restore of an older checkpoint reads at most X times the bytes of a keyframe.",
        ),
    ] = 1.6,
    saving: Annotated[
        float,
        typer.Option("--saving", min=0, max=100, metavar="PERCENT", help="Rewrite only what saves at least this much."),
    ] = 3.0,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Rewrite a run for fast restores and less disk space.

    The newest checkpoints become keyframes, which may take more bytes than before. Older ones become differences from
    newer ones. Contents and ids do not change. Restores can run meanwhile; commits to this run cannot. The old packs
    stay, so the store grows until `ckstore gc` frees them.

    \b
    stored  bytes of the checkpoint's own chunks
    read    bytes that a restore reads, bases included
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    policy = RepackPolicy(
        keyframes=keyframes,
        compression="best" if best else "fast",
        read_amplification_max=amplification,
        saving_min=saving / 100,
    )
    start = SYSTEM_CLOCK.monotonic()
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        report = store.repack(policy, dry_run=dry_run)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of(report, policy.saving_min, seconds))
    else:
        _print(report, saving, seconds)


def _print(report: RepackReport, saving: float, seconds: float) -> None:
    if not report.entries:
        render.say(f"Run {report.run} has no checkpoint.")
        return
    count = len(report.rewritten)
    would = "would be" if report.is_dry_run else "were"
    title = f"run {report.run}: {count} of {len(report.entries)} checkpoints {would} rewritten"
    _TABLE.print(report.entries, title=title)
    render.say("")
    if count == 0:
        render.say(f"Nothing to do: no rewrite would save {saving:g}%.")
    else:
        about = "about " if report.is_dry_run else ""
        to_write = "to write" if report.is_dry_run else f"written in {render.duration(seconds)}"
        render.say(f"{about}{size(report.bytes_written)} {to_write}; until a gc the store is larger by that.")
        before, after = size(report.packs_before), size(report.packs_after)
        grown = "" if report.packs_after < report.packs_before else ": not smaller, but the newest restore faster"
        render.say(f"{before} of packs before, {about}{after} once `ckstore gc` has freed the old ones{grown}.")
        render.say(f"Checkpoints for which a rewrite saves less than {saving:g}% are not changed.")
    if report.superseded_count:
        left = render.count(report.superseded_count, "manifest")
        render.say(f"Moved to the trash: {left} of an interrupted repack.")


def _json_of(report: RepackReport, saving_min: float, seconds: float) -> dict[str, Any]:
    return {
        **json_of(report, "run", "is_dry_run"),
        "saving_min": saving_min,
        **json_of(report, "packs_before", "packs_after", "bytes_written", "superseded_count"),
        "seconds": seconds,
        "checkpoints": report.entries,
    }
