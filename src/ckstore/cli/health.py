"""Check, repair and describe a store: ``status``, ``verify``, ``repair``, ``quarantine``, ``doctor`` and ``bench``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, OnlyRun, Run, Shared, StorePath, opened, training_code
from ckstore.cli.render import Column, Table, count, json_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import BackendError, CorruptError, NotFoundError, UnreachableError, UsageError
from ckstore.ops.gc.policy import span_seconds
from ckstore.store.listing import Entry, RunLog, log_of_store

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.ops.repair import RepairEntry, RepairReport
    from ckstore.ops.repair_segments import SegmentRepair
    from ckstore.ops.verify import Damage, Report


EXIT_STALE = 4
"""Exit code of ``status`` if the newest checkpoint is older than --max-age."""

_STATUS = Table(
    Column("run"),
    Column("checkpoints", "count", is_number=True, worth=1),
    Column("newest step", "newest.step", is_number=True),
    Column("seq", "newest.seq", is_number=True, worth=2),
    Column("time (local)", "newest.info.time_ns", render.local_time, worth=3),
    Column("age", "newest.info.time_ns", render.age, is_number=True),
    Column("state", "newest.info.bytes_state", render.size, is_number=True, worth=0),
    Column("fidelity", "newest.info.fidelity", worth=0),
)


@dataclass(frozen=True, slots=True)
class _RunStatus:
    """A run and its newest checkpoint, as ``latest`` names it; None if there is none."""

    run: str
    count: int
    newest: Entry | None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the newest checkpoint; negative if its time is in the future."""
        if self.newest is None or self.newest.info is None:
            return None
        return (SYSTEM_CLOCK.now_ns() - self.newest.info.time_ns) / 1e9


def status(
    path: StorePath,
    run: OnlyRun = None,
    max_age: Annotated[
        str | None,
        typer.Option(
            "--max-age",
            metavar="SPAN",
            help="Exit with 4 if the newest checkpoint is older: 30m, 2h, 1d. Without --run, the newest of any run.",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Show the newest checkpoint of each run, and check its age.

    Only checkpoints that are durable count. For cron jobs and Kubernetes probes: one header is read for each run.

    \b
    exit code 0   there is a checkpoint, and it is young enough
    exit code 4   the newest one is older than --max-age, or as far in the future
    exit code 10  no store, no such run, or with --max-age: no checkpoint
    exit code 12  the newest checkpoint is damaged or missing
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    max_seconds = None if max_age is None else span_seconds(max_age)
    logs = log_of_store(path, run=run, limit=1, skips_archival=True, allow_shared_folder=allow_shared_folder)
    found = [_RunStatus(log.run, log.count, next(iter(log.entries), None)) for log in logs]
    ages = [age for each in found if (age := each.age_seconds) is not None]
    age = min(ages, key=abs, default=None)
    is_stale = None if max_seconds is None or age is None else abs(age) > max_seconds
    if as_json:
        runs = [_json_of_status(each) for each in found]
        render.print_json({"path": path, "max_age_seconds": max_seconds, "is_stale": is_stale, "runs": runs})
    elif not found:
        render.say("No checkpoint yet: nothing was committed to this store.")
    else:
        _STATUS.print(found)
    _raise_for_newest(path, logs)
    if max_seconds is not None and age is None:
        raise NotFoundError("there is no checkpoint yet", where=path, todo="check that training runs and commits")
    if is_stale and age is not None and not as_json:
        when = "old" if age > 0 else "in the future; check the clocks"
        render.say(f"STALE: the newest checkpoint is {render.duration(abs(age))} {when}; --max-age is {max_age}.")
    if is_stale:
        raise typer.Exit(EXIT_STALE)


def _json_of_status(status: _RunStatus) -> dict[str, Any]:
    info = None if status.newest is None else status.newest.info
    newest = None if info is None else render.json_of_info(info)
    return {**json_of(status, "run", "count", "age_seconds"), "newest": newest}


def _raise_for_newest(path: str, logs: Sequence[RunLog]) -> None:
    """Raise if the newest checkpoint of a run cannot be read, or a checkpoint is missing."""
    for log in logs:
        entry = next(iter(log.entries), None)
        damage = log.missing or ("" if entry is None else entry.damage)
        if damage:
            raise CorruptError(f"run {log.run}: {damage}", where=path, todo="`ckstore verify` shows the damage")
        if entry is not None and entry.refused:
            raise BackendError(f"run {log.run}: {entry.refused}", where=path, is_refused=True)


def verify(
    path: StorePath,
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF", help="Only this checkpoint. [default: all runs of the store]", autocompletion=completion.refs
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="LEVEL", help="quick, read or decode; see above. [default: read]"),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="The same as --level decode.")] = False,
    run: Run = "main",
    remote: Annotated[bool, typer.Option("--remote", help="Also check packs in other tiers.")] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay", metavar="SCRIPT", help="Also train a stretch again: a file with train_until(state, step)."
        ),
    ] = None,
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

    With --replay, the function train_until of SCRIPT then trains from the newest whole checkpoint before REF (default:
    the newest of the run) to REF, and what it makes is compared bit for bit. A difference means that hardware has
    failed silently, or that training is not deterministic. Exit code 19: it differs.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    chosen_level = _level_of(level, is_decode=decode)
    train_until = training_code(replay)
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run=run, allow_shared_folder=allow_shared_folder) as store,
        render.progress("verifying") as on_progress,
    ):
        # Level quick reads little of each pack, so bytes would show no progress.
        advance = None if chosen_level == "quick" else on_progress
        report = store.verify(chosen_level, ref=ref, remote=remote, replay=train_until, on_progress=advance)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_verified(path, report, seconds))
    else:
        _print_verified(report, seconds)
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


