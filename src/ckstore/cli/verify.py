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

    Exit code 12: damage was found. Exit code 15: no damage was found, but a tier that holds checkpoints cannot be
    reached.

    \b
    quick   manifests, and the directory of every pack; takes seconds
    read    every stored byte, against its checksum (the default)
    decode  every byte, decoded and compared with the committed data; data stored
            with a loss is compared with the recorded reconstruction

    REF is looked up in the run that --run names. Without REF, all runs are verified.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    chosen_level = _level_of(level, is_decode=decode)
    begun = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("verifying") as on_progress,
    ):
        # Level quick reads little of each pack, so bytes would show no progress.
        advance = None if chosen_level == "quick" else on_progress
        report = store.verify(chosen_level, ref=ref, remote=remote, on_progress=advance)
    seconds = SYSTEM_CLOCK.monotonic() - begun
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
            todo="restore checkpoints that are not in the list, or bring the files back from a copy",
        )
    if report.refused:
        raise BackendError(
            f"{count(len(report.refused), 'place')} may not be read by this user, and may be whole",
            where=path,
            todo="have them given to the store's owner (`chown`), or verify as that user",
            is_refused=True,
        )
    if report.unreachable:
        raise UnreachableError(
            f"{count(len(report.unreachable), 'tier')} cannot be reached",
            where=path,
            todo="mount or configure what the list names, then verify again",
        )


def _level_of(level: str | None, *, is_decode: bool) -> str:
    """Return the level that the options ask for; UsageError if they ask for two."""
    if is_decode and level not in (None, "decode"):
        raise UsageError(
            f"--decode asks for another level than --level {level}", todo="give one of the two; --decode does it all"
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
    checked = f"{report.checkpoint_count} checkpoints, {report.pack_count} packs"
    if report.level != "quick":
        checked += f", {report.frame_count} frames"
    if report.packs_elsewhere:
        checked += f" ({report.packs_elsewhere} packs of other tiers were not looked at: --remote)"
    spent = f"{render.size(report.bytes_read)} in {render.duration(seconds)}"
    if report.level != "quick":
        spent += f" ({render.rate(report.bytes_read, seconds)})"
    if report.is_clean:
        render.say(f"No damage. Level {report.level}: {checked}; read {spent}.")
        return
    verdict = "DAMAGE" if report.damage else "NO ACCESS to all of it; no damage in the rest"
    render.say(f"{verdict}. Level {report.level}: {checked}; read {spent}.")
    for found in (*report.damage, *report.refused, *report.unreachable):
        _print_damage(found)
    hit = sorted({checkpoint for damage in report.damage for checkpoint in damage.checkpoints})
    render.say("")
    if report.damage:
        render.say(f"Checkpoints hit: {len(hit)}. Everything not named above is whole.")
    if report.files_torn:
        render.say("")
        render.say(_about_copies(report))


def _about_copies(report: Report) -> str:
    known = "If this folder is a copy that was made while the store was in use (cp, rsync), that is why"
    if report.copied_ns is not None:
        when = render.local_time(report.copied_ns)
        known = f"This folder is a copy, made on {when}. A copy made while the store was in use (cp, rsync) is torn so"
    return (
        f"{known}: files changed while they were copied. `ckstore repair COPY --from ORIGINAL --apply` completes it; "
        "`ckstore mirror` makes whole copies of a store in use."
    )


def _print_damage(damage: Damage) -> None:
    # Not a table: a path must be complete in a terminal of any width, so that it can be copied.
    render.say("")
    render.say(f"- {damage.what}")
    render.say(f"  at      {damage.where}")
    render.say(f"  needed  {', '.join(damage.checkpoints) if damage.checkpoints else 'by no checkpoint'}")
    if damage.tensors:
        render.say(f"  tensors {', '.join(damage.tensors)}")
