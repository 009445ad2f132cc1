"""Protects the trainer's side: every ticket ends once, a dead saver is noticed immediately, and nothing is left behind.

Forked children cannot use the saver, and do not keep any of its resources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckstore
from ckstore.background import client, protocol
from ckstore.background.arena import Arena
from ckstore.background.client import Saver
from ckstore.background.protocol import ProcessWatch
from ckstore.background.tickets import Callbacks
from ckstore.errors import BackendError, MalformedError, SaverError, UsageError
from ckstore.format import paths
from ckstore.processes import process_started
from support.saver_harness import SECONDS_MAX, SaverHarness, fork, links, noise, stop, until


def steps(address):
    with ckstore.open(address) as store:
        return store.steps()


@pytest.fixture
def never_polled(monkeypatch):
    """Make the polling of the process far too slow, so that only events can notice a death."""
    monkeypatch.setattr(protocol, "POLL_SECONDS", 2 * SECONDS_MAX)


# Death of the saver


@pytest.mark.usefixtures("never_polled")
@pytest.mark.parametrize("is_staged", [False, True], ids=["staging", "staged"])
def test_killed_saver_is_noticed_and_replaced(harness, address, caplog, is_staged):
    harness.commit(noise(1), 1)
    in_flight = harness.begin(noise(2, 24 << 20), 2).stage(4)
    assert in_flight.began.wait(SECONDS_MAX)
    if is_staged:
        stop(harness.saver.pid)
        in_flight.stage().finish()
    os.kill(harness.saver.pid, signal.SIGKILL)
    with caplog.at_level(logging.ERROR, "ckstore"), pytest.raises(SaverError, match="was killed by SIGKILL") as caught:
        in_flight.wait()
    assert in_flight.events == ["began", "failed", "free"]
    assert (caught.value.pid, caught.value.saver_exit_code, caught.value.todo.split(":")[0]) == (
        harness.saver.pid,
        -signal.SIGKILL,
        "commit again",
    )
    assert "killed by SIGKILL" in caplog.text
    assert not harness.saver.is_alive
    with pytest.raises(SaverError):
        harness.begin(noise(2), 2)
    assert steps(address) == [1]
    harness.start()
    # The lease of the dead saver does not block the new one, and its slot can be used.
    assert harness.commit(noise(3), 3).seq == 1


def test_dead_saver_is_reaped_and_holds_no_lease(harness):
    harness.commit(noise(1), 1)
    os.kill(harness.saver.pid, signal.SIGKILL)
    until(lambda: not harness.saver.is_alive)
    assert not Path(f"/proc/{harness.saver.pid}").exists()
    assert harness.saver.release_lease()
    assert harness.saver.quit()


def test_saver_that_cannot_start_fails_the_ticket(address, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    harness = SaverHarness(address)
    try:
        with pytest.raises(SaverError, match="ended with code 1"):
            harness.commit(noise(1), 1)
    finally:
        harness.close()


def test_start_without_an_interpreter_is_an_error(address, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(links())
    arena = Arena.create()
    with pytest.raises(SaverError, match="cannot start a saver process"):
        Saver.start(address, "main", arena)
    arena.close()
    gc.collect()
    assert len(links()) <= before


def test_messages_before_death_of_saver_count(address, monkeypatch):
    """The listening thread has just received nothing when the saver publishes, reports that, and dies."""
    looks, is_alive = threading.Event(), ProcessWatch.is_alive.fget
    monkeypatch.setattr(ProcessWatch, "is_alive", property(lambda watch: looks.wait(SECONDS_MAX) and is_alive(watch)))
    harness = SaverHarness(address)
    try:
        in_flight = harness.begin(noise(1), 1).stage().finish()
        # The publishing thread releases the lease afterwards: then it has sent everything.
        assert not harness.saver.release_lease(0)
        until(lambda: steps(address) == [1] and not (Path(address) / paths.lease_name("main")).exists())
        os.kill(harness.saver.pid, signal.SIGKILL)
        os.waitid(os.P_PID, harness.saver.pid, os.WEXITED | os.WNOWAIT)
        looks.set()
        assert in_flight.wait().seq == 0
        assert in_flight.events == ["began", "done", "free"]
    finally:
        looks.set()
        harness.close()


def test_stopped_saver_is_waited_for_and_reported(harness, caplog, monkeypatch):
    monkeypatch.setattr(client, "WARN_AFTER_SECONDS", 0.1)
    harness.saver.wait_ready(SECONDS_MAX)
    stop(harness.saver.pid)
    in_flight = harness.begin(noise(1), 1).stage().finish()
    waiter = threading.Thread(
        target=harness.saver.wait, args=(in_flight.free, SECONDS_MAX, "publish step 1"), daemon=True
    )
    with caplog.at_level(logging.WARNING, "ckstore"):
        waiter.start()
        until(lambda: "to publish step 1; the process is stopped" in caplog.text, "the word of it")
    assert "still waiting for the saver" in caplog.text
    assert not in_flight.ended.is_set()
    assert harness.saver.is_alive
    os.kill(harness.saver.pid, signal.SIGCONT)
    waiter.join(SECONDS_MAX)
    assert not waiter.is_alive()
    assert in_flight.wait().seq == 0


def test_a_stopped_saver_of_a_job_is_ended_after_a_while(address, monkeypatch):
    monkeypatch.setattr(client, "_LOOK_MS", 50)
    harness = SaverHarness(address, stopped_seconds_max=0.3)
    try:
        in_flight = harness.begin(noise(1), 1)
        assert in_flight.began.wait(SECONDS_MAX)
        stop(harness.saver.pid)
        with pytest.raises(SaverError, match=r"was stopped by a signal for 0\.3 s, and was killed.* Commit again"):
            in_flight.wait()
        assert in_flight.events == ["began", "failed", "free"]
        # An idle one is ended, too: the next call would wait for it.
        harness.start()
        harness.saver.wait_ready(SECONDS_MAX)
        stop(harness.saver.pid)
        assert harness.saver.quit(SECONDS_MAX)
    finally:
        harness.close()


def test_sending_never_waits_for_stopped_saver(harness):
    harness.saver.wait_ready(SECONDS_MAX)
    stop(harness.saver.pid)
    begun = time.monotonic()
    for _ in range(10_000):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(harness.saver.bell, 1)
    for number in range(10_000):
        harness.saver.abort(number)
    # A pause for each message that does not fit would take longer than this.
    assert time.monotonic() - begun < SECONDS_MAX
    os.kill(harness.saver.pid, signal.SIGCONT)


def test_saver_that_sends_invalid_message_is_killed(address, arena, altered, caplog, monkeypatch):
    monkeypatch.setattr(client, "GRACE_SECONDS", 2 * SECONDS_MAX)
    altered.run("os.write(channel, b'\\xffnonsense'); time.sleep(600)")
    with caplog.at_level(logging.ERROR, "ckstore"):
        saver = Saver.start(address, "main", arena)
        assert saver.quit(SECONDS_MAX)
    assert not Path(f"/proc/{saver.pid}").exists()
    assert "because of an invalid message" in caplog.text
    with pytest.raises(MalformedError):
        saver.begin(1, 0, 0, 1, Callbacks(print, print, print))


def test_saver_that_closes_its_socket_is_killed(address, arena, altered, monkeypatch):
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.05)
    altered.run("os.close(channel); time.sleep(600)")
    saver = Saver.start(address, "main", arena)
    assert saver.quit(SECONDS_MAX)
    with pytest.raises(SaverError, match="was killed by SIGKILL"):
        saver.begin(1, 0, 0, 1, Callbacks(print, print, print))


def test_begin_is_reported_before_end(altered, address):
    """A message after the last one of a ticket makes the trainer kill the saver."""
    altered.serve("""
