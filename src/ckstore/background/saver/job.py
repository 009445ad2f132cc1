"""The commits of a saver whose trainer is one of many ranks: the savers of all ranks commit together.

Invariants:
- A ticket is promised (``Began``) when all ranks have staged it and rank 0 holds the lease. From then on it is
  published even if all trainers die.
- A saver that loses another one fails the commit, and makes another connection for the next one.
- A commit that has failed for a reason that could be removed is repeated once, as that of a single process is: on all
  ranks, under a number of its own. The n-th background commit has number 2n - 1, and its repetition 2n.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from ckstore.background.saver.staged_state import StopLimit, Ticket
from ckstore.commit.commit import follow_parent
from ckstore.commit.pipeline import WriteBlocks
from ckstore.concurrency import ThreadLimit, leave_idle_class
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import RankError
from ckstore.format.error_records import record_of, restored_error
from ckstore.ranks.commits import RankCommits
from ckstore.ranks.link import Link
from ckstore.ranks.savers import SaverJob, SaverLinks, decode_share, stopped_seconds_max
from ckstore.ranks.work import RankRequest, RankTools
from ckstore.results import Receipt, Stopwatch
from ckstore.state.capture import Captured
from ckstore.store.repository import Repository


class SaverRank:
    """One saver's part in its job. Used by the committing thread.

    Args:
        job: The job, as the trainer has passed it.
        listener: Rank 0: the socket for the other savers.
        repository: The open run.
        thread_limit: How many threads a commit may use at present.
        blocks: Source of the blocks that packs are written through.
    """

    def __init__(
        self,
        job: bytes,
        listener: socket.socket | None,
        repository: Repository,
        thread_limit: ThreadLimit,
        blocks: WriteBlocks,
    ) -> None:
        self._job = SaverJob.decode(job)
        self._links = SaverLinks(self._job, listener)
        self._tools = RankTools(repository, self._job.rank, thread_limit=thread_limit, blocks=blocks)
        self._commits: tuple[Link, RankCommits] | None = None
        repository.lease.orphans.stopped_seconds_max = stopped_seconds_max()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._job.rank == 0

    @property
    def bases(self) -> BaseCache:
        """The bases of the next commit."""
        return self._tools.bases

    def forget_bases(self) -> None:
        """Forget what the next commit would be based on."""
        self._tools.bases = BaseCache()

    def commit(
        self,
        ticket: Ticket,
        captured: Captured,
        parent: int | None,
        watch: Stopwatch,
        *,
        take_run: Callable[[], None],
        on_all_staged: Callable[[], None],
    ) -> Receipt:
        """Commit a ticket as this rank's part of a checkpoint.

        Args:
            ticket: The ticket.
            captured: Its state.
            parent: The seq that it continues.
            watch: Receives the duration of each stage.
            take_run: Rank 0: takes the lease of the run.
            on_all_staged: Called when all ranks have staged it, on a thread that must not wait.

        Raises:
            CkstoreError: The commit failed on one of the ranks; the message names it.
        """
        head = ticket.head
        ticket.stop_limit = StopLimit(self._job.rank, stopped_seconds_max())

        def attempt(number: int) -> Receipt:
            def note_all_staged(staged: int) -> None:
                if staged == number:
                    on_all_staged()

            link, commits = self._commits_for(number)
            link.call_when_all_staged(note_all_staged)
            try:
                make_request = partial(self._request, ticket, captured, parent, watch)
                return commits.commit(
                    head.step, head.policy, make_request, number=number, staging=ticket, take_run=take_run
                )
            finally:
                link.call_when_all_staged(None)

        number = _first_attempt(ticket.job_number)
        commits = self._commits_for(number)[1]
        try:
            try:
                return attempt(number)
            except Exception:
                # All ranks do the same, whatever each of them raises.
                if not commits.has_removed_cause(head.step, captured.nbytes):
                    raise
            return attempt(number + 1)
        except BaseException as error:
            self._after(error)
            raise

    def _request(self, ticket: Ticket, captured: Captured, parent: int | None, watch: Stopwatch) -> RankRequest:
        head = ticket.head
        if parent is not None:
            self._tools.repository.prepare_run()
            follow_parent(self._tools.repository, self._tools.bases, parent)
        return RankRequest(
            state=decode_share(head.share, captured),
            step=head.step,
            policy=head.policy,
            parent=parent,
            metrics=head.metrics,
            source_is_immutable=True,
            retained_slot=ticket.number if ticket.may_retain else None,
            watch=watch,
        )

    def note_lost(self, rank: int, how: str, number: int) -> None:
        """Report to the other savers that the trainer of another rank is lost, or has lost its saver. On any thread.

        Args:
            rank: The rank.
            how: What happened, to follow the name of the rank.
            number: The background commit in which it has lost its saver; 0: the trainer itself is lost.
        """
        # Neither the commit nor its repetition.
        self._links.note_lost(rank, how, 2 * number)

    def decline(self, number: int, step: int, error: Exception) -> None:
        """Make a commit fail on all ranks, because this rank's trainer cannot take part.

        Args:
            number: The number of the commit.
            step: The step.
            error: Why.

        Raises:
            RankError: The other savers cannot be reached.
        """
        attempt = _first_attempt(number)
        self._commits_for(attempt)[1].decline(attempt, step, error)
        self._after(error)

    def _commits_for(self, number: int) -> tuple[Link, RankCommits]:
        link = self._links.link_for(number)
        if self._commits is None or self._commits[0] is not link:
            # The other savers take this one for dead if the thread is suspended.
            leave_idle_class(link.thread)
            self._commits = link, RankCommits(link, self._tools, on_divergence=self._job.on_divergence)
        return self._commits

    def _after(self, error: BaseException) -> None:
        """Leave the connection if the other savers do: after an error that is a RankError for them."""
        shared = restored_error(record_of(error), source="the job", other=RankError)
        if isinstance(shared, RankError):
            self._links.discard(shared)

    def close(self) -> None:
        """Leave the job."""
        self._links.close()


def _first_attempt(number: int) -> int:
    return 2 * number - 1
