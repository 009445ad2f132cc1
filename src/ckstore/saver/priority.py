"""What share of a busy machine the saver gets: little while the trainer computes, its full one while somebody waits.

A saver that gives way has about a thirtieth of a processor that others want whole. That is right as long as training
goes on; a trainer that waits for it (for a result, a free slot, the end of the run) would wait thirty times too long
where data loaders or other jobs keep every processor busy. Then it has the priority that it was started with.

Getting priority back needs ``CAP_SYS_NICE`` or a limit (``ulimit -e``) that allows it, and ``CAP_SYS_ADMIN`` for
autogroups; where that is refused, the saver stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE_MAX = 19


class Priority:
    """The priority of this process, all threads of it.

    Args:
        nice: Added to the niceness that the process was started with, while it gives way.
    """

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._base = os.getpriority(os.PRIO_PROCESS, 0)
        self._group_base = _autogroup_nice()

    def give_way(self) -> None:
        """Let others go first."""
        self._set(self._nice)

    def hurry(self) -> None:
        """Be as important as the process was when it was started, where the system allows that."""
        self._set(0)

    def _set(self, added: int) -> None:
        nice = min(NICE_MAX, self._base + added)
        # Niceness belongs to a thread; one that is started later has that of its maker, which may be the old one still.
        done: set[str] = set()
        while new := {thread.name for thread in Path("/proc/self/task").iterdir()} - done:
            for name in new:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(name), nice)
            done |= new
        if self._group_base is not None:
            # A session has its own share where the kernel groups processes by session: niceness counts within it only.
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(min(NICE_MAX, self._group_base + added)))


def _autogroup_nice() -> int | None:
    """Return the niceness of this session's group, as ``/autogroup-25 nice 0`` says it; None where there is none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None
