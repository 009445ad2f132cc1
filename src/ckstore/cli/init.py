"""``ckstore init``: make a store."""

from __future__ import annotations

from ckstore.cli import output
from ckstore.cli.options import AsJson, Shared, StorePath
from ckstore.errors import NotFoundError


def run(path: StorePath, as_json: AsJson = False, allow_shared_folder: Shared = False) -> None:
    """Make a store in a new or empty folder.

    A store that is there already stays as it is. You rarely need this: ckstore.open makes the store on first use.
    """
    import ckstore

    is_new = False
    try:
        store = ckstore.open(path, create=False, allow_shared_folder=allow_shared_folder)
    except NotFoundError:
        is_new = True
        store = ckstore.open(path, allow_shared_folder=allow_shared_folder)
    store.close()
    if as_json:
        output.print_json({"path": path, "is_new": is_new})
    elif is_new:
        output.say(f"Made a store at {path}.")
    else:
        output.say(f"There is a store at {path} already; nothing was changed.")
