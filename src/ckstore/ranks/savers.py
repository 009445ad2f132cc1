"""The savers of a job: what a trainer passes to its own, and how savers find each other without their trainers.

Rank 0 listens on a socket that its trainer opens and its saver inherits. So other savers can connect at any time, and
no call of a trainer waits for a saver to start. If a saver is lost, the commit fails on all ranks. With the next one
they make other connections, under a token that belongs to that commit.

A rank whose trainer or saver is gone may have no saver that says so. But the trainers are connected, too: each tells
its saver which other trainers are lost, or have lost their savers, and the savers tell rank 0's.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CkstoreError, MalformedError, RankError
from ckstore.format.records import Count, ShortText, decode_inner, encode_inner
from ckstore.hashing import digest_of
from ckstore.ranks.actions import COMMIT_AGAIN, START_AGAIN
from ckstore.ranks.arrays import Held, RankState
from ckstore.ranks.io_loop import Job, Timing
from ckstore.ranks.link import Link
from ckstore.ranks.part import Skeleton
from ckstore.ranks.protocol import LEAVE_SECONDS
from ckstore.ranks.world import addresses_of
from ckstore.state.capture import Captured

_PAST_MAX = 16
"""Earlier commits whose savers rank 0 recognizes if they are late."""


class SaverJob(NamedTuple):
    """What a saver must know of its job; the fields are those of ``Ranks``."""

    rank: Count
    world: Count
    address: ShortText
    token: ShortText
    join_seconds: float
    on_divergence: ShortText

    def encode(self) -> bytes:
        """Return the job as it is passed to a saver."""
        return encode_inner(self)

    @classmethod
    def decode(cls, content: bytes) -> SaverJob:
        """Return the job that a trainer has passed."""
        return decode_inner(content, cls, where="the job of a saver")


@dataclass(frozen=True)
class SaverDoor:
    """What a trainer passes to each saver that it starts.

    Args:
        job: The job of the savers.
        listener: Rank 0: the socket on which its saver accepts the others; None elsewhere.
    """

    job: SaverJob
    listener: int | None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, whose saver holds the lease."""
        return self.job.rank == 0

    @property
    def stopped_seconds_max(self) -> float | None:
        """How long a trainer waits for a saver that is stopped. None: as long as it lives, since no rank waits."""
        return stopped_seconds_max() if self.job.world > 1 else None


HELD = np.dtype(
    [("unit", "<u4"), ("group", "<u4"), ("offset", "<u8"), ("nbytes", "<u8"), ("storage", "<u4"), ("begin", "<u8")]
)
"""The fields of ``Held``; ``group`` is the index of its holders."""


def encode_share(state: RankState) -> bytes:
    """Return what a rank holds, without the tree and the bytes, as its trainer passes it to its saver."""
    return state.captured.structure.once("share of rank", lambda: _encoded_share(state))


def _encoded_share(state: RankState) -> bytes:
    groups: dict[tuple[int, ...], int] = {}
    rows = [
        (held.unit, groups.setdefault(held.holders, len(groups)), held.offset, held.nbytes, held.storage, held.begin)
        for held in state.held
    ]
    return encode_inner((Skeleton.of(state).tables, tuple(groups), np.array(rows, HELD).tobytes()))


def decode_share(content: bytes, captured: Captured) -> RankState:
    """Return what a rank holds.

    Args:
        content: From ``encode_share``.
        captured: Its staged state.

    Raises:
        MalformedError: It contradicts itself.
    """
    facts = captured.structure.once(("share of rank", content), lambda: _decoded_share(content, captured))
    return replace(facts, captured=captured)


def _decoded_share(content: bytes, captured: Captured) -> RankState:
    where = "the head of a staged state"
    tables, groups, rows = decode_inner(content, tuple[bytes, tuple[tuple[Count, ...], ...], bytes], where=where)
    skeleton = Skeleton.of_tables(captured.tree, tables, where=where)
    held = tuple(
        Held(unit, offset, nbytes, storage, begin, groups[group])
        for unit, group, offset, nbytes, storage, begin in np.frombuffer(rows, HELD).tolist()
    )
    for each in held:
        if each.begin + each.nbytes > captured.storages[each.storage].nbytes:
            raise MalformedError("a rank holds more than its storage has", where=where)
    return RankState(
        captured,
        skeleton.tensors,
        skeleton.units,
        held,
        skeleton.layouts,
        skeleton.per_rank,
        skeleton.replicated,
    )


