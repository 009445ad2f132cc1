"""Protects copies from CUDA devices: in order with what training computes before and after, whole, and pinned.

What needs a GPU is skipped where there is none; how copies are cut is tested everywhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckstore.adapters import staging_cuda
from ckstore.adapters.torch_state import TorchAdapter
from ckstore.capture import capture
from ckstore.config import MIB
from ckstore.saver.arena import UNIT_NBYTES, Arena
from ckstore.staging.copying import Crew
from ckstore.staging.devices import kinds_of, pin, starts_of
from ckstore.staging.state import Staging
from ckstore.staging.stowage import DEVICE_LAZY, DEVICE_NOW, NOW, stow

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


class Shape:
    def __init__(self, nbytes):
        self.nbytes, self.element_width, self.is_float = nbytes, 4, True


@given(st.lists(st.integers(0, 40 * MIB), max_size=8))
def test_runs_cover_every_byte_once_and_tell_when_units_are_complete(lengths):
    section = stow([Shape(nbytes) for nbytes in lengths], [DEVICE_NOW] * len(lengths), []).sections[DEVICE_NOW]
    runs = list(staging_cuda._runs_of(section))
    assert all(0 < run.nbytes <= staging_cuda.RUN_NBYTES_MAX for run in runs)
    assert sum(run.nbytes for run in runs) == sum(lengths)
    assert [run.units_end for run in runs] == sorted(run.units_end for run in runs)
    assert not runs or runs[-1].units_end == section.unit_count
    for number, run in enumerate(runs):
        complete = section.begin + run.units_end * UNIT_NBYTES
        assert all(later.place >= complete for later in runs[number + 1 :])


def test_a_large_tensor_is_few_copies():
    section = stow([Shape(200 * MIB)], [DEVICE_NOW], []).sections[DEVICE_NOW]
    assert len(list(staging_cuda._runs_of(section))) == 4


def test_pinning_without_a_device_does_nothing():
    arena = Arena.create(UNIT_NBYTES)
    if not torch.cuda.is_available():
        pin(arena.slots[0])
        assert not torch.cuda.is_initialized()
    arena.close()


def test_memory_of_the_host_lies_in_no_device():
    captured = capture([torch.ones(5), np.ones(5)], [TorchAdapter()])
    assert [staging_cuda.device_of(storage) for storage in captured.storages] == [None, None]
    assert kinds_of(captured, starts_of(captured.storages), ()) == [NOW, NOW]


class Staged:
    """A state on its way, with real threads."""

    def __init__(self, state, guarded=()):
        self.captured = capture(state, [TorchAdapter()])
        starts = starts_of(self.captured.storages)
        self.kinds = kinds = kinds_of(self.captured, starts, guarded)
        self.stowage = stow(self.captured.storages, kinds, [])
        self.arena, self.crew, self.told = Arena.create(self.stowage.end), Crew(2), []
        self.slot = self.arena.slots[0]
        self.slot.start(1, self.stowage.end)
        self.staging = Staging(
            self.captured, self.stowage, starts, self.slot, self.crew, bell=-1, is_checked=False,
            on_staged=lambda: self.told.append("staged"), on_failed=self.told.append,
        )  # fmt: skip

    def content(self):
        assert self.staging.is_over.wait(60)
        assert self.told == ["staged"]
        sizes = [storage.nbytes for storage in self.captured.storages]
        return [bytes(self.slot.view(place, n)) for place, n in zip(self.stowage.places, sizes, strict=True)]

    def close(self):
        self.crew.close()
        self.arena.close()


def bytes_of(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def spans_of(*tensors):
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)


@needs_gpu
def test_a_state_in_a_gpu_and_in_the_host_arrives_whole():
    state = [torch.randn(3_000_000, device="cuda"), torch.randn(99), torch.arange(77, device="cuda"), np.ones(9)]
    staged = Staged(state)
    assert staged.kinds == [DEVICE_NOW, NOW, DEVICE_NOW, NOW]
    staged.staging.copy_now()
    assert staged.content() == [bytes_of(torch.as_tensor(each)) for each in state]
    staged.close()


@needs_gpu
def test_copies_come_after_what_was_computed_before_and_before_what_comes_after():
    weight, buffer = torch.zeros(8_000_000, device="cuda"), torch.zeros(1_000_000, device="cuda")
    # The device is busy: neither of these has happened yet when the copies are launched.
    torch.cuda._sleep(200_000_000)
    weight += 1
    buffer += 2
    staged = Staged([weight, buffer], spans_of(weight))
    assert staged.kinds == [DEVICE_LAZY, DEVICE_NOW]
    staged.staging.copy_now()
    buffer += 5
    staged.staging.guard()
    weight += 5
    content = staged.content()
    assert content[0] == bytes_of(torch.ones(8_000_000))
    assert content[1] == bytes_of(torch.full((1_000_000,), 2.0))
    assert (float(weight[0]), float(buffer[0])) == (6.0, 7.0)
    staged.close()


@needs_gpu
def test_the_guard_lets_the_device_wait_and_not_the_host():
    weight = torch.zeros(8_000_000, device="cuda")
    torch.cuda.synchronize()
    staged = Staged([weight], spans_of(weight))
    torch.cuda._sleep(1_000_000_000)
    staged.staging.copy_now()
    staged.staging.guard()
    assert not torch.cuda.current_stream().query()
    assert staged.told == []
    staged.content()
    staged.close()


@needs_gpu
def test_the_arena_is_pinned_once_and_let_go():
    arena = Arena.create(UNIT_NBYTES)
    pin(arena.slots[0])
    pin(arena.slots[0])
    view = torch.from_numpy(np.frombuffer(arena.slots[0].view(0, 4096), np.uint8))
    assert view.is_pinned()
    del view
    arena.close()


@needs_gpu
def test_views_of_one_storage_and_odd_offsets_arrive_whole():
    whole = torch.randn(1_000_001, device="cuda", dtype=torch.bfloat16)
    state = [whole[3:500_000], whole[400_000:], whole[::2]]
    staged = Staged(state)
    staged.staging.copy_now()
    content = staged.content()
    for spec, tensor in zip(staged.captured.tensors, state, strict=True):
        stored = torch.frombuffer(bytearray(content[spec.storage]), dtype=torch.bfloat16)
        again = torch.as_strided(stored, spec.shape, spec.strides, spec.offset // 2)
        assert torch.equal(again, tensor.cpu())
    staged.close()
