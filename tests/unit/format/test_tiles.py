"""The geometry of tiles: where boxes of a tensor are in its storage, and how any other box is read from there.

The boxes are what torch's own sharding gives each rank, uneven and empty ones included. Elements are written by
``ranges_of`` and read back by ``views_of``; numpy's slicing says what is right.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckstore.errors import MalformedError, UsageError
from ckstore.format import tiles
from ckstore.format.tiles import Box, Range, View, check_cuts, cuts_of, ranges_of, tile_count, views_of

ITEMSIZE = 4


def whole(shape):
    return Box((0,) * len(shape), shape)


def part_of(array, box):
    return array[(*(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True)), ...)]


def numbers(shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def stored(shape, cuts, boxes):
    """Write boxes to a storage, element by element at most once; what nobody writes stays -1."""
    values, storage = numbers(shape), np.full(math.prod(shape), -1, np.int32)
    for box in dict.fromkeys(boxes):
        ranges = ranges_of(shape, ITEMSIZE, cuts, box)
        assert ranges == sorted(ranges)
        assert sum(each.nbytes for each in ranges) == math.prod(box.sizes) * ITEMSIZE
        for each in ranges:
            target = storage[each.offset // ITEMSIZE :][: each.nbytes // ITEMSIZE]
            assert (target == -1).all()
            target[:] = part_of(values, each.box).ravel()
    return storage


def read(storage, shape, cuts, box):
    """Read a box through strided views, element by element exactly once."""
    result, seen = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for view in views_of(shape, ITEMSIZE, cuts, box):
        last = sum((size - 1) * step for size, step in zip(view.box.sizes, view.strides, strict=True))
        assert view.offset + (last + 1) * ITEMSIZE <= storage.nbytes
        strides = [step * ITEMSIZE for step in view.strides]
        source = np.ndarray(view.box.sizes, np.int32, storage, view.offset, strides)
        part_of(result, view.box)[...] = source
        part_of(seen, view.box)[...] += 1
    assert (part_of(seen, box) == 1).all()
    assert seen.sum() == math.prod(box.sizes)
    return part_of(result, box)


@st.composite
def boxes_within(draw, shape):
    ends = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))


@st.composite
def sharded(draw):
    """Draw a shape and the boxes of all ranks of a device mesh, as torch shards it."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    placement = st.just(Replicate())
    if shape:
        placement |= st.integers(0, len(shape) - 1).map(Shard)
    placements = draw(st.tuples(*[placement] * len(mesh)))
    coordinates = itertools.product(*map(range, mesh))
    found = [_compute_local_shape_and_global_offset(shape, mesh, list(each), placements) for each in coordinates]
    return shape, [Box(tuple(map(int, offset)), tuple(map(int, size))) for size, offset in found]


