"""Protects device copies: what is launched, by which library, and when sources are released. Uses host tensors."""

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
    """The part of ``torch.cuda`` that copies use, for host tensors that play device tensors."""

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
        assert self.entered == ["device"], "leaving a stream restores the previous device"


@pytest.fixture
def devices(monkeypatch):
    """Make ``CudaCopies`` copy host tensors."""
    made = Devices()
    names = {name: item for name, item in vars(torch).items() if name != "cuda"}
    monkeypatch.setattr(staging_cuda, "torch", SimpleNamespace(cuda=made, **names))
    monkeypatch.setattr(staging_cuda, "copy_streams", {})
    monkeypatch.setattr(staging_cuda, "pin", lambda slot, nbytes: None)
    monkeypatch.setattr("ckstore.background.device_copy.is_cuda", lambda storage: True)
    return made


@pytest.fixture
def runtime(monkeypatch):
    """A fake CUDA runtime, used without torch."""
    played = FakeCudaRuntime()
    monkeypatch.setattr(cuda, "address_of_copy", lambda: played.address)
    return played


@pytest.fixture(params=["by torch", "by the runtime"])
def launcher(request):
    """Which library launches the copies."""
    if request.param == "by the runtime":
        request.getfixturevalue("runtime")
    return request.param


@pytest.fixture
def on_device(devices, monkeypatch):
    """Pretend that every tensor is on a device."""
    monkeypatch.setattr(torch_adapter, "device_of", lambda tensor: tensor.device)
    monkeypatch.setattr("ckstore.background.device_copy.is_cuda", lambda storage: not storage.is_host)
    return devices


@pytest.mark.usefixtures("on_device")
def test_every_commit_launches_all_copies(quick_saver_store, savers, runtime):
    """A cached capture launches as many device copies as the first one."""
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
        runtime.calls.clear()
        pending = quick_saver_store.commit_async(state, step)
        optimizer.step()
        pending.result()
        assert {part.data_ptr() for part in parts} <= {source for source, *_ in runtime.calls}
        assert len(parts) == 8, "two parameters, four moments, two step counters"
        assert wanted <= set(savers[-1].content(step + 1))


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY])
def test_whole_state_is_copied(devices, launcher, kind):
    whole = torch.randn(2_000_001, dtype=torch.bfloat16)
    state = [whole[3:500_000], torch.randn(1_000_003), torch.arange(77), torch.randn(1_500_000), torch.randn(11)]
    staged = Staged(state, kind=kind)
    staged.staging.copy_now()
    staged.staging.guard()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert (devices.entered, len(content)) == ([], 5)
    staged.close()


def test_runtime_launches_all_copies_on_one_stream(devices, runtime, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    state = [torch.randn(1_500_000), *(torch.randn(1000 + index) for index in range(300))]
    staged = Staged(state, kind=DEVICE_LAZY)
    staged.staging.copy_now()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert {call[-1] for call in runtime.calls} == {STREAM}
    assert sum(call[2] for call in runtime.calls[2:]) == sum(map(len, content)), "without the test pattern"
    staged.close()


def test_torch_copies_when_the_runtime_is_wrong(devices, runtime):
    runtime.shift = 1
    state = [torch.randn(1_500_000), torch.randn(1000)]
    staged = Staged(state, kind=DEVICE_LAZY)
    staged.staging.copy_now()
    content = staged.content()
    assert content == [bytes(storage.read(0, storage.nbytes)) for storage in staged.captured.storages]
    assert len(runtime.calls) == 2
    staged.close()


def test_refused_copy_fails_the_commit(devices, runtime):
    """The first tensor's units were launched, and its event recorded, when the last copy is refused."""
    staged = Staged([torch.randn(5_000_000), torch.randn(5_000_000)], kind=DEVICE_LAZY)
    # The first two copies are the test pattern.
    runtime.problem, runtime.fails_after = 700, 3
    staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    [error] = staged.events
    assert isinstance(error, ckstore.BackendError)
    assert "cudaMemcpyAsync refused a copy: CUDA error 700" in str(error)
    assert len(runtime.calls) == 3
    staged.close()


def test_device_is_entered_before_its_stream(devices, monkeypatch):
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


def test_state_given_up_before_launch_is_released(devices, launcher, monkeypatch):
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


def test_launch_error_keeps_neither_state_nor_arena(devices, monkeypatch):
    tensor = torch.randn(1000)
    memory = weakref.ref(tensor)

    def copy_(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        staged = Staged([tensor], kind=DEVICE_LAZY)
        staged.staging.copy_now()
        assert staged.staging.is_over.wait(60)
    [error] = staged.events
    assert isinstance(error, ckstore.BackendError)
    assert "out of memory" in str(error)
    mapping = weakref.ref(staged.slot.memory)
    staged.close()
    staged.captured = None
    del tensor, staged
    assert memory() is None
    assert mapping() is None


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY])
def test_resized_storage_fails_the_commit_unchanged(devices, launcher, kind):
    tensor = torch.randn(1000)
    staged = Staged([tensor], kind=kind)
    tensor.untyped_storage().resize_(400)
    with contextlib.suppress(ckstore.BackendError):
        staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    [error] = staged.events
    assert isinstance(error, ckstore.BackendError)
    assert "resized" in str(error)
    assert tensor.untyped_storage().nbytes() == 400
    staged.close()
