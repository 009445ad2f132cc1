"""Make names last: draft, fsync, link or rename, fsync the folder; in one place.

Invariants:
- What has a name already is never replaced, except by ``replace_synced``.
- When a function here returns, its effect survives a power cut; when it raises, nothing was promised.
"""

from __future__ import annotations

from ckstore.errors import ConflictError, UnsupportedError
from ckstore.io.backend import Backend


def folder_of(name: str) -> str:
    """Return the folder of a name; empty for the root."""
    return name.rpartition("/")[0]


def make_folder_synced(backend: Backend, name: str) -> None:
    """Make a folder and its parents, and their names durable."""
    parts = name.split("/")
    for count in range(1, len(parts) + 1):
        folder = "/".join(parts[:count])
        if backend.make_folder(folder):
            backend.sync_folder(folder_of(folder))


def create_synced(backend: Backend, name: str, content: bytes) -> None:
    """Make a new file whose bytes and name are durable.

    Raises:
        FileExistsError: The name is taken; nothing was changed.
    """
    backend.create(name, content, sync=True)
    backend.sync_folder(folder_of(name))


def publish_new(backend: Backend, draft: str, target: str) -> None:
    """Give a draft, whose bytes are durable, its final name, which is durable on return.

    The draft's own name may remain; whoever made it removes it. Repeating a publish that was interrupted
    succeeds when the target holds the draft's bytes.

    Raises:
        ConflictError: Other bytes have the name.
    """
    try:
        try:
            backend.link(draft, target)
        except UnsupportedError:
            backend.rename_new(draft, target)
    except FileExistsError:
        # An interrupted first try may have got this far; then the name is already ours.
        if not have_equal_bytes(backend, draft, target):
            where = backend.location_of(target)
            raise ConflictError("the name is taken by other bytes", where=where, path=where) from None
    backend.sync_folder(folder_of(target))


def replace_synced(backend: Backend, name: str, content: bytes, *, draft: str) -> None:
    """Put new content under a name, whole or not at all, through a draft name that is free."""
    backend.create(draft, content, sync=True)
    backend.rename(draft, name)
    backend.sync_folder(folder_of(name))


def move_synced(backend: Backend, source: str, target: str) -> None:
    """Move a file to a name that is free; durable on both sides on return.

    Raises:
        FileExistsError: The target name is taken.
        FileNotFoundError: There is no such source, or no such target folder.
    """
    backend.rename_new(source, target)
    # The new name first: a power cut in between then leaves two names rather than none.
    backend.sync_folder(folder_of(target))
    if folder_of(source) != folder_of(target):
        backend.sync_folder(folder_of(source))


def have_equal_bytes(backend: Backend, left: str, right: str) -> bool:
    """Say whether two small files hold the same bytes."""
    sizes = [backend.stat(left), backend.stat(right)]
    if sizes[0] is None or sizes[1] is None or sizes[0].nbytes != sizes[1].nbytes:
        return False
    nbytes_max = sizes[0].nbytes
    return backend.read_bytes(left, nbytes_max=nbytes_max) == backend.read_bytes(right, nbytes_max=nbytes_max)
