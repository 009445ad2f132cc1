"""Say of each storage when it is copied, and make the copies of those that lie in a device.

What lies entirely in memory that a guard protects may be copied behind it; all else is copied before training goes
on. So is what lies in a device without streams that a guard could hold.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.capture import Captured
from ckstore.errors import BackendError
from ckstore.format.logical import itemsize_of
from ckstore.memory_spans import Spans
from ckstore.saver.arena import UNIT_NBYTES, Slot
from ckstore.staging.stowage import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW, Section
from ckstore.tensor import HostStorage, TensorSpec, byte_strides_of, extent_of

_CODEBOOK_WORD = re.compile(r"(?i)code_?book|quanti[sz]e|(^|[._])r?vq([._]|$)")
"""In the names of what vector quantizers restart entries of in their forward pass."""

_CODEBOOK_NBYTES_MAX = 16 << 20
"""One thread copies so much in 2 to 4 ms."""

Span = tuple[int, int]
"""The first address, and the one after the last."""


class DeviceCopies(Protocol):
    """Copies of one section, from devices, in order with what those compute."""

    def fence(self) -> None:
        """Have the copies come after everything that this thread has launched before."""
        ...

    def launch(self) -> None:
        """Begin; what a guard protects, on any thread."""
        ...

    def hold(self) -> None:
        """Let what is launched from here on wait for the copies."""
        ...

    def wait(self, mark: Callable[[int], None]) -> None:
        """Wait until all bytes have come; call ``mark`` for each unit of the section that has."""
        ...

    def forget(self) -> None:
        """Let go of the storages: nothing is launched any more."""
        ...


def starts_of(storages: Sequence[HostStorage]) -> NDArray[np.uint64]:
    """Return the address of each storage in the memory that it lies in."""
    if isinstance(storages, Spans):
        return storages.starts
    told = [getattr(storage, "start", None) for storage in storages]
    if None in told:
        told = [_start_of(storage) for storage in storages]
    return np.array(told, np.uint64)


def codebooks_of(captured: Captured) -> frozenset[int]:
    """Return the storages that are codebooks by their names, and small enough to be copied before a call returns."""
    return frozenset(
        spec.storage
        for spec, path in zip(captured.tensors, captured.paths, strict=True)
        if captured.storages[spec.storage].nbytes <= _CODEBOOK_NBYTES_MAX
        and any(_CODEBOOK_WORD.search(key) for key in path if isinstance(key, str))
    )


def kinds_of(captured: Captured, starts: NDArray[np.uint64], guarded: Sequence[Span]) -> list[int]:
    """Return when each storage is copied.

    Args:
        captured: The state.
        starts: The address of each storage.
        guarded: Memory that a guard protects, ascending.
    """
    storages = captured.storages
    nbytes = np.array([storage.nbytes for storage in storages], np.uint64)
    if guarded:
        memory = _Memory(guarded)
        is_lazy = memory.holds(starts, starts + nbytes)
        for index in np.flatnonzero(~is_lazy):
            # Padding between tensors of one allocation belongs to nobody.
            is_lazy[index] = memory.holds_tensors(captured, int(index), int(starts[index]))
    else:
        is_lazy = np.zeros(len(storages), np.bool_)
    kinds = []
    for storage, lazy in zip(storages, is_lazy.tolist(), strict=True):
        if storage.is_host:
            kinds.append(LAZY if lazy else NOW)
        else:
            kinds.append(DEVICE_LAZY if lazy and is_cuda(storage) else DEVICE_NOW)
    return kinds


class _Memory:
    """Spans of addresses."""

    def __init__(self, spans: Sequence[Span]) -> None:
        # One that holds nothing comes first, so that there is always one before.
        self._starts = np.array([0, *(start for start, _ in spans)], np.uint64)
        self._ends = np.array([0, *(end for _, end in spans)], np.uint64)
        self._by_storage: dict[int, list[TensorSpec]] | None = None

    def holds(self, begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of some ranges lie in one of the spans."""
        at = np.searchsorted(self._starts, begins, side="right") - 1
        return np.asarray(ends <= self._ends[at])

    def holds_tensors(self, captured: Captured, index: int, start: int) -> bool:
        """Whether every tensor of a storage that begins at an address lies in one of the spans."""
        if self._by_storage is None:
            self._by_storage = {}
            for spec in captured.tensors:
                self._by_storage.setdefault(spec.storage, []).append(spec)
        extents = np.array([_extent(spec, start) for spec in self._by_storage[index]], np.uint64)
        return bool(self.holds(extents[:, 0], extents[:, 1]).all())