def stopped_seconds_max() -> float:
    """Return how long a saver may be stopped, or its trainer during a copy: as long as a rank may be silent."""
    return Timing().silent_seconds


class _Lost(NamedTuple):
    """A rank whose trainer is lost, or has lost its saver.

    Args:
        how: What happened, to follow the name of the rank.
        last: The last commit that it does not join; 0: it joins none any more.
        noticed: When that was noticed.
    """

    how: str
    last: int
    noticed: float


class SaverLinks:
    """The connection of a saver to the others; a new one after each loss. Used by one thread, except ``note_lost``.

    Rank 0 keeps its side of a failed connection until the next commit. So a saver that is late gets the same error.

    Args:
        job: The job.
        listener: Rank 0: the inherited socket. It stays open.
    """

    def __init__(self, job: SaverJob, listener: socket.socket | None) -> None:
        self._job, self._listener = job, listener
        self._link: Link | None = None
        self._ended: CkstoreError | None = None
        """Rank 0: why the connection is not used any more."""
        self._lost: dict[int, _Lost] = {}

    def link_for(self, number: int) -> Link:
        """Return a connection that works for a commit, which all savers ask for with the same number.

        Raises:
            RankError: Another saver cannot be reached.
        """
        link = self._link
        # If another saver has begun this commit there, all get the same error there.
        if link is not None and (link.is_broken or self._ended is not None) and not link.has_seen(number):
            self.close()
        if self._link is None:
            self._link = self._connected(number)
            # After it was assigned: a loss that is noted now is reported by one of both threads, or by both.
            for rank, lost in list(self._lost.items()):
                _report_lost(self._link, rank, lost)
        return self._link

    def note_lost(self, rank: int, how: str, last: int = 0) -> None:
        """Report that another rank's trainer is lost, or has lost its saver. On any thread.

        Args:
            rank: The rank.
            how: What happened, to follow the name of the rank.
            last: The last commit that it does not join; 0: it joins none any more.
        """
        before = self._lost.get(rank)
        if before is None or before.last:
            self._lost[rank] = _Lost(how, last, SYSTEM_CLOCK.monotonic())
        link = self._link
        if link is not None:
            _report_lost(link, rank, self._lost[rank])

    def _require_rank_0(self, number: int) -> None:
        """Raise if rank 0 does not join this commit, and its saver has had time to answer."""
        lost = self._lost.get(0)
        if lost is None or SYSTEM_CLOCK.monotonic() - lost.noticed < LEAVE_SECONDS:
            return
        if not lost.last:
            raise RankError(f"rank 0 {lost.how}, and its saver does not answer", todo=START_AGAIN, rank=0)
        if number <= lost.last:
            raise RankError(f"rank 0 {lost.how}: the commit failed on all ranks", todo=COMMIT_AGAIN, rank=0)

    def _connected(self, number: int) -> Link:
        job = self._job
        if job.rank:
            past: dict[bytes, CkstoreError] = {}
        else:
            late = self._ended or RankError(
                "rank 0 has connected to the other ranks again: an earlier commit failed", todo="commit again", rank=0
            )
            past = {self._token(each): late for each in range(max(1, number - _PAST_MAX), number)}
        self._ended = None
        listener = None if job.rank or self._listener is None else self._listener.dup()
        addresses = addresses_of(job.address) if job.rank else ()
        timing = Timing(join_seconds=job.join_seconds)
        ours = Job(job.rank, job.world, self._token(number), past)
        try:
            check = partial(self._require_rank_0, number)
            return Link(ours, timing, listener=listener, addresses=addresses, check=check)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def _token(self, number: int) -> bytes:
        return digest_of(f"{self._job.token} savers from commit {number}".encode())

    def discard(self, error: CkstoreError) -> None:
        """Use the connection for no other commit.

        Args:
            error: Why: a saver that is late gets it from rank 0.
        """
        if self._job.rank or self._link is None:
            self.close()
        else:
            self._ended = error
            self._link.refuse(error)

    def close(self) -> None:
        """Close the connection. The next commit makes another."""
        if self._link is not None:
            self._link.close()
        self._link = None


def _report_lost(link: Link, rank: int, lost: _Lost) -> None:
    link.send(lambda member: member.left(rank, lost.how, lost.last))
