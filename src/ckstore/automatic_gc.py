"""Collect after every so many commits, in a process of its own, so that no commit waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ckstore.after_commits import AfterCommits
from ckstore.collection import GcLimits, collect_store, stored_trash_seconds, why_not_ours
from ckstore.errors import UsageError
from ckstore.retention.policy import Retention
from ckstore.retention.spans import span_words
from ckstore.store.parts import Parts

_PROGRAM = "from ckstore.cli.main import main; main()"


class AutomaticGc(AfterCommits):
    """Starts a collection of one run after every so many commits.

    Args:
        parts: The store and its run.
        policy: What is kept.
        every: Commits of the run from one collection to the next.
        trash_seconds: How long what is dropped can be brought back; None: as is stored with the store, else a day.

    Raises:
        UsageError: ``every`` is not positive, or what lies there may only be collected from elsewhere.
    """

    work: ClassVar[str] = "collection"
    option: ClassVar[str] = "gc_every"
    nice: ClassVar[int] = 15

    def __init__(self, parts: Parts, policy: Retention, every: int = 1, *, trash_seconds: float | None = None) -> None:
        super().__init__(parts, every)
        self._policy = policy
        self._trash_seconds = trash_seconds
        problem = why_not_ours(parts)
        if problem:
            raise UsageError(problem, where=parts.backend.root, todo="open it without retention=")

    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of a child, and the arguments of the command that it is."""
        rules = [
            f"--{name.replace('_', '-')}={each}"
            for name, value in self._policy.to_config().items()
            for each in (value if isinstance(value, list) else [value])
        ]
        if self._trash_seconds is not None:
            rules.append(f"--trash-for={span_words(self._trash_seconds) if self._trash_seconds else 0}")
        # Whoever opened the store has accepted its folder.
        return _PROGRAM, ["gc", root, "--run", self._parts.run, "--json", "--allow-shared-folder", *rules], b""

    def work_here(self) -> None:
        """Collect in this process."""
        parts = Parts(self._parts.backend, self._parts.record, self._parts.run, clock=self._parts.clock)
        seconds = stored_trash_seconds(parts) if self._trash_seconds is None else self._trash_seconds
        limits = GcLimits() if seconds is None else GcLimits(trash_seconds=seconds)
        collect_store(parts, self._policy, runs=(parts.run,), limits=limits, dry_run=False)
