"""Destinations for boxes of tensors: a restore fills them like storages.

A box is a strided view of a storage. The bytes from its first to its last element are a *window*, which the restore
sees as a storage of its own. A window that has the layout of a live tensor is read into it directly. Every other one is
read into a buffer, and its elements are copied to the tensor when it is complete. Large boxes have several windows, so
that buffers stay small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckstore.config import MIB
from ckstore.format.manifest import Manifest
from ckstore.format.narrowing import pieces_between
from ckstore.format.tensors import StorageSpec, extent_of
from ckstore.state.memory import address_of, allocate, writable_view_of
from ckstore.state.torch_adapter import TorchAdapter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUFFER_NBYTES_MAX = 32 * MIB
"""A box whose elements are farther apart is read in several windows."""


class Wanted(NamedTuple):
    """A strided view of a storage, and the tensor to copy its elements to.

    Args:
        storage: Index of the storage.
        offset: Byte offset of the first element.
        strides: Step of each dimension, in elements.
        dtype: Dtype of the stored elements.
        target: Where they go; its shape is that of the view.
    """

    storage: int
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def extent(self) -> tuple[int, int]:
        """The byte range of the storage from the first to the last element."""
        steps = tuple(step * self.dtype.itemsize for step in self.strides)
        lo, hi = extent_of(tuple(self.target.shape), steps, self.dtype.itemsize)
        return self.offset + lo, self.offset + hi

    def split(self) -> Iterator[Wanted]:
        """Yield parts with short extents, if possible."""
        lo, hi = self.extent
        sizes = zip(self.target.shape, self.strides, strict=True)
        lengths = [(length * step, dim) for dim, (length, step) in enumerate(sizes) if length > 1]
        if hi - lo <= BUFFER_NBYTES_MAX or not lengths or self.is_direct:
            yield self
            return
        _, dim = max(lengths)
        half = self.target.shape[dim] // 2
        for begin, length in ((0, half), (half, self.target.shape[dim] - half)):
            offset = self.offset + begin * self.strides[dim] * self.dtype.itemsize
            part = self._replace(offset=offset, target=self.target.narrow(dim, begin, length))
            yield from part.split()

    @property
    def is_direct(self) -> bool:
        """Whether the target is host memory in which the elements lie as in the storage."""
        target = self.target
        if target.device.type != "cpu" or target.dtype != self.dtype or not target.is_contiguous():
            return False
        if target.is_conj() or target.is_neg():
            return False
        # The step along a dimension of one element has no meaning.
        same = zip(target.shape, target.stride(), self.strides, strict=True)
        return all(length <= 1 or ours == theirs for length, ours, theirs in same)


class BoxTargets:
    """Destinations for the windows of one restore, as ``RestoreTargets`` are for storages.

    Attributes:
        manifest: The checkpoint, with the windows as further storages.
    """

    def __init__(self, manifest: Manifest, wanted: Iterable[Wanted]) -> None:
        first = len(manifest.storages)
        parts = [part for each in wanted if each.target.numel() for part in each.split()]
        self._parts = dict(enumerate(parts, first))
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._direct = {index for index, part in self._parts.items() if part.is_direct}
        self._lock = threading.Lock()
        windows = [_window(manifest.storages, part) for part in parts]
        self.manifest = replace(manifest, storages=(*manifest.storages, *windows))

    def __enter__(self) -> BoxTargets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.clear()

    @property
    def storages(self) -> list[int]:
        """Indices of the windows, in the order in which they are wanted."""
        return list(self._parts)

    @property
    def keeps_all(self) -> bool:
        """Whether no buffer is needed."""
        return len(self._direct) == len(self._parts)

    def destination(self, storage: int) -> memoryview:
        """Return writable memory for a window; later calls return the same memory."""
        part, nbytes = self._parts[storage], self.manifest.storages[storage].nbytes
        if storage in self._direct:
            return writable_view_of(part.target.data_ptr(), nbytes, part.target)
        with self._lock:
            if storage not in self._buffers:
                self._buffers[storage] = allocate(nbytes)
            return self._buffers[storage].data

    def addresses(self, storages: Iterable[int]) -> list[int]:
        """Return the address of each destination; it is valid until ``complete``."""
        found: list[int] = []
        for storage in storages:
            if storage in self._direct:
                found.append(self._parts[storage].target.data_ptr())
            else:
                self.destination(storage)
                found.append(address_of(self._buffers[storage]))
        return found

    def complete(self, *storages: int) -> None:
        """Record that windows are filled; copy the elements from buffers to their targets."""
        for storage in storages:
            if storage in self._direct:
                continue
            with self._lock:
                buffer = self._buffers.pop(storage)
            part = self._parts[storage]
            lo, _ = part.extent
            begin = (part.offset - lo) // part.dtype.itemsize
            source = torch.from_numpy(buffer).view(part.dtype)
            with torch.no_grad():
                part.target.copy_(source.as_strided(part.target.shape, part.strides, begin))

    def finish(self) -> None:
        """Tell torch which tensors were written without it."""
        TorchAdapter().mark_written([self._parts[storage].target for storage in self._direct])


def _window(storages: Sequence[StorageSpec], part: Wanted) -> StorageSpec:
    whole = storages[part.storage]
    lo, hi = part.extent
    return replace(whole, nbytes=hi - lo, pieces=tuple(pieces_between(whole.pieces, lo, hi)))
