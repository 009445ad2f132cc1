"""Protects those who wait from whoever logs: no handler, filter or lock of theirs keeps a commit from its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from ckstore.concurrency import QUEUED_LOG_RECORDS_MAX
from ckstore.concurrency import log_safely as say

SECONDS_MAX = 30.0


@pytest.fixture(autouse=True)
def silence():
    """Begin when nobody says anything any more."""
    wait_for_the_end_of_the_speaker()


@pytest.fixture
def log():
    """A logger whose handler keeps its records; nothing of it comes to handlers of others."""

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append(record)

    records = []
    made = logging.Logger("ckstore-test", logging.INFO)
    made.records, made.handler = records, Keeping()
    made.addHandler(made.handler)
    return made


def on_a_thread(call, name="somebody"):
    """Call it on a thread; return the seconds it took."""
    thread = threading.Thread(target=call, name=name)
    begun = time.monotonic()
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive(), "it waits for ever"
    return time.monotonic() - begun


def wait_for_the_end_of_the_speaker():
    """Wait until the thread that says what others tell has ended: it has nothing to say any more."""
    end = time.monotonic() + SECONDS_MAX
    while is_speaking() and time.monotonic() < end:
        time.sleep(0.001)
    assert not is_speaking()


def is_speaking():
    return any(thread.name == "ckstore-logs" for thread in threading.enumerate())


def test_what_a_thread_tells_is_said_when_it_goes_on_and_in_its_name(log):
    def work():
        say(log, logging.INFO, "step %d", 3)
        assert [record.getMessage() for record in log.records] == ["step 3"]

    on_a_thread(work)
    (record,) = log.records
    assert (record.threadName, record.funcName, record.filename) == ("somebody", "work", "test_logs.py")
    assert record.lineno == work.__code__.co_firstlineno + 1
    assert record.levelno == logging.INFO


def test_its_thread_ends_when_there_is_nothing_to_say(log):
    on_a_thread(lambda: [say(log, logging.INFO, "%d", number) for number in range(50)])
    wait_for_the_end_of_the_speaker()
    assert [record.getMessage() for record in log.records] == [str(number) for number in range(50)]


def test_many_threads_have_all_said_that_they_tell(log):
    def work(name):
        for number in range(50):
            say(log, logging.INFO, "%s %d", name, number)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()
    said = [record.getMessage().split() for record in log.records]
    for name in "abcdef":
        assert [number for each, number in said if each == name] == [str(number) for number in range(50)]


def test_the_main_thread_says_it_by_itself(log):
    say(log, logging.WARNING, "here")
    assert [(record.getMessage(), record.threadName) for record in log.records] == [("here", "MainThread")]
    assert not is_speaking()


def test_what_is_below_the_logger_s_level_is_not_said(log):
    on_a_thread(lambda: say(log, logging.DEBUG, "quiet"))
    say(log, logging.DEBUG, "quiet")
    assert not log.records


def test_an_exception_is_told_with_its_traceback_and_kept_by_nobody(log):
    class Held:
        pass

    def work():
        held = Held()
        kept.append(weakref.ref(held))
        try:
            raise ValueError("broken")
        except ValueError:
            say(log, logging.ERROR, "it failed", exc_info=True)

    kept = []
    on_a_thread(work)
    (record,) = log.records
    assert "ValueError: broken" in logging.Formatter().format(record)
    del record
    log.records.clear()
    end = time.monotonic() + SECONDS_MAX
    while kept[0]() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert kept[0]() is None


@pytest.mark.parametrize("is_main", [True, False], ids=["on the main thread", "on another"])
@pytest.mark.parametrize("place", ["filter", "handler"])
def test_what_a_filter_or_handler_raises_reaches_nobody_and_ends_nothing(log, place, is_main):
    def refuse(record):
        raise RuntimeError("no room")

    if place == "filter":
        log.addFilter(refuse)
    else:
        log.handler.emit = refuse

    def tell_one():
        say(log, logging.ERROR, "lost")

    tell_one() if is_main else on_a_thread(tell_one)
    log.filters.clear()
    log.handler.emit = log.records.append
    on_a_thread(lambda: say(log, logging.ERROR, "said"))
    assert [record.getMessage() for record in log.records] == ["said"]


def test_a_handler_s_lock_that_is_never_released_delays_a_thread_once(log, monkeypatch):
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.3)
    seen = []
    log.handler.acquire()  # As Ctrl-C leaves it: with the main thread, for ever.
    first = on_a_thread(lambda: say(log, logging.ERROR, "one"))
    assert 0.3 <= first < 5
    # Whoever comes after it does not wait again: a hundred such waits would take half a minute.
    others = on_a_thread(lambda: [say(log, logging.ERROR, "two, or more") for _ in range(100)])
    assert others < 5
    say(log, logging.ERROR, "main")
    assert [record.getMessage() for record in log.records] == ["main"], "the lock does not keep who has it"
    log.handler.release()
    end = time.monotonic() + SECONDS_MAX
    while len(log.records) < 102 and time.monotonic() < end:
        time.sleep(0.01)
    assert [record.getMessage() for record in log.records] == ["main", "one"] + ["two, or more"] * 100
    # From now on who says something waits again until it is said.
    on_a_thread(lambda: [say(log, logging.ERROR, "after"), seen.append(log.records[-1].getMessage())])
    assert seen == ["after"]


def test_what_waits_to_be_said_is_bounded(log, monkeypatch):
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.05)
    log.handler.acquire()
    on_a_thread(lambda: [say(log, logging.ERROR, "%d", number) for number in range(QUEUED_LOG_RECORDS_MAX + 500)])
    log.handler.release()
    wait_for_the_end_of_the_speaker()
    # One more was being said.
    assert [int(record.getMessage()) for record in log.records] == list(range(QUEUED_LOG_RECORDS_MAX + 1))
    on_a_thread(lambda: say(log, logging.ERROR, "last"))
    assert log.records[-1].getMessage() == "last"


def test_where_no_thread_can_be_started_it_is_said_at_once(log, monkeypatch):
    class Threads:
        def start(self):
            raise RuntimeError("can't start new thread")

    def work():
        with monkeypatch.context() as patch:
            patch.setattr("ckstore.concurrency.threading.Thread", lambda **_: Threads())
            say(log, logging.ERROR, "said here")

    on_a_thread(work)
    assert not is_speaking()
    on_a_thread(lambda: say(log, logging.ERROR, "said there"))
    assert [record.getMessage() for record in log.records] == ["said here", "said there"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_a_thread_of_its_own_say_it():
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert (ran.returncode, ran.stdout) == (0, "parent\nchild\n"), ran.stderr


FORKED = """
import logging, os, sys, threading
from ckstore.concurrency import log_safely
logging.basicConfig(stream=sys.stdout, format="%(message)s")
log = logging.getLogger("ckstore")

def on_a_thread(text):
    thread = threading.Thread(target=log_safely, args=(log, logging.ERROR, text))
    thread.start()
    thread.join(20)
    sys.stdout.flush()
    return thread.is_alive()

assert not on_a_thread("parent")
child = os.fork()
if not child:
    os._exit(on_a_thread("child"))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
