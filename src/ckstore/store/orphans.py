"""Savers whose trainer is gone, and that may still publish what it staged: whoever starts the run again waits for them.

Otherwise an older state would be resumed, and then overtaken.

On the same boot, and in the same pid namespace, the system tells whether a trainer and its saver live. Elsewhere, on
another node that shares the file system say, the lease tells: a saver says there that its trainer is gone, and as long
as its heartbeat moves it lives.

What a writer lease says: who holds it, and for whom; read from where it lies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckstore.clock import Clock
from ckstore.errors import BackendError, CapacityError, CorruptError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, decode_record
from ckstore.io.backend import Backend
from ckstore.processes import is_running, is_stopped, owner_is_running, process_started

_log = logging.getLogger("ckstore")

RECORD_NBYTES_MAX = 4096

TRAINER_DEAD = "gone"
"""In place of a trainer's start time: that trainer has died, or has let go of its saver."""


@dataclass(frozen=True, slots=True)
class SaverPurpose:
    """What a saver's lease is for: whose saver it is, and which step it is about to publish, if any."""

    trainer_pid: int
    trainer_started: str
    step: int | None = None

    @property
    def text(self) -> str:
        """The purpose as a lease records it."""
        step = "" if self.step is None else str(self.step)
        return f"saver:{self.trainer_pid}:{self.trainer_started}:{step}"

    @classmethod
    def of(cls, text: str) -> SaverPurpose | None:
        """Return the purpose that a lease records; None: it is no saver's."""
        fields = text.split(":")
        if len(fields) != 4 or fields[0] != "saver" or not fields[1].isdecimal():
            return None
        return cls(int(fields[1]), fields[2], int(fields[3]) if fields[3].isdecimal() else None)


