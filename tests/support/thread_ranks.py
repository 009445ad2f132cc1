"""Ranks as threads of one process, with real connections between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ckstore
from ckstore.config import Policy
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.commits import RankCommits
from ckstore.ranks.io_loop import Job, Timing
from ckstore.ranks.link import Link, listen
from ckstore.ranks.work import RankRequest, RankTools
from ckstore.results import Receipt
from support.rank_jobs import FAST, open_repository

TOKEN = b"a secret of one job, 32 bytes..."
QUICK = Timing(join_seconds=5.0, beat_seconds=0.2, silent_seconds=1.0, handshake_seconds=2.0, close_seconds=1.0)


class ThreadRank:
    """One rank."""

    def __init__(self, path: Path, link: Link, on_divergence: str) -> None:
        self.link = link
        self.tools = RankTools(open_repository(path), link.rank)
        self.capture = RankCapture(link.world)
        self.commits = RankCommits(link, self.tools, on_divergence=on_divergence)

    def commit(self, state: Any, step: int, policy: Policy = FAST) -> Receipt:
        """Commit this rank's state."""
        return self.commits.commit(step, policy, lambda: RankRequest(self.capture.capture(state), step, policy))

    def close(self) -> None:
        """Leave the job."""
        self.link.close()
        self.tools.repository.close()


class ThreadJob:
    """A job whose ranks are threads.

    Args:
        path: The store; it exists.
        world: Number of ranks.
        timing: How long things may take.
        on_divergence: As for ``RankCommits``.
    """

    def __init__(self, path: Path, world: int, *, timing: Timing = QUICK, on_divergence: str = "warn") -> None:
        self.world = world
        self._threads = ThreadPoolExecutor(world)
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()[:2]

        def join(rank: int) -> ThreadRank:
            job = Job(rank, world, TOKEN)
            if rank == 0:
                return ThreadRank(path, Link(job, timing, listener=listener), on_divergence)
            return ThreadRank(path, Link(job, timing, addresses=[address]), on_divergence)

        self.ranks = list(self._threads.map(join, range(world)))

    def each(self, call: Callable[[ThreadRank], Any]) -> list[Any]:
        """Call a function for every rank on its thread. Return the results; an exception is a result, too."""

        def caught(rank: ThreadRank) -> Any:
            try:
                return call(rank)
            except Exception as error:
                return error

        return list(self._threads.map(caught, self.ranks))

    def commit(self, states: Sequence[Any], step: int, policy: Policy = FAST) -> list[Any]:
        """Commit the states of all ranks; return what each rank gets."""
        return self.each(lambda rank: rank.commit(states[rank.link.rank], step, policy))

    def close(self) -> None:
        """End the job."""
        self.each(ThreadRank.close)
        self._threads.shutdown()


class StoreRank(NamedTuple):
    """One rank with its store."""

    rank: int
    store: ckstore.Store
    ranks: ckstore.Ranks

    def close(self) -> None:
        """Leave the job."""
        self.store.close()
        self.ranks.close()


@contextlib.contextmanager
def stores_of_ranks(
    place: Any, world: int, **options: Any
) -> Iterator[Callable[[Callable[[StoreRank], Any]], list[Any]]]:
    """Open a store as each rank of a job. Yield what calls a function for all ranks, each on a thread of its own.

    An exception is a result, too.
    """
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(world) as threads:

        def opened(rank: int) -> StoreRank:
            ranks = ckstore.Ranks(rank, world, address, TOKEN.decode(), join_seconds=20)
            return StoreRank(rank, ckstore.open(place, ranks=ranks, **options), ranks)

        found = list(threads.map(opened, range(world)))

        def each(call: Callable[[StoreRank], Any]) -> list[Any]:
            def caught(rank: StoreRank) -> Any:
                try:
                    return call(rank)
                except Exception as error:
                    return error

            return list(threads.map(caught, found))

        try:
            yield each
        finally:
            each(StoreRank.close)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with listen("127.0.0.1", 0) as end:
        return int(end.getsockname()[1])
