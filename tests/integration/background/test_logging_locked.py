"""Protects a trainer that Ctrl-C interrupted inside logging: later failures are still reported in time."""

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
    """A logging handler of the trainer; only its lock matters."""

    def emit(self, record):
        pass


@pytest.fixture
def handler(monkeypatch):
    """A handler of ckstore's log; the main thread holds its lock during a test."""
    # Each of these tests waits once for a log record that does not come.
    monkeypatch.setattr("ckstore.concurrency.LOG_WAIT_SECONDS", 0.1)
    logger, made = logging.getLogger("ckstore"), Silent()
    logger.addHandler(made)
    # Ctrl-C sometimes leaves it like this: tests/unit/test_logs.py.
    made.acquire()
    yield made
    made.release()
    until(lambda: "ckstore-logs" not in {each.name for each in threading.enumerate()}, "the end of what was to be said")
    logger.removeHandler(made)


def test_dead_saver_is_reported_with_locked_logging(folder, handler):
    with ckstore.open(folder, policy=ckstore.Policy(saver_nice=0)) as store:
        store.commit_async({"w": bytes(1000)}, 1).result(SECONDS_MAX)
        # Otherwise it may be stopped before it releases the slot, and the next commit would wait for that.
        store.wait()
        pid = background_of(store).saver_pid
        os.kill(pid, signal.SIGSTOP)
        pending = store.commit_async({"w": bytes(1001)}, 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SaverError, match="SIGKILL"):
            pending.result(SECONDS_MAX)
        store.commit_async({"w": bytes(1002)}, 3).result(SECONDS_MAX)
        assert store.steps() == [1, 3]


def test_failing_callback_delays_no_result(folder, handler):
    def fail(pending):
        raise ValueError("not mine")

    with ckstore.open(folder, policy=ckstore.Policy(saver_nice=0)) as store:
        pending = store.commit_async({"w": bytes(1000)}, 1)
        pending.when_done(fail)
        assert pending.result(SECONDS_MAX).seq == 0
