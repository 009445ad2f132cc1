"""``ckstore restore``: write a checkpoint to a file that can be read without ckstore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Force, Only, OutFile, Run, Shared, StorePath, opened
from ckstore.cli.render import json_of, name_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.results import Info

ORIGIN = ("seq", "step", "checkpoint_id", "run")
"""The fields of Info that name the source of a file in the JSON of restore and export."""


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
    begun = SYSTEM_CLOCK.monotonic()
    state, info = restored(path, ref, only=only, run=run, allow_shared_folder=allow_shared_folder, fallback=fallback)
    with render.progress(f"writing {render.one_line(output_file.name)}"):
        notes = write_state(state, output_file, force=force)
    seconds = SYSTEM_CLOCK.monotonic() - begun
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
    """Restore a state, with a progress bar on a terminal; return it and the facts about its checkpoint."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        with render.progress("restoring") as on_progress:
            state = store.restore(ref, only=only or None, fallback=fallback, on_progress=on_progress)
        info = store.restored
        assert info is not None, "a restore says what it restored"
    return state, info
