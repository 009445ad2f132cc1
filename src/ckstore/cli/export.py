"""``ckstore export``: the tensors of a checkpoint as a safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckstore.cli import output
from ckstore.cli.options import AsJson, Force, Only, OutFile, Ref, Run, Shared, StorePath
from ckstore.cli.restored import origin_of, restored
from ckstore.cli.shown import name_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.adapters.safetensors import Exported


def run(
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

    Names are dotted paths, such as model.layers.0.weight. Plain values do not fit into the format and are listed as
    left out. A tensor that stands at two paths is written once, and the file says where. The tensors must fit into
    memory.
    """
    from ckstore.adapters.safetensors import export_safetensors
    from ckstore.outfile import check_target

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
    with output.progress(f"writing {output.one_line(output_file.name)}") as on_progress:
        exported = export_safetensors(state, output_file, force=force, metadata=origin, on_progress=on_progress)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        written = {"file": str(output_file), "tensor_count": exported.tensor_count, "nbytes": exported.nbytes}
        told = {"shared": exported.shared, "left_out": exported.left_out}
        output.print_json({**origin_of(info), **written, "seconds": seconds, **told})
        return
    output.say(
        f"Exported {exported.tensor_count} tensors of {name_of(info, ref)} of run {run} to {output_file}: "
        f"{output.size(exported.nbytes)} in {output.duration(seconds)}."
    )
    _print_rest(exported)


def _print_rest(exported: Exported) -> None:
    for name, first in exported.shared.items():
        output.say(f"  {name}: the same tensor as {first}, written once")
    for name, why in exported.left_out.items():
        output.say(f"  {name}: left out, {why}")
