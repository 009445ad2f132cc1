"""A file that a user asked for, outside the store: it appears whole and durable, or not at all.

Invariants:
- What has the name already is replaced only when that was asked for; a symbolic link is never followed.
- The draft is in the same folder, made with O_EXCL, and gone when this raises. Its mode is what the umask leaves of
  0666, as of any file that a program writes for its user.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ckstore.errors import NotFoundError, UsageError
from ckstore.ids import new_token
from ckstore.io.os_calls import medium_errors

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def check_target(target: Path, *, force: bool) -> None:
    """Refuse early what ``new_file`` would refuse after hours of reading.

    Raises:
        NotFoundError: There is no such folder.
        UsageError: The name is taken and ``force`` is False, or is a folder.
        BackendError: This user may not search the folder, or the name is too long.
    """
    with medium_errors(target, "looking at a file"):
        if not target.parent.is_dir():
            raise NotFoundError("there is no such folder", where=target.parent, todo="make it first")
        if target.is_dir() and not target.is_symlink():
            raise UsageError("the target is a folder", where=target, todo="name a file in it")
        if not force and os.path.lexists(target):
            raise _taken(target)


def _taken(target: Path) -> UsageError:
    return UsageError("the file exists already", where=target, todo="choose another name, or overwrite it with --force")


@contextmanager
def new_file(target: Path, *, force: bool = False) -> Iterator[BinaryIO]:
    """Give a draft to write to; when the block ends well, it is durable under its name.

    Args:
        target: The file to make.
        force: Replace what has the name.

    Raises:
        UsageError: The name is taken and ``force`` is False.
        CapacityError: The disk is full; nothing has the name.
        BackendError: The medium failed.
    """
    check_target(target, force=force)
    draft = target.with_name(f".ckstore-{new_token()}.draft")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with medium_errors(target, "writing a file"):
            with os.fdopen(_new(draft, flags), "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _give_name(draft, target, force=force)
            _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _new(draft: Path, flags: int) -> int:
    try:
        return os.open(draft, flags, 0o666)
    except FileNotFoundError:
        raise NotFoundError("this folder takes no files", where=draft.parent, todo="name another folder") from None


def _give_name(draft: Path, target: Path, *, force: bool) -> None:
    if force:
        draft.replace(target)
        return
    try:
        # A rename would silently replace a file that was made meanwhile.
        os.link(draft, target, follow_symlinks=False)
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check_target(target, force=False)
        draft.replace(target)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
