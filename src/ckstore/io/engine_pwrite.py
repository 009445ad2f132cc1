"""The engine that is always there: pwrite and pread on a few threads.

Invariants:
- Threads are started as requests come, never more than ``depth``; each waits without the GIL.
- A queue belongs to the process that made it: its threads do not exist in a forked child.
"""

from __future__ import annotations

import os
import queue
import threading

from ckstore.errors import UsageError
from ckstore.io.engine import IoQueue, IoRequest, Transfer


class PwriteEngine:
    """Moves blocks by ordinary system calls."""

    name = "pwrite"

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Make a queue of at most ``depth`` threads; of bytes it keeps no count."""
        return PwriteQueue(depth)


class PwriteQueue:
    """Requests waiting for, or in the hands of, a few threads."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished_count = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or keep it until a thread is free."""
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
            # The lock may have been held by a thread of the parent.
            return
        with self._lock:
            threads, self._threads = self._threads, []
            self._is_closed = True
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        # A store that is never closed must not keep the process alive: what is in flight then was never promised.
        thread = threading.Thread(target=self._work, name="ckstore-pwrite", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            moved, error = _run(request)
            with self._lock:
                self._unfinished_count -= 1
            request.on_done(moved, error)
            # The buffer belongs to someone else now; nothing here may keep it alive while waiting.
            del request


def _run(request: IoRequest) -> tuple[int, OSError | None]:
    transfer = Transfer(request)
    call = os.preadv if request.kind == "read" else os.pwritev
    try:
        while True:
            start = transfer.start
            # Python repeats a call that a signal interrupted.
            if transfer.advance(call(request.fd, [request.buffer[start:]], request.offset + start)):
                return transfer.moved, None
    except OSError as error:
        return transfer.moved, error
