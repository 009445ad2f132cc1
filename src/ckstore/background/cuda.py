"""Copies from CUDA devices into the arena: to pinned memory, on streams of their own.

Invariants:
- A copy waits for what its device was told before it, and a guard makes the device wait for the copy: the host waits
  for neither, but for what is copied before training goes on.
- A unit is marked when the device has said that its bytes have come.
- Of each mapping of a slot as much is pinned as a state takes, once, and anew where one takes more; it is let go before
  that is unmapped, or its pages are given back.

The one function of CUDA's runtime that is called without torch.

A state has hundreds of tensors, and telling torch of a copy takes tens of microseconds of the interpreter for each, in
which a trainer that runs Python waits (``stall_gpu_guarded``). The runtime is told of many in one call, which the
interpreter is not needed for.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
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
    """Begins copies from one device to the host.

    Args:
        function: The address of ``cudaMemcpyAsync``.
        device: Where from.
        stream: A stream of that device, as the runtime knows it.
    """

    def __init__(self, function: int, device: torch.device, stream: int) -> None:
        self._function = function
        self._device = device
        self._stream = stream

    def launch(self, table: NDArray[np.uint64]) -> None:
        """Begin the copies of some rows: source address, destination address, length.

        Raises:
            RuntimeError: The runtime has refused one; those after it were not begun.
        """
        problem = kernels.launch_copies(self._function, table.data, _DEVICE_TO_HOST, self._stream)
        if problem:
            forget_error(self._device)
            raise RuntimeError(f"cudaMemcpyAsync has refused a copy: {_text_of(problem)}")


def launcher_for(device: torch.device, stream: torch.cuda.Stream) -> Launcher | None:
    """Return what begins copies on a stream; None where only torch can.

    It has copied a pattern, in two parts, before it is returned: whatever is not as it should be costs time, not bytes.
    The device must be the current one, and the stream its current stream; it is waited for.
    """
    function = address_of_copy()
    if function is None:
        return None
    found = Launcher(function, device, stream.cuda_stream)
    try:
        problem = None if _copies_correctly(found, device, stream) else "it has copied other bytes than torch"
    except RuntimeError as error:
        problem = str(error)
    if problem is None:
        return found
    log_safely(_log, logging.WARNING, "copies from %s are told of one by one: %s", device, problem)
    return None


def address_of_copy() -> int | None:
    """Return where ``cudaMemcpyAsync`` lies in the runtime that torch uses; None where there is none to be seen."""
    if torch.version.cuda is None:
        # A runtime of another maker, or none.
        return None
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        # What a library was linked with is searched too: another runtime of this process may be another version.
        function = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def forget_error(device: torch.device) -> None:
    """Have torch take note of the runtime's last error here: else it is raised at the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _text_of(problem: int) -> str:
    """Return what the runtime says of one of its errors."""
    with contextlib.suppress(Exception):
        return str(torch.cuda.CudaError(problem))
    return f"CUDA error {problem}"


def _copies_correctly(launcher: Launcher, device: torch.device, stream: torch.cuda.Stream) -> bool:
    """Whether bytes arrive as they lie there."""
    half = _PATTERN_NBYTES // 2
    there = torch.arange(_PATTERN_NBYTES, dtype=torch.uint8, device=device)
    here, begin = np.zeros(_PATTERN_NBYTES, np.uint8), there.data_ptr()
    to = here.ctypes.data
    try:
        launcher.launch(np.array([[begin + half, to, half], [begin, to + half, half]], np.uint64))
    finally:
        # What was begun may still arrive when another one was refused, or Ctrl-C has come.
        stream.synchronize()
    return bool((here == np.roll(np.arange(_PATTERN_NBYTES), half)).all())


_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class _CopyStream:
    """A stream for copies, and what begins them there; None: torch does."""

    stream: torch.cuda.Stream
    launcher: Launcher | None


copy_streams: dict[torch.device, _CopyStream] = {}
"""Made once for each device."""


def device_of(storage: HostStorage) -> torch.device | None:
    """Return the CUDA device that a captured storage lies in; None where it lies elsewhere."""
    found = _torch_memory_of(storage)
    return found[0].device if found is not None and found[0].device.type == "cuda" else None


