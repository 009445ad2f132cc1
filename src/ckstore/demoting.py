"""The verbs of a handle for checkpoints that age: store them anew with a loss, and look at how two differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckstore.background import Background
from ckstore.config import DemotePolicy
from ckstore.store.references import Reference

if TYPE_CHECKING:
    from ckstore.demote_plan import DemoteReport
    from ckstore.diff import Diff


class Demoting(Background):
    """A run of a store whose old checkpoints may become smaller."""

    def demote(
        self,
        *refs: Reference,
        policy: DemotePolicy | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DemoteReport:
        """Store old checkpoints anew with a loss; their steps, numbers and metrics stay, their ids do not.

        The newest checkpoints, every so many of the others, and all that carry a tag stay exact. Each is replaced by
        itself: whatever ends this halfway, every checkpoint can be restored. The disk space of what is stored no more
        is freed when the store is collected.

        Args:
            *refs: Demote these and no others, the newest one too; without any, those that the policy says.
            policy: Which stay exact, and how the others are stored.
            dry_run: Only say what would be done.
            on_progress: Called with checkpoints done and checkpoints to be done.

        Raises:
            NotFoundError: One that was named is not there.
            ConflictError: One that was named carries a tag, or another live process writes this run.
            CorruptError: A checkpoint of the run is damaged.
            CapacityError: The disk is full; every checkpoint is in its old or its new form.
        """
        from ckstore.demote import demote

        with self._lock:
            self._check_open()
            self._settle()
            if not dry_run:
                self._come_home()
                # What the next commit is coded against is looked up again.
                self._bases = None
            return demote(
                self._parts,
                policy or DemotePolicy(),
                self._policy,
                refs=refs,
                dry_run=dry_run,
                on_progress=on_progress,
            )

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
        from ckstore.diff import diff_of

        with self._lock:
            self._check_open()
            self._settle()
            manifests = self._manifest(first), self._manifest(second)
            infos = self._info(manifests[0].header), self._info(manifests[1].header)
            return diff_of(self._parts, manifests, infos, only=only, on_progress=on_progress)
