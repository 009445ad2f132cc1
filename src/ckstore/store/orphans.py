"""Orphans: savers that may still publish what their dead trainer staged. A trainer that starts waits for them.

Otherwise it would resume an older state, and the orphan would then publish a newer one.

In the same boot and pid namespace, the operating system tells whether a trainer and its saver are alive. Elsewhere, for
example on another node that shares the file system, the lease tells: the saver records there that its trainer is gone,
and it is alive as long as its heartbeat changes.
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
from ckstore.errors import BackendError, CapacityError, ConflictError, CorruptError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, decode_record
from ckstore.io.backend import Backend
from ckstore.processes import StopTimer, is_running, is_stopped, owner_is_running, process_started

_log = logging.getLogger("ckstore")

RECORD_NBYTES_MAX = 4096

TRAINER_DEAD = "gone"
"""Replaces the trainer's start time once the trainer has died or dropped its saver."""


@dataclass(frozen=True, slots=True)
class SaverPurpose:
    """The ``purpose`` field of a saver's lease: its trainer, and the step that it will publish, if any."""

    trainer_pid: int
    trainer_started: str
    step: int | None = None

    @property
    def text(self) -> str:
        """The purpose as the lease records it."""
        step = "" if self.step is None else str(self.step)
        return f"saver:{self.trainer_pid}:{self.trainer_started}:{step}"

    @classmethod
    def of(cls, text: str) -> SaverPurpose | None:
        """Parse the purpose of a lease; None if the holder is not a saver."""
        fields = text.split(":")
        if len(fields) != 4 or fields[0] != "saver" or not fields[1].isdecimal():
            return None
        return cls(int(fields[1]), fields[2], int(fields[3]) if fields[3].isdecimal() else None)