def read_lease(backend: Backend, run: str, path: str | None = None) -> LeaseRecord | None:
    """Return what the lease of a run says, or a lease that was moved to another path; None: there is none.

    Raises:
        BackendError, CapacityError: The medium does not answer, which says nothing about the holder.
    """
    try:
        content = backend.read_bytes(path or paths.lease_name(run), nbytes_max=RECORD_NBYTES_MAX)
        return decode_record(content, LeaseRecord, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        # A torn lease, after a power cut say, protects nobody.
        _log.warning("unreadable lease of run %r is taken over: %s", run, error)
        return None


def describe(holder: LeaseRecord | None) -> str:
    """Return who holds a lease, in words."""
    if holder is None:
        return "someone who has left"
    purpose = SaverPurpose.of(holder.purpose)
    saver = "" if purpose is None else f", the saver of pid {purpose.trainer_pid}"
    return f"pid {holder.pid} on host {holder.host}{saver}"


POLL_SECONDS = 0.05
POLL_ELSEWHERE_SECONDS = 0.5
"""Whoever reads a lease on a shared file system has a server answer."""

PATIENCE_SECONDS = 10.0
"""Whoever waits for an orphan is told so at once, and again after every so many seconds."""

_Saver = tuple[int, str | None]
"""Its pid, and when it was started."""

_silent: dict[str, tuple[str, int]] = {}
"""Leases of savers elsewhere whose heartbeat was seen to stand still: location -> token and heartbeat."""

_DROPPED = "a handle that was dropped"
_abandoned: dict[_Saver, str | None] = {}
"""Savers of this process whose handle was dropped, and which lease they may still come to take."""


class Orphans:
    """The orphans of one run, as one handle sees them.

    Args:
        backend: Where the lease lies.
        run: Whose lease it is.
        clock: Where time comes from.
        stale_seconds: How long the heartbeat of a saver elsewhere may stand still.
    """

    def __init__(self, backend: Backend, run: str, clock: Clock, *, stale_seconds: float) -> None:
        self.awaited_step: int | None = None
        """What the last one that was waited for was to publish."""
        self._backend = backend
        self._run = run
        self._location = backend.location_of(paths.lease_name(run))
        self._clock = clock
        self._stale_seconds = stale_seconds

    def wait(self) -> bool:
        """Wait while a saver whose trainer is gone publishes what was staged; says so in the log.

        There is no bound: an orphan ends by itself, and one that is killed, or was never there, is not waited for.

        Returns:
            Whether there was one.
        """
        was_dropped = self.wait_for_dropped()
        orphan = read_lease(self._backend, self._run)
        if orphan is None:
            return was_dropped
        is_here = is_orphan(orphan)
        if not is_here and (self.is_known_dead(orphan) or not is_orphan_elsewhere(orphan)):
            return was_dropped
        purpose = SaverPurpose.of(orphan.purpose)
        what = "end" if purpose is None or purpose.step is None else f"publish step {purpose.step}"
        is_dropped = (orphan.pid, orphan.process_started) in _abandoned
        what = f"of {_DROPPED if is_dropped else 'the trainer that died'} to {what}"
        if is_here:
            self._wait_for(partial(self._is_there, orphan), orphan.pid, what)
        else:
            self._wait_elsewhere(orphan, what)
        self.awaited_step = None if purpose is None else purpose.step
        return True

    def wait_for_dropped(self) -> bool:
        """Wait for savers of this process whose handle was dropped before they had the lease; says so in the log.

        Returns:
            Whether there was one.
        """
        waiting = [saver for saver, coming in list(_abandoned.items()) if coming == self._location and _lives(saver)]
        for saver in waiting:
            self._wait_for(partial(_lives, saver), saver[0], f"of {_DROPPED} to publish what it was given")
        return bool(waiting)

    def is_known_dead(self, holder: LeaseRecord) -> bool:
        """Whether this process has seen this holder's heartbeat stand still, and it has not moved since."""
        return _silent.get(self._location) == (holder.token, holder.heartbeat_ns)

    def _is_there(self, orphan: LeaseRecord) -> bool:
        try:
            holder = read_lease(self._backend, self._run)
        except (BackendError, CapacityError):
            # A medium that does not answer says nothing, and the system does.
            return _lives((orphan.pid, orphan.process_started))
        return holder is not None and holder.token == orphan.token and is_orphan(holder)

    def _wait_elsewhere(self, orphan: LeaseRecord, what: str) -> None:
        """Wait for a saver that cannot be judged here: until its lease is gone, or its heartbeat stands still."""
        heartbeat_ns, moved = orphan.heartbeat_ns, self._clock.monotonic()

        def is_there() -> bool:
            nonlocal heartbeat_ns, moved
            with contextlib.suppress(BackendError, CapacityError):
                holder = read_lease(self._backend, self._run)
                if holder is None or holder.token != orphan.token:
                    return False
                if holder.heartbeat_ns != heartbeat_ns:
                    heartbeat_ns, moved = holder.heartbeat_ns, self._clock.monotonic()
            if self._clock.monotonic() - moved < self._stale_seconds:
                return True
            _log.warning("run %r: its heartbeat has stopped; it is not waited for any more", self._run)
            _silent[self._location] = orphan.token, heartbeat_ns
            return False

        self._wait_for(is_there, orphan.pid, what, host=orphan.host)

    def _wait_for(self, is_there: Callable[[], bool], pid: int, what: str, *, host: str = "") -> None:
        begun, told = self._clock.monotonic(), 0
        where = f"pid {pid} on host {host}" if host else f"pid {pid}"
        _log.warning("run %r: waiting for the saver (%s) %s", self._run, where, what)
        while is_there():
            self._clock.sleep(POLL_ELSEWHERE_SECONDS if host else POLL_SECONDS)
            waited = self._clock.monotonic() - begun
            if waited >= (told + 1) * PATIENCE_SECONDS:
                told += 1
                stopped = "; it is stopped: SIGCONT lets it go on" if not host and is_stopped(pid) else ""
                _log.warning(
                    "run %r: still waiting for the saver (%s), for %.0f s%s", self._run, where, waited, stopped
                )


def note_abandoned(pid: int, coming: str | None) -> None:
    """Let a saver of this process, whose handle was dropped, be waited for as an orphan is.

    Args:
        pid: The saver's.
        coming: Where the lease lies that it takes to publish what it was given; None: it was given nothing.
    """
    for each in list(_abandoned):
        if not _lives(each):
            _abandoned.pop(each, None)
    _abandoned[pid, process_started(pid)] = coming


def _lives(saver: _Saver) -> bool:
    pid, started = saver
    return is_running(pid, started or "") is not False


def is_orphan(holder: LeaseRecord) -> bool:
    """Whether a lease is held by a living saver, of this boot, whose trainer has died or dropped it."""
    purpose = SaverPurpose.of(holder.purpose)
    if purpose is None or holder.pid == os.getpid() or not owner_is_running(holder):
        return False
    if purpose.trainer_started == TRAINER_DEAD or (holder.pid, holder.process_started) in _abandoned:
        return True
    return is_running(purpose.trainer_pid, purpose.trainer_started) is False


def is_orphan_elsewhere(holder: LeaseRecord) -> bool:
    """Whether a lease is held by a saver that says that its trainer is gone, and of which only heartbeats tell here."""
    purpose = SaverPurpose.of(holder.purpose)
    if purpose is None or purpose.trainer_started != TRAINER_DEAD or owner_is_running(holder) is not None:
        return False
    # Where the system says nothing of boots, a saver would wait for itself.
    mine = socket.gethostname(), os.getpid(), process_started(os.getpid()) or ""
    return (holder.host, holder.pid, holder.process_started) != mine
