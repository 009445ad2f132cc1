"""One collector at a time, to save work: safety never rests on this lock, nor on any other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.clock import Clock
from ckstore.errors import LockHeldError, UnsupportedError
from ckstore.format import layout
from ckstore.io.backend import Backend, FileLock, Locking

_log = logging.getLogger("ckstore")

PATIENCE_SECONDS = 2.0
"""A ring can keep a dead process's descriptor, and so its lock, for a moment."""

_POLL_SECONDS = 0.1


@contextmanager
def collector_lock(backend: Backend, clock: Clock, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold ``gc.lock`` while the block runs; where the place has no locks, just run it.

    Raises:
        LockHeldError: Another collector is at work.
    """
    lock = _lock(backend, clock, patience_seconds) if isinstance(backend, Locking) else None
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(backend: Locking, clock: Clock, patience_seconds: float) -> FileLock | None:
    deadline = clock.monotonic() + patience_seconds
    while True:
        try:
            lock = backend.try_lock(layout.GC_LOCK_FILE)
        except UnsupportedError as error:
            _log.info("this collection runs without a lock, and two at a time are safe: %s", error)
            return None
        if lock is not None:
            return lock
        if clock.monotonic() >= deadline:
            raise LockHeldError(
                "another collection is at work in this store",
                where=layout.GC_LOCK_FILE,
                todo="wait for it to end; what it leaves, the next one takes",
            )
        clock.sleep(_POLL_SECONDS)
