"""Open one store on all ranks: rank 0 makes it if need be, and every rank must find the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ckstore.clock import Clock
from ckstore.errors import CkstoreError, NotFoundError, RankError, UsageError
from ckstore.format.error_records import ErrorRecord, record_of, restored_error
from ckstore.format.records import StoreRecord, decode_inner, encode_inner
from ckstore.io.backend import Backend
from ckstore.ranks.actions import of_rank
from ckstore.ranks.world import Ranks
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

Opened = TypeVar("Opened")

VISIBLE_SECONDS = 30.0
"""How long to wait for what rank 0 has written, in a shared folder that shows another host's files late."""

LOOK_SECONDS = 0.2


class _Found(NamedTuple):
    """What a rank found."""

    store_id: str
    run: str
    place: str
    error: ErrorRecord | None


def open_record(
    backend: Backend, run: str, ranks: Ranks, clock: Clock, read_or_make: Callable[[], StoreRecord]
) -> StoreRecord:
    """Return the record of the store that all ranks open.

    Args:
        backend: Where this rank looks for it.
        run: The run that this rank opens.
        ranks: The ranks.
        clock: Source of time.
        read_or_make: Returns the record. Called on rank 0.

    Raises:
        NotFoundError: There is no store, or a rank does not see it.
        UsageError: Ranks open different stores or runs.
        CkstoreError: What ``read_or_make`` raises on rank 0.
    """
    link = ranks.link()
    link.agree("open", b"", lambda values: read_or_make().store_id.encode())
    record, error = None, None
    try:
        record = _read(backend, ranks, clock)
    except Exception as failure:
        error = failure
    store_id, problem = "" if record is None else record.store_id, None if error is None else record_of(error)
    found = _Found(store_id, run, str(backend.root), problem)
    try:
        link.agree("open (the same store)", encode_inner(found), _require_same)
    except CkstoreError:
        # A rank's own error says more than what the others get.
        if error is not None:
            raise error from None
        raise
    assert record is not None, "the ranks do not agree otherwise"
    return record


def _read(backend: Backend, ranks: Ranks, clock: Clock) -> StoreRecord:
    # The others wait for join_seconds.
    seconds = min(VISIBLE_SECONDS, ranks.join_seconds / 2)
    return opened_late(lambda: read_store_record(backend), backend.root, ranks.rank, clock, seconds)


def opened_late(open_store: Callable[[], Opened], place: str, rank: int, clock: Clock, seconds: float) -> Opened:
    """Open a store that rank 0 has opened, as soon as this rank sees it.

    Args:
        open_store: Opens it, or raises a NotFoundError.
        place: Where it is.
        rank: This rank.
        clock: Source of time.
        seconds: How long to wait.

    Raises:
        NotFoundError: This rank does not see it in that time.
    """
    deadline = clock.monotonic() + seconds
    while True:
        try:
            return open_store()
        except NotFoundError:
            if clock.monotonic() >= deadline:
                raise NotFoundError(
                    f"rank {rank} does not see the store that rank 0 has opened",
                    where=place,
                    todo="pass the same path on every rank, and mount the same file system on every host",
                ) from None
        clock.sleep(LOOK_SECONDS)


def wait_visible(repository: Repository, seq: int, rank: int) -> None:
    """Wait until this rank sees a checkpoint that rank 0 sees.

    Raises:
        NotFoundError: It does not see it in ``VISIBLE_SECONDS``.
    """
    clock = repository.clock
    deadline = clock.monotonic() + VISIBLE_SECONDS
    while not repository.manifests.is_visible(seq):
        if clock.monotonic() >= deadline:
            raise NotFoundError(
                f"rank {rank} does not see seq {seq}, which rank 0 sees",
                where=repository.backend.root,
                todo="check that all hosts have mounted the same store",
            )
        clock.sleep(LOOK_SECONDS)


def _require_same(values: tuple[bytes, ...]) -> bytes:
    """Raise for the first rank that has found something else than rank 0."""
    found = [decode_inner(value, _Found, where=f"rank {rank}") for rank, value in enumerate(values)]
    first = found[0]
    for rank, here in enumerate(found):
        ranks = ["0", str(rank)]
        if here.error is not None:
            record = of_rank(here.error, rank)
            record = record._replace(facts={**record.facts, "ranks": ranks[1:]})
            raise restored_error(record, source=f"rank {rank}", other=RankError)
        if here.store_id != first.store_id:
            raise UsageError(
                "the ranks open different stores",
                where=f"{first.place} on rank 0, {here.place} on rank {rank}",
                todo="pass the same path on every rank; if it is the same, mount the same file system on every host",
                ranks=ranks,
            )
        if here.run != first.run:
            raise UsageError(
                f"the ranks open different runs: {first.run!r} on rank 0, {here.run!r} on rank {rank}",
                where=first.place,
                todo="pass the same run on every rank",
                ranks=ranks,
            )
    return b""
