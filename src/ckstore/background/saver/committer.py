"""Commit tickets in the saver process: hold the lease, run the commit, report the result.

Invariants:
- The lease is held before a byte is read, and is kept for the next ticket. Giving it up also forgets the run.
- ``Began`` is sent for a ticket only if the trainer was seen alive after the lease was taken. So a restarted trainer
  finds the lease and waits.
- No error of a ticket ends the saver. Every error is reported, with its class.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from ckstore.background import protocol
from ckstore.background.protocol import Message
from ckstore.background.saver.staged_state import Ticket
from ckstore.background.staged_head import Head
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.commit.commit import Fingerprint, follow_parent
from ckstore.commit.pipeline import WriteBlocks
from ckstore.concurrency import ThreadLimit, leave_idle_class, noop
from ckstore.config import EngineName
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import CapacityError, CkstoreError, SaverError
from ckstore.format.error_records import restored_error
from ckstore.io.backend import Backend
from ckstore.io.local import LocalBackend
from ckstore.io.url import backend_for
from ckstore.ops.commit import CommitRequest, commit_checkpoint, room_after, set_tags
from ckstore.results import Receipt, Stopwatch
from ckstore.state.capture import Structure
from ckstore.store.lease import Lease
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record, require_same_store

if TYPE_CHECKING:
    from ckstore.background.saver.job import SaverRank

_log = logging.getLogger("ckstore")

PROGRESS_SECONDS = 1.0
"""Least time between two progress messages, since each wakes a thread of the trainer."""

_PARENTS_MAX = 16


class Send(Protocol):
    """Sends a message to the trainer."""

    def __call__(self, message: Message, *, wait_ms: int | None = None) -> bool:
        """Return whether it was sent."""
        ...


class OnLease(Protocol):
    """Records that tickets are promised from now on."""

    def __call__(self, only: Ticket | None) -> None:
        """``only`` this ticket; None: every one."""
        ...


class Committer:
    """The saver's view of the store, and what it remembers between commits. Used by the committing thread.

    Args:
        hello: The store to write to, and the trainer.
        send: Sends a message to the trainer.
        on_lease: Called when the lease was taken, before anything is read. In a job of many ranks it is called with a
            ticket, when all ranks have staged it.
        thread_limit: How many threads a commit may use at present.
        listener: Rank 0 of such a job: the socket for the savers of the others.
        before_result: Called before the result of a ticket is sent: sends what must arrive before it.
    """

    def __init__(
        self,
        hello: protocol.Hello,
        send: Send,
        on_lease: OnLease,
        thread_limit: ThreadLimit,
        listener: socket.socket | None = None,
        *,
        before_result: Callable[[], None] = noop,
    ) -> None:
        self._hello = hello
        self._trainer = protocol.ProcessWatch(hello.trainer_pid, hello.trainer_started)
        self._before_result = before_result
        self._listener = listener
        self._job: SaverRank | None = None
        self._send = send
        self._on_lease = on_lease
        self._thread_limit = thread_limit
        self._repository: Repository | None = None
        self._lease: GatedLease | None = None
        self._bases = BaseCache()
        self._blocks = WriteBlocks(is_reused=True)
        self._fingerprint: Fingerprint | None = None
        self._structure = 0, Structure()
        """That of the last commit, and its number in the trainer."""
        self._is_disowned = False
        self._seq_of: dict[int, int | None] = {}
        self._given_up: dict[int, tuple[int | None, int]] = {}
        """Parents of tickets that were cancelled before their turn."""
        self.exit_code = 0
        """Exit code for the last error, for a saver whose trainer is dead."""

    def open(self) -> None:
        """Open the store and choose the I/O engine, so that the first state need not wait for that.

        Raises:
            CkstoreError: The store does not exist or cannot be used.
        """
        hello = self._hello
        # The trainer has already checked who may write to the folder.
        backend = backend_for(
            os.fsdecode(hello.address), engine=cast(EngineName, hello.engine), allow_shared_folder=True
        )
        repository = Repository(backend, read_store_record(backend), hello.run, clock=SYSTEM_CLOCK)
        repository.retention = json.loads(hello.retention)
        if hello.store_id:
            require_same_store(backend, bytes.fromhex(hello.store_id))
        repository.lease = self._lease = GatedLease(backend, hello.run, SYSTEM_CLOCK)
        self._repository = repository
        if hello.job:
            from ckstore.background.saver.job import SaverRank

            self._job = SaverRank(hello.job, self._listener, repository, self._thread_limit, self._blocks)
        if isinstance(backend, LocalBackend):
            # Evaluating both properties tries out the engines.
            _log.debug("packs are moved by %s, past the page cache: %s", backend.engine_name, backend.is_direct)

    @property
    def holds_lease(self) -> bool:
        """Whether the lease is held, and tickets can be promised for that reason."""
        return self._job is None and self._lease is not None and self._lease.is_held

    @property
    def is_other_rank(self) -> bool:
        """Whether this is a rank of a job other than rank 0: then the lease is not its concern."""
        return self._job is not None and not self._job.is_first

    @property
    def retained_tickets(self) -> frozenset[int]:
        """Tickets whose slots are retained as delta bases of the next commit."""
        return self._bases.tickets if self._job is None else self._job.bases.tickets

    def was_transferred(self, token: str) -> bool:
        """Whether the lease file still has this token, which the trainer has transferred. On any thread."""
        if not token or self._lease is None or self._job is not None:
            return False
        # If the store does not respond, the commit will check again.
        with contextlib.suppress(CkstoreError):
            holder = self._lease.holder()
            return holder is not None and holder.token == token
        return False

    def announce(self, step: int) -> None:
        """Record in the lease which step is published last, for processes that wait for this saver."""
        assert self._lease is not None
        lease = self._lease
        started = TRAINER_DEAD if self._is_disowned else self._hello.trainer_started
        lease.purpose = SaverPurpose(self._hello.trainer_pid, started, step).text
        if lease.is_held:
            lease.renew()

    def mark_trainer_dead(self) -> None:
        """Record in the lease that the trainer is gone. Its pid may already belong to another program."""
        lease = self._lease
        purpose = None if lease is None else SaverPurpose.of(lease.purpose)
        self._is_disowned = True
        if lease is not None and purpose is not None:
            lease.purpose = replace(purpose, trainer_started=TRAINER_DEAD).text
            lease.renew()

    def release(self) -> None:
        """Give up the lease and forget the run, which other processes may write from now on."""
        assert self._repository is not None
        self._repository.lease.release()
        self._repository.forget_run_state()
        self._bases, self._fingerprint = BaseCache(), None
        if self._job is not None:
            self._job.forget_bases()
        # The trainer commits by itself now, with its own write blocks.
        self._blocks.release()

    def release_retained(self) -> None:
        """Free everything that is retained for the next commit: delta bases and write blocks."""
        (self._bases if self._job is None else self._job.bases).release()
        self._blocks.release()

    def warm(self, block_count: int, nbytes: int) -> Iterator[None]:
        """Allocate the memory that a commit of this size needs. Yields often; may be stopped at any time."""
        # A lack of memory is reported by the commit that needs it.
        with contextlib.suppress(CapacityError, MemoryError):
            yield from self._blocks.warm(block_count, nbytes)

    def decline(self, message: protocol.Decline) -> None:
        """Make a commit of the job fail on all ranks. Errors are logged."""
        if self._job is None:
            return
        try:
            error = restored_error(message.error, source="the trainer", other=SaverError)
            self._job.decline(message.number, message.step, error)
        except CkstoreError as error:
            _log.warning("the other ranks were not informed that this one has failed: %s", error)

    def note_lost(self, message: protocol.Lost) -> None:
        """Report to the savers of the job that another rank's trainer is lost, or has lost its saver. On any thread."""
        if self._job is not None:
            self._job.note_lost(message.rank, message.how, message.number)

    def close(self) -> None:
        """Give up the lease and close the store."""
        self._trainer.close()
        if self._job is not None:
            self._job.close()
        if self._repository is not None:
            self._repository.close()

    def commit(self, ticket: Ticket) -> None:
        """Commit a ticket and report the result. Errors are reported, not raised."""
        number = ticket.number
        parent = self._parent_of(ticket)
        try:
            receipt = self._committed(ticket, parent)
        except BaseException as error:
            self._seq_of[number] = parent
            self._report(ticket, error)
            return
        self._before_result()
        self._seq_of[number] = receipt.seq
        while len(self._seq_of) > _PARENTS_MAX:
            del self._seq_of[min(self._seq_of)]
        self._send(protocol.done_of(number, receipt))

    def give_up(self, ticket: Ticket) -> None:
        """Report a ticket that was cancelled before its turn. On any thread."""
        self._given_up[ticket.number] = ticket.parents
        while len(self._given_up) > _PARENTS_MAX:
            del self._given_up[min(self._given_up)]
        try:
            ticket.check()
        except SaverError as error:
            self._report(ticket, error)

    def _parent_of(self, ticket: Ticket) -> int | None:
        parent, parent_ticket = ticket.parents
        while (parents := self._given_up.get(parent_ticket)) is not None:
            parent, parent_ticket = parents
        return self._seq_of.get(parent_ticket, parent)

    def _report(self, ticket: Ticket, error: BaseException) -> None:
        step = ticket.head.step
        if ticket.is_aborted:
            _log.info("the commit of step %d was cancelled", step)
        elif isinstance(error, CkstoreError):
            self.exit_code = error.exit_code
            _log.error("the commit of step %d failed: %s", step, error)
        else:
            self.exit_code = 1
            _log.error("the commit of step %d failed", step, exc_info=error)
        self._send(protocol.failed_of(ticket.number, error))

    def _committed(self, ticket: Ticket, parent: int | None) -> Receipt:
        assert self._repository is not None
        assert self._lease is not None
        ticket.check()
        repository, head = self._repository, ticket.head
        if self._job is not None:
            return self._committed_by_ranks(self._job, ticket, parent)
        self._hold_lease(ticket)
        self._on_lease(None)
        watch = _ReportingStopwatch(repository.clock, ticket, self._send)
        self._lease.gate = ticket.wait_whole
        if follow_parent(repository, self._bases, parent):
            self._fingerprint = None
        request = CommitRequest(
            captured=ticket.captured(self._structure_of(head)),
            step=head.step,
            policy=head.policy,
            parent=parent,
            metrics=head.metrics,
            bases=self._bases,
            fingerprint=self._fingerprint,
            source_is_immutable=True,
            retained_slot=ticket.number if ticket.may_retain else None,
            thread_limit=self._thread_limit,
            blocks=self._blocks,
        )
        committed = commit_checkpoint(repository, request, watch)
        self._fingerprint = committed.fingerprint
        return set_tags(repository, committed.receipt, head.tags)

    def _committed_by_ranks(self, job: SaverRank, ticket: Ticket, parent: int | None) -> Receipt:
        assert self._repository is not None
        assert self._lease is not None
        self._lease.gate = ticket.wait_whole
        watch = _ReportingStopwatch(self._repository.clock, ticket, self._send)
        captured = ticket.captured(self._structure_of(ticket.head))
        receipt = job.commit(
            ticket,
            captured,
            parent,
            watch,
            take_run=lambda: self._take_run_of_job(ticket),
            on_all_staged=lambda: self._on_lease(ticket),
        )
        return set_tags(self._repository, receipt, ticket.head.tags) if job.is_first else receipt

    def _take_run_of_job(self, ticket: Ticket) -> None:
        """Take the lease before this rank begins. So the commit may outlive the trainer as soon as all is staged.

        Raises:
            SaverError: The trainer is dead, and the commit was not promised.
        """
        was_transferred = self._hold_lease(ticket)
        # The trainer is checked after the lease was taken: one that starts from now on finds the lease, and waits.
        # What was promised before the commit is repeated stays promised.
        is_seen = was_transferred or self._trainer.is_alive
        if not (ticket.may_outlive_trainer or is_seen):
            # The listening thread may not have noted the death yet. If this rank went on until it does, the other
            # trainers could be promised a checkpoint that is then given up.
            raise ticket.given_up_error()
        ticket.may_outlive_trainer = True
        ticket.check()

    def _structure_of(self, head: Head) -> Structure:
        if head.structure != self._structure[0] or not head.structure:
            self._structure = head.structure, Structure()
        return self._structure[1]

    def _hold_lease(self, ticket: Ticket) -> bool:
        """Take the lease. Return whether the trainer had transferred it."""
        assert self._repository is not None
        assert self._lease is not None
        transferred = self._lease.accept_transfer()
        if (
            transferred is not None
            and (purpose := SaverPurpose.of(transferred.purpose))
            and purpose.trainer_started == TRAINER_DEAD
        ):
            # The trainer died, or dropped its handle, before this process could notice.
            self.mark_trainer_dead()
        elif transferred is not None:
            self._lease.renew()
        if ticket.is_orphan:
            # Another writer may have held the lease meanwhile and have continued from an older checkpoint.
            self._lease.check_held()
        self._lease.wait_for_orphan()
        try:
            self._repository.prepare_run()
            self._lease.take()
        except CapacityError as error:
            _log.warning("the disk is full: %s", room_after(self._repository, ticket.nbytes, error))
            self._repository.prepare_run()
            self._lease.take()
        return transferred is not None


