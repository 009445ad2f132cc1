"""Copies from CUDA devices into the arena, to pinned memory and on streams of their own.

torch spends tens of microseconds of interpreter time on each copy, and a state has hundreds of tensors. So many copies
are launched by one call of ``kernels.launch_copies``, which calls ``cudaMemcpyAsync`` without holding the interpreter.

Invariants:
- A copy waits for the earlier work of its device, and a guard makes later work of the device wait for the copy. The
  host only waits for copies that must end before training continues.
- A unit is marked after the device has reported that its bytes arrived.
- Each mapping of a slot is pinned once, for the length of its state, and again if a longer state comes. It is unpinned
  before it is unmapped or its memory is returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.concurrency import log_safely
from ckstore.state.memory import keeps_of
from ckstore.state.tensors import HostStorage
from ckstore.state.torch_adapter import device_error, resized_error

if TYPE_CHECKING:
    from ckstore.background.arena import Slot
    from ckstore.background.arena_layout import Run, Section


_log = logging.getLogger("ckstore")

_DEVICE_TO_HOST = 2
"""``cudaMemcpyDeviceToHost``."""

_PATTERN_NBYTES = 256


class Launcher:
    """Launches copies from one device to the host.

    Args:
        function: The address of ``cudaMemcpyAsync``.
        device: The source.
        stream: The handle of a CUDA stream of that device.
    """

    def __init__(self, function: int, device: torch.device, stream: int) -> None:
        self._function = function
        self._device = device
        self._stream = stream

    def launch(self, table: NDArray[np.uint64]) -> None:
        """Launch the copies of a table: source address, destination address, length.

        Raises:
            RuntimeError: CUDA refused a copy. Those after it were not launched.
        """
        problem = kernels.launch_copies(self._function, table.data, _DEVICE_TO_HOST, self._stream)
        if problem:
            forget_error(self._device)
            raise RuntimeError(f"cudaMemcpyAsync refused a copy: {_text_of(problem)}")


def launcher_for(device: torch.device, stream: torch.cuda.Stream) -> Launcher | None:
    """Return a launcher for a stream, or None if only torch can copy.

    The launcher has copied a test pattern correctly, so an unexpected CUDA runtime costs speed and not bytes. The
    device must be current, and the stream its current stream. It is synchronized.
    """
    function = address_of_copy()
    if function is None:
        return None
    found = Launcher(function, device, stream.cuda_stream)
    try:
        problem = None if _copies_correctly(found, device, stream) else "a test copy arrived with other bytes"
    except RuntimeError as error:
        problem = str(error)
    if problem is None:
        return found
    log_safely(_log, logging.WARNING, "copies from %s are launched one by one, which is slower: %s", device, problem)
    return None


def address_of_copy() -> int | None:
    """Return the address of ``cudaMemcpyAsync`` in the CUDA runtime of torch, or None if it cannot be found."""
    if torch.version.cuda is None:
        # Built for another vendor, or for the CPU.
        return None
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        # The search includes the libraries that this one is linked with. Another runtime in this process may differ.
        function = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def forget_error(device: torch.device) -> None:
    """Make torch consume the runtime's last error. Else it would be raised at the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _text_of(problem: int) -> str:
    """Return the text of a CUDA error."""
    with contextlib.suppress(Exception):
        return str(torch.cuda.CudaError(problem))
    return f"CUDA error {problem}"


def _copies_correctly(launcher: Launcher, device: torch.device, stream: torch.cuda.Stream) -> bool:
    """Whether a launcher copies a test pattern, in two parts, correctly."""
    half = _PATTERN_NBYTES // 2
    there = torch.arange(_PATTERN_NBYTES, dtype=torch.uint8, device=device)
    here, begin = np.zeros(_PATTERN_NBYTES, np.uint8), there.data_ptr()
    to = here.ctypes.data
    try:
        launcher.launch(np.array([[begin + half, to, half], [begin, to + half, half]], np.uint64))
    finally:
        # Launched copies may still arrive after an error or Ctrl-C.
        stream.synchronize()
    return bool((here == np.roll(np.arange(_PATTERN_NBYTES), half)).all())


_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class _CopyStream:
    """A stream for copies, and its launcher. None: torch launches."""

    stream: torch.cuda.Stream
    launcher: Launcher | None


copy_streams: dict[torch.device, _CopyStream] = {}
"""One for each device, created when needed."""


def device_of(storage: HostStorage) -> torch.device | None:
    """Return the CUDA device of a captured storage, or None."""
    found = _torch_memory_of(storage)
    return found[0].device if found is not None and found[0].device.type == "cuda" else None


