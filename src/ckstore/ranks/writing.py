"""What one rank writes of a checkpoint, and what it computes so that its replicas can be compared.

Every byte of the checkpoint is written by one rank. A rank *owns* the ranges that it writes: those that it holds alone,
and its spans of those that others hold, too. Of all other ranges that it holds it sends digests, *checks*. Rank 0
compares them with what the owners wrote.

Both sides cut a range into the same pieces: a range below ``SHARED_NBYTES_MAX`` and below the grid step of its unit is
one piece, a larger one is cut on the grid. Owners cut their spans there, too. So the digest of a piece is usually the
start of a chunk id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckstore.commit.chunk_writer import WriteResult
from ckstore.commit.chunking import SHARED_NBYTES_MAX, CommitPlan, grid_nbytes
from ckstore.config import Limits
from ckstore.format.tree import ListNode, Path
from ckstore.hashing import chunk_id_of
from ckstore.ranks.arrays import Held, RankState, Unit
from ckstore.state.capture import Captured, Structure
from ckstore.state.memory import Spans, SpanShape
from ckstore.state.tensors import HostStorage

CHECK_NBYTES = 16
"""Bytes of a digest that replicas are compared by: an accident has a chance of 2^-128."""

OwnSpans = Mapping[int, Sequence[tuple[int, int]]]
"""The spans ``[lo, hi)`` of replicated units that this rank writes, ascending, by unit."""


class Check(NamedTuple):
    """The digest of one piece of a replicated unit, as one rank holds it."""

    unit: int
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class OwnRange:
    """A byte range of a local storage, as a storage of its own."""

    storage: HostStorage
    begin: int
    nbytes: int
    element_width: int
    is_float: bool

    @property
    def is_host(self) -> bool:
        """Whether the bytes are in host memory."""
        return self.storage.is_host

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``."""
        assert 0 <= lo <= hi <= self.nbytes
        return self.storage.read(self.begin + lo, self.begin + hi)

    def sample(self, offset: int, nbytes: int, width: int) -> bytes | None:
        """Return the sample of a range that was taken beforehand; None: there is none."""
        taken: Callable[[int, int, int], bytes | None] | None = getattr(self.storage, "sample", None)
        return None if taken is None else taken(self.begin + offset, nbytes, width)


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank owns of its state, and the rest of what it holds.

    Args:
        owned: The ranges that it writes, by unit and offset. Their order is that of the storages of its plan.
        rest: The ranges of replicated units that it holds and does not write.
        structure: What follows from these ranges alone.
    """

    owned: tuple[Held, ...]
    rest: tuple[Held, ...]
    structure: Structure

    @classmethod
    def of(cls, state: RankState, spans: OwnSpans) -> Share:
        """Return the share of a rank that writes these spans, and everything that it holds alone."""
        owned: list[Held] = []
        rest: list[Held] = []
        for held in state.held:
            if len(held.holders) == 1:
                owned.append(held)
                continue
            mine = [(max(lo, held.offset), min(hi, held.offset + held.nbytes)) for lo, hi in spans.get(held.unit, ())]
            mine = [(lo, hi) for lo, hi in mine if lo < hi]
            owned += [part_of(held, lo, hi) for lo, hi in mine]
            rest += [part_of(held, lo, hi) for lo, hi in gaps(held.offset, held.offset + held.nbytes, mine)]
        return cls(tuple(owned), tuple(rest), _structure_of(state, owned))

    @classmethod
    def of_ranges(cls, state: RankState, ranges: Sequence[Held]) -> Share:
        """Return the share of a rank that writes these ranges, and compares nothing."""
        return cls(tuple(ranges), (), _structure_of(state, ranges))

    @property
    def places(self) -> list[tuple[int, int]]:
        """The unit of each storage of the plan, and where the storage begins in it."""
        return [(held.unit, held.offset) for held in self.owned]

    def captured(self, state: RankState) -> Captured:
        """Return what this rank writes, as input of a commit: one storage for each range; no tree."""
        return Captured(
            tree=ListNode(()),
            paths=[],
            tensors=[],
            storages=_storages_of(state, self.owned),
            warnings=state.captured.warnings,
            structure=self.structure,
            starts=tuple(held.offset for held in self.owned),
        )


def _structure_of(state: RankState, owned: Sequence[Held]) -> Structure:
    structure = Structure()
    paths = {index: state.units[held.unit].path for index, held in enumerate(owned)}
    # A commit names bases by the path of a storage's first tensor. Ranges have no tree to take it from.
    structure.once("paths", lambda: paths)
    return structure


def _storages_of(state: RankState, ranges: Sequence[Held]) -> Sequence[HostStorage]:
    storages = state.captured.storages
    shapes = [_shape_of(state, held) for held in ranges]
    if not isinstance(storages, Spans):
        return [
            OwnRange(storages[held.storage], held.begin, *shape) for held, shape in zip(ranges, shapes, strict=True)
        ]
    places = [held.storage for held in ranges]
    begins = np.fromiter((held.begin for held in ranges), np.uint64, len(ranges))
    starts = storages.starts[places] + begins if ranges else begins
    return Spans(
        shapes, starts, [storages.keeps[place] for place in places], [storages[place].reader for place in places]
    )


def _shape_of(state: RankState, held: Held) -> SpanShape:
    unit = state.units[held.unit]
    return SpanShape(held.nbytes, unit.element_width, unit.is_float)


def part_of(held: Held, lo: int, hi: int) -> Held:
    """Return the bytes ``lo`` to ``hi`` of a unit, which are in a held range."""
    return held._replace(offset=lo, nbytes=hi - lo, begin=held.begin + lo - held.offset)


def gaps(lo: int, hi: int, covered: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[lo, hi)`` that ascending, disjoint ranges leave."""
    for begin, end in covered:
        if lo < begin:
            yield lo, begin
        lo = end
    if lo < hi:
        yield lo, hi


