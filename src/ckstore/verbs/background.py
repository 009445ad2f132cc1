"""The verbs of commits in the background, and of the guard that lets training go on while a state is copied.

Invariants:
- Before ``commit_async`` returns, everything was copied but what an attached optimizer owns.
- One process at a time writes the run: this one lends the lease to the saver, and takes it back when it commits itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from ckstore.config import Policy, check_metrics, check_policy, check_step, check_tags
from ckstore.errors import CkstoreError
from ckstore.store.refs import load_whole, resolve
from ckstore.store.repository import Repository
from ckstore.verbs.advising import Advising

if TYPE_CHECKING:
    from ckstore.background.commits import BackgroundCommits
    from ckstore.background.optimizer_guard import OptimizerGuard
    from ckstore.background.pending import Pending
    from ckstore.commit.commit import Fingerprint
    from ckstore.delta.base_cache import BaseCache
    from ckstore.results import Receipt
    from ckstore.state.capture import Captured
    from ckstore.state.capture_cache import CaptureCache
    from ckstore.state.tensors import LeafAdapter


_log = logging.getLogger("ckstore")


class Background(Advising):
    """A run of a store, with commits in the background."""

    def __init__(self, repository: Repository, policy: Policy) -> None:
        super().__init__(repository, policy)
        self._parent: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._bases: BaseCache | None = None
        self._background: BackgroundCommits | None = None
        self._guarded: OptimizerGuard | None = None
        self._recapture: CaptureCache | None = None
        self._published: int | None = None
        self._durable: deque[Receipt | None] = deque()
        self._owner = os.getpid()
        self._inherited: object = None
        self._guards_open = 0

    def commit_async(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Pending:
        """Copy a state, and store it in the background.

        When this returns, the state may be changed, but for what an optimizer owns that was given to ``attach``
        or ``guard``: that is copied meanwhile, and guarded. When ``Pending.wait_staged`` returns True, the checkpoint
        is published even if this process dies; when ``Pending.result`` returns, it is durable. The first one waits
        while the saver of a trainer that has died still publishes, as ``restore`` does, and says so.

        Args:
            state: As for ``commit``.
            step: The trainer's step, not negative.
            metrics: Numbers to find this checkpoint by.
            tags: Names for it.
            policy: How to store it, and what to do while an earlier one is still being written.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            CapacityError: There is no memory to copy the state to.
            SaverError: No saver can be started, or it died meanwhile.
            UsageError: An argument is wrong, the store is closed, or lies in a bucket: use ``commit`` there.
            CkstoreError: An earlier commit failed in the background, and nobody has asked for its result: this call has
                done nothing, and works when it is repeated.
        """
        from ckstore.background.commits import AsyncRequest

        number = check_step(step)
        checked_metrics, checked_tags = check_metrics(metrics), check_tags(tags)
        check_policy(policy)
        with self._lock:
            self._check_open()
            begun = self._repository.clock.monotonic()
            (background := self._background_commits()).raise_unreported(call_did_nothing=True)
            order = AsyncRequest(
                captured=self._captured(state),
                step=number,
                metrics=checked_metrics,
                tags=checked_tags,
                policy=policy or self._policy,
                guarded=self._spans(),
            )
            with self._costs.trying():
                pending = background.submit(order)
            try:
                pending.stall_seconds += self._repository.clock.monotonic() - begun
                self._costs.watch(pending)
                self._tell_durable()
                durable = self._durable
                pending.when_done(lambda done: durable.append(done.receipt_or_none()))
                return pending
            except BaseException as error:
                background.give_up(pending, error)
                raise

    def prewarm(self, state: Any, *, policy: Policy | None = None) -> None:
        """Start the saver, and take and map what memory a state needs in both processes, before the first commit.

        Waits while the saver of a trainer that has died still publishes, as a first ``commit_async`` does.

        Args:
            state: What will be committed; it is looked at and not stored.
            policy: As it will be committed.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            CapacityError: There is no memory to copy the state to.
            SaverError: No saver can be started.
            UsageError: The store is closed, or lies in a bucket.
        """
        with self._lock:
            self._check_open()
            self._background_commits().prewarm(self._captured(state), self._spans(), policy or self._policy)

    def attach(self, optimizer: Any) -> None:
        """Let what an optimizer owns be copied while training goes on; its step waits for what is left.

        What it owns are its parameters and the tensors of its state. It is trusted that only its step changes them:
        whoever changes them otherwise, after ``commit_async``, calls ``Pending.wait_staged`` first, or does it inside
        of ``guard``: averaged weights that are swapped in for an evaluation, an ``Embedding`` with ``max_norm``. Who
        does not fails the commit where it is seen. In host memory that is: every change that torch counts; of what it
        does not count (through ``data``, numpy or a fused operation) whole tensors, and rows of matrices as long as
        all of them together have at most 32,768 rows; of more rows a sample. Single elements may be missed, and on
        devices all that is not counted. ``debug_guard`` of the policy finds every change, and costs a pass over the
        state before the call returns.

        All else is copied before ``commit_async`` returns: buffers, whatever no attached optimizer owns, and codebooks
        of up to 16 MiB by their names (``codebook``, ``quantize``, ``vq``), since those restart entries in a forward
        pass. Nor may memory move meanwhile, as by ``share_memory_``: share first.

        What an optimizer with ``capturable`` owns is copied before ``commit_async`` returns: a CUDA graph may replay
        its steps, which call no hooks. Before a graph is captured, call ``Pending.wait_staged``.

        A step waits before its closure and its other hooks; a ``commit_async`` in a closure, or in a hook that torch
        calls before a step, copies everything before it returns.

        Raises:
            UsageError: It is no optimizer of torch, or cannot tell when it steps.
        """
        from ckstore.background.optimizer_guard import OptimizerGuard

        with self._lock:
            self._check_open()
            if self._guarded is None:
                self._guarded = OptimizerGuard(self._background_commits().guard)
            self._guarded.attach(optimizer)

    @contextlib.contextmanager
    def guard(self, optimizer: Any) -> Iterator[None]:
        """Change what an optimizer owns inside of this; the optimizer is attached too.

        Entering waits until the state of the last ``commit_async`` was copied, on devices too: what is told to one
        inside may be on another stream. A ``commit_async`` inside copies everything before it returns, whatever is
        attached.

        Raises:
            UsageError: As for ``attach``.
        """
        self.attach(optimizer)
        with self._lock:
            self._guards_open += 1
        try:
            self._background_commits().guard(is_host_waiting=True)
            yield
        finally:
            with self._lock:
                self._guards_open -= 1

    def wait(self) -> None:
        """Wait until all commits in the background have ended; as ``Pending.result`` without a limit does.

        Raises:
            CkstoreError: One failed, and nobody has asked for its result.
        """
        with self._lock:
            self._check_open()
            if self._background is not None:
                self._background.wait_all()
                self._apply_results()
                self._background.raise_unreported(call_did_nothing=False)

    @property
    def arena_nbytes(self) -> int:
        """Shared memory that is held for states on their way, in bytes."""
        return 0 if self._background is None else self._background.arena_nbytes

    def close(self) -> None:
        """Wait for what is pending, end the saver, and let go of everything; repeated calls do nothing.

        Raises:
            CkstoreError: A commit failed in the background, and nobody has asked for its result.
        """
        with self._lock:
            background, self._background = self._background, None
            guarded, self._guarded = self._guarded, None
            try:
                if background is not None:
                    background.close()
                # Not before all is copied; who is interrupted before that leaves the guards where they are.
                if guarded is not None:
                    guarded.release()
            finally:
                self._tell_durable()
                # They may be as large as the state, and lie on devices.
                self._bases = None
                super().close()
            if background is not None:
                background.raise_unreported(call_did_nothing=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave_signals(error)
        # What went wrong first is raised; what a commit met was logged when it did.
        with contextlib.suppress(*(() if kind is None else (CkstoreError,))):
            self.close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._owner != os.getpid():
            # A forked child: the saver, and the arena that is mapped in its parent only, are the parent's affair. They
            # are kept unused, since letting go of them would unmap what the child may have put there.
            self._owner = os.getpid()
            self._inherited = self._background, self._guarded
            self._background = self._guarded = None

    # For the verbs that do not go into the background

    def _settle(self) -> None:
        """Wait for the commits in the background, and know what they made: for verbs that look at the newest."""
        if self._background is not None:
            self._background.wait_all()
            self._apply_results()

    def _reclaim_lease(self) -> None:
        """Take the run back from the saver, for verbs that write it in this process.

        Raises:
            CkstoreError: A commit failed in the background, and nobody has asked for its result.
        """
        if self._background is not None:
            self._background.release()
            self._apply_results()
            seq, self._published = self._published, None
            if seq is not None:
                self._follow(seq)
            self._background.raise_unreported(call_did_nothing=True)

    def _follow(self, seq: int) -> None:
        """Take what the saver has published last as what the next commit of this process follows."""
        self._repository.prepare_run()
        self._repository.note_seq(seq)
        try:
            manifest = load_whole(self._repository, resolve(self._repository, f"seq:{seq}"))
        except CkstoreError as error:
            # It may have been dropped meanwhile; without a base the next commit is larger, and no less right.
            _log.warning("seq %d cannot be followed: %s", seq, error)
            return
        self._repository.chunk_index.pin(manifest)
        self._known_bases().follow(manifest)

    def _update_parent(self) -> None:
        """Let the next background commit follow what this process has restored or committed."""
        if self._background is not None:
            self._background.parent = self._parent
            self._published = None

    def _apply_results(self) -> None:
        """Learn what the saver has published since the last call."""
        assert self._background is not None
        seq = self._background.pop_published_seq()
        if seq is not None:
            self._parent = self._published = seq
            self._fingerprint = None
        self._tell_durable()

    def _tell_durable(self) -> None:
        """Take note of the commits that have become durable in the background."""
        seqs = []
        while self._durable:
            receipt = self._durable.popleft()
            if receipt is not None:
                seqs.append(receipt.seq)
        if seqs:
            self._committed(max(seqs))

    def _known_bases(self) -> BaseCache:
        from ckstore.delta.base_cache import BaseCache

        if self._bases is None:
            self._bases = BaseCache()
        return self._bases

    def _background_commits(self) -> BackgroundCommits:
        from ckstore.background.commits import BackgroundCommits

        if self._background is None:
            self._background = BackgroundCommits(self._repository)
            self._background.parent = self._parent
            # At exit it is waited for; a handle that is forgotten must not stop whoever collects it.
            weakref.finalize(self, _abandon_garbage, self._background).atexit = False
        return self._background

    def _spans(self) -> Sequence[tuple[int, int]]:
        """Return the memory that may be copied after ``commit_async`` has returned."""
        return () if self._guarded is None or self._guards_open else self._guarded.spans()

    def _captured(self, state: Any) -> Captured:
        from ckstore.state.capture_cache import CaptureCache

        if self._recapture is None:
            self._recapture = CaptureCache()
        return self._recapture.capture(state, loaded_adapters())


def _abandon_garbage(background: BackgroundCommits) -> None:
    """Abandon what a handle had that is garbage: what a finalizer raises, Ctrl-C too, is raised nowhere."""
    try:
        background.abandon()
    except BaseException:
        background.abandon()
        raise


def loaded_adapters() -> list[LeafAdapter]:
    """Return the tensor libraries that are loaded."""
    if "torch" not in sys.modules:
        return []
    from ckstore.state.torch_adapter import TorchAdapter

    return [TorchAdapter()]
