"""``ckstore verify``: check a store for damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.render import count, json_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import BackendError, CorruptError, UnreachableError, UsageError

if TYPE_CHECKING:
    from ckstore.ops.verify import Damage, Report


def verify(
    path: StorePath,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Only this checkpoint. [default: all runs of the store]")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="LEVEL", help="quick, read or decode; see above. [default: read]"),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="The same as --level decode.")] = False,
    run: Run = "main",
    remote: Annotated[bool, typer.Option("--remote", help="Also check packs in other tiers.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Check for damage; nothing is changed.

    Exit code 12: damage was found. Exit code 15: no damage was found, but a tier cannot be reached, or this user may
    not read a file.

    \b
    quick   manifests, and the directory of every pack; takes seconds
    read    every stored byte, against its checksum (the default)
    decode  every byte, decoded and compared with the committed data; data stored
            with a loss is compared with the recorded reconstruction

    REF is looked up in the run that --run names. Without REF, all runs are verified.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    chosen_level = _level_of(level, is_decode=decode)
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("verifying") as on_progress,
    ):
        # Level quick reads little of each pack, so bytes would show no progress.
        advance = None if chosen_level == "quick" else on_progress
        report = store.verify(chosen_level, ref=ref, remote=remote, on_progress=advance)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of(path, report, seconds))
    else:
        _print(report, seconds)
    _raise_for(report, path)


def _raise_for(report: Report, path: str) -> None:
    """Raise if something is damaged, may not be read, or cannot be reached."""
    if report.damage:
        raise CorruptError(
            f"{count(len(report.damage), 'damaged place')} found",
            where=path,
            todo="restore a checkpoint that is not in the list, or run `ckstore repair`",
        )
    if report.refused:
        raise BackendError(
            f"{count(len(report.refused), 'place')} could not be verified, because this user may not read it",
            where=path,
            todo="give the files to the store's owner (`chown`), or verify as that user",
            is_refused=True,
        )
    if report.unreachable:
        raise UnreachableError(
            f"{count(len(report.unreachable), 'tier')} cannot be reached",
            where=path,
            todo="mount or configure the tiers in the list, then verify again",
        )


def _level_of(level: str | None, *, is_decode: bool) -> str:
    """Return the level that the options choose.

    Raises:
        UsageError: They choose two different levels.
    """
    if is_decode and level not in (None, "decode"):
        raise UsageError(
            f"--decode contradicts --level {level}", todo="give one of the two; decode is the most thorough level"
        )
    return "decode" if is_decode else level or "read"


def _json_of(path: str, report: Report, seconds: float) -> dict[str, Any]:
    counts = ("checkpoint_count", "pack_count", "frame_count", "bytes_read", "packs_elsewhere", "files_torn")
    return {
        "path": path,
        **json_of(report, "level", "is_clean", *counts, "copied_ns"),
        "seconds": seconds,
        **json_of(report, "damage", "refused", "unreachable"),
    }


def _print(report: Report, seconds: float) -> None:
    checked = f"{count(report.checkpoint_count, 'checkpoint')}, {count(report.pack_count, 'pack')}"
    if report.level != "quick":
        checked += f", {count(report.frame_count, 'frame')}"
    if report.packs_elsewhere:
        checked += f" ({count(report.packs_elsewhere, 'pack')} in other tiers not checked; --remote does that)"
    spent = f"{render.size(report.bytes_read)} in {render.duration(seconds)}"
    if report.level != "quick":
        spent += f" ({render.rate(report.bytes_read, seconds)})"
    if report.is_clean:
        render.say(f"No damage. Level {report.level}: {checked}; read {spent}.")
        return
    verdict = "DAMAGE" if report.damage else "NO ACCESS to some places; no damage in the rest"
    render.say(f"{verdict}. Level {report.level}: {checked}; read {spent}.")
    for found in (*report.damage, *report.refused, *report.unreachable):
        _print_damage(found)
    damaged = sorted({checkpoint for damage in report.damage for checkpoint in damage.checkpoints})
    render.say("")
    if report.damage:
        render.say(f"Damaged checkpoints: {len(damaged)}. Everything not listed above is undamaged.")
    if report.files_torn:
        render.say("")
        render.say(_copy_advice(report))


def _copy_advice(report: Report) -> str:
    copy = "If this folder is a copy"
    if report.copied_ns is not None:
        copy = f"This folder is a copy, made on {render.local_time(report.copied_ns)}. If it was"
    return (
        f"{copy} made while the store was in use (cp, rsync), files changed while they were copied. "
        "`ckstore repair COPY --from ORIGINAL --apply` completes it. `ckstore mirror` makes complete copies of a store "
        "in use."
    )


def _print_damage(damage: Damage) -> None:
    # Not a table, which would shorten paths on a narrow terminal. Users copy these paths.
    render.say("")
    render.say(f"- {damage.what}")
    render.say(f"  at      {damage.where}")
    render.say(f"  needed  {', '.join(damage.checkpoints) if damage.checkpoints else 'by no checkpoint'}")
    if damage.tensors:
        render.say(f"  tensors {', '.join(damage.tensors)}")
