"""Write points in the saver process of a journal: encode the staged gradients, append the record, report the result.

This process holds no lease: its trainer does, or the saver of the commits. When the trainer is dead, the lock of the
newest segment takes the lease's place: a restarted trainer waits for that lock.

Invariants:
- A point is promised to outlive its trainer once the lock is held and the trainer was then seen alive. After the
  trainer's death no other point is appended. Otherwise the next process could look before there is a lock.
- A segment is created before the previous one is closed, so a process that waits always finds a lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from ckstore.background import protocol
from ckstore.background.saver.staged_state import Ticket
from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import ThreadLimit
from ckstore.config import EngineName
from ckstore.errors import CkstoreError, SaverError
from ckstore.format.records import RecordPlace
from ckstore.io.url import backend_for
from ckstore.journal.encoding import PointDraft, PointEncoder
from ckstore.results import Receipt, Stopwatch
from ckstore.store.journal_needs import require_keyframe
from ckstore.store.journals import Journals
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record, require_same_store

if TYPE_CHECKING:
    from ckstore.background.saver.committer import OnLease, Send
    from ckstore.store.segment_writer import SegmentWriter

_log = logging.getLogger("ckstore")


class JournalCommitter:
    """What a saver does for a journal, in place of ``Committer``. Used by the committing thread.

    Args:
        hello: The store to write to.
        send: Sends a message to the trainer.
        on_lease: Called when the lock of a segment was taken. It promises the points that the trainer waits for.
        thread_limit: How many threads may encode at present.
    """

    is_other_rank = False
    retained_tickets: frozenset[int] = frozenset()

    def __init__(self, hello: protocol.Hello, send: Send, on_lease: OnLease, thread_limit: ThreadLimit) -> None:
        self._hello = hello
        self._send = send
        self._on_lease = on_lease
        self._thread_limit = thread_limit
        self._repository: Repository | None = None
        self._journals: Journals | None = None
        self._writer: SegmentWriter | None = None
        self._last: RecordPlace | None = None
        """The last record that this process has appended."""
        self._encoder: PointEncoder | None = None
        self.exit_code = 0
        """Exit code for the last error, for a saver whose trainer is dead."""

    @property
    def holds_lease(self) -> bool:
        """Whether the lock of a segment is held, and points can be promised for that reason."""
        return self._writer is not None

    def open(self) -> None:
        """Open the store.

        Raises:
            CkstoreError: The store does not exist or cannot be used.
        """
        hello = self._hello
        engine = cast(EngineName, hello.engine)
        backend = backend_for(os.fsdecode(hello.address), engine=engine, allow_shared_folder=True)
        repository = Repository(backend, read_store_record(backend), hello.run, clock=SYSTEM_CLOCK)
        if hello.store_id:
            require_same_store(backend, bytes.fromhex(hello.store_id))
        self._repository = repository
        self._journals = Journals(repository.manifests, clock=SYSTEM_CLOCK)

    def close(self) -> None:
        """Release the segment and close the store."""
        self._close_writer()
        if self._repository is not None:
            self._repository.close()

    def commit(self, ticket: Ticket) -> None:
        """Append a point and report the result. Errors are reported, not raised."""
        try:
            receipt = self._appended(ticket)
        except BaseException as error:
            # What follows in the chain would lack this point's steps.
            self._end_chain()
            self._report(ticket, error)
            return
        self._send(protocol.done_of(ticket.number, receipt))

    def give_up(self, ticket: Ticket) -> None:
        """Report a point that was cancelled before its turn. On any thread."""
        try:
            ticket.check()
        except SaverError as error:
            self._report(ticket, error)

    def _end_chain(self) -> None:
        self._close_writer()
        self._last = None

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _report(self, ticket: Ticket, error: BaseException) -> None:
        step = ticket.head.step
        self.exit_code = error.exit_code if isinstance(error, CkstoreError) else 1
        if ticket.is_aborted:
            _log.info("the point of step %d was cancelled", step)
        else:
            _log.error(
                "the point of step %d was not stored: %s", step, error, exc_info=not isinstance(error, CkstoreError)
            )
        self._send(protocol.failed_of(ticket.number, error))

    def _appended(self, ticket: Ticket) -> Receipt:
        assert self._repository is not None, "it is open"
        assert self._journals is not None, "it is open"
        watch = Stopwatch(SYSTEM_CLOCK)
        with watch("stage"):
            ticket.wait_whole()
        head, limits = ticket.head, self._repository.limits
        draft = PointDraft.decode(head.share)
        arrays = [
            np.frombuffer(ticket.storages[place.storage].read(place.offset, place.offset + place.nbytes), np.uint8)
            for place in draft.arrays
        ]
        if self._encoder is None or draft.begins_chain:
            self._encoder = PointEncoder(limits, head.policy.compression)
        with watch("write"):
            thread_count = self._thread_limit.maximum or len(os.sched_getaffinity(0))
            encoded = self._encoder.encode(draft, arrays, thread_count=thread_count)
        with watch("publish"):
            writer = self._writer_for(draft, ticket)
            record = writer.append(
                step=head.step,
                time_ns=SYSTEM_CLOCK.now_ns(),
                body=encoded.body,
                structure=encoded.structure,
                frames=[part for frame in encoded.frames for part in frame.parts],
            )
        self._last = writer.last
        return Receipt(
            step=head.step,
            seq=0,
            checkpoint_id="",
            bytes_state=sum(storage.nbytes for storage in draft.storages),
            bytes_written=record.nbytes,
            chunks_new=len(encoded.frames),
            chunks_reused=0,
            chunks_delta=0,
            chunks_derived=0,
            seconds={**watch.seconds, "total": watch.total()},
            engine="pwrite",
            point=record.number,
        )

    def _writer_for(self, draft: PointDraft, ticket: Ticket) -> SegmentWriter:
        """Return the writer for a point. A new segment begins with a chain, after another process, or if asked.

        Raises:
            SaverError: An earlier point of its chain was not stored. Or the trainer died before there was a lock.
            ConflictError: The point that it continues is being deleted.
        """
        assert self._journals is not None, "it is open"
        if not draft.begins_chain and draft.continues is None:
            if self._last is None:
                raise SaverError(
                    "an earlier point of the journal was not stored, so this one could not be restored",
                    todo="commit again: the next commit stores the whole state",
                )
            if self._writer is not None and not draft.begins_segment:
                return self._writer
        is_own = not draft.begins_chain and draft.continues is None
        previous = self._last if is_own else draft.continues
        writer = self._journals.open_writer(previous=previous, is_durable=is_own, environment=draft.environment)
        if self._writer is None:
            # The trainer is checked after the lock was taken: one that starts from now on finds the lock, and waits.
            self._on_lease(None)
            if not ticket.may_outlive_trainer:
                self._journals.discard(writer)
                raise SaverError(
                    f"the point of step {ticket.head.step} was given up because the trainer died before the journal "
                    "had a segment for it",
                    todo="restore, and train on from there",
                )
        self._close_writer()
        self._writer = writer
        if not is_own:
            assert self._repository is not None, "it is open"
            require_keyframe(self._repository, writer)
        return writer

    # What a journal does not need of a committer

    def was_transferred(self, token: str) -> bool:
        """There is no lease."""
        return False

    def announce(self, step: int) -> None:
        """There is no lease."""

    def mark_trainer_dead(self) -> None:
        """There is no lease."""

    def release(self) -> None:
        """There is no lease. The segment ends, so that another process may continue it."""
        self._close_writer()

    def release_retained(self) -> None:
        """Nothing is retained."""

    def warm(self, block_count: int, nbytes: int) -> Iterator[None]:
        """No memory is needed in advance."""
        return iter(())

    def decline(self, message: protocol.Decline) -> None:
        """Journals are those of one process."""

    def note_lost(self, message: protocol.Lost) -> None:
        """Journals are those of one process."""
