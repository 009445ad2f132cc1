"""Commands that write one file: ``restore`` (.pt, .npz), ``export`` (.safetensors) and ``report`` (.html)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Force, Only, OutFile, Ref, Run, Shared, StorePath, opened
from ckstore.cli.render import json_of, name_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError
from ckstore.results import Info

if TYPE_CHECKING:
    from ckstore.ops.interop.export import Exported


ORIGIN = ("seq", "step", "checkpoint_id", "run")
"""Fields of Info that name the source of a file in the JSON of restore and export."""


def restore(
    path: StorePath,
    output_file: OutFile,
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            help="Which checkpoint, see `ckstore --help`. [default: the newest complete one]",
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
    .pt, .pth  the whole state; torch.load(FILE, weights_only=True) reads it
    .npz       states of numpy arrays and numbers, each under its dotted path

    The state must fit into memory. Every chunk is checked; if one is damaged, the command fails and writes no file.
    Python code does not need this command: store.restore() returns the state.
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    from ckstore.ops.interop.export import check_suffix, check_target, write_state

    check_suffix(output_file)
    check_target(output_file, force=force)
    start = SYSTEM_CLOCK.monotonic()
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
    path: StorePath,
    ref: Ref,
    output_file: OutFile,
    only: Only = None,
    force: Force = False,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Export tensors to a .safetensors file.

    Names are dotted paths, such as model.layers.0.weight. The format cannot hold plain values; they are left out and
    listed. A tensor with two paths is written once, and the metadata of the file names the other path. The tensors must
    fit into memory.
    """
    from ckstore.ops.interop.export import check_target, export_safetensors

    if output_file.suffix != ".safetensors":
        raise UsageError(
            "the name must end in .safetensors",
            where=output_file,
            todo="for a .pt or .npz file use `ckstore restore`",
        )
    check_target(output_file, force=force)
    start = SYSTEM_CLOCK.monotonic()
    state, info = restored(path, ref, only=only, run=run, allow_shared_folder=allow_shared_folder)
    origin = {"ckstore.checkpoint_id": info.checkpoint_id, "ckstore.run": run, "ckstore.step": str(info.step)}
    with render.progress(f"writing {render.one_line(output_file.name)}") as on_progress:
        exported = export_safetensors(state, output_file, force=force, metadata=origin, on_progress=on_progress)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        written = {"file": str(output_file), **json_of(exported, "tensor_count", "nbytes"), "seconds": seconds}
        render.print_json({**json_of(info, *ORIGIN), **written, **json_of(exported, "shared", "left_out")})
        return
    render.say(
        f"Exported {render.count(exported.tensor_count, 'tensor')} of {name_of(info, ref)} of run {run} to "
        f"{output_file}: {render.size(exported.nbytes)} in {render.duration(seconds)}."
    )
    _print_rest(exported)


def _print_rest(exported: Exported) -> None:
    for name, first in exported.shared.items():
        render.say(f"  {name}: the same tensor as {first}, written once")
    for name, why in exported.left_out.items():
        render.say(f"  {name}: left out: {why}")


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
