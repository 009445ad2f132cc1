"""``ckstore tag`` gives a checkpoint a name, and ``ckstore untag`` removes one."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.render import json_of_info, name_of


def tag(
    path: StorePath,
    ref: Ref,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag. An existing tag is moved.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Give a checkpoint a name. Tagged checkpoints are never deleted."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.tag(ref, name)
        info = store.info(name)
    if as_json:
        render.print_json(json_of_info(info))
    else:
        render.say(f"{name} now names {name_of(info, ref)} of run {run}.")


def untag(
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
        render.print_json({"run": run, "removed": name})
    else:
        render.say(f"Removed tag {name} from run {run}; the checkpoint is still there.")
