"""The verb that brings checkpoints of other tools into the history of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from ckstore.config import Policy, check_metrics, check_step
from ckstore.store.refs import headers_newest_first
from ckstore.verbs.background import Background

if TYPE_CHECKING:
    from ckstore.ops.interop.run import ImportReport, ImportRequest
    from ckstore.results import Info, Receipt
    from ckstore.state.capture import Captured


def plan_import(
    source: str | os.PathLike[str],
    *,
    run: str = "main",
    step: SupportsIndex | None = None,
    numbered: bool = False,
    exclude: Sequence[str] = (),
    skip_leaf: Sequence[str] = (),
) -> ImportReport:
    """Say what an import into a store that does not exist yet would do; see ``Importing.import_from``."""
    from ckstore.ops.interop.run import run_import

    def refuse(captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
        raise AssertionError("a plan commits nothing")

    return run_import(_request(source, step, numbered, exclude, skip_leaf), run, {}, refuse, dry_run=True)


def _request(
    source: str | os.PathLike[str],
    step: SupportsIndex | None,
    numbered: bool,
    exclude: Sequence[str],
    skip_leaf: Sequence[str],
) -> ImportRequest:
    from ckstore.ops.interop.run import ImportRequest

    number = None if step is None else check_step(step)
    return ImportRequest(Path(source), number, numbered, tuple(exclude), tuple(skip_leaf))


class Importing(Background):
    """A run of a store, into which checkpoints of other tools can be imported."""

    def import_from(
        self,
        source: str | os.PathLike[str],
        *,
        step: SupportsIndex | None = None,
        numbered: bool = False,
        exclude: Sequence[str] = (),
        skip_leaf: Sequence[str] = (),
        policy: Policy | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ImportReport:
        """Commit what other tools have saved, in the order of the steps; steps that the run holds are skipped.

        Taken are files of ``torch.save`` and safetensors, folders of such (transformers' Trainer, DeepSpeed, nanoGPT,
        accelerate, Lightning), and folders of ``torch.distributed.checkpoint``. Files of torch are loaded with
        ``weights_only=True``, in a process of their own. Of objects that only code can make, such as configs, the plain
        fields are taken; an object that holds tensors is refused. What may hold a state and is not imported is listed
        in the report, whose ``is_partial`` is then True. The time of a checkpoint is that of its newest file.

        Args:
            source: A file, a checkpoint's folder, or a folder of checkpoints.
            step: The step of a single one; it is found in names and contents otherwise.
            numbered: Give steps 0, 1, 2 in the order of names.
            exclude: Globs of paths below the source to leave out; ``*`` stays within a name, ``**`` crosses folders.
            skip_leaf: Globs over dotted paths of leaves to leave out; ``*`` crosses dots.
            policy: How to store them; the store's policy otherwise.
            dry_run: Only say what would be done.
            on_progress: Called with bytes of files done and bytes in all.

        Raises:
            NotFoundError: There is no checkpoint.
            UsageError: A step cannot be told, or lies before what the run holds.
            CorruptError: A file cannot be read; what was committed before stays, and a second import goes on.
            UnsupportedError: A file holds what only code can make, or torch is missing or too old.
        """
        from ckstore.ops.interop.run import run_import
        from ckstore.results import Info

        wanted = _request(source, step, numbered, exclude, skip_leaf)
        with self._lock:
            self._check_open()
            self._settle()
            there: dict[int, Info] = {}
            for header in headers_newest_first(self._repository.manifests):
                there.setdefault(header.step, Info.of(header))

            def commit_one(captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
                return self._commit_captured(captured, step, metrics, policy or self._policy, time_ns)

            return run_import(wanted, self.run, there, commit_one, dry_run=dry_run, on_progress=on_progress)

    def _commit_captured(
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
            bases=self._known_bases(),
            time_ns=time_ns,
        )
        committed = commit_checkpoint(self._repository, request, Stopwatch(self._repository.clock))
        self._parent, self._fingerprint = committed.receipt.seq, None
        self._update_parent()
        return committed.receipt
