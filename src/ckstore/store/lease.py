"""One live writer a run: who it is, and whether it still lives.

A lease keeps people from running twice. Safety never rests on it: claims and the check after publish
carry that, so everything here may fail, or be fooled by a clock, and cost at most a ConflictError.

The holder is host, machine, boot, pid namespace, pid and process start time. In the same boot and pid
namespace the system knows of its death immediately; elsewhere a heartbeat that stops tells. A machine of the
same name in another boot may be a twin of this one, so a reboot proves nothing. A flock or a closed pipe would
not do: a forked child keeps both alive after the holder was killed.

A saver holds the lease for its trainer, who takes it in the saver's name before there is anything to publish: who is to
be waited for must be seen from the first staged byte on, however long a saver takes to start. When the trainer has died
and the saver still publishes what was staged, it is an *orphan* (``orphans.py``): whoever starts again waits for it.
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
"""A heartbeat that stands still for this long belongs to a dead holder: five beats."""

HEART_NAME = "ckstore-lease"
"""Of the thread that beats."""

_live_tokens: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


class Lease:
    """The writer lease of one run, as one handle sees it.

    Args:
        backend: Where it lies.
        run: Whose lease it is.
        clock: Where time comes from.
        stale_seconds: How long a heartbeat elsewhere may stand still.
    """

    def __init__(self, backend: Backend, run: str, clock: Clock, *, stale_seconds: float = STALE_SECONDS) -> None:
        self.purpose = ""
        """What it is held for; written when it is taken or renewed."""
        self.orphans = Orphans(backend, run, clock, stale_seconds=stale_seconds)
        """Savers that may still publish to the run, whose trainer is gone."""
        self._backend = backend
        self._run = run
        self._clock = clock
        self._stale_seconds = stale_seconds
        self._path = paths.lease_name(run)
        self._record: LeaseRecord | None = None
        # The token of what a saver of this process was lent.
        self._transferred_token = ""
        self._pid = os.getpid()
        self._stop = Latch()
        self._heart: threading.Thread | None = None
        self._was_gone = False
        # A renewal that has begun must not bring back what was given up meanwhile.
        self._writing = threading.Lock()

    @property
    def location(self) -> str:
        """Where it lies, for messages too."""
        return self._backend.location_of(self._path)

    @property
    def is_held(self) -> bool:
        """Whether this handle, in this process, has taken the lease."""
        return self._record is not None and self._pid == os.getpid()

    def take(self) -> None:
        """Take the lease, from a dead holder too; wait for an orphan to leave, or a heartbeat on another host to stop.

        Raises:
            ConflictError: A live process holds it; the message names that process.
        """
        if self.is_held and self._is_ours(self._read()):
            if self._heart is None or not self._heart.is_alive():
                # Whoever was interrupted right before it began holds a lease that would look dead from other hosts.
                self._start_heart()
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
        """Have a saver of this process hold the lease, where nobody has to be waited for; never raises.

        What this handle holds becomes the saver's in one step; what is free, or a dead process's, is taken for it.

        Args:
            pid: The saver's.
            step: What it is to publish.

        Returns:
            The token of the saver's lease; empty: the saver has to take it by itself. This handle does not hold it.
        """
        purpose = SaverPurpose(os.getpid(), process_started(os.getpid()) or "", step)
        record = self._new_record(pid, purpose.text)
        try:
            # Where the system does not say who a process is, a saver could take another's lease for its own.
            self._transferred_token = self._put(record) if record.boot_id and record.process_started else ""
        except (CkstoreError, OSError) as error:
            log_safely(
                _log, logging.INFO, "the saver has to take the writer lease of run %r by itself: %s", self._run, error
            )
            self._transferred_token = ""
        finally:
            self.release()
        return self._transferred_token

    def accept_transfer(self) -> LeaseRecord | None:
        """Hold the lease if it was lent to this process; return what it says, if that is news.

        Raises:
            BackendError, CapacityError: The medium does not answer.
        """
        holder = self._read_transferred()
        if holder is None or self._is_ours(holder):
            return None
        self._forget()
        self._hold(holder)
        return holder

    def _read_transferred(self) -> LeaseRecord | None:
        """Return the lease if it is this process's and a saver's."""
        holder, mine = self._read(), self._new_record(os.getpid(), "")
        if holder is None or not (mine.boot_id and mine.process_started) or _identity(holder) != _identity(mine):
            return None
        return holder if SaverPurpose.of(holder.purpose) else None

    def mark_trainer_dead(self) -> None:
        """Let a lease that was lent say that its trainer is gone, where the saver cannot say so now; never raises.

        It has not adopted it yet, or stands still.
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
            log_safely(_log, logging.WARNING, "could not look at the writer lease of run %r: %s", self._run, error)

    def check(self) -> None:
        """Look at the lease again, before publishing; a medium that does not answer is logged and no reason to stop.

        Raises:
            ConflictError: Another writer took it over.
        """
        try:
            holder = self._read()
        except (BackendError, CapacityError) as error:
            _log.warning("could not look at the writer lease of run %r: %s", self._run, error)
            return
        if not self._is_ours(holder):
            self._forget()
            raise ConflictError(
                f"the writer lease of run {self._run!r} was taken over by {describe(holder)}",
                where=self.location,
                todo="nothing was published; stop one of the two writers, then commit again",
            )

    def release(self) -> None:
        """Give the lease up, if it is still ours; never raises."""
        record = self._forget()
        if record is None or self._pid != os.getpid():
            return
        try:
            with self._writing:
                holder = self._read()
                if holder is not None and holder.token == record.token:
                    self._backend.unlink(self._path)
        except (CkstoreError, OSError) as error:
            _log.warning("could not give up the writer lease of run %r: %s", self._run, error)

    def _forget(self) -> LeaseRecord | None:
        """Stop holding: no heartbeat any more, and nobody in this process takes the token for a live one."""
        self._stop.set()
        record, self._record = self._record, None
        if record is not None:
            _live_tokens.pop(record.token, None)
        return record

    def holder(self) -> LeaseRecord | None:
        """Return who holds the lease now, dead or alive."""
        return self._read()

    def _new_record(self, pid: int, purpose: str) -> LeaseRecord:
        now = self._clock.now_ns()
        return LeaseRecord(**identity_of(pid), acquired_ns=now, heartbeat_ns=now, purpose=purpose)

    def _draft(self, record: LeaseRecord) -> str:
        """Write a record under a name of its own."""
        draft = f"{paths.TMP_FOLDER}/{new_token()}.lease"
        self._backend.create(draft, encode_record(record), sync=False)
        return draft

    def _hold(self, record: LeaseRecord) -> None:
        self._record = record
        self._pid = os.getpid()
        _live_tokens[record.token] = self
        self._start_heart()

    def _put(self, record: LeaseRecord) -> str:
        """Put a record in the place of ours, or of none, or of a dead process's.

        Returns:
            The token of the lease that its process has now; empty: another one lives, or may.
        """
        draft, is_moved = self._draft(record), False
        try:
            with self._writing:
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
                # One that cannot be read protects nobody.
                self._bury(holder)
        finally:
            if not is_moved:
                with contextlib.suppress(CkstoreError, OSError):
                    self._backend.unlink(draft)

    def _read(self) -> LeaseRecord | None:
        return read_lease(self._backend, self._run)

    def _is_ours(self, holder: LeaseRecord | None) -> bool:
        return self.is_held and holder is not None and self._record is not None and holder.token == self._record.token

    def wait_for_orphan(self) -> bool:
        """Wait while a saver whose trainer is gone publishes what was staged, as ``Orphans.wait`` does.

        To be called before the newest checkpoint is looked for, and before a first commit.

        Returns:
            Whether there was one.
        """
        return self.orphans.wait()

    def _remove_dead_holder(self) -> None:
        self.wait_for_orphan()
        holder = self._read()
        if holder is not None and self._is_alive(holder):
            raise ConflictError(
                f"run {self._run!r} is being written by {describe(holder)}",
                where=self.location,
                todo="stop that process, or commit to another run; in a copy of its store, delete this file",
                pid=holder.pid,
                host=holder.host,
            )
        self._bury(holder)

    def _bury(self, holder: LeaseRecord | None) -> None:
        """Remove the lease of a holder that is dead, and no other's."""
        # Moved to a name of our own first: two who take over at once must not remove each other's new lease.
        graveyard = f"{paths.TMP_FOLDER}/{new_token()}.lease"
        try:
            self._backend.rename_new(self._path, graveyard)
        except FileNotFoundError:
            return
        moved = read_lease(self._backend, self._run, graveyard)
        if moved is not None and (holder is None or moved.token != holder.token):
            # Another one took over between our look and our move: what we moved is alive; put it back.
            with contextlib.suppress(FileExistsError):
                self._backend.link(graveyard, self._path)
        self._backend.unlink(graveyard)

    def _is_alive(self, holder: LeaseRecord) -> bool:
        is_alive = self._is_known_alive(holder)
        return self._heart_beats(holder) if is_alive is None else is_alive

    def _is_known_alive(self, holder: LeaseRecord) -> bool | None:
        """Whether a holder lives, as is known at once; None: only its heartbeat can tell."""
        if self.orphans.is_known_dead(holder):
            return False
        is_running = owner_is_running(holder)
        # Our own process: alive only if that handle still is; a forgotten one has no token left.
        return is_running and (holder.pid != os.getpid() or holder.token in _live_tokens)

    def _heart_beats(self, holder: LeaseRecord) -> bool:
        """Watch a holder on another host: does its heartbeat move within the stale time?"""
        _log.warning(
            "run %r was last written by %s; waiting up to %.0f s to see whether it still lives",
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
        _log.warning("its heartbeat has stopped; the lease is taken over")
        return False

    def _start_heart(self) -> None:
        # One may have begun in a call that was interrupted.
        self._stop.set()
        self._stop = Latch()
        self._heart = threading.Thread(target=_beat, args=(weakref.ref(self), self._stop), name=HEART_NAME, daemon=True)
        self._heart.start()

    def renew(self) -> None:
        """Write a new heartbeat; a failure is logged, whatever logging raises: safety never rests on it, hearts do."""
        with self._writing:
            self._renew()

    def _renew(self) -> None:
        record = self._record
        try:
            if record is None or not self._is_ours(self._read()):
                return
        except CkstoreError as error:
            log_safely(_log, logging.WARNING, "could not look at the writer lease of run %r: %s", self._run, error)
            return
        renewed = with_changes(record, heartbeat_ns=self._clock.now_ns(), purpose=self.purpose)
        try:
            self._backend.rename(self._draft(renewed), self._path)
            self._was_gone = False
        except FileNotFoundError as error:
            # A store that is being removed while its process ends says nothing; one that is still gone at the next
            # beat does.
            if self._was_gone:
                log_safely(_log, logging.WARNING, "could not renew the writer lease of run %r: %s", self._run, error)
            self._was_gone = True
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
