"""Protects spans that are created on first access: they equal spans that are created immediately."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.state import memory
from ckstore.state.memory import MemorySpan, Spans, SpanShape, keeps_of


@pytest.fixture
def arrays():
    return [np.arange(count, dtype=np.float32) for count in (3, 1, 5)]


@pytest.fixture
def made(arrays):
    return [MemorySpan(each.ctypes.data, each.nbytes, 4, True, [each], None) for each in arrays]


@pytest.fixture
def spans(arrays, made):
    shapes = [SpanShape(each.nbytes, 4, True) for each in arrays]
    return Spans(shapes, Spans.of(made).starts, [(each,) for each in arrays], [None] * len(arrays))


def test_spans_equal_spans_created_immediately(spans, made):
    assert len(spans) == len(made) == len(list(spans))
    for one, other in zip(spans, made, strict=True):
        assert one == MemorySpan(other.start, other.nbytes, 4, True, tuple(other.keep), None)
        assert one.read(0, one.nbytes) == other.read(0, other.nbytes)
        assert one.is_host


def test_span_is_created_once(spans):
    assert spans[1] is spans[1] is list(spans)[1] is spans[-2]


def test_spans_are_sliced_like_a_list(spans):
    assert spans[1:] == [spans[1], spans[2]]
    assert spans[::-2] == [spans[2], spans[0]]
    for index in (3, -4):
        with pytest.raises(IndexError):
            spans[index]


def test_keeps_are_returned_without_creating_spans(spans, made, arrays, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(memory, "MemorySpan", lambda *_: pytest.fail("it is made"))
        assert [kept[0] for kept in keeps_of(spans, [2, 0])] == [arrays[2], arrays[0]]
    assert [kept[0] for kept in keeps_of(made, [2, 0])] == [arrays[2], arrays[0]]
    assert keeps_of([object()], [0]) == [()]


def test_span_starts_are_read_only(spans):
    with pytest.raises(ValueError, match="read-only"):
        spans.starts[0] = 1
