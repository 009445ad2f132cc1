"""System calls Python lacks, and the one place where an errno becomes an error of ckstore.

Invariants:
- fallocate never falls back to writing zeros, as glibc's posix_fallocate does.
- ``FileNotFoundError`` and ``FileExistsError`` are ordinary answers; everything else is given a meaning here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.errors import BackendError, CapacityError, CkstoreError

PAGE_NBYTES = 4096
"""What O_DIRECT offsets, lengths and addresses are multiples of."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
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


def rename_noreplace(source: str, target: str) -> bool:
    """Move a name unless the target is taken; return False where the system cannot do that in one step.

    Raises:
        OSError: EEXIST when the target name is taken, or another failure.
    """
    if not hasattr(_LIBC, "renameat2"):
        return False
    source_path, target_path = os.fsencode(source), os.fsencode(target)
    if _LIBC.renameat2(_AT_FDCWD, source_path, _AT_FDCWD, target_path, _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source, None, target)


def medium_error(error: OSError, *, where: object, what: str) -> CkstoreError:
    """Return what a failure of the medium means to the caller."""
    number = error.errno or errno.EIO
    reason = f"{what} failed ({errno.errorcode.get(number, number)}: {os.strerror(number)})"
    if number in _FULL:
        todo = "collect old checkpoints, or enlarge the disk or quota"
        return CapacityError(reason, where=where, todo=todo, errno=number)
    if number in _TOO_MANY:
        return CapacityError(reason, where=where, todo="raise the limit of open files or memory", errno=number)
    if number in _REFUSED:
        todo = "check owner, mode and mount options of the store's folder"
        return BackendError(reason, where=where, todo=todo, errno=number)
    todo = "look at the system log; the disk or its connection may be failing"
    return BackendError(reason, where=where, todo=todo, is_transient=number in _TRANSIENT, errno=number)


@contextmanager
def medium_errors(where: object, what: str) -> Iterator[None]:
    """Give every OSError of the block a meaning, except the two that are ordinary answers."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise medium_error(error, where=where, what=what) from error
