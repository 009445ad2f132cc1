"""Protects copies through the CUDA runtime without torch: it is used only after a test copy gave the right bytes."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ckstore.background import cuda
from support.fake_cuda_runtime import DEVICE_TO_HOST, FakeCudaRuntime

HERE = torch.device("cpu")


@pytest.fixture
def runtime(monkeypatch):
    """Return a runtime that copies tensors of the host."""
    played = FakeCudaRuntime()
    monkeypatch.setattr(cuda, "address_of_copy", lambda: played.address)
    return played


@pytest.fixture
def stream():
    waits = []
    return SimpleNamespace(cuda_stream=0x7F00_0000_0010, synchronize=lambda: waits.append(1), waits=waits)


def test_rows_are_copied_in_order_on_the_stream(runtime, stream):
    launcher = cuda.launcher_for(HERE, stream)
    assert stream.waits, "a test pattern was copied and awaited"
    runtime.calls.clear()
    there, here = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    begin, to = there.ctypes.data, here.ctypes.data
    table = np.array([[begin, to + 900, 100], [begin + 100, to, 900]], np.uint64)
    launcher.launch(table)
    assert runtime.calls == [(*(int(word) for word in row), DEVICE_TO_HOST, stream.cuda_stream) for row in table]
    assert (here == np.concatenate([there[100:], there[:100]])).all()


def test_runtime_with_wrong_copies_is_logged_and_unused(runtime, stream, caplog):
    runtime.shift = 1
    assert cuda.launcher_for(HERE, stream) is None
    problem = "copies from cpu are launched one by one, which is slower: a test copy arrived with other bytes"
    assert problem in caplog.text


def test_failing_runtime_is_unused_and_its_error_cleared(runtime, stream, caplog, monkeypatch):
    forgotten = []
    monkeypatch.setattr(cuda, "forget_error", forgotten.append)
    runtime.problem, runtime.fails_after = 201, 1
    assert cuda.launcher_for(HERE, stream) is None
    assert "cudaMemcpyAsync refused a copy: CUDA error 201" in caplog.text
    assert forgotten == [HERE]
    assert stream.waits, "the first half may still arrive"


def test_later_refused_copy_raises(runtime, stream):
    launcher = cuda.launcher_for(HERE, stream)
    runtime.problem, runtime.fails_after = 700, 0
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launcher.launch(np.array([[1, 2, 3]], np.uint64))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_torch_without_cuda_has_no_runtime(stream):
    assert cuda.address_of_copy() is None
    assert cuda.launcher_for(HERE, stream) is None


@pytest.mark.parametrize("problem", ["no such library", "no such name"])
def test_missing_runtime_leaves_copies_to_torch(monkeypatch, problem):
    def load(path, mode):
        if problem == "no such library":
            raise OSError(problem)
        # A library without the expected symbol.
        return SimpleNamespace()

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    assert cuda.address_of_copy() is None


def test_runtime_is_the_one_torch_links_with(monkeypatch):
    loaded = []

    def load(path, mode):
        loaded.append((path, mode))
        return SimpleNamespace(cudaMemcpyAsync=ctypes.c_void_p(4096))

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    assert cuda.address_of_copy() == 4096
    [(path, mode)] = loaded
    assert path.endswith("torch/lib/libc10_cuda.so")
    assert mode & os.RTLD_NOLOAD, "only libraries that torch has loaded are used"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_gpu_runtime_is_found_and_copies(caplog):
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.randint(0, 256, (5_000_000,), dtype=torch.uint8, device=device)
    here = torch.zeros(5_000_000, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        launcher = cuda.launcher_for(device, stream)
    assert launcher is not None, caplog.text
    half = 2_500_000
    rows = [[there.data_ptr() + half, here.data_ptr(), half], [there.data_ptr(), here.data_ptr() + half, half]]
    launcher.launch(np.array(rows, np.uint64))
    stream.synchronize()
    assert torch.equal(here, there.cpu().roll(half))
