"""The trainer's side of background commits: submit a state, limit how many are in flight, collect the results.

The life of one commit, top to bottom: ``BackgroundCommits.submit`` finds a slot, sends ``Begin`` to the saver and
copies the state into the slot. ``Staging`` reports when all bytes are copied. The saver commits them, and its messages
resolve the ``Pending`` that ``submit`` has returned.

Invariants:
- At most two commits are in flight: one is being written, and one waits for its turn. A third slot may hold the state
  that was committed last, as the delta base of the next one.
- A slot is reused only when the saver no longer reads it and no thread of this process writes to it.
- When memory is short, or the policy allows less, retained states are freed before a commit is refused.
- Every failure is logged, raised by ``Pending.result``, and otherwise raised by the next commit.
- Callbacks never wait.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckstore.background import protocol
from ckstore.background.arena import FREE, UNIT_NBYTES, Slot, units_of
from ckstore.background.arena_layout import ArenaLayout
from ckstore.background.client import Saver
from ckstore.background.copying import Span
from ckstore.background.pending import Pending, as_failure, deferred_error, skip_error, skipped
from ckstore.background.staged_head import HeadWriter
from ckstore.background.staging import Staging, StagingArea
from ckstore.background.tickets import Callbacks
from ckstore.concurrency import Latch, log_safely, run_uninterrupted
from ckstore.config import EngineName, Policy
from ckstore.errors import BackendError, CapacityError, CkstoreError, ConflictError, SaverError, UsageError
from ckstore.format.error_records import cut_text, record_of
from ckstore.io.local import LocalBackend
from ckstore.results import Receipt
from ckstore.state.capture import Captured
from ckstore.store.lease import Lease
from ckstore.store.memory_budget import ENCODE
from ckstore.store.orphans import note_abandoned
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.ranks.savers import SaverDoor

RETRY_SECONDS = 30.0
"""After this time, the saver is asked again to end a ticket or to free a slot."""

_log = logging.getLogger("ckstore")

_HOW_NBYTES_MAX = 1000
"""Bytes of a text about a lost rank."""

_HEAD_NBYTES = 4 << 20
"""Memory that ``prewarm`` takes for a head, whose length is not known yet."""

_WRITING_MAX = 2
"""Commits in flight: one is being written, one waits for its turn."""

_START_SECONDS = 30.0
"""How long ``prewarm`` waits for a saver to open the store."""

_WARM_SECONDS = 2.0
"""How long ``prewarm`` waits for the saver to map memory. The rest is mapped later."""

_START_DELAY_MS = 10
"""Delay before the saver starts if the copy threads use every processor. By then a call with guarded memory has
returned. A saver thread that wakes earlier occupies a processor until the next scheduler tick, for milliseconds."""


class LatePart(NamedTuple):
    """A storage whose bytes are computed after ``commit_async`` has returned; the guard waits for that.

    Args:
        storage: Its index.
        compute: Returns all of its bytes. Called on a copy thread.
    """

    storage: int
    compute: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class AsyncRequest:
    """A state to commit in the background.

    Args:
        captured: The state.
        step: The trainer's step.
        metrics: Numbers to find the checkpoint by.
        tags: Names for the checkpoint.
        policy: How to store it, and what to do if an earlier commit is in flight.
        guarded: Address ranges that a guard protects, so that they may be copied while training continues.
        share: In a job of many ranks: what this rank holds, encoded.
        number: In a job of many ranks: the number of this background commit, the same on every rank.
        late: A storage whose bytes are computed later.
    """

    captured: Captured
    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    guarded: Sequence[Span]
    share: bytes = b""
    number: int = 0
    late: LatePart | None = None


@dataclass(slots=True, eq=False)
class InFlightCommit:
    """A commit whose state occupies a slot."""

    ticket: int
    pending: Pending
    slot: Slot
    saver: Saver
    may_retain: bool
    """Whether the saver may keep the slot as the delta base of the next commit."""
    start_delay_ms: int
    """How long the saver leaves all processors to the copy threads."""
    staging: Staging = field(init=False)
    ended: Latch = field(default_factory=Latch)
    """The saver has succeeded or failed."""
    freed: Latch = field(default_factory=Latch)
    """The saver no longer reads the slot."""
    is_begun: bool = False
    """Whether the saver was sent ``Begin``."""

    @property
    def is_over(self) -> bool:
        """Whether both saver and staging have ended. The slot may be reused once it is freed, too."""
        return self.ended.is_set() and self.staging.is_over.is_set()

    def transfer_lease(self, lease: Lease) -> None:
        """Make the saver the holder of the run's lease before it is sent the state, if that needs no waiting.

        The saver takes some time to start. If the trainer dies before that, a restarted trainer finds the saver's
        lease and waits for it.
        """
        # A saver that was asked to give up its lease may do so at any moment. It then takes a new lease by itself.
        if lease.is_held or self.saver.lease == "":
            self.saver.lease = lease.transfer_to(self.saver.pid, self.pending.step)

    def finish_copying(self, is_receipt_wanted: bool) -> None:
        """Wait until all bytes are copied. If the caller waits for the receipt, leave half of the copy threads idle.

        If the copy threads use every processor, the saver cannot start until all is copied, and the disk is idle. Half
        of the threads leave some processors free, so the saver can start immediately.
        """
        is_shared = is_receipt_wanted and self.start_delay_ms > 0 and self.staging.leaves_processors
        if is_shared:
            self.saver.hurry()
        self.staging.finish(is_rushed=not is_shared)

    def wait_ended(self) -> None:
        """Wait until the commit has ended."""
        self.finish_copying(True)
        doing = f"end the commit of step {self.pending.step}"
        while not self.ended.is_set():
            is_given_up = self.pending.error_or_none() is not None
            if is_given_up:
                # An earlier Abort is lost if there was no memory to send it. The saver would then wait forever.
                self.saver.abort(self.ticket)
            self.saver.wait(self.ended, RETRY_SECONDS if is_given_up else None, doing, is_urgent=True)

    def wait_slot_freed(self) -> None:
        """Ask the saver to free the slot, which it retains for the next commit, and wait for that."""
        while not self.freed.is_set():
            # An earlier request is lost if there was no memory to send it.
            self.saver.release_retained()
            doing = f"give back the memory of step {self.pending.step}"
            self.saver.wait(self.freed, RETRY_SECONDS, doing, is_urgent=True)

    def callbacks(self, on_done: Callable[[Receipt], None], on_failed: Callable[[Exception], None]) -> Callbacks:
        """Return the functions that the saver's messages call."""
        return Callbacks(
            on_done,
            on_failed,
            self.free,
            on_began=self.pending.note_began,
            on_progress=self.pending.note_progress,
            on_retained=self.ended.set,
        )

    def fail(self, error: Exception) -> None:
        """Record that the saver has failed this commit."""
        if isinstance(error, ConflictError) and self.saver.lease:
            # Another writer took the lease. The next commit transfers a new one.
            self.saver.lease = ""
        self.staging.cancel(error)

    def free(self) -> None:
        """Record that the saver no longer reads the slot."""
        self.freed.set()
        self.ended.set()

    def report_staged(self) -> None:
        """Report to the caller and to the saver that all bytes are copied."""
        self.pending.note_staged()
        self.saver.staged(self.ticket)