@st.composite
def tiled(draw):
    """Draw a shape and any cuts of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple))
    cuts = tuple(tuple(sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else ()) for n in shape)
    assume(tile_count(cuts) <= 400)
    return shape, cuts


@given(st.data())
def test_any_box_of_a_sharded_tensor_is_read_as_it_was_written(data):
    shape, boxes = data.draw(sharded())
    cuts = cuts_of(shape, boxes)
    check_cuts(shape, cuts)
    storage = stored(shape, cuts, boxes)
    assert (storage >= 0).all()
    wanted = data.draw(boxes_within(shape))
    np.testing.assert_array_equal(read(storage, shape, cuts, wanted), part_of(numbers(shape), wanted))


@given(st.data())
def test_any_box_is_read_from_any_tiles(data):
    shape, cuts = data.draw(tiled())
    check_cuts(shape, cuts)
    storage = stored(shape, cuts, [whole(shape)])
    wanted = data.draw(boxes_within(shape))
    np.testing.assert_array_equal(read(storage, shape, cuts, wanted), part_of(numbers(shape), wanted))


@given(st.data())
def test_tiles_follow_each_other_in_lexicographic_order(data):
    shape, cuts = data.draw(tiled())
    edges = [list(itertools.pairwise((0, *places, length))) for places, length in zip(cuts, shape, strict=True)]
    parts = [numbers(shape)[tuple(slice(*edge) for edge in tile)].ravel() for tile in itertools.product(*edges)]
    np.testing.assert_array_equal(stored(shape, cuts, [whole(shape)]), np.concatenate(parts))


@given(st.data())
def test_ranges_hold_their_boxes_in_row_major_order(data):
    shape, cuts = data.draw(tiled())
    storage = stored(shape, cuts, [whole(shape)])
    chosen = [
        sorted(data.draw(st.sampled_from((0, *places, length))) for _ in range(2))
        for places, length in zip(cuts, shape, strict=True)
    ]
    for each in ranges_of(shape, ITEMSIZE, cuts, Box(*zip(*((a, b - a) for a, b in chosen), strict=True))):
        held = storage[each.offset // ITEMSIZE :][: each.nbytes // ITEMSIZE].reshape(each.box.sizes)
        np.testing.assert_array_equal(held, part_of(numbers(shape), each.box))


@given(st.data())
def test_a_part_of_a_tile_has_no_range(data):
    shape, cuts = data.draw(tiled())
    box = data.draw(boxes_within(shape))
    assume(0 not in box.sizes)
    is_union = all(
        {at, at + size} <= {0, *places, length}
        for at, size, places, length in zip(box.offsets, box.sizes, cuts, shape, strict=True)
    )
    if is_union:
        assert ranges_of(shape, ITEMSIZE, cuts, box)
    else:
        with pytest.raises(MalformedError, match="part of a tile"):
            ranges_of(shape, ITEMSIZE, cuts, box)


def test_shards_along_the_first_dimension_are_row_major():
    shape = (1, 8, 6)
    boxes = [Box((0, 0, 0), (1, 3, 6)), Box((0, 3, 0), (1, 5, 6)), Box((0, 8, 0), (1, 0, 6))]
    assert cuts_of(shape, boxes) == ()
    assert ranges_of(shape, 2, (), boxes[1]) == [Range(36, 60, boxes[1])]
    inner = Box((0, 2, 1), (1, 4, 3))
    assert views_of(shape, 2, (), inner) == [View(2 * (2 * 6 + 1), inner, (48, 6, 1))]


def test_strided_shards_of_whole_rows_are_row_major():
    # FSDP2 with column-wise tensor parallelism. Each rank has one block of rows.
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    found = [
        _compute_local_shape_and_global_offset((10, 3), (2, 2), list(at), placements)
        for at in itertools.product(range(2), range(2))
    ]
    assert cuts_of((10, 3), [Box(tuple(offset), tuple(size)) for size, offset in found]) == ()


def test_shards_along_two_dimensions_are_tiles():
    # FSDP2 with row-wise tensor parallelism.
    shape = (4, 6)
    boxes = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    cuts = cuts_of(shape, boxes)
    assert cuts == ((2,), (3,))
    assert tile_count(cuts) == 4
    assert [ranges_of(shape, 4, cuts, box) for box in boxes] == [
        [Range(24 * index, 24, box)] for index, box in enumerate(boxes)
    ]
    # Both tiles of the lower half have their bytes together, but in another order than its elements.
    lower = Box((2, 0), (2, 6))
    assert ranges_of(shape, 4, cuts, lower) == [Range(48, 24, boxes[2]), Range(72, 24, boxes[3])]
    assert views_of(shape, 4, cuts, Box((0, 1), (4, 2))) == [
        View(4 * 1, Box((0, 1), (2, 2)), (3, 1)),
        View(4 * 13, Box((2, 1), (2, 2)), (3, 1)),
    ]
    # One row of each of two tiles: a view with a stride of its own.
    assert views_of(shape, 4, cuts, Box((1, 1), (2, 2))) == [View(4 * 4, Box((1, 1), (2, 2)), (9, 1))]


def test_boxes_of_ranks_that_hold_several_tiles_cut_each_other():
    shape = (2, 6)
    boxes = [Box((0, 0), (2, 4)), Box((0, 4), (2, 2)), Box((0, 0), (2, 2)), Box((0, 2), (2, 4))]
    cuts = cuts_of(shape, boxes)
    assert cuts == ((), (2, 4))
    assert [len(ranges_of(shape, 4, cuts, box)) for box in boxes] == [2, 1, 1, 2]


def test_tiles_of_single_rows_join_to_ranges_and_views():
    shape, cuts = (4, 4), ((1, 2, 3), (2,))
    assert ranges_of(shape, 4, cuts, Box((1, 0), (2, 4))) == [Range(16, 32, Box((1, 0), (2, 4)))]
    inner = Box((1, 1), (3, 2))
    assert views_of(shape, 4, cuts, inner) == [View(20, inner, (4, 1))]


def test_tiles_of_single_columns_are_one_view_with_strides_of_columns():
    inner = Box((1, 1), (2, 3))
    assert views_of((3, 4), 4, ((), (1, 2, 3)), inner) == [View(4 * 4, inner, (1, 3))]


def test_views_with_another_view_between_them_are_not_joined():
    # Rows 0 and 4 are one view each, as far apart as a step of 20 elements; rows 1 to 3 are two views.
    shape, cuts = (1, 5, 5), ((), (1, 4), (1, 2))
    storage = stored(shape, cuts, [whole(shape)])
    assert (read(storage, shape, cuts, whole(shape)) == numbers(shape)).all()


def test_tensors_without_elements_and_without_dimensions():
    assert cuts_of((), [Box((), ())]) == ()
    assert ranges_of((), 8, (), Box((), ())) == [Range(0, 8, Box((), ()))]
    assert views_of((), 8, (), Box((), ())) == [View(0, Box((), ()), ())]
    assert cuts_of((0, 5), [Box((0, 0), (0, 2)), Box((0, 2), (0, 3))]) == ()
    assert ranges_of((0, 5), 8, (), whole((0, 5))) == []
    assert views_of((0, 5), 8, (), whole((0, 5))) == []
    assert cuts_of((4, 4), []) == ()
    assert ranges_of((4, 4), 8, ((2,), (2,)), Box((4, 1), (0, 3))) == []
    check_cuts((0, 5), ())
    check_cuts((), ())


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (5, 4)),
        Box((3, 0), (2, 4)),
        Box((-1, 0), (2, 4)),
        Box((2, 0), (-1, 4)),
        Box((5, 0), (0, 4)),
        Box((0,), (4,)),
        Box((0, 0), (4,)),
    ],
)
@pytest.mark.parametrize("cuts", [(), ((2,), (2,))])
def test_a_box_beyond_its_tensor_is_refused(box, cuts):
    for function in (ranges_of, views_of):
        with pytest.raises(MalformedError, match="reaches beyond its tensor"):
            function((4, 4), 4, cuts, box)


def test_a_part_of_a_row_has_no_range_in_a_row_major_tensor():
    with pytest.raises(MalformedError, match="part of a row"):
        ranges_of((4, 4), 4, (), Box((0, 0), (1, 2)))


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((4, 4), ((2,),)),
        ((4, 4), ((2,), (2,), ())),
        ((4, 4), ((0, 2), ())),
        ((4, 4), ((2, 2), ())),
        ((4, 4), ((3, 2), ())),
        ((4, 4), ((), (4,))),
        ((4, 4), ((), (-1,))),
        ((0, 4), ((0,), ())),
        ((4, 4), ((), (1.0,))),
        ((4, 4), ((), (True,))),
        ((4, 4), ((), 2)),
        ((-4, 4), ()),
        ((4.0, 4), ()),
        ((1 << 62,), ()),
        ((1,) * 65, ()),
    ],
)
def test_impossible_cuts_and_shapes_are_refused(shape, cuts):
    with pytest.raises(MalformedError):
        check_cuts(shape, cuts)


def test_the_number_of_tiles_is_bounded(monkeypatch):
    many = tuple(range(1, 1024))
    check_cuts((1024, 1024), (many, many))
    with pytest.raises(MalformedError, match=r"more than 1,048,576 tiles"):
        check_cuts((1024, 1025), (many, (*many, 1024)))
    monkeypatch.setattr(tiles, "TILES_MAX", 3)
    with pytest.raises(UsageError, match="4 tiles, more than 3"):
        cuts_of((4, 4), [Box((0, 0), (2, 2))])
