"""``ckstore untag``: remove a name."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath, opened


def run(
    path: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag to remove.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Remove a tag. The checkpoint stays, but is no longer protected by this name."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.untag(name)
    if as_json:
        output.print_json({"run": run, "removed": name})
    else:
        output.say(f"Removed tag {name} from run {run}; the checkpoint is still there.")
