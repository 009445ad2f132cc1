"""System calls that Python lacks, and the translation of every errno to an error of ckstore.

Each errno that users meet has its own sentence that says what to do.

Invariants:
- ``fallocate`` never falls back to writing zeros, as glibc's posix_fallocate does.
- ``FileNotFoundError`` and ``FileExistsError`` are ordinary results and pass unchanged.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckstore.errors import BackendError, CapacityError, CkstoreError, UnsupportedError

PAGE_NBYTES = 4096
"""O_DIRECT offsets, lengths and addresses are multiples of this."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_REFUSED = frozenset({errno.EACCES, errno.EPERM})
_TRANSIENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.EINTR, errno.ESTALE})
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def round_down(count: int) -> int:
    """Round down to a multiple of a page."""
    return count & -PAGE_NBYTES


def round_up(count: int) -> int:
    """Round up to a multiple of a page."""
    return -(-count // PAGE_NBYTES) * PAGE_NBYTES


def fallocate(fd: int, offset: int, nbytes: int) -> bool:
    """Reserve space and extend the file over it. Return False if the file system does not support that.

    Raises:
        OSError: ENOSPC or EDQUOT if the disk or quota is full, or another failure.
    """
    if not hasattr(_LIBC, "fallocate"):
        return False
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number in _NOT_SUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def rename_noreplace(
    source: str, target: str, *, source_folder: int = _AT_FDCWD, target_folder: int = _AT_FDCWD
) -> bool:
    """Atomically rename unless the target exists. Return False if the file system does not support that.

    Args:
        source: The old name.
        target: The new name.
        source_folder: Descriptor of the folder of ``source``.
        target_folder: Descriptor of the folder of ``target``.

    Raises:
        OSError: EEXIST if the target exists, or another failure.
    """
    if not hasattr(_LIBC, "renameat2"):
        return False
    source_path, target_path = os.fsencode(source), os.fsencode(target)
    if _LIBC.renameat2(source_folder, source_path, target_folder, target_path, _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source, None, target)


_COLLECT = "delete old checkpoints with `ckstore gc`, or enlarge"
_FULL = {
    errno.ENOSPC: f"the disk is full; {_COLLECT} it",
    errno.EDQUOT: f"the quota of this user, group or project is used up; {_COLLECT} the quota",
    errno.EFBIG: "the file exceeds a size limit: check `ulimit -f` and the limit of this file system",
    errno.EMFILE: "raise the limit of open files of this process (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files of this machine (fs.file-max)",
    errno.ENOMEM: "free memory, or raise the memory limit of this process",
}
_CANNOT = {
    errno.ENOSYS: "this file system or sandbox lacks the operation; use a folder on another file system",
    errno.EOPNOTSUPP: "this file system does not support the operation; use a folder on another file system",
    errno.ENOLCK: "the file server grants no locks; mount it with locks, or use a folder on another file system",
}
_FAILED = {
    errno.EACCES: "this user lacks the permission",
    errno.EPERM: "the system forbids this: check the owner, immutable flags, and the rules of a sandbox",
    errno.EROFS: "the file system is mounted read-only; remount it for writing, or use a folder on another one",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the path",
    errno.EISDIR: "this is a folder, not a file; check the path",
    errno.ENOENT: "the file, or a folder above it, is gone; find out who removes files from the store",
    errno.ENAMETOOLONG: "the path is too long for this file system; use a folder with a shorter path",
    errno.ELOOP: "a symbolic link is not allowed here, or links form a loop; remove the link",
    errno.ESTALE: "the file server removed or replaced an open file; open the store again and list its checkpoints",
    errno.ETIMEDOUT: "the file server does not respond; check the network and the server, then try again",
    errno.ENOTCONN: "the process or server behind this mount has ended; mount it again",
    errno.EHOSTDOWN: "the file server is down; try again when it is back",
    errno.ENODEV: "the device has disappeared; check how the disk is connected and mounted",
    errno.ENXIO: "there is no such device or address; check how the disk is connected and mounted",
    errno.EXDEV: "the store spans two file systems; keep all of its folders on one",
    errno.EMLINK: "the file has the maximum number of hard links of this file system; use a folder on another one",
    errno.EINVAL: "this file system does not accept the operation; use a folder on another file system",
    errno.EBUSY: "another process or the kernel is using it; try again",
    errno.EIO: "read the system log; the disk or its connection may be failing",
}


def medium_error(error: OSError, *, where: object, what: str) -> CkstoreError:
    """Return the error for an OSError of the storage.

    Args:
        error: The failure.
        where: Path, for the message.
        what: The operation that failed, such as ``"reading a file"``.
    """
    number = error.errno or errno.EIO
    reason = f"{what} failed ({errno.errorcode.get(number, number)}: {os.strerror(number)})"
    if number in _FULL:
        return CapacityError(reason, where=where, todo=_FULL[number], errno=number)
    if number in _CANNOT:
        return UnsupportedError(reason, where=where, todo=_CANNOT[number], errno=number)
    todo = _FAILED.get(number, "check the system log")
    if number in _REFUSED:
        todo = f"{todo}; {_rights(str(where))}"
    return BackendError(
        reason,
        where=where,
        todo=todo,
        is_transient=number in _TRANSIENT,
        is_refused=number in _REFUSED,
        errno=number,
    )


def _rights(path: str) -> str:
    """Describe the user of this process, and the owner of the path or of the nearest parent that can be read."""
    here = Path("/", path)
    for place in (here, *here.parents):
        try:
            found = place.lstat()
        except OSError:
            continue
        return (
            f"this process runs as user {os.geteuid()}, and {place} belongs to user {found.st_uid} "
            f"(mode {stat.S_IMODE(found.st_mode):04o}): grant access (`chown`, `chmod`), or run as that user"
        )
    return f"this process runs as user {os.geteuid()}"


@contextmanager
def medium_errors(where: object, what: str) -> Iterator[None]:
    """Translate every OSError of the block, except FileNotFoundError and FileExistsError."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise medium_error(error, where=where, what=what) from error
