"""Memory as bytes: views of addresses, allocation, and the spans of memory that a commit stores.

A ``MemorySpan`` is one storage of a capture. ``Spans`` creates them on first access.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import CapacityError
from ckstore.state.tensors import HostStorage, Reader

_LINE_NBYTES = 64
_MAPPED_NBYTES_MIN = 1 << 20


class AddressRange:
    """A range of addresses that numpy can view; keeps the owner of the memory alive."""

    def __init__(self, start: int, nbytes: int, keep: object) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, True), "version": 3}
        self.keep = keep


def view_of_memory(start: int, nbytes: int, keep: object) -> memoryview:
    """Return bytes of this process, read-only and without a copy; ``keep`` lives as long as the view."""
    if nbytes == 0:
        return memoryview(b"")
    return np.asarray(AddressRange(start, nbytes, keep)).data


def writable_view_of(start: int, nbytes: int, keep: object) -> memoryview:
    """Return bytes of this process for writing; ``keep`` lives as long as the view."""
    if nbytes == 0:
        return memoryview(bytearray())
    address = AddressRange(start, nbytes, keep)
    address.__array_interface__["data"] = (start, False)
    return np.asarray(address).data


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return uninitialized host memory, aligned for vector loads, and for direct I/O if it is large.

    Raises:
        CapacityError: There is not enough memory.
    """
    try:
        return _map(nbytes) if nbytes >= _MAPPED_NBYTES_MIN else _take(nbytes)
    except (MemoryError, OSError, OverflowError, ValueError):
        raise CapacityError(
            f"no memory for a storage of {nbytes} bytes",
            todo="select fewer leaves with only=, or restore in place with into=",
        ) from None


def _take(nbytes: int) -> NDArray[np.uint8]:
    memory = np.empty(nbytes + _LINE_NBYTES, np.uint8)
    skip = -address_of(memory) % _LINE_NBYTES
    return memory[skip : skip + nbytes]


def address_of(memory: NDArray[np.uint8]) -> int:
    """Return the address of a writable array that is not empty; four times as fast as numpy's own attributes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))


def _map(nbytes: int) -> NDArray[np.uint8]:
    # Huge pages: the first write to ordinary pages takes three times as long, longer than hashing the data.
    # Adjacent mappings can share a huge page.
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        # The process may have reached the limit of mappings.
        return _take(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; ordinary pages work too.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


# Not frozen: a commit creates hundreds, and freezing makes creation three times as slow.
@dataclass(slots=True)
class MemorySpan:
    """A range of memory that a commit stores as one storage; ``keep`` lists what keeps each of its leaves alive."""

    start: int
    nbytes: int
    element_width: int
    is_float: bool
    keep: Sequence[object] = field(repr=False)
    reader: Reader | None

    @property
    def is_host(self) -> bool:
        """Whether the bytes are in host memory."""
        return self.reader is None

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``."""
        assert 0 <= lo <= hi <= self.nbytes
        if self.reader is not None and lo < hi:
            return self.reader(self.start + lo, self.start + hi)
        return view_of_memory(self.start + lo, hi - lo, self.keep)


class SpanShape(NamedTuple):
    """A span without its address."""

    nbytes: int
    element_width: int
    is_float: bool


class Spans(Sequence[HostStorage]):
    """Spans that are created on first access.

    The trainer waits while its state is captured, and copying needs only the addresses.

    Args:
        shapes: The shape of each span.
        starts: The address of each span, (n,) uint64; never changed.
        keeps: What keeps the leaves of each span alive.
        readers: Copies the bytes of each span to the host; None for host memory.
    """

    def __init__(
        self,
        shapes: Sequence[SpanShape],
        starts: NDArray[np.uint64],
        keeps: Sequence[Sequence[object]],
        readers: Sequence[Reader | None],
    ) -> None:
        self.shapes = shapes
        self.starts = starts
        self.keeps = keeps
        self.readers = readers
        self._made: list[MemorySpan | None] = [None] * len(shapes)
        self.are_host = not any(readers)
        """Whether all spans are in host memory."""

    @classmethod
    def of(cls, made: Sequence[MemorySpan]) -> Spans:
        """Return spans that exist already."""
        starts = np.array([span.start for span in made], np.uint64)
        starts.setflags(write=False)
        shapes = [SpanShape(span.nbytes, span.element_width, span.is_float) for span in made]
        spans = cls(shapes, starts, [span.keep for span in made], [span.reader for span in made])
        spans._made = list(made)
        return spans

    def __len__(self) -> int:
        return len(self.shapes)

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
            made = MemorySpan(start, *self.shapes[index], self.keeps[index], self.readers[index])
            self._made[index] = made
        return made


def keeps_of(storages: Sequence[HostStorage], indices: Sequence[int]) -> list[Sequence[object]]:
    """Return what keeps the leaves of some storages alive; an empty tuple for storages that are not memory spans."""
    if isinstance(storages, Spans):
        return [storages.keeps[index] for index in indices]
    return [getattr(storages[index], "keep", ()) for index in indices]


def shapes_of(storages: Sequence[HostStorage]) -> Sequence[SpanShape]:
    """Return the shape of each storage."""
    if isinstance(storages, Spans):
        return storages.shapes
    return [SpanShape(each.nbytes, each.element_width, each.is_float) for each in storages]


def starts_of(storages: Sequence[HostStorage]) -> list[int]:
    """Return the address of each storage; 0 for storages that are not memory spans."""
    if isinstance(storages, Spans):
        found: list[int] = storages.starts.tolist()
        return found
    return [int(getattr(each, "start", 0)) for each in storages]


def readers_of(storages: Sequence[HostStorage]) -> Sequence[Reader | None]:
    """Return what copies the bytes of each storage from its device; None for host memory."""
    if isinstance(storages, Spans):
        return storages.readers
    return [getattr(each, "reader", None) for each in storages]


def host_indices(storages: Sequence[HostStorage], indices: Iterable[int]) -> list[int]:
    """Return the indices of those storages that are in host memory, in order."""
    are_host = isinstance(storages, Spans) and storages.are_host
    return [index for index in sorted(indices) if are_host or storages[index].is_host]
