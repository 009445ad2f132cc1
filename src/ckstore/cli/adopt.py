"""``ckstore adopt``: declare which of two copies of a store owns its tiers."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared, StorePath, opened
from ckstore.errors import UsageError


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
        raise UsageError("give one of --as-original and --as-new", todo="see `ckstore adopt --help`")
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        tiers = store.adopt(is_original=as_original)
    if as_json:
        render.print_json({"path": path, "is_original": as_original, "tiers": tiers})
    elif as_new:
        render.say(
            "This is a store of its own now, and owns no tier. `ckstore pull` brings here what it needs of them."
        )
    else:
        render.say(
            f"This is the original now, and owns {', '.join(tiers) or 'no tier'}. No other copy of it may push there."
        )
