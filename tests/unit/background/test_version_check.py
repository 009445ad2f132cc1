"""Protects the check of torch's version counters: they find nearly every change outside the guard, at no cost."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ckstore
from ckstore.background import staging
from ckstore.background.arena_layout import SPOTS_MAX
from ckstore.errors import CorruptError, SaverError
from support.fake_device import SlowDevice
from support.fake_saver import FakeSaver, step_without_hooks

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def store(quick_saver_store):
    return quick_saver_store


class Trainer:
    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(96, 700), nn.ReLU(), nn.Linear(700, 96))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.step = None
        self.train()

    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 96)).square().mean().backward()
        (self.step or self.optimizer.step)()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_unguarded_step_fails_the_commit(store, held, options):
    trainer = Trainer(**options)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    trainer.step = partial(step_without_hooks, trainer.optimizer)
    trainer.train()
    with pytest.raises(CorruptError, match="was changed between"):
        pending.result()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_guarded_steps_are_not_changes(store, options):
    trainer = Trainer(**options)
    store.attach(trainer.optimizer)
    for step in range(20):
        pending = store.commit_async(trainer.state(), step)
        trainer.train()
        assert pending.result().step == step


def test_parameter_changed_before_copy_fails_the_commit(store, held):
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    with torch.no_grad():
        trainer.model[2].weight[5, 7] += 1
    trainer.train()
    with pytest.raises(CorruptError, match=r"model\.2\.weight") as caught:
        pending.result()
    assert caught.value.path == ("model", "2.weight")
    saver = FakeSaver.started[-1]
    assert "staged" not in saver.calls
    # It waits for the slot, which is free after the saver has given up the first state.
    store.commit_async(trainer.state(), 2).result()
    assert saver.aborted == [1]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_weights_swapped_through_data_fail_the_commit(store, held, options):
    """Version counters miss it. Sampled bytes of each tensor differ."""
    trainer = Trainer(**options)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    trainer.model[2].weight.data.copy_(torch.randn(96, 700))
    with pytest.raises(CorruptError, match=r"model\.2\.weight"):
        pending.result()
    assert "staged" not in FakeSaver.started[-1].calls


ROWS = {
    "one row": (torch.float32, (700, 96), lambda data: data[333].fill_(1)),
    "two narrow rows": (torch.bfloat16, (2048, 32), lambda data: data[1001:1003].normal_()),
    "a row of a convolution": (torch.float32, (64, 32, 3, 3), lambda data: data[17].zero_()),
    "a row of a transposed matrix": (torch.float32, (96, 700), lambda data: data.t()[5].zero_()),
    "a column": (torch.float32, (4000, 8), lambda data: data[:, 3].add_(1)),
    "restarted entries": (
        torch.float64,
        (512, 16),
        lambda data: data.index_copy_(0, torch.tensor([3, 99]), data[:2].clone()),
    ),
}


@pytest.mark.parametrize(("dtype", "shape", "change"), ROWS.values(), ids=ROWS)
def test_rows_changed_through_data_fail_the_commit(store, held, dtype, shape, change):
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(2)]
    if change is ROWS["a row of a transposed matrix"][2]:
        weights = [nn.Parameter(torch.randn(shape[::-1], dtype=dtype).t()) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    store.attach(optimizer)
    pending = store.commit_async({"one": weights[0], "other": weights[1]}, 1)
    change(weights[1].data)
    with pytest.raises(CorruptError, match="other"):
        pending.result()


def test_large_tensors_are_sampled_and_small_ones_checked(store, held):
    large = nn.Parameter(torch.randn(2 * SPOTS_MAX, 8))
    small = nn.Parameter(torch.randn(1000, 8))
    optimizer = torch.optim.SGD([large, small], lr=0.1)
    store.attach(optimizer)
    pending = store.commit_async({"large": large, "small": small}, 1)
    large.data[5000:5010] += 1
    with pytest.raises(CorruptError, match="large"):
        pending.result()
    pending = store.commit_async({"large": large, "small": small}, 2)
    small.data[777] += 1
    with pytest.raises(CorruptError, match="small"):
        pending.result()


@pytest.mark.parametrize("name", ["codebook", "quantizer.embed", "vq", "rvq.layers.0", "Code_Book"])
def test_codebooks_are_copied_in_the_call(store, held, name):
    codebook, weight = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.randn(64, 8))
    optimizer = torch.optim.SGD([codebook, weight], lr=0.1)
    store.attach(optimizer)
    before = codebook.detach().clone()
    pending = store.commit_async({"model": {name: codebook, "weight": weight}}, 1)
    codebook.data[3:5] = 0
    assert pending.result().step == 1
    assert held.held == 1
    assert before.numpy().tobytes() in FakeSaver.started[-1].content(1)


def test_weights_swapped_after_copying_are_ignored(store):
    trainer = Trainer(fused=True)
    store.attach(trainer.optimizer)
    for step in range(20):
        pending = store.commit_async(trainer.state(), step)
        with store.guard(trainer.optimizer):
            trainer.model[2].weight.data.copy_(torch.randn(96, 700))
        assert pending.result().step == step


def test_commit_inside_a_guard_is_copied_in_the_call(store, held):
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    with store.guard(trainer.optimizer):
        pending = store.commit_async(trainer.state(), 1)
        assert pending.is_staged
        trainer.model[2].weight.data.zero_()
    assert pending.result().step == 1
    assert not store.commit_async(trainer.state(), 2).is_staged


def test_memory_moved_before_copy_fails_the_commit(store, held):
    """Values and counters do not change, but the memory to be copied now belongs to other objects."""
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    store.attach(optimizer)
    pending = store.commit_async({"w": weight}, 1)
    address = weight.data_ptr()
    weight.share_memory_()
    assert weight.data_ptr() != address
    with pytest.raises(CorruptError, match="share_memory_"):
        pending.result()


def test_failing_check_fails_the_commit_without_delay(store, held, monkeypatch):
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)

    def fail(storages):
        raise MemoryError("to compare with")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "versions_of", fail)
        trainer.train()
    with pytest.raises(MemoryError, match="to compare with"):
        pending.result()
    assert store.commit_async(trainer.state(), 2).result().step == 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_check_that_ends_a_copy_thread_fails_the_commit(store, held, monkeypatch, kind):
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1, policy=ckstore.Policy(staging_threads=1))

    def end_thread(storages):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(staging, "versions_of", end_thread)
        trainer.train()
    with pytest.raises(SaverError, match="the commit of step 1 was interrupted"):
        pending.result()
    assert store.commit_async(trainer.state(), 2).result().step == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_during_device_copies_pass_without_waiting(store, on_device, threads):
    """Work launched after the guard has returned is ordered after the copies, in any number of steps."""
    one, other = Trainer(foreach=True), Trainer(foreach=False)
    for trainer in (one, other):
        store.attach(trainer.optimizer)
    pending = store.commit_async([one.state(), other.state()], 1, policy=ckstore.Policy(staging_threads=threads))
    for trainer in (one, other, one, other):
        trainer.train()
    assert not pending.is_staged, "no step waited for the device"
    SlowDevice.may_copy.set()
    assert pending.result().step == 1


@pytest.fixture
def changed(store, on_device):
    """Return a trainer that changed a weight outside its guard, and its commit, which a device is still copying.

    An embedding with ``max_norm`` makes such a change in its forward pass.
    """
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    with torch.no_grad():
        trainer.model[2].weight[5, 7] += 1
    return trainer, pending


@pytest.mark.parametrize("is_guarded", [False, True], ids=["when all has come", "by the guard"])
def test_change_during_device_copies_is_found(changed, is_guarded):
    trainer, pending = changed
    if is_guarded:
        trainer.train()
    SlowDevice.may_copy.set()
    with pytest.raises(CorruptError, match="was changed between"):
        pending.result()
    assert not pending.is_staged


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_check_that_ends_a_device_thread_fails_the_commit(changed, store, monkeypatch, kind):
    trainer, pending = changed

    def end_thread(storages):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(staging, "versions_of", end_thread)
        SlowDevice.may_copy.set()
        with pytest.raises(SaverError, match="the commit of step 1 was interrupted"):
            pending.result()
    assert store.commit_async(trainer.state(), 2).result().step == 2


def test_interrupted_check_stops_the_step_and_is_retried(changed, monkeypatch):
    trainer, pending = changed
    versions_of = staging.versions_of

    def interrupted(storages):
        # Ctrl-C interrupts the main thread only. Copy threads may check at the same time.
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return versions_of(storages)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "versions_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.optimizer.step()
    SlowDevice.may_copy.set()
    with pytest.raises(CorruptError, match="was changed between"):
        pending.result()


def test_parameter_may_change_after_staging(store):
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    assert pending.wait_staged()
    with torch.no_grad():
        trainer.model[2].weight[5, 7] += 1
    assert pending.result().step == 1


def test_capture_warnings_go_to_the_saver(store):
    store.commit_async({"w": np.zeros(5_000_000)[::1000]}, 1)
    [warning] = FakeSaver.started[-1].head(1).warnings
    assert "w is a sparse view" in warning


def test_numpy_states_need_no_optimizer(store):
    state = {"a": np.arange(100_000), "b": [np.ones(5)]}
    wanted = [state["a"].tobytes(), state["b"][0].tobytes()]
    pending = store.commit_async(state, 1)
    state["a"].fill(0)
    assert pending.wait_staged()
    assert FakeSaver.started[-1].content(1) == wanted


def test_device_copies_are_complete_inside_a_guard(store, on_device):
    """A change inside the guard may use another stream than the one that waits for the copies."""
    trainer = Trainer(foreach=True)
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    waiting = threading.Timer(0.2, SlowDevice.may_copy.set)
    waiting.start()
    with store.guard(trainer.optimizer):
        assert SlowDevice.may_copy.is_set()
        with torch.no_grad():
            trainer.model[2].weight[5, 7] += 1
    waiting.join()
    assert pending.result().step == 1
