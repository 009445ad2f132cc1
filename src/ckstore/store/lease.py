"""The writer lease of a run: only one process writes to a run at a time.

The lease keeps people from running a training twice. Safety does not depend on it: claims and the check after
publishing protect the store. So everything here may fail, or be misled by a clock, at the cost of a ConflictError at
most.

The holder is identified by host, machine, boot, pid namespace, pid and process start time. In the same boot and pid
namespace, the operating system knows immediately whether it has died. Elsewhere only its heartbeat tells: a machine of
the same name in another boot may be a copy of this one, so a reboot proves nothing. A flock or a closed pipe would not
do: a forked child keeps both alive after the holder was killed.

For background commits the saver process holds the lease. An *orphan* is a saver that is still publishing after its
trainer died. A trainer that starts must wait for orphans first (``orphans.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from dataclasses import replace

from ckstore.clock import Clock
from ckstore.concurrency import Latch, log_safely
from ckstore.errors import BackendError, CapacityError, CkstoreError, ConflictError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, encode_record, with_changes
from ckstore.hashing import new_token
from ckstore.io.backend import Backend
from ckstore.processes import identity_of, is_stopped, owner_is_running, process_started
from ckstore.store.orphans import TRAINER_DEAD, Orphans, SaverPurpose, describe, read_lease

_log = logging.getLogger("ckstore")

HEARTBEAT_SECONDS = 3.0
STALE_SECONDS = 15.0
"""A holder whose heartbeat does not change for this long is dead: five heartbeats."""

HEARTBEAT_THREAD_NAME = "ckstore-lease"
"""Name of the heartbeat thread."""

_live_tokens: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


class Lease:
    """The writer lease of one run, as one handle uses it.

    A background thread renews the heartbeat while the lease is held.

    Args:
        backend: The store.
        run: The run that the lease protects.
        clock: The time source.
        stale_seconds: A holder on another host is dead if its heartbeat does not change for this long.
    """

    def __init__(self, backend: Backend, run: str, clock: Clock, *, stale_seconds: float = STALE_SECONDS) -> None:
        self.purpose = ""
        """What the lease is held for. Written when it is taken or renewed."""
        self.orphans = Orphans(backend, run, clock, stale_seconds=stale_seconds)
        """Savers that may still publish to the run although their trainer is gone."""
        self._backend = backend
        self._run = run
        self._clock = clock
        self._stale_seconds = stale_seconds
        self._path = paths.lease_name(run)
        self._record: LeaseRecord | None = None
        # Token of the lease that was transferred to a saver of this process.
        self._transferred_token = ""
        self._pid = os.getpid()
        self._stop = Latch()
        self._heartbeat: threading.Thread | None = None
        self._was_missing = False
        # Held while the lease file is written, so that a renewal cannot restore a released lease.
        self._file_lock = threading.Lock()

    @property
    def location(self) -> str:
        """The lease's path, also for messages."""
        return self._backend.location_of(self._path)

    @property
    def is_held(self) -> bool:
        """Whether this handle, in this process, holds the lease."""
        return self._record is not None and self._pid == os.getpid()

    def take(self) -> None:
        """Take the lease, also from a dead holder. Wait for an orphan, or for a heartbeat on another host to stop.

        Raises:
            ConflictError: A live process holds it. The message names that process.
        """
        if self.is_held and self._is_ours(self._read()):
            if self._heartbeat is None or not self._heartbeat.is_alive():
                # An interrupt may have come right before the heartbeat started. Other hosts would take us for dead.
                self._start_heartbeat()
            return
        self._forget()
        mine = self._new_record(os.getpid(), self.purpose)
        draft = self._draft(mine)
        try:
            while True:
                try:
                    self._backend.link(draft, self._path)
                    self._hold(mine)
                    return
                except FileExistsError:
                    if self.accept_transfer() is not None:
                        return
                    self._remove_dead_holder()
        finally:
            self._backend.unlink(draft)

    def transfer_to(self, pid: int, step: int) -> str:
        """Make a saver of this process the holder of the lease. Never waits and never raises.

        If this handle holds the lease, one rename transfers it. If it is free, or its holder is dead, it is taken in
        the saver's name.

        Args:
            pid: The saver's pid.
            step: The step that the saver will publish.

        Returns:
            The token of the saver's lease. Empty: the saver must take the lease itself. In both cases this handle does
            not hold it.
        """
        purpose = SaverPurpose(os.getpid(), process_started(os.getpid()) or "", step)
        record = self._new_record(pid, purpose.text)
        try:
            # If the operating system does not identify processes, a saver could mistake another's lease for its own.
            self._transferred_token = self._put(record) if record.boot_id and record.process_started else ""
        except (CkstoreError, OSError) as error:
            log_safely(
                _log,
                logging.INFO,
                "could not transfer the writer lease of run %r to the saver, which will take it itself: %s",
                self._run,
                error,
            )
            self._transferred_token = ""
        finally:
            self.release()
        return self._transferred_token

    def accept_transfer(self) -> LeaseRecord | None:
        """Hold the lease if it was transferred to this process; return its record, or None if nothing has changed.

        Raises:
            BackendError, CapacityError: The backend does not answer.
        """
        holder = self._read_transferred()
        if holder is None or self._is_ours(holder):
            return None
        self._forget()
        self._hold(holder)
        return holder

    def _read_transferred(self) -> LeaseRecord | None:
        """Return the lease if it names this process and was written for a saver."""
        holder, mine = self._read(), self._new_record(os.getpid(), "")
        if holder is None or not (mine.boot_id and mine.process_started) or _identity(holder) != _identity(mine):
            return None
        return holder if SaverPurpose.of(holder.purpose) else None

    def mark_trainer_dead(self) -> None:
        """Record in a transferred lease that its trainer is gone, if the saver cannot do so. Never raises.

        The saver cannot if it has not accepted the lease yet, or is stopped.
        """
        try:
            holder = self._read() if self._transferred_token else None
            purpose = None if holder is None else SaverPurpose.of(holder.purpose)
            if holder is None or holder.token != self._transferred_token or purpose is None:
                return
            if holder.heartbeat_ns == holder.acquired_ns or is_stopped(holder.pid):
                text = replace(purpose, trainer_started=TRAINER_DEAD).text
                self._backend.rename(self._draft(with_changes(holder, purpose=text)), self._path)
        except (CkstoreError, OSError) as error:
            log_safely(_log, logging.WARNING, "could not read the writer lease of run %r: %s", self._run, error)

    def check(self) -> None:
        """Check before publishing that the lease is still ours. A backend that does not answer is only logged.

        Raises:
            ConflictError: Another writer took it over.
        """
        try:
            holder = self._read()
        except (BackendError, CapacityError) as error:
            _log.warning("could not read the writer lease of run %r: %s", self._run, error)
            return
        if not self._is_ours(holder):
            self._forget()
            raise ConflictError(
                f"the writer lease of run {self._run!r} was taken over by {describe(holder)}",
                where=self.location,
                todo="nothing was published; stop one of the two writers, then commit again",
            )

    def release(self) -> None:
        """Release the lease if it is still ours. Never raises."""
        record = self._forget()
        if record is None or self._pid != os.getpid():
            return
        try:
            with self._file_lock:
                holder = self._read()
                if holder is not None and holder.token == record.token:
                    self._backend.unlink(self._path)
        except (CkstoreError, OSError) as error:
            _log.warning("could not release the writer lease of run %r: %s", self._run, error)

    def _forget(self) -> LeaseRecord | None:
        """Stop holding: end the heartbeat, and no longer count the token as live in this process."""
        self._stop.set()
        record, self._record = self._record, None
        if record is not None:
            _live_tokens.pop(record.token, None)
        return record

    def holder(self) -> LeaseRecord | None:
        """Return the record of the current holder, dead or alive; None if the lease is free."""
        return self._read()

    def _new_record(self, pid: int, purpose: str) -> LeaseRecord:
        now = self._clock.now_ns()
        return LeaseRecord(**identity_of(pid), acquired_ns=now, heartbeat_ns=now, purpose=purpose)

    def _draft(self, record: LeaseRecord) -> str:
        """Write a record to a file in ``tmp``; return its path."""
        draft = f"{paths.TMP_FOLDER}/{new_token()}.lease"
        self._backend.create(draft, encode_record(record), sync=False)
        return draft

    def _hold(self, record: LeaseRecord) -> None:
        self._record = record
        self._pid = os.getpid()
        _live_tokens[record.token] = self
        self._start_heartbeat()

    def _put(self, record: LeaseRecord) -> str:
        """Write a record as the lease if the lease is ours, free, or held by a dead process.

        Returns:
            The token of the lease that the record's process holds now. Empty: another process lives, or may live.
        """
        draft, is_moved = self._draft(record), False
        try:
            with self._file_lock:
                if self._is_ours(self._read()):
                    self._backend.rename(draft, self._path)
                    is_moved = True
                    self._forget()
                    return record.token
            while True:
                try:
                    self._backend.link(draft, self._path)
                    return record.token
                except FileExistsError:
                    holder = self._read()
                if holder is not None and _identity(holder) == _identity(record):
                    return holder.token
                if holder is not None and self._is_known_alive(holder) is not False:
                    return ""
                # An unreadable lease does not count: the run is treated as free.
                self._remove_stale(holder)
        finally:
            if not is_moved:
                with contextlib.suppress(CkstoreError, OSError):
                    self._backend.unlink(draft)

    def _read(self) -> LeaseRecord | None:
        return read_lease(self._backend, self._run)

    def _is_ours(self, holder: LeaseRecord | None) -> bool:
        return self.is_held and holder is not None and self._record is not None and holder.token == self._record.token

    def wait_for_orphan(self) -> bool:
        """Wait while an orphan publishes what was staged, as ``Orphans.wait`` does.

        Call it before looking for the newest checkpoint and before a first commit.

        Returns:
            Whether there was an orphan.
        """
        return self.orphans.wait()

    def _remove_dead_holder(self) -> None:
        self.wait_for_orphan()
        holder = self._read()
        if holder is not None and self._is_alive(holder):
            raise ConflictError(
                f"run {self._run!r} is being written by {describe(holder)}",
                where=self.location,
                todo="stop that process, or commit to another run; if this store is a copy, delete this file",
                pid=holder.pid,
                host=holder.host,
            )
        self._remove_stale(holder)

    def _remove_stale(self, holder: LeaseRecord | None) -> None:
        """Remove the lease of a dead holder, and no other lease."""
        # Rename it first: two processes that take over at the same time must not remove each other's new lease.
        removed = f"{paths.TMP_FOLDER}/{new_token()}.lease"
        try:
            self._backend.rename_new(self._path, removed)
        except FileNotFoundError:
            return
        moved = read_lease(self._backend, self._run, removed)
        if moved is not None and (holder is None or moved.token != holder.token):
            # Another process took over before our rename, so we moved a live lease. Put it back.
            with contextlib.suppress(FileExistsError):
                self._backend.link(removed, self._path)
        self._backend.unlink(removed)

    def _is_alive(self, holder: LeaseRecord) -> bool:
        is_alive = self._is_known_alive(holder)
        return self._is_heartbeat_moving(holder) if is_alive is None else is_alive

    def _is_known_alive(self, holder: LeaseRecord) -> bool | None:
        """Whether a holder is alive, as far as known without waiting. None: only its heartbeat can tell."""
        if self.orphans.is_known_dead(holder):
            return False
        is_running = owner_is_running(holder)
        # In our own process, the holder is alive only if its handle still exists.
        return is_running and (holder.pid != os.getpid() or holder.token in _live_tokens)

    def _is_heartbeat_moving(self, holder: LeaseRecord) -> bool:
        """Watch a holder on another host: return whether its heartbeat changes within the stale time."""
        _log.warning(
            "run %r was last written by %s; waiting up to %.0f s to see whether that process is alive",
            self._run, describe(holder), self._stale_seconds,
        )  # fmt: skip
        deadline = self._clock.monotonic() + self._stale_seconds
        while self._clock.monotonic() < deadline:
            self._clock.sleep(min(0.5, self._stale_seconds / 10))
            now = self._read()
            if now is None or now.token != holder.token:
                return now is not None
            if now.heartbeat_ns != holder.heartbeat_ns:
                return True
        _log.warning("run %r: that heartbeat has stopped; taking over the lease", self._run)
        return False

    def _start_heartbeat(self) -> None:
        # An interrupted call may have started one.
        self._stop.set()
        self._stop = Latch()
        self._heartbeat = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._stop), name=HEARTBEAT_THREAD_NAME, daemon=True
        )
        self._heartbeat.start()

    def renew(self) -> None:
        """Write a new heartbeat. A failure is only logged: the heartbeat thread must survive it."""
        with self._file_lock:
            self._renew()

    def _renew(self) -> None:
        record = self._record
        try:
            if record is None or not self._is_ours(self._read()):
                return
        except CkstoreError as error:
            log_safely(_log, logging.WARNING, "could not read the writer lease of run %r: %s", self._run, error)
            return
        renewed = with_changes(record, heartbeat_ns=self._clock.now_ns(), purpose=self.purpose)
        try:
            self._backend.rename(self._draft(renewed), self._path)
            self._was_missing = False
        except FileNotFoundError as error:
            # The store may be removed while its process ends. Log only if it is still missing at the next heartbeat.
            if self._was_missing:
                log_safely(_log, logging.WARNING, "could not renew the writer lease of run %r: %s", self._run, error)
            self._was_missing = True
        except (CkstoreError, OSError) as error:
            log_safely(_log, logging.WARNING, "could not renew the writer lease of run %r: %s", self._run, error)


def _identity(record: LeaseRecord) -> tuple[str, str, int, str]:
    return record.host, record.boot_id, record.pid, record.process_started


def _beat(reference: weakref.ref[Lease], stop: Latch) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        lease = reference()
        if lease is None or stop.is_set():
            return
        lease.renew()
        del lease
