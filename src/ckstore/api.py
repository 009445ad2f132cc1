"""The public face: ``Store``, with one method for each thing a user can do with a store. ``open`` is in ``opening.py``.

A method checks its arguments, takes the lock of the handle, and calls the function that does the work. That function is
imported when the method is first called, so that opening and listing a store load neither numpy nor torch.

This file is long because it has one method for each verb; no method is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar

from ckstore.config import (
    DemotePolicy,
    Policy,
    RepackPolicy,
    check_metrics,
    check_name,
    check_policy,
    check_step,
    check_tags,
)
from ckstore.display import html_table
from ckstore.errors import BackendError, CkstoreError, CorruptError, NotFoundError, UsageError, is_damage
from ckstore.format.header import ManifestHeader
from ckstore.interval import Costs, advice_for
from ckstore.io.backend import Backend
from ckstore.ops.gc.policy import Retention, seconds_of, span_seconds, span_words
from ckstore.results import Info, Log
from ckstore.store import history, points
from ckstore.store.listing import infos_of_run, table_of_newest
from ckstore.store.manifests import EmptyRunError, missing_sentence
from ckstore.store.refs import (
    Reference,
    header_or_none,
    headers_newest_first,
    load_whole,
    newest_whole,
    resolve,
    tiers_of,
)
from ckstore.store.replay_bases import info_with_form
from ckstore.store.repository import Repository
from ckstore.store.reserve import with_reserve

if TYPE_CHECKING:
    from ckstore.background.journal import JournalSide
    from ckstore.background.pending import Pending
    from ckstore.background.trainer import TrainerSide
    from ckstore.commit.commit import Committed, Fingerprint
    from ckstore.delta.base_cache import BaseCache
    from ckstore.format.manifest import Manifest
    from ckstore.interval import Advice
    from ckstore.journal.history import ReplayRequest, RestoredPoint
    from ckstore.ops.demote import DemoteReport
    from ckstore.ops.gc.run import GcReport
    from ckstore.ops.inspect.contents import Contents
    from ckstore.ops.inspect.diff import Diff
    from ckstore.ops.inspect.stats import Coding, Stats
    from ckstore.ops.inspect.usage import Usage
    from ckstore.ops.interop.export import Exported
    from ckstore.ops.interop.model_folder import ExportedModel
    from ckstore.ops.interop.run import ImportReport
    from ckstore.ops.pack_copies import QuarantineReport
    from ckstore.ops.repack import RepackReport
    from ckstore.ops.repair import RepairReport
    from ckstore.ops.scheduled import AfterCommits
    from ckstore.ops.trash import TrashEntry, TrashRestored
    from ckstore.ops.verify import Report
    from ckstore.preemption import LastCommit
    from ckstore.ranks.job import Job
    from ckstore.ranks.world import Ranks
    from ckstore.restore.restore import Restored, RestoreRequest
    from ckstore.results import Receipt
    from ckstore.state.capture import Captured
    from ckstore.state.capture_cache import CaptureCache
    from ckstore.tiers.gc import TierGc
    from ckstore.tiers.mirror import MirrorReport
    from ckstore.tiers.pull import PullReport
    from ckstore.tiers.push import PushReport


_log = logging.getLogger("ckstore")
_Request = TypeVar("_Request")
_Export = TypeVar("_Export")

Progress = Callable[[int, int], None]
"""Called repeatedly with work done and work in total, possibly from another thread."""


class Store:
    """One run of a store. Made by ``ckstore.open``.

    Thread-safe: a lock lets one method run at a time. Not for use in a forked child process: open the store again
    there.
    """

    def __init__(
        self, repository: Repository, policy: Policy, *, trash_seconds: float | None = None, ranks: Ranks | None = None
    ) -> None:
        self._repository = repository
        self._policy = policy
        self._trash_seconds = trash_seconds
        self._lock = threading.RLock()
        self._is_closed = False
        # Releases the lease when the handle is garbage collected, and at exit.
        self._finalizer = weakref.finalize(self, repository.close)
        self._restored: Info | None = None
        # What the next commit continues from.
        self._parent: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._bases: BaseCache | None = None
        self._captures: CaptureCache | None = None
        # Background commits; made by the first of them.
        self._background: TrainerSide | None = None
        self._published: int | None = None
        self._journal: JournalSide | None = None
        # What reacts to commits.
        self._costs = Costs(repository.clock)
        self._after_commit: list[AfterCommits] = []
        self._last_commits: list[weakref.ref[LastCommit]] = []
        self._job: Job | None = None
        if ranks is not None:
            from ckstore.ranks.job import Job

            self._job = Job(repository, ranks)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<ckstore.Store {self._repository.backend.root!r}, run {self.run!r}{state}>"

    def _repr_html_(self) -> str:
        """Return the newest checkpoints as a table for notebooks. Without a table, notebooks show the repr."""
        with self._lock:
            try:
                self._check_open()
                return table_of_newest(self._repository)
            except CkstoreError as error:
                return html_table(f"{self!r}: {error}", (), ())

    # Commit

    def commit(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Receipt:
        """Store a state. When this returns, it survives SIGKILL and power failure.

        Args:
            state: Nested dicts, lists and tuples of tensors, arrays and plain values, or of objects with
                ``state_dict``. It must not change until this returns.
            step: The trainer's step, not negative. An earlier entry of the same step stays in the history.
            metrics: Numbers to find this checkpoint by, as in ``best:loss``.
            tags: Names for this checkpoint.
            policy: How to store it. None: the policy of the store.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            ConflictError: Another live process writes this run.
            CapacityError: The disk is full. Earlier checkpoints are intact.
            BackendError: The storage failed.
            CkstoreError: An earlier background commit failed unnoticed. This call did nothing; repeat it.
        """
        from ckstore.ops.commit import set_tags

        number, checked_metrics, checked_tags = check_step(step), check_metrics(metrics), check_tags(tags)
        check_policy(policy)
        with self._lock:
            self._check_open()
            self._reclaim_lease()
            record = self._journal and self._journal.plan_keyframe(state, metrics=checked_metrics)
            state, policy = record.as_keyframe(policy or self._policy) if record else (state, policy)
            if self._journal is not None and record:
                self._journal.submit_before_commit(record, number, policy or self._policy)
            with self._costs.trying():
                committed = self._committed(state, number, checked_metrics, policy or self._policy)
            receipt = committed.receipt
            self._continue_from(receipt.seq, committed.fingerprint)
            if self._is_first_rank:
                receipt = set_tags(self._repository, receipt, checked_tags)
            self._note_commit(receipt.seq)
            self._costs.note(number, receipt.seconds["total"], receipt)
            if self._journal is not None and record:
                self._journal.note_commit()
        for warning in receipt.warnings if self._is_first_rank else ():
            _log.warning("step %d: %s", receipt.step, warning)
        return receipt

    def commit_async(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Pending:
        """Copy a state to shared memory, and commit it in a background process.

        When this returns, the state may be changed, except what an optimizer owns that was given to ``attach`` or
        ``guard``: that is copied in the background, and its next step waits for the copy. Once ``Pending.wait_staged``
        has returned True, the checkpoint is published even if this process dies. Once ``Pending.result`` has returned,
        the checkpoint is durable. The first call waits if the saver of a previous, dead trainer is still publishing.

        Args:
            state: As for ``commit``.
            step: The trainer's step, not negative.
            metrics: Numbers to find this checkpoint by.
            tags: Names for this checkpoint.
            policy: How to store it, and what to do while an earlier commit is still being written.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            CapacityError: There is not enough memory for a copy of the state.
            SaverError: The saver process cannot be started, or died during the call.
            UsageError: An argument is not valid, the store is closed, or it is in a bucket: use ``commit`` there.
            CkstoreError: An earlier background commit failed and its result was never requested. This call did nothing;
                repeat it.
        """
        number, checked_metrics, checked_tags = check_step(step), check_metrics(metrics), check_tags(tags)
        check_policy(policy)
        with self._lock:
            self._check_open()
            started = self._repository.clock.monotonic()
            background = self._trainer_side()
            pending, policy = None, policy or self._policy
            if self._journal is not None:
                record = self._journal.plan(state, metrics=checked_metrics, tags=checked_tags, commits=background)
                point = self._journal.submit(record, number, policy, commits=background)
                if record.reason is None:
                    return point
                state, policy = record.as_keyframe(policy)
            request = background.prepare(state, number, metrics=checked_metrics, tags=checked_tags, policy=policy)
            try:
                with self._costs.trying():
                    pending = background.submit(request, started)
                self._costs.watch(pending)
                if self._journal is not None:
                    self._journal.note_keyframe(pending)
                self._note_durable(background)
                return pending
            except BaseException as error:
                if pending is not None:
                    background.give_up(pending, error)
                raise

    def prewarm(self, state: Any, *, policy: Policy | None = None) -> None:
        """Start the saver process and allocate memory for a state, so that the first ``commit_async`` is fast.

        Waits if the saver of a previous, dead trainer is still publishing.

        Args:
            state: What will be committed. It is measured, not stored.
            policy: The policy it will be committed with.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            CapacityError: There is not enough memory for a copy of the state.
            SaverError: The saver process cannot be started.
            UsageError: The store is closed, or it is in a bucket.
        """
        with self._lock:
            self._check_open()
            self._trainer_side().prewarm(state, policy or self._policy)

    def journal(
        self, *optimizers: Any, keyframe_every: int | None = None, replay_seconds: float = 30.0,
        replayed: str | Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Store each commit in the background as what its optimizer steps have seen, where that explains the change.

        From then on a trainer may call ``commit_async`` after every step. A commit becomes a *point*: gradients,
        hyper-parameters and the rest of the state. A restore replays steps after the whole checkpoint before it, its
        *keyframe*, and compares checksums. A commit stores the whole state if it is the first one, has tags, would take
        long to replay, or if something else changed what the optimizers own; before that, ``Pending.wait_staged``. Call
        this before ``restore``, which calls the optimizers. More calls add some, always in the same order.

        Args:
            optimizers: Optimizers of torch, whose parameters and state are in each committed state.
            keyframe_every: Store the whole state after this many commits at the latest. None: see ``replay_seconds``.
            replay_seconds: Store the whole state before a replay would take longer than this, as far as one can tell.
            replayed: Globs over dotted paths: what the loop itself makes after each step from what the optimizers own,
                such as averaged weights. It is not stored, and ``restore`` needs ``into=`` and ``after_step=``.

        Raises:
            UsageError: No optimizer, an unfit one, or one again; an option out of range or changed; or ``ranks``.
        """
        from ckstore.background.journal import JournalOptions, JournalSide

        with self._lock:
            self._check_open()
            options = JournalOptions.of(keyframe_every, replay_seconds, replayed)
            journal = self._journal or JournalSide(self, self._repository, options, self._job)
            self._journal = journal.attach(optimizers, options)

    def attach(self, optimizer: Any) -> None:
        """Copy what an optimizer owns while training continues; the optimizer's next step waits for the copy.

        An optimizer owns its parameters and the tensors of its state. From then on only its ``step`` may change them
        between ``commit_async`` and the end of the copy. Before anything else changes them, call
        ``Pending.wait_staged``, or use ``guard``. Examples: averaged weights that are swapped in for an evaluation; an
        ``Embedding`` with ``max_norm``.

        A commit fails if such a change is detected. In host memory, every change that torch counts is detected.
        Changes that torch does not count (through ``.data``, numpy, or a fused operation) are detected if they touch a
        whole tensor, or whole rows of matrices with at most 32,768 rows in total; of more rows a sample is checked.
        Single elements may be missed. On devices, changes that torch does not count are not detected.
        ``Policy.debug_guard`` detects every change, at the price of a pass over the state before the call returns.

        Everything else is copied before ``commit_async`` returns: buffers, tensors that no attached optimizer owns, and
        codebooks of up to 16 MiB (recognized by the names ``codebook``, ``quantize``, ``vq``), which change in the
        forward pass. Tensors must not move to other memory, as by ``share_memory_``: share them first.

        What an optimizer with ``capturable`` owns is copied before ``commit_async`` returns, because replaying a CUDA
        graph calls no hooks. Call ``Pending.wait_staged`` before you capture a graph.

        The optimizer waits before it runs the step's closure and other hooks. A ``commit_async`` inside a closure, or
        inside a hook that runs before the step, copies everything before it returns.

        Raises:
            UsageError: It is not a torch optimizer, or it cannot report its steps.
        """
        with self._lock:
            self._check_open()
            self._trainer_side().attach(optimizer)

    @contextlib.contextmanager
    def guard(self, optimizer: Any) -> Iterator[None]:
        """Change what an optimizer owns inside this context; attaches the optimizer.

        Entering waits until the last ``commit_async`` has copied its state, including from devices. A ``commit_async``
        inside the context copies everything before it returns.

        Raises:
            UsageError: As for ``attach``.
        """
        self.attach(optimizer)
        with self._lock:
            background = self._trainer_side()
            background.open_guard()
        try:
            # Without the lock: other threads may use the handle during the wait.
            background.wait_until_copied()
            yield
        finally:
            with self._lock:
                background.close_guard()

    def wait(self) -> None:
        """Wait until all background commits have ended, as ``Pending.result`` does without a timeout.

        Raises:
            CkstoreError: A commit failed, and its result was never requested.
        """
        with self._lock:
            self._check_open()
            self._wait_for_background()
            if self._journal is not None:
                self._journal.raise_unreported(call_did_nothing=False)
            if self._background is not None:
                self._background.raise_unreported(call_did_nothing=False)

    @property
    def arena_nbytes(self) -> int:
        """Shared memory held for background commits, in bytes."""
        return 0 if self._background is None else self._background.arena_nbytes

    # When to commit

    @property
    def costs(self) -> Costs:
        """What the last commits of this handle have cost."""
        return self._costs

    def advise(self, step_seconds: float, *, overhead: float = 0.03, failures_per_day: float | None = None) -> Advice:
        """Recommend how often to commit, from the measured cost of this handle's last commits.

        ``ckstore.AutoInterval`` does this during training and also measures steps. Without it, the slowdown of steps
        that run while a commit is written is unknown; the advice says so.

        Args:
            step_seconds: Duration of a step, in seconds.
            overhead: Share of the time that commits may take.
            failures_per_day: Expected failures of the trainer. If given, the interval is not shorter than the one that
                minimizes lost time.

        Raises:
            UsageError: No commit of this handle is durable yet, or a number is out of range.
        """
        measured = self._costs.measured()
        if measured is None:
            raise UsageError(
                "no commit of this handle has become durable yet, so its cost is unknown",
                where=self._repository.backend.root,
                todo="commit once, wait for the result, and ask again",
            )
        return advice_for(measured, step_seconds, overhead=overhead, failures_per_day=failures_per_day)

    def commit_on_signal(
        self,
        get_state: Callable[[], Any],
        *,
        signals: Sequence[int] | None = None,
        deadline_seconds: float = 30.0,
        then: Literal["exit", "return"] = "exit",
        metrics: Callable[[], Mapping[str, float]] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> LastCommit:
        """Commit once more when the process is asked to end, for example by preemption. Call this on the main thread.

        A signal can arrive within ``optimizer.step``, when the state is inconsistent. So the signal handler only sets a
        flag, and ``check``, called after each step, commits. ::

            with store.commit_on_signal(lambda: state) as last:
                for step in range(start, steps):
                    train_one_step()
                    last.check(step)

        The last commit is a background commit if the others were: once staged, it is published even if this process is
        killed. It waits for an earlier commit only if memory is short, or on many ranks. If this very step is already
        being committed, that commit is waited for; it gets the tags if it is durable in time, and keeps its metrics.
        Then the process ends as without this: by a Python handler installed before, or by SystemExit with 128 + the
        signal.

        If no step ends before the deadline, nothing is committed: an inconsistent state is worse than an older one. The
        log says so, and the process continues: the next ``check`` commits, a second signal ends the process. Many ranks
        agree on one step; also those commit that got no signal.

        Args:
            get_state: Returns the state, as for ``commit``. Called only by ``check``.
            signals: None: SIGTERM.
            deadline_seconds: From the signal until the process is killed. Slurm and Kubernetes give 30 s.
            then: ``"exit"``: as described; ``"return"``: ``check`` returns True, and the caller ends the run.
            metrics: Returns the metrics of the last commit.
            tags: Names for the last commit.
            policy: How to store it; None: the policy of the store. Its ``on_busy`` is not used.

        Raises:
            UsageError: This is not the main thread, a signal cannot be handled, or a number is out of range.
        """
        from ckstore.preemption import LastCommit

        with self._lock:
            self._check_open()
            last = LastCommit(
                self,
                get_state,
                signals=signals,
                deadline_seconds=deadline_seconds,
                then=then,
                metrics=metrics,
                tags=tags,
                policy=self._last_policy(policy),
                agreement=None if self._job is None else self._job.last_step(),
            )
            self._last_commits = [each for each in self._last_commits if each()] + [weakref.ref(last)]
            return last

    # Restore and read

    def restore(
        self, ref: Reference | None = None, *, into: Any = None, only: str | Sequence[str] | None = None,
        device: Any = None, exact: bool = False, fallback: bool = False, on_progress: Progress | None = None,
        replay: Callable[[Any, int], Any] | None = None,
        replay_check: Literal["each", "last"] = "each", after_step: Callable[[int], object] | None = None,
    ) -> Any:  # fmt: skip
        """Return a state as it was committed, or raise. Bit for bit, unless the checkpoint was stored with a loss.

        Args:
            ref: Which checkpoint. None: the newest one whose manifest is intact and whose packs exist. Newer ones are
                skipped with a warning. Damage inside a pack is found when it is read, and raises.
            into: A state to fill in place. Its tensors are overwritten where they are; leaves that it lacks are made.
                Each object in it has its ``load_state_dict`` called once with the restored values. Tensors of torch
                modules and optimizers whose loading only copies are overwritten directly, which saves a copy.
            only: Globs over dotted leaf paths; ``*`` crosses dots. A path of the checkpoint, written out, matches only
                itself. Only the matching bytes are read. The result is nested dicts.
            device: Where tensors are placed; None: the CPU.
            exact: Refuse a checkpoint that was stored with a loss.
            fallback: If the newest checkpoint is damaged, restore the newest readable one, with a warning. Not with
                ``ref``, except ``"latest"``. ``restored`` shows which it was.
            on_progress: Called with bytes restored and bytes in total, from any thread.
            replay: For a checkpoint in replay form: your training code. It gets an earlier state and the step to reach.
                It returns the state at that step; None: it has trained in place. Every bit of it is compared.
            replay_check: For a point of a journal: compare checksums after each replayed step, or after the last.
            after_step: For a point of a journal: called with each step that was replayed, for what the loop updates.

        Raises:
            NotFoundError: There is no such checkpoint, or nothing matches ``only``.
            ReplayError: Steps or training were replayed, and got other bytes than the run had.
            CorruptError: Stored bytes are damaged. Names pack, offset, tensor, and the newest other checkpoint that can
                be read (``whole_step``, ``whole_seq``). ``into`` may be partly overwritten.
            UsageError: ``into`` does not fit; nothing was written. Or ``load_state_dict`` of the object at ``path``
                raised; ``written``, ``partly_written`` and ``not_written`` list the others.
            BoundError: ``exact`` is True, and the checkpoint was stored with a loss.
        """
        from ckstore.journal.history import ReplayRequest
        from ckstore.restore.restore import RestoreRequest

        with self._lock:
            self._check_open()
            if fallback and ref not in (None, "latest"):
                what, todo = "fallback=True goes back from the newest checkpoint only", "leave out ref, or fallback"
                raise UsageError(what, where=f"restore({ref!r})", todo=todo)
            self._wait_for_background()
            place = None if self._job is None else self._job.place
            request = RestoreRequest(into, only, device, exact, on_progress, place, train_until=replay)
            how = ReplayRequest(replay_check, after_step, fallback)
            point = self._restored_point(ref, request, how)
            if point is not None:
                return point.state
            restored = self._restore(ref, request, fallback=fallback)
            if self._journal is not None:
                self._journal.continue_from(None)
            self._restored = self._info(header := restored.manifest.header, warnings=restored.warnings)
            if only is None:
                self._use_as_base(restored.base or restored.manifest)
                self._continue_from(header.seq, None)
            return restored.state

    def export_hf(
        self, ref: Reference, folder: str | os.PathLike[str], *, only: str | Sequence[str] | None = None,
        strip_prefix: str | None = None, dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_shard_nbytes: int = 5 * 10**9, force: bool = False, on_progress: Progress | None = None,
    ) -> ExportedModel:  # fmt: skip
        """Write a folder that ``from_pretrained`` of transformers or PEFT loads, but only when it is complete.

        It gets the weights as safetensors, and the files under the key ``files`` of the state, such as ``config.json``.

        Args:
            ref: Which checkpoint.
            folder: The folder; made if it does not exist.
            only: Globs over dotted paths of the weights. None: the part ``model``, the adapters that a Trainer
                committed, or a state that is a flat dict.
            strip_prefix: Removed from the paths. None: the key of the part ``model``.
            dtype: Convert floating-point weights; None: keep their dtypes.
            max_shard_nbytes: Largest file of weights.
            force: Replace files.
            on_progress: Called with bytes written and bytes in total.

        Raises:
            UsageError: The weights are not those of the model in ``config.json``, or the folder has weights already.
            UnsupportedError: The weights cannot be written so that they load; the message says what to do.
        """
        from ckstore.ops.interop.model_folder import ModelRequest, export_model_folder

        request = ModelRequest(Path(folder), only, strip_prefix, dtype, max_shard_nbytes, force, on_progress)
        return self._exported(ref, export_model_folder, request)

    def export_safetensors(
        self, ref: Reference, file: str | os.PathLike[str], *, only: str | Sequence[str] | None = None,
        strip_prefix: str = "", force: bool = False, on_progress: Progress | None = None,
    ) -> Exported:  # fmt: skip
        """Write the tensors of a checkpoint to a safetensors file, by dotted path. Few are in memory at a time.

        Args:
            ref: Which checkpoint.
            file: The file.
            only: Globs over dotted paths; None: everything.
            strip_prefix: Removed from the path of every tensor.
            force: Replace the file.
            on_progress: Called with bytes written and bytes in total.

        Raises:
            NotFoundError: There is no such checkpoint, or no tensor that the format supports.
            UsageError: Two tensors have the same name, one lacks the prefix, or the file exists.
        """
        from ckstore.ops.interop.stored_tensors import FileRequest, export_file

        return self._exported(ref, export_file, FileRequest(Path(file), only, strip_prefix, force, on_progress))

    def _exported(
        self, ref: Reference, export: Callable[[Repository, Policy, Manifest, Info, _Request], _Export], to: _Request
    ) -> _Export:
        with self._lock:
            self._check_open()
            self._wait_for_background()
            self._repository.wait_for_orphan()
            points.require_checkpoint(self._repository, ref, takes_latest=True)
            manifest = load_whole(self._repository, resolve(self._repository, ref), takes_lower=True)
            return export(self._repository, self._policy, manifest, self._info(manifest.header), to)

    @property
    def restored(self) -> Info | None:
        """The checkpoint that the last ``restore`` of this handle returned; None before the first."""
        return self._restored

    @property
    def run(self) -> str:
        """The run of this handle."""
        return self._repository.run

    @property
    def store_id(self) -> str:
        """The id of the store, 32 hex digits. Copies of a store have the same id."""
        return self._repository.store_id.hex()

    def latest(self) -> Info | None:
        """Return the newest intact checkpoint or point of the journal, or None in an empty run.

        Waits if the saver of a previous, dead trainer is still publishing.

        Raises:
            UnreachableError: The newest checkpoint may be in a tier that cannot be reached, or the store is gone.
            CorruptError: There are checkpoints, but none is intact.
        """
        with self._lock:
            self._check_open()
            if self._job is not None:
                header = self._job.newest()
                return None if header is None else self._info(header)
            self._repository.wait_for_orphan()
            try:
                manifest, skipped = newest_whole(self._repository)
            except EmptyRunError:
                return None
            return points.info_of_point(self._repository, "latest", self._info) or self._info(
                manifest.header, warnings=skipped
            )

    def info(self, ref: Reference) -> Info:
        """Return the facts about a checkpoint, or a point of the journal; reads only its header.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        with self._lock:
            self._check_open()
            if self._job is None and (point := points.info_of_point(self._repository, ref, self._info)) is not None:
                return point
            name = resolve(self._repository, ref)
            header = header_or_none(self._repository.manifests, name)
            if header is None:
                raise NotFoundError(f"seq {name.seq} was dropped meanwhile", where=self._repository.backend.root)
            return self._info(header)

    def log(self) -> list[Info]:
        """Return every entry of the run, newest first. Damaged entries are left out, with a warning in the log.

        Notebooks show the list as a table.

        Raises:
            UnreachableError: The store is gone.
            ConflictError: Another store has taken its place.
        """
        with self._lock:
            self._check_open()
            self._repository.require_same_store()
            return Log(infos_of_run(self._repository), title=f"run {self.run}")

    def steps(self) -> list[int]:
        """Return the steps that can be restored, ascending, each once. Waits as ``latest`` does."""
        with self._lock:
            self._check_open()
            self._repository.require_same_store()
            self._repository.wait_for_orphan()
            found = points.points_by_keyframe(self._repository).values()
            steps = {name.step for name in self._repository.manifests.listing().names}
            return sorted(steps.union(*({point.step for point in each} for each in found)))

    def tags(self) -> dict[str, int]:
        """Return each tag with the seq of its checkpoint, or of the keyframe of its point."""
        with self._lock:
            self._check_open()
            return {name: record.seq for name, record in sorted(self._repository.tags.all().items())}

    def runs(self) -> list[str]:
        """Return the names of all runs of the store."""
        with self._lock:
            self._check_open()
            return self._repository.runs()

    def contents(self, ref: Reference) -> Contents:
        """Return what a checkpoint holds, tensor by tensor; reads only its manifest. For a point: its keyframe."""
        from ckstore.ops.inspect.contents import contents_of

        with self._lock:
            point = points.info_of_point(self._repository, ref, self._info)
            manifest = self._manifest(ref if point is None else f"seq:{point.seq}")
            return contents_of(manifest, point or self._info(manifest.header))

    def coding(self, ref: Reference) -> Coding:
        """Return how each tensor of a checkpoint is coded, and why; reads its manifest and frame headers."""
        from ckstore.ops.inspect.stats import coding_of

        with self._lock:
            manifest = self._manifest(ref)
            return coding_of(self._repository, manifest, self._info(manifest.header))

    def stats(self, ref: Reference = "latest", *, exact: bool = False, on_progress: Progress | None = None) -> Stats:
        """Return how many bytes each part of a checkpoint takes, with its order-0 entropy. Decodes the checkpoint.

        Args:
            ref: Which checkpoint.
            exact: Measure every element instead of a sample of each chunk.
            on_progress: Called with plain bytes done and plain bytes in total, from any thread.
        """
        from ckstore.ops.inspect.stats import stats_of

        with self._lock:
            manifest = self._manifest(ref)
            info = self._info(manifest.header)
            return stats_of(self._repository, manifest, info, self._policy, is_exact=exact, on_progress=on_progress)

    def diff(
        self, first: Reference, second: Reference = "latest", *, only: str | Sequence[str] | None = None,
        on_progress: Progress | None = None,
    ) -> Diff:  # fmt: skip
        """Return how the second checkpoint differs from the first, tensor by tensor. Both are read chunk by chunk.

        Args:
            first: The checkpoint to compare with.
            second: The checkpoint to compare.
            only: Globs over dotted paths. None: everything.
            on_progress: Called with plain bytes compared and plain bytes in total.

        Raises:
            NotFoundError: There is no such checkpoint, or nothing matches ``only``.
            CorruptError: One of them is damaged.
        """
        from ckstore.ops.inspect.diff import diff_of

        with self._lock:
            self._check_open()
            self._wait_for_background()
            manifests = self._manifest(first), self._manifest(second)
            infos = self._info(manifests[0].header), self._info(manifests[1].header)
            return diff_of(self._repository, manifests, infos, only=only, on_progress=on_progress)

    def usage(self) -> Usage:
        """Return where the bytes of the store are, of all runs: by kind of file, run, checkpoint and tier.

        Names, sizes and manifests are read. With ``problem`` not empty, a manifest could not be read, and packs that
        only it names count as needed by no checkpoint.
        """
        from ckstore.ops.inspect.usage import usage_of

        with self._lock:
            self._check_open()
            return usage_of(self._repository)

    def report(self, *, on_progress: Progress | None = None) -> str:
        """Return an HTML page about all runs: what was committed, what it takes, and what gc keeps and why.

        The page is one file without network access. No tensor is read, and nothing is changed.

        Args:
            on_progress: Called with checkpoints done and checkpoints in total.
        """
        from ckstore.ops.inspect.report import report_page

        with self._lock:
            self._check_open()
            return report_page(self._repository, on_progress)

    def verify(
        self, level: str = "read", *, ref: Reference | None = None, remote: bool = False,
        replay: Callable[[Any, int], Any] | None = None, on_progress: Progress | None = None,
    ) -> Report:  # fmt: skip
        """Read the store and report every error; nothing is changed.

        Args:
            level: ``"quick"``: manifests and pack directories; ``"read"``: every stored byte; ``"decode"``: everything
                that a restore would read, decoded.
            ref: One checkpoint. None: the whole store, all runs.
            remote: Also read packs in other tiers.
            replay: Your training code, as for ``restore``. It trains from the newest whole checkpoint before ``ref``
                (None: before the newest) to that one, and every bit is compared.
            on_progress: Called with bytes read and bytes in total.

        Raises:
            ReplayError: Training makes another state: it is not deterministic, or hardware has failed.
        """
        from ckstore.ops.replay_form import verify_replayed
        from ckstore.ops.verify import verify

        with self._lock:
            self._check_open()
            names = None if ref is None else [(self.run, resolve(self._repository, ref))]
            call = partial(verify, policy=self._policy, is_remote=remote, on_progress=on_progress)
            report = call(self._repository, level, names)
            if replay is not None:
                report.replayed = verify_replayed(self._repository, self._policy, ref, replay)
            return report

    # Change the history

    def tag(self, ref: Reference, name: str) -> None:
        """Give a checkpoint or a point of the journal a name, so that it stays. A name that exists moves to it."""
        check_name(name, "tag")
        with self._lock:
            self._check_open()
            self._wait_for_background()
            self._repository.make_folders()
            history.tag(self._repository, name, ref)

    def untag(self, name: str) -> None:
        """Remove a name; NotFoundError if there is none."""
        with self._lock:
            self._check_open()
            self._repository.make_folders()
            self._repository.tags.remove(name)

    def rewind(self, ref: Reference) -> Info:
        """Make an old entry, or a point of the journal, the newest again, so that training resumes from it.

        An entry is published again. Of a point, the journal notes that it goes on there: nothing is replayed.

        Raises:
            NotFoundError: There is no such checkpoint or point.
            ConflictError: Another live process writes this run.
            CkstoreError: An earlier background commit failed, as for ``commit``: repeat this call.
        """
        with self._lock:
            self._check_open()
            self._reclaim_lease()
            if self._journal is not None:
                self._journal.leave_chain("the run was rewound")
            if self._job is None and (point := points.rewind_to_point(self._repository, ref, self._info)) is not None:
                self._continue_from(point.seq, None)
                return point
            rewind = partial(history.rewind, self._repository, ref)
            manifest = rewind() if self._job is None else self._job.rewind(ref, rewind)
            self._use_as_base(manifest)
            self._continue_from(manifest.header.seq, self._fingerprint)
            return self._info(manifest.header)

    def delete(self, ref: Reference) -> history.Deleted:
        """Delete a checkpoint: every entry of a step, or one entry with ``"seq:N"``.

        Raises:
            NotFoundError: There is no such checkpoint.
            ConflictError: A tag keeps it.
        """
        with self._lock:
            self._check_open()
            self._wait_for_background()

            def delete() -> history.Deleted:
                self._repository.make_folders()
                return history.delete(self._repository, ref)

            return with_reserve(self._repository.backend, delete)

    def undelete(self, ref: Reference) -> Info:
        """Bring back a deleted checkpoint, or the exact form of a demoted one, while the trash still holds it.

        A deleted checkpoint becomes a new entry of its run, which ``latest`` skips. A demoted checkpoint becomes exact
        again in place: it keeps its seq and tags, and its generation increases.

        Args:
            ref: A step (its newest entry that can be brought back), ``"seq:N"``, or ``"id:PREFIX"``.

        Raises:
            NotFoundError: The trash does not hold such a checkpoint.
            CorruptError: It is damaged, or a pack that it needs was already freed.
            ConflictError: Another process replaced the checkpoint at the same time.
        """
        with self._lock:
            self._check_open()
            self._wait_for_background()
            found = history.find_in_trash(self._repository, ref)
            return Info.of(history.bring_back(self._repository, found).header)

    # Space

    def gc(
        self,
        policy: Retention | Mapping[str, Any] | None = None,
        *,
        all_runs: bool = False,
        dry_run: bool = False,
        now: bool = False,
        max_delete: int | None = None,
        min_age: str | float = "1h",
        trash_for: str | float | None = None,
        repack_nbytes_max: int | None = None,
        waste_max: float | None = None,
        clear_intents: bool = False,
        on_progress: Progress | None = None,
    ) -> GcReport:
        """Delete checkpoints that match no rule, move unreferenced packs to the trash, and empty old trash.

        Other processes may use the store meanwhile. ``undelete`` brings a deleted checkpoint back until its space is
        freed. A manifest that cannot be read protects every pack that it might name: see ``obstacles`` of the report.

        Args:
            policy: Which checkpoints to keep. None: the stored rules; without stored rules none is deleted.
            all_runs: Apply the rules to every run, each by itself. False: only to this handle's run.
            dry_run: Only report what would be done.
            now: Free the trash immediately, including what is moved there now. It cannot be brought back.
            max_delete: Refuse to delete more checkpoints than this.
            min_age: Keep packs that no manifest has ever named until they are this old: ``"1h"``, or seconds.
            trash_for: How long the trash is kept. None: the value given to ``open``, else the stored one, else 24 h.
            repack_nbytes_max: Bytes that may be written to rewrite partly needed packs. 0: none is rewritten.
            waste_max: Share of unneeded bytes above which a pack is rewritten.
            clear_intents: Remove intents left by crashed processes. Use only if nothing else deletes or demotes now.
            on_progress: Called with steps done and steps in total.

        Raises:
            LockHeldError: Another collection is running.
            UsageError: More than ``max_delete`` would be deleted, and nothing was. Or the policy is not valid.
        """
        from ckstore.ops.gc.run import GcLimits, collect_store
        from ckstore.ops.stored_policies import stored_policy

        chosen = {"repack_nbytes_max": repack_nbytes_max, "waste_max": waste_max}
        given: dict[str, Any] = {field: value for field, value in chosen.items() if value is not None}
        trash_seconds = self._trash_seconds_or(trash_for)
        limits = GcLimits(seconds_of(min_age), trash_seconds, is_now=now, clears_intents=clear_intents, **given)
        if max_delete is not None and max_delete < 0:
            raise UsageError("max_delete must not be negative", where=f"max_delete={max_delete!r}")
        with self._lock:
            self._check_open()
            self._wait_for_background()
            own_run = (self.run,) if self.run in self._repository.runs() else ()
            return collect_store(
                self._repository,
                Retention.given_or_none(policy) or stored_policy(self._repository),
                runs=None if all_runs else own_run,
                limits=limits,
                dry_run=dry_run,
                max_delete=max_delete,
                on_progress=on_progress,
            )

    @property
    def retention(self) -> Retention | None:
        """The retention rules stored with the store, for all its runs; None if there are none."""
        from ckstore.ops.stored_policies import stored_policy

        with self._lock:
            self._check_open()
            return stored_policy(self._repository)

    def set_retention(self, policy: Retention | Mapping[str, Any] | None) -> None:
        """Store retention rules with the store, for collections without rules of their own; None removes them."""
        from ckstore.ops.stored_policies import set_stored_policy

        rules = Retention.given_or_none(policy)
        with self._lock:
            self._check_open()
            set_stored_policy(self._repository, rules)

    @property
    def trash_for(self) -> str | None:
        """How long the trash is kept, as stored with the store, such as ``"12h"``; None if nothing is stored."""
        from ckstore.ops.stored_policies import stored_trash_seconds

        with self._lock:
            self._check_open()
            seconds = stored_trash_seconds(self._repository)
            return None if seconds is None else span_words(seconds)

    def set_trash_for(self, span: str | float | None) -> None:
        """Store how long the trash is kept, for collections that are given none; None removes the value.

        Raises:
            UsageError: It is not a duration.
        """
        from ckstore.ops.stored_policies import set_stored_trash_seconds

        seconds = None if span is None else seconds_of(span)
        with self._lock:
            self._check_open()
            set_stored_trash_seconds(self._repository, seconds)

    def trash(self) -> list[TrashEntry]:
        """Return what is in the trash, oldest first."""
        from ckstore.ops.trash import list_trash

        with self._lock:
            self._check_open()
            return list_trash(self._repository)

    def restore_from_trash(self, trash_id: str) -> TrashRestored:
        """Bring back one folder of the trash.

        Packs are moved back. A deleted checkpoint becomes a new entry. A demoted checkpoint becomes exact again. Other
        old forms of existing checkpoints stay in the trash.

        Args:
            trash_id: The folder's name, or a unique prefix of it.

        Raises:
            NotFoundError: There is no such folder.
            UsageError: Several folders begin with ``trash_id``.
        """
        from ckstore.ops.trash import restore_from_trash

        with self._lock:
            self._check_open()
            self._wait_for_background()
            return restore_from_trash(self._repository, trash_id)

    def purge(self, trash_id: str | None = None) -> int:
        """Free the trash, or one folder of it, immediately; return the freed bytes.

        Packs that a manifest names are moved back instead, and so are packs that a tier should have but lacks.

        Raises:
            ConflictError: A manifest is missing or cannot be read, and may name any pack. Nothing was freed.
            CorruptError: A tier lacks packs that manifests expect there. They were moved back; the rest was freed.
            LockHeldError: Another collection is running.
        """
        from ckstore.ops.trash import purge_trash

        with self._lock:
            self._check_open()
            return purge_trash(self._repository, trash_id)

    def repack(
        self, policy: RepackPolicy | None = None, *, dry_run: bool = False, on_progress: Progress | None = None
    ) -> RepackReport:
        """Store the checkpoints of the run again: the newest for fast restores, older ones in fewer bytes.

        Contents and ids do not change, and readers are not disturbed. ``gc`` frees the space of the old form.

        Args:
            policy: The target form. None: one keyframe, followed by deltas.
            dry_run: Only report what would be done.
            on_progress: Called with checkpoints done and checkpoints in total: first for the plan, then for the work.

        Raises:
            ConflictError: Another live process writes this run.
            CorruptError: A checkpoint of the run is damaged.
            CapacityError: The disk is full. Every checkpoint is in its old or its new form.
        """
        from ckstore.ops.repack import repack

        with self._lock:
            self._check_open()
            self._wait_for_background()
            if not dry_run:
                self._reclaim_lease()
                self._bases = None
            return repack(
                self._repository, policy or RepackPolicy(), self._policy, dry_run=dry_run, on_progress=on_progress
            )

    def demote(
        self, *refs: Reference, policy: DemotePolicy | Mapping[str, Any] | None = None,
        replay: Callable[[Any, int], Any] | None = None, dry_run: bool = False, on_progress: Progress | None = None,
    ) -> DemoteReport:  # fmt: skip
        """Store old checkpoints again with a loss. Their steps, seqs and metrics do not change; their ids do.

        The newest checkpoints, every n-th of the others, and all that have a tag stay exact. Each checkpoint is
        replaced atomically: after an interruption, every checkpoint can be restored. Training, readers and collections
        may continue meanwhile, unless the newest checkpoint is named or the store is in a bucket. The next collection
        frees the space.

        Args:
            *refs: Demote exactly these, even the newest. Without any: those that the policy selects.
            policy: Which checkpoints stay exact, and how the others are stored: a ``DemotePolicy`` or its rules. None:
                the stored policy, else ``DemotePolicy()``.
            replay: Your training code, as for ``restore``. Checkpoints that it makes again are put in replay form, from
                the newest whole one before each. Never the newest.
            dry_run: Only report what would be done.
            on_progress: Called with checkpoints done and checkpoints in total.

        Raises:
            NotFoundError: A named checkpoint does not exist.
            ConflictError: A named checkpoint has a tag. Or the newest was named, or the store is in a bucket, and
                another live process writes this run.
            UsageError: The policy is not valid.
            CorruptError: A checkpoint of the run is damaged.
            CapacityError: The disk is full. Every checkpoint is in its old or its new form.
            ReplayError: Training does not make a named checkpoint again. It stays as it is.
        """
        from ckstore.ops.demote import demote, names_newest
        from ckstore.ops.stored_policies import demotion_given, stored_demotion

        wanted = demotion_given(policy)
        with self._lock:
            self._check_open()
            self._wait_for_background()
            if not dry_run:
                if names_newest(self._repository, refs):
                    self._reclaim_lease()
                self._bases = None
            chosen = wanted or stored_demotion(self._repository) or DemotePolicy()
            chosen = chosen if replay is None else dataclasses.replace(chosen, form="replay")
            call = partial(demote, refs=refs, dry_run=dry_run, train_until=replay, on_progress=on_progress)
            return call(self._repository, chosen, self._policy)

    @property
    def demotion(self) -> DemotePolicy | None:
        """The demotion policy stored with the store, for all its runs; None if there is none."""
        from ckstore.ops.stored_policies import stored_demotion

        with self._lock:
            self._check_open()
            return stored_demotion(self._repository)

    def set_demotion(self, policy: DemotePolicy | Mapping[str, Any] | None) -> None:
        """Store a demotion policy with the store, for demotions without one of their own; None removes it.

        Raises:
            UsageError: The policy has an unknown rule, or a value out of range.
        """
        from ckstore.ops.stored_policies import demotion_given, set_stored_demotion

        wanted = demotion_given(policy)
        with self._lock:
            self._check_open()
            set_stored_demotion(self._repository, wanted)

    # Damage

    def repair(
        self,
        *,
        dry_run: bool = True,
        sources: Sequence[str | os.PathLike[str] | Backend] = (),
        on_progress: Progress | None = None,
    ) -> RepairReport:
        """Repair damage in all runs of the store, from other frames and packs and from copies elsewhere.

        Reads every frame that a checkpoint needs. Damaged or missing frames are searched for in all packs, in the
        trash, in quarantine and in ``sources``, damaged records of journals in ``sources`` and in tiers. If a frame is
        found nowhere, its checkpoint becomes partial: ``restore(only=...)`` returns the rest, a full restore raises and
        names what is missing, and a later repair makes it whole if the same bytes were committed again. Damaged files
        are moved to ``quarantine/``; nothing is deleted.

        Args:
            dry_run: Only report what would be done.
            sources: Copies of this store: folders, URLs or backends.
            on_progress: Called with packs read and packs in total.

        Raises:
            ConflictError: Another live process writes a run that needs repair.
            CapacityError: The disk is full. Each checkpoint is unchanged or repaired.
            UsageError: A source is another store.
        """
        from ckstore.ops.repair import open_copies, repair

        with self._lock, open_copies(sources, self._repository.store_id) as backends:
            self._check_open()
            self._wait_for_background()
            if not dry_run:
                self._reclaim_lease()
                self._bases = None
            return repair(self._repository, dry_run=dry_run, sources=backends, on_progress=on_progress)

    def quarantine(self, *, dry_run: bool = True) -> QuarantineReport:
        """Move unreadable manifests of all runs, and torn packs that no manifest names, to ``quarantine/``.

        An unreadable manifest might name any pack, so gc frees nothing until it is moved away. Nothing is deleted: to
        undo, move the file back. ``repair`` includes this.

        Args:
            dry_run: Only report what would be moved.
        """
        from ckstore.ops.pack_copies import quarantine_damaged

        with self._lock:
            self._check_open()
            self._wait_for_background()
            return quarantine_damaged(self._repository, dry_run=dry_run)

    def accept_missing(self) -> dict[str, tuple[int, ...]]:
        """Give up checkpoints of all runs whose manifests are missing.

        Until then gc frees nothing, because nobody knows which packs they need. The next collection frees them.

        Returns:
            For each run with missing checkpoints: their seqs, ascending.
        """
        with self._lock:
            self._check_open()
            self._wait_for_background()
            self._repository.require_same_store()
            accepted = {}
            for run in self._repository.runs_with_claims():
                missing = self._repository.manifests_of(run).accept_missing()
                if missing:
                    accepted[run] = tuple(sorted(missing))
                    _log.warning("%s; taken for lost from now on", missing_sentence(run, missing))
            return accepted

    # Tiers

    def tiers(self) -> dict[str, str]:
        """Return the address of each tier of the store, by name."""
        with self._lock:
            self._check_open()
            return self._repository.tiers.addresses()

    def push(
        self, address: str | Path | None = None, *, keep_local: int = 1, older_than: str | float | None = None,
        tier: str | None = None, read_back: bool = False, dry_run: bool = False, on_progress: Progress | None = None,
    ) -> PushReport:  # fmt: skip
        """Move old checkpoints of the run to a bucket, and copy their points. All stay and restore as before.

        A local pack is released only after its copy was seen in the tier; the next collection frees it. Training may
        continue meanwhile.

        Args:
            address: Where to: ``s3://bucket/prefix`` (gs, az), or the absolute path of another folder. None: the only
                configured tier, or the one that ``tier`` names.
            keep_local: How many of the newest checkpoints stay local.
            older_than: Push only older checkpoints: ``"7d"``, or seconds.
            tier: Name of the tier, or the name that a new one gets.
            read_back: Read every pushed pack back and compare it before the local pack is released.
            dry_run: Only report what would be done.
            on_progress: Called with bytes of packs done and in total, from any thread.

        Raises:
            UsageError: There is another store at the address.
            ConflictError: Another process pushes or commits there.
            CorruptError: A local pack is damaged, or a pack in the tier is not ours.
            BackendError: The server does not answer, or refuses. Whatever is raised, every checkpoint is intact.
        """
        from ckstore.tiers.push import PushPolicy, push

        older_than_seconds = None if older_than is None else span_seconds(older_than)
        policy = PushPolicy(keep_local, older_than_seconds, read_back)
        with self._lock:
            self._check_open()
            place = self._repository.tiers.choose(None if address is None else os.fspath(address), tier)
            return push(self._repository, place, policy, tier=tier, dry_run=dry_run, on_progress=on_progress)

    def pull(
        self,
        refs: Sequence[Reference] | Reference | None = None,
        *,
        dry_run: bool = False,
        on_progress: Progress | None = None,
    ) -> PullReport:
        """Copy checkpoints, and their missing points, back from other tiers; the copies there stay.

        Args:
            refs: Which checkpoints. None: all of the run.
            dry_run: Only report what would be done.
            on_progress: Called with bytes of packs done and in total, from any thread.

        Raises:
            NotFoundError: There is no such checkpoint.
            UnreachableError: One is in a tier that cannot be reached.
            CorruptError: A pack in a tier is not what was pushed. Checkpoints that need it are unchanged, all others
                are local now; ``checkpoints`` names them, ``report`` lists all.
            CapacityError: The disk is full. What was copied so far is local.
            BackendError: The server does not answer.
        """
        from ckstore.tiers.pull import pull

        chosen = [refs] if isinstance(refs, (str, int)) else refs
        with self._lock:
            self._check_open()
            return pull(self._repository, chosen, dry_run=dry_run, on_progress=on_progress)

    def mirror(
        self, address: str | Path, *, read_back: bool = False, dry_run: bool = False,
        on_progress: Progress | None = None,
    ) -> MirrorReport:  # fmt: skip
        """Keep a second copy of the store, all runs, at another place. The copy is a store and can be opened there.

        Nothing here changes, and nothing there is deleted. ``ckstore.open(address).verify()`` checks the copy.

        Args:
            address: Where: ``s3://bucket/prefix`` (gs, az), or another folder.
            read_back: Read every copied pack back and compare it.
            dry_run: Only report what would be copied.
            on_progress: Called with checkpoints done and in total.

        Raises:
            UsageError: There is another store at the address.
            ConflictError: Another process commits there.
            CorruptError: A local pack is damaged or missing, or one there is not ours. Checkpoints that need it were
                not copied, all others were; ``checkpoints`` names them, ``report`` lists all.
            UnreachableError: Some checkpoints are in a tier that cannot be reached. All others were copied.
            BackendError: The server does not answer, or refuses.
        """
        from ckstore.tiers.mirror import mirror

        with self._lock:
            self._check_open()
            return mirror(self._repository, address, read_back=read_back, dry_run=dry_run, on_progress=on_progress)

    def gc_tier(
        self, tier: str | None = None, *, min_age: str | float = "24h", repack_nbytes_max: int | None = None,
        waste_max: float | None = None, dry_run: bool = False, clear_lists: bool = False,
    ) -> TierGc:  # fmt: skip
        """Delete from a tier what was deleted from this store and has left its trash, and unreferenced packs.

        Partly needed packs in the tier are rewritten: the needed bytes are read and written again, and a later
        collection deletes the old pack once the trash here no longer names it. Only the store that owns the tier may do
        this. What is deleted there cannot be brought back.

        Args:
            tier: Its name. None: the only tier.
            min_age: Keep packs that no manifest names until they are this old: ``"24h"``, or seconds.
            repack_nbytes_max: Bytes that may be written to rewrite packs; 0: none is rewritten. Default: 4 GiB.
            waste_max: Share of unneeded bytes above which a pack is rewritten. Default: a quarter.
            dry_run: Only report what would be done.
            clear_lists: Remove deletion lists left there by crashed collectors. Use only if no other collection is
                running on the tier. Lists of dead processes of this machine, and old ones, are removed anyway.

        Raises:
            LockHeldError: Another collection is running in the store.
            BackendError: The server does not answer, or refuses.
        """
        from ckstore.ops.gc.plan import GcLimits
        from ckstore.tiers.gc import collect_tier

        chosen = {"repack_nbytes_max": repack_nbytes_max, "waste_max": waste_max}
        given: dict[str, Any] = {field: value for field, value in chosen.items() if value is not None}
        limits = GcLimits(min_age_seconds=seconds_of(min_age), **given)
        with self._lock:
            self._check_open()
            tiers = self._repository.tiers
            name = tier or tiers.name_for(tiers.choose(None, None))
            return collect_tier(self._repository, name, limits, dry_run=dry_run, clear_lists=clear_lists)

    def forget_tier(self, tier: str) -> str:
        """Remove a tier from the configuration, and return its address. Files in the tier are not touched.

        Raises:
            NotFoundError: There is no such tier.
            UsageError: A checkpoint, or a manifest in the trash, needs the tier.
            ConflictError: A manifest cannot be read, and may name the tier.
        """
        from ckstore.tiers.copy import forget_tier

        with self._lock:
            self._check_open()
            return forget_tier(self._repository, tier)

    def adopt(self, *, is_original: bool) -> dict[str, str]:
        """Declare whether this folder, a copy of a store with tiers, is the original or a new store.

        Until then the copy can be read and committed to, but it does not push to the tiers, collect there, or free
        local packs whose copies are there. The same holds for a store that was restored from a backup, or whose inodes
        have changed, as they do on some file systems at each mount.

        Args:
            is_original: True: it is the original or replaces it, and owns the tiers from now on. Files in the tiers
                that it does not know are kept. False: it is a new store that owns no tier and may push elsewhere. Pull
                what it needs from the old tiers, because their owner may delete it.

        Returns:
            The tiers that it owns, with their addresses.

        Raises:
            UnreachableError: A tier cannot be reached; nothing was changed.
        """
        from ckstore.store.tier_checks import adopt

        with self._lock:
            self._check_open()
            return adopt(self._repository, is_original=is_original)

    # Import

    def import_from(
        self, source: str | os.PathLike[str], *, step: SupportsIndex | None = None, numbered: bool = False,
        exclude: Sequence[str] = (), skip_leaf: Sequence[str] = (), policy: Policy | None = None,
        dry_run: bool = False, on_progress: Progress | None = None,
    ) -> ImportReport:  # fmt: skip
        """Commit checkpoints that other tools have saved, in the order of their steps. Existing steps are skipped.

        Reads files of ``torch.save`` and safetensors, folders of them (Hugging Face Trainer, DeepSpeed, nanoGPT,
        accelerate, Lightning), and folders of ``torch.distributed.checkpoint``. Files of torch are loaded with
        ``weights_only=True``, in a child process. Of objects that only code can make, such as configs, the plain fields
        are taken; an object that holds tensors is refused. The report lists what may hold state and was not imported;
        ``is_partial`` is then True. The time of a checkpoint is that of its newest file.

        Args:
            source: A file, the folder of one checkpoint, or a folder of checkpoints.
            step: The step of a single checkpoint. None: it is taken from names and contents.
            numbered: Number the checkpoints 0, 1, 2 in the order of their names.
            exclude: Globs of paths below the source to leave out. ``*`` stays within a name, ``**`` crosses folders.
            skip_leaf: Globs over dotted paths of leaves to leave out; ``*`` crosses dots.
            policy: How to store them; None: the policy of the store.
            dry_run: Only report what would be done.
            on_progress: Called with bytes of files done and bytes in total.

        Raises:
            NotFoundError: There is no checkpoint at the source.
            UsageError: A step is unknown, belongs to two different checkpoints, or is smaller than one of the run.
            CorruptError: A file cannot be read. What was committed before stays; a second import continues.
            UnsupportedError: A file holds what only code can make, or torch is missing or too old.
        """
        from ckstore.ops.interop.run import ImportRequest, run_import

        wanted = ImportRequest.of(source, None if step is None else check_step(step), numbered, exclude, skip_leaf)
        with self._lock:
            self._check_open()
            self._wait_for_background()
            if self._journal is not None:
                self._journal.leave_chain("checkpoints were imported")
            existing: dict[int, Info] = {}
            for header in headers_newest_first(self._repository.manifests):
                existing.setdefault(header.step, Info.of(header))

            def commit_one(captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
                return self._commit_imported(captured, step, metrics, policy or self._policy, time_ns)

            return run_import(wanted, self.run, existing, commit_one, dry_run=dry_run, on_progress=on_progress)

    def _commit_imported(
        self, captured: Captured, step: int, metrics: Mapping[str, float], policy: Policy, time_ns: int
    ) -> Receipt:
        from ckstore.ops.commit import CommitRequest, commit_checkpoint
        from ckstore.results import Stopwatch

        self._reclaim_lease()
        self._repository.wait_for_orphan()
        request = CommitRequest(
            captured=captured,
            step=step,
            policy=policy,
            parent=self._parent,
            metrics=check_metrics(metrics),
            bases=self._base_cache(),
            time_ns=time_ns,
        )
        receipt = commit_checkpoint(self._repository, request, Stopwatch(self._repository.clock)).receipt
        self._continue_from(receipt.seq, None)
        return receipt

    # Close

    def close(self) -> None:
        """Wait for background commits, end the saver, and release the lease and all files. Repeated calls do nothing.

        Raises:
            CkstoreError: A background commit failed, and its result was never requested.
        """
        with self._lock:
            background, self._background = self._background, None
            journal, self._journal = self._journal, None
            try:
                for part in (journal, background):
                    if part is not None:
                        part.close()
            finally:
                self._note_durable(background)
                # It may be as large as the state, and on a device.
                self._bases = None
                self._is_closed = True
                after, self._after_commit = self._after_commit, []
                listening, self._last_commits = self._last_commits, []
                # The stack runs in reverse order: release the store, stop child work, then remove signal handlers,
                # the newest first. A signal that arrived meanwhile ends the process at that last step.
                with contextlib.ExitStack() as stack:
                    for last in filter(None, (each() for each in listening)):
                        stack.callback(last.close)
                    for close in [work.close for work in after] + ([self._job.close] if self._job else []):
                        stack.callback(close)
                    stack.callback(self._finalizer)
            if journal is not None:
                journal.raise_unreported(call_did_nothing=False)
            if background is not None:
                background.raise_unreported(call_did_nothing=False)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The error ends the run, not the signal.
            for last in filter(None, (each() for each in self._last_commits)):
                last.leave(error)
        # The first error is raised. Errors of background commits were logged when they happened.
        with contextlib.suppress(*(() if kind is None else (CkstoreError,))):
            self.close()

    # Helpers of the methods above; all are called under the lock

    @property
    def _is_first_rank(self) -> bool:
        return self._job is None or self._job.is_first

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the store is closed", where=self._repository.backend.root, todo="open it again")
        for part in (self._journal, self._background):
            if part is not None:
                part.leave_to_parent_after_fork()

    def _info(self, header: ManifestHeader, *, warnings: Sequence[str] = ()) -> Info:
        tags, tiers = self._repository.tags.names_of(header.seq), tiers_of(self._repository.manifests, header)
        info = Info.of(header, tags=tags, warnings=warnings, tiers=tiers)
        return info_with_form(self._repository.manifests, header, info)

    def _manifest(self, ref: Reference) -> Manifest:
        self._check_open()
        points.require_checkpoint(self._repository, ref, takes_latest=True)
        name = resolve(self._repository, ref)
        try:
            return self._repository.manifests.load(name)
        except FileNotFoundError:
            raise NotFoundError(
                f"seq {name.seq} was deleted or replaced while it was read",
                where=self._repository.backend.root,
                todo="list the checkpoints (`ckstore ls`), and repeat the call",
            ) from None

    def _trash_seconds_or(self, trash_for: str | float | None) -> float:
        """Return how long the trash is kept: as given here, else to ``open``, else as stored, else the default."""
        from ckstore.ops.gc.run import TRASH_SECONDS
        from ckstore.ops.stored_policies import stored_trash_seconds

        given = self._trash_seconds if trash_for is None else seconds_of(trash_for)
        if given is not None:
            return given
        stored = stored_trash_seconds(self._repository)
        return TRASH_SECONDS if stored is None else stored

    def _collect_after(self, policy: Retention, every: int) -> None:
        """Run a collection of this run in a child process after every so many of its commits."""
        from ckstore.ops.scheduled import AutomaticGc

        self._after_commit.append(AutomaticGc(self._repository, policy, every, trash_seconds=self._trash_seconds))
        # A commit that finds the disk full applies the rules itself.
        self._repository.retention = policy.to_config()

    def _demote_after(self, wanted: DemotePolicy | Literal["stored"], every: int) -> None:
        """Demote old checkpoints of this run in a child process after every so many of its commits."""
        from ckstore.ops.scheduled import AutomaticDemotion

        self._after_commit.append(AutomaticDemotion(self._repository, wanted, self._policy, every))

    def _note_commit(self, seq: int) -> None:
        """Start the automatic work that is due after this commit; never raises and never waits."""
        for work in self._after_commit if self._is_first_rank else ():
            work.after_commit(seq)

    def _committed(self, state: Any, step: int, metrics: Mapping[str, float], policy: Policy) -> Committed:
        """Commit a state in this process."""
        from ckstore.ops.commit import CommitRequest, Committed, commit_checkpoint
        from ckstore.results import Stopwatch
        from ckstore.state.capture_cache import CaptureCache

        if self._job is not None:
            return Committed(self._job.commit(state, step, policy, self._parent, metrics, self._trainer_side), None)
        self._repository.wait_for_orphan()
        watch = Stopwatch(self._repository.clock)
        with watch("stage"):
            self._captures = self._captures or CaptureCache()
            captured = self._captures.capture_for_commit(state)
        bases, fingerprint = self._base_cache(), self._fingerprint
        request = CommitRequest(captured, step, policy, self._parent, metrics, bases, fingerprint)
        return commit_checkpoint(self._repository, request, watch)

    def _last_policy(self, policy: Policy | None) -> Policy:
        """Return the policy of a last commit: once it is staged, the saver publishes even if this process is killed."""
        check_policy(policy)
        # So neither wait before staging nor skip. Ranks wait, because each could replace another commit.
        return dataclasses.replace(policy or self._policy, on_busy="replace" if self._job is None else "wait")

    def _restored_point(
        self, ref: Reference | None, request: RestoreRequest, how: ReplayRequest
    ) -> RestoredPoint | None:
        """Restore a point of the journal; None: the reference names a checkpoint."""
        from ckstore.journal.history import restore_newest_or_step

        if self._job is not None:
            return None
        journal = self._journal
        if journal is not None:
            journal.release()
        # A state of new objects has optimizers of its own.
        optimizers = None if journal is None or request.into is None else journal.recorder.optimizers
        replay = dataclasses.replace(how, optimizers=optimizers)
        with contextlib.nullcontext() if journal is None else journal.recorder.paused():
            point = restore_newest_or_step(self._repository, self._policy, ref, request, replay)
        if point is not None:
            keyframe = self._info(point.keyframe.header, warnings=point.warnings)
            self._restored = points.info_of_restored(keyframe, point.step)
            self._use_as_base(point.keyframe)
            self._continue_from(point.keyframe.header.seq, None)
            if journal is not None and request.into is not None:
                journal.continue_from(point)
        return point

    def _restore(self, ref: Reference | None, request: RestoreRequest, *, fallback: bool) -> Restored:
        """Restore a checkpoint; if it is damaged, raise an error that names another one, or restore that one."""
        from ckstore.restore.restore import restore_reference

        if request.train_until is not None and ref is not None:
            from ckstore.ops.replay_form import restore_replayed

            with contextlib.nullcontext() if self._journal is None else self._journal.recorder.paused():
                trained = restore_replayed(self._repository, self._policy, ref, request, request.train_until)
            if trained is not None:
                return trained
        if self._job is not None:
            return self._job.restore(self._policy, ref, request, fallback=fallback)
        started: list[int] = []
        try:
            return restore_reference(self._repository, self._policy, ref, request, started)
        except (CorruptError, BackendError) as error:
            from ckstore.ops.fallback import restore_older, with_recovery_advice

            if not is_damage(error):
                raise
            damaged = started[-1] if started else None
            if not fallback:
                raise with_recovery_advice(self._repository, self._policy, damaged, error) from error
            return restore_older(self._repository, self._policy, damaged, error, request)

    # What the next commit continues from

    def _base_cache(self) -> BaseCache:
        from ckstore.delta.base_cache import BaseCache

        if self._bases is None:
            self._bases = BaseCache()
        return self._bases

    def _use_as_base(self, manifest: Manifest) -> None:
        """Code the next commit against this checkpoint where that is smaller."""
        self._repository.chunk_index.pin(manifest)
        (self._base_cache() if self._job is None else self._job.bases).follow(manifest)

    def _continue_from(self, seq: int, fingerprint: Fingerprint | None) -> None:
        """Make ``seq``, which this process has committed or restored, the parent of the next commit."""
        self._parent, self._fingerprint = seq, fingerprint
        if self._background is not None:
            self._background.set_parent(seq)
            self._published = None

    # Background commits

    def _trainer_side(self) -> TrainerSide:
        from ckstore.background.trainer import TrainerSide

        if self._background is None:
            self._background = TrainerSide(self, self._repository, self._parent, self._job)
        return self._background

    def _wait_for_background(self) -> None:
        """Wait for background commits, for methods that depend on which checkpoint is newest."""
        if self._journal is not None:
            self._journal.wait()
        if self._background is not None:
            self._background.wait()
            self._apply_results(self._background)

    def _reclaim_lease(self) -> None:
        """Wait for background commits and take the lease back from the saver, for methods that write the run.

        Raises:
            CkstoreError: A background commit failed, and its result was never requested.
        """
        if self._background is None:
            return
        self._background.reclaim_lease()
        self._apply_results(self._background)
        seq, self._published = self._published, None
        if seq is not None:
            self._rebase_on(seq)
        self._background.raise_unreported(call_did_nothing=True)

    def _rebase_on(self, seq: int) -> None:
        """Use the checkpoint that the saver published last as the base of the next commit in this process."""
        self._repository.prepare_run()
        self._repository.note_seq(seq)
        try:
            manifest = load_whole(self._repository, resolve(self._repository, f"seq:{seq}"))
        except CkstoreError as error:
            # It may have been deleted. Without a base the next commit is larger, but correct.
            _log.warning("seq %d cannot be followed: %s", seq, error)
            return
        self._use_as_base(manifest)

    def _apply_results(self, background: TrainerSide) -> None:
        """Take over what the saver has published since the previous call."""
        seq = background.take_published()
        if seq is not None:
            self._parent = self._published = seq
            self._fingerprint = None
        self._note_durable(background)

    def _note_durable(self, background: TrainerSide | None) -> None:
        """Start the automatic work that is due after commits that became durable in the background."""
        seq = None if background is None else background.take_durable()
        if seq is not None:
            self._note_commit(seq)
