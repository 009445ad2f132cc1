"""The verbs of a store that all ranks of a job call together.

Invariants:
- All ranks get the same checkpoint, or an error. Which one it is, rank 0 decides.
- What one rank raises is raised on all, and names the rank.
- Nothing here uses a process group of the training.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ckstore.config import Policy
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CorruptError,
    NotFoundError,
    UsageError,
)
from ckstore.format.error_records import ErrorRecord, record_of, restored_error
from ckstore.format.records import decode_inner, encode_inner
from ckstore.ranks.actions import BACKGROUND_CALLS
from ckstore.ranks.calls import Calls
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.commits import RankCommits
from ckstore.ranks.last_step import LastStep
from ckstore.ranks.opening import wait_visible
from ckstore.ranks.savers import SaverDoor, SaverJob, encode_share, stopped_seconds_max
from ckstore.ranks.shared_reading import OtherRankError, SharedReading
from ckstore.ranks.work import RankRequest, RankTools
from ckstore.ranks.world import addresses_of, invite, invited
from ckstore.restore.own_part import RankPlace
from ckstore.restore.restore import Restored, RestoreRequest, restore_reference
from ckstore.results import Receipt
from ckstore.store.manifests import EmptyRunError
from ckstore.store.refs import Reference, headers_newest_first, load_whole, newest_whole, resolve
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.delta.base_cache import BaseCache
    from ckstore.format.header import ManifestHeader
    from ckstore.format.manifest import Manifest
    from ckstore.ranks.world import Listener, Ranks
    from ckstore.state.capture import Captured

_log = logging.getLogger("ckstore")


class BackgroundSide(Protocol):
    """The background commits of this rank. ``background.trainer.TrainerSide`` is one."""

    def decline(self, step: int, policy: Policy, error: BaseException) -> None:
        """Fail the next one on all ranks."""
        ...


class Job:
    """This handle's part in its job.

    Args:
        repository: The open run.
        ranks: The job.
    """

    def __init__(self, repository: Repository, ranks: Ranks) -> None:
        self._repository = repository
        self._ranks = ranks
        self._link = ranks.link()
        self._tools = RankTools(repository, ranks.rank)
        self._capture = RankCapture(ranks.world)
        self._calls = Calls(ranks.rank, f"handle {next(self._link.once(itertools.count))}")
        self._link.watch(self._calls.handle, self._calls.note)
        self._commits = RankCommits(self._link, self._tools, on_divergence=ranks.on_divergence, calls=self._calls)
        self._background_capture = RankCapture(ranks.world)
        self._last_step_count = 0
        self._listener: Listener | None = None
        # The other ranks wait for one that waits for an orphan.
        repository.lease.orphans.stopped_seconds_max = stopped_seconds_max()
        self._door = self._opened_door()

    @property
    def place(self) -> RankPlace:
        """This rank's place, for a restore."""
        return RankPlace(self._ranks.rank, self._ranks.world, self._ranks.per_rank)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._ranks.rank == 0

    @property
    def bases(self) -> BaseCache:
        """What the next ``commit`` is based on."""
        return self._tools.bases

    # Background commits

    def _opened_door(self) -> SaverDoor:
        """Open the socket for the savers on rank 0 now, so that later no call waits for another rank."""
        ranks = self._ranks

        def open_door(values: tuple[bytes, ...]) -> bytes:
            self._listener, invitation = invite([host for host, _ in addresses_of(ranks.address or "")])
            return invitation

        # A single saver needs no connection.
        invitation = self._link.agree("open (savers)", b"", open_door) if ranks.world > 1 else b" "
        token, address = invited(invitation)
        job = SaverJob(ranks.rank, ranks.world, address, token, float(ranks.join_seconds), ranks.on_divergence)
        return SaverDoor(job, None if self._listener is None else self._listener.fileno())

    def close(self) -> None:
        """Close the socket for the savers. The connection to the other ranks belongs to the ``Ranks`` object."""
        if self._listener is not None:
            self._listener.close()

    @property
    def saver_door(self) -> SaverDoor:
        """What a saver must know to find the others."""
        return self._door

    def next_background_commit(self) -> int:
        """Return the number of the next background commit, the same on every rank."""
        return self._calls.begin_background()

    def check_background(self, policy: Policy) -> None:
        """Raise if this rank knows that a background commit cannot succeed on all ranks.

        Args:
            policy: How to store it.

        Raises:
            RankError: A rank was lost; the message names it.
            UsageError: Ranks could decide differently which commits to skip, or another rank has called ``commit``
                instead of ``commit_async``. That call fails, too.
        """
        if policy.on_busy != "wait":
            raise UsageError(
                f"many ranks cannot commit with on_busy={policy.on_busy!r}: each would skip other commits",
                todo='use on_busy="wait", and commit less often',
            )
        self._link.check()
        missed = self._calls.take_missed()
        if missed is not None:
            other, record = missed
            self._link.decline(other.number, other.step, record)
            raise self._link.error_of(None, record)

    def call_when_lost(self, call: Callable[[int, str, int], None]) -> None:
        """Have a bound method called, on any thread, for each rank that was or will be lost; perhaps twice.

        Args:
            call: Gets the rank, what happened, and 0; or the number of the background commit in which only the saver of
                that rank is lost. Its object is not kept alive.
        """
        method = weakref.WeakMethod(call)

        def call_if_alive(rank: int, how: str, number: int = 0) -> None:
            found = method()
            if found is not None:
                found(rank, how, number)

        self._link.call_when_lost(call_if_alive)
        self._calls.call_when_saver_lost(call_if_alive)

    def report_saver_lost(self, number: int, how: str) -> None:
        """Report to the other ranks that this one has lost its saver: it may not have joined this background commit."""
        rank, handle = self._link.rank, self._calls.handle
        self._link.send(lambda member: member.left(rank, how, number, handle))

    def captured_share(self, state: Any) -> tuple[Captured, bytes]:
        """Return the captured state of this rank, and what it holds, encoded."""
        captured = self._background_capture.capture(state, is_waited=False)
        return captured.captured, encode_share(captured)

    def last_step(self) -> LastStep:
        """Return this rank's part in an agreement on the step of the last commit: another one for each call."""
        self._last_step_count += 1
        return LastStep(self._link, f"{self._last_step_count} of {self._calls.handle}", self._calls)

    # Calls of the whole job

    def commit(
        self,
        state: Any,
        step: int,
        policy: Policy,
        parent: int | None,
        metrics: Mapping[str, float],
        background: Callable[[], BackgroundSide],
    ) -> Receipt:
        """Commit the states of all ranks as one checkpoint.

        Args:
            state: This rank's state.
            step: The trainer's step, the same on all ranks.
            policy: How to store it, the same on all ranks.
            parent: The seq that training continued from.
            metrics: Numbers to find the checkpoint by; those of rank 0 count.
            background: Returns this rank's side of background commits. It declines those that other ranks have begun
                instead of this commit.

        Raises:
            CkstoreError: The commit failed on one of the ranks; the message names it.
        """
        captured: Captured | None = None

        def make_request() -> RankRequest:
            nonlocal captured
            found = self._capture.capture(state)
            captured = found.captured
            return RankRequest(found, step, policy, parent, metrics)

        try:
            return self._commits.commit(step, policy, make_request)
        except Exception as error:
            while self._calls.background < self._calls_of_others():
                background().decline(step, policy, error)
            # All ranks do the same, whatever each of them raises.
            if not self._commits.has_removed_cause(step, 0 if captured is None else captured.nbytes):
                raise
        return self._commits.commit(step, policy, make_request)

    def _calls_of_others(self) -> int:
        """Return how often ranks have called ``commit_async``, if the last commit failed for that reason; else 0."""
        failure = self._commits.failure
        count = 0 if failure is None else failure.facts.get(BACKGROUND_CALLS)
        return count if isinstance(count, int) else 0

    def newest(self) -> ManifestHeader | None:
        """Return the newest whole checkpoint, the same on all ranks; None in an empty run."""

        def find(values: tuple[bytes, ...]) -> bytes:
            self._repository.wait_for_orphan()
            try:
                return str(newest_whole(self._repository)[0].header.seq).encode()
            except EmptyRunError:
                return b""

        seq = self._link.agree("latest", b"", find)
        return self._manifest_of(int(seq)).header if seq else None

    def rewind(self, ref: Reference, publish: Callable[[], Manifest]) -> Manifest:
        """Have rank 0 publish an old entry again. Return its manifest on all ranks.

        Args:
            ref: The entry, the same on all ranks.
            publish: Publishes it. Called on rank 0; what it raises is raised on all ranks.
        """

        def decide(values: tuple[bytes, ...]) -> bytes:
            _require_same("rewind", values)
            return str(publish().header.seq).encode()

        return self._manifest_of(int(self._link.agree("rewind", str(ref).encode(), decide)))

    def _manifest_of(self, seq: int) -> Manifest:
        """Return the manifest of a seq that rank 0 sees."""
        wait_visible(self._repository, seq, self._ranks.rank)
        return load_whole(self._repository, resolve(self._repository, f"seq:{seq}"), takes_lower=True)

    def restore(self, policy: Policy, ref: Reference | None, request: RestoreRequest, *, fallback: bool) -> Restored:
        """Restore one checkpoint on all ranks.

        Args:
            policy: Threads, memory and checks.
            ref: The checkpoint, the same on all ranks; None: the newest whole one.
            request: What this rank restores.
            fallback: If it is damaged on any rank, restore the newest one that all ranks can read.

        Raises:
            CkstoreError: As for ``Store.restore``, on all ranks.
        """
        tried: list[int] = []
        asked = f"{ref}{', fallback=True' if fallback else ''}".encode()
        while True:
            seq = int(self._link.agree("restore", asked, lambda values: self._choose(ref, values, tried)))
            tried.append(seq)
            restored, error = self._try_restore(policy, seq, request)
            problem = b"" if error is None else encode_inner(record_of(error))
            verdict = self._link.agree("restore (outcome)", problem, _first_problem, is_patient=True)
            if not verdict:
                assert restored is not None, "a rank without a problem has restored"
                return restored
            record = decode_inner(verdict, ErrorRecord)
            if restored is not None and request.into is not None:
                todos = [*([record.todo] if record.todo else []), "the state of this rank was overwritten"]
                record = record._replace(todo="; ".join(todos))
            failed = restored_error(record, source="another rank", other=CkstoreError)
            if not fallback or not isinstance(failed, CorruptError | BackendError):
                raise error or failed
            _log.warning("seq %d was skipped: %s", seq, failed)

    def _choose(self, ref: Reference | None, values: tuple[bytes, ...], tried: Sequence[int]) -> bytes:
        """Rank 0: return the seq of the checkpoint to restore."""
        _require_same("restore", values)
        repository = self._repository
        repository.wait_for_orphan()
        if tried:
            for header in headers_newest_first(repository.manifests):
                if header.seq < tried[-1] and not header.is_archival:
                    return str(header.seq).encode()
            todo = "restore another run or a copy; `ckstore verify` lists the damage"
            raise NotFoundError("no older checkpoint is left to restore", where=repository.backend.root, todo=todo)
        if ref is not None:
            return str(resolve(repository, ref).seq).encode()
        manifest, skipped = newest_whole(repository)
        for sentence in skipped:
            _log.warning("%s", sentence)
        return str(manifest.header.seq).encode()

    def _try_restore(
        self, policy: Policy, seq: int, request: RestoreRequest
    ) -> tuple[Restored | None, BaseException | None]:
        """Restore on this rank. Return the result, or the error; neither, if another rank has one."""
        sharing = SharedReading(self._link) if self._ranks.world > 1 else None
        try:
            wait_visible(self._repository, seq, self._ranks.rank)
            request = replace(request, sharing=sharing)
            return restore_reference(self._repository, policy, f"seq:{seq}", request, []), None
        except OtherRankError:
            return None, None
        except BaseException as error:
            # Ctrl-C, too: the other ranks wait for this one's result.
            if sharing is not None:
                sharing.refuse()
            return None, error


def _require_same(call: str, values: tuple[bytes, ...]) -> None:
    """Refuse a call that names different checkpoints on some ranks.

    Raises:
        UsageError: The values differ.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise UsageError(
            f"ranks {call} different checkpoints: rank 0 {values[0].decode()}, rank {other} {values[other].decode()}",
            todo=f"call {call} with the same arguments on all ranks",
            ranks=[0, other],
        )


def _first_problem(values: tuple[bytes, ...]) -> bytes:
    """Return the error of the lowest rank that has one, with its number; empty: all ranks succeeded."""
    for rank, value in enumerate(values):
        if value:
            record = decode_inner(value, ErrorRecord)
            todo = record.todo and f"on rank {rank}, {record.todo}"
            return encode_inner(record._replace(what=f"rank {rank}: {record.what}", todo=todo))
    return b""
