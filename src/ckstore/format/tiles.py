"""Tiles: the order of bytes of a tensor that is cut along several dimensions.

The storage has the tiles in lexicographic order of their places; each tile is C-contiguous. A tensor that is cut along
its first dimension only is row-major, and has no cuts.

Invariants:
- Pure geometry: nothing here reads bytes or imports numpy or torch.
- Bytes of a storage are counted from its start, and depend on the shape and the cuts only, not on who holds a box.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from ckstore.errors import MalformedError, UsageError
from ckstore.format.tensors import RANK_MAX

TILES_MAX = 1 << 20
"""Largest number of tiles of a tensor, because a reader lists the tiles of a box, and manifests are not trusted."""

_LENGTH_LIMIT = 1 << 62


class Box(NamedTuple):
    """A block of a tensor: where it begins, and its lengths, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Cuts = tuple[tuple[int, ...], ...]
"""For each dimension, where tiles begin, without 0. Empty: the tensor is row-major."""


class Range(NamedTuple):
    """Bytes of a storage that hold a box, C-contiguous.

    Args:
        offset: Byte offset in the storage.
        nbytes: Length in bytes.
        box: What these bytes hold.
    """

    offset: int
    nbytes: int
    box: Box


class View(NamedTuple):
    """A strided view of a storage.

    Args:
        offset: Byte offset in the storage of the first element of the box.
        box: What the view shows.
        strides: Step of each dimension, in elements.
    """

    offset: int
    box: Box
    strides: tuple[int, ...]


class _Tile(NamedTuple):
    """A tile that a box touches.

    Args:
        begin: Index in the storage of its first element.
        sizes: Its lengths.
        within: Where the part that is in the box begins, from the start of the tile.
        part: This part.
    """

    begin: int
    sizes: tuple[int, ...]
    within: tuple[int, ...]
    part: Box


_Joinable = TypeVar("_Joinable", Range, View)


def cuts_of(shape: tuple[int, ...], boxes: Iterable[Box]) -> Cuts:
    """Return where to cut a tensor, so that each of these boxes is a union of whole tiles.

    Args:
        shape: The shape of the tensor.
        boxes: Boxes within it, in any order; empty ones and repeated ones change nothing.

    Returns:
        The edges of all boxes, by dimension; no cuts if all boxes consist of whole rows.

    Raises:
        UsageError: There would be more than ``TILES_MAX`` tiles.
    """
    filled = {box for box in boxes if 0 not in box.sizes}
    if all(_is_whole_rows(shape, box) for box in filled):
        return ()
    edges: list[set[int]] = [set() for _ in shape]
    for box in filled:
        for found, offset, size in zip(edges, box.offsets, box.sizes, strict=True):
            found.update((offset, offset + size))
    cuts = tuple(tuple(sorted(found - {0, length})) for found, length in zip(edges, shape, strict=True))
    if tile_count(cuts) > TILES_MAX:
        raise UsageError(
            f"the shards of a tensor cut it into {tile_count(cuts):,} tiles, more than {TILES_MAX:,}",
            where=f"tensor of shape {shape}",
            todo="shard it along fewer dimensions, or into contiguous blocks",
        )
    return cuts


def check_cuts(shape: tuple[int, ...], cuts: Cuts) -> None:
    """Check a shape and cuts that were read from a store.

    Raises:
        MalformedError: They are impossible, or there are more than ``TILES_MAX`` tiles.
    """
    where = f"tensor of shape {shape[:RANK_MAX]}"
    if len(shape) > RANK_MAX or not all(type(length) is int and 0 <= length < _LENGTH_LIMIT for length in shape):
        raise MalformedError("a tensor in tiles has an impossible shape", where=where)
    if not cuts:
        return
    if len(cuts) != len(shape):
        raise MalformedError("a tensor in tiles has another number of dimensions than its cuts", where=where)
    for length, places in zip(shape, cuts, strict=True):
        if type(places) is not tuple or not all(type(place) is int for place in places):
            raise MalformedError("the cuts of a tensor are not integers", where=where)
        if places and not all(before < after for before, after in itertools.pairwise((0, *places, length))):
            raise MalformedError("the cuts of a tensor do not ascend within its shape", where=where)
    if tile_count(cuts) > TILES_MAX:
        raise MalformedError(f"a tensor has more than {TILES_MAX:,} tiles", where=where)


