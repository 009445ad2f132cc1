"""Commands that write one file (``restore``, ``export``, ``report``), and ``import`` of the files of other tools."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import completion, render
from ckstore.cli.parser import (
    AsJson,
    Force,
    Only,
    OutFile,
    PointedPath,
    PointedRef,
    Run,
    Shared,
    StorePath,
    followed,
    opened,
)
from ckstore.cli.render import STEP, Column, Table, json_of, metrics_of, name_of, size
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import NotFoundError, UsageError
from ckstore.results import Info, Receipt

if TYPE_CHECKING:
    from ckstore.ops.interop.model_folder import ExportedModel
    from ckstore.ops.interop.run import ImportEntry, ImportReport
    from ckstore.state.capture import Captured


ORIGIN = ("seq", "step", "checkpoint_id", "run")
"""Fields of Info that name the source of a file in the JSON of restore and export."""


def restore(
    path: PointedPath,
    output_file: OutFile,
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            help="Which checkpoint, see `ckstore --help`. [default: the one that a pointer names, else the newest "
            "complete one]",
            autocompletion=completion.refs,
        ),
    ] = None,
    only: Only = None,
    fallback: Annotated[
        bool,
        typer.Option("--fallback", help="If the newest is damaged, restore the newest undamaged one."),
    ] = False,
    force: Force = False,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Restore a checkpoint into a .pt or .npz file.

    \b
    .pt, .pth, .ckpt  the whole state, for torch.load(FILE, weights_only=True)
    .npz              states of numpy arrays and numbers, by dotted path

    The state must fit into memory. Every chunk is checked; if one is damaged, the command fails and writes no file.
    Python code does not need this command: store.restore() returns the state.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    from ckstore.ops.interop.export import check_suffix, check_target, write_state

    check_suffix(output_file)
    check_target(output_file, force=force)
    start = SYSTEM_CLOCK.monotonic()
    path, run, ref = followed(path, run, ref)
    state, info = restored(path, ref, only=only, run=run, allow_shared_folder=allow_shared_folder, fallback=fallback)
    with render.progress(f"writing {render.one_line(output_file.name)}"):
        notes = write_state(state, output_file, force=force)
    seconds = SYSTEM_CLOCK.monotonic() - start
    nbytes = output_file.stat().st_size
    if as_json:
        written = {"file": str(output_file), "nbytes": nbytes, "seconds": seconds, "notes": notes}
        render.print_json({**json_of(info, *ORIGIN), **written})
        return
    how = f"{render.size(nbytes)} in {render.duration(seconds)}"
    render.say(f"Restored {name_of(info, ref)} of run {run} to {output_file}: {how}.")
    for leaf, note in notes.items():
        render.say(f"  {leaf}: {note}")


def restored(
    path: str,
    ref: str | None,
    *,
    only: Sequence[str] | None,
    run: str,
    allow_shared_folder: bool,
    fallback: bool = False,
) -> tuple[Any, Info]:
    """Restore a state with a progress bar on a terminal; return it and its checkpoint."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        with render.progress("restoring") as on_progress:
            state = store.restore(ref, only=only or None, fallback=fallback, on_progress=on_progress)
        info = store.restored
        assert info is not None, "a restore sets it"
    return state, info


