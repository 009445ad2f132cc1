"""``ckstore report``: write one HTML page about the store."""

from __future__ import annotations

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Force, OutFile, Shared, StorePath, opened
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError


def report(
    path: StorePath,
    output_file: OutFile,
    force: Force = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Write one HTML page about the store.

    The page needs no network and no other file. It shows commits over time, bytes before and after compression, sizes
    by tensor group, delta chains, locations of packs, what is kept and why, and what `ckstore gc` would free. It is
    made from manifests; no tensor is read, and nothing is changed.
    """
    from ckstore.ops.interop.export import check_target, new_file

    if output_file.suffix not in (".html", ".htm"):
        raise UsageError("the name must end in .html", where=output_file)
    check_target(output_file, force=force)
    begun = SYSTEM_CLOCK.monotonic()
    with (
        opened(path, run="main", allow_shared_folder=allow_shared_folder) as store,
        render.progress("reading manifests"),
    ):
        page = store.report().encode()
    with new_file(output_file, force=force) as file:
        file.write(page)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        render.print_json({"file": str(output_file), "nbytes": len(page), "seconds": seconds})
        return
    render.say(f"Wrote {output_file}: {render.size(len(page))} in {render.duration(seconds)}. Open it in any browser.")
