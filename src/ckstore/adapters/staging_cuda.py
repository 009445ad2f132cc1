"""Copies from CUDA devices into the arena: to pinned memory, on streams of their own.

Invariants:
- A copy waits for what its device was told before it, and a guard makes the device wait for the copy: the host waits
  for neither, but for what is copied before training goes on.
- A unit is marked when the device has said that its bytes have come.
- Memory is pinned once for each mapping of a slot, and let go before that is unmapped, or its pages are given back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckstore.config import MIB
from ckstore.errors import BackendError
from ckstore.tensor import HostStorage

if TYPE_CHECKING:
    from ckstore.saver.arena import Slot
    from ckstore.staging.stowage import Section

_log = logging.getLogger("ckstore")

RUN_NBYTES_MAX = 64 * MIB
"""Bytes of one copy: launching one takes some microseconds, and its end is when its units are marked."""

_PORTABLE = 1
_streams: dict[torch.device, torch.cuda.Stream] = {}


def device_of(storage: HostStorage) -> torch.device | None:
    """Return the CUDA device that a captured storage lies in; None where it lies elsewhere."""
    found = _held(storage)
    return found[0].device if found is not None and found[0].device.type == "cuda" else None


def pin(slot: Slot) -> None:
    """Let devices copy to a slot without a detour, if there are any; a failure costs speed and no more."""
    memory = slot.memory
    if memory is None or slot.release_devices is not None or not _has_devices():
        return
    device = _device_in_use()
    with torch.cuda.device(device):
        problem = int(_cudart().cudaHostRegister(slot.address, slot.nbytes, _PORTABLE))
        if problem:
            _forget_error(device)
    if problem:
        # Not tried again for the same memory: it takes time in every commit, and says so each time.
        slot.release_devices = lambda: True
        _log.warning("%d bytes of the arena cannot be pinned (CUDA error %d): copies are slower", slot.nbytes, problem)
        return
    # Made after the one that unmaps, so it is called before; or earlier, and then no more.
    unpin = weakref.finalize(memory, _unpin, slot.address, device, os.getpid())
    unpin.atexit = False
    slot.release_devices = lambda: bool(unpin())


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


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of one storage that go to one place in the slot; with them, units up to ``units_end`` are complete."""

    storage: int
    offset: int
    place: int
    nbytes: int
    units_end: int


class CudaCopies:
    """Copies of one section."""

    def __init__(self, section: Section, storages: Sequence[HostStorage], slot: Slot) -> None:
        self._section = section
        self._storages: Sequence[HostStorage] = storages
        self._slot = slot
        self._events: list[tuple[torch.device, torch.cuda.Event, int]] = []
        self._last: dict[torch.device, torch.cuda.Event] = {}
        self._devices: set[torch.device] = set()
        self._is_launched = False

    def launch(self) -> None:
        """Begin, once what the devices' current streams were told is done."""
        pin(self._slot)
        with torch.no_grad():
            for device, runs in itertools.groupby(_runs_of(self._section), self._device_of):
                stream = _stream_of(device)
                if device not in self._devices:
                    stream.wait_stream(torch.cuda.current_stream(device))
                    self._devices.add(device)
                with torch.cuda.stream(stream):
                    for run, is_told in _with_ends(runs):
                        self._launch_one(run)
                        if is_told:
                            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                            event.record(stream)
                            self._events.append((device, event, run.units_end))
                            self._last[device] = event
        self._is_launched = True

    def _device_of(self, run: _Run) -> torch.device:
        held = _held(self._storages[run.storage])
        assert held is not None, "only what lies in a device is copied from one"
        return held[0].device

    def _launch_one(self, run: _Run) -> None:
        storage = self._storages[run.storage]
        held = _held(storage)
        assert held is not None, "only what lies in a device is copied from one"
        target = torch.from_numpy(np.frombuffer(self._slot.view(run.place, run.nbytes), np.uint8))
        target.copy_(_bytes_of(storage, held, run), non_blocking=True)

    def hold(self) -> None:
        """Let the devices' current streams wait for the copies."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, mark: Callable[[int], None]) -> None:
        """Wait for all bytes, marking each unit when it is complete.

        Raises:
            BackendError: A device has failed.
        """
        done = 0
        try:
            for device in () if self._is_launched else self._devices:
                # Ctrl-C may have come between a copy and its event.
                _stream_of(device).synchronize()
            for device, event, units_end in self._events:
                # A thread's own device is the first one, which this process may not use.
                with torch.cuda.device(device):
                    event.synchronize()
                for unit in range(done, units_end):
                    mark(unit)
                done = max(done, units_end)
        except RuntimeError as error:
            raise BackendError(f"copying from a CUDA device failed: {error}", todo="see what the device says") from None
        finally:
            self._storages = ()
        for unit in range(done, self._section.unit_count if self._is_launched else 0):
            mark(unit)


def _runs_of(section: Section) -> Iterator[_Run]:
    """Join the rows that follow each other in a storage."""
    run: _Run | None = None
    for unit in range(section.unit_count):
        for storage, offset, place, nbytes in section.rows_of(unit):
            if run is not None:
                follows = (run.storage, run.offset + run.nbytes, run.place + run.nbytes) == (storage, offset, place)
                if follows and run.nbytes + nbytes <= RUN_NBYTES_MAX:
                    run = replace(run, nbytes=run.nbytes + nbytes)
                    continue
                # All rows of the units before this one lie in the runs up to here.
                yield replace(run, units_end=unit)
            run = _Run(storage, offset, place, nbytes, 0)
    if run is not None:
        yield replace(run, units_end=section.unit_count)


def _with_ends(runs: Iterable[_Run]) -> Iterator[tuple[_Run, bool]]:
    """Yield runs of one device, each with whether its end is to be told: it completes units, or is the last.

    Small tensors are many, and telling takes the trainer's time, and wakes a thread of its process.
    """
    last: _Run | None = None
    done = 0
    for run in runs:
        if last is not None:
            yield last, last.units_end > done
            done = last.units_end
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


def _bytes_of(storage: HostStorage, held: Held, run: _Run) -> torch.Tensor:
    tensor, memory = held
    start = int(getattr(storage, "start", 0)) - memory.data_ptr()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(memory, start + run.offset, (run.nbytes,), (1,))


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