class _ReportingStopwatch(Stopwatch):
    """A stopwatch that also reports the current stage and the bytes read to the trainer."""

    def __init__(self, clock: Clock, ticket: Ticket, send: Send) -> None:
        super().__init__(clock)
        self._ticket = ticket
        self._progress_clock = clock
        self._send = send
        self._stage = "wait"
        self._reported_at = clock.monotonic()
        ticket.on_read = self._read

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure one stage and report its begin."""
        self._stage = stage
        self._report_progress()
        with super().__call__(stage):
            yield

    def _read(self) -> None:
        if self._progress_clock.monotonic() - self._reported_at >= PROGRESS_SECONDS:
            self._report_progress()

    def _report_progress(self) -> None:
        self._reported_at = self._progress_clock.monotonic()
        ticket = self._ticket
        done = min(ticket.nbytes_read, ticket.nbytes)
        self._send(protocol.Progress(ticket.number, self._stage, done, ticket.nbytes), wait_ms=0)


class GatedLease(Lease):
    """The lease of a saver. Its check before publishing also waits until the state is fully staged."""

    def __init__(self, backend: Backend, run: str, clock: Clock) -> None:
        super().__init__(backend, run, clock)
        self.gate: Callable[[], None] = lambda: None

    def _start_heartbeat(self) -> None:
        super()._start_heartbeat()
        # The thread that renews the lease waits for the heartbeat thread, which must therefore not be suspended.
        if self._heartbeat is not None:
            leave_idle_class(self._heartbeat)

    def release(self) -> None:
        """Give up the lease, also one that was transferred but not accepted yet. Never raises."""
        with contextlib.suppress(CkstoreError):
            self._record = self._read_transferred() or self._record
        super().release()

    def check_held(self) -> None:
        """Check that the lease is still held, without waiting for staging.

        Raises:
            ConflictError: Another writer took it over.
        """
        super().check()

    def check(self) -> None:
        """Wait until the state is fully staged, then check that the lease is still held. Called before publishing.

        Raises:
            ConflictError: Another writer took it over.
            SaverError: The state will never be fully staged.
        """
        self.gate()
        super().check()
