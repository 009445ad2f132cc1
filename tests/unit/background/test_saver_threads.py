"""Protects the thread limit of a saver's commits: its current priority sets it, whatever their policy allows."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ckstore.background import protocol
from ckstore.config import MIB, Policy
from support.saver_harness import equal, noise, restored, until
from support.served_saver import Gate
from support.synthetic_training import AdamRun, lossy_policy

LOOKS = 20
"""How many refused attempts a thread makes before the test checks the others."""


@pytest.fixture
def gate(served):
    """Admit as many threads as the test allows: at most one at a time, and none at first."""
    return Gate(served.priority)


@pytest.mark.parametrize("most", [1, 2])
def test_commit_proceeds_with_admitted_threads_only(served, most):
    gate = Gate(served.priority, most)
    state = noise(1, 24 * MIB)
    begun = served.begin(state, 1, policy=Policy(threads=4)).stage().finish()
    until(lambda: gate.asked.count(most - 1) > LOOKS, "a thread that asks for admission")
    assert set(gate.asked) == set(range(most))
    assert not {"Done", "Failed"} & set(begun.events)
    # Every admitted thread does the same work.
    gate.admitted.add(most - 1)
    begun.wait()
    assert set(gate.asked) == set(range(most))
    assert equal(restored(served.address), state)


def test_lossy_commit_respects_the_thread_limit(served, gate):
    training, policy = AdamRun(shape=(300, 300)), lossy_policy(threads=4)

    def all_lossy():
        """Train one step, and return only the tensors that are stored lossy."""
        state = training.train(1).state()
        moments = {name: state["optimizer"]["state"][0][name] for name in ("exp_avg", "exp_avg_sq")}
        optimizer = {"state": {0: moments}, "param_groups": state["optimizer"]["param_groups"]}
        return {"model": {"w": state["model"]["w"]}, "optimizer": optimizer}

    gate.admitted.add(0)
    served.commit(all_lossy(), 0, policy=policy)
    gate.admitted.clear()
    del gate.asked[:]
    begun = served.begin(all_lossy(), 1, policy=policy, parent=0).stage().finish()
    until(lambda: gate.asked.count(0) > LOOKS, "a thread that asks for admission")
    assert not {"Done", "Failed"} & set(begun.events)
    gate.open()
    receipt = begun.wait()
    assert receipt.chunks_lossy == receipt.chunks_new == 3


def test_base_reader_does_not_count(served, gate, monkeypatch):
    """It computes little. Counting it would leave a processor idle while a base is read."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    policy = Policy(base_cache="none")
    weights = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
    for step, thread_count in enumerate((1, 2)):
        begun = served.begin({"w": weights * np.float32(1 + step * 2**-12)}, step, policy=policy, parent_ticket=step)
        begun.stage().finish()
        until(
            lambda: all(gate.asked.count(index) > LOOKS for index in {0, *gate.asked}), "threads that ask for admission"
        )
        assert len(set(gate.asked)) == thread_count
        gate.admitted.update(gate.asked)
        receipt = begun.wait()
        gate.admitted.clear()
        del gate.asked[:]
    assert receipt.chunks_delta == 3


def test_hurried_saver_ignores_the_limit(served, gate):
    begun = served.begin(noise(1), 1).stage().finish()
    until(lambda: gate.asked.count(0) > LOOKS, "a thread that asks for admission")
    served.priority.thread_limit.maximum = None
    begun.wait()
    assert not gate.admitted
    served.hear(protocol.Done)
