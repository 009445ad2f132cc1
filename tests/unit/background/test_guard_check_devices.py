"""Protects ``debug_guard`` on devices: every change outside the guard is found, and nothing else is reported."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import ckstore
from ckstore.errors import CorruptError
from ckstore.state.memory import MemorySpan
from support.fake_saver import FakeSaver
from support.saver_harness import until

pytestmark = pytest.mark.usefixtures("no_threads_left", "quiet_log")

SECONDS_MAX = 60


@pytest.fixture
def store(open_fake_store):
    return open_fake_store(debug_guard=True)


@pytest.fixture
def launched(on_device, monkeypatch):
    """Return an event that is set when the device was given all copies."""
    is_launched, launch = threading.Event(), on_device.launch
    monkeypatch.setattr(on_device, "launch", lambda device: (launch(device), is_launched.set()))
    return is_launched


class Trainer:
    """Weights of more than one unit, changed by a fused optimizer. torch's version counters miss these changes."""

    def __init__(self, store):
        self.model = nn.Sequential(nn.Linear(96, 11_500), nn.ReLU(), nn.Linear(11_500, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.step()
        store.attach(self.optimizer)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 96)).square().mean().backward()
        self.optimizer.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def change_unseen(self):
        """Change one element without changing a version counter."""
        self.model[2].weight.data[5, 7] += 1


def contents_of(state):
    optimizer = [value for each in state["optimizer"]["state"].values() for value in each.values()]
    return {bytes(each.detach().numpy()) for each in [*state["model"].values(), *optimizer]}


def wait_until_all_is_copied():
    until(lambda: FakeSaver.started[-1].is_copied(1), "the copies")


def wait_until_all_has_arrived(on_device):
    on_device.may_copy.set()
    wait_until_all_is_copied()


def fail(*_):
    raise ckstore.BackendError("the device has failed")


@pytest.mark.parametrize("is_guarded", [False, True], ids=["nobody guards", "a guard comes"])
@pytest.mark.parametrize("when", ["before the launch", "while copying", "after copying"])
def test_uncounted_change_fails_the_commit_by_tensor_name(store, on_device, launched, when, is_guarded):
    trainer = Trainer(store)
    if when == "before the launch":
        on_device.may_enqueue.clear()
    pending = store.commit_async(trainer.state(), 1)
    if when == "when all has come":
        wait_until_all_has_arrived(on_device)
    elif when == "while it is sending":
        assert launched.wait(SECONDS_MAX)
    trainer.change_unseen()
    on_device.may_enqueue.set()
    # The thread that finds a change waits for the copies already given to the device.
    on_device.may_copy.set()
    if is_guarded:
        trainer.step()
    with pytest.raises(CorruptError, match=r"model\.2\.weight") as caught:
        pending.result(SECONDS_MAX)
    assert caught.value.path == ("model", "2.weight")
    assert "staged" not in FakeSaver.started[-1].calls
    # The next commit, without a change, succeeds.
    assert store.commit_async(trainer.state(), 2).result(SECONDS_MAX).step == 2


def test_guarded_steps_pass_and_old_state_is_staged(store, on_device):
    trainer = Trainer(store)
    for step in range(1, 4):
        on_device.may_copy.clear()
        wanted = contents_of(trainer.state())
        pending = store.commit_async(trainer.state(), step)
        for _ in range(2):
            trainer.step()
        assert not pending.is_staged
        on_device.may_copy.set()
        assert pending.result(SECONDS_MAX).step == step
        assert wanted <= set(FakeSaver.started[-1].content(step))


@pytest.mark.parametrize("when", ["before the guard", "after the guard"])
def test_wrong_bytes_from_device_fail_the_commit(store, on_device, monkeypatch, when):
    trainer = Trainer(store)
    launch = on_device.launch

    def launch_wrong(self):
        launch(self)
        if self.rows:
            place, content = self.rows[-1]
            self.rows[-1] = place, content[:-1] + bytes([content[-1] ^ 1])

    monkeypatch.setattr(on_device, "launch", launch_wrong)
    pending = store.commit_async(trainer.state(), 1)
    if when == "before the guard":
        wait_until_all_has_arrived(on_device)
    trainer.step()
    # A guard does not wait for a device. Bytes are compared after they have arrived.
    assert (pending.error_or_none() is None) == (when == "after the guard")
    on_device.may_copy.set()
    with pytest.raises(CorruptError, match="was changed between"):
        pending.result(SECONDS_MAX)


