"""Run gc or demotion after every N commits of a run, in a child process, so that commits do not wait for it.

Invariants:
- Nothing here raises or waits. Failed work is logged and does not affect the commit.
- Each handle runs at most one child per kind of work. Commits made meanwhile are covered by the next child.
- Commits of the run are counted, not those of the handle, so handles that make few commits each also trigger work.

Demotion takes no lease, because the running trainer holds it. Demoting a checkpoint that is not the newest needs none
(docs/FORMAT.md section 10, Replace). Checkpoints that could not be demoted are remembered and skipped as long as the
handle exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Literal

from ckstore.config import DemotePolicy, Policy, policy_of, policy_row
from ckstore.errors import CkstoreError, LockHeldError, UsageError
from ckstore.io.backend import Distant
from ckstore.io.local import LocalBackend
from ckstore.io.url import backend_for
from ckstore.ops.gc.policy import Retention, span_words
from ckstore.ops.gc.run import GcLimits, collect_store, collection_obstacle
from ckstore.ops.stored_policies import (
    policy_of_rules,
    require_lossy,
    rules_of,
    stored_demotion,
    stored_trash_seconds,
)
from ckstore.processes import start_python
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

_log = logging.getLogger("ckstore")

_STDERR_NBYTES_MAX = 2000


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    stdout: IO[bytes]

    def close(self) -> None:
        self.stderr.close()
        self.stdout.close()


class AfterCommits(ABC):
    """Start one kind of work after every N commits of a run. Each kind of work is a subclass.

    Args:
        repository: The store and its run.
        every: Number of commits between two starts.

    Raises:
        UsageError: ``every`` is not positive.
    """

    work: ClassVar[str]
    """Name of the work in log messages."""
    option: ClassVar[str]
    """Name of the argument that sets ``every``."""
    reads_output: ClassVar[bool] = False
    """Whether to read the output of a finished child."""
    nice: ClassVar[int] = 0
    """Niceness added for the child, so that training and the saver have priority."""
    quiet_codes: ClassVar[tuple[int, ...]] = (0, LockHeldError.exit_code)
    """Exit codes that are not failures."""

    def __init__(self, repository: Repository, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"{self.option} must be a number of commits, at least 1", where=f"{self.option}={every!r}")
        self._repository = repository
        self._every = every
        listing = repository.manifests.listing()
        newest = max((*(name.seq for name in listing.names), *listing.dropped), default=0)
        # The newest commit counts as not yet handled: its process may have been killed before it started the work.
        self._handled_count = newest // every
        self._child: _Child | None = None

    @property
    def is_running(self) -> bool:
        """Whether a child is running."""
        self._reap()
        return self._child is not None

    @property
    def child_pid(self) -> int | None:
        """Process id of the current child, which may have ended."""
        return None if self._child is None else self._child.process.pid

    def after_commit(self, seq: int) -> None:
        """Count an acknowledged commit, and start the work if it is due. Never raises or waits."""
        due = (seq + 1) // self._every
        try:
            if due <= self._handled_count or self.is_running:
                return
            self._handled_count = due
            self._start()
        except Exception as error:
            # The commit is durable and must not appear to have failed because of an error here.
            _log.warning("the %s after a commit could not be started: %s: %s", self.work, type(error).__name__, error)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the running child has ended."""
        if self._child is not None:
            try:
                self._child.process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return
            self._reap()

    def close(self) -> None:
        """Release the child. One that is still running continues on its own."""
        self._reap()
        if self._child is not None:
            self._child.close()
            # Mark the child as reaped. Otherwise Python warns that nobody waited for it.
            self._child.process.returncode = 0
            self._child = None

    # What each kind of work defines

    @abstractmethod
    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the child's program, its arguments, and its standard input."""

    @abstractmethod
    def work_in_process(self) -> None:
        """Do the work in this process, for backends that only this process can see."""

    def read_output(self, stdout: IO[bytes]) -> None:  # noqa: B027 - most kinds of work have nothing to tell
        """Read the output of a finished child."""

    # The child process

    def _start(self) -> None:
        backend = self._repository.backend
        if not isinstance(backend, (LocalBackend, Distant)):
            try:
                self.work_in_process()
            except LockHeldError:
                return
            except CkstoreError as error:
                _log.warning("the %s after a commit failed: %s", self.work, error)
            return
        program, arguments, stdin_bytes = self.command(backend.root)
        with contextlib.ExitStack() as stack:
            # These files are open as long as the child runs.
            stderr, stdout, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            stdin.write(stdin_bytes)
            stdin.seek(0)
            child = start_python(
                ["-c", f"import os; os.nice({self.nice}); {program}", *arguments],
                stdin=stdin,
                stdout=stdout if self.reads_output else subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            stack.pop_all()
        stdin.close()
        self._child = _Child(child, stderr, stdout)

    def _reap(self) -> None:
        if self._child is None or self._child.process.poll() is None:
            return
        child, self._child = self._child, None
        code = child.process.returncode
        try:
            if code not in self.quiet_codes:
                child.stderr.seek(0)
                message = child.stderr.read(_STDERR_NBYTES_MAX).decode("utf-8", "replace").strip()
                _log.warning("the %s after a commit failed with exit code %d: %s", self.work, code, message)
            if code == 0 and self.reads_output:
                child.stdout.seek(0)
                self.read_output(child.stdout)
        finally:
            child.close()


_GC_PROGRAM = "from ckstore.cli.main import main; main()"


class AutomaticGc(AfterCommits):
    """Start a collection of one run after every N commits.

    Args:
        repository: The store and its run.
        policy: The retention rules.
        every: Number of commits between two collections.
        trash_seconds: How long deleted checkpoints can be restored; None: as stored with the store, else one day.

    Raises:
        UsageError: ``every`` is not positive, or this bucket may only be collected from another store.
    """

    work: ClassVar[str] = "collection"
    option: ClassVar[str] = "gc_every"
    nice: ClassVar[int] = 15

    def __init__(
        self, repository: Repository, policy: Retention, every: int = 1, *, trash_seconds: float | None = None
    ) -> None:
        super().__init__(repository, every)
        self._policy = policy
        self._trash_seconds = trash_seconds
        problem = collection_obstacle(repository)
        if problem:
            raise UsageError(problem, where=repository.backend.root, todo="open the store without retention=")

    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of the child and its ``ckstore gc`` arguments."""
        rules = [
            f"--{name.replace('_', '-')}={each}"
            for name, value in self._policy.to_config().items()
            for each in (value if isinstance(value, list) else [value])
        ]
        if self._trash_seconds is not None:
            rules.append(f"--trash-for={span_words(self._trash_seconds) if self._trash_seconds else 0}")
        # Opening the store has already accepted a shared folder.
        return _GC_PROGRAM, ["gc", root, "--run", self._repository.run, "--json", "--allow-shared-folder", *rules], b""

    def work_in_process(self) -> None:
        """Collect in this process."""
        repository = Repository(
            self._repository.backend, self._repository.record, self._repository.run, clock=self._repository.clock
        )
        seconds = stored_trash_seconds(repository) if self._trash_seconds is None else self._trash_seconds
        limits = GcLimits() if seconds is None else GcLimits(trash_seconds=seconds)
        collect_store(repository, self._policy, runs=(repository.run,), limits=limits, dry_run=False)


_DEMOTION_PROGRAM = "from ckstore.ops.scheduled import demote_on_request; demote_on_request()"

Wanted = DemotePolicy | Literal["stored"]


class AutomaticDemotion(AfterCommits):
    """Demote old checkpoints of one run after every N commits.

    Args:
        repository: The store and its run.
        wanted: Which checkpoints stay exact; ``"stored"``: read this from the store at that time. A store without a
            policy demotes nothing.
        policy: Threads and memory.
        every: Number of commits between two demotions.

    Raises:
        UsageError: ``every`` is not positive, or the store is in a bucket, where demotion needs the trainer's lease.
    """

    work: ClassVar[str] = "demotion"
    option: ClassVar[str] = "demote_every"
    reads_output: ClassVar[bool] = True
    nice: ClassVar[int] = 19

    def __init__(self, repository: Repository, wanted: Wanted, policy: Policy, every: int = 1) -> None:
        super().__init__(repository, every)
        if isinstance(repository.backend, Distant):
            raise UsageError(
                "checkpoints in a bucket cannot be demoted while a trainer writes to it",
                where=repository.backend.root,
                todo="open the store without demotion=, and run `ckstore demote` when no trainer runs",
            )
        if isinstance(wanted, DemotePolicy):
            require_lossy(wanted)
        self._wanted = wanted
        self._policy = policy
        self._tried: set[int] = set()

    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of the child, with the store, the rules and the seqs to skip as JSON."""
        request = {
            "root": root,
            "run": self._repository.run,
            "rules": None if isinstance(self._wanted, str) else rules_of(self._wanted),
            "policy": policy_row(self._policy),
            "tried": sorted(self._tried),
        }
        return _DEMOTION_PROGRAM, (), json.dumps(request).encode()

    def work_in_process(self) -> None:
        """Demote in this process."""
        repository = Repository(
            self._repository.backend, self._repository.record, self._repository.run, clock=self._repository.clock
        )
        wanted = stored_demotion(repository) if isinstance(self._wanted, str) else self._wanted
        self._tried |= set(_demoted(repository, wanted, self._policy, self._tried))

    def read_output(self, stdout: IO[bytes]) -> None:
        """Remember the seqs that the child could not demote."""
        self._tried |= set(json.load(stdout)["tried"])


def demote_on_request() -> None:
    """Demote as the request on standard input says, and write the seqs to skip to standard output; the child's main."""
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        # Opening the store in the parent has already accepted a shared folder.
        backend = backend_for(request["root"], allow_shared_folder=True)
        repository = Repository(backend, read_store_record(backend), request["run"])
        rules = request["rules"]
        wanted = stored_demotion(repository) if rules is None else policy_of_rules(rules)
        tried = _demoted(repository, wanted, policy_of(request["policy"]), set(request["tried"]))
        repository.close()
    except CkstoreError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    json.dump({"tried": tried}, sys.stdout)


def _demoted(repository: Repository, wanted: DemotePolicy | None, policy: Policy, tried: set[int]) -> list[int]:
    """Demote, and return the seqs that cannot be demoted by this policy."""
    if wanted is None:
        return []
    require_lossy(wanted)
    from ckstore.ops.demote import demote

    report = demote(repository, wanted, policy, passed_over=tried, dry_run=False)
    return [entry.seq for entry in report.entries if entry.is_final]
