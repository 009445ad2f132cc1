"""The trainer's side of a journal: one object per ``Store`` that has one.

Each commit becomes a *point* if the noted steps explain what has changed since the commit before, else a *keyframe*: an
ordinary commit, which has a record in the journal, too. A point's gradients and rest are staged like the state of a
commit, for a saver process of the journal's own: a point need not wait while a keyframe is being written.

Words:
- *Owned* is what the steps of optimizers make: their parameters and their state.
- The *rest* is everything else in the state, such as buffers and random states. It is stored where it has changed.
- *Late* checksums are those of what is owned: computed after ``commit_async`` has returned, while the next step waits.
- The *facts* about optimizers are what makes them again without the user's own. Each record of a keyframe has them.
- A journal is *settled* when it is known whether the next commit can be a point.

Invariants:
- Every commit since the first is a record, in the order of the calls, except of states without the optimizers. After
  one that is not stored as a record, the next one begins a chain, with a keyframe.
- Planning a record takes the noted steps. Unless it is then submitted, the next commit begins a chain.
- A point is planned when the record before it is durable, and the keyframe that its chain begins with. So a point with
  a receipt can be restored.
- All methods are called under the lock of the ``Store``; callbacks of pending points only set flags.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.background.commits import AsyncRequest, BackgroundCommits, LatePart
from ckstore.background.device_copy import order_after_now, versions_of
from ckstore.background.pending import Pending
from ckstore.config import MIB, Policy
from ckstore.display import size
from ckstore.errors import CkstoreError, CorruptError, UsageError, shown_object
from ckstore.format.records import RecordPlace
from ckstore.format.tree import ListNode, TensorNode
from ckstore.journal.checksums import checksums_of
from ckstore.journal.clipping import take_factors
from ckstore.journal.drafting import Drafted, draft_point, state_sizes
from ckstore.journal.encoding import ArrayPlace
from ckstore.journal.recorder import RecordedStep, StepRecorder
from ckstore.processes import owner_is_running, process_started
from ckstore.state.capture import Captured, loaded_adapters
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.environment import environment_of
from ckstore.state.memory import keeps_of
from ckstore.store.journals import WRITER_SECONDS, Journals
from ckstore.store.orphans import SaverPurpose
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.background.trainer import TrainerSide
    from ckstore.journal.history import RestoredPoint

_log = logging.getLogger("ckstore")

_DECODE_NBYTES_PER_SECOND = 1e9
"""Reading and decoding gradients: a low estimate, so that replay stays within its time."""


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """What ``Store.journal`` was called with; see there.

    Raises:
        UsageError: A number is out of range.
    """

    keyframe_every: int | None = None
    replay_seconds: float = 30.0
    replayed: tuple[str, ...] = ()
    rest_nbytes_max: int = 64 * MIB

    @classmethod
    def of(cls, keyframe_every: int | None, replay_seconds: float, replayed: str | Sequence[str]) -> JournalOptions:
        """Return options in one form, so that they can be compared.

        Raises:
            UsageError: ``replayed`` is neither a text nor a list of texts.
        """
        globs = (replayed,) if isinstance(replayed, str) else tuple(replayed)
        if not all(isinstance(each, str) for each in globs):
            raise UsageError("replayed= takes a glob or a list of globs", where=shown_object(replayed))
        return cls(keyframe_every, replay_seconds, globs)

    def __post_init__(self) -> None:
        every, seconds = self.keyframe_every, self.replay_seconds
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise UsageError("keyframe_every must be an integer of at least 1, or None", where=repr(every))
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise UsageError("replay_seconds must be a number of at least 0", where=repr(seconds))


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A record that is about to be stored.

    Args:
        captured: The state.
        drafted: Its draft, and what the draft needs.
        reason: Why this commit must store the whole state; None: it is a point.
    """

    captured: Captured
    drafted: Drafted
    reason: str | None

    def as_keyframe(self, policy: Policy) -> tuple[Captured, Policy]:
        """Return what its checkpoint stores, and how: this capture, as another may differ, and without a loss."""
        return self.captured, replace(policy, fidelity="exact")