def read_lease(backend: Backend, run: str, path: str | None = None) -> LeaseRecord | None:
    """Return the lease of a run, or a lease that was moved to ``path``; None if there is none.

    Raises:
        BackendError, CapacityError: The backend does not answer, which says nothing about the holder.
    """
    try:
        content = backend.read_bytes(path or paths.lease_name(run), nbytes_max=RECORD_NBYTES_MAX)
        return decode_record(content, LeaseRecord, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        # For example torn by a power cut. It does not count: the run is treated as free.
        _log.warning("the lease of run %r is unreadable and will be replaced: %s", run, error)
        return None


def describe(holder: LeaseRecord | None) -> str:
    """Describe the holder of a lease, for messages."""
    if holder is None:
        return "a process that has released it since"
    purpose = SaverPurpose.of(holder.purpose)
    saver = "" if purpose is None else f", the saver of pid {purpose.trainer_pid}"
    return f"pid {holder.pid} on host {holder.host}{saver}"


POLL_SECONDS = 0.05
POLL_ELSEWHERE_SECONDS = 0.5
"""Slower, because on a shared file system every read goes to a server."""

PATIENCE_SECONDS = 10.0
"""A waiting process logs a line immediately and then at this interval."""

_Saver = tuple[int, str | None]
"""Pid and process start time."""

_silent: dict[str, tuple[str, int]] = {}
"""Savers elsewhere whose heartbeat has stopped: location of the lease -> token and last heartbeat."""

_DROPPED = "a handle that was dropped"
_abandoned: dict[_Saver, str | None] = {}
"""Savers of this process whose handle was dropped, and the location of the lease that each may still take."""


class Orphans:
    """The orphans of one run, as one handle sees them.

    Args:
        backend: The store.
        run: The run that the lease protects.
        clock: The time source.
        stale_seconds: A saver elsewhere is dead if its heartbeat does not change for this long.
    """

    def __init__(self, backend: Backend, run: str, clock: Clock, *, stale_seconds: float) -> None:
        self.awaited_step: int | None = None
        """The step that the last awaited orphan was to publish."""
        self.stopped_seconds_max: float | None = None
        """How long to wait for an orphan of this machine that is stopped by a signal. None: no limit."""
        self._backend = backend
        self._run = run
        self._location = backend.location_of(paths.lease_name(run))
        self._clock = clock
        self._stale_seconds = stale_seconds

    def wait(self) -> bool:
        """Wait while an orphan publishes what was staged, and log it.

        There is no time limit: an orphan ends by itself, and a killed one is noticed.

        Returns:
            Whether there was an orphan.

        Raises:
            ConflictError: The orphan was stopped for ``stopped_seconds_max``.
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
            self._wait_for(partial(self._is_still_there, orphan), orphan.pid, what)
        else:
            self._wait_elsewhere(orphan, what)
        self.awaited_step = None if purpose is None else purpose.step
        return True

    def wait_for_dropped(self) -> bool:
        """Wait for savers of this process whose handle was dropped before they had the lease, and log it.

        Returns:
            Whether there was one.
        """
        waiting = [
            saver for saver, location in list(_abandoned.items()) if location == self._location and _is_alive(saver)
        ]
        for saver in waiting:
            self._wait_for(partial(_is_alive, saver), saver[0], f"of {_DROPPED} to publish its pending checkpoints")
        return bool(waiting)

    def is_known_dead(self, holder: LeaseRecord) -> bool:
        """Whether this process saw the holder's heartbeat stop, and it has not changed since."""
        return _silent.get(self._location) == (holder.token, holder.heartbeat_ns)

    def _is_still_there(self, orphan: LeaseRecord) -> bool:
        try:
            holder = read_lease(self._backend, self._run)
        except (BackendError, CapacityError):
            # The backend does not answer. The operating system still knows.
            return _is_alive((orphan.pid, orphan.process_started))
        return holder is not None and holder.token == orphan.token and is_orphan(holder)

    def _wait_elsewhere(self, orphan: LeaseRecord, what: str) -> None:
        """Wait for a saver on another machine: until its lease is gone or its heartbeat stops."""
        heartbeat_ns, moved = orphan.heartbeat_ns, self._clock.monotonic()

        def is_active() -> bool:
            nonlocal heartbeat_ns, moved
            with contextlib.suppress(BackendError, CapacityError):
                holder = read_lease(self._backend, self._run)
                if holder is None or holder.token != orphan.token:
                    return False
                if holder.heartbeat_ns != heartbeat_ns:
                    heartbeat_ns, moved = holder.heartbeat_ns, self._clock.monotonic()
            if self._clock.monotonic() - moved < self._stale_seconds:
                return True
            _log.warning("run %r: the heartbeat of that saver has stopped; no longer waiting for it", self._run)
            _silent[self._location] = orphan.token, heartbeat_ns
            return False

        self._wait_for(is_active, orphan.pid, what, host=orphan.host)

    def _wait_for(self, is_active: Callable[[], bool], pid: int, what: str, *, host: str = "") -> None:
        begun, report_count = self._clock.monotonic(), 0
        timer, limit = StopTimer(pid), None if host else self.stopped_seconds_max
        where = f"pid {pid} on host {host}" if host else f"pid {pid}"
        _log.warning("run %r: waiting for the saver (%s) %s", self._run, where, what)
        while is_active():
            self._clock.sleep(POLL_ELSEWHERE_SECONDS if host else POLL_SECONDS)
            now = self._clock.monotonic()
            if limit is not None and timer.seconds(now) >= limit:
                raise ConflictError(
                    f"run {self._run!r}: the saver ({where}) {what} is stopped",
                    where=self._location,
                    todo="send it SIGCONT or kill it, then start the job again",
                    pid=pid,
                )
            waited = now - begun
            if waited >= (report_count + 1) * PATIENCE_SECONDS:
                report_count += 1
                stopped = "; it is stopped: resume it with SIGCONT" if not host and is_stopped(pid) else ""
                _log.warning(
                    "run %r: still waiting for the saver (%s), for %.0f s%s", self._run, where, waited, stopped
                )


def note_abandoned(pid: int, lease_location: str | None) -> None:
    """Wait for a saver of this process, whose handle was dropped, as for an orphan.

    Args:
        pid: The saver's pid.
        lease_location: The location of the lease that the saver will take; None if it has nothing to publish.
    """
    for each in list(_abandoned):
        if not _is_alive(each):
            _abandoned.pop(each, None)
    _abandoned[pid, process_started(pid)] = lease_location


def _is_alive(saver: _Saver) -> bool:
    pid, started = saver
    return is_running(pid, started or "") is not False


def is_orphan(holder: LeaseRecord) -> bool:
    """Whether a lease is held by a live saver of this boot whose trainer has died or dropped it."""
    purpose = SaverPurpose.of(holder.purpose)
    if purpose is None or holder.pid == os.getpid() or not owner_is_running(holder):
        return False
    if purpose.trainer_started == TRAINER_DEAD or (holder.pid, holder.process_started) in _abandoned:
        return True
    return is_running(purpose.trainer_pid, purpose.trainer_started) is False


def is_orphan_elsewhere(holder: LeaseRecord) -> bool:
    """Whether a lease is held by a saver whose trainer is gone, and which only its heartbeat can prove alive."""
    purpose = SaverPurpose.of(holder.purpose)
    if purpose is None or purpose.trainer_started != TRAINER_DEAD or owner_is_running(holder) is not None:
        return False
    # If the operating system has no boot ids, a saver would wait for itself.
    mine = socket.gethostname(), os.getpid(), process_started(os.getpid()) or ""
    return (holder.host, holder.pid, holder.process_started) != mine