class InFlight:
    """The commits whose states occupy slots. Used by one thread at a time."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self.writing: list[InFlightCommit] = []
        """Commits that have not ended, oldest first."""
        self.retained: list[InFlightCommit] = []
        """Commits that have ended, and whose slots the saver still reads as delta bases."""
        self._has_waited = False

    @property
    def is_idle(self) -> bool:
        """Whether no commit is in flight."""
        return all(commit.is_over for commit in self.writing)

    def reclaim_slots(self) -> None:
        """Free the slots of commits that have ended."""
        # Ctrl-C may interrupt between any two lines. A commit is always in one of the lists, and the next call resumes.
        for commit in [each for each in self.writing if each.is_over]:
            if commit not in self.retained:
                self.retained.append(commit)
            self.writing.remove(commit)
        for commit in [each for each in self.retained if each.freed.is_set()]:
            commit.slot.state = FREE
            self.retained.remove(commit)

    def detach(self) -> None:
        """Stop tracking all slots, since the saver is ending. Copies in progress finish by themselves."""
        self.reclaim_slots()
        for commit in self.writing:
            commit.staging.leave()
        self.retained.clear()

    def slot_for(self, end: int, head_nbytes: int, policy: Policy) -> Slot:
        """Return a free slot with room for a state of ``end`` bytes, and with memory for its head behind it.

        Raises:
            CapacityError: There is not enough memory, or the policy allows less.
            SaverError: The saver holds every slot.
        """
        needed = end + head_nbytes
        if self._area.is_short:
            # Free memory now: the state's memory is taken during the copy, when it is too late to free any.
            self._release_retained()
            self._area.release_all_but(self._free_slot())
        while True:
            slot = self._free_slot()
            try:
                self._area.reserve(slot, needed, policy)
                slot.populate(end, head_nbytes)
                return slot
            except CapacityError:
                # Prefer a slower commit, a base from disk, or a later commit to a failed one.
                has_freed_memory = self._area.release_all_but(slot) or self._release_retained()
                if not has_freed_memory and not self._wait_for_room(needed, policy):
                    raise

    def prewarm(self, nbytes: int, policy: Policy) -> None:
        """Take the memory that states of this length will need, in addition to the occupied slots.

        Raises:
            CapacityError: There is no memory for a single state, or the policy allows less.
        """
        self.reclaim_slots()
        occupied_count = len(self.writing) + len(self.retained)
        try:
            self._area.prewarm(nbytes, policy, occupied_count=occupied_count)
        except CapacityError:
            if not self._area.release_all_but(self._free_slot()):
                raise
            self._area.prewarm(nbytes, policy, occupied_count=occupied_count)

    def _free_slot(self) -> Slot:
        free = self._area.free_slots()
        if not free and self._release_retained():
            free = self._area.free_slots()
        if not free:
            raise SaverError("the saver holds every slot of the arena", todo="close the store and open it again")
        return free[0]

    def _wait_for_room(self, needed: int, policy: Policy) -> bool:
        """Wait for the oldest commit if its end would make room. Return whether that was the case."""
        bound = policy.arena_nbytes_max
        if not self.writing or (bound is not None and units_of(needed) * UNIT_NBYTES > bound):
            return False
        if not self._has_waited:
            self._has_waited = True
            step = self.writing[0].pending.step
            _log.warning("no memory for a second staged state: the next commit waits until step %d is written", step)
        self.writing[0].wait_ended()
        self.reclaim_slots()
        return True

    def _release_retained(self) -> bool:
        """Have the saver free all retained slots, and wait for that. Return whether there were any."""
        retained = list(self.retained)
        for commit in retained:
            commit.wait_slot_freed()
        self.reclaim_slots()
        return bool(retained)


class BackgroundCommits:
    """The background commits of one store handle. One method at a time, except ``guard``, which any thread may call."""

    def __init__(
        self, repository: Repository, door: SaverDoor | None = None, *, role: Literal["commits", "journal"] = "commits"
    ) -> None:
        self._repository = repository
        self._door = door
        self._role: Literal["commits", "journal"] = role
        self._owner = os.getpid()
        self._area = StagingArea(repository.limits)
        self._heads = HeadWriter()
        self._saver: Saver | None = None
        self._nice, self._ticket = 0, 0
        self._in_flight = InFlight(self._area)
        self._published: int | None = None
        self._failed: list[Pending] = []
        self._lost: dict[int, protocol.Lost] = {}
        """Ranks of the job whose trainers are lost, or have lost their savers."""
        self.on_saver_lost: Callable[[int, str], None] | None = None
        """In a job of many ranks: gets the number of a background commit in which the saver has died, and how."""
        self.parent: int | None = None
        """The seq that the next state continues. Set by the handle after a restore or a commit in this process."""
        _background_commits.add(self)

    @property
    def arena_nbytes(self) -> int:
        """Shared memory that is held for staged states, in bytes."""
        return self._area.nbytes

    @property
    def saver_pid(self) -> int | None:
        """Process id of the saver, if it is alive."""
        return self._saver.pid if self._saver is not None and self._saver.is_alive else None

    def submit(self, request: AsyncRequest) -> Pending:
        """Stage a state and have the saver commit it. Return when everything except guarded memory is copied.

        Raises:
            CapacityError: There is no memory to stage the state, or the policy allows less.
            SaverError: No saver can be started.
        """
        commit: InFlightCommit | None = None
        try:
            layout, starts = self._area.plan_layout(request.captured, request.guarded)
            busy = self._wait_for_slot(request)
            if busy is not None:
                return busy
            commit = self._hand_to_saver(request, layout, starts)
            commit.staging.copy_now()
            return commit.pending
        except BaseException as error:
            if commit is not None:
                self.give_up(commit.pending, error)
            else:
                self.decline(request.number, request.step, request.policy, error)
            raise

    def decline(self, number: int, step: int, policy: Policy, error: BaseException) -> None:
        """In a job of many ranks: tell the others that this one cannot take part in a commit. Never raises.

        Args:
            number: The number of the commit; 0: there is no job.
            step: The step.
            policy: How it was to be stored.
            error: Why.
        """
        if number:
            # If that fails, the others wait as for any rank that does not take part.
            with contextlib.suppress(CkstoreError, OSError, MemoryError):
                self._saver_for(policy).tell(protocol.Decline(number, step, record_of(error)))

    def note_lost(self, rank: int, how: str, number: int) -> None:
        """In a job of many ranks: tell the saver that a trainer is lost, or has lost its saver. On any thread.

        It never waits.

        Args:
            rank: The rank.
            how: What happened, to follow the name of the rank.
            number: The background commit in which it has lost its saver; 0: the trainer itself is lost.
        """
        before = self._lost.get(rank)
        if before is None or before.number:
            self._lost[rank] = protocol.Lost(rank, cut_text(how, _HOW_NBYTES_MAX), number)
        saver = self._saver
        if saver is not None:
            saver.tell(self._lost[rank])

    def give_up(self, pending: Pending, error: BaseException) -> None:
        """Cancel a commit whose caller gets an exception, unless it is fully staged."""
        for commit in [each for each in self._in_flight.writing if each.pending is pending]:
            # Waits for the copy threads: the caller may change the state as soon as this returns.
            pending.error_was_raised = True
            commit.staging.give_up(error)

    def prewarm(self, captured: Captured, guarded: Sequence[Span], policy: Policy) -> None:
        """Start the saver and take the memory for a state in advance, so that the first commit is fast."""
        layout, _ = self._area.plan_layout(captured, guarded)
        saver = self._saver_for(policy)
        self._in_flight.prewarm(layout.end + _HEAD_NBYTES, policy)
        # Wait for the saver, so that its start does not compete with the first copy for processors. If it cannot open
        # the store, the first commit reports that.
        with contextlib.suppress(CkstoreError):
            if saver.wait_ready(_START_SECONDS) and not self._in_flight.writing:
                saver.warm(ENCODE.fit_writing(policy, self._repository.limits)[1], layout.end, _WARM_SECONDS)

    def guard(self, *, is_host_waiting: bool = False) -> None:
        """Return when guarded memory may be changed.

        Args:
            is_host_waiting: Wait until devices have copied. Else only the devices' current streams wait for the copies,
                which is enough if the memory is changed on those streams.
        """
        if self._owner != os.getpid():
            return
        for commit in list(self._in_flight.writing):
            if not commit.staging.is_over.is_set():
                begun = self._repository.clock.monotonic()
                commit.staging.guard(is_host_waiting=is_host_waiting)
                commit.pending.stall_seconds += self._repository.clock.monotonic() - begun

    def wait_all(self) -> None:
        """Wait until every commit has succeeded or failed."""
        for commit in list(self._in_flight.writing):
            commit.wait_ended()
        self._in_flight.reclaim_slots()

    def release(self) -> None:
        """Wait until every commit has ended, and have the saver give up the lease."""
        self.wait_all()
        if self._saver is not None and self._saver.is_alive:
            self._saver.release_lease()

    @property
    def saver_has_lease(self) -> bool:
        """Whether the lease of the run was transferred to the saver, which is alive."""
        return self._saver is not None and bool(self._saver.lease) and self._saver.is_alive

    def pop_published_seq(self) -> int | None:
        """Return the last seq that was published since the last call, if any."""
        seq, self._published = self._published, None
        return seq

    def raise_unreported(self, *, call_did_nothing: bool) -> None:
        """Raise the first failure that was only logged so far. Each failure is raised at most once.

        Args:
            call_did_nothing: Whether the calling method has done nothing yet, so that the user can repeat the call.

        Raises:
            CkstoreError: Why the commit failed.
        """
        failed, self._failed = self._failed, []
        unreported = [
            (pending, error)
            for pending in failed
            if not pending.error_was_raised and (error := pending.error_or_none())
        ]
        for pending, _ in unreported:
            pending.error_was_raised = True
        if unreported:
            pending, error = unreported[0]
            raise deferred_error(pending.step, error, call_did_nothing=call_did_nothing) from error

    def close(self) -> None:
        """Wait for all commits, then end the saver and all threads. An interrupted call abandons them instead."""
        try:
            if self._owner == os.getpid():
                self.wait_all()
                if self._saver is not None:
                    self._saver.quit()
                self._saver = None
                self._in_flight.detach()
                self._area.close(is_waited=True)
        except BaseException:
            self.abandon()
            raise
        _background_commits.discard(self)

    def abandon(self) -> None:
        """Stop without waiting. The copy threads and the saver finish what has begun."""
        is_idle = self._in_flight.is_idle
        if self._owner != os.getpid() or is_idle:
            # Commits in flight stay registered, so that they are waited for at exit.
            _background_commits.discard(self)
        if self._owner == os.getpid():
            if (saver := self._saver) is not None:
                # The next one to open the run must wait for this saver, and not resume an older checkpoint.
                note_abandoned(saver.pid, None if is_idle else self._repository.lease.location)
                saver.quit(is_waited=False)
                self._repository.lease.mark_trainer_dead()
            self._saver = None
            self._in_flight.detach()
            self._area.close(is_waited=False)

    def _wait_for_slot(self, request: AsyncRequest) -> Pending | None:
        """Wait for a slot as ``policy.on_busy`` says. Return a pending commit if this one is skipped, else None."""
        self._in_flight.reclaim_slots()
        while self._in_flight.writing:
            oldest, newest = self._in_flight.writing[0], self._in_flight.writing[-1]
            # The saver works in order: it can only reach a later commit after the first is staged and checked.
            oldest.staging.finish()
            if oldest.pending.is_done:
                # The caller knows the result, and the slot will be free shortly.
                oldest.wait_ended()
            elif request.policy.on_busy == "skip":
                busy = oldest.pending.step
                _log.warning("the commit of step %d is skipped: step %d is still being written", request.step, busy)
                return skipped(request.step, busy)
            elif request.policy.on_busy == "wait":
                oldest.wait_ended()
            elif len(self._in_flight.writing) < _WRITING_MAX:
                break
            elif not self._replace_waiting(newest, request, oldest.pending.step):
                # The waiting commit is already promised: ``is_staged`` was True for its caller.
                oldest.wait_ended()
            self._in_flight.reclaim_slots()
        return None

    def _replace_waiting(self, waiting: InFlightCommit, request: AsyncRequest, busy_step: int) -> bool:
        """Replace the waiting commit with this one. Return False if the waiting one must be published."""

        def take_out() -> bool:
            error = skip_error(waiting.pending.step, busy_step)
            if waiting.pending.take_back(error):
                waiting.saver.abort(waiting.ticket)
                waiting.staging.cancel(error)
            return waiting.pending.is_skipped

        # Uninterrupted: else a commit could be marked as skipped and still be published.
        if not self._area.pool(request.policy).device_thread.run_and_wait(take_out):
            return False
        waiting.wait_ended()
        if waiting.pending.is_skipped:
            _log.warning("the commit of step %d replaces that of step %d", request.step, waiting.pending.step)
        return True

    def _hand_to_saver(self, request: AsyncRequest, layout: ArenaLayout, starts: NDArray[np.uint64]) -> InFlightCommit:
        """Send ``Begin`` to the saver. If the saver dies meanwhile, start another one and try once more."""
        for is_second_try in (False, True):
            saver = self._saver_for(request.policy)
            commit, head = self._prepare(request, layout, starts, saver)
            try:
                # Uninterrupted: the saver gets the whole message and the ticket is recorded, or neither.
                self._area.pool(request.policy).run_on_caller_cpu(
                    partial(self._send_begin, commit, head, layout.end, request.number)
                )
                return commit
            except BaseException as error:
                # The caller gets the error and never sees this pending commit. A dying saver may have failed it before.
                commit.pending.error_was_raised = True
                commit.pending.note_failed(as_failure(error, request.step))
                commit.staging.give_up(error)
                if is_second_try or saver.takes_tickets or not isinstance(error, Exception):
                    raise
                # The saver died because of an earlier commit. What the user could do about it is done here.
                what = error.what if isinstance(error, CkstoreError) else error
                _log.warning("%s; starting another saver", what)
        raise AssertionError("unreachable")

    def _send_begin(self, commit: InFlightCommit, head: bytes, place: int, number: int) -> None:
        """Write the head into the slot, transfer the lease and send ``Begin``. The slot stays free if that fails."""
        slot = commit.slot
        slot.start(commit.ticket, place + len(head))
        slot.view(place, len(head))[:] = head
        slot.mark(place, len(head))
        # The newest commit in flight is the parent; its seq is not known yet.
        writing = (each.ticket for each in self._in_flight.writing[::-1] if each.pending.error_or_none() is None)
        try:
            if self._role == "commits" and (self._door is None or self._door.is_first):
                commit.transfer_lease(self._repository.lease)
            commit.saver.begin(
                commit.ticket,
                slot.index,
                place,
                len(head),
                self._callbacks(commit, number),
                parent=self.parent,
                parent_ticket=next(writing, 0),
                may_retain=commit.may_retain,
                start_delay_ms=commit.start_delay_ms,
                number=number,
            )
        except BaseException:
            slot.state = FREE
            raise
        commit.is_begun = True
        self._in_flight.writing.append(commit)

    def _prepare(
        self, request: AsyncRequest, layout: ArenaLayout, starts: NDArray[np.uint64], saver: Saver
    ) -> tuple[InFlightCommit, bytes]:
        """Take a free slot for the commit and encode the head. Return both."""
        # If there is no memory for a second state, the saver cannot keep a copy on its heap either.
        policy = replace(request.policy, base_cache="none") if self._area.is_short else request.policy
        head = self._heads.encode(
            self._heads.head_of(
                request.captured,
                layout.places,
                step=request.step,
                metrics=request.metrics,
                tags=request.tags,
                policy=policy,
                samples=layout.samples,
                share=request.share,
            )
        )
        slot = self._in_flight.slot_for(layout.end, len(head), policy)
        self._ticket += 1
        pending = Pending(
            request.step,
            finish=lambda *wanted: commit.finish_copying(*wanted),
            wait=saver.wait,
            is_of_many=self._door is not None,
        )
        is_crowded = policy.staging_thread_count >= len(os.sched_getaffinity(0))
        may_retain = self._area.may_retain(layout.end, policy)
        commit = InFlightCommit(self._ticket, pending, slot, saver, may_retain, _START_DELAY_MS if is_crowded else 0)
        commit.staging = Staging(
            request.captured,
            layout,
            starts,
            slot,
            self._area.pool(request.policy),
            bell=saver.bell,
            is_checked=request.policy.debug_guard,
            on_staged=lambda: commit.report_staged(),
            on_failed=lambda error: self._note_staging_failed(commit, error),
            late=None if request.late is None else partial(_write_late, request.late, layout, slot),
        )
        return commit, head

    def _callbacks(self, commit: InFlightCommit, number: int) -> Callbacks:
        def on_done(receipt: Receipt) -> None:
            self.parent = self._published = receipt.seq
            commit.pending.note_done(receipt)
            for warning in receipt.warnings if self._door is None or self._door.is_first else ():
                log_safely(_log, logging.WARNING, "step %d: %s", receipt.step, warning)

        def on_failed(error: Exception) -> None:
            if self.on_saver_lost is not None and not commit.saver.is_alive:
                # The other savers may wait for it, and not know that it is gone.
                self.on_saver_lost(number, cut_text(f"has lost its saver ({error})", _HOW_NBYTES_MAX))
            self._note_failed(commit.pending, error)
            commit.fail(error)

        return commit.callbacks(on_done, on_failed)

    def _note_staging_failed(self, commit: InFlightCommit, error: BaseException) -> None:
        """Report that staging failed, to the caller and to the saver."""
        self._note_failed(commit.pending, as_failure(error, commit.pending.step))
        if commit.is_begun:
            commit.saver.abort(commit.ticket)
        if isinstance(error, CapacityError):
            self._area.note_short()
            commit.saver.release_retained()

    def _note_failed(self, pending: Pending, error: Exception) -> None:
        if not pending.is_done:
            pending.note_failed(error)
            # Appended last: ``raise_unreported`` expects every pending commit in this list to have an error.
            self._failed.append(pending)
            log_safely(_log, logging.ERROR, "the commit of step %d failed in the background: %s", pending.step, error)

    def _saver_for(self, policy: Policy) -> Saver:
        """Return the saver. Start a new one if it is dead or ending, or if it is idle and the nice value changed."""
        saver = self._saver
        is_right_nice = self._nice == policy.saver_nice or not self._in_flight.is_idle
        if saver is not None and saver.takes_tickets and is_right_nice:
            return saver
        if saver is not None:
            # Two savers would compete for the lease.
            saver.quit()
        backend = self._repository.backend
        if not isinstance(backend, LocalBackend):
            raise UsageError(
                "background commits need a store in a local folder", where=backend.root, todo="use commit instead"
            )
        engine: EngineName = "pwrite" if self._repository.engine_name == "pwrite" else "auto"
        place, run, arena, clock = backend.root, self._repository.run, self._area.arena, self._repository.clock
        self._nice = policy.saver_nice
        if self._door is None and self._role == "commits":
            # In a job, rank 0's saver waits for it, so that the other ranks know why they wait. A store that does not
            # respond is reported by the commit.
            with contextlib.suppress(BackendError, CapacityError):
                self._repository.wait_for_orphan()

        retention = self._repository.retention

        def start() -> Saver:
            store_id = self._repository.store_id.hex()
            self._saver = Saver.start(
                place,
                run,
                arena,
                nice=self._nice,
                engine=engine,
                retention=retention,
                clock=clock,
                store_id=store_id,
                job=b"" if self._door is None else self._door.job.encode(),
                listener=None if self._door is None else self._door.listener,
                stopped_seconds_max=None if self._door is None else self._door.stopped_seconds_max,
                role=self._role,
            )
            # After it was assigned: a loss that is noted now is reported by one of both threads, or by both.
            for lost in list(self._lost.values()):
                self._saver.tell(lost)
            return self._saver

        # Uninterrupted: else the process could be started without being recorded.
        return run_uninterrupted(start, on_interrupt=lambda error: None)


def _write_late(late: LatePart, layout: ArenaLayout, slot: Slot) -> None:
    content = late.compute()
    slot.view(layout.places[late.storage], len(content))[:] = content


_background_commits: weakref.WeakSet[BackgroundCommits] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for commits in list(_background_commits):
        try:
            commits.close()
        except Exception:
            log_safely(_log, logging.ERROR, "could not wait for a background commit at exit", exc_info=True)
