"""Rank 0's plan of a commit: which rank writes which bytes.

A rank tells what it holds as a skeleton and as *holdings*. Rank 0 answers with the spans that the rank writes. Bytes of
which a rank knows that it holds them alone need no answer.

Invariants:
- Every byte that several ranks hold is written by exactly one of them.
- A plain unit is a replica on all ranks that have the same path with the same kind of bytes, unless it was declared
  ``PerRank``, or was found to differ between ranks before. Then each rank writes its own.
- Equal ranges of a shard are replicas, too, if ranks do not know its holders: it lies on several meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ckstore.commit.chunking import grid_nbytes
from ckstore.config import Limits
from ckstore.errors import MalformedError
from ckstore.format.records import Count, decode_inner, encode_inner
from ckstore.format.tree import Path
from ckstore.hashing import digest_of
from ckstore.ranks.arrays import RankState, Unit
from ckstore.ranks.part import Skeleton
from ckstore.ranks.spans import Span, plan_spans
from ckstore.ranks.writing import OwnSpans
from ckstore.state.memory import SpanShape

HOLDING = np.dtype([("unit", "<u4"), ("group", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])
"""A byte range that a rank holds, and the ranks that hold it. Group 0: the holders are not known to the rank."""

OWN_SPAN = np.dtype([("unit", "<u4"), ("lo", "<u8"), ("hi", "<u8")])

OWN_NBYTES_MAX = 1 << 20
"""Largest unit that each rank writes without being asked if it differed before. Of a larger one, such as a weight with
a flipped bit, only the ranks that differ write a copy, after the comparison."""

UnitKey = tuple[Path, int, int, bool, bool]
"""What makes units of several ranks the same: path, bytes, element width, is_float, and whether it is a shard."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """What one rank holds.

    Args:
        rows: Its byte ranges, as ``HOLDING``.
        groups: The ranks of each group, ascending. The first group is empty.
    """

    rows: NDArray[np.void]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, state: RankState) -> Holdings:
        """Return the holdings of a captured state."""
        numbers: dict[tuple[int, ...], int] = {(): 0}
        rows = np.array(
            [
                (held.unit, numbers.setdefault(held.holders, len(numbers)), held.offset, held.nbytes)
                for held in state.held
            ],
            HOLDING,
        )
        return cls(rows, tuple(numbers))

    @cached_property
    def encoded(self) -> bytes:
        """The holdings as they are sent."""
        return encode_inner((self.groups, self.rows.tobytes()))

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of ``encoded``."""
        return digest_of(self.encoded)

    @classmethod
    def decode(cls, content: bytes, *, where: object = None) -> Holdings:
        """Decode what another rank has sent.

        Raises:
            MalformedError: It is not what ``encoded`` gives.
        """
        groups, rows = decode_inner(content, tuple[tuple[tuple[Count, ...], ...], bytes], where=where)
        if len(rows) % HOLDING.itemsize or not groups or groups[0]:
            raise MalformedError("the holdings of a rank have an impossible length", where=where)
        found = np.frombuffer(rows, HOLDING)
        if (found["group"] >= len(groups)).any() or any(list(each) != sorted(set(each)) for each in groups):
            raise MalformedError("the holdings of a rank name a group that does not exist", where=where)
        return cls(found, tuple(groups))


def encode_spans(spans: Sequence[Span]) -> bytes:
    """Return spans as rank 0 sends them; their units are those of the receiver."""
    return np.array(spans, OWN_SPAN).tobytes()


def decode_spans(content: bytes) -> OwnSpans:
    """Return the spans of this rank, by unit.

    Raises:
        MalformedError: It is not what ``encode_spans`` gives.
    """
    if len(content) % OWN_SPAN.itemsize:
        raise MalformedError("the spans of a rank have an impossible length")
    spans: dict[int, list[tuple[int, int]]] = {}
    for unit, lo, hi in np.frombuffer(content, OWN_SPAN).tolist():
        spans.setdefault(unit, []).append((lo, hi))
    return spans


@dataclass(frozen=True, eq=False)
class RankContent:
    """What rank 0 knows of one rank."""

    skeleton: Skeleton
    holdings: Holdings


def plan_ranks(ranks: Sequence[RankContent], limits: Limits, differing: frozenset[Path]) -> list[list[Span]]:
    """Return the spans that each rank writes, with the unit numbers of that rank.

    Args:
        ranks: What each rank holds.
        limits: Bounds of the store.
        differing: Paths of plain units that differed between ranks in an earlier commit.
    """
    table = _UnitTable(ranks)
    own = [0] * len(ranks)
    alone: list[list[Span]] = [[] for _ in ranks]
    groups: dict[tuple[int, ...], list[NDArray[np.int64]]] = {}
    unclear: list[NDArray[np.int64]] = []
    members = _equal_ranks(ranks)
    for number, equal in enumerate(members):
        content, numbers = ranks[equal[0]], table.numbers[equal[0]]
        rows = content.holdings.rows
        _check_units(rows, len(numbers), equal[0])
        is_per_rank = table.per_rank_units(content.skeleton, differing)
        for group, holders in enumerate(content.holdings.groups):
            mine = rows[rows["group"] == group]
            if group and len(holders) == 1:
                for rank in equal:
                    own[rank] += int(mine["nbytes"].sum())
            elif group and holders[0] in equal:
                groups.setdefault(holders, []).append(_triples(mine, numbers))
            elif not group:
                is_own = is_per_rank[mine["unit"]]
                unclear.append(_with_number(_triples(mine[~is_own], numbers), number))
                spans = [Span(*row) for row in _triples(mine[is_own], numbers).tolist()]
                for rank in equal:
                    alone[rank] += spans
    for numbers_of_holders, ranges in _by_holders(unclear):
        holders = tuple(sorted(rank for number in numbers_of_holders for rank in members[number]))
        if len(holders) == 1:
            alone[holders[0]] += [Span(*row) for row in ranges.tolist()]
        else:
            groups.setdefault(holders, []).append(ranges)
    for rank, spans_alone in enumerate(alone):
        own[rank] += sum(span.hi - span.lo for span in spans_alone)
    steps = [
        grid_nbytes(SpanShape(unit.nbytes, unit.element_width, unit.is_float), limits.chunk_nbytes_max)
        for unit in table.units
    ]
    lines = {holders: [Span(*row) for row in np.concatenate(rows).tolist()] for holders, rows in groups.items()}
    planned = plan_spans(lines, steps, own)
    return [table.local(rank, [*alone[rank], *planned[rank]]) for rank in range(len(ranks))]


