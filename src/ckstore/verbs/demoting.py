"""The verbs of a handle for checkpoints that age: store them anew with a loss, and look at how two differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckstore.config import DemotePolicy
from ckstore.store.refs import Reference
from ckstore.verbs.background import Background

if TYPE_CHECKING:
    from ckstore.ops.demote import DemoteReport
    from ckstore.ops.inspect.diff import Diff
    from ckstore.ops.scheduled import AutomaticDemotion


class Demoting(Background):
    """A run of a store whose old checkpoints may become smaller."""

    _aging: AutomaticDemotion | None = None

    def demote(
        self,
        *refs: Reference,
        policy: DemotePolicy | Mapping[str, Any] | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DemoteReport:
        """Store old checkpoints anew with a loss; their steps, numbers and metrics stay, their ids do not.

        The newest checkpoints, every so many of the others, and all that carry a tag stay exact. Each is replaced by
        itself: whatever ends this halfway, every checkpoint can be restored. Training, readers and collections may go
        on meanwhile, except where the newest is named or the store lies in a bucket. The disk space of what is stored
        no more is freed when the store is collected.

        Args:
            *refs: Demote these and no others, the newest one too; without any, those that the policy says.
            policy: Which stay exact, and how the others are stored: a ``DemotePolicy`` or its rules; None: as is stored
                with the store, and without that as ``DemotePolicy()`` says.
            dry_run: Only say what would be done.
            on_progress: Called with checkpoints done and checkpoints to be done.

        Raises:
            NotFoundError: One that was named is not there.
            ConflictError: One that was named carries a tag; or the newest was named, or the store lies in a bucket, and
                another live process writes this run.
            UsageError: The policy has a mistake.
            CorruptError: A checkpoint of the run is damaged.
            CapacityError: The disk is full; every checkpoint is in its old or its new form.
        """
        from ckstore.ops.demote import demote, names_newest
        from ckstore.ops.stored_policies import demotion_given, stored_demotion

        wanted = demotion_given(policy)
        with self._lock:
            self._check_open()
            self._settle()
            if not dry_run:
                if names_newest(self._repository, refs):
                    self._reclaim_lease()
                # What the next commit is coded against is looked up again.
                self._bases = None
            return demote(
                self._repository,
                wanted or stored_demotion(self._repository) or DemotePolicy(),
                self._policy,
                refs=refs,
                dry_run=dry_run,
                on_progress=on_progress,
            )

    @property
    def demotion(self) -> DemotePolicy | None:
        """The policy of demotion that is stored with the store, for all of its runs; None where there is none."""
        from ckstore.ops.stored_policies import stored_demotion

        with self._lock:
            self._check_open()
            return stored_demotion(self._repository)

    def set_demotion(self, policy: DemotePolicy | Mapping[str, Any] | None) -> None:
        """Store a policy with the store, for demotions that are given none; None removes it.

        Raises:
            UsageError: It has a rule that is none, or a value that cannot be.
        """
        from ckstore.ops.stored_policies import demotion_given, set_stored_demotion

        wanted = demotion_given(policy)
        with self._lock:
            self._check_open()
            set_stored_demotion(self._repository, wanted)

    def close(self) -> None:
        """Let go of a demotion that still runs, which ends by itself, and of everything else."""
        with self._lock:
            aging, self._aging = self._aging, None
            try:
                super().close()
            finally:
                if aging is not None:
                    aging.close()

    # For the verbs that commit

    def _demote_after(self, wanted: DemotePolicy | Literal["stored"], every: int) -> None:
        """Demote what has aged after every so many commits of this run, in a process of its own."""
        from ckstore.ops.scheduled import AutomaticDemotion

        self._aging = AutomaticDemotion(self._repository, wanted, self._policy, every)

    def _committed(self, seq: int) -> None:
        """Take note of acknowledged commits, of which ``seq`` is the newest; never raises and never waits."""
        super()._committed(seq)
        if self._aging is not None:
            self._aging.after_commit(seq)

    def diff(
        self,
        first: Reference,
        second: Reference = "latest",
        *,
        only: str | Sequence[str] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Diff:
        """Return how the second checkpoint differs from the first, tensor by tensor; both are read piece by piece.

        Args:
            first: What is compared with.
            second: What is compared.
            only: Globs over dotted paths; None: everything.
            on_progress: Called now and then with plain bytes compared and plain bytes in all.

        Raises:
            NotFoundError: There is no such checkpoint, or nothing matches ``only``.
            CorruptError: Something of them is damaged.
        """
        from ckstore.ops.inspect.diff import diff_of

        with self._lock:
            self._check_open()
            self._settle()
            manifests = self._manifest(first), self._manifest(second)
            infos = self._info(manifests[0].header), self._info(manifests[1].header)
            return diff_of(self._repository, manifests, infos, only=only, on_progress=on_progress)


def demotion_asked(demotion: object) -> DemotePolicy | Literal["stored"] | None:
    """Return what ``open`` is to do after commits; UsageError for what is no policy."""
    if demotion is None or demotion == "stored":
        return demotion
    from ckstore.ops.stored_policies import demotion_given

    return demotion_given(demotion)
