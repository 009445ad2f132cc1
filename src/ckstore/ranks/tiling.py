"""Check that the ranges of all ranks cover every byte of every storage exactly once, and sort them into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import MalformedError, UsageError
from ckstore.format.columns import PIECE, STORAGE, Rows, joined
from ckstore.format.tree import Path, place_of
from ckstore.ranks.arrays import Unit
from ckstore.ranks.part import RANGE, Part
from ckstore.ranks.union import Numbers, Union, Variants, copies_of, first_storages, storages_of, tie_of

_PIECE_NBYTES_LIMIT = 1 << 32


@dataclass(frozen=True)
class Tiling:
    """What follows from the ranges of all ranks, without the numbers of the chunks.

    Args:
        ranges: The encoded ranges of each rank.
        chunk_counts: The number of chunks of each rank.
        variants: The copies of units.
        storages: The storages, without names.
        chunk_rows: For each piece, its chunk's row in the chunks of all ranks.
        is_used: Whether a piece needs each of these rows.
        pieces: The pieces, whose chunks are not set.
        contributed: Bytes that each rank contributed.
        repeated: Ranks and units of which bytes were left out or kept because these ranks have compared all of them.
    """

    ranges: tuple[bytes, ...]
    chunk_counts: Numbers
    variants: Variants
    storages: Rows
    chunk_rows: NDArray[np.uint32]
    is_used: NDArray[np.bool_]
    pieces: Rows
    contributed: Numbers
    repeated: frozenset[tuple[int, int]]

    def has_compared_repeats(self, union: Union, parts: Sequence[Part]) -> bool:
        """Say whether the ranks have compared what they have written more than once, in these parts too."""
        return all(_has_compared(union, parts, rank, unit) for rank, unit in self.repeated)


@dataclass(frozen=True)
class _Ranges:
    """The ranges of all ranks, in one address space in which storages follow each other."""

    address: NDArray[np.uint64]
    nbytes: NDArray[np.uint32]
    chunk_row: NDArray[np.uint32]
    chunk_offset: NDArray[np.uint32]
    rank: NDArray[np.int32]

    def mapped(self, change: Callable[[Any], Any]) -> _Ranges:
        """Return the ranges with every column changed."""
        columns = (self.address, self.nbytes, self.chunk_row, self.chunk_offset, self.rank)
        return _Ranges(*map(change, columns))

    def is_tiling(self, end: int) -> bool:
        """Say whether the ranges cover every byte from 0 to ``end`` exactly once.

        Storages follow each other without gaps, and no range is in two of them.
        """
        ends = self.address + self.nbytes
        if not len(ends):
            return end == 0
        return bool(self.address[0] == 0 and ends[-1] == end) and np.array_equal(ends[:-1], self.address[1:])

    def in_order(self, rank_count: int) -> _Ranges:
        """Return the ranges by address."""
        found = self
        if rank_count and len(self.address) % rank_count == 0:
            # Ranks usually have a range of each tensor: then this is the order, or nearly so.
            found = self.mapped(lambda column: column.reshape(rank_count, -1).T.ravel())
        if (found.address[1:] > found.address[:-1]).all():
            return found
        order = np.argsort(found.address, kind="stable")
        return found.mapped(lambda column: column[order])


def tile(union: Union, parts: Sequence[Part], variants: Variants, chunk_counts: Numbers) -> Tiling:
    """Sort the ranges of all ranks, and check that they cover every byte of every storage exactly once.

    Raises:
        MalformedError: A range is empty, or beyond its unit or the chunks of its part.
        UsageError: Bytes are missing, or contributed twice.
    """
    unit_of = storages_of(union, variants)
    units = [union.units[unit] for unit in unit_of.tolist()]
    if sum(unit.nbytes for unit in units) >= 1 << 62:
        raise MalformedError("the units of all ranks have an impossible length together")
    sizes = np.array([unit.nbytes for unit in units], np.uint64)
    starts = np.append(np.zeros(1, np.uint64), np.cumsum(sizes, dtype=np.uint64))
    found, contributed = _ranges_of(union, parts, variants, starts, unit_of, chunk_counts)
    ranges = found.in_order(len(parts))
    repeated: frozenset[tuple[int, int]] = frozenset()
    if not ranges.is_tiling(starts[-1]):
        ranges, repeated = _without_repeats(union, parts, unit_of, ranges, starts)
    if not ranges.is_tiling(starts[-1]):
        _raise_untiled(union, unit_of, starts, ranges)
    storages = np.zeros(len(sizes), STORAGE)
    storages["nbytes"] = sizes
    storages["pieces"] = np.diff(np.searchsorted(ranges.address, starts))
    storages["element_width"] = [unit.element_width for unit in units]
    storages["is_float"] = [unit.is_float for unit in units]
    pieces = np.empty(len(ranges.address), PIECE)
    pieces["offset"] = ranges.chunk_offset
    pieces["nbytes"] = ranges.nbytes
    is_used = np.zeros(int(chunk_counts.sum()), bool)
    is_used[ranges.chunk_row] = True
    encoded = tuple([part.ranges.tobytes() for part in parts])
    return Tiling(encoded, chunk_counts, variants, storages, ranges.chunk_row, is_used, pieces, contributed, repeated)


def _without_repeats(
    union: Union, parts: Sequence[Part], unit_of: Numbers, ranges: _Ranges, starts: NDArray[np.uint64]
) -> tuple[_Ranges, frozenset[tuple[int, int]]]:
    """Remove all but the first of equal ranges of one plain unit that different ranks contribute.

    Returns:
        The other ranges, and the ranks and units that this relied on.

    Ranks of which each has written its whole copy have sent the digests of all of it. If these are equal, one copy is
    enough; if they were not, there would be two storages.
    """
    is_repeat = np.zeros(len(ranges.address), bool)
    is_repeat[1:] = (ranges.address[1:] == ranges.address[:-1]) & (ranges.nbytes[1:] == ranges.nbytes[:-1])
    is_repeat[1:] &= ranges.rank[1:] != ranges.rank[:-1]
    rows = np.flatnonzero(is_repeat)
    units = unit_of[np.searchsorted(starts, ranges.address[rows], side="right") - 1]
    has_compared: dict[tuple[int, int], bool] = {}
    for row, unit in zip(rows.tolist(), units.tolist(), strict=True):
        for rank in ranges.rank[row - 1 : row + 1].tolist():
            if (rank, unit) not in has_compared:
                has_compared[rank, unit] = _has_compared(union, parts, rank, unit)
            is_repeat[row] &= has_compared[rank, unit]
    relied = frozenset(pair for pair, is_compared in has_compared.items() if is_compared)
    return ranges.mapped(lambda column: column[~is_repeat]), relied


def _has_compared(union: Union, parts: Sequence[Part], rank: int, number: int) -> bool:
    """Say whether a rank has sent the digests of all bytes of a plain unit."""
    unit, checks = union.units[number], parts[rank].checks
    if unit.array is not None:
        return False
    own = checks[checks["unit"] == union.local(rank, number)]
    _, first = np.unique(own["offset"], return_index=True)
    return int(own["nbytes"][first].sum()) == unit.nbytes


def _ranges_of(
    union: Union,
    parts: Sequence[Part],
    variants: Variants,
    starts: NDArray[np.uint64],
    unit_of: Numbers,
    chunk_counts: Numbers,
) -> tuple[_Ranges, Numbers]:
    """Return the ranges of all ranks, and the bytes that each rank contributes.

    Raises:
        MalformedError: A range is empty, or beyond its unit or the chunks of its part.
    """
    counts = np.array([len(part.ranges) for part in parts], np.int64)
    rows = joined((part.ranges for part in parts), RANGE)
    rank = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    tables = _UnitTables.of(union, variants, starts, unit_of)
    unit, offset, nbytes = rows["unit"], rows["offset"], rows["nbytes"]
    is_wrong = (unit >= tables.counts[rank]) | (rows["chunk"] >= chunk_counts[rank])
    place = tables.begins[rank]
    place += unit
    # An index that is wrong is refused below.
    length = tables.lengths.take(place, mode="clip") if len(tables.lengths) else np.zeros(len(rows), np.uint64)
    is_wrong |= (nbytes == 0) | (nbytes >= _PIECE_NBYTES_LIMIT) | (offset > length) | (nbytes > length - offset)
    if is_wrong.any():
        first = int(rank[np.flatnonzero(is_wrong)[0]])
        raise MalformedError(
            f"the part of rank {first} has a range that is empty, or beyond its unit or its chunks", rank=first
        )
    address = tables.addresses[place]
    address += offset
    chunk_starts = (np.cumsum(chunk_counts) - chunk_counts).astype(np.uint32)
    ranges = _Ranges(
        address, nbytes.astype(np.uint32), rows["chunk"] + chunk_starts[rank], rows["chunk_offset"].copy(), rank
    )
    ends = np.append(0, np.cumsum(ranges.nbytes, dtype=np.int64))
    return ranges, np.diff(ends[np.append(0, np.cumsum(counts))])


@dataclass(frozen=True)
class _UnitTables:
    """For the units of all skeletons, one table after another: lengths, and addresses.

    If there are several copies of units, each rank has a table of its own.

    Args:
        lengths: The lengths of the units.
        addresses: Where the storage of each unit begins.
        begins: Where the table of each rank begins.
        counts: The number of units in the table of each rank.
    """

    lengths: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    begins: Numbers
    counts: Numbers

    @classmethod
    def of(cls, union: Union, variants: Variants, starts: NDArray[np.uint64], unit_of: Numbers) -> _UnitTables:
        first = first_storages(union, unit_of)
        indices = union.skeleton_of.tolist() if variants else range(len(union.skeletons))
        table_of = np.arange(union.world) if variants else union.skeleton_of
        lengths = [union.lengths[index] for index in indices]
        storages = [
            first[union.numbers[index]] + (copies_of(union, variants, rank, index) if variants else 0)
            for rank, index in enumerate(indices)
        ]
        counts = np.array([len(each) for each in lengths], np.int64)
        addresses = [starts[each] for each in storages]
        begins = np.cumsum(counts) - counts
        return cls(np.concatenate(lengths), np.concatenate(addresses), begins[table_of], counts[table_of])


def _raise_untiled(union: Union, unit_of: Numbers, starts: NDArray[np.uint64], ranges: _Ranges) -> None:
    """Name the first byte that no rank contributes, or that several contribute."""
    begins = np.append(ranges.address, starts[-1])
    expected = np.append(np.zeros(1, np.uint64), ranges.address + ranges.nbytes)
    at = int(np.flatnonzero(expected != begins)[0])
    lo, hi = sorted((int(expected[at]), int(begins[at])))
    storage = int(np.searchsorted(starts, lo, side="right")) - 1
    number, begin, end = int(unit_of[storage]), int(starts[storage]), int(starts[storage + 1])
    unit = union.units[number]
    # The ranges before and after the place, if there are any.
    ranks = sorted(set(ranges.rank[max(0, at - 1) : at + 1].tolist()))
    if int(expected[at]) < int(begins[at]):
        what = "no rank contributes"
        where = f"; its neighbours are of rank {' and '.join(map(str, ranks))}" if ranks else ""
        if (tie := tie_of(union, number)) is not None:
            _raise_tied(union, number, *tie)
    else:
        what, where = "several ranks contribute", f": {' and '.join(map(str, ranks))}"
    raise UsageError(
        f"{what} bytes {lo - begin} to {min(hi, end) - begin} of {unit.nbytes}{_box_text(unit, lo - begin)}{where}",
        where=place_of(unit.path),
        todo="let all ranks that hold a part of this tensor commit it, with one device mesh",
        ranks=ranks,
    )


def _raise_tied(union: Union, number: int, other: Path, rank: int) -> None:
    path, free = union.units[number].path, union.holders(number)[0]
    raise UsageError(
        f"the tensor shares memory with {place_of(other)} on rank {rank}, and not on rank {free}",
        where=place_of(path),
        todo="tie these tensors on all ranks, or on none",
        ranks=sorted((free, rank)),
        path=path,
    )


def _box_text(unit: Unit, offset: int) -> str:
    """Return where a byte of a row-major array is, for people; empty for others."""
    if unit.array is None or unit.array.cuts or not unit.nbytes:
        return ""
    element = offset * int(np.prod([*unit.array.shape], dtype=np.int64)) // unit.nbytes
    index = [int(each) for each in np.unravel_index(element, unit.array.shape)] if unit.array.shape else []
    return f", from element {index} of {list(unit.array.shape)}"
