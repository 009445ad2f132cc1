"""Copies from CUDA devices into the arena: to pinned memory, on streams of their own.

Invariants:
- A copy waits for what its device was told before it, and a guard makes the device wait for the copy: the host waits
  for neither, but for what is copied before training goes on.
- A unit is marked when the device has said that its bytes have come.
- Of each mapping of a slot as much is pinned as a state takes, once, and anew where one takes more; it is let go before
  that is unmapped, or its pages are given back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckstore.errors import BackendError
from ckstore.tensor import HostStorage

if TYPE_CHECKING:
    from ckstore.saver.arena import Slot
    from ckstore.staging.runs import Run

_log = logging.getLogger("ckstore")

_PORTABLE = 1
_streams: dict[torch.device, torch.cuda.Stream] = {}


def device_of(storage: HostStorage) -> torch.device | None:
    """Return the CUDA device that a captured storage lies in; None where it lies elsewhere."""
    found = _held(storage)
    return found[0].device if found is not None and found[0].device.type == "cuda" else None


def pin(slot: Slot, nbytes: int) -> None:
    """Let devices copy to the first bytes of a slot without a detour, if there are any; a failure costs speed only.

    Pages that are pinned are in memory, so nothing is pinned of the room that a slot has to spare; but for a state that
    grows, whose slot would be pinned anew with each of its units.
    """
    memory = slot.memory
    if memory is None or nbytes <= slot.nbytes_told or not _has_devices():
        return
    if slot.nbytes_told:
        nbytes = min(slot.nbytes, nbytes + nbytes // 8)
    if not slot.let_devices_go():
        return
    device = _device_in_use()
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostRegister(slot.address, nbytes, _PORTABLE))
        if problem:
            _forget_error(device)
    if problem:
        # Not tried again for the same memory: it takes time in every commit, and says so each time.
        slot.release_devices, slot.nbytes_told = (lambda: True), slot.nbytes
        _log.warning("%d bytes of the arena cannot be pinned (CUDA error %d): copies are slower", nbytes, problem)
        return
    # Made after the one that unmaps, so it is called before; or earlier, and then no more.
    unpin = weakref.finalize(memory, _unpin, slot.address, device, os.getpid())
    unpin.atexit = False
    slot.tell_devices(nbytes, lambda: bool(unpin()))


def _unpin(address: int, device: int, owner: int) -> bool:
    """Return whether no device knows of the pages any more."""
    # A forked child has no device that could know of them, and may not ask.
    if os.getpid() != owner:
        return True
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostUnregister(address))
        if problem:
            _forget_error(device)
    return not problem


def _forget_error(device: int) -> None:
    """Have torch take note of the runtime's last error here: else it is raised at the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=f"cuda:{device}").add_(1)


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
        runs: What to copy, in the order in which devices are told of it.
        storages: Where from.
        slot: Where to.
    """

    def __init__(self, runs: Sequence[Run], storages: Sequence[HostStorage], slot: Slot) -> None:
        self._runs = runs
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        self._devices = {run.storage: _memory_of(storages[run.storage]).device for run in runs}
        self._fences: dict[torch.device, torch.cuda.Event] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
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
        end = max(run.place + run.nbytes for run in self._runs)
        target = torch.from_numpy(np.frombuffer(self._slot.view(0, end), np.uint8))
        try:
            for device, runs in itertools.groupby(self._runs, lambda run: self._devices[run.storage]):
                # First the device: whoever leaves a stream goes back to the one before, and a thread's own device is
                # the first one, which this process may not use; a stream of it would take some hundred MB there.
                with torch.no_grad(), torch.cuda.device(device):
                    if device not in self._streams:
                        self._streams[device] = _stream_of(device)
                        self._streams[device].wait_event(self._fences[device])
                    with torch.cuda.stream(self._streams[device]):
                        self._launch_some(runs, target, device)
        except RuntimeError as error:
            raise _failed(error) from None
        self._is_launched = True

    def _launch_some(self, runs: Iterable[Run], target: torch.Tensor, device: torch.device) -> None:
        units: list[range] = []
        for run, is_told in _with_ends(runs):
            source = _bytes_of(self._storages[run.storage], run)
            target.narrow(0, run.place, run.nbytes).copy_(source, non_blocking=True)
            units.append(run.units)
            if is_told:
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._streams[device])
                self._events.append((device, event, units))
                self._last[device] = event
                units = []

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
            for stream in () if self._is_launched else self._streams.values():
                # It may have been interrupted between a copy and its event.
                stream.synchronize()
            for device, event, units in self._events:
                # A thread's own device is the first one, which this process may not use.
                with torch.cuda.device(device):
                    event.synchronize()
                for unit in itertools.chain.from_iterable(units):
                    mark(unit)
        except RuntimeError as error:
            raise _failed(error) from None

    def forget(self) -> None:
        """Let go of the storages, and of what was waited for."""
        self._storages = ()
        self._events, self._fences = [], {}


def _failed(error: RuntimeError) -> BackendError:
    return BackendError(f"copying from a CUDA device failed: {error}", todo="see what the device says")


def _with_ends(runs: Iterable[Run]) -> Iterator[tuple[Run, bool]]:
    """Yield runs of one device, each with whether its end is to be told: it completes units, or is the last.

    Small tensors are many, and telling takes the trainer's time, and wakes a thread of its process.
    """
    last: Run | None = None
    for run in runs:
        if last is not None:
            yield last, bool(last.units)
        last = run
    if last is not None:
        yield last, True


Held = tuple[torch.Tensor, torch.UntypedStorage]


def _held(storage: HostStorage) -> Held | None:
    """Return the tensor and the storage of torch that a captured storage lies in."""
    keep = getattr(storage, "keep", None)
    first = keep[0] if isinstance(keep, list) and keep else None
    if isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], torch.Tensor):
        return first
    return None


def _memory_of(storage: HostStorage) -> torch.UntypedStorage:
    held = _held(storage)
    assert held is not None, "only what lies in a device is copied from one"
    return held[1]


def _bytes_of(storage: HostStorage, run: Run) -> torch.Tensor:
    memory = _memory_of(storage)
    offset = int(getattr(storage, "start", 0)) - memory.data_ptr() + run.offset
    if not 0 <= offset <= offset + run.nbytes <= memory.nbytes():
        # Where less is there, ``set_`` would make it more.
        raise BackendError(
            "a storage was resized before it was copied", todo="resize what is committed after its guard, not before"
        )
    view = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return view.set_(memory, offset, (run.nbytes,), (1,))


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        # Another thread may be at this line too.
        _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return _streams[device]
