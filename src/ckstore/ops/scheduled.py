"""Count the commits of a run, and start work after every so many: in a process of its own, so that no commit waits.

Invariants:
- Nothing here raises or waits: work that fails is logged, and a commit is none the worse for it.
- One child at a time for each kind of work of a handle; what a busy one misses, the next one takes.
- It is the run whose commits are counted, not the handle: one that ends before it has made so many changes nothing.

Collect after every so many commits, in a process of its own, so that no commit waits for it.

Demote after every so many commits, in a process of its own, so that no commit waits for it.

It takes no lease: the trainer that lives holds that, and demoting what is not the newest needs none (docs/FORMAT.md,
Replace). What was tried in vain is remembered as long as the handle lives, and not tried again after every commit.
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
from ckstore.ops.demote_config import policy_of_rules, rules_of, stored_demotion
from ckstore.ops.gc.policy import Retention, span_words
from ckstore.ops.gc.run import GcLimits, collect_store, collection_obstacle, stored_trash_seconds
from ckstore.processes import start_python
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

_log = logging.getLogger("ckstore")

_LAST_WORDS_NBYTES = 2000


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    words: IO[bytes]
    told: IO[bytes]

    def close(self) -> None:
        self.words.close()
        self.told.close()


class AfterCommits(ABC):
    """Starts work on one run after every so many commits; kinds of work are its subclasses.

    Args:
        repository: The store and its run.
        every: Commits of the run from one time to the next.

    Raises:
        UsageError: ``every`` is not positive.
    """

    work: ClassVar[str]
    """What it is, in the log."""
    option: ClassVar[str]
    """The argument that says how often."""
    tells: ClassVar[bool] = False
    """Whether what a child writes is read when it has ended."""
    nice: ClassVar[int] = 0
    """Added to the niceness of a child: training and the saver come first."""
    quiet_codes: ClassVar[tuple[int, ...]] = (0, LockHeldError.exit_code)
    """Exit codes that are no failure."""

    def __init__(self, repository: Repository, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"{self.option} is a number of commits, from 1 up", where=f"{self.option}={every!r}")
        self._repository = repository
        self._every = every
        listing = repository.manifests.listing()
        newest = max((*(name.seq for name in listing.names), *listing.dropped), default=0)
        # The newest counts as not worked on after: who made it may have been killed before it could see to that.
        self._taken = newest // every
        self._child: _Child | None = None

    @property
    def is_running(self) -> bool:
        """Whether a child is at work."""
        self._reap()
        return self._child is not None

    @property
    def child_pid(self) -> int | None:
        """The process of the child whose end was not taken note of yet."""
        return None if self._child is None else self._child.process.pid

    def after_commit(self, seq: int) -> None:
        """Take note of an acknowledged commit, and start to work where it is time; never raises or waits."""
        due = (seq + 1) // self._every
        try:
            if due <= self._taken or self.is_running:
                return
            self._taken = due
            self._start()
        except Exception as error:
            # The commit is durable, and must not look as if it had failed, whatever is wrong here.
            _log.warning("the %s after a commit did not begin: %s: %s", self.work, type(error).__name__, error)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the child that is at work has ended, for tests and for who wants to leave nothing behind."""
        if self._child is not None:
            try:
                self._child.process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return
            self._reap()

    def close(self) -> None:
        """Let go of a child that has ended; one that is at work goes on by itself."""
        self._reap()
        if self._child is not None:
            self._child.close()
            # It is nobody's any more: without this, Python would complain that it was not waited for.
            self._child.process.returncode = 0
            self._child = None

    # What a kind of work says

    @abstractmethod
    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of a child, its arguments, and what it is given to read."""

    @abstractmethod
    def work_here(self) -> None:
        """Do it in this process, which is the only one that sees what lies in its memory."""

    def note(self, told: IO[bytes]) -> None:  # noqa: B027 - most kinds of work have nothing to tell
        """Take note of what a child has told."""

    # The child

    def _start(self) -> None:
        backend = self._repository.backend
        if not isinstance(backend, (LocalBackend, Distant)):
            try:
                self.work_here()
            except LockHeldError:
                return
            except CkstoreError as error:
                _log.warning("the %s after a commit failed: %s", self.work, error)
            return
        program, arguments, given = self.command(backend.root)
        with contextlib.ExitStack() as stack:
            # They live as long as the child.
            words, told, source = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            source.write(given)
            source.seek(0)
            child = start_python(
                ["-c", f"import os; os.nice({self.nice}); {program}", *arguments],
                stdin=source,
                stdout=told if self.tells else subprocess.DEVNULL,
                stderr=words,
                start_new_session=True,
            )
            stack.pop_all()
        source.close()
        self._child = _Child(child, words, told)

    def _reap(self) -> None:
        if self._child is None or self._child.process.poll() is None:
            return
        child, self._child = self._child, None
        code = child.process.returncode
        try:
            if code not in self.quiet_codes:
                child.words.seek(0)
                said = child.words.read(_LAST_WORDS_NBYTES).decode("utf-8", "replace").strip()
                _log.warning("the %s after a commit ended with code %d: %s", self.work, code, said)
            if code == 0 and self.tells:
                child.told.seek(0)
                self.note(child.told)
        finally:
            child.close()


_GC_PROGRAM = "from ckstore.cli.main import main; main()"


class AutomaticGc(AfterCommits):
    """Starts a collection of one run after every so many commits.

    Args:
        repository: The store and its run.
        policy: What is kept.
        every: Commits of the run from one collection to the next.
        trash_seconds: How long what is dropped can be brought back; None: as is stored with the store, else a day.

    Raises:
        UsageError: ``every`` is not positive, or what lies there may only be collected from elsewhere.
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
            raise UsageError(problem, where=repository.backend.root, todo="open it without retention=")

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
        return _GC_PROGRAM, ["gc", root, "--run", self._repository.run, "--json", "--allow-shared-folder", *rules], b""

    def work_here(self) -> None:
        """Collect in this process."""
        repository = Repository(
            self._repository.backend, self._repository.record, self._repository.run, clock=self._repository.clock
        )
        seconds = stored_trash_seconds(repository) if self._trash_seconds is None else self._trash_seconds
        limits = GcLimits() if seconds is None else GcLimits(trash_seconds=seconds)
        collect_store(repository, self._policy, runs=(repository.run,), limits=limits, dry_run=False)


