"""Protects training from the saver: it has low priority, is idle while a state is copied, and hurries on request."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

import ckstore
from ckstore.background import client, protocol
from ckstore.background.saver.server import NICE_MAX
from ckstore.config import MIB
from ckstore.errors import SaverError
from support.saver_harness import SECONDS_MAX, SaverHarness, noise, stats_of, until

NICE = 7
START = os.getpriority(os.PRIO_PROCESS, 0)
LOW = min(NICE_MAX, START + NICE)

raises_priority = pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")


@pytest.fixture(scope="module")
def opened():
    """A harness with a low-priority saver, shared by the tests of this file."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="ckstore-priority-", dir=memory if memory.is_dir() else None)
    ckstore.open(f"{folder}/store").close()
    harness = SaverHarness(f"{folder}/store", nice=NICE)
    try:
        assert harness.saver.wait_ready(SECONDS_MAX)
        yield harness
    finally:
        harness.close()
        shutil.rmtree(folder)


@pytest.fixture
def harness(opened):
    """That harness, when its saver is idle."""
    assert opened.saver.release_lease(SECONDS_MAX)
    until(lambda: niceness_of(opened.saver.pid) == {LOW}, "a saver that gives way")
    return opened


def niceness_of(pid):
    """Return the nice value of every thread of a process."""
    # The 19th field.
    return {int(nice) for nice in stats_of(pid, 16)}


def policies_of(pid):
    """Return the scheduling policies of the listening thread and of all others; these may end meanwhile."""
    others = set()
    for task in {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}:
        with contextlib.suppress(ProcessLookupError):
            others.add(os.sched_getscheduler(task))
    return os.sched_getscheduler(pid), others


def awake_count(pid):
    """Return how many threads of a process are not in the idle class."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    with contextlib.suppress(ProcessLookupError):
        return sum(os.sched_getscheduler(thread) == os.SCHED_OTHER for thread in threads)
    return -1


@contextlib.contextmanager
def waited_for(harness, in_flight):
    """Wait urgently for the end of a ticket on another thread."""
    waiting = (in_flight.free, SECONDS_MAX, "end a test")
    waiter = threading.Thread(target=harness.saver.wait, args=waiting, kwargs={"is_urgent": True})
    waiter.start()
    yield
    waiter.join()


@raises_priority
def test_saver_is_idle_class_while_state_is_copied(harness):
    pid = harness.saver.pid
    until(lambda: policies_of(pid) == (os.SCHED_OTHER, {os.SCHED_IDLE}), "a saver in the idle class")
    in_flight = harness.begin(noise(1, 8 * MIB), 1).stage(1)
    assert harness.saver.wait(in_flight.began, SECONDS_MAX, "begin")
    # The thread of the lease stays awake, because its heartbeats show that the saver is alive.
    both = (os.SCHED_OTHER, {os.SCHED_IDLE, os.SCHED_OTHER})
    assert policies_of(pid) == both
    assert niceness_of(pid) == {LOW}
    in_flight.stage().finish().wait()
    until(lambda: policies_of(pid) == both, "a saver in the idle class again")
    until(lambda: awake_count(pid) == 2, "only the one that listens, and the lease's, awake")


@raises_priority
def test_saver_has_full_priority_when_waited_for(harness):
    pid = harness.saver.pid
    in_flight = harness.begin(noise(2, 8 * MIB), 2).stage(1)
    with waited_for(harness, in_flight):
        until(lambda: niceness_of(pid) == {START}, "a saver that hurries")
        until(lambda: policies_of(pid)[1] == {os.SCHED_OTHER}, "a saver with normal scheduling")
        in_flight.stage()
        assert niceness_of(pid) == {START}
        in_flight.finish().wait()
    until(lambda: niceness_of(pid) == {LOW}, "a saver that gives way again")


def test_polling_does_not_hurry_the_saver(harness, monkeypatch):
    """A trainer that only checks that its state is staged, or whether it is durable, trains on."""
    in_flight = harness.begin(noise(3, 3 * MIB), 3).stage()
    said, send = [], protocol.send
    with monkeypatch.context() as patched:
        patched.setattr(protocol, "send", lambda end, message: (said.append(message), send(end, message)))
        assert not harness.saver.wait(in_flight.free, 0.1, "end a test")
        assert not harness.saver.wait(in_flight.free, 0, "end a test", is_urgent=True)
    assert said == []
    assert niceness_of(harness.saver.pid) == {LOW}
    in_flight.finish().wait()


@pytest.mark.parametrize("error", [SaverError, MemoryError, OSError])
def test_failed_hurry_message_is_no_error(harness, monkeypatch, error):
    in_flight = harness.begin(noise(4, 3 * MIB), 4)

    def fail(end, message):
        raise error("nobody listens")

    with monkeypatch.context() as patched:
        patched.setattr(client, "GRACE_SECONDS", 0.01)
        patched.setattr(protocol, "send", fail)
        assert not harness.saver.wait(in_flight.free, 0.05, "end a test", is_urgent=True)
    harness.saver.abort(in_flight.number)
    with pytest.raises(SaverError, match="given up"):
        in_flight.wait()
