"""Protects the threads that copy: they outlive what they are sent, do it, and end when they are told."""

from __future__ import annotations

import os
import queue
import threading
from functools import partial

import pytest

from ckstore.background.copying import CopyPool

pytestmark = pytest.mark.usefixtures("no_threads_left")


def test_a_thread_outlives_a_log_that_ends_it(monkeypatch):
    def ended(*_):
        raise SystemExit

    crew, done = CopyPool(1), threading.Event()
    monkeypatch.setattr("ckstore.background.copying.log_safely", ended)
    crew.send_one(ended)
    crew.send_one(done.set)
    assert done.wait(60)
    crew.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_thread_outlives_whatever_it_is_sent(quiet_log, kind):
    def ended():
        raise kind

    crew, done = CopyPool(1), threading.Event()
    crew.send_one(ended)
    crew.send_one(done.set)
    assert done.wait(60)
    crew.close()


def test_step_that_is_waited_for_begins_on_the_processor_of_who_waits_and_may_then_go_anywhere(crew, monkeypatch):
    moves, move, mine = [], os.sched_setaffinity, os.sched_getaffinity(0)

    def noted(thread, processors):
        moves.append((thread or threading.get_native_id(), set(processors)))
        move(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", noted)
    # The caller stays on one processor, and does not know.
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: mine)
    for processor in mine:
        moves.clear()
        move(0, {processor})
        try:
            ran_by = crew.run_on_caller_cpu(threading.get_native_id)
        finally:
            move(0, mine)
        assert moves == [(ran_by, {processor}), (ran_by, mine)]
        assert ran_by != threading.get_native_id()
    monkeypatch.undo()
    assert crew.run_on_caller_cpu(lambda: os.sched_getaffinity(0)) == mine


@pytest.mark.parametrize("problem", [MemoryError, PermissionError, ValueError])
def test_a_step_is_done_whatever_keeps_its_thread_from_being_moved(crew, monkeypatch, quiet_log, problem):
    move, me = os.sched_setaffinity, threading.get_native_id()

    def refuse(thread, processors):
        if threading.get_native_id() != me:
            raise problem
        move(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert crew.run_on_caller_cpu(lambda: 7) == 7
    monkeypatch.undo()
    assert crew.run_on_caller_cpu(lambda: os.sched_getaffinity(0)) == os.sched_getaffinity(0)


def test_where_one_more_thread_cannot_be_started_those_of_the_crew_see_a_step_through(crew, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    crew.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert crew.run_on_caller_cpu(lambda: threading.current_thread().name).startswith("ckstore-stage")


def test_ctrl_c_while_a_crew_is_closed_leaves_no_thread_behind(monkeypatch, no_threads_left):
    def interrupted(thread):
        raise KeyboardInterrupt

    crew = CopyPool(2)
    crew.start()
    crew.device_thread.start()
    crew.run_on_caller_cpu(lambda: None)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.close()


def test_a_step_that_a_closed_crew_is_to_see_through_leaves_no_thread_behind(no_threads_left):
    crew = CopyPool(2)
    crew.close()
    assert crew.run_on_caller_cpu(lambda: 7) == 7


def test_a_thread_that_ctrl_c_has_left_on_one_processor_is_let_go_by_the_next_step(crew, monkeypatch):
    mine = os.sched_getaffinity(0)
    crew.run_on_caller_cpu(lambda: None)
    with monkeypatch.context() as context:

        def interrupted(*_):
            raise KeyboardInterrupt

        context.setattr(CopyPool, "send_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.run_on_caller_cpu(lambda: None)
    assert crew.run_on_caller_cpu(lambda: os.sched_getaffinity(0)) == mine


def test_a_step_is_seen_through_where_threads_may_not_be_moved_or_started(crew, monkeypatch):
    def refuse(*_):
        raise PermissionError("sched_setaffinity")

    with monkeypatch.context() as context:
        context.setattr(os, "sched_setaffinity", refuse)
        assert crew.run_on_caller_cpu(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            crew.run_on_caller_cpu(lambda: 1 // 0)

    def refuse_to_start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    assert CopyPool(2).run_on_caller_cpu(lambda: 7) == 7


def test_work_that_comes_while_the_crew_is_closed_is_done(monkeypatch):
    done, closes = threading.Event(), []

    class Closing(queue.SimpleQueue):
        """Its crew is closed right before work is put into it, once."""

        def put(self, work):
            if work == done.set and not closes:
                closes.append(crew.close())
            super().put(work)

    with monkeypatch.context() as context:
        context.setattr(queue, "SimpleQueue", Closing)
        crew = CopyPool(2)
        crew.start()
        crew.send_one(done.set)
    assert done.wait(60)
    assert closes
    crew.close()


def test_a_thread_that_is_started_while_the_crew_is_closed_is_not_counted_on_later(crew, monkeypatch):
    start, closing = threading.Thread.start, threading.Thread(target=partial(crew.close, is_waited=False))

    def start_and_close(thread):
        start(thread)
        if thread is not closing and not closing.ident:
            start(closing)
            closing.join(0.2)

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", start_and_close)
        crew.start(1)
    closing.join()
    done = threading.Event()
    crew.send_one(done.set)
    assert done.wait(60)
