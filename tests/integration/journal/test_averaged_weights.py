"""Protects ``replayed=``: what the loop makes after each step is not stored; a restore makes it again and proves it."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.errors import ReplayError, UsageError
from support.journaled_training import JournaledTraining, bits


class Averaged(JournaledTraining):
    """A training with averaged weights."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(5, 800)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.decay = 0.9
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=self.average)
        self.update()

    @property
    def state(self):
        return {**super().state, "ema": self.ema}

    def average(self, averaged, current, count):
        torch._foreach_lerp_(averaged, current, 1 - self.decay)

    def update(self, step=0):
        self.ema.update_parameters(self.model)

    def train(self, step):
        super().train(step)
        self.update()


def run(path, steps, *, replayed="ema.*", **options):
    training, receipts = Averaged(), []
    with ckstore.open(path) as store:
        store.journal(training.optimizer, replayed=replayed, **options)
        for step in steps:
            training.train(step)
            receipts.append(store.commit_async(training.state, step).result())
            training.expected[step] = bits(training.state)
    return training, receipts


def test_averaged_weights_are_made_again_after_each_step(tmp_path, caplog):
    training, receipts = run(tmp_path / "store", range(1, 5))
    _, stored = run(tmp_path / "other", range(1, 5), replayed=())
    assert [receipt.point for receipt in receipts] == [0, 2, 3, 4]
    nbytes = sum(tensor.nbytes for tensor in training.ema.parameters())
    assert receipts[-1].bytes_written < stored[-1].bytes_written - nbytes // 2
    for check in ("each", "last"):
        for step, expected in training.expected.items():
            other, seen = Averaged(), []
            with ckstore.open(tmp_path / "store", create=False) as store:
                store.journal(other.optimizer, replayed=["ema.*"])

                def after_step(step, other=other, seen=seen):
                    other.update()
                    seen.append(step)

                store.restore(step, into=other.state, after_step=after_step, replay_check=check)
                assert bits(other.state) == expected
                assert seen == list(range(2, step + 1))
    # Another process may make other averages: its points need its own keyframe.
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(other.optimizer, replayed="ema.*")
        store.restore(into=other.state, after_step=other.update)
        other.decay = 0.5
        for step in (5, 6):
            other.train(step)
            assert bool(store.commit_async(other.state, step).result().point) == (step == 6)
    again = Averaged()
    again.decay = 0.5
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(again.optimizer)
        store.restore(into=again.state, after_step=again.update)
    assert bits(again.state) == bits(other.state)
    assert not caplog.records


def test_a_restore_without_the_function_or_with_another_one_says_what_to_pass(tmp_path):
    training, _ = run(tmp_path / "store", range(1, 4))
    other = Averaged()
    with ckstore.open(tmp_path / "store", create=False) as store:
        for arguments in ({}, {"after_step": other.update}):
            with pytest.raises(UsageError, match=r"ema\.\S+ is made by the training loop.*into=state, after_step="):
                store.restore(3, **arguments)
        store.journal(other.optimizer)
        for ref in (3, None):
            with pytest.raises(UsageError, match=r"ema\.\S+ is made by the training loop.*after_step="):
                store.restore(ref, into=other.state)
        with pytest.raises(ReplayError, match=r"ema\.\S+ has other bytes.*step 2.*after_step="):
            store.restore(3, into=other.state, after_step=lambda step: None)
        with pytest.raises(ReplayError, match=r"model\.\S+ has other bytes.*No fact of the environment differs"):
            store.restore(3, into=other.state, after_step=lambda step: other.model.weight.data.zero_())
        store.restore(1, into=other.state)
        assert bits(other.state) == training.expected[1]
        store.restore(3, into=other.state, after_step=other.update)
        assert bits(other.state) == training.expected[3]


def test_several_steps_in_a_commit_store_the_whole_state(tmp_path, caplog):
    training = Averaged()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer, replayed=["ema.*"])
        for step in range(1, 4):
            training.train(2 * step)
            training.train(2 * step + 1)
            assert not store.commit_async(training.state, step).result().point
    assert [record.message.count("commit after each step") for record in caplog.records] == [1]


def test_globs_are_checked(tmp_path):
    training = Averaged()
    with ckstore.open(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="a glob or a list"):
            store.journal(training.optimizer, replayed=[3])
        store.journal(training.optimizer, replayed=("ema.*",))
        with pytest.raises(UsageError, match="first call only"):
            store.journal(replayed="other.*")
