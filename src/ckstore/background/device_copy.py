"""Copy the storages of one section from a device into a slot.

``kinds_of`` decides when each storage of a state is copied. ``DeviceCopy`` runs the copies of one section: it launches
them on the device once and waits until all bytes have arrived.

Storages that lie entirely in guarded memory may be copied while training continues. All others are copied before
training continues. So are storages on devices without streams, because a guard cannot hold such a device.

Invariants:
- Copies are ordered after everything that was launched on the device before ``begin``, on whichever thread ``launch``
  runs.
- A section that is cancelled before its launch is never launched. A launched section is always waited for.
- A guard lets training continue only after all copies were launched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckstore.background.arena import UNIT_NBYTES, Slot
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW, Section
from ckstore.background.copying import Checksums, Span, StorageOffset, result_or_error, strip_traceback
from ckstore.codec import kernels
from ckstore.concurrency import log_safely, noop
from ckstore.errors import BackendError, CkstoreError
from ckstore.format.logical import itemsize_of
from ckstore.format.tensors import TensorSpec, byte_strides_of, extent_of
from ckstore.state.capture import Captured
from ckstore.state.memory import Spans
from ckstore.state.tensors import HostStorage

_CODEBOOK_WORD = re.compile(r"(?i)code_?book|quanti[sz]e|(^|[._])r?vq([._]|$)")
"""Matches names of codebooks. Vector quantizers restart codebook entries in their forward pass."""

_CODEBOOK_NBYTES_MAX = 16 << 20
"""One thread copies this in 2 to 4 ms."""

_log = logging.getLogger("ckstore")


class DeviceCopies(Protocol):
    """The copies of one section from devices, ordered with the computations of those devices."""

    def fence(self) -> None:
        """Order the copies after everything that this thread has launched so far."""
        ...

    def launch(self) -> None:
        """Begin the copies. Those of guarded memory may be launched on any thread."""
        ...

    def hold(self) -> None:
        """Make everything that is launched from now on wait for the copies."""
        ...

    def wait(self, mark: Callable[[int], None]) -> None:
        """Wait until all bytes have arrived. Call ``mark`` for each unit of the section that is complete."""
        ...

    def forget(self) -> None:
        """Release the storages. Nothing is launched afterwards."""
        ...


def starts_of(storages: Sequence[HostStorage]) -> NDArray[np.uint64]:
    """Return the address of each storage, in host or device memory."""
    if isinstance(storages, Spans):
        return storages.starts
    addresses = [getattr(storage, "start", None) for storage in storages]
    if None in addresses:
        addresses = [_start_of(storage) for storage in storages]
    return np.array(addresses, np.uint64)


def codebooks_of(captured: Captured) -> frozenset[int]:
    """Return the storages that are codebooks by their names, and small enough to be copied immediately."""
    return frozenset(
        spec.storage
        for spec, path in zip(captured.tensors, captured.paths, strict=True)
        if captured.storages[spec.storage].nbytes <= _CODEBOOK_NBYTES_MAX
        and any(_CODEBOOK_WORD.search(key) for key in path if isinstance(key, str))
    )


def kinds_of(captured: Captured, starts: NDArray[np.uint64], guarded: Sequence[Span]) -> list[int]:
    """Return for each storage when it is copied: ``NOW``, ``LAZY``, ``DEVICE_NOW`` or ``DEVICE_LAZY``.

    Args:
        captured: The state.
        starts: The address of each storage.
        guarded: Guarded address ranges, ascending.
    """
    storages = captured.storages
    nbytes = np.array([storage.nbytes for storage in storages], np.uint64)
    if guarded:
        memory = _GuardedMemory(guarded)
        is_lazy = memory.holds(starts, starts + nbytes)
        for index in np.flatnonzero(~is_lazy):
            # Padding between tensors of one allocation may be outside: then each tensor must be inside.
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


class _GuardedMemory:
    """Guarded address ranges."""

    def __init__(self, spans: Sequence[Span]) -> None:
        # The first span is empty, so that every address has a predecessor.
        self._starts = np.array([0, *(start for start, _ in spans)], np.uint64)
        self._ends = np.array([0, *(end for _, end in spans)], np.uint64)
        self._by_storage: dict[int, list[TensorSpec]] | None = None

    def holds(self, begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which address ranges lie within one of the spans."""
        at = np.searchsorted(self._starts, begins, side="right") - 1
        return np.asarray(ends <= self._ends[at])

    def holds_tensors(self, captured: Captured, index: int, start: int) -> bool:
        """Whether every tensor of a storage lies within one of the spans."""
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
    """Return the copies of a section whose storages are on devices."""
    if any(is_cuda(storages[index]) for index in section.storages):
        from ckstore.background.cuda import CudaCopies

        return CudaCopies(section, storages, slot)
    return _ReadCopies(section, storages, slot)


