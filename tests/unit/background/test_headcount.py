"""No more threads of a saver's commits work than its priority admits at the moment, whatever their policy says."""

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
"""How often a thread asks in vain before it is judged what the others have done."""


@pytest.fixture
def gate(served):
    """Admits what a test lets in: at most one thread at a time, and none at first."""
    return Gate(served.priority)


@pytest.mark.parametrize("most", [1, 2])
def test_commit_goes_on_with_no_thread_but_those_that_may_begin(served, most):
    gate = Gate(served.priority, most)
    state = noise(1, 24 * MIB)
    begun = served.begin(state, 1, policy=Policy(threads=4)).stage().finish()
    until(lambda: gate.asked.count(most - 1) > LOOKS, "a thread that asks")
    assert set(gate.asked) == set(range(most))
    assert not {"Done", "Failed"} & set(begun.events)
    # The last of those that may is as good as the first.
    gate.admitted.add(most - 1)
    begun.wait()
    assert set(gate.asked) == set(range(most))
    assert equal(restored(served.address), state)


def test_commit_with_a_loss_waits_for_the_headcount_too(served, gate):
    training, policy = AdamRun(shape=(300, 300)), lossy_policy(threads=4)

    def all_lossy():
        """Return what is stored with a loss of the next state, and nothing that is stored exactly first."""
        state = training.train(1).state()
        moments = {name: state["optimizer"]["state"][0][name] for name in ("exp_avg", "exp_avg_sq")}
        optimizer = {"state": {0: moments}, "param_groups": state["optimizer"]["param_groups"]}
        return {"model": {"w": state["model"]["w"]}, "optimizer": optimizer}

    gate.admitted.add(0)
    served.commit(all_lossy(), 0, policy=policy)
    gate.admitted.clear()
    del gate.asked[:]
    begun = served.begin(all_lossy(), 1, policy=policy, parent=0).stage().finish()
    until(lambda: gate.asked.count(0) > LOOKS, "a thread that asks")
    assert not {"Done", "Failed"} & set(begun.events)
    gate.open()
    receipt = begun.wait()
    assert receipt.chunks_lossy == receipt.chunks_new == 3


def test_thread_that_waits_for_bases_comes_on_top(served, gate, monkeypatch):
    """It computes little: with one thread less the processor would stand still while a base is read."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    policy = Policy(base_cache="none")
    weights = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
    for step, thread_count in enumerate((1, 2)):
        begun = served.begin({"w": weights * np.float32(1 + step * 2**-12)}, step, policy=policy, parent_ticket=step)
        begun.stage().finish()
        until(lambda: all(gate.asked.count(index) > LOOKS for index in {0, *gate.asked}), "threads that ask")
        assert len(set(gate.asked)) == thread_count
        gate.admitted.update(gate.asked)
        receipt = begun.wait()
        gate.admitted.clear()
        del gate.asked[:]
    assert receipt.chunks_delta == 3


def test_saver_in_a_hurry_asks_nobody(served, gate):
    begun = served.begin(noise(1), 1).stage().finish()
    until(lambda: gate.asked.count(0) > LOOKS, "a thread that asks")
    served.priority.thread_limit.maximum = None
    begun.wait()
    assert not gate.admitted
    served.hear(protocol.Done)