def tile_count(cuts: Cuts) -> int:
    """Return the number of tiles. A row-major tensor counts as one."""
    return math.prod(len(places) + 1 for places in cuts)


def ranges_of(shape: tuple[int, ...], itemsize: int, cuts: Cuts, box: Box) -> list[Range]:
    """Return where a box is in the storage of its tensor, in ascending order.

    Tiles that follow each other in the storage and form a box share a range. So whole rows of a row-major tensor are
    one range. An empty box has no ranges.

    Args:
        shape: The shape of the tensor.
        itemsize: Bytes of one element.
        cuts: Its cuts, as ``cuts_of`` returns them.
        box: A box that consists of whole tiles; of whole rows if the tensor is row-major.

    Raises:
        MalformedError: The box reaches beyond the tensor, or has a part of a tile.
    """
    _check_box(shape, box)
    if 0 in box.sizes:
        return []
    if not cuts:
        if not _is_whole_rows(shape, box):
            raise MalformedError("a box of a row-major tensor has a part of a row", where=_name_of(shape, box))
        index = sum(map(operator.mul, box.offsets, _row_major_strides(shape)))
        return [Range(index * itemsize, math.prod(box.sizes) * itemsize, box)]
    ranges = []
    for tile in _tiles_of(shape, cuts, box):
        if tile.part.sizes != tile.sizes:
            raise MalformedError("a box has a part of a tile", where=_name_of(shape, box))
        ranges.append(Range(tile.begin * itemsize, math.prod(tile.sizes) * itemsize, tile.part))
    return _join(ranges, len(shape), _join_ranges)


def views_of(shape: tuple[int, ...], itemsize: int, cuts: Cuts, box: Box) -> list[View]:
    """Return strided views of the storage of a tensor that together show any box of it.

    There is one view for each tile that the box touches; neighbours that one view can show are joined. A row-major
    tensor needs one view. An empty box has no views.

    Args:
        shape: The shape of the tensor.
        itemsize: Bytes of one element.
        cuts: Its cuts, as ``cuts_of`` returns them.
        box: Any box within the tensor.

    Raises:
        MalformedError: The box reaches beyond the tensor.
    """
    _check_box(shape, box)
    if 0 in box.sizes:
        return []
    views = []
    for tile in _tiles_of(shape, cuts or ((),) * len(shape), box):
        strides = _row_major_strides(tile.sizes)
        index = tile.begin + sum(map(operator.mul, tile.within, strides))
        views.append(View(index * itemsize, tile.part, strides))

    def join(first: View, second: View, dimension: int) -> View | None:
        return _join_views(first, second, dimension, itemsize)

    return _join(views, len(shape), join)


def _check_box(shape: tuple[int, ...], box: Box) -> None:
    if not len(box.offsets) == len(box.sizes) == len(shape) or not all(
        0 <= offset <= offset + size <= length
        for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
    ):
        raise MalformedError("a box reaches beyond its tensor", where=_name_of(shape, box))


def _name_of(shape: tuple[int, ...], box: Box) -> str:
    return f"box {box.sizes[:RANK_MAX]} at {box.offsets[:RANK_MAX]} of a tensor of shape {shape[:RANK_MAX]}"


def _is_whole_rows(shape: tuple[int, ...], box: Box) -> bool:
    """Say whether a box that is not empty is whole in all dimensions after the first one longer than 1."""
    first = next((dimension for dimension, length in enumerate(shape) if length > 1), 0)
    return box.sizes[first + 1 :] == shape[first + 1 :]


def _row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes[:0:-1], operator.mul, initial=1))[::-1] if sizes else ()


