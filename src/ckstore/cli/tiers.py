"""Make a store (``init``), copy it (``push``, ``pull``, ``mirror``), and declare what a copy is (``adopt``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, opened, report_of
from ckstore.cli.render import SEQ, STEP, Column, Table, count, json_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CkstoreError, CorruptError, NotFoundError, UnreachableError, UsageError

if TYPE_CHECKING:
    from ckstore.tiers.mirror import MirrorReport
    from ckstore.tiers.pull import PullReport
    from ckstore.tiers.push import PushReport


def init(
    path: StorePath,
    shared: Annotated[
        str | None,
        typer.Option(
            "--shared",
            metavar="WHO",
            help="Share it: group (the folder's group may use it), or umask (files get the umask's mode).",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make a store in a new or empty folder.

    An existing store is not changed. You rarely need this command: ckstore.open makes the store on first use. Everyone
    who shares a store can read and remove the files that others made in it. Files that root makes belong to the store's
    owner.
    """
    is_new = False
    try:
        store = ckstore.open(path, create=False, allow_shared_folder=allow_shared_folder)
    except NotFoundError:
        is_new = True
        # ckstore.open refuses any other text than the two that it knows.
        sharing: Any = shared
        store = ckstore.open(path, allow_shared_folder=allow_shared_folder, shared=sharing)
    store.close()
    if as_json:
        render.print_json({"path": path, "is_new": is_new})
    elif is_new:
        render.say(f"Made a store at {path}.")
    else:
        render.say(f"{path} is a store already; nothing was changed.")