def pin(slot: Slot, nbytes: int) -> None:
    """Pin the first bytes of a slot, so that devices copy to it directly. A failure only costs speed.

    Pinning puts pages into memory, so only the length of the state is pinned. If the state grows, an eighth more is
    pinned, so that not every growth pins the slot again.
    """
    memory = slot.memory
    if memory is None or nbytes <= slot.nbytes_pinned or not _has_devices():
        return
    if slot.nbytes_pinned:
        nbytes = min(slot.nbytes, nbytes + nbytes // 8)
    if not slot.unpin():
        return
    device = _device_in_use()
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostRegister(slot.address, nbytes, _PORTABLE))
        if problem:
            forget_error(torch.device("cuda", device))
    if problem:
        # Not tried again for this mapping: each attempt costs time and logs a warning.
        slot.unpin_pages, slot.nbytes_pinned = (lambda: True), slot.nbytes
        _log.warning("%d bytes of the arena cannot be pinned (CUDA error %d): copies are slower", nbytes, problem)
        return
    # Finalizers run in reverse order, so this one runs before the one that unmaps.
    unpin = weakref.finalize(memory, _unpin, slot.address, device, os.getpid())
    unpin.atexit = False
    slot.note_pinned(nbytes, lambda: bool(unpin()))


def _unpin(address: int, device: int, owner: int) -> bool:
    """Unregister pages at the devices. Return whether that succeeded."""
    # A forked child has no CUDA context and may not call CUDA.
    if os.getpid() != owner:
        return True
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostUnregister(address))
        if problem:
            forget_error(torch.device("cuda", device))
    return not problem


def _device_in_use() -> int:
    """Return the current device if this process uses it, else one that it uses.

    A CUDA call on an unused device would take hundreds of MB of its memory.
    """
    current = torch.cuda.current_device()
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if is_used is None or is_used(current):
        return current
    return next((device for device in range(torch.cuda.device_count()) if is_used(device)), current)


