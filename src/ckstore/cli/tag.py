"""``ckstore tag``: give a checkpoint a name."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.shown import json_of, name_of


def run(
    path: StorePath,
    ref: Ref,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag; one that exists moves.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Give a checkpoint a name. Tagged checkpoints are never deleted."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.tag(ref, name)
        info = store.info(name)
    if as_json:
        output.print_json(json_of(info))
    else:
        output.say(f"{name} now names {name_of(info, ref)} of run {run}.")
