"""Hand captured states to the saver: tickets, and what happens while an earlier one is still being written.

Invariants:
- At most two states are on their way at a time: queues are not where a trainer's memory goes. A third one may still
  lie in the arena, the last that was committed: what the next is coded against.
- How a commit ended is told: to whoever asks the pending one, to the log at once, and to the next commit.
- Nothing that a callback does waits.

The states that lie in an arena, on their way or kept for the next one to be coded against, and room for one more.

Invariants:
- A slot is used again when its saver reads nothing of it any more and no thread of ours writes to it.
- What is kept makes way for what is to be committed: where memory is short, or the policy allows less.

A captured state on its way to the saver: what was asked for, and the slot that it lies in.
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

import numpy as np
from numpy.typing import NDArray

from ckstore.background.arena import FREE, UNIT_NBYTES, Slot, units_of
from ckstore.background.arena_layout import ArenaLayout
from ckstore.background.client import Callbacks, Saver
from ckstore.background.device_copy import Span
from ckstore.background.pending import Pending, as_failure, deferred_error, left_out_error, skipped
from ckstore.background.saver.staged_state import HeadWriter
from ckstore.background.staging import Staging, StagingArea
from ckstore.commit.pipeline import threads_and_blocks
from ckstore.concurrency import Latch, log_safely, run_uninterrupted
from ckstore.config import EngineName, Policy
from ckstore.errors import BackendError, CapacityError, CkstoreError, ConflictError, SaverError, UsageError
from ckstore.io.local import LocalBackend
from ckstore.results import Receipt
from ckstore.state.capture import Captured
from ckstore.store.lease import Lease
from ckstore.store.orphans import note_abandoned
from ckstore.store.repository import Repository

ASK_AGAIN_SECONDS = 30.0
"""Until a saver that has not given a slot back, or a ticket up, is asked once more."""


@dataclass(frozen=True, slots=True)
class AsyncRequest:
    """A commit to be handed over.

    Args:
        captured: The state.
        step: The trainer's step.
        metrics: Numbers to find it by.
        tags: Names for it.
        policy: How to store it, and how it goes into the background.
        guarded: Memory that a guard protects.
    """

    captured: Captured
    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    guarded: Sequence[Span]


@dataclass(slots=True, eq=False)
class InFlightCommit:
    """A state in a slot."""

    ticket: int
    pending: Pending
    slot: Slot
    saver: Saver
    may_keep: bool
    """Whether the saver may keep the slot, for the next commit to be coded against."""
    start_delay_ms: int
    """For how long the saver leaves every processor to those who copy."""
    staging: Staging = field(init=False)
    ended: Latch = field(default_factory=Latch)
    """The saver commits it no more."""
    freed: Latch = field(default_factory=Latch)
    """The saver reads nothing of the slot any more."""
    is_begun: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended; its slot may be used again if it is free, too."""
        return self.ended.is_set() and self.staging.is_over.is_set()

    def transfer_lease(self, lease: Lease) -> None:
        """Have the saver hold the run's lease, before it is told of the state, if that needs no waiting.

        Else nobody would wait for it until it has started, if the trainer dies or drops its handle before.
        """
        # What it was to give back it may give back at any moment, and then takes another one.
        if lease.is_held or self.saver.lease == "":
            self.saver.lease = lease.transfer_to(self.saver.pid, self.pending.step)

    def finish_copying(self, is_receipt_wanted: bool) -> None:
        """Wait until all is copied, as soon as can be; or somewhat later, if the receipt comes sooner by that.

        Where the crew wants every processor the saver would have none until all is copied, and the disk nothing to do.
        The half of it that copies behind a guard leaves some, and the saver begins at once (``async_wall``).
        """
        is_shared = is_receipt_wanted and self.start_delay_ms > 0 and self.staging.leaves_processors
        if is_shared:
            self.saver.hurry()
        self.staging.finish(is_rushed=not is_shared)

    def wait_over(self) -> None:
        """Wait until it has ended."""
        self.finish_copying(True)
        doing = f"end the commit of step {self.pending.step}"
        while not self.ended.is_set():
            is_given_up = self.pending.error_or_none() is not None
            if is_given_up:
                # Where memory is short it may not have heard, and would wait for what is never staged.
                self.saver.abort(self.ticket)
            self.saver.wait(self.ended, ASK_AGAIN_SECONDS if is_given_up else None, doing, is_urgent=True)

    def wait_freed(self) -> None:
        """Have the saver give its slot back, which it keeps for the next commit."""
        while not self.freed.is_set():
            # Where memory is short it may not have heard.
            self.saver.forget_kept()
            doing = f"give back the memory of step {self.pending.step}"
            self.saver.wait(self.freed, ASK_AGAIN_SECONDS, doing, is_urgent=True)

    def callbacks(self, on_done: Callable[[Receipt], None], on_failed: Callable[[Exception], None]) -> Callbacks:
        """Return what the saver's messages call."""
        return Callbacks(
            on_done,
            on_failed,
            self.free,
            on_began=self.pending.note_began,
            on_progress=self.pending.note_progress,
            on_kept=self.ended.set,
        )

    def fail(self, error: Exception) -> None:
        """Take note that the saver has given it up."""
        if isinstance(error, ConflictError) and self.saver.lease:
            # The lease was taken over: for the next state it is lent anew.
            self.saver.lease = ""
        self.staging.cancel(error)

    def free(self) -> None:
        """Take note that the saver is done with it."""
        self.freed.set()
        self.ended.set()

    def tell_staged(self) -> None:
        """Say that all is copied, here and to the saver."""
        self.pending.note_staged()
        self.saver.staged(self.ticket)


