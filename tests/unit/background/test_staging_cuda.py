"""Protects copies from CUDA devices: they are complete, pinned, and ordered with the trainer's computations.

Tests that need a GPU are skipped without one. How copies are split is tested everywhere.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckstore.background import cuda
from ckstore.background.arena import UNIT_NBYTES, Arena
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, LEAD_NBYTES, NOW, RUN_NBYTES_MAX, plan_layout
from ckstore.background.device_copy import kinds_of, pin, starts_of
from ckstore.commit.chunking import SHARED_NBYTES_MAX
from ckstore.config import MIB
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter
from support.device_states import Staged

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


class Shape:
    def __init__(self, nbytes):
        self.nbytes, self.element_width, self.is_float = nbytes, 4, True


LENGTHS = st.one_of(st.integers(0, 40 * MIB), st.integers(0, 3000), st.integers(0, 2 * MIB))


def section_of(lengths):
    return plan_layout([Shape(nbytes) for nbytes in lengths], [DEVICE_NOW] * len(lengths), []).sections[DEVICE_NOW]


@given(st.lists(LENGTHS, max_size=30))
def test_runs_cover_each_row_and_unit_once(lengths):
    section = section_of(lengths)
    runs = section.runs
    assert all(0 < run.nbytes <= RUN_NBYTES_MAX for run in runs)
    cuts = {(row[0], row[1]): row for unit in range(section.unit_count) for row in section.rows_of(unit)}
    for run in runs:
        offset, place = run.offset, run.place
        while offset < run.offset + run.nbytes:
            row = cuts.pop((run.storage, offset))
            assert row[2] == place
            offset, place = offset + row[3], place + row[3]
        assert offset == run.offset + run.nbytes
    assert not cuts
    assert sorted(unit for run in runs for unit in run.units) == list(range(section.unit_count))
    done = {unit: number for number, run in enumerate(runs) for unit in run.units}
    for number, run in enumerate(runs):
        first = (run.place - section.begin) // UNIT_NBYTES
        last = (run.place + run.nbytes - 1 - section.begin) // UNIT_NBYTES
        assert all(done[unit] >= number for unit in range(first, last + 1))


@given(st.lists(LENGTHS, max_size=30))
def test_large_copies_precede_small_ones(lengths):
    sizes = [run.nbytes for run in section_of(lengths).runs]
    larges = [nbytes for nbytes in lengths if nbytes >= SHARED_NBYTES_MAX]
    smalls = sum(0 < nbytes < SHARED_NBYTES_MAX for nbytes in lengths)
    lead = next((number for number, nbytes in enumerate(sizes) if nbytes < SHARED_NBYTES_MAX), len(sizes))
    if smalls and larges:
        assert sum(sizes[:lead]) >= min(LEAD_NBYTES, sum(larges))
        assert sum(sizes[: lead - 1]) < LEAD_NBYTES
        assert max(sizes[lead : lead + smalls]) < SHARED_NBYTES_MAX


def test_a_large_tensor_is_few_copies():
    assert len(section_of([200 * MIB]).runs) == 4


def test_pinning_without_a_device_does_nothing():
    arena = Arena.create(UNIT_NBYTES)
    if not torch.cuda.is_available():
        pin(arena.slots[0], UNIT_NBYTES)
        assert not torch.cuda.is_initialized()
    arena.close()


@pytest.fixture
def registrations(monkeypatch):
    """Pretend that there is a device, and record its runtime's calls: the pinned size, or "unpin"."""
    calls: list[object] = []

    class Runtime:
        problem = 0

        def cudaHostRegister(self, address, nbytes, flags):
            calls.append(nbytes)
            return self.problem

        def cudaHostUnregister(self, address):
            calls.append("unpin")
            return 0

    runtime = Runtime()
    monkeypatch.setattr(cuda, "forget_error", lambda device: None)
    # The state of a process that already uses CUDA.
    for name, function in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "cudart": lambda: runtime,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True, raising=False)
    return calls, runtime


def test_only_memory_of_the_state_is_pinned(registrations):
    calls, _ = registrations
    arena = Arena.create(10 * UNIT_NBYTES)
    slot = arena.slots[0]
    slot.start(1, 6 * UNIT_NBYTES + 5)
    pin(slot, slot.nbytes_begun)
    pin(slot, 3 * UNIT_NBYTES)
    assert calls == [7 * UNIT_NBYTES]
    assert slot.nbytes_taken == 7 * UNIT_NBYTES, "pinned memory is resident"
    # A longer state, which may grow further. Freed memory is no longer resident.
    pin(slot, 8 * UNIT_NBYTES)
    pin(slot, 9 * UNIT_NBYTES)
    assert calls == [7 * UNIT_NBYTES, "unpin", 9 * UNIT_NBYTES]
    assert slot.give_back() == 9 * UNIT_NBYTES
    pin(slot, UNIT_NBYTES)
    assert calls[3:] == ["unpin", UNIT_NBYTES]
    arena.close(is_idle=True)
    assert calls[5:] == ["unpin"]