class JournalSide:
    """The journal of one handle.

    Args:
        owner: The ``Store``. When it is garbage collected, staged points are left to the saver.
        repository: The store and its run.
        options: When to store keyframes.
        job: The job of many ranks, which cannot have a journal; None: there is none.

    Raises:
        UsageError: There is a job.
    """

    def __init__(
        self, owner: object, repository: Repository, options: JournalOptions, job: object | None = None
    ) -> None:
        if job is not None:
            raise UsageError(
                "a journal is written by one process, and this store was opened with ranks=",
                todo="commit without store.journal; or, if all ranks have the same state, open it on one rank only",
            )
        self._owner = weakref.ref(owner)
        self._repository = repository
        self._options = options
        self._commits: BackgroundCommits | None = None
        self._cache, self._sources = CaptureCache(), CaptureCache()
        self._before: Mapping[str, int] = {}
        self._state_sizes: list[int] = []
        self._points = 0
        self._replay_seconds = 0.0
        self._due: str | None = "it is the first one"
        self._due_after_commit: str | None = None
        self._continues: RecordPlace | None = None
        self._begins_segment = False
        self._reported: set[str] = set()
        self._pid = os.getpid()
        self._inherited: object = None
        self._has_keyframe = True
        """Whether the keyframe with which the chain begins was given to its saver."""
        self._awaits_keyframe = False
        """Whether the result of that keyframe is not known yet."""
        self.recorder = StepRecorder(self._wait_for_checksums)

    def attach(self, optimizers: Sequence[Any], options: JournalOptions) -> JournalSide:
        """Note the steps of more optimizers. Return this journal.

        Raises:
            UsageError: There is none, or one cannot be noted, or is already. Or the options differ from those of the
                first call.
        """
        if options not in (self._options, JournalOptions()):
            raise UsageError(
                "store.journal was called before, with other options",
                todo="give options in the first call only, with the first optimizers",
            )
        if not optimizers:
            raise UsageError(
                "store.journal was called without an optimizer, so there are no steps to note",
                todo="pass all optimizers of the loop: store.journal(optimizer)",
            )
        for optimizer in optimizers:
            self.recorder.attach(optimizer)
        return self

    def plan_keyframe(self, state: Any, *, metrics: Mapping[str, float]) -> PlannedRecord | None:
        """Plan the record of a commit that stores the whole state in any case.

        None: it has no record, because the state lacks what the optimizers own, such as weights for an export. The next
        commit begins a chain.
        """
        captured = self._cache.capture_for_commit(state)
        self._settle(None)
        try:
            return self._planned(captured, metrics, has_tags=True)
        except UsageError as error:
            self._report("a commit is not in the journal, and the next one stores the whole state", str(error))
            return None

    def plan(
        self, state: Any, *, metrics: Mapping[str, float], tags: Sequence[str], commits: TrainerSide | None = None
    ) -> PlannedRecord:
        """Take the noted steps, and decide what this commit becomes. The state must not change until ``submit``.

        Args:
            state: The state that is committed.
            metrics: Numbers to find the point by.
            tags: The tags of the commit. If there are any, it stores the whole state, which needs no replay.
            commits: The background commits of keyframes; None: there are none in flight.

        Raises:
            UsageError: The state lacks tensors of an optimizer, or an optimizer is gone.
            CkstoreError: An earlier point or keyframe failed, and its result was never requested.
        """
        captured = self._cache.capture(state, loaded_adapters())
        self._settle(commits)
        return self._planned(captured, metrics, has_tags=bool(tags))

    def _planned(self, captured: Captured, metrics: Mapping[str, float], *, has_tags: bool) -> PlannedRecord:
        due, continues = self._due, self._continues
        begins_segment, self._begins_segment = self._begins_segment, False
        # The steps are taken now. If anything fails before ``submit`` has succeeded, the chain lacks them.
        self.begin_again("the commit before was not stored")
        steps, problem = self.recorder.take()
        if self._options.replayed and _are_several(steps):
            problem = problem or "the loop makes what replayed= names once for each commit; commit after each step"
        reason = problem or due or ("it has tags" if has_tags else None) or self._due_reason()
        sizes = state_sizes(self.recorder.optimizers)
        draft_with = partial(
            draft_point,
            captured,
            optimizers=self.recorder.optimizers,
            metrics=metrics,
            has_facts=reason is not None or self._points == 0 or sizes != self._state_sizes,
            factors=take_factors(),
            thread_count=len(os.sched_getaffinity(0)),
            replayed=self._options.replayed,
            is_late=True,
        )
        begins_chain = problem is not None or due is not None
        if not begins_chain:
            drafted = draft_with(steps=steps, before=self._before)
            problem = self._limit_problem(drafted)
            reason, begins_chain = problem or reason, problem is not None
        if begins_chain:
            drafted = draft_with(steps=(), before=None, has_facts=True)
            continues = None
        if problem is not None and due is None:
            self._report("a commit stores the whole state instead of a step of the journal", problem)
        self._note_cost(steps)
        self._state_sizes = sizes
        begins_segment = begins_segment or begins_chain or continues is not None
        draft = drafted.draft._replace(
            begins_chain=begins_chain,
            continues=continues,
            begins_segment=begins_segment,
            environment=environment_of(self.recorder.optimizers) if begins_segment else {},
        )
        return PlannedRecord(captured, drafted._replace(draft=draft), reason)

    def _limit_problem(self, drafted: Drafted) -> str | None:
        """Return why a record would be too large; None: it is not."""
        limit = self._options.rest_nbytes_max
        if sum(row.nbytes for row in drafted.draft.storages if row.source == "blob") <= limit:
            return None
        return f"more than {size(limit)} of the state that no optimizer of the journal owns have changed"

    def _report(self, what: str, problem: str) -> None:
        """Log why a commit must store the whole state: each reason once, as a loop may have it at every step."""
        if problem not in self._reported:
            self._reported.add(problem)
            _log.warning("%s: %s", what, problem)

    def _settle(self, commits: TrainerSide | None) -> None:
        """Wait until it is known whether the next commit can be a point."""
        self.wait()
        if commits is not None:
            if self._awaits_keyframe:
                commits.wait()
            commits.raise_unreported(call_did_nothing=True)
        self._awaits_keyframe = False
        self.raise_unreported(call_did_nothing=True)
        if not self._has_keyframe:
            self.begin_again("the keyframe before was not stored")

    def _due_reason(self) -> str | None:
        every = self._options.keyframe_every
        if every is not None and self._points + 1 >= every:
            return f"{every} commits were points"
        if self._replay_seconds > self._options.replay_seconds:
            return f"replay would take longer than {self._options.replay_seconds:g} s"
        return None

    def _note_cost(self, steps: tuple[RecordedStep, ...]) -> None:
        for step in steps:
            nbytes = sum(each.nbytes for each in step.gradients)
            self._replay_seconds += step.seconds + nbytes / _DECODE_NBYTES_PER_SECOND

    def submit(
        self, record: PlannedRecord, step: int, policy: Policy, *, commits: TrainerSide | None = None
    ) -> Pending:
        """Stage a record, and have the journal's saver append it.

        Args:
            record: From ``plan``.
            step: The trainer's step.
            policy: Threads and compression.
            commits: The background commits of keyframes, whose saver may hold the lease of the run; None: none do.

        Raises:
            ConflictError: Another live process writes to the run.
            CapacityError: There is no memory to stage it.
            SaverError: No saver can be started.
        """
        sources = self._sources.capture(list(record.drafted.sources), loaded_adapters())
        draft = record.drafted.draft._replace(arrays=_places_of(record.drafted.sources, sources))
        request = AsyncRequest(
            captured=sources,
            step=step,
            metrics={},
            tags=(),
            policy=replace(policy, on_busy="wait", base_cache="none"),
            guarded=(),
            share=draft.encode(),
            late=_late_checksums(record, draft.arrays),
        )
        if record.reason is None:
            self._hold_lease(commits)
        pending = self._started().submit(request)
        self._before = record.drafted.checksums
        self._points += 1
        self._has_keyframe = not draft.begins_chain
        # The caller waits for a keyframe itself. If only its record fails, the next commit is a keyframe again.
        pending.error_was_raised = record.reason is not None
        # Last: this commit now takes part in the chain.
        self._due = None
        itself = weakref.ref(self)
        pending.when_done(lambda done: _note_failure(itself, done))
        if record.reason is not None and (draft.begins_chain or draft.begins_segment or draft.continues is not None):
            # Its segment must be older than the keyframe: by that, readers tell it from checkpoints of other branches.
            self.wait()
        return pending

    def submit_before_commit(self, record: PlannedRecord, step: int, policy: Policy) -> None:
        """Store the record of a keyframe that this process then commits itself. It may fail: the commit is still right.

        Until ``note_commit``, the next commit begins a chain.
        """
        try:
            self._repository.prepare_run()
            self._hold_lease(None)
            self.submit(record, step, policy)
            self.wait()
        except CkstoreError as error:
            _log.warning(
                "step %d gets no record in the journal; the next commit stores the whole state: %s", step, error
            )
        self._due_after_commit = self._due
        self.begin_again("a commit before was not stored")

    def note_commit(self) -> None:
        """Go on in a new segment after a keyframe that this process has committed."""
        self._due, self._has_keyframe, self._begins_segment = self._due_after_commit, True, True
        self._points, self._replay_seconds = 0, 0.0

    def _hold_lease(self, commits: TrainerSide | None) -> None:
        """Take the lease of the run, which a process holds that writes points, unless this process or its saver has it.

        Raises:
            ConflictError: Another live process holds it.
        """
        lease = self._repository.lease
        if lease.is_held or (commits is not None and commits.has_lease):
            return
        holder = lease.holder()
        purpose = None if holder is None else SaverPurpose.of(holder.purpose)
        # A pid alone may be that of a trainer in a container before this one.
        is_ours = purpose is not None and (purpose.trainer_pid, purpose.trainer_started) == (
            os.getpid(),
            process_started(os.getpid()),
        )
        if holder is None or not is_ours or owner_is_running(holder) is not True:
            lease.take()

    def begin_again(self, reason: str) -> None:
        """Have the next commit begin a chain, with a keyframe."""
        self._due, self._continues = reason, None

    def leave_chain(self, reason: str) -> None:
        """Wait for all records, and begin again: another state than that of the last commit becomes the newest.

        Raises:
            CkstoreError: An earlier point failed, and its result was never requested.
        """
        self.release()
        self.raise_unreported(call_did_nothing=True)
        self.begin_again(reason)

    def note_keyframe(self, pending: Pending) -> None:
        """Go on in a new segment when a keyframe is durable, and repeat one that failed."""
        itself, begins_chain = weakref.ref(self), not self._has_keyframe
        self._has_keyframe, self._awaits_keyframe = True, begins_chain
        self._points, self._replay_seconds = 0, 0.0

        def note(done: Pending) -> None:
            side = itself()
            if side is not None and done.error_or_none() is None:
                side._begins_segment = True
            elif side is not None and begins_chain:
                side.begin_again("the keyframe before was not stored")
            elif side is not None:
                side._replay_seconds = float("inf")

        pending.when_done(note)

    def continue_from(self, point: RestoredPoint | None) -> None:
        """Continue a point that this process has restored; None: the next commit is a keyframe."""
        self.begin_again("another checkpoint was restored")
        self.recorder.take()
        # What replayed= names is made by the loop, and that of the process before may have made other bytes.
        if point is not None and not self._options.replayed:
            self._before, self._points, self._replay_seconds = point.rest, point.replayed, point.seconds
            # The optimizers may have had less state at the record before.
            self._state_sizes = []
            self._continues, self._due = point.place, None

    def wait(self) -> None:
        """Wait until every record has been stored or has failed."""
        if self._commits is not None:
            self._commits.wait_all()

    def raise_unreported(self, *, call_did_nothing: bool) -> None:
        """Raise the error of a point whose result was never requested; see ``BackgroundCommits``."""
        if self._commits is not None:
            self._commits.raise_unreported(call_did_nothing=call_did_nothing)

    def release(self) -> None:
        """Wait for all records, and have the saver leave its segment."""
        if self._commits is not None:
            self._commits.release()
            self._begins_segment = True

    def leave_to_parent_after_fork(self) -> None:
        """In a forked child: give up the saver and the arena, which belong to the parent, and note no steps.

        They are kept alive unused, as in ``TrainerSide``.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._inherited, self._commits = self._commits, None
            self.begin_again("this process was forked")

    def close(self) -> None:
        """Wait for all records, end the saver, and remove all hooks."""
        if self._commits is not None:
            self._commits.close()
        self.recorder.release()

    def _wait_for_checksums(self) -> None:
        """Return when an optimizer may change what it owns: once the checksums of the last commit are computed."""
        if self._commits is not None:
            self._commits.guard()

    def _started(self) -> BackgroundCommits:
        if self._commits is None:
            # The journal of a trainer that died must have ended: its segments may not come after those of this process.
            self._repository.wait_for_orphan()
            Journals(self._repository.manifests, clock=self._repository.clock).wait_for_writer(seconds=WRITER_SECONDS)
            self._commits = BackgroundCommits(self._repository, role="journal")
            owner = self._owner()
            assert owner is not None, "a method of the owner is running"
            weakref.finalize(owner, self._commits.abandon).atexit = False
        return self._commits


def _are_several(steps: Iterable[RecordedStep]) -> bool:
    """Whether each optimizer that has stepped did so more than once."""
    return min(Counter(step.optimizer for step in steps).values(), default=0) > 1


def _note_failure(itself: weakref.ref[JournalSide], done: Pending) -> None:
    side = itself()
    if side is not None and done.error_or_none() is not None:
        side.begin_again("the commit before was not stored")


def _late_checksums(record: PlannedRecord, arrays: list[ArrayPlace]) -> LatePart | None:
    """Return what computes the checksums of everything that the optimizers own, while training continues."""
    captured, late = record.captured, record.drafted.late
    if not late:
        return None
    keeps = keeps_of(captured.storages, late)
    versions = versions_of(keeps)
    hold = order_after_now(captured.storages)

    def compute() -> bytes:
        hold()
        checksums = checksums_of(captured, late, thread_count=1)
        if versions_of(keeps) != versions:
            raise CorruptError(
                "a tensor of an optimizer of the journal was changed before the checksums of the last commit were "
                "computed",
                todo="call Pending.wait_staged before something else than a step changes it",
            )
        return np.array(checksums, np.uint64).tobytes()

    return LatePart(arrays[-1].storage, compute)


def _places_of(sources: list[Any], captured: Captured) -> list[ArrayPlace]:
    """Return where the bytes of each source are in the storages of the captured list. Gradients may share memory."""
    assert isinstance(captured.tree, ListNode), "a list was captured"
    specs = [captured.tensors[node.tensor] for node in captured.tree.children if isinstance(node, TensorNode)]
    return [ArrayPlace(spec.storage, spec.offset, source.nbytes) for spec, source in zip(specs, sources, strict=True)]
