"""Protects the check of the guard in the memory of devices: every change from outside is found, and no other is."""

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
    """Is set when the device was told of all copies."""
    is_told, launch = threading.Event(), on_device.launch
    monkeypatch.setattr(on_device, "launch", lambda device: (launch(device), is_told.set()))
    return is_told


class Trainer:
    """Weights of more than a unit, which a fused optimizer changes: torch counts none of that."""

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

    def meddle(self):
        """Change one element, which no counter sees."""
        self.model[2].weight.data[5, 7] += 1


def contents_of(state):
    optimizer = [value for each in state["optimizer"]["state"].values() for value in each.values()]
    return {bytes(each.detach().numpy()) for each in [*state["model"].values(), *optimizer]}


def wait_until_all_is_copied():
    until(lambda: FakeSaver.started[-1].is_copied(1), "the copies")


def wait_until_all_has_come(on_device):
    on_device.may_copy.set()
    wait_until_all_is_copied()


def fail(*_):
    raise ckstore.BackendError("the device has failed")


@pytest.mark.parametrize("is_guarded", [False, True], ids=["nobody guards", "a guard comes"])
@pytest.mark.parametrize("when", ["before the device is told", "while it is sending", "when all has come"])
def test_change_that_nothing_counts_fails_the_commit_and_names_the_tensor(store, on_device, launched, when, is_guarded):
    trainer = Trainer(store)
    if when == "before the device is told":
        on_device.may_enqueue.clear()
    pending = store.commit_async(trainer.state(), 1)
    if when == "when all has come":
        wait_until_all_has_come(on_device)
    elif when == "while it is sending":
        assert launched.wait(SECONDS_MAX)
    trainer.meddle()
    on_device.may_enqueue.set()
    # Whoever has found a change waits for what the device was told.
    on_device.may_copy.set()
    if is_guarded:
        trainer.step()
    with pytest.raises(CorruptError, match=r"model\.2\.weight") as caught:
        pending.result(SECONDS_MAX)
    assert caught.value.path == ("model", "2.weight")
    assert "staged" not in FakeSaver.started[-1].calls
    # And whoever is left in peace is not accused.
    assert store.commit_async(trainer.state(), 2).result(SECONDS_MAX).step == 2


def test_steps_behind_their_guard_are_no_changes_and_the_state_before_them_is_staged(store, on_device):
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
def test_bytes_that_a_device_sends_wrong_fail_the_commit(store, on_device, monkeypatch, when):
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
        wait_until_all_has_come(on_device)
    trainer.step()
    # A guard does not wait for a device: what has come is compared when it has.
    assert (pending.error_or_none() is None) == (when == "after the guard")
    on_device.may_copy.set()
    with pytest.raises(CorruptError, match="was changed between"):
        pending.result(SECONDS_MAX)


def test_failing_look_at_a_device_fails_the_commit_and_not_the_step(store, on_device, monkeypatch):
    trainer = Trainer(store)
    pending = store.commit_async(trainer.state(), 1)
    wait_until_all_has_come(on_device)
    with monkeypatch.context() as patch:
        patch.setattr(MemorySpan, "read", fail)
        trainer.step()
    with pytest.raises(ckstore.BackendError, match="the device has failed"):
        pending.result(SECONDS_MAX)
    assert store.commit_async(trainer.state(), 2).result(SECONDS_MAX).step == 2


@pytest.mark.parametrize("place", ["host", "device"])
def test_failing_look_while_somebody_waits_fails_the_commit_for_good(store, request, monkeypatch, place):
    """What is copied already may be resized, or its device fail, before somebody asks for the result."""
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


def test_guard_on_another_thread_waits_until_the_sources_were_noted(store, on_device, monkeypatch):
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


def test_device_is_read_once_before_the_call_returns_and_once_when_its_guard_is_entered(
    store, on_device, launched, monkeypatch
):
    trainer, reads, read = Trainer(store), [], MemorySpan.read
    # The device reads when it is told to send: that is no look at it.
    on_device.may_enqueue.clear()

    def noted(span, lo, hi):
        # What is as small as a counter of steps is taken for memory of the host.
        if not on_device.may_enqueue.is_set() and span.nbytes > 4096:
            reads.append((span.start, lo, hi))
        return read(span, lo, hi)

    monkeypatch.setattr(MemorySpan, "read", noted)
    pending = store.commit_async(trainer.state(), 1)
    before = Counter(reads)
    on_device.may_enqueue.set()
    wait_until_all_has_come(on_device)
    on_device.may_enqueue.clear()
    trainer.step()
    pending.result(SECONDS_MAX)
    assert set(before.values()) == {1}
    assert Counter(reads) == before + before


def test_interrupted_look_at_a_device_interrupts_the_step_and_is_done_again(store, launched, on_device, monkeypatch):
    trainer = Trainer(store)
    pending = store.commit_async(trainer.state(), 1)
    assert launched.wait(SECONDS_MAX)
    trainer.meddle()

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
def test_checked_state_is_freed_when_its_commit_is_over(store, on_device, is_changed):
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
    # The optimizer and its groups are a cycle of torch's own.
    gc.collect()
    assert [each() for each in staging] == [None, None]