def _start_of(storage: HostStorage) -> int:
    start = getattr(storage, "start", None)
    if isinstance(start, int):
        return start
    if storage.nbytes == 0 or not storage.is_host:
        return 0
    address: int = np.frombuffer(storage.read(0, storage.nbytes), np.uint8).__array_interface__["data"][0]
    return address


def _extent(spec: TensorSpec, start: int) -> Span:
    itemsize = itemsize_of(spec.library, spec.dtype) or 1
    lo, hi = extent_of(spec.shape, byte_strides_of(spec.library, spec.strides, itemsize), itemsize)
    return start + spec.offset + lo, start + spec.offset + hi


def copies_of(section: Section, storages: Sequence[HostStorage], slot: Slot) -> DeviceCopies:
    """Return the copies of a section of storages that lie in devices."""
    if any(is_cuda(storages[index]) for index in section.storages):
        from ckstore.adapters.staging_cuda import CudaCopies

        return CudaCopies(section, storages, slot)
    return _ReadCopies(section, storages, slot)


def versions_of(keeps: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return two numbers for each storage that differ when its library has seen it changed, or moved it.

    Args:
        keeps: What keeps the leaves of each alive.
    """
    if not keeps or "torch" not in sys.modules:
        return [(0, 0)] * len(keeps)
    from ckstore.adapters.guarding import versions_of as counted

    return counted(keeps)


def pin(slot: Slot, nbytes: int) -> None:
    """Let CUDA devices copy to the first bytes of a slot at full speed, where there are any."""
    if "torch" in sys.modules:
        from ckstore.adapters.staging_cuda import pin as pin_slot

        pin_slot(slot, nbytes)


def is_cuda(storage: HostStorage) -> bool:
    """Whether a storage lies in a CUDA device, which copies it in the order of its streams."""
    if storage.is_host or "torch" not in sys.modules:
        return False
    from ckstore.adapters.staging_cuda import device_of

    return device_of(storage) is not None


class _ReadCopies:
    """Copies through the library's own way to the host, piece by piece, on the thread that launches them.

    The library orders them with what that thread has told the device; another thread may be on another stream.
    """

    def __init__(self, section: Section, storages: Sequence[HostStorage], slot: Slot) -> None:
        self._section = section
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        self._unit_count = 0
        self._thread = 0

    def fence(self) -> None:
        """Take note of who asks for it."""
        self._thread = threading.get_ident()

    def launch(self) -> None:
        """Copy everything.

        Raises:
            BackendError: This is another thread: it may see what the device has not computed yet.
        """
        if threading.get_ident() != self._thread:
            raise BackendError(
                "a device was to be read by a thread that does not know what it was told before",
                todo="report this, with the types of the state's tensors; until then, do not attach the optimizer",
            )
        for unit in range(self._section.unit_count):
            for index, offset, place, nbytes in self._section.rows_of(unit):
                assert nbytes <= UNIT_NBYTES
                kernels.copy_bytes(self._storages[index].read(offset, offset + nbytes), self._slot.view(place, nbytes))
            self._unit_count = unit + 1

    def hold(self) -> None:
        """Do nothing: this is over before training goes on."""

    def wait(self, mark: Callable[[int], None]) -> None:
        """Mark what was copied."""
        for unit in range(self._unit_count):
            mark(unit)

    def forget(self) -> None:
        """Let go of the storages."""
        self._storages = ()