def test_failed_pinning_is_logged_once_and_not_retried(registrations, caplog):
    calls, runtime = registrations
    runtime.problem = 2
    arena = Arena.create(2 * UNIT_NBYTES)
    pin(arena.slots[0], UNIT_NBYTES)
    pin(arena.slots[0], 2 * UNIT_NBYTES)
    assert calls == [UNIT_NBYTES]
    assert caplog.text.count("cannot be pinned (CUDA error 2)") == 1
    arena.close(is_idle=True)


def test_host_memory_has_no_device():
    captured = capture([torch.ones(5), np.ones(5)], [TorchAdapter()])
    assert [cuda.device_of(storage) for storage in captured.storages] == [None, None]
    assert kinds_of(captured, starts_of(captured.storages), ()) == [NOW, NOW]


def bytes_of(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def spans_of(*tensors):
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)


@needs_gpu
def test_state_on_gpu_and_host_is_copied():
    state = [torch.randn(3_000_000, device="cuda"), torch.randn(99), torch.arange(77, device="cuda"), np.ones(9)]
    staged = Staged(state)
    assert staged.kinds == [DEVICE_NOW, NOW, DEVICE_NOW, NOW]
    staged.staging.copy_now()
    assert staged.content() == [bytes_of(torch.as_tensor(each)) for each in state]
    staged.close()


@needs_gpu
def test_copies_are_ordered_with_computations():
    weight, buffer = torch.zeros(8_000_000, device="cuda"), torch.zeros(1_000_000, device="cuda")
    # The device is busy: none of these has happened yet when the copies are launched.
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
def test_copies_follow_the_trainers_stream(monkeypatch):
    weight = torch.zeros(8_000_000, device="cuda")
    later = []
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        weight += 1
        staged = Staged([weight], spans_of(weight))
        # The thread that launches the copies has another current stream, and runs late.
        with monkeypatch.context() as patch:
            patch.setattr(staged.crew, "send_one", later.append)
            patch.setattr(staged.crew.device_thread, "send_one", later.append)
            patch.setattr(staged.crew.device_thread, "run_and_wait", lambda step: step())
            staged.staging.copy_now()
        for work in later:
            staged.crew.device_thread.send_one(work)
        staged.staging.guard()
        weight += 5
    assert staged.content() == [bytes_of(torch.ones(8_000_000))]
    staged.close()


@needs_gpu
def test_guard_makes_the_device_wait_not_the_host():
    weight = torch.zeros(8_000_000, device="cuda")
    torch.cuda.synchronize()
    staged = Staged([weight], spans_of(weight))
    # The first use may wait for the device: it pins memory and creates a stream.
    pin(staged.slot, staged.slot.nbytes)
    first = Staged([torch.zeros(1, device="cuda")])
    first.staging.copy_now()
    first.content()
    first.close()
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)
    staged.staging.copy_now()
    staged.staging.guard()
    assert not torch.cuda.current_stream().query()
    assert staged.events == []
    staged.content()
    staged.close()


@needs_gpu
def test_arena_is_pinned_once_and_unpinned(caplog):
    torch.cuda.init()
    arena = Arena.create(UNIT_NBYTES)
    slot = arena.slots[0]
    pin(slot, UNIT_NBYTES)
    pin(slot, UNIT_NBYTES)
    view = torch.from_numpy(np.frombuffer(slot.view(0, 4096), np.uint8))
    assert view.is_pinned()
    assert caplog.text == ""
    assert slot.unpin_pages()
    assert not view.is_pinned()
    del view
    arena.close()


@needs_gpu
def test_views_and_odd_offsets_are_copied():
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


@given(st.lists(st.tuples(LENGTHS, st.booleans()), max_size=12))
def test_unit_is_marked_after_all_its_devices_finished(storages):
    section = section_of([nbytes for nbytes, _ in storages])
    runs, marked_by, units = [], {}, []
    covered = {False: -1, True: -1}
    for device, stretch in itertools.groupby(section.runs, lambda run: storages[run.storage][1]):
        its = list(stretch)
        for run, has_event in zip(its, cuda.needs_event(its), strict=True):
            runs.append((run, device))
            units += run.units
            if has_event:
                # Waiting for this event includes waiting for all earlier ones.
                covered[device] = len(runs) - 1
                marked_by |= {unit: dict(covered) for unit in units}
                units = []
    assert not units
    assert len(marked_by) == section.unit_count
    for number, (run, device) in enumerate(runs):
        first = (run.place - section.begin) // UNIT_NBYTES
        last = (run.place + run.nbytes - 1 - section.begin) // UNIT_NBYTES
        for unit in range(first, last + 1):
            assert marked_by[unit][device] >= number


def test_small_tensors_need_one_event_per_unit():
    section = section_of([1000] * 9000)
    has_event = list(cuda.needs_event(section.runs))
    assert (len(has_event), sum(has_event)) == (9000, section.unit_count)
