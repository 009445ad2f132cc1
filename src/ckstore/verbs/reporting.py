"""The verb that shows a store on a page."""

from __future__ import annotations

from collections.abc import Callable

from ckstore.errors import CkstoreError
from ckstore.verbs.reading import Handle


class Reporting(Handle):
    """A run of a store, with a page that shows all of its runs."""

    def report(self, *, on_progress: Callable[[int, int], None] | None = None) -> str:
        """Return a page of HTML that shows the store: what was committed, what it takes, what is kept and why.

        It is one self-contained file: no network, no other file. No tensor is read, and nothing is changed.

        Args:
            on_progress: Called with checkpoints done and checkpoints in all.
        """
        from ckstore.ops.gc.run import GcLimits, GcReport, collect_store
        from ckstore.ops.inspect.report import gather, page_of
        from ckstore.ops.stored_policies import stored_policy

        with self._lock:
            self._check_open()
            gc: GcReport | None = None
            problem = ""
            try:
                policy = stored_policy(self._repository)
                gc = collect_store(self._repository, policy, runs=None, limits=GcLimits(), dry_run=True)
            except CkstoreError as error:
                # What a collection would do is one section of many.
                problem = str(error)
            return page_of(gather(self._repository, gc, problem, on_progress))
