"""Protects a trainer that Ctrl-C interrupted in its own logging: what fails afterwards fails in time."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

import ckstore
from ckstore._testing import background_of
from ckstore.errors import SaverError
from support.saver_harness import until

SECONDS_MAX = 30.0


class Silent(logging.Handler):
    """A handler of the trainer's: its lock is what counts."""

    def emit(self, record):
        pass


@pytest.fixture
def handler(monkeypatch):
    """A handler of ckstore's log; locked for good by the main thread while it is in a test's hands."""
    # Each of these tests waits once for a log that does not come.
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.1)
    logger, made = logging.getLogger("ckstore"), Silent()
    logger.addHandler(made)
    # As Ctrl-C leaves it, now and then: tests/unit/test_logs.py.
    made.acquire()
    yield made
    made.release()
    until(lambda: "ckstore-logs" not in {each.name for each in threading.enumerate()}, "the end of what was to be said")
    logger.removeHandler(made)


def test_commit_whose_saver_died_fails_in_time_while_logging_is_locked_and_the_next_succeeds(folder, handler):
    with ckstore.open(folder, policy=ckstore.Policy(saver_nice=0)) as store:
        store.commit_async({"w": bytes(1000)}, 1).result(SECONDS_MAX)
        # Else it may be stopped before it gives the slot back, and the next commit would wait for that.
        store.wait()
        pid = background_of(store).saver_pid
        os.kill(pid, signal.SIGSTOP)
        pending = store.commit_async({"w": bytes(1001)}, 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SaverError, match="SIGKILL"):
            pending.result(SECONDS_MAX)
        store.commit_async({"w": bytes(1002)}, 3).result(SECONDS_MAX)
        assert store.steps() == [1, 3]


def test_callback_that_fails_while_logging_is_locked_delays_no_result(folder, handler):
    def fail(pending):
        raise ValueError("not mine")

    with ckstore.open(folder, policy=ckstore.Policy(saver_nice=0)) as store:
        pending = store.commit_async({"w": bytes(1000)}, 1)
        pending.when_done(fail)
        assert pending.result(SECONDS_MAX).seq == 0
