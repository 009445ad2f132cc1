"""Which rank writes which bytes of what several ranks hold.

A *group* is what the same ranks hold. Its ranges form a line, in the order in which they are given. Groups with the
fewest holders come first, because they have the least choice. The line of each group is divided by water filling: its
bytes go to the holders that have the least to write, until these are level. Every holder gets one contiguous stretch
of the line. So a rank writes the same neighbouring chunks at each commit.

Invariants:
- Every byte of every group is assigned to exactly one of its holders.
- A range is divided at multiples of the grid step of its unit only, where every replica ends a chunk. A range below
  ``SHARED_NBYTES_MAX`` and below the grid step is not divided. ``writing.pieces_of`` has the same rule.
- Pure: the same layout gives the same spans, on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckstore.commit.chunking import SHARED_NBYTES_MAX

Integers = NDArray[np.int64]


class Span(NamedTuple):
    """The bytes ``[lo, hi)`` of a unit."""

    unit: int
    lo: int
    hi: int


def plan_spans(
    groups: Mapping[tuple[int, ...], Sequence[Span]], steps: Sequence[int], own: Sequence[int]
) -> list[list[Span]]:
    """Assign everything that several ranks hold, so that the ranks have about the same number of bytes to write.

    If each two groups are disjoint or one contains the other, as on a device mesh, no assignment has a much lower
    maximum: only cuts that move to the grid cost up to one grid step.

    Args:
        groups: For the ranks of each group, ascending: the ranges that they all hold. No byte is in two ranges.
        steps: The grid step of each unit, in bytes; see ``chunking.grid_nbytes``.
        own: The bytes that each rank writes anyway, because no other rank holds them. Its length is the world size.

    Returns:
        The spans that each rank writes, ascending by unit and offset.
    """
    loads = np.array(own, np.int64)
    grid = np.array(steps, np.int64)
    assigned: list[list[Span]] = [[] for _ in own]
    for holders in sorted(groups, key=lambda ranks: (len(ranks), ranks)):
        # Much faster than np.array, which inspects every tuple.
        ranges = np.fromiter(chain.from_iterable(groups[holders]), np.int64).reshape(-1, 3)
        ranges = ranges[ranges[:, 2] > ranges[:, 1]]
        if not len(ranges):
            continue
        ranks = np.array(holders, np.int64)
        line = np.cumsum(ranges[:, 2] - ranges[:, 1])
        shares = _water_fill(loads[ranks], int(line[-1]))
        cuts = _snap(np.cumsum(shares)[:-1], line, ranges, grid)
        loads[ranks] += np.diff(cuts, prepend=0, append=line[-1])
        _assign(assigned, holders, cuts, line, ranges)
    for spans in assigned:
        spans.sort()
    return assigned


def _water_fill(loads: Integers, nbytes: int) -> Integers:
    """Return how many more bytes each rank gets, so that the highest of the resulting loads is as low as possible."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    counts = np.arange(1, len(loads) + 1)
    # The level if the n least loaded ranks share everything. Rank n takes part if its load is below that level.
    totals = np.cumsum(ascending) + nbytes
    count = int(np.count_nonzero(ascending * counts < totals))
    level, rest = divmod(int(totals[count - 1]), count)
    shares = np.zeros_like(loads)
    shares[order[:count]] = level - ascending[:count]
    shares[order[:rest]] += 1
    return shares


def _snap(wanted: Integers, line: Integers, ranges: Integers, grid: Integers) -> Integers:
    """Move each place of a line to the nearest one where the line may be cut; to the lower one of two.

    Args:
        wanted: Places on the line, ascending.
        line: Where each range ends on the line.
        ranges: Rows of unit, lo, hi.
        grid: The grid step of each unit.
    """
    row = np.minimum(np.searchsorted(line, wanted, side="right"), len(line) - 1)
    unit, lo, hi = ranges[row].T
    # The place in the unit. It is ``hi`` only at the end of the line.
    place = hi - (line[row] - wanted)
    below = place - place % grid[unit]
    above = np.minimum(below + grid[unit], hi)
    is_whole = hi - lo < np.minimum(SHARED_NBYTES_MAX, grid[unit])
    below = np.where(is_whole, lo, np.maximum(below, lo))
    above = np.where(is_whole, hi, above)
    nearest = np.where(place - below <= above - place, below, above)
    snapped: Integers = line[row] - (hi - nearest)
    return snapped


def _assign(
    assigned: list[list[Span]], holders: tuple[int, ...], cuts: Integers, line: Integers, ranges: Integers
) -> None:
    """Give each holder its stretch of the line, range by range."""
    edges = np.union1d(np.union1d(cuts, line), [0])
    row = np.searchsorted(line, edges[:-1], side="right")
    unit, _, end = ranges[row].T
    lo, hi = (end - (line[row] - at) for at in (edges[:-1], edges[1:]))
    spans = list(map(Span, unit.tolist(), lo.tolist(), hi.tolist()))
    # The first span of each holder.
    firsts = np.searchsorted(edges, cuts).tolist()
    for rank, begin, end_of in zip(holders, [0, *firsts], [*firsts, len(spans)], strict=True):
        assigned[rank] += spans[begin:end_of]