_log = logging.getLogger("ckstore")


class InFlight:
    """What was handed over and still takes a slot; used by one thread at a time."""

    def __init__(self, dock: StagingArea) -> None:
        self._dock = dock
        self.going: list[InFlightCommit] = []
        """On their way, oldest first."""
        self.kept: list[InFlightCommit] = []
        """Over, and still in their slots: the next one is coded against them."""
        self._has_waited = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return all(handed.is_over for handed in self.going)

    def sweep(self) -> None:
        """Take back the slots that are not used any more."""
        # Ctrl-C may come between any two lines: nothing is in no list, and what was begun is done by the next call.
        for handed in [each for each in self.going if each.is_over]:
            if handed not in self.kept:
                self.kept.append(handed)
            self.going.remove(handed)
        for handed in [each for each in self.kept if each.freed.is_set()]:
            handed.slot.state = FREE
            self.kept.remove(handed)

    def leave(self) -> None:
        """Let go of what is over, without a word to the saver, which is ending; what is copied ends by itself."""
        self.sweep()
        for handed in self.going:
            handed.staging.leave()
        self.kept.clear()

    def slot_for(self, end: int, head_nbytes: int, policy: Policy) -> Slot:
        """Return a free slot with room for a state, and memory for its head behind it.

        Raises:
            CapacityError: There is no memory, or the policy allows less.
            SaverError: The saver has them all.
        """
        needed = end + head_nbytes
        if self._dock.is_short:
            # It would be taken while the state is copied, when it is too late to look for some.
            self._forget_kept()
            self._dock.give_back_all_but(self._free_slot())
        while True:
            slot = self._free_slot()
            try:
                self._dock.reserve(slot, needed, policy)
                slot.populate(end, head_nbytes)
                return slot
            except CapacityError:
                # Rather slower, or coded against what is read back from the store, or later, than not committed.
                if not (self._dock.give_back_all_but(slot) or self._forget_kept() or self._see_off(needed, policy)):
                    raise

    def prewarm(self, nbytes: int, policy: Policy) -> None:
        """Take the memory that states of this length will need beside those that lie there.

        Raises:
            CapacityError: There is none for a single one, or the policy allows less.
        """
        self.sweep()
        lying = len(self.going) + len(self.kept)
        try:
            self._dock.prewarm(nbytes, policy, lying=lying)
        except CapacityError:
            if not self._dock.give_back_all_but(self._free_slot()):
                raise
            self._dock.prewarm(nbytes, policy, lying=lying)

    def _free_slot(self) -> Slot:
        free = self._dock.free_slots()
        if not free and self._forget_kept():
            free = self._dock.free_slots()
        if not free:
            raise SaverError("the saver has every slot of the arena", todo="close the store and open it again")
        return free[0]

    def _see_off(self, needed: int, policy: Policy) -> bool:
        """Wait until what is being written has ended, if there would be room then; return whether that was so."""
        bound = policy.arena_nbytes_max
        if not self.going or (bound is not None and units_of(needed) * UNIT_NBYTES > bound):
            return False
        if not self._has_waited:
            self._has_waited = True
            step = self.going[0].pending.step
            _log.warning("no room for a second state in the arena: the next waits until step %d is written", step)
        self.going[0].wait_over()
        self.sweep()
        return True

    def _forget_kept(self) -> bool:
        """Wait until the saver has given back what it keeps for the next commit; return whether there was any."""
        kept = list(self.kept)
        for handed in kept:
            handed.wait_freed()
        self.sweep()
        return bool(kept)


_HEAD_NBYTES = 4 << 20
"""Room for a head, where its length is not known yet."""