def _tiles_of(shape: tuple[int, ...], cuts: Cuts, box: Box) -> Iterator[_Tile]:
    """Yield the tiles that a box touches, in the order of the storage. The box is not empty."""
    intervals: list[list[tuple[int, int, int, int]]] = []
    for length, places, offset, size in zip(shape, cuts, box.offsets, box.sizes, strict=True):
        edges = (0, *places, length)
        touched = edges[bisect_right(edges, offset) - 1 : bisect_left(edges, offset + size) + 1]
        parts = [(max(offset, begin), min(offset + size, end)) for begin, end in itertools.pairwise(touched)]
        intervals.append(
            [
                (begin, end - begin, first - begin, last - first)
                for (begin, end), (first, last) in zip(itertools.pairwise(touched), parts, strict=True)
            ]
        )
    trailing = _row_major_strides(shape)
    for tile in itertools.product(*intervals):
        begins, sizes, within, part_sizes = zip(*tile, strict=True) if tile else ((), (), (), ())
        # Before this tile come, for each dimension, the tiles with a lower place there and the same places before it.
        # Together they are as wide as the tile in earlier dimensions, and as the tensor in later ones.
        index, width = 0, 1
        for begin, size, later in zip(begins, sizes, trailing, strict=True):
            index += width * begin * later
            width *= size
        yield _Tile(index, sizes, within, Box(tuple(map(operator.add, begins, within)), part_sizes))


def _join(
    parts: list[_Joinable], rank: int, join: Callable[[_Joinable, _Joinable, int], _Joinable | None]
) -> list[_Joinable]:
    """Join neighbours along the last dimension, then along the one before it, and so on.

    Args:
        parts: Parts of one box, in lexicographic order of their places.
        rank: Number of dimensions.
        join: Joins two neighbours along a dimension; returns None if that is impossible.
    """
    if len(parts) < 2:
        return parts
    for dimension in reversed(range(rank)):
        # Parts of a line agree in all other dimensions, and are in ascending order. Parts between two of them may be in
        # other lines, because they were not joined as far.
        lines: dict[tuple[tuple[int, ...], ...], list[_Joinable]] = {}
        for part in parts:
            offsets, sizes = part.box
            after = dimension + 1
            others = (offsets[:dimension], offsets[after:], sizes[:dimension], sizes[after:])
            line = lines.setdefault(others, [])
            joined = join(line[-1], part, dimension) if line and _touch(line[-1].box, part.box, dimension) else None
            if joined is None:
                line.append(part)
            else:
                line[-1] = joined
        parts = [part for line in lines.values() for part in line]
    return sorted(parts)


def _touch(first: Box, second: Box, dimension: int) -> bool:
    """Say whether one box ends along a dimension where another begins."""
    return first.offsets[dimension] + first.sizes[dimension] == second.offsets[dimension]


def _joined_box(first: Box, second: Box, dimension: int) -> Box:
    sizes = list(first.sizes)
    sizes[dimension] += second.sizes[dimension]
    return Box(first.offsets, tuple(sizes))


def _join_ranges(first: Range, second: Range, dimension: int) -> Range | None:
    """Join two ranges if the second follows the first, and their elements stay in row-major order."""
    if second.offset != first.offset + first.nbytes or math.prod(first.box.sizes[:dimension]) != 1:
        return None
    return Range(first.offset, first.nbytes + second.nbytes, _joined_box(first.box, second.box, dimension))


def _join_views(first: View, second: View, dimension: int, itemsize: int) -> View | None:
    """Join two views if the elements of both are equally spaced along each dimension.

    The stride of a dimension with one element has no meaning, so it agrees with every other one.
    """
    for at, (size, one, other) in enumerate(zip(first.box.sizes, first.strides, second.strides, strict=True)):
        if at != dimension and size > 1 and one != other:
            return None
    count = first.box.sizes[dimension]
    # From the first element of one view to that of the other there are as many steps as the first has elements.
    step, rest = divmod(second.offset - first.offset, count * itemsize)
    if rest or (count > 1 and step != first.strides[dimension]):
        return None
    if second.box.sizes[dimension] > 1 and step != second.strides[dimension]:
        return None
    strides = (*first.strides[:dimension], step, *first.strides[dimension + 1 :])
    return View(first.offset, _joined_box(first.box, second.box, dimension), strides)