def export(
    path: PointedPath,
    ref: PointedRef = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The .safetensors file to write.")
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", metavar="DIR", help="The folder to write, for from_pretrained of transformers or PEFT."),
    ] = None,
    only: Only = None,
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            "--strip-prefix", metavar="PREFIX", help="Remove this from the names, such as 'model.'. [--hf: 'model.']"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="fp32|bf16|fp16", help="With --hf: convert floating-point weights."),
    ] = None,
    max_shard: Annotated[
        str | None, typer.Option("--max-shard", metavar="SIZE", help="With --hf: largest file. [default: 5GB]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Export weights to a .safetensors file, or to a model folder.

    \b
    -o FILE   the tensors, by dotted path: model.layers.0.weight
    --hf DIR  a folder that from_pretrained loads: weights, config.json, tokenizer

    The format cannot hold plain values; they are left out and listed. A tensor with two names is written once. The
    tensors need not fit into memory, unless with --hf transformers must change their layout (fused experts).
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    if (output_file is None) == (hf is None):
        raise UsageError("name one target", todo="write a file with -o FILE.safetensors, or a folder with --hf DIR")
    path, run, named = followed(path, run, ref)
    ref = named or "latest"
    opening: dict[str, Any] = {"run": run, "allow_shared_folder": allow_shared_folder}
    options: dict[str, Any] = {"only": only or None, "force": force}
    if output_file is not None:
        if dtype is not None or max_shard is not None:
            raise UsageError("--dtype and --max-shard apply to a folder only", todo="use --hf DIR instead of -o FILE")
        _export_file(path, ref, output_file, opening, {**options, "strip_prefix": strip_prefix or ""}, as_json=as_json)
        return
    start = SYSTEM_CLOCK.monotonic()
    options |= {"strip_prefix": strip_prefix, "dtype": dtype}
    if max_shard is not None:
        options["max_shard_nbytes"] = shard_nbytes(max_shard)
    assert hf is not None, "one target is given"
    with (
        opened(path, **opening) as store,
        render.progress(f"writing {render.one_line(hf.name)}") as on_progress,
    ):
        exported = store.export_hf(ref, hf, on_progress=on_progress, **options)
    _print_folder(exported, ref, SYSTEM_CLOCK.monotonic() - start, as_json=as_json)


def _export_file(
    path: str, ref: str, target: Path, opening: dict[str, Any], options: dict[str, Any], *, as_json: bool
) -> None:
    from ckstore.ops.interop.export import check_target

    if target.suffix != ".safetensors":
        raise UsageError(
            "the name must end in .safetensors",
            where=target,
            todo="for a .pt or .npz file use `ckstore restore`",
        )
    check_target(target, force=options["force"])
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, **opening) as store,
        render.progress(f"writing {render.one_line(target.name)}") as on_progress,
    ):
        exported = store.export_safetensors(ref, target, on_progress=on_progress, **options)
    info = exported.info
    assert info is not None, "it is of a checkpoint"
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        written = {"file": str(target), **json_of(exported, "tensor_count", "nbytes"), "seconds": seconds}
        render.print_json({**json_of(info, *ORIGIN), **written, **json_of(exported, "shared", "left_out")})
        return
    render.say(
        f"Exported {render.count(exported.tensor_count, 'tensor')} of {name_of(info, ref)} of run {info.run} to "
        f"{target}: {render.size(exported.nbytes)} in {render.duration(seconds)}."
    )
    for name, first in exported.shared.items():
        render.say(f"  {name}: the same tensor as {first}, written once")
    _print_exceptions(exported.left_out)


def _print_exceptions(left_out: Mapping[str, str]) -> None:
    for name, why in left_out.items():
        render.say(f"  {name}: left out: {why}")


def _print_folder(exported: ExportedModel, ref: str, seconds: float, *, as_json: bool) -> None:
    if as_json:
        written = json_of(exported, "folder", "files", "tensor_count", "nbytes")
        rest = json_of(exported, "tied", "left_out", "notes")
        render.print_json({**json_of(exported.info, *ORIGIN), **written, "seconds": seconds, **rest})
        return
    info = exported.info
    render.say(
        f"Exported {render.count(exported.tensor_count, 'tensor')} of {name_of(info, ref)} of run {info.run} to "
        f"{exported.folder}: {render.size(exported.nbytes)} in {render.duration(seconds)}."
    )
    render.say(f"  files: {', '.join(exported.files)}")
    for name, first in exported.tied.items():
        render.say(f"  {name}: tied to {first}, written once")
    _print_exceptions(exported.left_out)
    for note in exported.notes:
        render.say(note)