def _equal_ranks(ranks: Sequence[RankContent]) -> list[list[int]]:
    """Return the ranks that hold the same ranges of the same units, for each such set: often all, or each alone."""
    found: dict[tuple[bytes, int], list[int]] = {}
    for rank, content in enumerate(ranks):
        # Rank 0 decodes equal holdings once.
        found.setdefault((content.skeleton.tables_digest, id(content.holdings)), []).append(rank)
    return [*found.values()]


def _check_units(rows: NDArray[np.void], count: int, rank: int) -> None:
    if len(rows) and int(rows["unit"].max()) >= count:
        raise MalformedError(f"the holdings of rank {rank} name a unit that its skeleton does not have")


def _triples(rows: NDArray[np.void], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    begins = rows["offset"].astype(np.int64)
    return np.stack((numbers[rows["unit"]], begins, begins + rows["nbytes"].astype(np.int64)), axis=1)


def _with_number(triples: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    return np.concatenate((triples, np.full((len(triples), 1), number)), axis=1)


def _by_holders(rows: Sequence[NDArray[np.int64]]) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Yield the ranges that have the same holders, for each set of holders.

    Args:
        rows: For each holder its ranges, as unit, begin, end and the number of the holder.
    """
    every = np.concatenate([np.empty((0, 4), np.int64), *rows])
    every = every[np.lexsort(every.T[::-1])]
    is_first = np.ones(len(every), np.bool_)
    is_first[1:] = (every[1:, :3] != every[:-1, :3]).any(axis=1)
    begins = np.flatnonzero(is_first)
    counts = np.diff(np.append(begins, len(every)))
    for count in np.unique(counts).tolist():
        ranges = begins[counts == count]
        numbers = every[ranges[:, None] + np.arange(count), 3]
        distinct, index = np.unique(numbers, axis=0, return_inverse=True)
        for number, holders in enumerate(distinct.tolist()):
            yield tuple(holders), every[ranges[index.ravel() == number], :3]


class _UnitTable:
    """The units of all ranks, and their numbers on each rank."""

    def __init__(self, ranks: Sequence[RankContent]) -> None:
        self.units: list[Unit] = []
        known: dict[UnitKey, int] = {}
        # Skeletons differ in plain values more often than in their tables.
        made: dict[bytes, NDArray[np.int64]] = {}
        self._tables = [content.skeleton.tables_digest for content in ranks]
        for digest, content in zip(self._tables, ranks, strict=True):
            if digest not in made:
                made[digest] = np.array([self._add(unit, known) for unit in content.skeleton.units], np.int64)
        self.numbers = [made[digest] for digest in self._tables]
        self._local = {
            digest: {number: index for index, number in enumerate(numbers.tolist())} for digest, numbers in made.items()
        }
        self._per_rank: dict[bytes, NDArray[np.bool_]] = {}

    def _add(self, unit: Unit, known: dict[UnitKey, int]) -> int:
        key = (unit.path, unit.nbytes, unit.element_width, unit.is_float, unit.array is not None)
        number = known.setdefault(key, len(self.units))
        if number == len(self.units):
            self.units.append(unit)
        return number

    def per_rank_units(self, skeleton: Skeleton, differing: frozenset[Path]) -> NDArray[np.bool_]:
        """Return for each unit of a skeleton whether each rank writes its own."""
        digest = skeleton.tables_digest
        if digest not in self._per_rank:
            prefixes = set(skeleton.per_rank)
            lengths = sorted({len(path) for path in prefixes})
            found = [
                unit.array is None
                and (
                    (unit.path in differing and unit.nbytes <= OWN_NBYTES_MAX)
                    or any(unit.path[:length] in prefixes for length in lengths)
                )
                for unit in skeleton.units
            ]
            self._per_rank[digest] = np.array(found, np.bool_)
        return self._per_rank[digest]

    def local(self, rank: int, spans: Sequence[Span]) -> list[Span]:
        """Return spans with the unit numbers of a rank, ascending.

        A rank may lack a tensor that others have on its mesh. Then nobody writes its bytes, which the merge reports.
        """
        local = self._local[self._tables[rank]]
        return sorted(span._replace(unit=local[span.unit]) for span in spans if span.unit in local)


def spans_by_rank(plan: Sequence[Sequence[Span]]) -> list[bytes]:
    """Return what rank 0 sends to each rank."""
    return [encode_spans(spans) for spans in plan]
