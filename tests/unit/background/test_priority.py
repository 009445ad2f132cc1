"""The saver gives way while training goes on, and not while somebody waits for it, or when the trainer is dead."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

import ckstore
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.saver import client
from ckstore.saver.priority import NICE_MAX, Priority
from support.saver_desk import SECONDS_MAX, Desk, noise, stats_of, until

NICE = 7
START = os.getpriority(os.PRIO_PROCESS, 0)
LOW = min(NICE_MAX, START + NICE)

raises_priority = pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")


def niceness_of(pid):
    """Return the niceness of every thread of a process."""
    # The 19th field.
    return {int(nice) for nice in stats_of(pid, 16)}


@pytest.fixture
def desk(address):
    found = Desk(address, nice=NICE)
    yield found
    found.close()


@raises_priority
def test_saver_has_its_full_priority_while_somebody_waits_for_what_it_does(desk):
    desk.saver.wait_ready()
    until(lambda: niceness_of(desk.saver.pid) == {LOW}, "a saver that gives way")
    handed = desk.begin(noise(1, 3 * MIB), 1).stage()
    waiting = (handed.free, SECONDS_MAX, "end a test")
    waiter = threading.Thread(target=desk.saver.wait, args=waiting, kwargs={"is_urgent": True})
    waiter.start()
    until(lambda: niceness_of(desk.saver.pid) == {START}, "a saver that hurries")
    handed.finish().wait()
    waiter.join()
    until(lambda: niceness_of(desk.saver.pid) == {LOW}, "a saver that gives way again")


def policies_of(pid):
    """Return the scheduling policy of the thread that listens, and those of all others; these may end meanwhile."""
    others = set()
    for task in {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}:
        with contextlib.suppress(ProcessLookupError):
            others.add(os.sched_getscheduler(task))
    return os.sched_getscheduler(pid), others


@raises_priority
def test_saver_stands_aside_before_a_state_comes_and_while_it_is_copied(desk):
    desk.saver.wait_ready()
    pid = desk.saver.pid
    until(lambda: policies_of(pid) == (os.SCHED_OTHER, {os.SCHED_IDLE}), "a saver that stands aside")
    handed = desk.begin(noise(1, 8 * MIB), 1).stage(1)
    assert desk.saver.wait(handed.began, SECONDS_MAX, "begin")
    # The lease's thread, by whose beats others judge whether the saver lives, is awake.
    both = (os.SCHED_OTHER, {os.SCHED_IDLE, os.SCHED_OTHER})
    assert policies_of(pid) == both
    assert niceness_of(pid) == {LOW}
    handed.stage().finish().wait()
    until(lambda: policies_of(pid) == both, "a saver that stands aside again")
    until(lambda: awake_count(pid) == 2, "only the one that listens, and the lease's, awake")


def awake_count(pid):
    """Return how many threads of a process are in no idle class."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    with contextlib.suppress(ProcessLookupError):
        return sum(os.sched_getscheduler(thread) == os.SCHED_OTHER for thread in threads)
    return -1


@raises_priority
def test_saver_that_is_waited_for_does_not_stand_aside(desk):
    desk.saver.wait_ready()
    handed = desk.begin(noise(1, 8 * MIB), 1).stage(1)
    waiter = threading.Thread(
        target=desk.saver.wait, args=(handed.free, SECONDS_MAX, "end a test"), kwargs={"is_urgent": True}
    )
    waiter.start()
    until(lambda: niceness_of(desk.saver.pid) == {START}, "a saver that hurries")
    until(lambda: policies_of(desk.saver.pid)[1] == {os.SCHED_OTHER}, "a saver that stands aside no more")
    handed.stage().finish().wait()
    waiter.join()


def test_who_may_not_come_back_or_need_not_give_way_never_stands_aside(monkeypatch):
    told = []

    def note(thread, policy, _):
        told.append(policy)
        if policy == os.SCHED_OTHER:
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(os, "sched_setscheduler", note)
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    Priority(0).stand_aside()
    assert told == []
    priority = Priority(NICE)
    priority.stand_aside()
    assert told == [os.SCHED_IDLE, os.SCHED_OTHER], "one thread that sleeps was asked"
    priority.hurry()
    priority.stand_aside()
    assert len(told) == 2


def test_nothing_is_done_twice(monkeypatch):
    told = []
    monkeypatch.setattr(os, "setpriority", lambda *facts: told.append(facts))
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    priority = Priority(NICE)
    priority.give_way()
    count = len(told)
    priority.give_way()
    assert len(told) == count > 0


def test_nothing_else_makes_a_saver_hurry(desk):
    """A trainer that only makes sure that its state is staged, or looks whether it is durable, trains on."""
    desk.saver.wait_ready()
    handed = desk.begin(noise(1, 3 * MIB), 1).stage()
    assert not desk.saver.wait(handed.free, 0.2, "end a test")
    assert not desk.saver.wait(handed.free, 0, "end a test", is_urgent=True)
    assert niceness_of(desk.saver.pid) == {LOW}
    handed.finish().wait()


@raises_priority
def test_results_and_slots_are_waited_for_urgently(folder, monkeypatch):
    said = []
    say = client.Saver._say

    def note(self, message, **options):
        said.append(type(message).__name__)
        return say(self, message, **options)

    monkeypatch.setattr(client.Saver, "_say", note)
    with ckstore.open(folder) as store:
        pending = store.commit_async(noise(1, 24 * MIB), 1)
        pending.wait_staged()
        assert "Hurry" not in said
        pending.result()
        assert "Hurry" in said
        del said[:]
        for step in (2, 3, 4):
            store.commit_async(noise(step, 24 * MIB), step)
        assert "Hurry" in said


def test_thread_that_is_started_meanwhile_is_not_left_out(monkeypatch):
    """Whoever starts it may not have had its turn yet, and hands down what it has."""
    told, is_over = [], threading.Event()
    late = threading.Thread(target=is_over.wait)

    def note(which, thread, nice):
        if not told:
            late.start()
        told.append(thread)

    monkeypatch.setattr(os, "setpriority", note)
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    Priority(NICE).give_way()
    is_over.set()
    late.join()
    assert late.native_id in told


def test_what_the_system_refuses_is_left(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    priority = Priority(NICE)
    priority.give_way()
    priority.hurry()


@pytest.mark.parametrize("error", [SaverError, MemoryError, OSError])
def test_hurry_that_cannot_be_said_is_no_error_of_its_own(desk, monkeypatch, error):
    handed = desk.begin(noise(1, 3 * MIB), 1)

    def fail(message, **_):
        raise error("nobody listens")

    monkeypatch.setattr(desk.saver, "_say", fail)
    assert not desk.saver.wait(handed.free, 0.05, "end a test", is_urgent=True)
    monkeypatch.undo()
