"""``ckstore init``: make a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath
from ckstore.errors import NotFoundError


def init(
    path: StorePath,
    shared: Annotated[
        str | None,
        typer.Option(
            "--shared", metavar="WHO", help="Who may use it besides you: group (that of the folder), or umask."
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make a store in a new or empty folder.

    A store that is there already stays as it is. You rarely need this: ckstore.open makes the store on first use. Files
    that others make in a shared store can be read and removed by all who share it; files that root makes belong to the
    store's owner.
    """
    import ckstore

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
