"""Protects what devices are told to copy, by whom and until when, on tensors of the host that are taken for theirs."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

import ckstore
from ckstore.background import cuda
from ckstore.background import cuda as staging_cuda
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW
from ckstore.state import torch_adapter
from support.device_states import Staged
from support.fake_cuda_runtime import FakeCudaRuntime

STREAM = 0x7F00_0000_0010


class Devices:
    """The names of ``torch.cuda`` that copies use, for tensors of the host that are taken for tensors of a device."""

    def __init__(self):
        self.entered = []

    def device(self, device):
        return self._entering("device")

    def stream(self, stream):
        return self._entering("stream")

    @contextlib.contextmanager
    def _entering(self, what):
        self.entered.append(what)
        yield
        self.entered.pop()

    def current_stream(self, device):
        return SimpleNamespace(wait_event=lambda event: None)

    def Event(self, blocking=False):
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    def Stream(self, device):
        return SimpleNamespace(wait_event=self._wait_event, synchronize=lambda: None, cuda_stream=STREAM)

    def _wait_event(self, event):
        assert self.entered == ["device"], "whoever leaves a stream goes back to the device of the one before"


@pytest.fixture
def devices(monkeypatch):
    """Have ``CudaCopies`` copy tensors of the host."""
    made = Devices()
    names = {name: item for name, item in vars(torch).items() if name != "cuda"}
    monkeypatch.setattr(staging_cuda, "torch", SimpleNamespace(cuda=made, **names))
    monkeypatch.setattr(staging_cuda, "copy_streams", {})
    monkeypatch.setattr(staging_cuda, "pin", lambda slot, nbytes: None)
    monkeypatch.setattr("ckstore.background.device_copy.is_cuda", lambda storage: True)
    return made


@pytest.fixture
def runtime(monkeypatch):
    """What the device is told through, without torch."""
    played = FakeCudaRuntime()
    monkeypatch.setattr(cuda, "address_of_copy", lambda: played.address)
    return played


@pytest.fixture(params=["by torch", "by the runtime"])
def way(request):
    """Who is told of copies."""
    if request.param == "by the runtime":
        request.getfixturevalue("runtime")
    return request.param


@pytest.fixture
def far(devices, monkeypatch):
    """Take every tensor for one that lies in a device, wherever that is asked."""
    monkeypatch.setattr(torch_adapter, "device_of", lambda tensor: tensor.device)
    monkeypatch.setattr("ckstore.background.device_copy.is_cuda", lambda storage: not storage.is_host)
    return devices


@pytest.mark.usefixtures("far")
def test_each_of_many_commits_is_told_to_the_device(quick_saver_store, savers, runtime):
    """A capture that follows another one tells as much of a device's tensors as the first."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    quick_saver_store.attach(optimizer)
    for step in range(4):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        wanted = {bytes(part.detach().numpy()) for part in model.state_dict().values()}
        parts = [*model.parameters(), *(each for its in optimizer.state.values() for each in its.values())]
        runtime.told.clear()
        pending = quick_saver_store.commit_async(state, step)
        optimizer.step()
        pending.result()
        assert {part.data_ptr() for part in parts} <= {source for source, *_ in runtime.told}
        assert len(parts) == 8, "two parameters, four moments, two counters of steps"
        assert wanted <= set(savers[-1].content(step + 1))


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY])
def test_what_is_told_to_a_device_is_the_whole_state(devices, way, kind):
    whole = torch.randn(2_000_001, dtype=torch.bfloat16)
    state = [whole[3:500_000], torch.randn(1_000_003), torch.arange(77), torch.randn(1_500_000), torch.randn(11)]
    staged = Staged(state, kind=kind)
    staged.staging.copy_now()
    staged.staging.guard()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert (devices.entered, len(content)) == ([], 5)
    staged.close()


def test_the_runtime_is_told_of_everything_on_the_stream_of_copies_and_torch_of_nothing(devices, runtime, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    state = [torch.randn(1_500_000), *(torch.randn(1000 + index) for index in range(300))]
    staged = Staged(state, kind=DEVICE_LAZY)
    staged.staging.copy_now()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert {told[-1] for told in runtime.told} == {STREAM}
    assert sum(told[2] for told in runtime.told[2:]) == sum(map(len, content)), "but for the pattern"
    staged.close()


def test_a_device_that_copies_other_bytes_through_its_runtime_is_told_by_torch(devices, runtime):
    runtime.shift = 1
    state = [torch.randn(1_500_000), torch.randn(1000)]
    staged = Staged(state, kind=DEVICE_LAZY)
    staged.staging.copy_now()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert len(runtime.told) == 2
    staged.close()


def test_a_runtime_that_refuses_a_copy_fails_the_commit(devices, runtime):
    """Of the units of the first tensor the device was told, and its end noted, when the last one is refused."""
    staged = Staged([torch.randn(5_000_000), torch.randn(5_000_000)], kind=DEVICE_LAZY)
    # The first two are the pattern.
    runtime.problem, runtime.fails_after = 700, 3
    staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    [error] = staged.told
    assert isinstance(error, ckstore.BackendError)
    assert "cudaMemcpyAsync refused a copy: CUDA error 700" in str(error)
    assert len(runtime.told) == 3
    staged.close()


def test_the_device_is_entered_before_its_stream(devices, monkeypatch):
    seen = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda *given, **named: (seen.append(list(devices.entered)), copy(*given, **named))[1]
    )
    staged = Staged([torch.randn(1000)], kind=DEVICE_LAZY)
    staged.staging.copy_now()
    staged.content()
    assert seen == [["device", "stream"]]
    staged.close()


def test_what_is_given_up_before_the_device_was_told_lets_go_of_the_state(devices, way, monkeypatch):
    tensor = torch.randn(1000)
    memory = weakref.ref(tensor)
    staged, later = Staged([tensor], kind=DEVICE_LAZY), []
    with monkeypatch.context() as patch:
        patch.setattr(staged.crew, "send_one", later.append)
        patch.setattr(staged.crew.device_thread, "send_one", later.append)
        patch.setattr(staged.crew.device_thread, "run_and_wait", lambda step: step())
        staged.staging.copy_now()
    staged.staging.give_up(ValueError("not wanted"))
    staged.captured = None
    del tensor
    assert memory() is None
    assert len(later) == 2
    staged.close()


def test_a_device_that_cannot_be_told_leaves_an_error_that_holds_neither_state_nor_arena(devices, monkeypatch):
    tensor = torch.randn(1000)
    memory = weakref.ref(tensor)

    def copy_(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        staged = Staged([tensor], kind=DEVICE_LAZY)
        staged.staging.copy_now()
        assert staged.staging.is_over.wait(60)
    [error] = staged.told
    assert isinstance(error, ckstore.BackendError)
    assert "out of memory" in str(error)
    mapping = weakref.ref(staged.slot.memory)
    staged.close()
    staged.captured = None
    del tensor, staged
    assert memory() is None
    assert mapping() is None


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY])
def test_a_storage_that_was_resized_before_it_was_copied_fails_the_commit_and_stays_as_it_is(devices, way, kind):
    tensor = torch.randn(1000)
    staged = Staged([tensor], kind=kind)
    tensor.untyped_storage().resize_(400)
    with contextlib.suppress(ckstore.BackendError):
        staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    [error] = staged.told
    assert isinstance(error, ckstore.BackendError)
    assert "resized" in str(error)
    assert tensor.untyped_storage().nbytes() == 400
    staged.close()