from ckstore.errors import BackendError
from ckstore.background import protocol as messages
from ckstore.store.lease import Lease
tell, wait_for_orphan, waits = messages.Channel.send, Lease.wait_for_orphan, []

def tell_late(self, message, **options):
    # Longer than it takes to fail.
    time.sleep(0.2 if isinstance(message, messages.Began) else 0)
    return tell(self, message, **options)

def fail_later(self):
    waits.append(self)
    if len(waits) == 2:
        raise BackendError("the disk does not answer")
    return wait_for_orphan(self)

messages.Channel.send, Lease.wait_for_orphan = tell_late, fail_later
""")
    harness = SaverHarness(address)
    try:
        harness.commit({"a": 1}, 1)
        # It has the lease: the listening thread reports that, while the other one could fail.
        in_flight = harness.begin({"a": 2}, 2).stage().finish()
        with pytest.raises(BackendError, match="does not answer"):
            in_flight.wait()
        assert in_flight.events == ["began", "failed", "free"]
        assert harness.commit({"a": 3}, 3).seq == 1
    finally:
        harness.close()


# Ending the saver


def test_quit_completes_begun_commits(harness, address):
    in_flight = harness.begin(noise(1), 1).stage(1)
    assert in_flight.began.wait(SECONDS_MAX)
    assert not harness.saver.quit(0.1)
    in_flight.stage().finish()
    assert harness.saver.quit(SECONDS_MAX)
    assert in_flight.receipt.seq == 0
    assert in_flight.events == ["began", "done", "free"]
    assert not (Path(address) / paths.lease_name("main")).exists()


def test_quit_without_wait_leaves_no_zombie(harness, address):
    harness.commit(noise(1), 1)
    harness.saver.quit(is_waited=False)
    until(lambda: not Path(f"/proc/{harness.saver.pid}").exists(), "the end of the saver")
    assert steps(address) == [1]


def test_many_savers_leak_nothing(address):
    def count():
        gc.collect()
        return len(links()), threading.active_count()

    SaverHarness(address).close()
    before = count()
    pids = []
    for step in range(2):
        harness = SaverHarness(address)
        harness.commit(noise(step, 1 << 20), step)
        pids.append(harness.saver.pid)
        if step % 2:
            os.kill(harness.saver.pid, signal.SIGKILL)
        harness.close()
        del harness
    until(lambda: all(map(int.__le__, count(), before)), "the end of threads and descriptors")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_many_commits_leak_no_descriptor(harness):
    harness.commit(noise(0, 1 << 20), 0)

    def count():
        gc.collect()
        return len(links()), len(links(harness.saver.pid))

    before = count()
    for step in range(1, 30):
        harness.commit(noise(step, 1 << 20), step)
    # Fewer is fine, because leftovers of earlier tests may be collected. The heartbeat opens a descriptor for a moment.
    until(lambda: all(map(int.__le__, count(), before)), "the end of descriptors")


def test_raising_callback_is_only_logged(harness, caplog):
    def fail():
        raise ValueError("a fault of the caller")

    in_flight = harness.begin(noise(1), 1, callbacks=lambda given: dataclasses.replace(given, on_began=fail))
    with caplog.at_level(logging.ERROR, "ckstore"):
        in_flight.stage().finish().wait()
    assert "a fault of the caller" in caplog.text
    assert harness.commit(noise(2), 2).seq == 1


# Forked children


def test_forked_child_holds_nothing_of_the_saver(harness, tmp_path):
    harness.commit(noise(1), 1)
    reported = tmp_path / "held"
    bell = Path(f"/proc/self/fd/{harness.saver.bell}")
    assert bell.exists()

    def child():
        # Other tests may have left eventfds.
        held = [link for link in links() if "arena" in link or "pidfd" in link] + [bell] * bell.exists()
        held += [line for line in Path("/proc/self/maps").read_text().splitlines() if "arena" in line]
        reported.write_text(f"{held}, saver alive: {harness.saver.is_alive}")
        if held or harness.saver.is_alive or not harness.saver.quit():
            return 3
        try:
            harness.saver.begin(9, 0, 0, 1, Callbacks(print, print, print))
        except UsageError:
            return 7
        return 4

    _, end = fork(child)
    assert end() == 7, reported.read_text()
    assert harness.commit(noise(2), 2).seq == 1


@pytest.mark.usefixtures("never_polled")
def test_forked_child_does_not_hide_death_of_saver(harness):
    harness.commit(noise(1), 1)
    in_flight = harness.begin(noise(2), 2).stage(1)
    assert in_flight.began.wait(SECONDS_MAX)
    _, end = fork(lambda: 0)
    try:
        # The child lives until the test ends it, so the end of the socket cannot be what reports the death.
        os.kill(harness.saver.pid, signal.SIGKILL)
        with pytest.raises(SaverError):
            in_flight.wait()
    finally:
        end()


# Watching a process


def test_death_is_seen_by_pidfd_and_start_time():
    with subprocess.Popen(["sleep", "600"]) as other:
        started = process_started(other.pid)
        watch, blind, wrong = (
            ProcessWatch(other.pid, started),
            ProcessWatch(other.pid, started),
            ProcessWatch(other.pid, "1"),
        )
        blind.close()
        assert (watch.is_alive, blind.is_alive, wrong.is_alive) == (True, True, False)
        assert (watch.timeout_ms, blind.timeout_ms) == (None, 500)
        os.kill(other.pid, signal.SIGSTOP)
        assert watch.is_alive
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        # Not waited for yet: a zombie counts as dead.
        assert (watch.is_alive, blind.is_alive) == (False, False)
    watch.close()
    wrong.close()
    gone = ProcessWatch(other.pid, started)
    assert not gone.is_alive
    gone.close()


def test_death_is_seen_without_pidfd(address, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    harness = SaverHarness(address)
    try:
        assert harness.commit(noise(1), 1).seq == 0
        in_flight = harness.begin(noise(2), 2).stage(1)
        assert in_flight.began.wait(SECONDS_MAX)
        os.kill(harness.saver.pid, signal.SIGKILL)
        with pytest.raises(SaverError):
            in_flight.wait()
    finally:
        harness.close()