def _json_of_verified(path: str, report: Report, seconds: float) -> dict[str, Any]:
    counts = ("checkpoint_count", "pack_count", "frame_count", "bytes_read", "packs_elsewhere", "files_torn")
    return {
        "path": path,
        **json_of(report, "level", "is_clean", *counts, "copied_ns"),
        "seconds": seconds,
        **json_of(report, "damage", "refused", "unreachable", "segment_count", "point_count", "notes", "replayed"),
    }


def _print_verified(report: Report, seconds: float) -> None:
    checked = f"{count(report.checkpoint_count, 'checkpoint')}, {count(report.pack_count, 'pack')}"
    if report.level != "quick":
        checked += f", {count(report.frame_count, 'frame')}"
    if report.segment_count:
        segments = count(report.segment_count, "segment")
        checked += f", {count(report.point_count, 'record')} in {segments} of journals"
    if report.packs_elsewhere:
        checked += f" ({count(report.packs_elsewhere, 'pack')} in other tiers not checked; --remote does that)"
    spent = f"{render.size(report.bytes_read)} in {render.duration(seconds)}"
    if report.level != "quick":
        spent += f" ({render.rate(report.bytes_read, seconds)})"
    for note in report.notes:
        render.say(f"Note: {note}.")
    if report.is_clean:
        render.say(f"No damage. Level {report.level}: {checked}; read {spent}.")
        if report.replayed:
            render.say(f"{report.replayed[0].upper()}{report.replayed[1:]}.")
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
    the trash, in quarantine, and in --from. Damaged records of journals are searched for in --from and in tiers. A
    missing store.json is made again from manifests and packs.

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
        render.print_json(_json_of_repaired(path, report, seconds))
    else:
        _print_repaired(report, seconds)
    lost = sum(entry.action in ("partial", "quarantine") for entry in report.entries)
    if not lost and any(segment.is_lost for segment in report.segments):
        raise CorruptError(
            "points of journals are lost",
            where=path,
            todo="repair with --from COPY if there is a copy of the store, or restore other steps",
        )
    if lost:
        raise CorruptError(
            f"{lost} {'checkpoint has' if lost == 1 else 'checkpoints have'} lost data",
            where=path,
            todo="repair with --from COPY if there is a copy of the store, or restore other checkpoints",
        )


def _print_repaired(report: RepairReport, seconds: float) -> None:
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
    for segment in report.segments:
        _print_segment(segment, is_dry_run=report.is_dry_run)
    for sentence in report.left:
        render.say(f"cannot be repaired: {sentence}")
    _print_elsewhere(report)
    render.say("")
    if report.is_dry_run:
        render.say(f"{render.size(report.bytes_copied)} would be copied to new packs; add --apply to do all of this.")
    else:
        render.say(f"Repaired in {render.duration(seconds)}; {render.size(report.bytes_copied)} copied to new packs.")


def _print_segment(segment: SegmentRepair, *, is_dry_run: bool) -> None:
    render.say(f"{segment.path}: {segment.problem}")
    if segment.sources:
        written = "would be" if is_dry_run else "was" if segment.is_done else "was not"
        render.say(f"  it {written} written again, with records from {', '.join(segment.sources)}")
    if segment.lost_steps:
        render.say(f"  lost points: {count(len(segment.lost_steps), 'step')}, {_ranges(segment.lost_steps)}")
    if segment.todo:
        render.say(f"  {segment.todo}")


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending steps as text, with those that follow each other joined: ``3 to 5, 9``."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join(" to ".join(map(str, each)) for each in ranges)


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


