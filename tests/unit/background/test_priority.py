"""Protects the priority of a saver's process: what it requests from the system, and what the system may refuse.

``test_hurry.py`` tests the level during training and waits. ``tests/integration/background`` has tests with a real
process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckstore.background.saver.server import Priority
from support.fake_saver import FakeSaver
from support.saver_harness import noise

NICE = 7


@pytest.fixture
def asked(monkeypatch):
    """Record the niceness and scheduling class that are requested for threads, without setting them."""
    found = []
    monkeypatch.setattr(os, "setpriority", lambda which, thread, nice: found.append((thread, nice)))
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, policy, _: found.append((thread, policy)))
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    return found


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("processors", "most"), [(1, 1), (2, 1), (8, 7)])
def test_low_priority_saver_leaves_one_processor(monkeypatch, processors, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    priority = Priority(NICE)
    priority.use_low_priority()
    assert priority.thread_limit.maximum == most
    priority.use_full_priority()
    assert priority.thread_limit.maximum is None
    priority.use_idle_class()
    assert priority.thread_limit.maximum == most
    careless = Priority(0)
    careless.use_low_priority()
    assert careless.thread_limit.maximum is None


def test_priority_that_cannot_be_raised_is_not_lowered_to_idle(asked, monkeypatch):
    policies = []

    def note(thread, policy, _):
        policies.append(policy)
        if policy == os.SCHED_OTHER:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", note)
    Priority(0).use_idle_class()
    assert policies == []
    priority = Priority(NICE)
    priority.use_idle_class()
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER], "one sleeping thread was tried"
    priority.use_full_priority()
    priority.use_idle_class()
    assert len(policies) == 2


def test_unchanged_priority_makes_no_system_call(asked):
    priority = Priority(NICE)
    priority.use_low_priority()
    count = len(asked)
    priority.use_low_priority()
    assert len(asked) == count > 0


def test_thread_started_meanwhile_gets_the_priority(asked, monkeypatch):
    """Its starting thread may not have run yet, and passes on its own priority."""
    policies, is_over = [], threading.Event()
    late = threading.Thread(target=is_over.wait)

    def note(which, thread, nice):
        if not policies:
            late.start()
        policies.append(thread)

    monkeypatch.setattr(os, "setpriority", note)
    Priority(NICE).use_low_priority()
    is_over.set()
    late.join()
    assert late.native_id in policies


def test_refused_priority_change_is_ignored(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    priority = Priority(NICE)
    priority.use_low_priority()
    priority.use_full_priority()


# The trainer's side: which waits hurry the saver


class Listening(FakeSaver):
    """Record which waits are urgent."""

    def wait(self, event, timeout, doing, *, is_urgent=False):
        if is_urgent and (timeout is None or timeout > 0):
            self.calls.append("hurry")
        return super().wait(event, timeout, doing)


def test_only_waits_for_results_and_slots_are_urgent(fake_saver_store, savers, monkeypatch):
    monkeypatch.setattr("ckstore.background.commits.Saver", Listening)
    fake_saver_store.prewarm(noise(1))
    saver = savers[-1]
    saver.is_quick = False
    pending = fake_saver_store.commit_async(noise(1), 1)
    pending.wait_staged()
    with pytest.raises(TimeoutError):
        pending.result(timeout=0)
    assert "hurry" not in saver.calls, "staging waits and progress checks are not urgent"
    result = threading.Thread(target=pending.result)
    result.start()
    result.join(0.05)
    saver.finish(1)
    result.join()
    assert saver.calls.count("hurry") == 1
    fake_saver_store.commit_async(noise(2), 2)
    third = threading.Thread(target=fake_saver_store.commit_async, args=(noise(3), 3))
    third.start()
    third.join(0.05)
    saver.finish(2)
    third.join()
    assert saver.calls.count("hurry") > 1, "waiting for a slot is urgent too"
