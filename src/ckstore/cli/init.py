"""``ckstore init`` creates a store; ``ckstore adopt`` declares what a copied store is: the original or a new one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import ckstore
from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath, opened
from ckstore.errors import NotFoundError, UsageError


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
        # ckstore.open refuses any other text than the two that it knows.
        sharing: Any = shared
        store = ckstore.open(path, allow_shared_folder=allow_shared_folder, shared=sharing)
    store.close()
    if as_json:
        render.print_json({"path": path, "is_new": is_new})
    elif is_new:
        render.say(f"Made a store at {path}.")
    else:
        render.say(f"{path} is a store already; nothing was changed.")


def adopt(
    path: StorePath,
    as_original: Annotated[
        bool, typer.Option("--as-original", help="This is the original, or replaces it, and owns its tiers.")
    ] = False,
    as_new: Annotated[
        bool, typer.Option("--as-new", help="Both stay in use, and the original owns the tiers.")
    ] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Declare that a copied store is the original, or a new one.

    A copy of a store that has tiers changes nothing in them until you declare this. The same holds for a store that was
    set back to an older state, and for one whose inodes changed: some file systems, such as sshfs, rclone and gcsfuse,
    change them at each mount.
    """
    if as_original == as_new:
        raise UsageError("give either --as-original or --as-new", todo="see `ckstore adopt --help`")
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        tiers = store.adopt(is_original=as_original)
    if as_json:
        render.print_json({"path": path, "is_original": as_original, "tiers": tiers})
    elif as_new:
        render.say("This is a new store now. It owns no tier; `ckstore pull` copies what it needs from the tiers.")
    else:
        owned = ", ".join(tiers) or "no tier"
        render.say(f"This is the original store now and owns {owned}. Other copies of it may not push there.")
