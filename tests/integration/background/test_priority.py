"""A saver process gives way while training goes on, stands aside while a state is copied, and hurries for who waits."""

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
    """A desk with a saver that gives way, for one test after the other."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="ckstore-priority-", dir=memory if memory.is_dir() else None)
    ckstore.open(f"{folder}/store").close()
    desk = SaverHarness(f"{folder}/store", nice=NICE)
    try:
        assert desk.saver.wait_ready(SECONDS_MAX)
        yield desk
    finally:
        desk.close()
        shutil.rmtree(folder)


@pytest.fixture
def desk(opened):
    """That desk, when its saver has nothing to do."""
    assert opened.saver.release_lease(SECONDS_MAX)
    until(lambda: niceness_of(opened.saver.pid) == {LOW}, "a saver that gives way")
    return opened


def niceness_of(pid):
    """Return the niceness of every thread of a process."""
    # The 19th field.
    return {int(nice) for nice in stats_of(pid, 16)}


def policies_of(pid):
    """Return the scheduling policy of the thread that listens, and those of all others; these may end meanwhile."""
    others = set()
    for task in {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}:
        with contextlib.suppress(ProcessLookupError):
            others.add(os.sched_getscheduler(task))
    return os.sched_getscheduler(pid), others


def awake_count(pid):
    """Return how many threads of a process are in no idle class."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    with contextlib.suppress(ProcessLookupError):
        return sum(os.sched_getscheduler(thread) == os.SCHED_OTHER for thread in threads)
    return -1


@contextlib.contextmanager
def waited_for(desk, handed):
    """Wait urgently for the end of a ticket on another thread."""
    waiting = (handed.free, SECONDS_MAX, "end a test")
    waiter = threading.Thread(target=desk.saver.wait, args=waiting, kwargs={"is_urgent": True})
    waiter.start()
    yield
    waiter.join()


@raises_priority
def test_saver_stands_aside_before_a_state_comes_and_while_it_is_copied(desk):
    pid = desk.saver.pid
    until(lambda: policies_of(pid) == (os.SCHED_OTHER, {os.SCHED_IDLE}), "a saver that stands aside")
    handed = desk.begin(noise(1, 8 * MIB), 1).stage(1)
    assert desk.saver.wait(handed.began, SECONDS_MAX, "begin")
    # The lease's thread, by whose beats others judge whether the saver lives, is awake.
    both = (os.SCHED_OTHER, {os.SCHED_IDLE, os.SCHED_OTHER})
    assert policies_of(pid) == both
    assert niceness_of(pid) == {LOW}
    handed.stage().finish().wait()
    until(lambda: policies_of(pid) == both, "a saver that stands aside again")
    until(lambda: awake_count(pid) == 2, "only the one that listens, and the lease's, awake")


@raises_priority
def test_saver_that_is_waited_for_has_its_full_priority_and_does_not_stand_aside(desk):
    pid = desk.saver.pid
    handed = desk.begin(noise(2, 8 * MIB), 2).stage(1)
    with waited_for(desk, handed):
        until(lambda: niceness_of(pid) == {START}, "a saver that hurries")
        until(lambda: policies_of(pid)[1] == {os.SCHED_OTHER}, "a saver that stands aside no more")
        handed.stage()
        assert niceness_of(pid) == {START}
        handed.finish().wait()
    until(lambda: niceness_of(pid) == {LOW}, "a saver that gives way again")


def test_saver_that_is_only_looked_at_does_not_hurry(desk, monkeypatch):
    """A trainer that only makes sure that its state is staged, or looks whether it is durable, trains on."""
    handed = desk.begin(noise(3, 3 * MIB), 3).stage()
    said, send = [], protocol.send
    with monkeypatch.context() as patched:
        patched.setattr(protocol, "send", lambda end, message: (said.append(message), send(end, message)))
        assert not desk.saver.wait(handed.free, 0.1, "end a test")
        assert not desk.saver.wait(handed.free, 0, "end a test", is_urgent=True)
    assert said == []
    assert niceness_of(desk.saver.pid) == {LOW}
    handed.finish().wait()


@pytest.mark.parametrize("error", [SaverError, MemoryError, OSError])
def test_hurry_that_cannot_be_said_is_no_error_of_its_own(desk, monkeypatch, error):
    handed = desk.begin(noise(4, 3 * MIB), 4)

    def fail(end, message):
        raise error("nobody listens")

    with monkeypatch.context() as patched:
        patched.setattr(client, "GRACE_SECONDS", 0.01)
        patched.setattr(protocol, "send", fail)
        assert not desk.saver.wait(handed.free, 0.05, "end a test", is_urgent=True)
    desk.saver.abort(handed.number)
    with pytest.raises(SaverError, match="given up"):
        handed.wait()
