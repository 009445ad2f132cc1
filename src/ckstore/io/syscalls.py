"""System calls Python lacks, and the one place where an errno becomes an error of ckstore.

Each errno that people meet has a sentence of its own: a missing right, a mount that is gone, a full quota and a dying
disk need different hands.

Invariants:
- fallocate never falls back to writing zeros, as glibc's posix_fallocate does.
- ``FileNotFoundError`` and ``FileExistsError`` are ordinary answers; everything else is given a meaning here.
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
"""What O_DIRECT offsets, lengths and addresses are multiples of."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_REFUSED = frozenset({errno.EACCES, errno.EPERM})
_TRANSIENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.EINTR, errno.ESTALE})
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def round_down(count: int) -> int:
    """Return the nearest multiple of a page that is not above ``count``."""
    return count & -PAGE_NBYTES


def round_up(count: int) -> int:
    """Return the nearest multiple of a page that is not below ``count``."""
    return -(-count // PAGE_NBYTES) * PAGE_NBYTES


def fallocate(fd: int, offset: int, nbytes: int) -> bool:
    """Reserve space and extend the file over it; return False where the file system cannot.

    Raises:
        OSError: ENOSPC or EDQUOT when there is no room, or another failure.
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
    """Move a name unless the target is taken; return False where the system cannot do that in one step.

    Args:
        source: The name.
        target: What it is to be.
        source_folder: Descriptor of the folder that the name is relative to.
        target_folder: The same of the new one.

    Raises:
        OSError: EEXIST when the target name is taken, or another failure.
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


_COLLECT = "collect old checkpoints (`ckstore gc`), or enlarge"
_FULL = {
    errno.ENOSPC: f"the disk is full; {_COLLECT} it",
    errno.EDQUOT: f"the quota of this user, group or project is used up; {_COLLECT} the quota",
    errno.EFBIG: "the file is larger than a limit: see `ulimit -f`, and what this file system allows",
    errno.EMFILE: "raise the limit of open files of this process (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files of this machine (fs.file-max)",
    errno.ENOMEM: "free memory, or raise the memory limit of this process",
}
_CANNOT = {
    errno.ENOSYS: "this file system, or a sandbox, does not have this operation; use a folder on another file system",
    errno.EOPNOTSUPP: "this file system does not have this operation; use a folder on another file system",
    errno.ENOLCK: "the file server grants no locks; mount it with locks, or use a folder on another file system",
}
_FAILED = {
    errno.EACCES: "this user lacks the right to do so",
    errno.EPERM: "the system forbids this user to do so: check owner, immutable flags, and the rules of a sandbox",
    errno.EROFS: "the file system is mounted read-only; remount it for writing, or use a folder on another one",
    errno.ENOTDIR: "a part of this path is a file where a folder must be; check the path",
    errno.EISDIR: "this is a folder where a file must be; check the path",
    errno.ENOENT: "the file, or a folder above it, is gone; find out who removes files from the store",
    errno.ENAMETOOLONG: "the path is too long for this file system; use a folder with a shorter path",
    errno.ELOOP: "a symbolic link is where none is followed, or links lead in a circle; remove the link",
    errno.ESTALE: "the file server has removed or exchanged what was open; open the store again, and see what it holds",
    errno.ETIMEDOUT: "the file server does not answer; check the network and the server, then try again",
    errno.ENOTCONN: "the process or server behind this mount has ended; mount it again",
    errno.EHOSTDOWN: "the file server is down; try again when it is back",
    errno.ENODEV: "the device is gone; check how the disk is connected and mounted",
    errno.ENXIO: "the device is gone; check how the disk is connected and mounted",
    errno.EXDEV: "the store is spread over two file systems; keep all of its folders on one",
    errno.EMLINK: "the file has as many names as this file system allows",
    errno.EINVAL: "this file system refuses the operation; use a folder on another file system",
    errno.EBUSY: "another process, or the kernel, is using it; try again",
    errno.EIO: "read the system log; the disk or its connection may be failing",
}


def medium_error(error: OSError, *, where: object, what: str) -> CkstoreError:
    """Return what a failure of the medium means to the caller."""
    number = error.errno or errno.EIO
    reason = f"{what} failed ({errno.errorcode.get(number, number)}: {os.strerror(number)})"
    if number in _FULL:
        return CapacityError(reason, where=where, todo=_FULL[number], errno=number)
    if number in _CANNOT:
        return UnsupportedError(reason, where=where, todo=_CANNOT[number], errno=number)
    todo = _FAILED.get(number, "the system log may say more")
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
    """Say who this process is, and whose the path is, or the nearest folder above it that shows its owner."""
    here = Path("/", path)
    for place in (here, *here.parents):
        try:
            found = place.lstat()
        except OSError:
            continue
        return (
            f"this process is user {os.geteuid()}, and {place} belongs to user {found.st_uid} "
            f"(mode {stat.S_IMODE(found.st_mode):04o}): have access given (`chown`, `chmod`), or run as that user"
        )
    return f"this process is user {os.geteuid()}"


@contextmanager
def medium_errors(where: object, what: str) -> Iterator[None]:
    """Give every OSError of the block a meaning, except the two that are ordinary answers."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise medium_error(error, where=where, what=what) from error
