"""``ckstore import``: commit checkpoints of other tools to a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath
from ckstore.cli.render import STEP, Column, Table, json_of, metrics_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckstore.ops.interop.run import ImportEntry, ImportReport


EXIT_PARTIAL = 3
"""Exit code of an import that left something out that may contain state."""


def import_(
    path: StorePath,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A file, a checkpoint's folder, or a folder of checkpoints.")
    ],
    run: Run = "main",
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="The step of a single checkpoint.")
    ] = None,
    numbered: Annotated[
        bool, typer.Option("--numbered", help="Number the checkpoints 0, 1, 2 in the order of their names.")
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out this file or folder: a path below SOURCE, or '**/NAME' for any depth. May be repeated.",
        ),
    ] = None,
    skip_leaf: Annotated[
        list[str] | None,
        typer.Option(
            "--skip-leaf",
            metavar="GLOB",
            help="Leave out leaves whose dotted path matches, such as args.callback. May be repeated.",
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Spend more time on compression, for fewer bytes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Import checkpoints of other tools.

    \b
    .pt .pth .bin .ckpt .pkl   files of torch.save (nanoGPT, Lightning)
    .safetensors               files of safetensors
    checkpoint-500             folders of Trainer, accelerate and DeepSpeed
    .metadata, .distcp         folders of torch.distributed.checkpoint

    Checkpoints are committed in the order of their steps, which are read from names and contents. Steps that the run
    already has are skipped, so an interrupted import can be repeated. Files of torch are loaded with weights_only=True,
    in a separate process. SOURCE is not changed. If PATH has no store, one is made.

    Everything that may contain state and is not imported is listed with the reason, and the exit code is 3.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    start = SYSTEM_CLOCK.monotonic()
    options: dict[str, Any] = {
        "step": step, "numbered": numbered, "exclude": exclude or (), "skip_leaf": skip_leaf or ()
    }  # fmt: skip
    opening = {"run": run, "allow_shared_folder": allow_shared_folder}
    report = _import(path, source, opening, options, is_best=best, dry_run=dry_run)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)
    if report.is_partial:
        raise typer.Exit(EXIT_PARTIAL)


def _import(
    path: str, source: Path, opening: dict[str, Any], options: dict[str, Any], *, is_best: bool, dry_run: bool
) -> ImportReport:
    from ckstore.api import plan_import

    with contextlib.ExitStack() as stack:
        on_progress = stack.enter_context(render.progress("importing"))
        try:
            store = ckstore.open(path, create=not dry_run, **opening)
        except NotFoundError:
            # A dry run does not create the store; the plan does not need it.
            return plan_import(source, run=opening["run"], **options)
        stack.enter_context(store)
        policy = ckstore.Policy(compression="best" if is_best else "fast")
        return store.import_from(source, policy=policy, dry_run=dry_run, on_progress=on_progress, **options)


def _print(report: ImportReport, seconds: float) -> None:
    new = [entry for entry in report.entries if entry.action == "import"]
    verb = "would be imported" if report.is_dry_run else "were imported"
    title = f"run {report.run}: {len(new)} of {len(report.entries)} checkpoints {verb}"
    _table(is_dry_run=report.is_dry_run).print(report.entries, title=title)
    _print_left_out(report)
    render.say("")
    if report.is_dry_run:
        nbytes = sum(entry.nbytes for entry in new)
        render.say(f"{render.size(nbytes)} of files would be imported; nothing was changed.")
        return
    before, after = report.bytes_before, report.bytes_stored
    if after:
        render.say(
            f"{render.size(before)} of files take {render.size(after)} in the store: "
            f"{render.ratio(before, after).removesuffix('x')} times smaller."
            if after <= before
            else f"{render.size(before)} of files take {render.size(after)} in the store."
        )
    if new:
        imported = sum(entry.nbytes for entry in new)
        render.say(f"Imported {render.size(imported)} in {render.duration(seconds)}.")


def _print_left_out(report: ImportReport) -> None:
    for warning in report.warnings:
        render.say(warning)
    for entry in report.entries:
        for warning in entry.warnings:
            render.say(f"step {entry.step}: {warning}")
        for file, what in entry.without_state.items():
            render.say(f"no state: {file}: {what}")
        for leaf, why in entry.left_out.items():
            render.say(f"left out of step {entry.step}: {leaf}: {why}")
        if entry.action == "leave out" or not entry.is_compared:
            render.say(f"left out: {entry.name}: {entry.reason}")
    for name, why in report.left_out.items():
        render.say(f"left out: {name}: {why}")
    if report.is_partial:
        render.say(f"Something that may contain state was left out (exit code {EXIT_PARTIAL}).")


def _table(*, is_dry_run: bool) -> Table:
    def action(entry: ImportEntry) -> str:
        return "imported" if entry.action == "import" and not is_dry_run else entry.action

    def ratio_of(entry: ImportEntry) -> str | None:
        return None if entry.bytes_written is None else render.ratio(entry.nbytes, entry.bytes_written)

    return Table(
        STEP,
        Column("from", "name", is_elastic=True),
        Column("what", lambda entry: "+".join(entry.kinds), worth=1),
        Column("files", "nbytes", size, is_number=True, worth=4),
        Column("stored", "bytes_written", size, is_number=True, worth=5),
        Column("ratio", ratio_of, is_number=True, worth=3),
        Column("metrics", "metrics", metrics_of, is_elastic=True, worth=0),
        Column("action", action),
        Column("why", "reason", is_elastic=True, worth=2),
    )


def _json_of(report: ImportReport, seconds: float) -> dict[str, Any]:
    return {
        **json_of(report, "source", "run", "is_dry_run", "bytes_before", "bytes_stored", "ratio"),
        "seconds": seconds,
        **json_of(report, "is_partial", "left_out", "warnings"),
        "checkpoints": report.entries,
    }
