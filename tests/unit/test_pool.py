"""Protects thread pools and concurrent calls from Ctrl-C, from failures, and from leaked threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from ckstore.concurrency import Pool, map_in_threads

NAME = "ckstore-test-pool"
SECONDS_MAX = 30.0


def threads_left():
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    assert threads_left() == []


def asked(ask, items, count_max=3, **more):
    return map_in_threads(ask, items, count_max=count_max, name=NAME, **more)


# A pool


def test_pool_starts_only_needed_threads():
    pool, seen = Pool(3, NAME), []
    pool.send(lambda: seen.append(1))
    assert len(threads_left()) == 1
    for number in range(2, 9):
        pool.send(lambda number=number: seen.append(number))
        assert len(threads_left()) <= 3
    end = time.monotonic() + SECONDS_MAX
    while len(seen) < 8 and time.monotonic() < end:
        time.sleep(0.001)
    pool.close()
    assert sorted(seen) == list(range(1, 9))


def test_close_waits_for_running_work_only():
    pool, seen, begun = Pool(1, NAME), [], threading.Event()

    def slow():
        begun.set()
        time.sleep(0.1)
        seen.append("slow")

    pool.send(slow)
    pool.send(lambda: seen.append("dropped"))
    assert begun.wait(SECONDS_MAX)
    pool.close()
    assert seen == ["slow"]


def test_unused_pool_closes_immediately():
    Pool(3, NAME).close()


def refuse(monkeypatch, error, count):
    """Make threads after the first ``count`` fail to start. Return an event that is set when one has failed."""
    start, started, refused = threading.Thread.start, [], threading.Event()

    def begin(thread):
        # Leftovers of other tests may start threads too.
        if not thread.name.startswith(NAME):
            return start(thread)
        if len(started) == count:
            refused.set()
            raise error()
        started.append(thread)
        return start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    return refused


def no_thread():
    return RuntimeError("can't start new thread")


def from_ctrl_c():
    """The error that Python raises when Ctrl-C interrupts its own wait for a thread to start."""
    error = RuntimeError("release unlocked lock")
    error.__context__ = KeyboardInterrupt()
    return error


def test_fewer_threads_are_enough(monkeypatch):
    refuse(monkeypatch, no_thread, 1)
    assert list(asked(str, range(20))) == list(map(str, range(20)))


def test_no_thread_at_all_is_an_error(monkeypatch):
    refuse(monkeypatch, no_thread, 0)
    with pytest.raises(RuntimeError, match="start new thread"):
        list(asked(str, range(20)))


def test_ctrl_c_in_thread_start_is_raised(monkeypatch):
    refused = refuse(monkeypatch, from_ctrl_c, 1)
    with pytest.raises(KeyboardInterrupt):
        # A single thread gives no answer before the second one tried to start.
        list(asked(lambda item: refused.wait(SECONDS_MAX), range(20)))


# Concurrent calls


def test_results_keep_the_input_order():
    def ask(item):
        time.sleep(0.002 * (3 - item % 4))
        return item if item % 5 else None

    assert list(asked(ask, range(40))) == [item if item % 5 else None for item in range(40)]


def test_nothing_runs_before_the_first_result():
    answers = asked(str, range(9))
    assert threads_left() == []
    assert next(answers) == "0"
    answers.close()


def test_no_items_give_no_results():
    assert list(asked(str, [])) == []


def test_failure_is_reported_before_waiting():
    stops, end = [], threading.Event()

    def ask(item):
        if item == 1:
            raise OSError("broken")
        if item > 1:
            # Only stop() ends this.
            assert end.wait(SECONDS_MAX)
        return item

    def stop():
        stops.append("stop")
        end.set()

    answers = asked(ask, range(100), on_stop=stop)
    assert next(answers) == 0
    with pytest.raises(OSError, match="broken"):
        next(answers)
    assert stops == ["stop"]


def test_abandoned_iteration_stops_the_calls():
    stops = []
    answers = asked(str, range(100), on_stop=lambda: stops.append("stop"))
    next(answers)
    answers.close()
    assert stops == ["stop"]


def test_complete_iteration_does_not_call_stop():
    stops = []
    assert len(list(asked(str, range(100), on_stop=lambda: stops.append("stop")))) == 100
    assert stops == []


def test_failing_item_iterator_ends_the_calls():
    def items():
        yield from range(3)
        raise ValueError("no item")

    with pytest.raises(ValueError, match="no item"):
        list(asked(str, items()))


def test_failure_is_not_kept_alive():
    class Held(Exception):
        pass

    def ask(item):
        raise Held

    kept = None
    gc.disable()
    try:
        list(asked(ask, [1], count_max=1))
    except Held as error:
        kept = weakref.ref(error)
    finally:
        gc.enable()
    assert kept is not None
    assert kept() is None


# In its own process, because pytest's timeout uses the only timer of this kind.
INTERRUPTED = """
import random, signal, sys, threading, time
from ckstore.concurrency import map_in_threads

class Interrupted(BaseException):
    pass

def hear(*_):
    raise Interrupted

def ask(item):
    time.sleep(choice.uniform(0, 1e-4))
    return item

signal.signal(signal.SIGALRM, hear)
count, seed = map(int, sys.argv[1:])
choice, cut = random.Random(seed), 0
for _ in range(count):
    got = []
    try:
        signal.setitimer(signal.ITIMER_REAL, choice.uniform(1e-6, 1.5e-3))
        for answer in map_in_threads(ask, range(12), count_max=3, name="asked"):
            got.append(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except (Interrupted, RuntimeError):
        cut += 1
    assert got == list(range(len(got))), got

def left():
    # Python itself keeps those that it was interrupted in starting; they have not begun, and never will.
    return [thread for thread in threading.enumerate() if thread.name.startswith("asked") and thread.is_alive()]

end = time.monotonic() + 20
while left() and time.monotonic() < end:
    time.sleep(0.01)
assert not left(), left()
print(cut)
"""


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_ctrl_c_at_any_moment_leaves_no_thread(note, sample):
    count = sample.count(3000, parts=8)
    command = [sys.executable, "-c", INTERRUPTED, str(count), str(sample.seed(0))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > count / 10, "too few calls were interrupted"
    note(f"of {count} concurrent calls {int(ran.stdout)} were interrupted, and none blocked")