def pin(slot: Slot, nbytes: int) -> None:
    """Let devices copy to the first bytes of a slot without a detour, if there are any; a failure costs speed only.

    Pages that are pinned are in memory, so nothing is pinned of the room that a slot has to spare; but for a state that
    grows, whose slot would be pinned anew with each of its units.
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
        # Not tried again for the same memory: it takes time in every commit, and says so each time.
        slot.unpin_pages, slot.nbytes_pinned = (lambda: True), slot.nbytes
        _log.warning("%d bytes of the arena cannot be pinned (CUDA error %d): copies are slower", nbytes, problem)
        return
    # Made after the one that unmaps, so it is called before; or earlier, and then no more.
    unpin = weakref.finalize(memory, _unpin, slot.address, device, os.getpid())
    unpin.atexit = False
    slot.note_pinned(nbytes, lambda: bool(unpin()))


def _unpin(address: int, device: int, owner: int) -> bool:
    """Return whether no device knows of the pages any more."""
    # A forked child has no device that could know of them, and may not ask.
    if os.getpid() != owner:
        return True
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostUnregister(address))
        if problem:
            forget_error(torch.device("cuda", device))
    return not problem


def _device_in_use() -> int:
    """Return the current device if this process uses it, else one that it uses.

    A call of the runtime takes some hundred MB of the memory of a device that was not used before.
    """
    current = torch.cuda.current_device()
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if is_used is None or is_used(current):
        return current
    return next((device for device in range(torch.cuda.device_count()) if is_used(device)), current)


def _has_devices() -> bool:
    # Whoever uses a device has initialized it; merely asking must not take memory of one.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaCopies:
    """Copies of one section.

    Args:
        section: What to copy, in the order of its runs.
        storages: Where from.
        slot: Where to.
    """

    def __init__(self, section: Section, storages: Sequence[HostStorage], slot: Slot) -> None:
        self._runs, self._columns = section.runs, section.run_columns
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        # What lies in a device is kept by one of its tensors and that one's storage. A trainer waits for this.
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
        """Have the copies come after what the devices' current streams, of this thread, have been told so far."""
        pin(self._slot, self._slot.nbytes_begun)
        for device in set(self._devices.values()):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._fences[device] = event

    def launch(self) -> None:
        """Begin; on any thread.

        Raises:
            BackendError: A device has failed, or a storage is not what it was.
        """
        table = self._table()
        try:
            for device, first, end in self._runs_by_device():
                # First the device: whoever leaves a stream goes back to the one before, and a thread's own device is
                # the first one, which this process may not use; a stream of it would take some hundred MB there.
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
            BackendError: A storage is not what it was.
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
        """Yield runs that follow each other and lie in one device: that, and which they are."""
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
        """Begin some copies on the current stream."""
        if launcher is not None:
            launcher.launch(table)
            return
        begin, end = min(run.place for run in runs), max(run.place + run.nbytes for run in runs)
        target = torch.from_numpy(np.frombuffer(self._slot.view(begin, end - begin), np.uint8))
        for run, (source, _, nbytes) in zip(runs, table.tolist(), strict=True):
            memory = self._memories[run.storage]
            if source + nbytes > memory.data_ptr() + memory.nbytes():
                # ``set_`` would make it longer.
                raise resized_error()
            view = torch.empty(0, dtype=torch.uint8, device=memory.device)
            view.set_(memory, source - memory.data_ptr(), (nbytes,), (1,))
            target.narrow(0, run.place - begin, nbytes).copy_(view, non_blocking=True)

    def hold(self) -> None:
        """Let the devices' current streams wait for the copies."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, mark: Callable[[int], None]) -> None:
        """Wait for all bytes, marking each unit when it is complete.

        Raises:
            BackendError: A device has failed.
        """
        try:
            for stream_pair in () if self._is_launched else self._streams.values():
                # It may have been interrupted between a copy and its event.
                stream_pair.stream.synchronize()
            for device, event, units in self._events:
                # A thread's own device is the first one, which this process may not use.
                with torch.cuda.device(device):
                    event.synchronize()
                for unit in itertools.chain.from_iterable(units):
                    mark(unit)
        except RuntimeError as error:
            raise device_error(error) from None

    def forget(self) -> None:
        """Let go of the storages, and of what was waited for."""
        self._storages, self._memories = (), {}
        self._events, self._fences = [], {}


def needs_event(runs: Sequence[Run]) -> Iterator[bool]:
    """Yield of each run of one device whether its end is to be told: it completes units, or is the last.

    Small tensors are many, and telling takes the trainer's time, and wakes a thread of its process.
    """
    for run in runs[:-1]:
        yield bool(run.units)
    if runs:
        yield True


TorchMemory = tuple[torch.Tensor, torch.UntypedStorage]


def _torch_memory_of(storage: HostStorage) -> TorchMemory | None:
    """Return the tensor and the storage of torch that a captured storage lies in."""
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
        # Another thread may be at this line too.
        copy_streams.setdefault(device, stream_pair)
    return copy_streams[device]
