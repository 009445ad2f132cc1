"""Protects threads that run one step on many chunks: the thread limit holds, and waiting threads block no other."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ckstore import concurrency
from ckstore.background.copying import CopyPool
from ckstore.concurrency import ThreadLimit, Turns, run_in_turns, run_uninterrupted, start_thread

SECONDS_MAX = 20


def admitting(most):
    thread_limit = ThreadLimit()
    thread_limit.maximum = most
    return thread_limit


@pytest.mark.parametrize(("most", "admitted"), [(None, [0, 1, 2]), (2, [0, 1]), (1, [0]), (0, [0]), (-3, [0])])
def test_only_threads_within_the_limit_may_begin(most, admitted):
    assert [index for index in range(3) if admitting(most).allows(index)] == admitted


def test_thread_over_the_limit_takes_no_step():
    seen = []
    run_in_turns(
        40,
        4,
        lambda index, thread: seen.append((index, thread)),
        Turns(),
        on_failure=lambda: None,
        may_begin=admitting(1).allows,
    )
    assert seen == [(index, 0) for index in range(40)]


def test_threads_join_when_the_limit_rises():
    thread_limit, both = admitting(1), threading.Barrier(2)
    threads = set()

    def step(index, thread):
        threads.add(thread)
        if index == 1:
            thread_limit.maximum = None
        if index >= 2:
            # Passes only when two threads work at the same time.
            both.wait(SECONDS_MAX)

    run_in_turns(4, 2, step, Turns(), on_failure=both.abort, may_begin=thread_limit.allows)
    assert threads == {0, 1}


def test_waiting_threads_end_after_a_failure():
    failures = []

    def step(index, thread):
        raise OSError("no space")

    def fail():
        failures.append("reported")

    before = threading.active_count()
    with pytest.raises(OSError, match="no space"):
        run_in_turns(5, 3, step, Turns(), on_failure=fail, may_begin=admitting(1).allows)
    assert failures == ["reported"]
    assert threading.active_count() == before


def test_lowered_limit_does_not_block_waiting_turns():
    # A thread that has begun finishes, whatever the limit becomes, because others wait for its turn.
    thread_limit, turns, order = admitting(None), Turns(), []
    begun = threading.Barrier(2)

    def step(index, thread):
        if index < 2:
            begun.wait(SECONDS_MAX)
        thread_limit.maximum = 1
        with turns.turn(index):
            order.append(index)

    run_in_turns(10, 2, step, turns, on_failure=begun.abort, may_begin=thread_limit.allows)
    assert order == list(range(10))


def uninterrupted(step):
    run_uninterrupted(step, on_interrupt=lambda error: None)


def in_turns(step):
    run_in_turns(3, 2, lambda index, thread: step(), Turns(), on_failure=lambda: None)


@pytest.mark.parametrize("run", [uninterrupted, in_turns])
def test_handled_failure_keeps_no_caller_objects(run):
    class Held:
        """An object that a caller holds."""

    def fail():
        raise ValueError("this one")

    def attempt():
        held = Held()
        try:
            run(fail)
        except ValueError:
            return weakref.ref(held)
        raise AssertionError("it has not failed")

    gc.collect()
    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()


def test_step_uses_the_thread_of_start_thread(monkeypatch):
    assert run_uninterrupted(threading.get_ident, on_interrupt=lambda error: None) != threading.get_ident()
    monkeypatch.setattr(concurrency, "call_on_new_thread", lambda work: work())
    assert run_uninterrupted(threading.get_ident, on_interrupt=lambda error: None) == threading.get_ident()


def test_ctrl_c_in_thread_start_is_keyboard_interrupt(monkeypatch):
    def start(_):
        # The error of the lock in Python's own event, when it is interrupted before it was acquired.
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threading.Thread, "start", start)
    crew = CopyPool(1)
    calls = [
        lambda: crew.send(lambda: None),
        lambda: crew.run_on_caller_cpu(lambda: None),
        lambda: run_uninterrupted(int, on_interrupt=lambda error: None),
    ]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
    monkeypatch.undo()
    assert crew.run_and_wait(lambda: 3) == 3
    crew.close()


def test_failed_thread_start_has_its_own_error(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="start new thread"):
        start_thread(threading.Thread())
    called = []
    try:
        raise OSError("handled by the sender")
    except OSError:
        # Python sets the handled exception as context of a new one. That does not make it a Ctrl-C.
        with pytest.raises(RuntimeError, match="start new thread"):
            start_thread(threading.Thread())
        CopyPool(1).send(lambda: called.append("here"))
    assert called == ["here"]
