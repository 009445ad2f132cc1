"""What the state machines of ``protocol.py`` and ``member.py`` ask their callers to do, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckstore.format.error_records import ErrorRecord, Fact
from ckstore.hashing import digest_of
from ckstore.ranks.messages import Agreed, AllStaged, Asked, Awaited, Message, More, SaverLost, Wanted, Write

_ATTEMPT_NBYTES = 16

START_AGAIN = "start the job again; it continues from the newest checkpoint"
"""What to do after a rank was lost."""

BACKGROUND_CALLS = "background_calls"
"""Fact of an error: calls of ``commit_async`` that some ranks have made, and others have not."""

COMMIT_AGAIN = "commit again; if that fails, too, start the job again"
"""What to do after a saver was lost: the next commit starts another one."""


def rank_error(what: str, todo: str, *, kind: str = "RankError", **facts: Fact) -> ErrorRecord:
    """Return an error of the job as a whole."""
    return ErrorRecord(kind, what, None, todo, facts)


def of_rank(record: ErrorRecord, rank: int) -> ErrorRecord:
    """Return an error that names the rank on which it happened, unless it names the ranks that it is about."""
    if "ranks" in record.facts:
        return record
    where = f"rank {rank}" if record.where is None else f"rank {rank}: {record.where}"
    return record._replace(where=where, facts={**record.facts, "rank": rank})


def other_calls_record(step: int, counts: Mapping[int, int]) -> ErrorRecord:
    """Return the error for two ranks of which one has called ``commit`` and the other ``commit_async``.

    Args:
        step: The step of ``commit``.
        counts: How often each of the two has called ``commit_async``.
    """
    first, second = sorted(counts, key=lambda rank: counts[rank])
    what = f"rank {second} called commit_async where rank {first} called commit for step {step}"
    todo = "make the same calls in the same order on every rank"
    ranks = [str(rank) for rank in sorted(counts)]
    return rank_error(what, todo, kind="UsageError", ranks=ranks, **{BACKGROUND_CALLS: counts[second]})


def attempt_id(token: bytes, number: int) -> bytes:
    """Return the id of a commit: 16 bytes that every rank of the job can compute."""
    return digest_of(b"ckstore attempt" + number.to_bytes(8, "little") + token)[:_ATTEMPT_NBYTES]


class Send(NamedTuple):
    """Send a message to a rank."""

    rank: int
    message: Message


class Plan(NamedTuple):
    """Rank 0: compute what each rank writes. Answered by ``planned`` or ``failed``.

    ``digests`` has one tuple for each rank. ``contents`` has those that were not in the last Plan.
    """

    number: int
    digests: tuple[tuple[bytes, ...], ...]
    contents: dict[bytes, bytes]


class Merge(NamedTuple):
    """Rank 0: merge the part records of this turn. Answered by ``merged``, ``more`` or ``failed``."""

    number: int
    turn: int
    parts: dict[int, bytes]


class Publish(NamedTuple):
    """Rank 0: publish what was merged. Answered by ``published`` or ``failed``."""

    number: int


class Decide(NamedTuple):
    """Rank 0: choose the answer to a question from the values of all ranks. Answered by ``decided``."""

    topic: str
    number: int
    values: tuple[bytes, ...]


class LookUp(NamedTuple):
    """Every rank: rank 0 is lost. Search the store for this commit. Answered by ``found`` or ``not_found``."""

    number: int


class Finish(NamedTuple):
    """Every rank: a commit has ended. One of ``receipt`` and ``error`` is None; ``rank`` caused the error."""

    number: int
    receipt: bytes | None
    rank: int | None
    error: ErrorRecord | None


_Received = Wanted | Write | AllStaged | More | Asked | Agreed | Awaited | SaverLost
Action = Send | Plan | Merge | Publish | Decide | LookUp | Finish | _Received
"""Messages in this list are passed to the caller of the rank that received them."""