def test_failing_check_fails_the_commit_not_the_step(store, on_device, monkeypatch):
    trainer = Trainer(store)
    pending = store.commit_async(trainer.state(), 1)
    wait_until_all_has_arrived(on_device)
    with monkeypatch.context() as patch:
        patch.setattr(MemorySpan, "read", fail)
        trainer.step()
    with pytest.raises(ckstore.BackendError, match="the device has failed"):
        pending.result(SECONDS_MAX)
    assert store.commit_async(trainer.state(), 2).result(SECONDS_MAX).step == 2


@pytest.mark.parametrize("place", ["host", "device"])
def test_failing_check_in_wait_fails_the_commit(store, request, monkeypatch, place):
    """Copied memory may be resized, or its device may fail, before the result is requested."""
    if place == "device":
        request.getfixturevalue("on_device").may_copy.set()
    trainer = Trainer(store)
    pending = store.commit_async(trainer.state(), 1)
    wait_until_all_is_copied()
    with monkeypatch.context() as patch:
        patch.setattr(MemorySpan, "read", fail)
        with pytest.raises(ckstore.BackendError, match="the device has failed"):
            pending.result(SECONDS_MAX)
    assert pending.is_done
    assert store.commit_async(trainer.state(), 2).result(SECONDS_MAX).step == 2


def test_guard_on_other_thread_waits_for_checksums(store, on_device, monkeypatch):
    trainer, is_noting, is_stepping = Trainer(store), threading.Event(), threading.Event()
    wanted = contents_of(trainer.state())
    read = MemorySpan.read

    def read_slowly(span, lo, hi):
        if not is_noting.is_set():
            is_noting.set()
            assert is_stepping.wait(SECONDS_MAX)
            # Long enough for a step that does not wait.
            time.sleep(0.1)
        return read(span, lo, hi)

    def step():
        assert is_noting.wait(SECONDS_MAX)
        is_stepping.set()
        trainer.step()

    monkeypatch.setattr(MemorySpan, "read", read_slowly)
    other = threading.Thread(target=step)
    other.start()
    pending = store.commit_async(trainer.state(), 1)
    other.join()
    on_device.may_copy.set()
    assert pending.result(SECONDS_MAX).step == 1
    assert wanted <= set(FakeSaver.started[-1].content(1))


def test_device_is_read_once_in_call_and_once_in_guard(store, on_device, launched, monkeypatch):
    trainer, reads, read = Trainer(store), [], MemorySpan.read
    # Launching a copy also reads the device. That read does not count as a check.
    on_device.may_enqueue.clear()

    def counted_read(span, lo, hi):
        # Tensors as small as a step counter count as host memory.
        if not on_device.may_enqueue.is_set() and span.nbytes > 4096:
            reads.append((span.start, lo, hi))
        return read(span, lo, hi)

    monkeypatch.setattr(MemorySpan, "read", counted_read)
    pending = store.commit_async(trainer.state(), 1)
    before = Counter(reads)
    on_device.may_enqueue.set()
    wait_until_all_has_arrived(on_device)
    on_device.may_enqueue.clear()
    trainer.step()
    pending.result(SECONDS_MAX)
    assert set(before.values()) == {1}
    assert Counter(reads) == before + before


def test_interrupted_check_stops_the_step_and_is_retried(store, launched, on_device, monkeypatch):
    trainer = Trainer(store)
    pending = store.commit_async(trainer.state(), 1)
    assert launched.wait(SECONDS_MAX)
    trainer.change_unseen()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemorySpan, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
    on_device.may_copy.set()
    trainer.step()
    with pytest.raises(CorruptError, match=r"model\.2\.weight"):
        pending.result(SECONDS_MAX)


@pytest.mark.parametrize("is_changed", [False, True])
def test_checked_state_is_freed_after_its_commit(store, on_device, is_changed):
    on_device.may_copy.set()
    weight = nn.Parameter(torch.randn(2_000_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    store.attach(optimizer)
    pending = store.commit_async({"w": weight}, 1)
    if is_changed:
        weight.data[7] += 1
        with pytest.raises(CorruptError):
            pending.result(SECONDS_MAX)
    else:
        pending.result(SECONDS_MAX)
    staging = [weakref.ref(storage) for storage in (weight.untyped_storage(), weight)]
    del weight, optimizer
    # The optimizer and its groups form a reference cycle made by torch.
    gc.collect()
    assert [each() for each in staging] == [None, None]
