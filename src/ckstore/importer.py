"""The verb that brings checkpoints of other tools into the history of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from ckstore.arguments import check_metrics, check_step
from ckstore.background import Background
from ckstore.config import Policy
from ckstore.store.references import headers_newest_first

if TYPE_CHECKING:
    from ckstore.capture import Captured
    from ckstore.importing.report import ImportReport
    from ckstore.importing.story import Wanted
    from ckstore.info import Info
    from ckstore.receipt import Receipt


def plan_import(
    source: str | os.PathLike[str],
    *,
    run: str = "main",
    step: SupportsIndex | None = None,
    numbered: bool = False,
    exclude: Sequence[str] = (),
) -> ImportReport:
    """Say what an import into a store that does not exist yet would do; see ``Importing.import_from``."""
    from ckstore.importing.story import run_import

    def refuse(captured: Captured, number: int, metrics: Mapping[str, float]) -> Receipt:
        raise AssertionError("a plan commits nothing")

    return run_import(_wanted(source, step, numbered, exclude), run, {}, refuse, dry_run=True)


def _wanted(
    source: str | os.PathLike[str], step: SupportsIndex | None, numbered: bool, exclude: Sequence[str]
) -> Wanted:
    from ckstore.importing.story import Wanted

    return Wanted(Path(source), None if step is None else check_step(step), numbered, tuple(exclude))


class Importing(Background):
    """A run of a store, into which checkpoints of other tools can be imported."""

    def import_from(
        self,
        source: str | os.PathLike[str],
        *,
        step: SupportsIndex | None = None,
        numbered: bool = False,
        exclude: Sequence[str] = (),
        policy: Policy | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ImportReport:
        """Commit what other tools have saved, in the order of the steps; steps that the run holds are skipped.

        Taken are files of ``torch.save`` and safetensors, folders of such (transformers' Trainer, DeepSpeed, nanoGPT,
        Lightning), and folders of ``torch.distributed.checkpoint``. Files of torch are loaded with
        ``weights_only=True``, in a process of their own: what cannot be loaded so is refused.

        Args:
            source: A file, a checkpoint's folder, or a folder of checkpoints.
            step: The step of a single one; it is found in names and contents otherwise.
            numbered: Give steps 0, 1, 2 in the order of names.
            exclude: Globs of names of files and folders to leave out.
            policy: How to store them; the store's policy otherwise.
            dry_run: Only say what would be done.
            on_progress: Called with bytes of files done and bytes in all.

        Raises:
            NotFoundError: There is no checkpoint.
            UsageError: A step cannot be told, or lies before what the run holds.
            CorruptError: A file cannot be read; what was committed before stays, and a second import goes on.
            UnsupportedError: A file holds what only code can make, or torch is missing or too old.
        """
        from ckstore.importing.story import run_import
        from ckstore.info import Info

        wanted = _wanted(source, step, numbered, exclude)
        with self._lock:
            self._check_open()
            self._settle()
            there: dict[int, Info] = {}
            for header in headers_newest_first(self._parts.manifests):
                there.setdefault(header.step, Info.of(header))

            def commit_one(captured: Captured, number: int, metrics: Mapping[str, float]) -> Receipt:
                return self._commit_captured(captured, number, metrics, policy or self._policy)

            return run_import(wanted, self.run, there, commit_one, dry_run=dry_run, on_progress=on_progress)

    def _commit_captured(self, captured: Captured, step: int, metrics: Mapping[str, float], policy: Policy) -> Receipt:
        from ckstore.commit import Request, commit
        from ckstore.receipt import Stopwatch

        self._come_home()
        self._parts.wait_for_orphan()
        request = Request(
            captured=captured,
            step=step,
            policy=policy,
            parent=self._parent,
            metrics=check_metrics(metrics),
            bases=self._known_bases(),
        )
        committed = commit(self._parts, request, Stopwatch(self._parts.clock))
        self._parent, self._fingerprint = committed.receipt.seq, None
        self._went_on()
        return committed.receipt
