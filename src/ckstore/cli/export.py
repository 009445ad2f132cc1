"""``ckstore export``: write the tensors of a checkpoint to a safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Force, Only, OutFile, Ref, Run, Shared, StorePath
from ckstore.cli.render import json_of, name_of
from ckstore.cli.restore import ORIGIN, restored
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.ops.interop.export import Exported


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
    begun = SYSTEM_CLOCK.monotonic()
    state, info = restored(path, ref, only=only, run=run, allow_shared_folder=allow_shared_folder)
    origin = {"ckstore.checkpoint_id": info.checkpoint_id, "ckstore.run": run, "ckstore.step": str(info.step)}
    with render.progress(f"writing {render.one_line(output_file.name)}") as on_progress:
        exported = export_safetensors(state, output_file, force=force, metadata=origin, on_progress=on_progress)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        written = {"file": str(output_file), **json_of(exported, "tensor_count", "nbytes"), "seconds": seconds}
        render.print_json({**json_of(info, *ORIGIN), **written, **json_of(exported, "shared", "left_out")})
        return
    render.say(
        f"Exported {exported.tensor_count} tensors of {name_of(info, ref)} of run {run} to {output_file}: "
        f"{render.size(exported.nbytes)} in {render.duration(seconds)}."
    )
    _print_rest(exported)


def _print_rest(exported: Exported) -> None:
    for name, first in exported.shared.items():
        render.say(f"  {name}: the same tensor as {first}, written once")
    for name, why in exported.left_out.items():
        render.say(f"  {name}: left out, {why}")
