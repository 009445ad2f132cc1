"""Protects Ctrl-C at bad moments of the trainer's work: it is raised, and fails at most the commit it interrupts.

That commit is either completed, or aborted at the saver too. A state that changes after an interrupted call is never
stored as the state of that call.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

import ckstore
from ckstore import concurrency
from ckstore.background.copying import CopyPool
from support.fake_saver import DelayedCopy, FakeSaver
from support.guarded_memory import attach_owner
from support.saver_harness import SECONDS_MAX, noise

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.mark.parametrize(
    "place",
    ["ckstore.background.staging.Staging.copy_now", "ckstore.interval.Costs.watch"],
    ids=["nothing", "something"],
)
def test_ctrl_c_after_begin_aborts_the_uncopied_state(savers, folder, monkeypatch, place):
    def interrupted(*_):
        raise KeyboardInterrupt

    DelayedCopy(monkeypatch)
    state = noise(1)
    with ckstore.open(folder) as store:
        owner = attach_owner(store, state["w0"])
        with monkeypatch.context() as context:
            context.setattr(place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit_async(state, 1)
        # Training continues. None of its later values may be stored as step 1.
        state["w0"][:] = 0
        assert savers[0].aborted == [1]
        store.commit_async(state, 2).result()
        assert "staged" not in savers[0].calls[: savers[0].calls.index("abort")]
        assert savers[0].calls.count("staged") == 1
    del owner


def test_ctrl_c_during_begin_is_raised_after_it(savers, folder, monkeypatch):
    begin = FakeSaver.begin
    main = threading.main_thread().ident

    def slow_begin(saver, *facts, **options):
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        begin(saver, *facts, **options)

    with ckstore.open(folder) as store:
        with monkeypatch.context() as context:
            context.setattr(FakeSaver, "begin", slow_begin)
            with pytest.raises(KeyboardInterrupt):
                store.commit_async(noise(1), 1)
        assert savers[0].aborted == [1]
        for step in (2, 3, 4):
            store.commit_async(noise(step), step).result()
        assert len(savers) == 1
        assert {savers[0].slot(ticket).index for ticket in (1, 2, 3, 4)} == {0}, "no thread kept a step"


def test_ctrl_c_in_thread_start_leaves_no_late_step(monkeypatch):
    begun = []

    class LateThread(threading.Thread):
        def start(self):
            late = threading.Timer(0.05, super().start)
            late.start()
            begun.append(late)
            raise KeyboardInterrupt

    ran, interrupts = [], []
    with monkeypatch.context() as context:
        context.setattr(concurrency.threading, "Thread", LateThread)
        with pytest.raises(KeyboardInterrupt):
            concurrency.run_uninterrupted(lambda: ran.append(1), on_interrupt=interrupts.append)
    begun[0].join()
    time.sleep(0.05)
    assert ran == interrupts == []


def test_running_step_is_awaited_despite_ctrl_c():
    ran, interrupts = [], []
    main = threading.main_thread().ident

    def step():
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)
        ran.append(1)

    with pytest.raises(KeyboardInterrupt):
        concurrency.run_uninterrupted(step, on_interrupt=interrupts.append)
    assert ran == [1]
    assert len(interrupts) == 1


def test_close_ends_threads_of_interrupted_starts(monkeypatch, no_threads_left):
    start, strays = threading.Thread.start, []

    def interrupted_start(thread):
        start(thread)
        strays.append(thread)
        raise KeyboardInterrupt

    crew = CopyPool(3)
    crew.start(2)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", interrupted_start)
        # Each thread is started, but the pool does not count it.
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                crew.start()
    crew.close()
    for stray in strays:
        stray.join(SECONDS_MAX)
        assert not stray.is_alive()
    # The pool can be used again.
    done = threading.Event()
    crew.send(done.set, 1)
    assert done.wait(SECONDS_MAX)
    crew.close()
