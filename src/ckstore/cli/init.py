"""``ckstore init``: make a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import ckstore
from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath
from ckstore.errors import NotFoundError


def init(
    path: StorePath,
    shared: Annotated[
        str | None,
        typer.Option(
            "--shared",
            metavar="WHO",
            help="Share it: group (the folder's group may use it), or umask (files get the umask's mode).",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make a store in a new or empty folder.

    An existing store is not changed. You rarely need this command: ckstore.open makes the store on first use. Everyone
    who shares a store can read and remove the files that others made in it. Files that root makes belong to the store's
    owner.
    """
    is_new = False
    try:
        store = ckstore.open(path, create=False, allow_shared_folder=allow_shared_folder)
    except NotFoundError:
        is_new = True
        given: Any = shared
        store = ckstore.open(path, allow_shared_folder=allow_shared_folder, shared=given)
    store.close()
    if as_json:
        render.print_json({"path": path, "is_new": is_new})
    elif is_new:
        render.say(f"Made a store at {path}.")
    else:
        render.say(f"There is a store at {path} already; nothing was changed.")