def _json_of_repaired(path: str, report: RepairReport, seconds: float) -> dict[str, Any]:
    found = ("packs", "packs_rescued", "claims_made", "bytes_copied", "left", "packs_elsewhere")
    return {
        "path": path,
        **json_of(report, "is_dry_run", "is_clean", "is_identity_made"),
        "checkpoints": report.entries,
        **json_of(report, *found),
        "segments": report.segments,
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


MEASURE_NBYTES = 64 << 20

_BLOCK_NBYTES = 8 << 20
_TENSORS = 16
_FINDINGS = Table(Column("what", "topic"), Column("found", is_elastic=True), Column("verdict"))


def doctor(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A store, or a folder that may become one.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also write 64 MiB to PATH and time it.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Describe this machine and a store.

    Include the output when you report a problem. Nothing is written unless --measure is given. A finding marked
    "warning" needs your attention.
    """
    # Not at module level: it loads numpy, and `ckstore --help` imports every command's module.
    from ckstore.ops.inspect.doctor import Finding, diagnose_machine, diagnose_store

    findings = diagnose_machine()
    if path is not None:
        findings += diagnose_store(path, allow_shared_folder=allow_shared_folder)
    if measure:
        if path is None:
            raise NotFoundError("--measure needs a PATH", todo="name a folder on the disk to measure")
        seconds = _plain_write(Path(path.removeprefix("file://")), MEASURE_NBYTES)
        found = f"{render.rate(MEASURE_NBYTES, seconds)}: {render.size(MEASURE_NBYTES)} written and synced"
        findings.append(Finding("plain write", found))
    if as_json:
        render.print_json({"path": path, "findings": findings})
        return
    if render.is_terminal():
        for one in findings:
            mark = "" if one.verdict == "ok" else f"[{one.verdict}] "
            render.say(f"{one.topic:<14} {mark}{one.found}")
    else:
        _FINDINGS.print(findings)


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: its name, its duration, and its bytes on the disk."""

    what: str
    seconds: float
    disk_nbytes: int


def bench(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder on the disk to measure; it must exist.")],
    mib: Annotated[int, typer.Option("--size", min=16, max=65536, metavar="MIB", help="MiB of state.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Measure commits and restores on PATH's disk.

    They are compared with a plain write of the same size. The state is similar to that of a training: random weights as
    precise as bfloat16, and float32 optimizer moments. Everything is written to a temporary folder in PATH, which takes
    about four times the size and is removed at the end.
    """
    folder = Path(path.removeprefix("file://"))
    if not folder.is_dir():
        raise NotFoundError("no such folder", where=folder, todo="name a folder on the disk to measure")
    with tempfile.TemporaryDirectory(prefix=".ckstore-bench-", dir=folder) as scratch:
        plain = _plain_write(Path(scratch), mib << 20)
        timings = [Timing("plain write + fsync", plain, mib << 20), *_measure(Path(scratch) / "store", mib << 20)]
    if as_json:
        render.print_json({"path": path, "state_nbytes": mib << 20, "timings": timings})
        return

    def relative(timing: Timing) -> str:
        return f"{plain / max(timing.seconds, 1e-9):.2f}x as fast"

    table = Table(
        Column("what"),
        Column("time", "seconds", render.duration, is_number=True),
        Column("rate of state", lambda timing: render.rate(mib << 20, timing.seconds), is_number=True),
        Column("on disk", "disk_nbytes", render.size, is_number=True),
        Column("vs plain write", relative, is_number=True),
    )
    table.print(timings, title=f"state of {render.size(mib << 20)} in {folder}")


def _plain_write(folder: Path, nbytes: int) -> float:
    """Return the seconds to write and sync random bytes in the folder."""
    block = memoryview(os.urandom(min(_BLOCK_NBYTES, nbytes)))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = SYSTEM_CLOCK.monotonic()
        for _ in range(0, nbytes, len(block)):
            rest = block
            while len(rest):
                rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())
        return SYSTEM_CLOCK.monotonic() - start


def _measure(folder: Path, nbytes: int) -> list[Timing]:
    state, change = _synthetic_state(nbytes)
    timings: list[Timing] = []
    with ckstore.open(folder) as store:
        for what in ("commit, first", "commit, a tenth changed", "commit, all changed"):
            if what != "commit, first":
                change(_TENSORS if what.endswith("all changed") else max(1, _TENSORS // 10))
            receipt = store.commit(state, len(timings))
            timings.append(Timing(what, receipt.seconds["total"], receipt.bytes_written))
        timings += _measure_reading(store, state)
    return timings


def _measure_reading(store: Store, state: Any) -> list[Timing]:
    stored = store.info("latest").bytes_stored
    start = SYSTEM_CLOCK.monotonic()
    store.restore(into=state)
    into = SYSTEM_CLOCK.monotonic()
    store.restore()
    fresh = SYSTEM_CLOCK.monotonic()
    store.verify("read", ref="latest")
    verified = SYSTEM_CLOCK.monotonic()
    return [
        Timing("restore into the state", into - start, stored),
        Timing("restore to new memory", fresh - into, stored),
        Timing("verify --level read", verified - fresh, stored),
    ]


def _synthetic_state(nbytes: int) -> tuple[dict[str, Any], Callable[[int], None]]:
    """Return a state, and a function that changes some of its tensors as a training step would."""
    import numpy as np

    rng = np.random.default_rng(0)
    count = nbytes // 4 // _TENSORS
    tensors = [rng.standard_normal(count, dtype=np.float32) * np.float32(0.02) for _ in range(_TENSORS)]
    for weights in tensors[: _TENSORS // 2]:
        # Keep the upper half of each float32, which is a bfloat16.
        weights.view(np.uint32)[:] &= 0xFFFF0000

    def change(tensor_count: int) -> None:
        for tensor in tensors[:tensor_count]:
            tensor *= np.float32(1.01)

    return {"model": {f"layer{index}": tensor for index, tensor in enumerate(tensors)}, "step": 0}, change
