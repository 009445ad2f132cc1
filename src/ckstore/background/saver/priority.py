"""What share of a busy machine the saver gets: little while the trainer computes, its full one while somebody waits.

A saver that gives way has about a thirtieth of a processor that others want whole. That is right as long as training
goes on; a trainer that waits for it (for a result, a free slot, the end of the run) would wait thirty times too long
where data loaders or other jobs keep every processor busy. Then it has the priority that it was started with.

While a state is being copied, and from the end of the last commit on, it stands aside: the scheduler's idle class
(sched(7), SCHED_IDLE) gives a processor up to any thread that wants it, and such a processor counts as free for the
threads that copy; one that a nice process computes on does not, and they queue for the other. A thread that wakes in
the idle class gets a processor until the next tick all the same, so where copies want all of them nothing is woken at
first (``messages.Begin.start_delay_ms``).

Getting priority back needs ``CAP_SYS_NICE`` or a limit (``ulimit -e``) that allows it, and ``CAP_SYS_ADMIN`` for
autogroups; where that is refused, the saver stays as it is, and never stands aside: it would for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from ckstore.concurrency import Latch, ThreadLimit
from ckstore.processes import proc_is_ours
from ckstore.store.lease import HEART_NAME

NICE_MAX = 19

_NORMAL = os.sched_param(0)
"""The only one that these classes have."""


class Priority:
    """The priority of this process, all threads of it; thread-safe.

    Args:
        nice: Added to the niceness that the process was started with, while it gives way.
    """

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._base = os.getpriority(os.PRIO_PROCESS, 0)
        self._group_base = _autogroup_nice()
        self._lock = threading.Lock()
        self._last: tuple[int, bool] | None = None
        self._may_stand_aside: bool | None = None
        self._others_count = max(1, len(os.sched_getaffinity(0)) - 1)
        self.thread_limit = ThreadLimit()
        """How many threads may hash and code: while the saver gives way, one fewer than there are processors."""

    def give_way(self) -> None:
        """Let others go first."""
        self._set(self._nice, is_idle=False)

    def stand_aside(self) -> None:
        """Let others have every processor that they want, at once; who is not to give way does not do this either."""
        self._set(self._nice, is_idle=self._nice > 0)

    def hurry(self) -> None:
        """Be as important as the process was when it was started, where the system allows that."""
        self._set(0, is_idle=False)

    def _set(self, added: int, *, is_idle: bool) -> None:
        with self._lock:
            self.thread_limit.maximum = self._others_count if added else None
            if self._may_stand_aside is None and is_idle:
                self._may_stand_aside = _may_leave_idle_class()
            wanted = (added, is_idle and self._may_stand_aside is True)
            if wanted != self._last:
                self._set_all(*wanted)
                self._last = wanted

    def _set_all(self, added: int, is_idle: bool) -> None:
        nice = min(NICE_MAX, self._base + added)
        # The thread that listens: what it hears is when this ends. And the lease's: others judge by it who lives.
        awake = {os.getpid(), *(thread.native_id for thread in threading.enumerate() if thread.name == HEART_NAME)}
        # Niceness belongs to a thread; one that is started later has that of its maker, which may be the old one still.
        done: set[int] = set()
        while new := _threads() - done:
            for thread_id in new:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread_id, nice)
                if self._may_stand_aside and thread_id not in awake:
                    with contextlib.suppress(OSError):
                        os.sched_setscheduler(thread_id, os.SCHED_IDLE if is_idle else os.SCHED_OTHER, _NORMAL)
            done |= new
        if self._group_base is not None:
            # A session has its own share where the kernel groups processes by session: niceness counts within it only.
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(min(NICE_MAX, self._group_base + added)))


def _threads() -> set[int]:
    """Return the ids of all threads of this process."""
    if proc_is_ours():
        return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
    # Another pid namespace's /proc gives them numbers that are other processes' here: then only Python's own are known.
    return {os.getpid(), *(thread.native_id for thread in threading.enumerate() if thread.native_id)}


def keep_awake(thread: threading.Thread) -> None:
    """Take a thread out of the idle class, which it has from its maker, where the system allows that."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread.native_id or 0, os.SCHED_OTHER, _NORMAL)


def _may_leave_idle_class() -> bool:
    """Return whether a thread of this process that has entered the idle class may leave it."""
    # Capabilities do not tell: in a user namespace they are not worth what they say. A thread that sleeps is asked.
    is_over = Latch()
    thread = threading.Thread(target=is_over.wait, name="ckstore-priority", daemon=True)
    try:
        thread.start()
        for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
            os.sched_setscheduler(thread.native_id or 0, policy, _NORMAL)
        return True
    except (OSError, RuntimeError):
        return False
    finally:
        is_over.set()


def _autogroup_nice() -> int | None:
    """Return the niceness of this session's group, as ``/autogroup-25 nice 0`` says it; None where there is none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None