def _has_devices() -> bool:
    # Check only: initializing CUDA would take memory on a device.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _fences_on(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Return an event for each device, after the work that this thread has launched on its current stream."""
    fences = {}
    for device in devices:
        fences[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fences[device].record(torch.cuda.current_stream(device))
    return fences


def order_after_now(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function for another thread: what that launches then waits for what this thread has launched so far."""
    fences = _fences_on(devices)

    def hold() -> None:
        for device, event in fences.items():
            torch.cuda.current_stream(device).wait_event(event)

    return hold


class CudaCopies:
    """The copies of one section from CUDA devices.

    Args:
        section: What to copy, in the order of its runs.
        storages: The sources.
        slot: The destination.
    """

    def __init__(self, section: Section, storages: Sequence[HostStorage], slot: Slot) -> None:
        self._runs, self._columns = section.runs, section.run_columns
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        # A storage is kept alive by a tensor and its torch storage. Written for speed: the trainer waits for this.
        keeps: Sequence[Any] = keeps_of(storages, section.storages)
        self._memories: dict[int, torch.UntypedStorage] = {
            index: keep[0][1] for index, keep in zip(section.storages, keeps, strict=True)
        }
        self._devices = {index: memory.device for index, memory in self._memories.items()}
        self._fences: dict[torch.device, torch.cuda.Event] = {}
        self._streams: dict[torch.device, _CopyStream] = {}
        self._events: list[tuple[torch.device, torch.cuda.Event, list[range]]] = []
        self._last: dict[torch.device, torch.cuda.Event] = {}
        self._is_launched = False

    def fence(self) -> None:
        """Order the copies after the work that this thread has launched on the devices' current streams."""
        pin(self._slot, self._slot.nbytes_begun)
        self._fences |= _fences_on(set(self._devices.values()))

    def launch(self) -> None:
        """Launch the copies. On any thread.

        Raises:
            BackendError: A device failed, or a storage was resized.
        """
        table = self._table()
        try:
            for device, first, end in self._runs_by_device():
                # Enter the device before the stream. Leaving a stream restores the previous one, by default that of
                # device 0. If this process does not use device 0, that would take hundreds of MB of its memory.
                with torch.no_grad(), torch.cuda.device(device):
                    if device not in self._streams:
                        self._streams[device] = _copy_stream_for(device)
                        self._streams[device].stream.wait_event(self._fences[device])
                    with torch.cuda.stream(self._streams[device].stream):
                        self._launch_some(self._runs[first:end], table[first:end], device)
        except RuntimeError as error:
            raise device_error(error) from None
        self._is_launched = True

    def _table(self) -> NDArray[np.uint64]:
        """Return source, destination and length of each run, as ``kernels.launch_copies`` takes them.

        Raises:
            BackendError: A storage was resized.
        """
        indices = list(self._memories)
        starts, begins, ends = np.zeros((3, len(self._storages)), np.int64)
        starts[indices] = [int(getattr(self._storages[index], "start", 0)) for index in indices]
        begins[indices] = [memory.data_ptr() for memory in self._memories.values()]
        ends[indices] = [memory.nbytes() for memory in self._memories.values()]
        ends += begins
        which, offsets, places, lengths = self._columns
        sources = starts[which] + offsets
        if (sources < begins[which]).any() or (sources + lengths > ends[which]).any():
            raise resized_error()
        return np.stack([sources, places + self._slot.address, lengths], axis=1).astype(np.uint64)

    def _runs_by_device(self) -> Iterator[tuple[torch.device, int, int]]:
        """Yield each device with the range of its runs, for consecutive runs on one device."""
        if len(set(self._devices.values())) == 1:
            yield next(iter(self._devices.values())), 0, len(self._runs)
            return
        first = 0
        for device, runs in itertools.groupby(self._runs, lambda run: self._devices[run.storage]):
            end = first + len(list(runs))
            yield device, first, end
            first = end

    def _launch_some(self, runs: Sequence[Run], table: NDArray[np.uint64], device: torch.device) -> None:
        stream_pair, units, first = self._streams[device], list[range](), 0
        for number, has_event in enumerate(needs_event(runs)):
            units.append(runs[number].units)
            if has_event:
                self._begin(runs[first : number + 1], table[first : number + 1], stream_pair.launcher)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream_pair.stream)
                self._events.append((device, event, units))
                self._last[device] = event
                units, first = [], number + 1

    def _begin(self, runs: Sequence[Run], table: NDArray[np.uint64], launcher: Launcher | None) -> None:
        """Launch copies on the current stream."""
        if launcher is not None:
            launcher.launch(table)
            return
        begin, end = min(run.place for run in runs), max(run.place + run.nbytes for run in runs)
        target = torch.from_numpy(np.frombuffer(self._slot.view(begin, end - begin), np.uint8))
        for run, (source, _, nbytes) in zip(runs, table.tolist(), strict=True):
            memory = self._memories[run.storage]
            if source + nbytes > memory.data_ptr() + memory.nbytes():
                # ``set_`` would enlarge the storage.
                raise resized_error()
            view = torch.empty(0, dtype=torch.uint8, device=memory.device)
            view.set_(memory, source - memory.data_ptr(), (nbytes,), (1,))
            target.narrow(0, run.place - begin, nbytes).copy_(view, non_blocking=True)

    def hold(self) -> None:
        """Make later work on the devices' current streams wait for the copies."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, mark: Callable[[int], None]) -> None:
        """Wait for all bytes, and mark each unit when it is complete.

        Raises:
            BackendError: A device failed.
        """
        try:
            for stream_pair in () if self._is_launched else self._streams.values():
                # The launch may have been interrupted between a copy and its event.
                stream_pair.stream.synchronize()
            for device, event, units in self._events:
                # The default is device 0, which this process may not use.
                with torch.cuda.device(device):
                    event.synchronize()
                for unit in itertools.chain.from_iterable(units):
                    mark(unit)
        except RuntimeError as error:
            raise device_error(error) from None

    def forget(self) -> None:
        """Release the storages and the events."""
        self._storages, self._memories = (), {}
        self._events, self._fences = [], {}


def needs_event(runs: Sequence[Run]) -> Iterator[bool]:
    """Yield for each run of one device whether its end needs an event: it completes units, or it is the last.

    Small tensors get none, since there are many, and each event takes the trainer's time and wakes a thread.
    """
    for run in runs[:-1]:
        yield bool(run.units)
    if runs:
        yield True


TorchMemory = tuple[torch.Tensor, torch.UntypedStorage]


def _torch_memory_of(storage: HostStorage) -> TorchMemory | None:
    """Return the torch tensor and the torch storage that contain a captured storage."""
    keep = getattr(storage, "keep", None)
    first = keep[0] if isinstance(keep, (list, tuple)) and keep else None
    if isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], torch.Tensor):
        return first
    return None


def _copy_stream_for(device: torch.device) -> _CopyStream:
    if device not in copy_streams:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream_pair = _CopyStream(stream, launcher_for(device, stream))
        # Another thread may have created one meanwhile.
        copy_streams.setdefault(device, stream_pair)
    return copy_streams[device]