def pieces_of(state: RankState, held: Held, limits: Limits) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a held range by which replicas are compared: offset and length."""
    step = grid_nbytes(_shape_of(state, held), limits.chunk_nbytes_max)
    if held.nbytes < min(SHARED_NBYTES_MAX, step):
        yield held.offset, held.nbytes
        return
    end = held.offset + held.nbytes
    offset = held.offset
    while offset < end:
        nbytes = min(step - offset % step, end - offset)
        yield offset, nbytes
        offset += nbytes


def checks_of_rest(state: RankState, rest: Iterable[Held], limits: Limits, *, turn: int = 0) -> Iterator[Check]:
    """Yield the digests of what this rank holds and does not write. Reads and hashes it.

    Args:
        state: The state of this rank.
        rest: What it does not write.
        limits: Bounds of the store.
        turn: Chooses the pieces of parts that were declared ``Replicated``: others in each commit.
    """
    every = state.captured.structure.once("sampled", lambda: intervals_of(state.units, state.replicated))
    count = turn
    for held in rest:
        storage = state.captured.storages[held.storage]
        for offset, nbytes in pieces_of(state, held, limits):
            interval = every.get(held.unit, 1)
            count += 1
            if interval == 0 or count % interval:
                continue
            begin = held.begin + offset - held.offset
            yield Check(
                held.unit, offset, nbytes, bytes(chunk_id_of(storage.read(begin, begin + nbytes))[:CHECK_NBYTES])
            )


def intervals_of(units: Sequence[Unit], replicated: Sequence[tuple[Path, float]]) -> dict[int, int]:
    """Return for each unit that was declared ``Replicated`` of how many pieces one is compared; 0: of none."""
    found: dict[int, int] = {}
    for path, share in replicated:
        interval = round(1 / share) if share else 0
        found |= {index: interval for index, unit in enumerate(units) if unit.path[: len(path)] == path}
    return found


def checks_of_owned(
    state: RankState, share: Share, plan: CommitPlan, stored: WriteResult, limits: Limits
) -> Iterator[Check]:
    """Yield the digests of what this rank wrote of replicated units.

    A piece that is a chunk has been hashed already. Small ranges share chunks, so they are hashed once more.
    """
    for index, held in enumerate(share.owned):
        if len(held.holders) == 1:
            continue
        storage = state.captured.storages[held.storage]
        ids: dict[tuple[int, int], bytes] = {}
        offset = held.offset
        for piece in plan.storages[index].pieces:
            if len(plan.chunks[piece.chunk].sources) == 1:
                ids[offset, piece.nbytes] = stored.frames[piece.chunk].frame.chunk_id
            offset += piece.nbytes
        for offset, nbytes in pieces_of(state, held, limits):
            chunk_id = ids.get((offset, nbytes))
            if chunk_id is None:
                begin = held.begin + offset - held.offset
                chunk_id = chunk_id_of(storage.read(begin, begin + nbytes))
            yield Check(held.unit, offset, nbytes, bytes(chunk_id[:CHECK_NBYTES]))
