"""Collect after every so many commits, in a process of its own, so that no commit waits for it.

Invariants:
- Nothing here raises or waits: a collection that fails is logged, and a commit is none the worse for it.
- One collection at a time for each handle; what a busy one misses, the next one takes.
- It is the run whose commits are counted, not the handle: one that ends before it has made so many changes nothing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from ckstore.collection import GcLimits, collect_store, why_not_ours
from ckstore.errors import CkstoreError, LockHeldError, UsageError
from ckstore.io.backend import Distant
from ckstore.io.local import LocalBackend
from ckstore.retention.policy import Retention
from ckstore.store.parts import Parts

_log = logging.getLogger("ckstore")

NICE = 15
"""Added to the niceness of a collection: training and the saver come first."""

_PROGRAM = f"import os; os.nice({NICE}); from ckstore.cli.main import main; main()"
_LAST_WORDS_NBYTES = 2000


class AutomaticGc:
    """Starts a collection of one run after every so many commits.

    Args:
        parts: The store and its run.
        policy: What is kept.
        every: Commits of the run from one collection to the next.

    Raises:
        UsageError: ``every`` is not positive, or what lies there may only be collected from elsewhere.
    """

    def __init__(self, parts: Parts, policy: Retention, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError("gc_every is a number of commits, from 1 up", where=f"gc_every={every!r}")
        self._parts = parts
        self._policy = policy
        self._every = every
        problem = why_not_ours(parts)
        if problem:
            raise UsageError(problem, where=parts.backend.root, todo="open it without retention=")
        listing = parts.manifests.listing()
        newest = max((*(name.seq for name in listing.names), *listing.dropped), default=0)
        # The newest counts as not collected after: who made it may have been killed before it could see to that.
        self._taken = newest // every
        self._child: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a collection is at work."""
        self._reap()
        return self._child is not None

    def after_commit(self, seq: int) -> None:
        """Take note of an acknowledged commit, and start a collection where it is time; never raises or waits."""
        due = (seq + 1) // self._every
        try:
            if due <= self._taken or self.is_running:
                return
            self._taken = due
            self._start()
        except Exception as error:
            # The commit is durable, and must not look as if it had failed, whatever is wrong here.
            _log.warning("the collection after a commit did not begin: %s: %s", type(error).__name__, error)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the collection that is at work has ended, for tests and for who wants to leave nothing behind."""
        if self._child is not None:
            try:
                self._child[0].wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return
            self._reap()

    def close(self) -> None:
        """Let go of a collection that has ended; one that is at work goes on by itself."""
        self._reap()
        if self._child is not None:
            self._child[1].close()
            # It is nobody's any more: without this, Python would complain that it was not waited for.
            self._child[0].returncode = 0
            self._child = None

    def _start(self) -> None:
        backend = self._parts.backend
        if not isinstance(backend, (LocalBackend, Distant)):
            # What lies in this process's memory no other process can collect.
            self._collect_here()
            return
        words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *self._arguments(backend.root)],
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
        except BaseException:
            words.close()
            raise
        self._child = child, words

    def _arguments(self, root: str) -> list[str]:
        rules = [
            f"--{name.replace('_', '-')}={each}"
            for name, value in self._policy.to_config().items()
            for each in (value if isinstance(value, list) else [value])
        ]
        # Whoever opened the store has accepted its folder.
        return ["gc", root, "--run", self._parts.run, "--json", "--allow-shared-folder", *rules]

    def _collect_here(self) -> None:
        parts = Parts(self._parts.backend, self._parts.record, self._parts.run, clock=self._parts.clock)
        try:
            collect_store(parts, self._policy, runs=(parts.run,), limits=GcLimits(), dry_run=False)
        except LockHeldError:
            return
        except CkstoreError as error:
            _log.warning("the collection after a commit failed: %s", error)

    def _reap(self) -> None:
        if self._child is None or self._child[0].poll() is None:
            return
        (child, words), self._child = self._child, None
        with words:
            if child.returncode not in (0, LockHeldError.exit_code):
                words.seek(0)
                said = words.read(_LAST_WORDS_NBYTES).decode("utf-8", "replace").strip()
                _log.warning("the collection after a commit ended with code %d: %s", child.returncode, said)


def _environment() -> dict[str, str]:
    """Return an environment in which the same modules are found as here."""
    here, package = Path.cwd(), str(Path(__file__).parents[1])
    found = [str(here / entry) for entry in sys.path]
    # numpy's threads would cost memory, and do nothing here.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}
