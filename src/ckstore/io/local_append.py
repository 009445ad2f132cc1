"""Append to a file of a folder, and make each append durable.

Invariants:
- A write returns when all of its bytes are in the file. A write that the kernel cut short is continued.
- The file is never synced after a sync of it has failed, because the kernel may have dropped the bytes.
- A forked child closes its copy of the descriptor: otherwise it would hold the lock after its parent has ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckstore.errors import UsageError
from ckstore.io.syscalls import medium_errors
from ckstore.processes import close_in_children

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PARTS_MAX = 1024
"""IOV_MAX of Linux: most parts of one system call."""


class LocalAppendFile:
    """A file that this process has created, open for writing.

    Args:
        fd: Its descriptor; this object owns it.
        path: Its full path, for messages.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._may_sync = True
        close_in_children(self)

    def write(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write all of these parts, one behind the other. After an error, some bytes may have been written."""
        fd = self._open_fd()
        views = [memoryview(part).cast("B") for part in parts]
        rest = [view for view in views if view.nbytes]
        begin = 0
        with medium_errors(self._path, "appending to a file"):
            while begin < len(rest):
                # Python repeats a call that a signal interrupts.
                count = os.pwritev(fd, rest[begin : begin + _PARTS_MAX], offset)
                if not count:
                    raise OSError(errno.EIO, "no byte was written")
                offset += count
                while begin < len(rest) and count >= rest[begin].nbytes:
                    count -= rest[begin].nbytes
                    begin += 1
                if count:
                    rest[begin] = rest[begin][count:]

    def sync(self) -> None:
        """Make all that was written durable (fdatasync)."""
        fd = self._open_fd()
        assert self._may_sync, "a file is not synced again after a sync has failed"
        self._may_sync = False
        with medium_errors(self._path, "making appended bytes durable"):
            os.fdatasync(fd)
        self._may_sync = True

    def truncate(self, nbytes: int) -> None:
        """Shorten the file, without a sync."""
        fd = self._open_fd()
        with medium_errors(self._path, "shortening a file"):
            os.ftruncate(fd, nbytes)

    def close(self) -> None:
        """Close the descriptor, which releases the lock. Repeated calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptor that a forked child has inherited. The parent keeps its lock."""
        self.close()

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise UsageError(
                "the file is closed, or was opened by the parent of this process",
                where=self._path,
                todo="create another one in this process",
            )
        return self._fd
