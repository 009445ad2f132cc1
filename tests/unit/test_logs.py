"""Protects commits from logging: no handler, filter or lock of a user can block a commit."""

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
    """Wait until the logging thread has ended."""
    wait_for_logging_thread()


@pytest.fixture
def log():
    """A logger whose handler records everything. Nothing propagates to other handlers."""

    class RecordingHandler(logging.Handler):
        def emit(self, record):
            records.append(record)

    records = []
    made = logging.Logger("ckstore-test", logging.INFO)
    made.records, made.handler = records, RecordingHandler()
    made.addHandler(made.handler)
    return made


def on_a_thread(call, name="somebody"):
    """Call the function on a thread, and return the seconds it took."""
    thread = threading.Thread(target=call, name=name)
    begun = time.monotonic()
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive(), "it waits forever"
    return time.monotonic() - begun


def wait_for_logging_thread():
    """Wait until the logging thread has ended because it has no records left."""
    end = time.monotonic() + SECONDS_MAX
    while is_logging_thread_alive() and time.monotonic() < end:
        time.sleep(0.001)
    assert not is_logging_thread_alive()


def is_logging_thread_alive():
    return any(thread.name == "ckstore-logs" for thread in threading.enumerate())


def test_record_keeps_its_thread_name(log):
    def work():
        say(log, logging.INFO, "step %d", 3)
        assert [record.getMessage() for record in log.records] == ["step 3"]

    on_a_thread(work)
    (record,) = log.records
    assert (record.threadName, record.funcName, record.filename) == ("somebody", "work", "test_logs.py")
    assert record.lineno == work.__code__.co_firstlineno + 1
    assert record.levelno == logging.INFO


def test_logging_thread_ends_when_idle(log):
    on_a_thread(lambda: [say(log, logging.INFO, "%d", number) for number in range(50)])
    wait_for_logging_thread()
    assert [record.getMessage() for record in log.records] == [str(number) for number in range(50)]


def test_records_of_many_threads_are_logged(log):
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


def test_main_thread_logs_directly(log):
    say(log, logging.WARNING, "here")
    assert [(record.getMessage(), record.threadName) for record in log.records] == [("here", "MainThread")]
    assert not is_logging_thread_alive()


def test_record_below_the_level_is_dropped(log):
    on_a_thread(lambda: say(log, logging.DEBUG, "quiet"))
    say(log, logging.DEBUG, "quiet")
    assert not log.records


def test_exception_is_logged_and_not_kept(log):
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
def test_filter_and_handler_errors_are_contained(log, place, is_main):
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


def test_held_handler_lock_delays_a_thread_once(log, monkeypatch):
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.3)
    seen = []
    log.handler.acquire()  # As an interrupted main thread may leave it, forever.
    first = on_a_thread(lambda: say(log, logging.ERROR, "one"))
    assert 0.3 <= first < 5
    # Later calls do not wait again. A hundred such waits would take half a minute.
    others = on_a_thread(lambda: [say(log, logging.ERROR, "two, or more") for _ in range(100)])
    assert others < 5
    say(log, logging.ERROR, "main")
    assert [record.getMessage() for record in log.records] == ["main"], "the lock does not keep its holder alive"
    log.handler.release()
    end = time.monotonic() + SECONDS_MAX
    while len(log.records) < 102 and time.monotonic() < end:
        time.sleep(0.01)
    assert [record.getMessage() for record in log.records] == ["main", "one"] + ["two, or more"] * 100
    # From now on, a logging thread waits again until its record is handled.
    on_a_thread(lambda: [say(log, logging.ERROR, "after"), seen.append(log.records[-1].getMessage())])
    assert seen == ["after"]


def test_queued_records_are_bounded(log, monkeypatch):
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.05)
    log.handler.acquire()
    on_a_thread(lambda: [say(log, logging.ERROR, "%d", number) for number in range(QUEUED_LOG_RECORDS_MAX + 500)])
    log.handler.release()
    wait_for_logging_thread()
    # One more record was being handled.
    assert [int(record.getMessage()) for record in log.records] == list(range(QUEUED_LOG_RECORDS_MAX + 1))
    on_a_thread(lambda: say(log, logging.ERROR, "last"))
    assert log.records[-1].getMessage() == "last"


def test_record_is_logged_directly_without_threads(log, monkeypatch):
    class Threads:
        def start(self):
            raise RuntimeError("can't start new thread")

    def work():
        with monkeypatch.context() as patch:
            patch.setattr("ckstore.concurrency.threading.Thread", lambda **_: Threads())
            say(log, logging.ERROR, "said here")

    on_a_thread(work)
    assert not is_logging_thread_alive()
    on_a_thread(lambda: say(log, logging.ERROR, "said there"))
    assert [record.getMessage() for record in log.records] == ["said here", "said there"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_child_has_its_own_logging_thread():
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