_DECIMAL_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def shard_nbytes(text: str) -> int:
    """Return the bytes of a size such as ``5GB``; units are powers of 1000, as in transformers, and ``GiB`` of 1024."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    nbytes = 0
    if found is not None:
        unit = _DECIMAL_UNITS[found[2]]
        nbytes = int(float(found[1]) * (1024 ** list(_DECIMAL_UNITS).index(found[2]) if found[3] else unit))
    if nbytes < 1:
        raise UsageError("not a size", where=repr(text)[:80], todo="write for example 5GB or 500MB")
    return nbytes


def report(
    path: StorePath,
    output_file: OutFile,
    force: Force = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Write one HTML page about the store.

    The page needs no network and no other file. It shows commits over time, bytes before and after compression, sizes
    by tensor group, delta chains and locations of packs. It also shows what is kept and why, and what `ckstore gc`
    would free. It is made from manifests; no tensor is read, and nothing is changed.
    """
    from ckstore.ops.interop.export import check_target, new_file

    if output_file.suffix not in (".html", ".htm"):
        raise UsageError("the name must end in .html", where=output_file)
    check_target(output_file, force=force)
    start = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run="main", allow_shared_folder=allow_shared_folder) as store,
        render.progress("reading manifests"),
    ):
        page = store.report().encode()
    with new_file(output_file, force=force) as file:
        file.write(page)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json({"file": str(output_file), "nbytes": len(page), "seconds": seconds})
        return
    render.say(f"Wrote {output_file}: {render.size(len(page))} in {render.duration(seconds)}. Open it in any browser.")


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
        render.print_json(_json_of_import(report, seconds))
    else:
        _print_import(report, seconds)
    if report.is_partial:
        raise typer.Exit(EXIT_PARTIAL)


def _import(
    path: str, source: Path, opening: dict[str, Any], options: dict[str, Any], *, is_best: bool, dry_run: bool
) -> ImportReport:
    with contextlib.ExitStack() as stack:
        on_progress = stack.enter_context(render.progress("importing"))
        try:
            store = ckstore.open(path, create=not dry_run, **opening)
        except NotFoundError:
            # A dry run does not create the store; the plan does not need it.
            return _plan_import(source, opening["run"], **options)
        stack.enter_context(store)
        policy = ckstore.Policy(compression="best" if is_best else "fast")
        return store.import_from(source, policy=policy, dry_run=dry_run, on_progress=on_progress, **options)


def _plan_import(source: Path, run: str, *, step: int | None = None, **options: Any) -> ImportReport:
    """Return what ``Store.import_from`` would do in a store that does not exist yet."""
    from ckstore.config import check_step
    from ckstore.ops.interop.run import ImportRequest, run_import

    def refuse(captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
        raise AssertionError("a plan commits nothing")

    checked = None if step is None else check_step(step)
    names = {"numbered": False, "exclude": (), "skip_leaf": (), **options}
    wanted = ImportRequest.of(source, checked, names["numbered"], names["exclude"], names["skip_leaf"])
    return run_import(wanted, run, {}, refuse, dry_run=True)


def _print_import(report: ImportReport, seconds: float) -> None:
    new = [entry for entry in report.entries if entry.action == "import"]
    verb = "would be imported" if report.is_dry_run else "were imported"
    title = f"run {report.run}: {len(new)} of {len(report.entries)} checkpoints {verb}"
    _import_table(is_dry_run=report.is_dry_run).print(report.entries, title=title)
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
        if not entry.is_compared:
            render.say(f"left out: {entry.name}: {entry.reason}")
    for name, why in report.left_out.items():
        render.say(f"left out: {name}: {why}")
    if report.is_partial:
        render.say(f"Something that may contain state was left out (exit code {EXIT_PARTIAL}).")


def _import_table(*, is_dry_run: bool) -> Table:
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


def _json_of_import(report: ImportReport, seconds: float) -> dict[str, Any]:
    return {
        **json_of(report, "source", "run", "is_dry_run", "bytes_before", "bytes_stored", "ratio"),
        "seconds": seconds,
        **json_of(report, "is_partial", "left_out", "warnings"),
        "checkpoints": report.entries,
    }