_OUTSTANDING_MAX = 2
"""States on their way: one is being written, one may wait for its turn."""

_START_SECONDS = 30.0
"""For a saver to open the store, where nothing needs it yet."""

_WARM_SECONDS = 2.0
"""For a saver to take and map memory. What is left then comes later, or when it is used."""

_HOLD_MS = 10
"""Until a saver begins with what is staged by then, where copies take every processor: a call that returns in 5 ms
behind a guard (``stall_return`` in docs/BENCH.md) has returned. A thread of the saver that wakes has a processor until
the next tick of the scheduler, milliseconds, whoever else wants it."""


class BackgroundCommits:
    """The trainer's side of the background commits of one handle; one verb at a time, but for ``guard``."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._owner = os.getpid()
        self._dock = StagingArea(repository.limits)
        self._heads = HeadWriter()
        self._saver: Saver | None = None
        self._nice, self._ticket = 0, 0
        self._lying = InFlight(self._dock)
        self._published: int | None = None
        self._failed: list[Pending] = []
        self.parent: int | None = None
        """The seq that the next state comes from; whoever restores or commits otherwise sets it."""
        _background_commits.add(self)

    @property
    def arena_nbytes(self) -> int:
        """Shared memory that is held for staged states, in bytes."""
        return self._dock.nbytes

    @property
    def saver_pid(self) -> int | None:
        """The saver's process, if one lives."""
        return self._saver.pid if self._saver is not None and self._saver.is_alive else None

    def submit(self, order: AsyncRequest) -> Pending:
        """Stage a state, and let the saver commit it; returns when what no guard protects was copied.

        Raises:
            CapacityError: There is no memory to stage it in, or the policy allows less.
            SaverError: No saver can be started.
        """
        stowage, starts = self._dock.stow(order.captured, order.guarded)
        busy = self._wait_for_slot(order)
        if busy is not None:
            return busy
        handed: InFlightCommit | None = None
        try:
            handed = self._begin(order, stowage, starts)
            handed.staging.copy_now()
            return handed.pending
        except BaseException as error:
            if handed is not None:
                self.give_up(handed.pending, error)
            raise

    def give_up(self, pending: Pending, error: BaseException) -> None:
        """Give a commit up whose caller is told by an exception, unless it is staged already."""
        for handed in [each for each in self._lying.going if each.pending is pending]:
            # Whoever called may change from here on what was not copied yet.
            pending.error_was_raised = True
            handed.staging.give_up(error)

    def prewarm(self, captured: Captured, guarded: Sequence[Span], policy: Policy) -> None:
        """Start the saver, and take the memory that a state needs, so that its first commit need not."""
        stowage, _ = self._dock.stow(captured, guarded)
        saver = self._living_saver(policy)
        self._lying.prewarm(stowage.end + _HEAD_NBYTES, policy)
        # Else it would still be starting, on the same processors, while the first state is copied. What keeps it from
        # opening the store is told by the commit.
        with contextlib.suppress(CkstoreError):
            if saver.wait_ready(_START_SECONDS) and not self._lying.going:
                saver.warm(threads_and_blocks(policy, self._repository.limits)[1], stowage.end, _WARM_SECONDS)

    def guard(self, *, is_host_waiting: bool = False) -> None:
        """Return when what guards protect may be changed; a device is waited for, or else held on this stream only."""
        if self._owner != os.getpid():
            return
        for handed in list(self._lying.going):
            if not handed.staging.is_over.is_set():
                begun = self._repository.clock.monotonic()
                handed.staging.guard(is_host_waiting=is_host_waiting)
                handed.pending.stall_seconds += self._repository.clock.monotonic() - begun

    def wait_all(self) -> None:
        """Wait until every commit has ended, one way or the other."""
        for handed in list(self._lying.going):
            handed.wait_over()
        self._lying.sweep()

    def release(self) -> None:
        """Wait until every commit has ended, and have the saver give up the lease."""
        self.wait_all()
        if self._saver is not None and self._saver.is_alive:
            self._saver.release_lease()

    def pop_published_seq(self) -> int | None:
        """Return the seq that was published last, if any was since the last call."""
        seq, self._published = self._published, None
        return seq

    def raise_unreported(self, *, is_instead: bool) -> None:
        """Raise the error of the first commit that failed, if nobody has been told of it but the log; once for all.

        Args:
            is_instead: What was called for has not been done, and will not be.

        Raises:
            CkstoreError: Why it failed.
        """
        failed, self._failed = self._failed, []
        told = [
            (pending, error)
            for pending in failed
            if not pending.error_was_raised and (error := pending.error_or_none())
        ]
        for pending, _ in told:
            pending.error_was_raised = True
        if told:
            pending, error = told[0]
            raise deferred_error(pending.step, error, is_instead=is_instead) from error

    def close(self) -> None:
        """Wait for what is pending, and end the saver and all threads; who is interrupted has abandoned them."""
        try:
            if self._owner == os.getpid():
                self.wait_all()
                if self._saver is not None:
                    self._saver.quit()
                self._saver = None
                self._lying.leave()
                self._dock.close(is_waited=True)
        except BaseException:
            self.abandon()
            raise
        _background_commits.discard(self)

    def abandon(self) -> None:
        """End everything without waiting; what has begun is carried through, by our threads and the saver."""
        is_idle = self._lying.is_idle
        if self._owner != os.getpid() or is_idle:
            # What is still on its way is waited for at exit.
            _background_commits.discard(self)
        if self._owner == os.getpid():
            if (saver := self._saver) is not None:
                # Who opens the run next, here or in another process, must not resume what is older.
                note_abandoned(saver.pid, None if is_idle else self._repository.lease.location)
                saver.quit(is_waited=False)
                self._repository.lease.mark_trainer_dead()
            self._saver = None
            self._lying.leave()
            self._dock.close(is_waited=False)

    def _wait_for_slot(self, order: AsyncRequest) -> Pending | None:
        """Wait as the policy says until a slot is free; return the pending commit of a state that is left out."""
        self._lying.sweep()
        while self._lying.going:
            oldest, newest = self._lying.going[0], self._lying.going[-1]
            # The saver takes them in order: nothing comes of a later one before the first is staged, and checked.
            oldest.staging.finish()
            if oldest.pending.is_done:
                # It has been told of, and its slot is about to be free.
                oldest.wait_over()
            elif order.policy.on_busy == "skip":
                busy = oldest.pending.step
                _log.warning("the commit of step %d is left out: step %d is still being written", order.step, busy)
                return skipped(order.step, busy)
            elif order.policy.on_busy == "wait":
                oldest.wait_over()
            elif len(self._lying.going) < _OUTSTANDING_MAX:
                break
            elif not self._replace(newest, order, oldest.pending.step):
                # Whoever was told that it will be published would be deceived.
                oldest.wait_over()
            self._lying.sweep()
        return None

    def _replace(self, waiting: InFlightCommit, order: AsyncRequest, busy_step: int) -> bool:
        """Leave out the state that waits for its turn; return False where that must not be."""

        def take_out() -> bool:
            error = left_out_error(waiting.pending.step, busy_step)
            if waiting.pending.take_back(error):
                waiting.saver.abort(waiting.ticket)
                waiting.staging.cancel(error)
            return waiting.pending.is_skipped

        # Ctrl-C must not leave one that was told to be left out, and is published.
        if not self._dock.crew(order.policy).waiters.see_through(take_out):
            return False
        waiting.wait_over()
        if waiting.pending.is_skipped:
            _log.warning("the commit of step %d replaces that of step %d", order.step, waiting.pending.step)
        return True

    def _begin(self, order: AsyncRequest, stowage: ArenaLayout, starts: NDArray[np.uint64]) -> InFlightCommit:
        """Hand a slot with a head over to a saver, a new one if the last has died."""
        for is_again in (False, True):
            saver = self._living_saver(order.policy)
            handed, head = self._prepare(order, stowage, starts, saver)
            try:
                # Ctrl-C comes before or after it: the saver was told, or it was not.
                self._dock.crew(order.policy).see_through_here(partial(self._give, handed, head, stowage.end))
                return handed
            except BaseException as error:
                # Nobody has this pending commit: who called is told by the error. A saver that dies meanwhile may have
                # ended it too.
                handed.pending.error_was_raised = True
                handed.pending.note_failed(as_failure(error, order.step))
                handed.staging.give_up(error)
                if is_again or saver.takes_tickets or not isinstance(error, Exception):
                    raise
                # Whatever it died of: that was another commit's affair.
                _log.warning("%s; another saver is started", error)
        raise AssertionError("unreachable")

    def _give(self, handed: InFlightCommit, head: bytes, place: int) -> None:
        """Begin a ticket with its head in its slot; the slot stays free if that fails."""
        slot = handed.slot
        slot.start(handed.ticket, place + len(head))
        slot.view(place, len(head))[:] = head
        slot.mark(place, len(head))
        # What it became is not known yet.
        going = (each.ticket for each in self._lying.going[::-1] if each.pending.error_or_none() is None)
        try:
            handed.transfer_lease(self._repository.lease)
            handed.saver.begin(
                handed.ticket,
                slot.index,
                place,
                len(head),
                self._callbacks(handed),
                parent=self.parent,
                parent_ticket=next(going, 0),
                may_keep=handed.may_keep,
                start_delay_ms=handed.start_delay_ms,
            )
        except BaseException:
            slot.state = FREE
            raise
        handed.is_begun = True
        self._lying.going.append(handed)

    def _prepare(
        self, order: AsyncRequest, stowage: ArenaLayout, starts: NDArray[np.uint64], saver: Saver
    ) -> tuple[InFlightCommit, bytes]:
        """Find a free slot for the commit, and take memory for its head; return that head too."""
        # Without memory for a second state there is none for copies of one on the saver's heap either.
        policy = replace(order.policy, base_cache="none") if self._dock.is_short else order.policy
        head = self._heads.encode(
            self._heads.head_of(
                order.captured,
                stowage.places,
                step=order.step,
                metrics=order.metrics,
                tags=order.tags,
                policy=policy,
                samples=stowage.samples,
            )
        )
        slot = self._lying.slot_for(stowage.end, len(head), policy)
        self._ticket += 1
        pending = Pending(order.step, finish=lambda *wanted: handed.finish_copying(*wanted), wait=saver.wait)
        is_crowded = policy.staging_thread_count >= len(os.sched_getaffinity(0))
        may_keep = self._dock.may_keep(stowage.end, policy)
        handed = InFlightCommit(self._ticket, pending, slot, saver, may_keep, _HOLD_MS if is_crowded else 0)
        handed.staging = Staging(
            order.captured,
            stowage,
            starts,
            slot,
            self._dock.crew(order.policy),
            bell=saver.bell,
            is_checked=order.policy.debug_guard,
            on_staged=lambda: handed.tell_staged(),
            on_failed=lambda error: self._give_up(handed, error),
        )
        return handed, head

    def _callbacks(self, handed: InFlightCommit) -> Callbacks:
        def on_done(receipt: Receipt) -> None:
            self.parent = self._published = receipt.seq
            handed.pending.note_done(receipt)
            for warning in receipt.warnings:
                log_safely(_log, logging.WARNING, "step %d: %s", receipt.step, warning)

        def on_failed(error: Exception) -> None:
            self._note_failed(handed.pending, error)
            handed.fail(error)

        return handed.callbacks(on_done, on_failed)

    def _give_up(self, handed: InFlightCommit, error: BaseException) -> None:
        """Staging has failed: tell the saver, and whoever waits."""
        self._note_failed(handed.pending, as_failure(error, handed.pending.step))
        if handed.is_begun:
            handed.saver.abort(handed.ticket)
        if isinstance(error, CapacityError):
            self._dock.note_short()
            handed.saver.forget_kept()

    def _note_failed(self, pending: Pending, error: Exception) -> None:
        if not pending.is_done:
            pending.note_failed(error)
            # Not before: the next commit takes them all, and would take this one for one that has not failed.
            self._failed.append(pending)
            log_safely(_log, logging.ERROR, "the commit of step %d failed in the background: %s", pending.step, error)

    def _living_saver(self, policy: Policy) -> Saver:
        """Return the saver; a new one if it is dead or leaving, or is idle and to have another priority."""
        saver = self._saver
        if saver is not None and saver.takes_tickets and (self._nice == policy.saver_nice or not self._lying.is_idle):
            return saver
        if saver is not None:
            # Two at a time would both want the lease.
            saver.quit()
        backend = self._repository.backend
        if not isinstance(backend, LocalBackend):
            raise UsageError(
                "another process cannot open this store", where=backend.root, todo="use commit, or a store in a folder"
            )
        engine: EngineName = "pwrite" if self._repository.engine_name == "pwrite" else "auto"
        place, run, arena, clock = backend.root, self._repository.run, self._dock.arena, self._repository.clock
        self._nice = policy.saver_nice
        # What does not answer is told by the commit.
        with contextlib.suppress(BackendError, CapacityError):
            self._repository.wait_for_orphan()

        retention = self._repository.retention

        def start() -> Saver:
            store_id = self._repository.store_id.hex()
            self._saver = Saver.start(
                place, run, arena, nice=self._nice, engine=engine, retention=retention, clock=clock, store_id=store_id
            )
            return self._saver

        # Ctrl-C must not leave a process that nobody knows of.
        return run_uninterrupted(start, on_interrupt=lambda error: None)


_background_commits: weakref.WeakSet[BackgroundCommits] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for handover in list(_background_commits):
        try:
            handover.close()
        except Exception:
            log_safely(_log, logging.ERROR, "a commit in the background could not be waited for", exc_info=True)
