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
from ckstore.background.copying import Checksums, Place, result_or_error, strip_traceback
from ckstore.codec import kernels
from ckstore.concurrency import log_safely, noop
from ckstore.errors import BackendError, CkstoreError
from ckstore.format.logical import itemsize_of
from ckstore.format.tensors import TensorSpec, byte_strides_of, extent_of
from ckstore.state.capture import Captured
from ckstore.state.memory import Spans
from ckstore.state.tensors import HostStorage

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
    addresses = [getattr(storage, "start", None) for storage in storages]
    if None in addresses:
        addresses = [_start_of(storage) for storage in storages]
    return np.array(addresses, np.uint64)


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
        memory = _GuardedMemory(guarded)
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


class _GuardedMemory:
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
        from ckstore.background.cuda import CudaCopies

        return CudaCopies(section, storages, slot)
    return _ReadCopies(section, storages, slot)


def versions_of(keeps: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return two numbers for each storage that differ when its library has seen it changed, or moved it.

    Args:
        keeps: What keeps the leaves of each alive.
    """
    if not keeps or "torch" not in sys.modules:
        return [(0, 0)] * len(keeps)
    from ckstore.background.optimizer_guard import versions_of as torch_versions_of

    return torch_versions_of(keeps)


def pin(slot: Slot, nbytes: int) -> None:
    """Let CUDA devices copy to the first bytes of a slot at full speed, where there are any."""
    if "torch" in sys.modules:
        from ckstore.background.cuda import pin as pin_slot

        pin_slot(slot, nbytes)


def is_cuda(storage: HostStorage) -> bool:
    """Whether a storage lies in a CUDA device, which copies it in the order of its streams."""
    if storage.is_host or "torch" not in sys.modules:
        return False
    from ckstore.background.cuda import device_of

    return device_of(storage) is not None


class _ReadCopies:
    """Copies through the library's own way to the host, piece by piece, on the thread that launches them.

    The library orders them with what that thread has addresses the device; another thread may be on another stream.
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
                "a device cannot be read from a thread that did not launch its earlier work",
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


_log = logging.getLogger("ckstore")


class DeviceCopy:
    """One section of a device's storages.

    Args:
        section: What to copy.
        slot: Where to.
        storages: Where from.
        on_over: Called once, on any thread, with what went wrong, if anything did.
        bell: An eventfd to ring after each unit; -1: none.
        find_change: Returns what is wrong with it: called until the first guard has let training pass, or all has come.
        error_at: Returns the error that names what lies at a place. Where it is given, checksums are taken of the
            sources, before training goes on and when it is let pass, and of what has come.
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
        error_at: Callable[[Place], BaseException | None] | None = None,
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
        # Devices are waited for by one thread at a time.
        self._finishing = threading.Lock()

    def begin(self) -> None:
        """Take note of what the device was addresses before, by this thread; what it is addresses later comes after.

        Raises:
            CapacityError: There is no memory for it.
        """
        with self._finishing:
            if not self._is_over:
                self._slot.populate(self._section.begin, self._section.unit_count * UNIT_NBYTES)
                self._copies.fence()
                self._is_begun = True

    def launch(self) -> BaseException | None:
        """Tell the device to send, if nobody has; return what kept whoever did from it."""
        with self._launching:
            if self._is_begun and not self.is_launched:
                self.is_launched = True
                try:
                    self._copies.launch()
                except BaseException as problem:
                    if isinstance(problem, Exception) and not isinstance(problem, CkstoreError):
                        log_safely(_log, logging.ERROR, "the copies from a device could not be launched", exc_info=True)
                    # Whoever is addresses may keep it, and with its frames the state and the arena.
                    self._problem = strip_traceback(problem)
                    if not isinstance(problem, Exception):
                        raise
            return self._problem

    def hold(self) -> BaseException | None:
        """Let what is launched later wait for the copies; return what was changed before, if anything was.

        What a guard has let pass changes from then on, in the order of the device, while the copies are on their way,
        and counts as a change at once: so it is result_or_error at here for the last time.
        """
        if self._is_over:
            return None
        if (problem := self.launch()) is not None:
            return problem
        self._copies.hold()
        # Ctrl-C interrupts the step, whose next guard looks again.
        self._find_change_once(Exception, is_held=True)
        return self._change

    def _find_change_once(self, caught: type[BaseException], *, is_held: bool) -> None:
        with self._lock:
            if not self._is_held:
                self._change = self._change or result_or_error(self._find_change, caught)
                # Not before: Ctrl-C in between must not leave a change unseen.
                self._is_held = is_held

    def note(self) -> None:
        """Note what is to be sent as this thread's streams have it, if that is to be checked; waits for them."""
        if self._sums is not None:
            self._sums.note()

    def changed_at(self) -> Place | None:
        """Return where a source is not what was noted any more, as this thread's streams have it; None: nowhere.

        Before a guard lets training pass: afterwards the sources are not result_or_error at again.
        """
        if self._sums is None:
            return None
        found = self._sums.changed()
        if found is None:
            self._sums.forget()
        return found

    def forget(self) -> None:
        """Let go of the sources: nobody asks any more whether they were changed."""
        if self._sums is not None:
            self._sums.forget()
        self._error_at = None

    def wait(self) -> None:
        """Wait until all has come, on a thread of the pool; never raises."""
        self._finish(None)

    def cancel(self, error: BaseException) -> None:
        """Give it up; what a device has been addresses to send comes all the same, and is waited for."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._finishing:
            if self._is_over:
                return
            with self._launching:
                # What is given up is not begun any more.
                self._is_begun = self._is_begun and error is None
            try:
                error = error or self.launch()
                if self.is_launched:
                    self._copies.wait(self._mark)
            except BaseException as problem:
                error = error or strip_traceback(problem)
            self._copies.forget()
            if error is None and not self._marks.all():
                error = BackendError("a device has sent less than it was asked for", todo="report this: it is a bug")
            # No guard may have come meanwhile: what was changed until now was changed while it was copied.
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
        """Return an error if what has come is not what was noted."""
        if self._sums is None or self._error_at is None:
            return None
        place = self._sums.changed(reads_sources=False)
        return None if place is None else self._error_at(place)

    def _mark(self, unit: int) -> None:
        if self._sums is not None:
            self._sums.check_copy(unit)
        self._marks[unit] = 1
        if self._bell >= 0:
            # A bell that cannot be heard any more, or has rung often enough, is no reason to stop.
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)
