"""Protects the arrangement of boxes of a DCP save: every byte at its place, and no gap or overlap goes unnoticed."""

from __future__ import annotations

import math
from ast import literal_eval

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import UsageError
from ckstore.format.tensors import Piece
from ckstore.format.tiles import Box, views_of
from ckstore.ranks.dcp_boxes import WrittenBox, arranged, start_of

ITEMSIZE = 2


@st.composite
def boxes(draw):
    """Draw a shape, and boxes that fill it, in any order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    found = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(found) - 1))
        offsets, sizes = found[index]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            cut = draw(st.integers(1, sizes[dim] - 1))
            rest = [*sizes]
            rest[dim] -= cut
            begin = [*offsets]
            begin[dim] += cut
            found[index] = Box(offsets, (*sizes[:dim], cut, *sizes[dim + 1 :]))
            found.append(Box(tuple(begin), tuple(rest)))
    return shape, draw(st.permutations(found))


def written(shape, found):
    """Return the boxes with chunks of at most 10 bytes, and the bytes of these chunks."""
    values = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    chunks, result = [], []
    for rank, box in enumerate(found):
        part = values[(*(slice(at, at + size) for at, size in zip(*box, strict=True)), ...)].tobytes()
        pieces = []
        for begin in range(0, len(part), 10):
            chunks.append(b"??" + part[begin : begin + 10])
            pieces.append(Piece(len(chunks) - 1, 2, len(chunks[-1]) - 2))
        result.append(WrittenBox(rank, box, tuple(pieces)))
    return values, chunks, result


@given(boxes())
def test_a_tensor_is_read_as_ranks_wrote_its_boxes(drawn):
    shape, found = drawn
    values, chunks, parts = written(shape, found)
    cuts, pieces = arranged("w", shape, ITEMSIZE, parts)
    storage = b"".join(chunks[piece.chunk][piece.offset : piece.offset + piece.nbytes] for piece in pieces)
    assert len(storage) == values.nbytes
    whole = np.full(shape, -1, np.int32)
    for view in views_of(shape, ITEMSIZE, cuts, Box((0,) * len(shape), shape)):
        place = (*(slice(at, at + size) for at, size in zip(*view.box, strict=True)), ...)
        strides = [step * ITEMSIZE for step in view.strides]
        whole[place] = np.ndarray(view.box.sizes, np.uint16, storage, view.offset, strides)
    np.testing.assert_array_equal(whole, values)


@given(boxes(), st.data())
def test_a_missing_box_is_named(drawn, data):
    shape, found = drawn
    _, _, parts = written(shape, found)
    missing = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
    with pytest.raises(UsageError, match=r"no rank wrote a part of a tensor: layer\.w") as caught:
        arranged("layer.w", shape, ITEMSIZE, parts)
    assert caught.value.tensor == "layer.w"
    index = literal_eval(str(caught.value).partition("from index ")[2].partition(" on")[0])
    assert all(lo <= at < lo + size for at, lo, size in zip(index, *missing.box, strict=True))


@given(boxes(), st.data())
def test_a_box_that_two_ranks_wrote_is_named(drawn, data):
    shape, found = drawn
    _, _, parts = written(shape, found)
    again = data.draw(st.sampled_from(parts))._replace(rank=77)
    with pytest.raises(UsageError, match=r"rank \d+ and rank \d+ wrote the same part of a tensor") as caught:
        arranged("w", shape, ITEMSIZE, [*parts, again])
    assert "rank 77" in str(caught.value)


def test_boxes_begin_at_their_place_in_the_storage():
    assert start_of((8, 3), 2, (), Box((2, 0), (4, 3))) == 12
    assert start_of((1, 8, 3), 2, (), Box((0, 2, 0), (1, 4, 3))) == 12
    assert start_of((8, 3), 2, (), Box((2, 1), (4, 2))) is None
    assert start_of((8, 3), 2, (), Box((8, 0), (0, 3))) is None
    assert start_of((), 4, (), Box((), ())) == 0
    columns = ((), (2,))
    assert start_of((8, 3), 2, columns, Box((0, 2), (8, 1))) == 32
    assert start_of((8, 3), 2, columns, Box((0, 0), (8, 3))) is None
    assert start_of((8, 3), 2, columns, Box((0, 1), (8, 2))) is None


def test_a_tensor_without_elements_has_no_pieces():
    assert arranged("w", (0, 3), 4, []) == ((), ())
    assert arranged("w", (0, 3), 4, [WrittenBox(0, Box((0, 0), (0, 3)), ())]) == ((), ())
