"""The verbs that say when to commit: how often in a run, and once more before its end."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from ckstore.config import check_policy
from ckstore.errors import UsageError
from ckstore.interval import Costs
from ckstore.store.repository import Repository
from ckstore.verbs.reading import Handle

if TYPE_CHECKING:
    from ckstore.config import Policy
    from ckstore.interval import Advice
    from ckstore.preemption import CommittingStore, LastCommit


class Advising(Handle):
    """A run of a store that knows what its commits cost."""

    def __init__(self, repository: Repository, policy: Policy) -> None:
        super().__init__(repository, policy)
        self._costs = Costs(repository.clock)
        self._last_commits: list[weakref.ref[LastCommit]] = []

    @property
    def costs(self) -> Costs:
        """What the last commits of this handle have cost."""
        return self._costs

    def advise(self, step_seconds: float, *, overhead: float = 0.03, failures_per_day: float | None = None) -> Advice:
        """Say how often to commit, from what the last commits of this handle have cost.

        ``ckstore.AutoInterval`` does this while training goes on, and measures steps too: what those lose that run
        while a commit is written counts only where one has followed this handle. The advice says where it does not.

        Args:
            step_seconds: How long a step takes.
            overhead: The share of the time that commits may take.
            failures_per_day: How often the trainer is expected to fail; then not more often than loses least.

        Raises:
            UsageError: No commit of this handle has become durable yet, so nothing was measured; or a number is none
                that this could be.
        """
        from ckstore.interval import advice_for

        measured = self._costs.measured()
        if measured is None:
            raise UsageError(
                "no commit of this handle has become durable yet, and nobody knows what one costs",
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
        """Commit once more before the end when a signal asks for it, as preemption does; call it on the main thread.

        A signal comes at any time, in the middle of ``optimizer.step`` too, where the state is torn. So it only leaves
        word, and ``check``, called after each step, commits. ::

            with store.commit_on_signal(lambda: state) as last:
                for step in range(start, steps):
                    train_one_step()
                    last.check(step)

        The last commit goes the way that the others went: through the saver where there is one, so that it is
        published even if this process is killed once it was staged; beside an earlier one that is being written, which
        takes memory for a second state, or after it where ``arena_nbytes_max`` forbids that. A commit of this very
        step is waited for instead: it gets the tags if it is durable in time, and keeps its metrics. Then the process
        ends as without this: by a handler of Python's that was there before, or SystemExit with 128 + the signal.
        No step within the deadline: nothing is committed, for a torn state is worse than an older one; the log says
        so, and the process goes on: the next ``check`` commits all the same, another signal ends it at once.

        Args:
            get_state: Returns the state, as for ``commit``; called by ``check`` only.
            signals: Which ones; SIGTERM otherwise.
            deadline_seconds: From the signal on: when whoever sent it kills. Slurm and Kubernetes give 30 s.
            then: ``"exit"`` as above; ``"return"``: ``check`` returns True, and the caller ends the run.
            metrics: Returns the metrics of the last commit.
            tags: Names for it.
            policy: How to store it; None: the store's. ``on_busy`` is ``"replace"`` in any case.

        Raises:
            UsageError: This is not the main thread, a signal cannot be taken, or a number is none that this could be.
        """
        from ckstore.preemption import LastCommit

        check_policy(policy)
        with self._lock:
            self._check_open()
            last = LastCommit(
                cast("CommittingStore", self),  # The verbs that commit are those of the classes below.
                get_state,
                signals=signals,
                deadline_seconds=deadline_seconds,
                then=then,
                metrics=metrics,
                tags=tags,
                # It neither waits before it is staged nor is left out: a saver publishes it even where this is killed.
                policy=dataclasses.replace(policy or self._policy, on_busy="replace"),
            )
            # Listening keeps it; one that was closed must not keep what its states are made of.
            self._last_commits = [each for each in self._last_commits if each()] + [weakref.ref(last)]
            return last

    def _leave_signals(self, error: BaseException) -> None:
        """Listen to no signal any more: what went wrong ends the run, and not the signal."""
        for each in self._last_commits:
            if (listener := each()) is not None:
                listener.leave(error)

    def close(self) -> None:
        """Listen to no signal any more, and let go of everything."""
        with self._lock:
            last, self._last_commits = self._last_commits, []
            super().close()
            # At last: a signal that came meanwhile ends the process here. The newest first: it was put over the others.
            with contextlib.ExitStack() as stack:
                for each in last:
                    if (listener := each()) is not None:
                        stack.callback(listener.close)
