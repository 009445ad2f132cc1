"""The Engine protocol: how aligned blocks get from memory to a descriptor and back.

An engine is chosen once per store: probed, overridable, reported with the reason. Its queue may be
submitted to from any thread; ``on_done`` runs on the engine's own thread and must be quick.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ckstore.io.os_calls import round_down


@dataclass(slots=True, eq=False)
class IoRequest:
    """One transfer between ``buffer`` and the file at ``offset``.

    Args:
        on_done: Called once with the bytes moved (fewer than asked only at the end of a file that is
            read) and None, or with the error.
    """

    kind: Literal["read", "write"]
    fd: int
    buffer: memoryview
    offset: int
    on_done: Callable[[int, OSError | None], None]


class IoQueue(Protocol):
    """Transfers in flight; keeps every buffer alive until its completion was reaped."""

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or keep it until there is room; never blocks."""
        ...

    def close(self) -> None:
        """Wait for everything submitted, then let go; repeated calls do nothing."""
        ...


class Engine(Protocol):
    """A way to move blocks."""

    @property
    def name(self) -> str:
        """``"uring"`` or ``"pwrite"``."""
        ...

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Make a queue that keeps at most ``depth`` transfers in flight, and about ``nbytes_max`` bytes of them."""
        ...


_STALLS_MAX = 3
_SECTOR_NBYTES = 512


@dataclass(slots=True, eq=False)
class Transfer:
    """How far a request has come, the same for every engine.

    A call that moved fewer bytes than asked is a success to the kernel; the rest is asked for again, from
    an aligned offset, until a write is complete or a read finds the end of the file.
    """

    request: IoRequest
    moved: int = 0
    stall_count: int = 0

    @property
    def start(self) -> int:
        """Where in the buffer the next call begins: what was moved, rounded down so that O_DIRECT takes it.

        After a stall by less, so that a limit within a page is met and the kernel names it.
        """
        return self.moved & -_SECTOR_NBYTES if self.stall_count else round_down(self.moved)

    def advance(self, result: int) -> bool:
        """Count what a call moved; return whether the request is complete.

        Raises:
            OSError: Writes stop short again and again without getting further.
        """
        reached = self.start + result
        has_progress = reached > self.moved
        self.moved = max(self.moved, reached)
        if self.moved >= len(self.request.buffer):
            return True
        if has_progress:
            return False
        if self.request.kind == "read":
            return True
        self.stall_count += 1
        if self.stall_count >= _STALLS_MAX:
            raise OSError(errno.EIO, "writes stop short")
        return False
