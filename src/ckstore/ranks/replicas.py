"""Compare the replicas that ranks hold, by the digests in their parts.

A plain unit of which ranks hold different bytes gets several *copies*, each complete: what its holders have not written
yet, one of them must write. A shard of which ranks hold different bytes is reported; the bytes that were written count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import MalformedError
from ckstore.format.columns import Rows, joined
from ckstore.format.tree import Path, place_of
from ckstore.ranks.part import CHECK, Part
from ckstore.ranks.union import Numbers, Union
from ckstore.ranks.writing import gaps

STORED_FOR_EACH = "it was stored for each rank; if that is intended, mark it with ckstore.PerRank"
"""What a commit does with values that differ between ranks, and what to do about it."""

_NAMED_MAX = 8

Piece = tuple[int, int]
"""Offset and length of the bytes of a unit that were compared."""


class Difference(NamedTuple):
    """Replicas that differ.

    Args:
        path: The path of the unit.
        is_shard: It is a shard of a distributed tensor; else it is stored for each rank.
        ranks: The ranks whose bytes differ from those of most ranks.
        offset: Where the first piece begins that differs.
        nbytes: Length of this piece.
        is_whole: All its pieces differ.
    """

    path: Path
    is_shard: bool
    ranks: tuple[int, ...]
    offset: int
    nbytes: int
    is_whole: bool = False

    def __str__(self) -> str:
        kind = "a shard" if self.is_shard else "a tensor"
        done = "one of its replicas was stored; check the memory of these ranks" if self.is_shard else STORED_FOR_EACH
        end = self.offset + self.nbytes
        return (
            f"{place_of(self.path)}: {kind} differs on {ranks_text(self.ranks)} from its other replicas, first in "
            f"bytes {self.offset} to {end}; {done}"
        )


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
        more: What ranks must still write so that all copies are complete: unit (of its own skeleton), offset, length.
    """

    differences: tuple[Difference, ...]
    variants: Mapping[int, Numbers]
    more: Mapping[int, tuple[tuple[int, int, int], ...]]


def compare(union: Union, parts: Sequence[Part]) -> Comparison:
    """Compare the replicas of all ranks; ``parts`` are in the order of the ranks.

    Raises:
        MalformedError: A part contradicts its skeleton, or ranks have compared different pieces.
    """
    found = _Checks.of(union, parts)
    differences: list[Difference] = []
    variants = dict(union.declared_variants)
    split: list[int] = []
    for unit in found.units_that_differ():
        pieces = found.pieces_of(unit)
        differing = _odd_ranks(pieces)
        torn = [piece for piece, digests in pieces.items() if len(set(digests.values())) > 1]
        is_shard, is_whole = union.units[unit].array is not None, len(torn) == len(pieces)
        differences.append(Difference(union.units[unit].path, is_shard, tuple(differing), *min(torn), is_whole))
        if not is_shard:
            variants[unit] = _copies(union, unit, pieces, differing)
            split.append(unit)
    return Comparison(tuple(differences), variants, _more(union, parts, variants, split))


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


def _odd_ranks(pieces: Mapping[Piece, Mapping[int, bytes]]) -> list[int]:
    """Return the ranks with a digest that most ranks do not have. Of as many, those of the lowest rank count."""
    odd: set[int] = set()
    for digests in pieces.values():
        counts = Counter(digests[rank] for rank in sorted(digests))
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


def _more(
    union: Union, parts: Sequence[Part], variants: Mapping[int, Numbers], split: Sequence[int]
) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """Return what the lowest rank of each copy must write, because no rank of this copy has written it."""
    written: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, part in enumerate(parts if split else ()):
        if len(part.ranges):
            units = _units_of(union, rank, part.ranges)
            for at in np.flatnonzero(np.isin(units, split)).tolist():
                unit, row = int(units[at]), part.ranges[at]
                place = unit, int(variants[unit][rank])
                written.setdefault(place, []).append((int(row["offset"]), int(row["offset"] + row["nbytes"])))
    more: dict[int, list[tuple[int, int, int]]] = {}
    for unit in split:
        copies, first = np.unique(variants[unit], return_index=True)
        for copy, rank in zip(copies.tolist(), first.tolist(), strict=True):
            if copy < 0:
                continue
            for lo, hi in gaps(0, union.units[unit].nbytes, _disjoint(written.get((unit, copy), ()))):
                more.setdefault(rank, []).append((union.local(rank, unit), lo, hi - lo))
    return {rank: tuple(ranges) for rank, ranges in more.items()}


def _disjoint(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the bytes that ranges cover, ascending. Several ranks may have written the same bytes of their copy."""
    end = 0
    for lo, hi in sorted(ranges):
        if hi > end:
            yield max(lo, end), hi
            end = hi
