"""Engines whose transfers fail or are cut short: what a bad completion of a ring looks like.

strace sees no ring operations, so errors of single transfers are made here, between engine and user.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from errno import EIO

from ckstore.io.direct_io import Engine, IoQueue, IoRequest


@dataclass(frozen=True, slots=True)
class BadCompletion:
    """What becomes of one transfer of an engine.

    Args:
        at: The number of the transfer, from 1, counted over ``kind``.
        errno: What it completes with; 0: it moves only ``nbytes`` and says so.
        nbytes: Bytes really moved.
        for_ever: Every later one too.
    """

    at: int
    errno: int = EIO
    nbytes: int = 0
    kind: str = "write"
    for_ever: bool = False


class FaultyEngine:
    """An Engine whose completions are altered: strace sees no ring operations, this does.

    Args:
        inner: The engine that does the work.
        fault: Which completion is bad; None: only count.
    """

    def __init__(self, inner: Engine, fault: BadCompletion | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self.counted = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The name of the engine that does the work."""
        return self.inner.name

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> FaultyQueue:
        """Make a queue with altered completions."""
        return FaultyQueue(self, self.inner.open_queue(depth=depth, nbytes_max=nbytes_max))

    def next_fault(self, kind: str) -> BadCompletion | None:
        """Count a transfer and return what becomes of it."""
        with self._lock:
            fault = self.fault
            if fault is not None and fault.kind != kind:
                return None
            self.counted += 1
            if fault is None or self.counted < fault.at or (self.counted > fault.at and not fault.for_ever):
                return None
            return fault


class FaultyQueue:
    """An IoQueue in which a transfer is cut short and then reported with another result."""

    def __init__(self, engine: FaultyEngine, inner: IoQueue) -> None:
        self._engine = engine
        self._inner = inner

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or a part of it."""
        fault = self._engine.next_fault(request.kind)
        if fault is None:
            self._inner.submit(request)
            return
        error = OSError(fault.errno, os.strerror(fault.errno)) if fault.errno else None
        if not fault.nbytes:
            request.on_done(0, error)
            return

        def altered(nbytes: int, real: OSError | None) -> None:
            request.on_done(nbytes if error is None else 0, real or error)

        part = request.buffer[: fault.nbytes]
        self._inner.submit(IoRequest(request.kind, request.fd, part, request.offset, altered))

    def close(self) -> None:
        """Wait for everything submitted."""
        self._inner.close()
