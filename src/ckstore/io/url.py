"""What a user calls a store - a folder, a URL, a backend - turned into a backend."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from ckstore.config import EngineName
from ckstore.errors import UnsupportedError, UsageError
from ckstore.io.backend import Backend
from ckstore.io.local import LocalBackend
from ckstore.io.ownership import Sharing, is_shared_on_purpose
from ckstore.io.syscalls import medium_errors

SCHEMES = ("s3", "gs", "az")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|(?:s3|gs|az)//", re.IGNORECASE)
"""How an address begins that is no path: a scheme of two letters or more, or one of ours without its colon."""


def backend_for(
    address: str | os.PathLike[str] | Backend,
    *,
    engine: EngineName = "auto",
    allow_shared_folder: bool = False,
    sharing: Sharing | None = None,
) -> Backend:
    """Return the backend at an address; nothing is made there.

    Args:
        address: A folder, a URL, or a backend.
        engine: What moves packs.
        allow_shared_folder: Accept a folder that others may write, although its store was not made to be shared.
        sharing: Who may use a store that is made there.

    Raises:
        UsageError: An unknown engine, or a folder that others may write.
        UnsupportedError: A URL of a kind that is not known here.
    """
    if not isinstance(address, (str, os.PathLike)):
        return address
    text = os.fspath(address)
    if is_bucket_address(text):
        if sharing is not None:
            raise UsageError("files in a bucket have no mode; who may use it is set there", where=f"shared={sharing!r}")
        return _bucket(text)
    if sharing not in (None, "group", "umask"):
        raise UsageError("a store is shared with its 'group', or as the 'umask' says", where=f"shared={sharing!r}"[:80])
    folder = Path(checked_path(text))
    if engine not in ("auto", "uring", "pwrite"):
        raise UsageError("engine must be 'auto', 'uring' or 'pwrite'", where=f"engine={engine!r}")
    mode = mode_of_folder(folder)
    if mode and not allow_shared_folder:
        too_much = stat.S_IWOTH if sharing else stat.S_IWGRP | stat.S_IWOTH
        if mode & too_much and not mode & stat.S_ISVTX and not is_shared_on_purpose(str(folder)):
            raise UsageError(
                "others may write this folder, so they could replace checkpoints",
                where=folder,
                todo=f"`chmod go-w {folder}`, or allow it: allow_shared_folder=True, --allow-shared-folder",
            )
    return LocalBackend(folder, engine=engine, sharing=sharing)


def is_bucket_address(text: str) -> bool:
    """Whether a text is the address of a bucket rather than a path."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def check_address(url: str) -> str:
    """Return the address of a bucket and prefix in its one spelling.

    Raises:
        UsageError: It holds more than that, credentials perhaps; they are not repeated.
    """
    repository = urlsplit(url)
    if "@" in url or ":" in repository.netloc or repository.query or repository.fragment:
        raise UsageError(
            "the address of a bucket holds a user, a password or a query",
            where=f"{repository.scheme}://...",
            todo="name bucket and prefix only; credentials come from the environment, a profile or the machine's role",
        )
    folders = [part for part in repository.path.split("/") if part]
    if repository.scheme not in SCHEMES or not repository.netloc or any(part in (".", "..") for part in folders):
        raise UsageError("an address of a bucket is written s3://bucket/prefix", where=repr(url)[:200])
    return "/".join([f"{repository.scheme}://{repository.netloc}", *folders])


def mode_of_folder(folder: Path) -> int:
    """Return the mode of a folder; 0 where there is none.

    Raises:
        BackendError: Nobody can tell: a folder above may not be searched, or the path is too long.
        UsageError: It is no path at all.
    """
    if "\0" in str(folder):
        raise UsageError("a path has no NUL byte", where=repr(str(folder))[:200])
    with medium_errors(folder, "looking at a folder"):
        try:
            mode = folder.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return mode if stat.S_ISDIR(mode) else 0


def checked_path(text: str) -> str:
    """Return the path that a text which is no bucket's address means: with ``file://`` before it, or without.

    Raises:
        UnsupportedError: It begins as an address of another kind does, or as a mistyped one: a folder of that name
            would be made, and nobody would look for a store there.
    """
    is_url = text.startswith("file://")
    path = text.removeprefix("file://")
    found = None if is_url else _SCHEME.match(path)
    if found is None:
        return path
    raise UnsupportedError(
        f"stores cannot be opened at an address that begins with {found[0][:24]!r}",
        where=text[:200],
        todo=f"a bucket is written s3://bucket/prefix (gs, az), a folder of this name ./{found[0][:24]}...",
    )


def _bucket(text: str) -> Backend:
    # The client of buckets takes longer to import than a local store to be listed.
    try:
        from ckstore.io.remote.backend import RemoteBackend
    except ImportError as error:
        raise UnsupportedError(
            "stores in buckets need obstore, which is not installed here", todo="`pip install obstore`"
        ) from error
    return RemoteBackend(text)
