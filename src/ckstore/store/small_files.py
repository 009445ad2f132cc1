"""Write small files whole and durably to any backend, and judge how old a file is.

Records that coordinate several machines (intents, deletion lists, owners of tiers) are written and aged here. Ages are
compared with the clock of the backend as well as the local one: either clock may be wrong or may have jumped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckstore.clock import Clock
from ckstore.errors import CkstoreError
from ckstore.format import paths
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, Distant, FileInfo, map_concurrent

MAKER_AGE_SECONDS_MAX = 6 * 3600.0
"""A record that marks its process as active is ignored after this time, on every machine."""


def is_older(backend: Backend, clock: Clock, info: FileInfo, seconds: float) -> bool:
    """Whether a file is older than ``seconds``, by the local clock and by the backend's; False if the latter fails."""
    if (clock.now_ns() - info.modified_ns) / 1e9 <= seconds:
        return False
    backend_now_ns = _backend_now_ns(backend)
    return backend_now_ns is not None and (backend_now_ns - info.modified_ns) / 1e9 > seconds


def _backend_now_ns(backend: Backend) -> int | None:
    """Return the modification time that the backend gives to a new file; None if no file can be made."""
    # In a bucket, drafts in ``tmp`` stay in this process's memory, so they would have the local time.
    name = f"{paths.trash_folder(new_token())}/clock" if isinstance(backend, Distant) else paths.draft_name(new_token())
    try:
        backend.create(name, b"now", sync=False)
        try:
            info = backend.stat(name)
        finally:
            with contextlib.suppress(CkstoreError, FileNotFoundError):
                backend.unlink(name)
    except (CkstoreError, OSError):
        return None
    return None if info is None else info.modified_ns


def replace_small(backend: Backend, name: str, content: bytes) -> None:
    """Create or replace a small file, durably. Missing folders are made."""
    folder = name.rpartition("/")[0]
    make_durable_folder(backend, folder)
    draft = paths.draft_name(new_token(), "copy")
    backend.create(draft, content, sync=True)
    backend.rename(draft, name)
    backend.sync_folder(folder)


def put_small(backend: Backend, name: str, content: bytes) -> None:
    """Create a small file, whole and durable. Missing folders are made.

    Raises:
        FileExistsError: The name is taken.
    """
    folder = name.rpartition("/")[0]
    if folder:
        make_durable_folder(backend, folder)
    put_whole(backend, [name], content, kind="copy")
    backend.sync_folder(folder)


def put_whole(backend: Backend, names: Sequence[str], content: bytes, *, kind: str) -> None:
    """Create a small file under each of these names. Each name appears with its whole content or not at all.

    The content is durable on return; the names are durable once the caller has synced their folders.

    Args:
        backend: Where to write.
        names: Paths in existing folders.
        content: The bytes of every file.
        kind: Part of the draft's name.

    Raises:
        FileExistsError: A name is taken; other names may have been made.
    """
    if isinstance(backend, Distant):
        # A bucket shows an object only when it is complete, so no draft is needed.
        list(map_concurrent(backend, lambda name: backend.create(name, content, sync=True), names))
        return
    draft = paths.draft_name(new_token(), kind)
    backend.create(draft, content, sync=True)
    try:
        for name in names:
            backend.link(draft, name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(draft)


def make_durable_folder(backend: Backend, folder: str) -> None:
    """Make a folder and its parents, and sync the parent of each new one."""
    parts = folder.split("/")
    for depth in range(1, len(parts) + 1):
        path = "/".join(parts[:depth])
        if backend.make_folder(path):
            backend.sync_folder("/".join(parts[: depth - 1]))
