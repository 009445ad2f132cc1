"""Protects the guard: a background commit stores the state at ``commit_async``, whatever training does next.

The saver is a fake. Guarded memory is copied only when something waits for it, so a passing test was protected by the
guard and not by a fast copy.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import ckstore
from ckstore.background.optimizer_guard import OptimizerGuard
from ckstore.errors import CorruptError, UsageError
from support.fake_ranks import mesh_of, rank_of, sharded
from support.fake_saver import FakeSaver, step_without_hooks
from support.guarded_trainer import Trainer, commit_and
from support.saver_harness import until

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def store(quick_saver_store):
    return quick_saver_store


ADAMS = {
    "for each": {"foreach": True},
    "fused": {"fused": True},
    "one by one": {"foreach": False, "fused": False},
}


@pytest.fixture
def checked_store(open_fake_store):
    """A store whose policy has ``debug_guard``."""
    return open_fake_store(debug_guard=True)


@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_step_after_commit_does_not_change_it(store, held, options):
    trainer = Trainer(**options)
    store.attach(trainer.optimizer)
    for step in range(3):
        wanted, staged = commit_and(store, trainer.state(), trainer.train, step)
        assert staged == wanted
    assert held.held == 3


@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_unguarded_step_does_change_it(store, held, monkeypatch, options):
    trainer = Trainer(**options)
    store.attach(trainer.optimizer)
    trainer.step = partial(step_without_hooks, trainer.optimizer)
    # Version counters and sampled words would also find the change. They have tests of their own.
    monkeypatch.setattr("ckstore.background.copying.HostCopy.sampled_change", lambda copy: None)
    monkeypatch.setattr("ckstore.background.staging.versions_of", lambda storages: [0] * len(storages))
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged != wanted
    assert staged[-1] == wanted[-1], "no optimizer owns the average, so it was copied in the call"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch warns about its own code.
def test_compiled_step_does_not_change_it(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    trainer.step = torch.compile(trainer.optimizer.step, backend="eager")
    for step in range(3):
        wanted, staged = commit_and(store, trainer.state(), trainer.train, step)
        assert staged == wanted
    assert held.held == 3


def test_unattached_optimizer_is_copied_in_the_call(store, held):
    trainer = Trainer()
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 0


def test_buffers_are_copied_in_the_call(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    before = trainer.model[1].running_mean.clone()

    def forward():
        trainer.model(torch.randn(8, 96))

    wanted, staged = commit_and(store, trainer.state(), forward)
    assert staged == wanted
    assert not torch.equal(before, trainer.model[1].running_mean)
    assert held.held == 1


def test_gradients_may_accumulate_before_step(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)

    def accumulate():
        for _ in range(4):
            trainer.backward()
        trainer.optimizer.step()

    state = {**trainer.state(), "gradients": [each.grad for each in trainer.model.parameters()]}
    wanted, staged = commit_and(store, state, accumulate)
    assert staged == wanted


def test_two_optimizers_guard_each_other(store, held):
    one, other = Trainer(), Trainer(torch.optim.SGD, lr=0.1, momentum=0.9)
    store.attach(one.optimizer)
    store.attach(other.optimizer)
    for steps in ((one.train, other.train), (other.train, one.train), (other.train,)):
        state = {"a": one.state(), "b": other.state()}
        wanted, staged = commit_and(store, state, lambda steps=steps: [step() for step in steps])
        assert staged == wanted


def test_only_attached_optimizer_is_guarded(store, held):
    one, other = Trainer(), Trainer(torch.optim.SGD, lr=0.1, momentum=0.9)
    store.attach(one.optimizer)
    wanted, staged = commit_and(store, {"a": one.state(), "b": other.state()}, lambda: (other.train(), one.train()))
    assert staged == wanted


def test_unowned_parameter_may_change_after_the_call(store, held):
    trainer = Trainer()
    frozen = nn.Parameter(torch.randn(300, 300), requires_grad=False)
    store.attach(trainer.optimizer)

    def change():
        with torch.no_grad():
            frozen.add_(1)
        trainer.train()

    wanted, staged = commit_and(store, {**trainer.state(), "frozen": frozen}, change)
    assert staged == wanted


def test_parameter_with_shared_memory_is_copied_in_the_call(store, held):
    flat = torch.randn(1 << 16)
    parameter = nn.Parameter(flat[: 1 << 15])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    store.attach(optimizer)

    def change():
        flat[-1] += 1
        with torch.no_grad():
            parameter.add_(1)

    wanted, staged = commit_and(store, {"parameter": parameter, "flat": flat}, change)
    assert staged == wanted
    assert held.held == 0


def test_gaps_between_elements_are_copied_in_the_call(store, held):
    first, middle, last = torch.randn(500, 3 * 64).chunk(3, dim=1)
    optimizer = torch.optim.SGD([nn.Parameter(first), nn.Parameter(last)], lr=0.1)
    store.attach(optimizer)
    wanted, staged = commit_and(store, {"a": first, "b": middle, "c": last}, lambda: middle.fill_(7.0))
    assert (staged, held.held) == (wanted, 0)


def test_flat_parameters_are_guarded_with_padding(store, held):
    flat = torch.randn(3 << 16)
    parameters = [nn.Parameter(flat[begin : begin + 60_000]) for begin in range(0, flat.numel(), 1 << 16)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    store.attach(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    wanted, staged = commit_and(store, parameters, optimizer.step)
    assert staged == wanted
    assert held.held == 1


def test_recreated_optimizer_state_is_guarded(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_guard_context_protects_any_change(store, held):
    trainer = Trainer()

    def change():
        with store.guard(trainer.optimizer), torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)

    with store.guard(trainer.optimizer):
        trainer.optimizer.step()
    wanted, staged = commit_and(store, trainer.state(), change)
    assert staged == wanted
    assert held.held == 1


def test_attaching_twice_guards_once(store, held):
    trainer = Trainer()
    for _ in range(3):
        store.attach(trainer.optimizer)
    assert len(trainer.optimizer._optimizer_step_pre_hooks) == 1


def test_wrapped_optimizer_is_guarded(store, held):
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    trainer = Trainer()
    store.attach(Wrapper(trainer.optimizer))
    wanted, staged = commit_and(store, trainer.state(), trainer.train)
    assert staged == wanted
    assert held.held == 1


def test_scheduler_keeps_the_guard(store, held):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.9**step)

    def step():
        trainer.train()
        scheduler.step()

    wanted, staged = commit_and(store, {**trainer.state(), "scheduler": scheduler.state_dict()}, step)
    assert staged == wanted


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2), {"state": {}, "param_groups": []}])
def test_attaching_a_non_optimizer_is_refused(store, thing):
    with pytest.raises(UsageError, match="is not an optimizer"):
        store.attach(thing)


def test_optimizer_without_hooks_is_refused_with_advice(store):
    class Bare:
        def __init__(self):
            self.param_groups, self.state = [], {}

    with pytest.raises(UsageError, match="has no hooks before its steps"):
        store.attach(Bare())


def test_optimizers_are_not_kept_alive(store):
    trainer = Trainer()
    store.attach(trainer.optimizer)
    gone = weakref.ref(trainer.optimizer)
    del trainer
    gc.collect()
    assert gone() is None


def test_closed_store_stops_guarding(savers, folder):
    trainer = Trainer()
    store = ckstore.open(folder)
    store.attach(trainer.optimizer)
    store.commit_async(trainer.state(), 1)
    store.close()
    assert not trainer.optimizer._optimizer_step_pre_hooks
    assert not trainer.optimizer._optimizer_step_post_hooks
    trainer.train()


def test_dropped_store_does_not_delay_a_step(savers, folder):
    trainer = Trainer()
    store = ckstore.open(folder)
    store.attach(trainer.optimizer)
    store.commit_async(trainer.state(), 1).result()
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    trainer.train()


def test_dropped_stores_leave_one_pair_of_hooks(savers, folder):
    trainer = Trainer()
    optimizer = trainer.optimizer

    def hooks():
        return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)

    before = hooks()
    with ckstore.open(folder, run="other") as other:
        other.attach(optimizer)
        for _ in range(5):
            store = ckstore.open(folder)
            store.attach(optimizer)
            assert hooks() == (before[0] + 2, before[1] + 2)
            trainer.train()
            del store
            gc.collect()
        trainer.train()
    with ckstore.open(folder) as store:
        store.attach(optimizer)
        assert hooks() == (before[0] + 1, before[1] + 1)
    assert hooks() == before


# debug_guard


def test_check_passes_for_guarded_changes(checked_store, held):
    trainer = Trainer()
    checked_store.attach(trainer.optimizer)
    for step in range(3):
        wanted, staged = commit_and(checked_store, trainer.state(), trainer.train, step)
        assert staged == wanted


def commit_and_change_unseen(store, trainer, tensor):
    """Commit, then change one copied element outside the guard and without changing a version counter."""
    store.attach(trainer.optimizer)
    pending = store.commit_async(trainer.state(), 1)
    (saver,) = FakeSaver.started
    until(lambda: saver.is_copied(1), "the copies")
    tensor.data[5] += 1
    trainer.train()
    return pending, saver


def test_check_names_the_changed_parameter(checked_store):
    trainer = Trainer()
    pending, saver = commit_and_change_unseen(checked_store, trainer, trainer.model[3].weight)
    with pytest.raises(CorruptError, match=r"model\.3\.weight") as caught:
        pending.result()
    assert caught.value.path == ("model", "3.weight")
    assert "staged" not in saver.calls
    assert saver.aborted == [1]
    checked_store.commit_async(trainer.state(), 2).result()


def test_failed_check_is_raised_by_the_next_commit(checked_store):
    trainer = Trainer()
    commit_and_change_unseen(checked_store, trainer, trainer.model[0].bias)
    with pytest.raises(CorruptError, match=r"step 1 failed in the background.*changed between"):
        checked_store.commit_async(trainer.state(), 2)
    checked_store.commit_async(trainer.state(), 2).result()


def test_checked_commit_is_staged_without_a_step(checked_store):
    trainer = Trainer()
    checked_store.attach(trainer.optimizer)
    pending = checked_store.commit_async(trainer.state(), 1)
    assert not pending.is_staged
    assert pending.result().step == 1


def test_shards_of_dtensors_are_guarded():
    with rank_of(1, 2):
        weight = torch.nn.Parameter(sharded(torch.randn(8, 4), mesh_of(2), [Shard(0)]))
        optimizer = torch.optim.AdamW([weight])
        weight.grad = sharded(torch.ones(8, 4), weight.device_mesh, [Shard(0)])
        optimizer.step()
        guard = OptimizerGuard(lambda: None)
        guard.attach(optimizer)
        moments = optimizer.state[weight]
        owned = [weight._local_tensor, moments["exp_avg"]._local_tensor, moments["exp_avg_sq"]._local_tensor]
        spans = guard.spans()
        for tensor in owned:
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert any(lo <= begin and end <= hi for lo, hi in spans)
        guard.release()
