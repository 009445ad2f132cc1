"""Spans of memory that are to be storages, one by one or hundreds that are made when they are first looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ckstore.state.numpy_adapter import view_of_memory
from ckstore.state.tensors import HostStorage

Reader = Callable[[int, int], memoryview]


# Not frozen: hundreds are made in each commit, and that would take three times as long.
@dataclass(slots=True)
class MemorySpan:
    """A span of memory that is to be a storage; ``keep`` lists what keeps each of its leaves alive."""

    start: int
    nbytes: int
    element_width: int
    is_float: bool
    keep: Sequence[object] = field(repr=False)
    reader: Reader | None

    @property
    def is_host(self) -> bool:
        """Whether the bytes lie in host memory."""
        return self.reader is None

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``."""
        assert 0 <= lo <= hi <= self.nbytes
        if self.reader is not None and lo < hi:
            return self.reader(self.start + lo, self.start + hi)
        return view_of_memory(self.start + lo, hi - lo, self.keep)


class SpanShape(NamedTuple):
    """What a span is, wherever it lies."""

    nbytes: int
    element_width: int
    is_float: bool


class Spans(Sequence[HostStorage]):
    """Spans that are made when they are asked for: a trainer waits for a capture, and copies need addresses only.

    Args:
        shapes: What each is.
        starts: The address of each, (n,) uint64; never changed.
        keeps: What keeps the leaves of each alive.
        readers: How each is read; None: it lies in host memory.
    """

    def __init__(
        self,
        shapes: Sequence[SpanShape],
        starts: NDArray[np.uint64],
        keeps: Sequence[Sequence[object]],
        readers: Sequence[Reader | None],
    ) -> None:
        self._shapes = shapes
        self.starts = starts
        self.keeps = keeps
        self._readers = readers
        self._made: list[MemorySpan | None] = [None] * len(shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, index: int) -> MemorySpan: ...
    @overload
    def __getitem__(self, index: slice) -> list[HostStorage]: ...
    def __getitem__(self, index: int | slice) -> MemorySpan | list[HostStorage]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        made = self._made[index]
        if made is None:
            start = int(self.starts[index])
            made = MemorySpan(start, *self._shapes[index], self.keeps[index], self._readers[index])
            self._made[index] = made
        return made


def fixed_starts_of(spans: Sequence[HostStorage]) -> NDArray[np.uint64]:
    """Return where spans of memory begin, as ``Spans`` has it: nobody can change it."""
    starts = np.empty(len(spans), np.uint64)
    for index, span in enumerate(spans):
        assert isinstance(span, MemorySpan)
        starts[index] = span.start
    starts.setflags(write=False)
    return starts


def keeps_of(storages: Sequence[HostStorage], indices: Sequence[int]) -> list[Sequence[object]]:
    """Return what keeps the leaves of some storages alive; nothing is told of those of other kinds."""
    if isinstance(storages, Spans):
        return [storages.keeps[index] for index in indices]
    return [getattr(storages[index], "keep", ()) for index in indices]
