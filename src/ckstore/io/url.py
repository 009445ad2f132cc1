"""Addresses of stores: parse a folder path or a bucket URL, and open its backend.

Importing this module does not load the bucket client, which takes longer than listing a local store.

Invariants:
- A bucket address has a scheme, a bucket and a prefix. One with a user, a password or a query is refused, and the
  message does not repeat it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ckstore.config import EngineName
from ckstore.errors import UnsupportedError, UsageError
from ckstore.io.backend import Backend
from ckstore.io.local import LocalBackend
from ckstore.io.ownership import Sharing, is_shared_on_purpose
from ckstore.io.remote import is_bucket_address
from ckstore.io.syscalls import medium_errors

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|(?:s3|gs|az)//", re.IGNORECASE)
"""Start of an address that is not a path: a URL scheme of at least two letters, or ``s3//`` without its colon."""


def backend_for(
    address: str | os.PathLike[str] | Backend,
    *,
    engine: EngineName = "auto",
    allow_shared_folder: bool = False,
    sharing: Sharing | None = None,
) -> Backend:
    """Return the backend of an address. Creates nothing.

    Args:
        address: A folder, a URL, or a backend.
        engine: Engine for packs in a folder.
        allow_shared_folder: Accept a folder that other users can write although its store is not shared.
        sharing: Who may use a store that is created there.

    Raises:
        UsageError: An unknown engine, or a folder that other users can write.
        UnsupportedError: A URL scheme that ckstore does not support, or obstore is not installed.
    """
    if not isinstance(address, (str, os.PathLike)):
        return address
    text = os.fspath(address)
    if is_bucket_address(text):
        if sharing is not None:
            raise UsageError(
                "objects in a bucket have no file mode; set permissions on the bucket", where=f"shared={sharing!r}"
            )
        return _bucket(text)
    if sharing not in (None, "group", "umask"):
        raise UsageError("shared must be 'group', 'umask' or None", where=f"shared={sharing!r}"[:80])
    folder = Path(path_of(text))
    if engine not in ("auto", "uring", "pwrite"):
        raise UsageError("engine must be 'auto', 'uring' or 'pwrite'", where=f"engine={engine!r}")
    mode = mode_of_folder(folder)
    if mode and not allow_shared_folder:
        too_much = stat.S_IWOTH if sharing else stat.S_IWGRP | stat.S_IWOTH
        if mode & too_much and not mode & stat.S_ISVTX and not is_shared_on_purpose(str(folder)):
            raise UsageError(
                "other users can write this folder, so they could replace checkpoints",
                where=folder,
                todo=f"run `chmod go-w {folder}`, or allow it with allow_shared_folder=True or --allow-shared-folder",
            )
    return LocalBackend(folder, engine=engine, sharing=sharing)


def mode_of_folder(folder: Path) -> int:
    """Return the mode of a folder; 0 if it does not exist.

    Raises:
        BackendError: It cannot be read, for example because a parent folder cannot be searched.
        UsageError: The path contains a NUL byte.
    """
    if "\0" in str(folder):
        raise UsageError("a path cannot contain a NUL byte", where=repr(str(folder))[:200])
    with medium_errors(folder, "reading the mode of a folder"):
        try:
            mode = folder.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return mode if stat.S_ISDIR(mode) else 0


def path_of(text: str) -> str:
    """Return the path of an address that is not a bucket; ``file://`` is optional.

    Raises:
        UnsupportedError: It starts like a URL of another kind, or like a mistyped bucket address. Taking it for a path
            would create a store in an unexpected folder.
    """
    is_url = text.startswith("file://")
    path = text.removeprefix("file://")
    found = None if is_url else _SCHEME.match(path)
    if found is None:
        return path
    raise UnsupportedError(
        f"addresses that start with {found[0][:24]!r} are not supported",
        where=text[:200],
        todo=f"write a bucket as s3://bucket/prefix (or gs, az), a folder of this name as ./{found[0][:24]}...",
    )


def _bucket(text: str) -> Backend:
    # Imported here, because the import takes longer than listing a local store.
    try:
        from ckstore.io.remote.backend import RemoteBackend
    except ImportError as error:
        raise UnsupportedError(
            "a store in a bucket needs obstore, which is not installed", todo="run `pip install obstore`"
        ) from error
    return RemoteBackend(text)
