"""The trainer's side of background commits: one object per ``Store``.

It holds what one handle keeps between calls of ``commit_async``: the attached optimizers, the cached structure of the
state, and, once a commit needs it, the saver process behind ``BackgroundCommits``.

Invariants:
- Every method is called under the lock of the ``Store``, except ``wait_until_copied`` and ``arena_nbytes``.
- Nothing here refers to the ``Store``: a handle that is dropped is freed immediately, and its saver abandoned.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckstore.background.commits import AsyncRequest, BackgroundCommits
from ckstore.background.copying import Span
from ckstore.config import Policy
from ckstore.state.capture import Captured, loaded_adapters
from ckstore.state.capture_cache import CaptureCache
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.background.optimizer_guard import OptimizerGuard
    from ckstore.background.pending import Pending
    from ckstore.ranks.savers import SaverDoor
    from ckstore.results import Receipt


class BackgroundJob(Protocol):
    """The background commits of a job of many ranks. ``ckstore.ranks.job.Job`` implements it."""

    @property
    def saver_door(self) -> SaverDoor:
        """What a saver must know to find the others."""
        ...

    def next_background_commit(self) -> int:
        """Return the number of the next background commit, the same on every rank."""
        ...

    def check_background(self, policy: Policy) -> None:
        """Raise if a background commit with this policy cannot succeed on all ranks."""
        ...

    def call_when_lost(self, call: Callable[[int, str, int], None]) -> None:
        """Have a bound method called, on any thread, for each rank that was or will be lost, or loses its saver."""
        ...

    def report_saver_lost(self, number: int, how: str) -> None:
        """Report to the other ranks that this one has lost its saver in a background commit. Never waits."""
        ...

    def captured_share(self, state: Any) -> tuple[Captured, bytes]:
        """Return the captured state of this rank, and what it holds, encoded."""
        ...


class TrainerSide:
    """Background commits of one handle.

    Args:
        owner: The ``Store``. When it is garbage collected, its unfinished commits are left to the saver.
        repository: The store and its run.
        parent: The seq that the next commit follows; None in an empty run.
        job: The job of many ranks; None: there is none.
    """

    def __init__(
        self, owner: object, repository: Repository, parent: int | None, job: BackgroundJob | None = None
    ) -> None:
        self._repository = repository
        self._job = job
        self._commits: BackgroundCommits | None = None
        self._guarded: OptimizerGuard | None = None
        self._open_guards = 0
        self._cache = CaptureCache()
        self._receipts: deque[Receipt | None] = deque()
        self._parent = parent
        self._owner = weakref.ref(owner)
        self._pid = os.getpid()
        self._inherited: object = None

    def prepare(
        self, state: Any, step: int, *, metrics: Mapping[str, float], tags: Sequence[str], policy: Policy
    ) -> AsyncRequest:
        """Prepare a background commit; nothing is copied yet.

        Raises:
            LeafTypeError: A leaf cannot be stored.
            CkstoreError: An earlier commit failed, and its result was never requested.
        """
        share, number = b"", 0
        if self._job is None:
            self._started().raise_unreported(call_did_nothing=True)
            captured = self._captured(state)
        else:
            number = self._job.next_background_commit()
            try:
                self._started().raise_unreported(call_did_nothing=True)
                self._job.check_background(policy)
                captured, share = self._job.captured_share(state)
            except BaseException as error:
                # The others have begun this commit, or will.
                self._started().decline(number, step, policy, error)
                raise
        return AsyncRequest(
            captured=captured,
            step=step,
            metrics=metrics,
            tags=tags,
            policy=policy,
            guarded=self._guarded_spans(),
            share=share,
            number=number,
        )

    def decline(self, step: int, policy: Policy, error: BaseException) -> None:
        """In a job of many ranks: have the saver fail the next background commit, which other ranks have begun."""
        assert self._job is not None, "there is a job"
        self._started().decline(self._job.next_background_commit(), step, policy, error)

    def submit(self, request: AsyncRequest, started: float) -> Pending:
        """Copy the state to shared memory, and have the saver commit it; see ``Store.commit_async``.

        Args:
            request: From ``prepare``.
            started: When the caller was called, by the clock of the repository.
        """
        commits = self._started()
        pending = commits.submit(request)
        try:
            pending.stall_seconds += self._repository.clock.monotonic() - started
            receipts = self._receipts
            pending.when_done(lambda done: receipts.append(done.receipt_or_none()))
            return pending
        except BaseException as error:
            commits.give_up(pending, error)
            raise

    def give_up(self, pending: Pending, error: BaseException) -> None:
        """Give up a commit whose caller gets an exception instead of it, unless it is already staged."""
        if self._commits is not None:
            self._commits.give_up(pending, error)

    def prewarm(self, state: Any, policy: Policy) -> None:
        """Start the saver and allocate the memory that a state needs; see ``Store.prewarm``."""
        self._started().prewarm(self._captured(state), self._guarded_spans(), policy)

    def attach(self, optimizer: Any) -> None:
        """Copy what an optimizer owns in the background from now on; see ``Store.attach``."""
        from ckstore.background.optimizer_guard import OptimizerGuard

        if self._guarded is None:
            self._guarded = OptimizerGuard(self._started().guard)
        self._guarded.attach(optimizer)

    def open_guard(self) -> None:
        """Until the matching ``close_guard``, copy everything before ``commit_async`` returns. Calls nest."""
        self._open_guards += 1

    def close_guard(self) -> None:
        """End the effect of one ``open_guard``."""
        self._open_guards -= 1

    def wait_until_copied(self) -> None:
        """Wait until the last state was copied, including copies from devices."""
        if self._commits is not None:
            self._commits.guard(is_host_waiting=True)

    def wait(self) -> None:
        """Wait until every background commit has ended."""
        if self._commits is not None:
            self._commits.wait_all()

    def reclaim_lease(self) -> None:
        """Wait for the background commits and take the lease of the run back from the saver."""
        if self._commits is not None:
            self._commits.release()

    @property
    def has_lease(self) -> bool:
        """Whether the lease of the run was transferred to the saver."""
        return self._commits is not None and self._commits.saver_has_lease

    def raise_unreported(self, *, call_did_nothing: bool) -> None:
        """Raise the error of a background commit whose result was never requested; see ``BackgroundCommits``."""
        if self._commits is not None:
            self._commits.raise_unreported(call_did_nothing=call_did_nothing)

    def take_published(self) -> int | None:
        """Return the seq of the last commit that the saver has published since the previous call; None: none."""
        return None if self._commits is None else self._commits.pop_published_seq()

    def take_durable(self) -> int | None:
        """Return the newest seq that has become durable since the previous call; None: none."""
        newest = None
        while self._receipts:
            receipt = self._receipts.popleft()
            if receipt is not None:
                newest = max(receipt.seq, newest or 0)
        return newest

    def set_parent(self, parent: int | None) -> None:
        """Have the next background commit follow this seq, which the trainer has committed or restored."""
        self._parent = parent
        if self._commits is not None:
            self._commits.parent = parent

    @property
    def arena_nbytes(self) -> int:
        """Shared memory held for states that are being committed, in bytes."""
        return 0 if self._commits is None else self._commits.arena_nbytes

    def close(self) -> None:
        """Wait for all background commits, end the saver, and detach the optimizers."""
        if self._commits is not None:
            self._commits.close()
        # Only once everything is copied: if the wait is interrupted, the guards must stay.
        guarded, self._guarded = self._guarded, None
        if guarded is not None:
            guarded.release()

    def leave_to_parent_after_fork(self) -> None:
        """In a forked child: give up the saver and the arena, which belong to the parent.

        They are kept alive unused. Freeing them would unmap memory that the child may have reused.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._inherited = self._commits, self._guarded
            self._commits = self._guarded = None

    def _started(self) -> BackgroundCommits:
        if self._commits is None:
            self._commits = BackgroundCommits(self._repository, None if self._job is None else self._job.saver_door)
            self._commits.parent = self._parent
            if self._job is not None:
                self._commits.on_saver_lost = self._job.report_saver_lost
                self._job.call_when_lost(self._commits.note_lost)
            owner = self._owner()
            assert owner is not None, "a method of the owner is running"
            # Not at exit: commits are waited for there. A handle that is garbage collected must not wait.
            weakref.finalize(owner, _abandon_garbage, self._commits).atexit = False
        return self._commits

    def _guarded_spans(self) -> Sequence[Span]:
        """Return the memory that may be copied after ``commit_async`` has returned, as (first address, end)."""
        return () if self._guarded is None or self._open_guards else self._guarded.spans()

    def _captured(self, state: Any) -> Captured:
        if self._job is not None:
            return self._job.captured_share(state)[0]
        return self._cache.capture(state, loaded_adapters())


def _abandon_garbage(commits: BackgroundCommits) -> None:
    """Abandon the commits of a handle that was garbage collected; a finalizer cannot raise, so try twice."""
    try:
        commits.abandon()
    except BaseException:
        commits.abandon()
        raise
