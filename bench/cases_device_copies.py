"""The time that the host needs to submit the copies of a state to a device: one call per copy, or one for all."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench
from ckstore.background import cuda
from ckstore.background.arena import Arena
from ckstore.background.arena_layout import DEVICE_LAZY, plan_layout
from ckstore.background.cuda import CudaCopies, pin
from ckstore.codec.kernels import reference
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter

TENSOR_COUNT = 401
"""As many tensors as the state of ``stall_gpu_guarded`` has."""

TENSOR_NBYTES = 4096
"""Small, so that submitting dominates copying."""

CALLS = 7
"""Calls of a sample; their median counts."""

_DEVICE_TO_HOST = 2

Begin = Callable[[NDArray[np.uint64]], None]


def telling_devices(bench: Bench) -> Result:
    """Submit many small copies to a device; without a GPU a libc call replaces the runtime."""
    # Imported here, because ckstore can be installed without the extension.
    from ckstore import _native

    result = Result("telling_devices", "ms", is_higher_better=False)
    is_there = torch.cuda.is_available()
    place = torch.device("cuda", 0) if is_there else torch.device("cpu")
    result.setting = {"tensors": TENSOR_COUNT, "tensor_nbytes": TENSOR_NBYTES, "device": str(place)}
    state = [torch.ones(TENSOR_NBYTES, dtype=torch.uint8, device=place) for _ in range(TENSOR_COUNT)]
    with _copies(state) as copies, _stream(place) as stream:
        function = cuda.address_of_copy() if is_there else _address_of_nothing()
        if function is None:
            raise RuntimeError("the runtime of this torch can only be called through torch")

        def by_torch(table: NDArray[np.uint64]) -> None:
            copies._begin(copies._runs, table, None)

        def by_numpy(table: NDArray[np.uint64]) -> None:
            _check(reference.launch_copies(function, table.data, _DEVICE_TO_HOST, stream))

        def by_native(table: NDArray[np.uint64]) -> None:
            _check(_native.launch_copies(function, table.data, _DEVICE_TO_HOST, stream))

        def telling(begin: Begin) -> Participant:
            return lambda: Sample(1000 * _seconds(copies, begin))

        ways = {"torch, a call a copy": by_torch, "the runtime, numpy": by_numpy, "the runtime, native": by_native}
        interleave(result, {name: telling(begin) for name, begin in ways.items()}, bench.rounds)
    result.add_ratios(["the runtime, native"], list(ways))
    if not is_there:
        result.notes.append(
            "there is no GPU: torch copies in the host's memory, and the runtime is sched_yield of libc"
        )
    return result


@contextmanager
def _copies(state: list[torch.Tensor]) -> Iterator[CudaCopies]:
    captured = capture(state, [TorchAdapter()])
    stowage = plan_layout(captured.storages, [DEVICE_LAZY] * len(captured.storages), [])
    arena = Arena.create(stowage.end)
    try:
        slot = arena.slots[0]
        slot.start(1, stowage.end)
        pin(slot, stowage.end)
        yield CudaCopies(stowage.sections[DEVICE_LAZY], captured.storages, slot)
    finally:
        arena.close()


@contextmanager
def _stream(place: torch.device) -> Iterator[int]:
    if place.type != "cuda":
        yield 0
        return
    stream = torch.cuda.Stream(place)
    with torch.cuda.stream(stream):
        yield stream.cuda_stream
        stream.synchronize()


def _address_of_nothing() -> int:
    # A cheap system call that takes no arguments and returns 0.
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    assert address is not None
    return address


def _seconds(copies: CudaCopies, begin: Begin) -> float:
    taken = []
    for _ in range(CALLS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        begin(copies._table())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _check(problem: int) -> None:
    if problem:
        raise RuntimeError(f"the runtime has refused a copy: {problem}")


CASES: dict[str, Callable[[Bench], Result]] = {"telling_devices": telling_devices}
