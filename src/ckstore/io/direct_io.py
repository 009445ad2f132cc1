"""Engines that move aligned blocks between memory and file descriptors; ``PwriteEngine`` uses pread and pwrite.

``engine_choice.py`` chooses between this engine and ``uring_engine.py``.

Invariants:
- ``IoQueue.submit`` is thread-safe and never blocks. ``on_done`` runs on the engine's own thread and must be quick.
- A queue belongs to the process that created it, because its threads do not exist in a forked child.
- ``PwriteQueue`` starts threads as requests come, at most ``depth``. They wait without the GIL.
- liburing is never imported on a processor without AVX-512. Its only wheel was compiled for such a processor, and even
  creating a ``Ring`` would kill the process with SIGILL, so the processor is checked before the import.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ckstore.errors import UsageError
from ckstore.io.syscalls import round_down


@dataclass(slots=True, eq=False)
class IoRequest:
    """One transfer between ``buffer`` and the file at ``offset``.

    Args:
        on_done: Called once, with the number of bytes moved and None or the error. A read moves fewer bytes than
            requested only at the end of the file.
    """

    kind: Literal["read", "write"]
    fd: int
    buffer: memoryview
    offset: int
    on_done: Callable[[int, OSError | None], None]


class IoQueue(Protocol):
    """Transfers in flight. Keeps every buffer alive until its transfer has completed."""

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or queue it until there is room. Never blocks."""
        ...

    def close(self) -> None:
        """Wait for everything submitted, then release all resources. Repeated calls do nothing."""
        ...


class Engine(Protocol):
    """Opens queues of one kind."""

    @property
    def name(self) -> str:
        """``"uring"`` or ``"pwrite"``."""
        ...

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Open a queue with at most ``depth`` transfers and about ``nbytes_max`` bytes in flight."""
        ...


_STALLS_MAX = 3
_SECTOR_NBYTES = 512


@dataclass(slots=True, eq=False)
class Transfer:
    """Progress of a request, for every engine.

    The kernel may move fewer bytes than requested. The rest is requested again from an aligned offset, until a write is
    complete or a read reaches the end of the file.
    """

    request: IoRequest
    moved: int = 0
    stall_count: int = 0

    @property
    def start(self) -> int:
        """Where in the buffer the next call starts: the bytes moved, rounded down to a page for O_DIRECT.

        After a stall it is rounded to a sector, so that a write that hits a limit inside a page fails with its errno.
        """
        return self.moved & -_SECTOR_NBYTES if self.stall_count else round_down(self.moved)

    def advance(self, result: int) -> bool:
        """Add the bytes that a call has moved. Return True if the request is complete.

        Raises:
            OSError: Several writes in a row have made no progress.
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
            raise OSError(errno.EIO, "writes make no progress")
        return False


class PwriteEngine:
    """Moves blocks by pread and pwrite on threads."""

    name = "pwrite"

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Open a queue of at most ``depth`` threads; ``nbytes_max`` is ignored."""
        return PwriteQueue(depth)


class PwriteQueue:
    """Requests that wait for a thread or are running on one."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished_count = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or queue it until a thread is free."""
        if self._pid != os.getpid():
            raise UsageError("a queue cannot be used in a forked process; open the store again there")
        with self._lock:
            if self._is_closed:
                raise UsageError("the queue is closed")
            self._unfinished_count += 1
            if len(self._threads) < min(self._depth, self._unfinished_count):
                self._start_thread()
        self._waiting.put(request)

    def close(self) -> None:
        """Wait for everything submitted, then end the threads."""
        if self._pid != os.getpid():
            # A thread of the parent may have held the lock during the fork.
            return
        with self._lock:
            threads, self._threads = self._threads, []
            self._is_closed = True
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        # Daemon threads, because a store that is never closed must not keep the process alive. Writes in flight then
        # belong to an unfinished commit.
        thread = threading.Thread(target=self._work, name="ckstore-pwrite", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            moved, error = _run(request)
            with self._lock:
                self._unfinished_count -= 1
            request.on_done(moved, error)
            # Do not keep the buffer alive while waiting for the next request.
            del request


def _run(request: IoRequest) -> tuple[int, OSError | None]:
    transfer = Transfer(request)
    call = os.preadv if request.kind == "read" else os.pwritev
    try:
        while True:
            start = transfer.start
            # Python repeats calls that fail with EINTR.
            if transfer.advance(call(request.fd, [request.buffer[start:]], request.offset + start)):
                return transfer.moved, None
    except OSError as error:
        return transfer.moved, error


_CPU_FACTS = Path("/proc/cpuinfo")

NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "bmi1", "bmi2", "movbe")
"""Flags of /proc/cpuinfo that liburing needs, from the disassembly of wheel 2026.3.30 (zmm registers, kortestw, bextr,
mulx, movbe). The AVX-512 flags are those of x86-64-v4, which compilers assume together."""


def require_supported_processor(cpu_facts: Path = _CPU_FACTS) -> None:
    """Raise unless liburing can be imported without crashing. Other architectures have no wheel, so they always can.

    Args:
        cpu_facts: The file in which Linux lists the flags of the processor.

    Raises:
        ImportError: The processor lacks a flag, or its flags are unknown.
    """
    if os.uname().machine != "x86_64":
        return
    flags = _flags_of(cpu_facts)
    if flags is None:
        raise ImportError(f"liburing needs AVX-512, and {cpu_facts} does not list the flags of the processor")
    missing = [flag for flag in NEEDED_FLAGS if flag not in flags]
    if missing:
        what = "AVX-512" if all(flag.startswith("avx512") for flag in missing) else ", ".join(missing)
        raise ImportError(f"the processor lacks {what}, which liburing was compiled for")


def _flags_of(cpu_facts: Path) -> frozenset[str] | None:
    """Return the flags of the first processor, or None if the file does not list them."""
    try:
        # Read only the first entry: Linux generates the file while it is read, and it has an entry per core.
        with cpu_facts.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        return None
    return None