def adopt(
    path: StorePath,
    as_original: Annotated[
        bool, typer.Option("--as-original", help="This is the original, or replaces it, and owns its tiers.")
    ] = False,
    as_new: Annotated[
        bool, typer.Option("--as-new", help="Both stay in use, and the original owns the tiers.")
    ] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Declare that a copied store is the original, or a new one.

    A copy of a store that has tiers changes nothing in them until you declare this. The same holds for a store that was
    set back to an older state, and for one whose inodes changed: some file systems, such as sshfs, rclone and gcsfuse,
    change them at each mount.
    """
    if as_original == as_new:
        raise UsageError("give either --as-original or --as-new", todo="see `ckstore adopt --help`")
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        tiers = store.adopt(is_original=as_original)
    if as_json:
        render.print_json({"path": path, "is_original": as_original, "tiers": tiers})
    elif as_new:
        render.say("This is a new store now. It owns no tier; `ckstore pull` copies what it needs from the tiers.")
    else:
        owned = ", ".join(tiers) or "no tier"
        render.say(f"This is the original store now and owns {owned}. Other copies of it may not push there.")


_PUSHED = Table(
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
    """Move old checkpoints of a run to a bucket or another folder.

    They stay in the history, and a restore reads them from there. Local copies are kept until the remote copies have
    been checked; `ckstore gc` then frees them. Commits can continue meanwhile. Credentials come from the environment, a
    profile or the machine's role.
    """
    if forget is not None:
        if address is not None or tier is not None or dry_run:
            raise UsageError(
                "--forget cannot be combined with ADDRESS, --tier or --dry-run", where=f"--forget {forget}"
            )
        _forget(path, forget, as_json=as_json, allow_shared_folder=allow_shared_folder)
        return
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("pushing") as on_progress,
    ):
        rules: dict[str, Any] = {"keep_local": keep_local, "older_than": older_than, "tier": tier}
        report = store.push(address, **rules, read_back=read_back, dry_run=dry_run, on_progress=on_progress)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_push(report, seconds))
    else:
        _print_push(report, seconds)


def _forget(path: str, tier: str, *, as_json: bool, allow_shared_folder: bool) -> None:
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        address = store.forget_tier(tier)
    if as_json:
        render.print_json({"forgotten": tier, "address": address})
    else:
        render.say(f"Tier {tier} was forgotten. The files at {address} were not removed.")


def _print_push(report: PushReport, seconds: float) -> None:
    if not report.entries:
        render.say(f"Run {report.run} has no checkpoint.")
        return
    would = "would be pushed" if report.is_dry_run else "were pushed"
    title = f"run {report.run}: {len(report.pushed)} of {len(report.entries)} checkpoints {would} to {report.address}"
    _PUSHED.print(report.entries, title=title)
    render.say("")
    if report.is_dry_run:
        render.say(f"At most {size(report.bytes_to_push)} to copy; packs that are there already are not copied again.")
        _say_points(report)
        return
    spent = f"{size(report.bytes_copied)} in {render.duration(seconds)}"
    render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")
    _say_points(report)
    if report.pushed:
        render.say("`ckstore gc` frees the local copies.")


def _say_points(report: PushReport | PullReport | MirrorReport) -> None:
    if report.points_copied:
        copied = "would be copied" if report.is_dry_run else "copied"
        points = count(report.points_copied, "point")
        render.say(f"{points} of journals {copied}, {size(report.journal_bytes_copied)}.")


_POINTS = ("points_copied", "journal_bytes_copied")


def _json_of_push(report: PushReport, seconds: float) -> dict[str, Any]:
    shown = ("run", "tier", "address", "is_dry_run", "bytes_to_push", "bytes_copied", "packs_copied", *_POINTS)
    facts = json_of(report, *shown)
    return {**facts, "seconds": seconds, "checkpoints": report.entries}


_PULLED = Table(
    SEQ,
    STEP,
    Column("lies in", lambda entry: ", ".join(entry.tiers), worth=0),
    Column("packs there", "packs_nbytes", size, is_number=True),
)


def pull(
    path: StorePath,
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF...", help="Which checkpoints. [default: all of the run]", autocompletion=completion.refs
        ),
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
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("pulling") as on_progress,
    ):
        damage: CorruptError | None = None
        try:
            report = store.pull(refs or None, dry_run=dry_run, on_progress=on_progress)
        except CorruptError as error:
            damage, report = error, report_of(error)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_pull(report, seconds))
    else:
        _print_pull(report, seconds)
    if damage is not None:
        # The other checkpoints were copied. The error names those that were not.
        raise damage


def _print_pull(report: PullReport, seconds: float) -> None:
    if not report.entries:
        render.say(f"Nothing to pull: the packs of run {report.run} are in this store already.")
        return
    would = "would be pulled" if report.is_dry_run else "pulled"
    entries = [entry for entry in report.entries if not entry.problem]
    _PULLED.print(entries, title=f"run {report.run}: {count(len(entries), 'checkpoint')} {would}")
    render.say("")
    if report.is_dry_run:
        render.say(f"At most {size(report.bytes_to_pull)} to copy.")
        _say_points(report)
        return
    spent = f"{size(report.bytes_copied)} in {render.duration(seconds)}"
    render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")
    _say_points(report)


def _json_of_pull(report: PullReport, seconds: float) -> dict[str, Any]:
    facts = json_of(report, "run", "is_dry_run", "bytes_to_pull", "bytes_copied", "packs_copied", *_POINTS)
    return {**facts, "seconds": seconds, "checkpoints": report.entries}


_MIRRORED = Table(
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
    start = SYSTEM_CLOCK.monotonic()
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        damage: CkstoreError | None = None
        try:
            report = store.mirror(address, read_back=read_back, dry_run=dry_run)
        except (CorruptError, UnreachableError) as error:
            damage, report = error, report_of(error)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_mirror(report, seconds))
    else:
        _print_mirror(report, seconds)
    if damage is not None:
        # The other checkpoints were copied. The error names those that were not.
        raise damage


def _print_mirror(report: MirrorReport, seconds: float) -> None:
    if not report.runs:
        render.say("No checkpoint yet: nothing was committed to this store.")
        return
    would = "would be copied" if report.is_dry_run else "copied"
    _MIRRORED.print(report.runs, title=f"{would} to {report.address}")
    if not report.is_dry_run:
        spent = f"{render.size(report.bytes_copied)} in {render.duration(seconds)}"
        render.say("")
        render.say(f"{count(report.packs_copied, 'pack')} copied, {spent}.")
    _say_points(report)


def _json_of_mirror(report: MirrorReport, seconds: float) -> dict[str, Any]:
    facts = json_of(report, "address", "is_dry_run", "bytes_copied", "packs_copied", *_POINTS)
    return {**facts, "seconds": seconds, "runs": report.runs}
