"""Protects those who have many things asked at once from Ctrl-C, from failures, and from threads that stay."""

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


def test_what_is_sent_runs_and_threads_are_as_many_as_are_needed():
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


def test_closing_waits_for_what_has_begun_and_drops_the_rest():
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


def test_a_pool_that_nobody_used_is_closed_at_once():
    Pool(3, NAME).close()


def refuse(monkeypatch, error, count):
    """Let all threads of a pool after so many fail to start; return what is set when one has failed."""
    start, started, refused = threading.Thread.start, [], threading.Event()

    def begin(thread):
        # What other tests have left behind may start threads, too.
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
    """What Python makes of Ctrl-C in the middle of its own wait for a thread to begin."""
    error = RuntimeError("release unlocked lock")
    error.__context__ = KeyboardInterrupt()
    return error


def test_fewer_threads_than_wanted_do_it_too(monkeypatch):
    refuse(monkeypatch, no_thread, 1)
    assert list(asked(str, range(20))) == list(map(str, range(20)))


def test_no_thread_at_all_is_an_error(monkeypatch):
    refuse(monkeypatch, no_thread, 0)
    with pytest.raises(RuntimeError, match="start new thread"):
        list(asked(str, range(20)))


def test_ctrl_c_while_a_thread_starts_is_not_taken_for_a_lack_of_threads(monkeypatch):
    refused = refuse(monkeypatch, from_ctrl_c, 1)
    with pytest.raises(KeyboardInterrupt):
        # One thread alone answers nothing before a second was to start.
        list(asked(lambda item: refused.wait(SECONDS_MAX), range(20)))


# Many questions


def test_answers_come_in_the_order_of_what_was_asked():
    def ask(item):
        time.sleep(0.002 * (3 - item % 4))
        return item if item % 5 else None

    assert list(asked(ask, range(40))) == [item if item % 5 else None for item in range(40)]


def test_nothing_is_asked_and_no_thread_starts_before_an_answer_is_wanted():
    answers = asked(str, range(9))
    assert threads_left() == []
    assert next(answers) == "0"
    answers.close()


def test_nothing_to_ask_is_no_answer():
    assert list(asked(str, [])) == []


def test_failure_ends_it_and_is_told_before_others_are_waited_for():
    told, end = [], threading.Event()

    def ask(item):
        if item == 1:
            raise OSError("broken")
        if item > 1:
            # Nobody would end this but who is told.
            assert end.wait(SECONDS_MAX)
        return item

    def stop():
        told.append("stop")
        end.set()

    answers = asked(ask, range(100), on_stop=stop)
    assert next(answers) == 0
    with pytest.raises(OSError, match="broken"):
        next(answers)
    assert told == ["stop"]


def test_whoever_takes_no_more_answers_stops_it():
    told = []
    answers = asked(str, range(100), on_stop=lambda: told.append("stop"))
    next(answers)
    answers.close()
    assert told == ["stop"]


def test_all_answered_is_no_stop():
    told = []
    assert len(list(asked(str, range(100), on_stop=lambda: told.append("stop")))) == 100
    assert told == []


def test_items_that_fail_to_come_end_it():
    def items():
        yield from range(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(asked(str, items()))


def test_a_failure_is_kept_by_nobody_but_who_catches_it():
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


# A process of its own: pytest's limit of time for each test has the only timer of this kind.
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
def test_ctrl_c_at_any_moment_keeps_nobody_waiting_and_leaves_no_thread(note, sample):
    count = sample.count(3000, parts=8)
    command = [sys.executable, "-c", INTERRUPTED, str(count), str(sample.seed(0))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > count / 10, "too few were interrupted to show anything"
    note(f"of {count} askings many at once {int(ran.stdout)} were interrupted, and none kept anybody waiting")
