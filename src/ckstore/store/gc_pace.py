"""Give way to whoever commits: rest after each call that keeps the disk, and its journal, from others.

Removing a file whose bytes are on the disk, and making a name durable, take the journal of most file systems for as
long as they last; a commit makes five of its own calls wait behind them. A collection is in no hurry: while someone
writes to the store it sleeps a few times as long as it has kept the disk busy.

Invariants:
- Only time is spent here: every call is made, in the same order, whoever writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.clock import Clock
from ckstore.errors import CkstoreError
from ckstore.format import layout
from ckstore.format.records import LeaseRecord
from ckstore.io.backend import Backend
from ckstore.io.local import LocalBackend
from ckstore.store.lease import Lease
from ckstore.store.processes import maker_is_running

REST = 4.0
"""Sleep for so many times as long as the disk was kept busy: it is free for others four fifths of the time."""

REST_SECONDS_MAX = 0.1
"""After one call: a disk that was stuck for long was not kept busy by us."""

TOTAL_SECONDS_MAX = 600.0
"""All rests of one collection; after that it goes on at its own pace, so that it ends."""

BEAT_SECONDS = 60.0
"""A holder on another host lives if its heart has beaten within this time, by the clocks of both."""


class PacedBackend(LocalBackend):
    """A folder whose names are removed and made durable in leisure.

    Args:
        root: The folder.
        clock: How it rests.
    """

    def __init__(self, root: str, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock
        self._left_seconds = TOTAL_SECONDS_MAX

    def unlink(self, name: str) -> None:
        """Remove a name, and rest."""
        with self._rest():
            super().unlink(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a new file; rest if it was made durable."""
        if not sync:
            super().create(name, content, sync=False)
            return
        with self._rest():
            super().create(name, content, sync=True)

    def sync_file(self, name: str) -> None:
        """Make a file durable, and rest."""
        with self._rest():
            super().sync_file(name)

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable, and rest."""
        with self._rest():
            super().sync_folder(name)

    @contextmanager
    def _rest(self) -> Iterator[None]:
        begun = self._clock.monotonic()
        yield
        seconds = min(REST * (self._clock.monotonic() - begun), REST_SECONDS_MAX, self._left_seconds)
        if seconds > 0:
            self._left_seconds -= seconds
            self._clock.sleep(seconds)


def paced(backend: Backend, clock: Clock) -> Backend:
    """Return what a collection works on: a folder that someone else writes to just now is taken in leisure."""
    if type(backend) is LocalBackend and someone_writes(backend, clock):
        return PacedBackend(backend.root, clock)
    return backend


def someone_writes(backend: Backend, clock: Clock) -> bool:
    """Whether a process other than this one holds the lease of a run, as far as can be told without waiting."""
    try:
        runs = [run for run in backend.list_names(layout.LEASES_FOLDER) if layout.is_name(run)]
        return any(_lives(Lease(backend, run, clock).holder(), clock) for run in runs)
    except CkstoreError:
        # Whoever cannot say who writes does not do so in leisure.
        return False


def _lives(holder: LeaseRecord | None, clock: Clock) -> bool:
    if holder is None:
        return False
    is_running = maker_is_running(holder)
    if is_running is not None:
        return is_running and holder.pid != os.getpid()
    return abs(clock.now_ns() - holder.heartbeat_ns) < BEAT_SECONDS * 1e9
