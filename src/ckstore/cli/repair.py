"""``ckstore repair`` repairs a damaged store; ``ckstore quarantine`` only moves unreadable files away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath, opened
from ckstore.cli.render import count, json_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CorruptError

if TYPE_CHECKING:
    from ckstore.ops.repair import RepairEntry, RepairReport


_DONE = {
    "heal": ("would be complete again", "is complete again"),
    "partial": ("would be partial", "is partial"),
    "quarantine": (
        "has an unreadable manifest, which would move to quarantine",
        "had an unreadable manifest, which moved to quarantine",
    ),
    "revive": ("would get its earlier manifest back", "has its earlier manifest back"),
    "bring back": ("would get its manifest from a copy", "has its manifest from a copy"),
}


Apply = Annotated[bool, typer.Option("--apply", help="Do it. Without this option, only print what would be done.")]


def repair(
    path: StorePath,
    apply: Apply = False,
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="A copy of this store to recover data from. May be repeated."),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Repair a damaged store; without --apply, only print how.

    Every frame that a checkpoint of any run needs is read. Damaged and missing data is searched for in all packs, in
    the trash, in quarantine, and in --from. A missing store.json is made again from manifests and packs.

    \b
    complete  everything was found
    partial   some tensors are lost: a full restore fails and names them, --only
              restores the rest; if the same data is committed again, another
              repair completes the checkpoint

    Damaged files go to quarantine/ in the store; nothing is deleted. Do not commit to a run while it is being repaired.
    Exit code 12: data is lost, or would be.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    start = SYSTEM_CLOCK.monotonic()
    report = ckstore.repair_store(
        path, dry_run=not apply, sources=sources or (), allow_shared_folder=allow_shared_folder
    )
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of(path, report, seconds))
    else:
        _print(report, seconds)
    lost = sum(entry.action in ("partial", "quarantine") for entry in report.entries)
    if lost:
        raise CorruptError(
            f"{lost} {'checkpoint has' if lost == 1 else 'checkpoints have'} lost data",
            where=path,
            todo="repair with --from COPY if there is a copy of the store, or restore other checkpoints",
        )


def _print(report: RepairReport, seconds: float) -> None:
    if report.is_clean:
        packs = "local pack" if report.packs_elsewhere else "pack"
        render.say(f"No damage; every {packs} that a checkpoint needs was read in {render.duration(seconds)}.")
        _print_elsewhere(report)
        return
    if report.is_identity_made:
        made = "would be made" if report.is_dry_run else "was made"
        render.say(f"store.json was missing: it {made} again from manifests and packs")
    for entry in report.entries:
        _print_entry(entry)
    for pack_id, problem in report.packs.items():
        render.say(f"pack {pack_id}: {problem}; it {'would be' if report.is_dry_run else 'was'} moved to quarantine")
    for pack_id in report.packs_rescued:
        render.say(f"pack {pack_id}: {'would be' if report.is_dry_run else 'was'} restored from the trash")
    for claim in report.claims_made:
        render.say(f"claim {claim}: {'would be' if report.is_dry_run else 'was'} made again")
    for sentence in report.left:
        render.say(f"cannot be repaired: {sentence}")
    _print_elsewhere(report)
    render.say("")
    if report.is_dry_run:
        render.say(f"{render.size(report.bytes_copied)} would be copied to new packs; add --apply to do all of this.")
    else:
        render.say(f"Repaired in {render.duration(seconds)}; {render.size(report.bytes_copied)} copied to new packs.")


def _print_elsewhere(report: RepairReport) -> None:
    number = report.packs_elsewhere
    if number:
        packs = "1 pack in another tier was" if number == 1 else f"{number} packs in other tiers were"
        render.say(f"{packs} not read; `ckstore verify --remote --level read` reads them.")


def _print_entry(entry: RepairEntry) -> None:
    words = _DONE[entry.action][entry.is_done]
    render.say(f"run {entry.run}, step {entry.step} (seq {entry.seq}) {words}: {entry.reason}")
    if entry.tensors:
        render.say(f"  lost tensors: {', '.join(entry.tensors)}")


def _json_of(path: str, report: RepairReport, seconds: float) -> dict[str, Any]:
    found = ("packs", "packs_rescued", "claims_made", "bytes_copied", "left", "packs_elsewhere")
    return {
        "path": path,
        **json_of(report, "is_dry_run", "is_clean", "is_identity_made"),
        "checkpoints": report.entries,
        **json_of(report, *found),
        "seconds": seconds,
    }


def quarantine(
    path: StorePath,
    apply: Apply = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Move unreadable manifests and torn packs to quarantine.

    An unreadable manifest may reference any pack, so `ckstore gc` frees nothing until the manifest is moved. Files go
    to quarantine/ in the store; nothing is deleted. `ckstore repair` does this too, and repairs what it can.
    """
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        report = store.quarantine(dry_run=not apply)
    if as_json:
        render.print_json({"path": path, **json_of(report, "is_dry_run", "manifests", "packs", "left")})
        return
    found = len(report.manifests) + len(report.packs)
    if not found:
        render.say("Nothing to move: every manifest can be read.")
    for kind, files in (("manifest", report.manifests), ("pack", report.packs)):
        for name, problem in files.items():
            render.say(f"{kind} {name}: {problem}")
    for sentence in report.left:
        render.say(f"left in place: {sentence}")
    if found and report.is_dry_run:
        render.say("")
        render.say(f"{count(found, 'file')} would be moved to quarantine/; add --apply to do it.")
    elif found:
        render.say("")
        render.say(f"{count(found, 'file')} moved to quarantine/.")
