"""How the boxes that ranks wrote of a tensor become the pieces of its storage, with an exact check that they fill it.

A box may be several tiles of the tensor: what cuts it may be a box of another rank, which its writer does not know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from ckstore.errors import MalformedError, UsageError
from ckstore.format.tensors import Piece
from ckstore.format.tiles import Box, Cuts, cuts_of, ranges_of


class WrittenBox(NamedTuple):
    """A box of a tensor that one rank wrote: the pieces that hold its elements in row-major order."""

    rank: int
    box: Box
    pieces: tuple[Piece, ...]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def start_of(shape: tuple[int, ...], itemsize: int, cuts: Cuts, box: Box) -> int | None:
    """Return where a box begins in the storage of its tensor; None if it is not one range of it, or empty."""
    try:
        ranges = ranges_of(shape, itemsize, cuts, box)
    except MalformedError:
        # A planner may cut a tensor in another way than the state does.
        return None
    return ranges[0].offset if len(ranges) == 1 else None


def arranged(
    name: str, shape: tuple[int, ...], itemsize: int, boxes: Sequence[WrittenBox]
) -> tuple[Cuts, tuple[Piece, ...]]:
    """Return how a tensor is cut, and the pieces of its storage in order.

    Args:
        name: The tensor, for messages.
        shape: Its shape.
        itemsize: Bytes of one element.
        boxes: What was written of it.

    Raises:
        UsageError: The boxes leave a part out, or overlap.
    """
    if 0 in shape:
        return (), ()
    full = [each for each in boxes if 0 not in each.box.sizes]
    cuts = cuts_of(shape, [each.box for each in full])
    if cuts:
        return cuts, tuple(_tiles(name, shape, itemsize, cuts, full))
    return (), tuple(_rows(name, shape, itemsize, full))


def _rows(name: str, shape: tuple[int, ...], itemsize: int, boxes: list[WrittenBox]) -> Iterator[Piece]:
    begins = [ranges_of(shape, itemsize, (), each.box)[0].offset // itemsize for each in boxes]
    end, last = 0, -1
    for begin, each in sorted(zip(begins, boxes, strict=True)):
        if begin > end:
            raise _gap(name, shape, _index(shape, end))
        if begin < end:
            raise _overlap(name, shape, each.box.offsets, last, each.rank)
        yield from each.pieces
        end, last = begin + prod(each.box.sizes), each.rank
    if end < prod(shape):
        raise _gap(name, shape, _index(shape, end))


def _index(shape: Sequence[int], element: int) -> tuple[int, ...]:
    """Return the index of an element of a row-major tensor."""
    found: list[int] = []
    for length in reversed(shape):
        element, at = divmod(element, length)
        found.append(at)
    return tuple(reversed(found))


def _tiles(name: str, shape: tuple[int, ...], itemsize: int, cuts: Cuts, boxes: list[WrittenBox]) -> Iterator[Piece]:
    edges = [(0, *places, length) for places, length in zip(cuts, shape, strict=True)]
    owners: dict[tuple[int, ...], WrittenBox] = {}
    for each in boxes:
        spans = [range(*(bisect_left(edges[dim], end) for end in _ends(each.box, dim))) for dim in range(len(shape))]
        for tile in product(*spans):
            other = owners.setdefault(tile, each)
            if other is not each:
                raise _overlap(name, shape, _place(edges, tile), other.rank, each.rank)
    for tile in product(*(range(len(each) - 1) for each in edges)):
        owner = owners.get(tile)
        if owner is None:
            raise _gap(name, shape, _place(edges, tile))
        sizes = tuple(each[at + 1] - each[at] for each, at in zip(edges, tile, strict=True))
        yield from _part(owner, Box(_place(edges, tile), sizes), itemsize)


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.offsets[dim] + box.sizes[dim]


def _place(edges: Sequence[Sequence[int]], tile: Sequence[int]) -> tuple[int, ...]:
    return tuple(each[at] for each, at in zip(edges, tile, strict=True))


def _part(written: WrittenBox, part: Box, itemsize: int) -> Iterator[Piece]:
    """Yield the pieces of a part of a written box, row by row where it is not one range of the box."""
    box = written.box
    if part == box:
        yield from written.pieces
        return
    inner = len(box.sizes) - 1
    while inner > 0 and part.sizes[inner] == box.sizes[inner]:
        inner -= 1
    strides = [prod(box.sizes[dim + 1 :]) * itemsize for dim in range(len(box.sizes))]
    nbytes = part.sizes[inner] * strides[inner]
    corner = sum((at - lo) * step for at, lo, step in zip(part.offsets, box.offsets, strides, strict=True))
    ends = list(accumulate(piece.nbytes for piece in written.pieces))
    for index in product(*(range(length) for length in part.sizes[:inner])):
        begin = corner + sum(at * step for at, step in zip(index, strides[:inner], strict=True))
        yield from _range(written.pieces, ends, begin, begin + nbytes)


def _range(pieces: Sequence[Piece], ends: Sequence[int], lo: int, hi: int) -> Iterator[Piece]:
    at = bisect_left(ends, lo + 1)
    while lo < hi:
        piece, end = pieces[at], min(hi, ends[at])
        yield Piece(piece.chunk, piece.offset + piece.nbytes - (ends[at] - lo), end - lo)
        lo, at = end, at + 1


def _gap(name: str, shape: Sequence[int], place: Sequence[int]) -> UsageError:
    return UsageError(
        "no rank wrote a part of a tensor",
        where=f"{name}, shape {list(shape)}, from index {list(place)} on",
        todo="save with every rank that holds a shard of it; nothing was published",
        tensor=name,
    )


def _overlap(name: str, shape: Sequence[int], place: Sequence[int], first: int, second: int) -> UsageError:
    what = f"rank {first} and rank {second} wrote the same part of a tensor"
    return UsageError(
        what if first != second else f"rank {first} wrote a part of a tensor twice",
        where=f"{name}, shape {list(shape)}, at index {list(place)}",
        todo="let the planner remove replicas, as torch's DefaultSavePlanner does; nothing was published",
        tensor=name,
    )
