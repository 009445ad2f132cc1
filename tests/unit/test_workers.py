"""Threads that run one step on many chunks: how many may begin, and that those who may not hold up nobody."""

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
def test_threads_beyond_the_headcount_may_not_begin_and_the_first_always_may(most, admitted):
    assert [index for index in range(3) if admitting(most).allows(index)] == admitted


def test_no_thread_beyond_the_headcount_takes_a_step():
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


def test_threads_join_in_as_soon_as_they_may():
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


def test_threads_that_may_not_begin_do_not_outlast_a_failure():
    failures = []

    def step(index, thread):
        raise OSError("no space")

    def fail():
        failures.append("told")

    before = threading.active_count()
    with pytest.raises(OSError, match="no space"):
        run_in_turns(5, 3, step, Turns(), on_failure=fail, may_begin=admitting(1).allows)
    assert failures == ["told"]
    assert threading.active_count() == before


def test_a_thread_that_must_stop_halfway_through_the_work_lets_those_end_who_wait_for_its_turn():
    # Who has begun goes on to its end, whatever the thread limit says meanwhile: its turn is waited for.
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


def aside(step):
    run_uninterrupted(step, on_interrupt=lambda error: None)


def in_turns(step):
    run_in_turns(3, 2, lambda index, thread: step(), Turns(), on_failure=lambda: None)


@pytest.mark.parametrize("run", [aside, in_turns])
def test_a_failure_that_is_dealt_with_keeps_nothing_of_its_callers(run):
    class Held:
        """What a caller has."""

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


def test_a_step_aside_runs_on_the_thread_that_start_thread_gives_it(monkeypatch):
    assert run_uninterrupted(threading.get_ident, on_interrupt=lambda error: None) != threading.get_ident()
    monkeypatch.setattr(concurrency, "call_on_new_thread", lambda work: work())
    assert run_uninterrupted(threading.get_ident, on_interrupt=lambda error: None) == threading.get_ident()


def test_ctrl_c_is_raised_as_what_it_is_whatever_python_makes_of_it_while_a_thread_begins(monkeypatch):
    def start(_):
        # As the lock of Python's own event does when it was interrupted before it had been taken.
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


def test_no_room_for_a_thread_is_an_error_of_its_own(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="start new thread"):
        start_thread(threading.Thread())
    called = []
    try:
        raise OSError("dealt with by whoever sends")
    except OSError:
        # Python makes what is being handled the context of whatever is raised: that is no Ctrl-C.
        with pytest.raises(RuntimeError, match="start new thread"):
            start_thread(threading.Thread())
        CopyPool(1).send(lambda: called.append("here"))
    assert called == ["here"]