_DEMOTION_PROGRAM = "from ckstore.ops.scheduled import work; work()"

Wanted = DemotePolicy | Literal["stored"]


class AutomaticDemotion(AfterCommits):
    """Demotes what has aged in one run after every so many commits.

    Args:
        repository: The store and its run.
        wanted: Which stay exact; ``"stored"``: as the store says at that time, and without that nothing is demoted.
        policy: Threads and memory.
        every: Commits of the run from one demotion to the next.

    Raises:
        UsageError: ``every`` is not positive, or the store lies in a bucket, where it needs the trainer's lease.
    """

    work: ClassVar[str] = "demotion"
    option: ClassVar[str] = "demote_every"
    tells: ClassVar[bool] = True
    nice: ClassVar[int] = 19

    def __init__(self, repository: Repository, wanted: Wanted, policy: Policy, every: int = 1) -> None:
        super().__init__(repository, every)
        if isinstance(repository.backend, Distant):
            raise UsageError(
                "nothing is demoted in a bucket while it is written to",
                where=repository.backend.root,
                todo="open it without demotion=, and run `ckstore demote` when no trainer runs",
            )
        self._wanted = wanted
        self._policy = policy
        self._tried: set[int] = set()

    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of a child, and the store, the rules and the seqs to pass over as JSON."""
        asked = {
            "root": root,
            "run": self._repository.run,
            "rules": None if isinstance(self._wanted, str) else rules_of(self._wanted),
            "policy": policy_row(self._policy),
            "tried": sorted(self._tried),
        }
        return _DEMOTION_PROGRAM, (), json.dumps(asked).encode()

    def work_here(self) -> None:
        """Demote in this process."""
        repository = Repository(
            self._repository.backend, self._repository.record, self._repository.run, clock=self._repository.clock
        )
        wanted = stored_demotion(repository) if isinstance(self._wanted, str) else self._wanted
        self._tried |= set(_demoted(repository, wanted, self._policy, self._tried))

    def note(self, told: IO[bytes]) -> None:
        """Remember which seqs a child has tried in vain."""
        self._tried |= set(json.load(told)["tried"])


def work() -> None:
    """Do what the parent asks for on the standard input, and tell there what was tried in vain; the child's main."""
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        # Whoever opened the store has accepted its folder.
        backend = backend_for(asked["root"], allow_shared_folder=True)
        repository = Repository(backend, read_store_record(backend), asked["run"])
        rules = asked["rules"]
        wanted = stored_demotion(repository) if rules is None else policy_of_rules(rules)
        tried = _demoted(repository, wanted, policy_of(asked["policy"]), set(asked["tried"]))
        repository.close()
    except CkstoreError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    json.dump({"tried": tried}, sys.stdout)


def _demoted(repository: Repository, wanted: DemotePolicy | None, policy: Policy, tried: set[int]) -> list[int]:
    """Demote; return the seqs for which that came to nothing, and would again."""
    if wanted is None:
        return []
    from ckstore.ops.demote import demote

    report = demote(repository, wanted, policy, passed_over=tried, dry_run=False)
    return [entry.seq for entry in report.entries if entry.is_final]