def versions_of(keeps: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return two numbers for each storage. They differ after its library has changed or moved it.

    Args:
        keeps: For each storage, the objects that keep its tensors alive.
    """
    if not keeps or "torch" not in sys.modules:
        return [(0, 0)] * len(keeps)
    from ckstore.background.optimizer_guard import versions_of as torch_versions_of

    return torch_versions_of(keeps)


def pin(slot: Slot, nbytes: int) -> None:
    """Pin the first bytes of a slot, so that CUDA devices copy to it at full speed. Without CUDA, do nothing."""
    if "torch" in sys.modules:
        from ckstore.background.cuda import pin as pin_slot

        pin_slot(slot, nbytes)


def order_after_now(storages: Sequence[HostStorage]) -> Callable[[], None]:
    """Return a function for another thread: what that launches on these devices then comes after this moment."""
    if (isinstance(storages, Spans) and storages.are_host) or not any(map(is_cuda, storages)):
        return noop
    from ckstore.background import cuda

    return cuda.order_after_now(device for device in set(map(cuda.device_of, storages)) if device is not None)


def is_cuda(storage: HostStorage) -> bool:
    """Whether a storage is on a CUDA device, whose copies are ordered by streams."""
    if storage.is_host or "torch" not in sys.modules:
        return False
    from ckstore.background.cuda import device_of

    return device_of(storage) is not None


class _ReadCopies:
    """Copies with the library's own read function, one piece after the other, on the thread that launches them.

    The library orders each read after that thread's earlier work. Another thread may use another stream.
    """

    def __init__(self, section: Section, storages: Sequence[HostStorage], slot: Slot) -> None:
        self._section = section
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        self._unit_count = 0
        self._thread = 0

    def fence(self) -> None:
        """Record the calling thread."""
        self._thread = threading.get_ident()

    def launch(self) -> None:
        """Copy everything.

        Raises:
            BackendError: This is another thread, which could read what the device has not computed yet.
        """
        if threading.get_ident() != self._thread:
            raise BackendError(
                "a device cannot be read from a thread that did not launch its earlier work",
                todo="report this, with the types of the state's tensors; until then, do not attach the optimizer",
            )
        for unit in range(self._section.unit_count):
            for index, offset, place, nbytes in self._section.rows_of(unit):
                assert nbytes <= UNIT_NBYTES
                kernels.copy_bytes(self._storages[index].read(offset, offset + nbytes), self._slot.view(place, nbytes))
            self._unit_count = unit + 1

    def hold(self) -> None:
        """Do nothing: ``launch`` has already copied everything."""

    def wait(self, mark: Callable[[int], None]) -> None:
        """Mark the copied units."""
        for unit in range(self._unit_count):
            mark(unit)

    def forget(self) -> None:
        """Release the storages."""
        self._storages = ()


class DeviceCopy:
    """The copying of one section whose storages are on devices. Thread-safe.

    Args:
        section: What to copy.
        slot: The destination.
        storages: The sources.
        on_over: Called once, on any thread, with the error if there is one.
        bell: An eventfd to ring after each unit; -1: none.
        find_change: Returns an error if a source was changed. Not called after the first guard, or after the end.
        error_at: Returns the error for a change at an offset. If given, checksums are taken of the sources, before
            training continues and in the guard, and of the copy.
    """

    def __init__(
        self,
        section: Section,
        slot: Slot,
        storages: Sequence[HostStorage],
        on_over: Callable[[BaseException | None], None],
        *,
        bell: int,
        find_change: Callable[[], BaseException | None],
        error_at: Callable[[StorageOffset], BaseException | None] | None = None,
    ) -> None:
        self._section = section
        self._slot = slot
        self._copies = copies_of(section, storages, slot)
        self._sums = None if error_at is None else Checksums(section, slot, storages)
        self._error_at = error_at
        self._marks = slot.marks[section.first_unit : section.first_unit + section.unit_count]
        self._on_over = on_over
        self._bell = bell
        self._find_change = find_change
        self._change: BaseException | None = None
        self._problem: BaseException | None = None
        self._is_begun = self._is_over = self._is_held = False
        self.is_launched = False
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        # Only one thread waits for the devices.
        self._finishing = threading.Lock()

    def begin(self) -> None:
        """Take memory, and order the copies after this thread's earlier work on the devices.

        Raises:
            CapacityError: There is no memory for it.
        """
        with self._finishing:
            if not self._is_over:
                self._slot.populate(self._section.begin, self._section.unit_count * UNIT_NBYTES)
                self._copies.fence()
                self._is_begun = True

    def launch(self) -> BaseException | None:
        """Launch the copies, unless that was done. Return the error that prevented the launch, if there was one."""
        with self._launching:
            if self._is_begun and not self.is_launched:
                self.is_launched = True
                try:
                    self._copies.launch()
                except BaseException as problem:
                    if isinstance(problem, Exception) and not isinstance(problem, CkstoreError):
                        log_safely(_log, logging.ERROR, "the copies from a device could not be launched", exc_info=True)
                    # The stored error must not keep frames, and with them the state and the arena, alive.
                    self._problem = strip_traceback(problem)
                    if not isinstance(problem, Exception):
                        raise
            return self._problem

    def hold(self) -> BaseException | None:
        """Make later work on the devices wait for the copies. Return an error if a source was changed before.

        After this guard, sources may change while the copies are in progress, which is correct because devices keep
        that order. But version counters change immediately. So they are checked here for the last time.
        """
        if self._is_over:
            return None
        if (problem := self.launch()) is not None:
            return problem
        self._copies.hold()
        # If Ctrl-C interrupts this, it interrupts the step too, and the next guard checks again.
        self._find_change_once(Exception, is_held=True)
        return self._change

    def _find_change_once(self, caught: type[BaseException], *, is_held: bool) -> None:
        with self._lock:
            if not self._is_held:
                self._change = self._change or result_or_error(self._find_change, caught)
                # Set last: if Ctrl-C comes in between, the check is repeated.
                self._is_held = is_held

    def note(self) -> None:
        """Take checksums of the sources if wanted, on this thread's current streams. Waits for those."""
        if self._sums is not None:
            self._sums.note()

    def changed_at(self) -> StorageOffset | None:
        """Return the offset of a change in a source, on this thread's current streams. None: no change.

        Called before a guard lets training continue. If there is no change, the sources are not read again.
        """
        if self._sums is None:
            return None
        found = self._sums.changed()
        if found is None:
            self._sums.forget()
        return found

    def forget(self) -> None:
        """Release the sources, because changes no longer matter."""
        if self._sums is not None:
            self._sums.forget()
        self._error_at = None

    def wait(self) -> None:
        """Wait until all bytes have arrived. Runs on a pool thread; never raises."""
        self._finish(None)

    def cancel(self, error: BaseException) -> None:
        """Give the copies up. Those that were launched are still waited for."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._finishing:
            if self._is_over:
                return
            with self._launching:
                # From now on a cancelled section cannot be launched.
                self._is_begun = self._is_begun and error is None
            try:
                error = error or self.launch()
                if self.is_launched:
                    self._copies.wait(self._mark)
            except BaseException as problem:
                error = error or strip_traceback(problem)
            self._copies.forget()
            if error is None and not self._marks.all():
                error = BackendError("a device has copied fewer bytes than requested", todo="report this: it is a bug")
            # If no guard came meanwhile, changes until now happened during the copy.
            self._find_change_once(BaseException, is_held=False)
            error = error or self._change or result_or_error(self._changed_copy)
            self._is_over = True
            self._problem = None
            on_over, self._on_over, self._find_change = self._on_over, noop, noop
            try:
                self._marks = np.zeros(0, np.uint8)
            finally:
                on_over(error)

    def _changed_copy(self) -> BaseException | None:
        """Return an error if the copy does not match the checksums."""
        if self._sums is None or self._error_at is None:
            return None
        place = self._sums.changed(reads_sources=False)
        return None if place is None else self._error_at(place)

    def _mark(self, unit: int) -> None:
        if self._sums is not None:
            self._sums.check_copy(unit)
        self._marks[unit] = 1
        if self._bell >= 0:
            # A closed or full eventfd is no reason to stop copying.
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)
