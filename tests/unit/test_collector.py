"""Protects Python's collector of reference cycles: it runs again after a pause, however the pause ends."""

import gc
import os
import signal
import threading

import pytest

from ckstore.concurrency import collector_paused
from ckstore.restore import restore


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_collector_is_paused_within_and_runs_after():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_collector_that_the_user_stopped_stays_stopped():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("is_first_last", [True, False])
def test_collector_runs_after_pauses_of_two_threads(is_first_last):
    has_begun, may_end = threading.Event(), threading.Event()

    def pause():
        with collector_paused():
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=pause)
    with collector_paused():
        thread.start()
        has_begun.wait(60)
        if is_first_last:
            may_end.set()
            thread.join()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_child_that_is_forked_within_a_pause_collects():
    with collector_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 3)
        _, status = os.waitpid(child, 0)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(status) == 0


def test_restore_pauses_the_collector_only_where_it_calls_no_code_of_the_user(store, monkeypatch):
    store.commit({"w": list(range(3))}, 0)
    seen = []
    prepare, decode_all = restore.prepare_restore, restore.decode_all
    monkeypatch.setattr(restore, "prepare_restore", lambda *a, **k: (seen.append(gc.isenabled()), prepare(*a, **k))[1])
    monkeypatch.setattr(restore, "decode_all", lambda *a, **k: (seen.append(gc.isenabled()), decode_all(*a, **k))[1])
    store.restore(0)
    assert seen == [False, True]
    assert gc.isenabled()


def test_interrupted_pause_ends_with_its_exception():
    may_raise, interrupted_count = False, 0

    def interrupt(*_):
        if may_raise:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        while interrupted_count < 200:
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6, 1e-3)
            try:
                may_raise = True
                while True:
                    with collector_paused():
                        pass
            except KeyboardInterrupt:
                may_raise = False
                interrupted_count += 1
            # The traceback keeps an interrupted pause alive, until here.
            assert gc.isenabled()
    finally:
        may_raise = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
