"""Protects the threads of a ``CopyPool``: they survive errors, run all their work, and end on close."""

from __future__ import annotations

import os
import queue
import threading
from functools import partial

import pytest

from ckstore.background.copying import CopyPool

pytestmark = pytest.mark.usefixtures("no_threads_left")


def test_thread_survives_failing_log(monkeypatch):
    def end_thread(*_):
        raise SystemExit

    crew, done = CopyPool(1), threading.Event()
    monkeypatch.setattr("ckstore.background.copying.log_safely", end_thread)
    crew.send_one(end_thread)
    crew.send_one(done.set)
    assert done.wait(60)
    crew.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_thread_survives_any_exception(quiet_log, kind):
    def end_thread():
        raise kind

    crew, done = CopyPool(1), threading.Event()
    crew.send_one(end_thread)
    crew.send_one(done.set)
    assert done.wait(60)
    crew.close()


def test_step_starts_on_caller_cpu_then_may_move(crew, monkeypatch):
    moves, move, mine = [], os.sched_setaffinity, os.sched_getaffinity(0)

    def record_affinity(thread, processors):
        moves.append((thread or threading.get_native_id(), set(processors)))
        move(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", record_affinity)
    # The caller's affinity is one processor.
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
def test_step_runs_when_affinity_fails_in_thread(crew, monkeypatch, quiet_log, problem):
    move, me = os.sched_setaffinity, threading.get_native_id()

    def refuse(thread, processors):
        if threading.get_native_id() != me:
            raise problem
        move(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert crew.run_on_caller_cpu(lambda: 7) == 7
    monkeypatch.undo()
    assert crew.run_on_caller_cpu(lambda: os.sched_getaffinity(0)) == os.sched_getaffinity(0)


def test_step_runs_on_pool_thread_if_none_can_start(crew, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    crew.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert crew.run_on_caller_cpu(lambda: threading.current_thread().name).startswith("ckstore-stage")


def test_ctrl_c_in_close_leaves_no_thread(monkeypatch, no_threads_left):
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


def test_step_on_closed_pool_leaves_no_thread(no_threads_left):
    crew = CopyPool(2)
    crew.close()
    assert crew.run_on_caller_cpu(lambda: 7) == 7


def test_next_step_resets_affinity_after_ctrl_c(crew, monkeypatch):
    mine = os.sched_getaffinity(0)
    crew.run_on_caller_cpu(lambda: None)
    with monkeypatch.context() as context:

        def interrupted(*_):
            raise KeyboardInterrupt

        context.setattr(CopyPool, "send_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.run_on_caller_cpu(lambda: None)
    assert crew.run_on_caller_cpu(lambda: os.sched_getaffinity(0)) == mine


def test_step_runs_without_affinity_or_new_threads(crew, monkeypatch):
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


def test_work_sent_during_close_is_done(monkeypatch):
    done, closes = threading.Event(), []

    class Closing(queue.SimpleQueue):
        """Close the pool once, right before work is put into its queue."""

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


def test_thread_started_during_close_is_not_reused(crew, monkeypatch):
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
