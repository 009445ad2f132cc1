"""``ckstore import``: checkpoints of other tools become the history of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath
from ckstore.cli.output import NOTHING, Column
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckstore.importing.report import ImportEntry, ImportReport

PARTLY = 3
"""Exit code: what could be imported was, and something that may hold a state was left out."""

_COLUMNS = (
    Column("step", is_number=True),
    Column("from", is_elastic=True),
    Column("what", worth=1),
    Column("files", is_number=True, worth=4),
    Column("stored", is_number=True, worth=5),
    Column("ratio", is_number=True, worth=3),
    Column("metrics", is_elastic=True, worth=0),
    Column("action"),
    Column("why", is_elastic=True, worth=2),
)


def run(
    path: StorePath,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A file, a checkpoint's folder, or a folder of checkpoints.")
    ],
    run: Run = "main",
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="The step of a single checkpoint.")
    ] = None,
    numbered: Annotated[bool, typer.Option("--numbered", help="Steps 0, 1, 2 in the order of names.")] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out this file or folder, a path below SOURCE; '**/NAME': at every depth. May be repeated.",
        ),
    ] = None,
    skip_leaf: Annotated[
        list[str] | None,
        typer.Option(
            "--skip-leaf",
            metavar="GLOB",
            help="Leave out these leaves, a dotted path in the state such as args.callback. May be repeated.",
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Spend more time on coding, for fewer bytes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Import what other tools have saved.

    \b
    .pt .pth .bin .ckpt .pkl   files of torch.save (nanoGPT, Lightning)
    .safetensors               such files
    checkpoint-500             such folders (Trainer, accelerate, DeepSpeed)
    .metadata, .distcp         folders of torch.distributed.checkpoint

    They are committed in the order of their steps, which names and contents tell. Steps that the run holds are
    skipped, so that an interrupted import goes on where it stopped. Files of torch are loaded with weights_only=True,
    in a process of their own. SOURCE is only read. PATH is made if there is no store yet.

    Everything that may hold a state and is not imported is listed with the reason; the exit code is then 3.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    begun = SYSTEM_CLOCK.monotonic()
    options: dict[str, Any] = {
        "step": step, "numbered": numbered, "exclude": exclude or (), "skip_leaf": skip_leaf or ()
    }  # fmt: skip
    opening = {"run": run, "allow_shared_folder": allow_shared_folder}
    report = _import(path, source, opening, options, is_best=best, dry_run=dry_run)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        output.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)
    if report.is_partial:
        raise typer.Exit(PARTLY)


def _import(
    path: str, source: Path, opening: dict[str, Any], options: dict[str, Any], *, is_best: bool, dry_run: bool
) -> ImportReport:
    import ckstore
    from ckstore.importer import plan_import

    with contextlib.ExitStack() as stack:
        on_progress = stack.enter_context(output.progress("importing"))
        try:
            store = ckstore.open(path, create=not dry_run, **opening)
        except NotFoundError:
            # A dry run makes no store; what there is to import can be said without one.
            return plan_import(source, run=opening["run"], **options)
        stack.enter_context(store)
        policy = ckstore.Policy(compression="best" if is_best else "fast")
        return store.import_from(source, policy=policy, dry_run=dry_run, on_progress=on_progress, **options)


def _print(report: ImportReport, seconds: float) -> None:
    new = [entry for entry in report.entries if entry.action == "import"]
    would = "would be imported" if report.is_dry_run else "were imported"
    title = f"run {report.run}: {len(new)} of {len(report.entries)} checkpoints {would}"
    output.print_table(_COLUMNS, [_cells(entry, report.is_dry_run) for entry in report.entries], title=title)
    _print_left_out(report)
    output.say("")
    if report.is_dry_run:
        nbytes = sum(entry.nbytes for entry in new)
        output.say(f"{output.size(nbytes)} of files would be read; nothing was changed.")
        return
    before, after = report.bytes_before, report.bytes_stored
    if after:
        output.say(
            f"{output.size(before)} of files are {output.size(after)} in the store: the history is "
            f"{output.ratio(before, after).removesuffix('x')} times smaller."
            if after <= before
            else f"{output.size(before)} of files are {output.size(after)} in the store."
        )
    if new:
        imported = sum(entry.nbytes for entry in new)
        output.say(f"Imported {output.size(imported)} in {output.duration(seconds)}.")


def _print_left_out(report: ImportReport) -> None:
    for warning in report.warnings:
        output.say(warning)
    for entry in report.entries:
        for warning in entry.warnings:
            output.say(f"step {entry.step}: {warning}")
        for file, what in entry.without_state.items():
            output.say(f"not needed: {file}: {what}")
        for leaf, why in entry.left_out.items():
            output.say(f"left out of step {entry.step}: {leaf}: {why}")
        if entry.action == "leave out" or not entry.is_compared:
            output.say(f"left out: {entry.name}: {entry.reason}")
    for name, why in report.left_out.items():
        output.say(f"left out: {name}: {why}")
    if report.is_partial:
        output.say(f"Something that may hold a state was left out (exit code {PARTLY}).")


def _cells(entry: ImportEntry, is_dry_run: bool) -> list[str]:
    stored = entry.bytes_written
    return [
        str(entry.step),
        entry.name,
        "+".join(entry.kinds),
        output.size(entry.nbytes),
        output.size(stored),
        NOTHING if stored is None else output.ratio(entry.nbytes, stored),
        " ".join(f"{name}={output.number(value)}" for name, value in sorted(entry.metrics.items())) or NOTHING,
        "imported" if entry.action == "import" and not is_dry_run else entry.action,
        entry.reason,
    ]


def _json_of(report: ImportReport, seconds: float) -> dict[str, Any]:
    return {
        "source": report.source,
        "run": report.run,
        "is_dry_run": report.is_dry_run,
        "bytes_before": report.bytes_before,
        "bytes_stored": report.bytes_stored,
        "ratio": report.ratio,
        "seconds": seconds,
        "is_partial": report.is_partial,
        "left_out": dict(report.left_out),
        "warnings": list(report.warnings),
        "checkpoints": [{name: getattr(entry, name) for name in type(entry).__slots__} for entry in report.entries],
    }
