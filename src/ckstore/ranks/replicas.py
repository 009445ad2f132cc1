"""Compare the replicas that ranks hold, by the digests in their parts.

A plain unit of which ranks hold different bytes gets several *copies*, each complete: what its holders have not written
yet, one of them must write.

Of a shard of which ranks hold different bytes, those of the first replica are stored. What another replica has written
of it is dropped, and the first one writes it. It is the first for all shards: so no checkpoint mixes replicas.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import MalformedError, UsageError
from ckstore.format.columns import Rows, joined
from ckstore.format.tree import Path, place_of
from ckstore.ranks.part import CHECK, Part
from ckstore.ranks.union import Numbers, Union
from ckstore.ranks.writing import gaps, intervals_of

STORED_FOR_EACH = "it was stored for each rank; if that is intended, mark it with ckstore.PerRank"
"""What a commit does with values that differ between ranks, and what to do about it."""

_NAMED_MAX = 8

Piece = tuple[int, int]
"""Offset and length of the bytes of a unit that were compared."""

Range = tuple[int, int, int]
"""Unit, offset and length of bytes that a rank has to write."""


class Difference(NamedTuple):
    """Replicas that differ.

    Args:
        path: The path of the unit.
        is_shard: It is a shard of a distributed tensor; else it is stored for each rank.
        ranks: The ranks whose bytes differ from those of most ranks.
        others: The other ranks that hold bytes that differ.
        offset: Where the first piece begins that differs.
        nbytes: Length of this piece.
        is_whole: All its pieces differ.
        stored: Of a shard: the ranks of which the bytes that differ are stored.
    """

    path: Path
    is_shard: bool
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    offset: int
    nbytes: int
    is_whole: bool = False
    stored: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """What differs, between which ranks, and where."""
        kind = "a shard" if self.is_shard else "a tensor"
        place = f"first in bytes {self.offset} to {self.offset + self.nbytes}"
        return f"{kind} differs on {ranks_text(self.ranks)} from {ranks_text(self.others)}, {place}"

    def __str__(self) -> str:
        stored = f"that of {ranks_text(self.stored)} was stored; check the memory of all these ranks"
        return f"{place_of(self.path)}: {self.what}; {stored if self.is_shard else STORED_FOR_EACH}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return numbers of ranks for people, the first ones."""
    names = ", ".join(map(str, ranks[:_NAMED_MAX])) + (", ..." if len(ranks) > _NAMED_MAX else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        differences: The replicas that differ, by unit.
        variants: For each unit of which there are several copies, the copy that each rank has; -1: none. Units that
            were declared ``PerRank`` are included.
        more: What ranks must still write so that everything is complete: unit (of its own skeleton), offset, length.
        dropped: For each rank, the rows of the ranges of its part that are not stored: of shards that differ.
    """

    differences: tuple[Difference, ...]
    variants: Mapping[int, Numbers]
    more: Mapping[int, tuple[Range, ...]]
    dropped: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def kept(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of all ranks without the ranges that are not stored. What was written later stays."""
        if not self.dropped:
            return parts
        found = list(parts)
        for rank, rows in self.dropped.items():
            ranges = parts[rank].ranges
            is_kept = ~np.isin(np.arange(len(ranges)), rows)
            found[rank] = replace(parts[rank], ranges=ranges[is_kept])
        return found


def compare(union: Union, parts: Sequence[Part]) -> Comparison:
    """Compare the replicas of all ranks; ``parts`` are in the order of the ranks.

    Raises:
        MalformedError: A part contradicts its skeleton, or ranks have compared different pieces.
        UsageError: Shards differ of which only a sample was compared.
    """
    found = _Checks.of(union, parts)
    differences: list[Difference] = []
    variants = dict(union.declared_variants)
    split: list[int] = []
    chosen: dict[int, dict[Piece, list[int]]] = {}
    for unit in found.units_that_differ():
        pieces = found.pieces_of(unit)
        is_shard = union.units[unit].array is not None
        places = union.mesh_places(unit) if is_shard else {}
        differing = _odd_ranks(pieces, places)
        torn = {piece: digests for piece, digests in pieces.items() if len(set(digests.values())) > 1}
        is_whole = len(torn) == len(pieces)
        stored: set[int] = set()
        if is_shard:
            chosen[unit] = {piece: _first_replica(digests, places) for piece, digests in torn.items()}
            stored = {ranks[0] for ranks in chosen[unit].values()}
        else:
            variants[unit] = _copies(union, unit, pieces, differing)
            split.append(unit)
        others = {rank for digests in torn.values() for rank in digests}.difference(differing)
        ranks = tuple(differing), tuple(sorted(others))
        path = union.units[unit].path
        differences.append(Difference(path, is_shard, *ranks, *min(torn), is_whole, tuple(sorted(stored))))
    if chosen:
        _refuse_sampled_shards(union, next(each for each in differences if each.is_shard))
    more, dropped = _more(union, parts, variants, split), _replaced(union, parts, chosen)
    for rank, unit, offset, nbytes in dropped.wanted:
        more.setdefault(rank, []).append((union.local(rank, unit), offset, nbytes))
    return Comparison(
        tuple(differences), variants, {rank: tuple(ranges) for rank, ranges in more.items()}, dropped.rows
    )


def _refuse_sampled_shards(union: Union, difference: Difference) -> None:
    """Refuse shards that differ if others may differ unnoticed: then what is stored could be of several replicas.

    Raises:
        UsageError: Only a sample of some shards was compared.
    """
    for skeleton in union.skeletons:
        every = intervals_of(skeleton.units, skeleton.replicated)
        sampled = [unit for index, unit in enumerate(skeleton.units) if unit.array and every.get(index, 1) != 1]
        if sampled:
            raise UsageError(
                f"{difference.what}; a checkpoint could mix replicas, because only a sample of "
                f"{place_of(sampled[0].path)} was compared",
                where=place_of(difference.path),
                todo="find the rank with faulty memory or other arithmetic, and restore the newest checkpoint on all "
                "ranks; or commit without ckstore.Replicated",
                path=difference.path,
                ranks=difference.ranks,
            )


@dataclass(frozen=True)
class _Checks:
    """All checks, sorted by unit, offset and rank. Pieces of one offset have one length."""

    rank: Numbers
    unit: Numbers
    rows: Rows
    words: NDArray[np.uint64]
    is_first: NDArray[np.bool_]
    """Whether a row is the first of its piece."""

    @classmethod
    def of(cls, union: Union, parts: Sequence[Part]) -> _Checks:
        counts = [len(part.checks) for part in parts]
        units = [_units_of(union, number, part.checks) for number, part in enumerate(parts) if counts[number]]
        rows = joined((part.checks for part in parts), CHECK)
        rank, unit = np.repeat(np.arange(len(parts)), counts), np.concatenate([np.zeros(0, np.int64), *units])
        if union.per_rank:
            is_compared = ~np.isin(unit, [*union.per_rank])
            rank, unit, rows = rank[is_compared], unit[is_compared], rows[is_compared]
        # A stable sort: the rows of one piece stay in the order of the ranks.
        order = np.lexsort((rows["offset"].copy(), unit))
        rank, unit, rows = rank[order], unit[order], rows[order]
        words = np.ascontiguousarray(rows["digest"]).view(np.uint64).reshape(len(rows), 2)
        is_first = np.ones(len(rows), bool)
        is_same_unit = unit[1:] == unit[:-1]
        is_same = (
            is_same_unit & (rows["offset"][1:] == rows["offset"][:-1]) & (rows["nbytes"][1:] == rows["nbytes"][:-1])
        )
        is_first[1:] = ~is_same
        torn = np.flatnonzero(is_same_unit & ~is_same & (rows["offset"][1:] < (rows["offset"] + rows["nbytes"])[:-1]))
        if len(torn):
            at = int(torn[0])
            raise MalformedError(
                f"ranks {rank[at]} and {rank[at + 1]} have compared different pieces of a replica",
                where=place_of(union.units[int(unit[at])].path),
            )
        return cls(rank, unit, rows, words, is_first)

    def units_that_differ(self) -> list[int]:
        """Return the units of which some rows differ from the first row of their piece."""
        first = np.flatnonzero(self.is_first)[np.cumsum(self.is_first) - 1] if len(self.rows) else []
        differs = (self.words != self.words[first]).any(axis=1)
        found: list[int] = np.unique(self.unit[differs]).tolist()
        return found

    def pieces_of(self, unit: int) -> dict[Piece, dict[int, bytes]]:
        """Return the digest of each piece of a unit on each rank."""
        lo, hi = np.searchsorted(self.unit, [unit, unit + 1])
        pieces: dict[Piece, dict[int, bytes]] = {}
        for rank, (_, offset, nbytes, digest) in zip(self.rank[lo:hi].tolist(), self.rows[lo:hi].tolist(), strict=True):
            pieces.setdefault((offset, nbytes), {})[rank] = digest
        return pieces


def _units_of(union: Union, rank: int, rows: Rows) -> Numbers:
    """Return the units of the checkpoint that the rows of a part name, after checking the rows."""
    index = int(union.skeleton_of[rank])
    lengths = union.lengths[index]
    if int(rows["unit"].max()) >= len(lengths):
        raise MalformedError(f"the part of rank {rank} names a unit that its skeleton does not have")
    here = lengths[rows["unit"]]
    offset, nbytes = rows["offset"], rows["nbytes"]
    if not ((nbytes > 0) & (offset <= here)).all() or (nbytes > here - offset).any():
        raise MalformedError(f"the part of rank {rank} has a range that is empty or beyond its unit")
    units: Numbers = union.numbers[index][rows["unit"]]
    return units


def _odd_ranks(pieces: Mapping[Piece, Mapping[int, bytes]], places: Mapping[int, int]) -> list[int]:
    """Return the ranks with a digest that most ranks do not have. Of as many, that of the first rank counts."""
    odd: set[int] = set()
    for digests in pieces.values():
        counts = Counter(digests[rank] for rank in _in_order(digests, places))
        usual = max(counts, key=lambda digest: counts[digest])
        odd.update(rank for rank, digest in digests.items() if digest != usual)
    return sorted(odd)


def _copies(union: Union, unit: int, pieces: Mapping[Piece, Mapping[int, bytes]], odd: Sequence[int]) -> Numbers:
    """Return the copy that each rank has: one for all usual ranks, and one for each other combination of bytes."""
    differing = frozenset(odd)
    keys: dict[object, int] = {}
    copies = np.full(union.world, -1, np.int64)
    for rank in union.holders(unit):
        own = tuple(digests.get(rank) for digests in pieces.values()) if rank in differing else None
        copies[rank] = keys.setdefault(own, len(keys))
    return copies


class _Dropped(NamedTuple):
    """Ranges that are not stored, and by which rank they are written in their place.

    Args:
        rows: For each rank, the rows of its ranges that are not stored.
        wanted: The rank that writes the same bytes, and the unit, offset and length.
    """

    rows: dict[int, list[int]]
    wanted: list[tuple[int, int, int, int]]


def _in_order(ranks: Iterable[int], places: Mapping[int, int]) -> list[int]:
    """Return ranks by their places in a mesh, if they have any, then by number."""
    return sorted(ranks, key=lambda rank: (places.get(rank, 0), rank))


def _first_replica(digests: Mapping[int, bytes], places: Mapping[int, int]) -> list[int]:
    """Return the ranks that have the bytes of the rank that is first in its mesh; this rank is the first one."""
    ranks = _in_order(digests, places)
    return [rank for rank in ranks if digests[rank] == digests[ranks[0]]]


def _replaced(union: Union, parts: Sequence[Part], chosen: Mapping[int, Mapping[Piece, list[int]]]) -> _Dropped:
    """Return what ranks have written that the chosen ones have not.

    Args:
        union: The units of all ranks.
        parts: What they have written.
        chosen: For each shard that differs, the ranks that have what is stored of each piece that differs. The first
            of them can write it.
    """
    found = _Dropped({}, [])
    pieces = {unit: sorted(ranks) for unit, ranks in chosen.items()}
    for rank, part in enumerate(parts if chosen else ()):
        units = _units_of(union, rank, part.ranges) if len(part.ranges) else np.zeros(0, np.int64)
        for at in np.flatnonzero(np.isin(units, [*chosen])).tolist():
            unit, offset, nbytes = int(units[at]), int(part.ranges[at]["offset"]), int(part.ranges[at]["nbytes"])
            before = bisect_right(pieces[unit], offset, key=lambda piece: piece[0])
            piece = pieces[unit][before - 1] if before else (0, 0)
            if offset < sum(piece) and rank not in chosen[unit][piece]:
                found.rows.setdefault(rank, []).append(at)
                found.wanted.append((chosen[unit][piece][0], unit, offset, nbytes))
    return found


def _more(
    union: Union, parts: Sequence[Part], variants: Mapping[int, Numbers], split: Sequence[int]
) -> dict[int, list[Range]]:
    """Return what the lowest rank of each copy must write, because no rank of this copy has written it."""
    written: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, part in enumerate(parts if split else ()):
        if len(part.ranges):
            units = _units_of(union, rank, part.ranges)
            for at in np.flatnonzero(np.isin(units, split)).tolist():
                unit, row = int(units[at]), part.ranges[at]
                place = unit, int(variants[unit][rank])
                written.setdefault(place, []).append((int(row["offset"]), int(row["offset"] + row["nbytes"])))
    more: dict[int, list[Range]] = {}
    for unit in split:
        copies, first = np.unique(variants[unit], return_index=True)
        for copy, rank in zip(copies.tolist(), first.tolist(), strict=True):
            if copy < 0:
                continue
            for lo, hi in gaps(0, union.units[unit].nbytes, _disjoint(written.get((unit, copy), ()))):
                more.setdefault(rank, []).append((union.local(rank, unit), lo, hi - lo))
    return more


def _disjoint(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the bytes that ranges cover, ascending. Several ranks may have written the same bytes of their copy."""
    end = 0
    for lo, hi in sorted(ranges):
        if hi > end:
            yield max(lo, end), hi
            end = hi
