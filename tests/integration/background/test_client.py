"""The trainer's end: every ticket ends once, a dead saver is noticed immediately, and nothing is left behind.

Forked children have no part in a saver, and keep nothing of it alive.
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
from ckstore.background.client import Callbacks, Saver
from ckstore.background.protocol import ProcessWatch
from ckstore.errors import BackendError, MalformedError, SaverError, UsageError
from ckstore.format import paths
from ckstore.processes import process_started
from support.saver_harness import SECONDS_MAX, SaverHarness, fork, links, noise, stop, until


def steps(address):
    with ckstore.open(address) as store:
        return store.steps()


@pytest.fixture
def never_polled(monkeypatch):
    """Let whoever looks at intervals whether a process lives look too late."""
    monkeypatch.setattr(protocol, "POLL_SECONDS", 2 * SECONDS_MAX)


# Death


@pytest.mark.usefixtures("never_polled")
@pytest.mark.parametrize("is_staged", [False, True], ids=["staging", "staged"])
def test_killed_saver_is_noticed_immediately_and_the_next_one_works(desk, address, caplog, is_staged):
    desk.commit(noise(1), 1)
    handed = desk.begin(noise(2, 24 << 20), 2).stage(4)
    assert handed.began.wait(SECONDS_MAX)
    if is_staged:
        stop(desk.saver.pid)
        handed.stage().finish()
    os.kill(desk.saver.pid, signal.SIGKILL)
    with caplog.at_level(logging.ERROR, "ckstore"), pytest.raises(SaverError, match="was killed by SIGKILL") as caught:
        handed.wait()
    assert handed.events == ["began", "failed", "free"]
    assert (caught.value.pid, caught.value.saver_exit_code, caught.value.todo.split(":")[0]) == (
        desk.saver.pid,
        -signal.SIGKILL,
        "commit again",
    )
    assert "killed by SIGKILL" in caplog.text
    assert not desk.saver.is_alive
    with pytest.raises(SaverError):
        desk.begin(noise(2), 2)
    assert steps(address) == [1]
    desk.start()
    # The dead one's lease is no obstacle, and its slot is as good as before.
    assert desk.commit(noise(3), 3).seq == 1


def test_dead_saver_is_no_zombie_and_holds_no_lease(desk):
    desk.commit(noise(1), 1)
    os.kill(desk.saver.pid, signal.SIGKILL)
    until(lambda: not desk.saver.is_alive)
    assert not Path(f"/proc/{desk.saver.pid}").exists()
    assert desk.saver.release_lease()
    assert desk.saver.quit()


def test_saver_that_cannot_start_is_an_error_of_the_ticket(address, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    desk = SaverHarness(address)
    try:
        with pytest.raises(SaverError, match="ended with code 1"):
            desk.commit(noise(1), 1)
    finally:
        desk.close()


def test_start_without_an_interpreter_is_an_error(address, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(links())
    arena = Arena.create()
    with pytest.raises(SaverError, match="cannot start a saver process"):
        Saver.start(address, "main", arena)
    arena.close()
    gc.collect()
    assert len(links()) <= before


def test_what_the_saver_said_before_it_died_counts(address, monkeypatch):
    """The thread that listens has just heard nothing when the saver publishes, says so, and dies."""
    looks, is_alive = threading.Event(), ProcessWatch.is_alive.fget
    monkeypatch.setattr(ProcessWatch, "is_alive", property(lambda watch: looks.wait(SECONDS_MAX) and is_alive(watch)))
    desk = SaverHarness(address)
    try:
        handed = desk.begin(noise(1), 1).stage().finish()
        # The thread that publishes gives up the lease after that: then it has said all of it.
        assert not desk.saver.release_lease(0)
        until(lambda: steps(address) == [1] and not (Path(address) / paths.lease_name("main")).exists())
        os.kill(desk.saver.pid, signal.SIGKILL)
        os.waitid(os.P_PID, desk.saver.pid, os.WEXITED | os.WNOWAIT)
        looks.set()
        assert handed.wait().seq == 0
        assert handed.events == ["began", "done", "free"]
    finally:
        looks.set()
        desk.close()


def test_stopped_saver_is_waited_for_and_reported(desk, caplog, monkeypatch):
    monkeypatch.setattr(client, "WARN_AFTER_SECONDS", 0.1)
    desk.saver.wait_ready(SECONDS_MAX)
    stop(desk.saver.pid)
    handed = desk.begin(noise(1), 1).stage().finish()
    waiter = threading.Thread(target=desk.saver.wait, args=(handed.free, SECONDS_MAX, "publish step 1"), daemon=True)
    with caplog.at_level(logging.WARNING, "ckstore"):
        waiter.start()
        until(lambda: "to publish step 1; the process is stopped" in caplog.text, "the word of it")
    assert "still waiting for the saver" in caplog.text
    assert not handed.ended.is_set()
    assert desk.saver.is_alive
    os.kill(desk.saver.pid, signal.SIGCONT)
    waiter.join(SECONDS_MAX)
    assert not waiter.is_alive()
    assert handed.wait().seq == 0


def test_bells_and_messages_never_wait_for_a_stopped_saver(desk):
    desk.saver.wait_ready(SECONDS_MAX)
    stop(desk.saver.pid)
    begun = time.monotonic()
    for _ in range(10_000):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(desk.saver.bell, 1)
    for number in range(10_000):
        desk.saver.abort(number)
    # Whoever waited for it would wait for ever, and longer than this with a pause for each that finds no room.
    assert time.monotonic() - begun < SECONDS_MAX
    os.kill(desk.saver.pid, signal.SIGCONT)


def test_saver_that_says_what_nobody_understands_is_killed(address, arena, altered, caplog, monkeypatch):
    monkeypatch.setattr(client, "GRACE_SECONDS", 2 * SECONDS_MAX)
    altered.run("os.write(channel, b'\\xffnonsense'); time.sleep(600)")
    with caplog.at_level(logging.ERROR, "ckstore"):
        saver = Saver.start(address, "main", arena)
        assert saver.quit(SECONDS_MAX)
    assert not Path(f"/proc/{saver.pid}").exists()
    assert "because of an invalid message" in caplog.text
    with pytest.raises(MalformedError):
        saver.begin(1, 0, 0, 1, Callbacks(print, print, print))


def test_saver_that_closes_its_socket_and_lives_on_is_killed(address, arena, altered, monkeypatch):
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.05)
    altered.run("os.close(channel); time.sleep(600)")
    saver = Saver.start(address, "main", arena)
    assert saver.quit(SECONDS_MAX)
    with pytest.raises(SaverError, match="was killed by SIGKILL"):
        saver.begin(1, 0, 0, 1, Callbacks(print, print, print))


def test_saver_says_that_a_ticket_has_begun_before_that_it_has_ended(altered, address):
    """A message of a ticket that comes after its last one makes the trainer kill the saver."""
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
    desk = SaverHarness(address)
    try:
        desk.commit({"a": 1}, 1)
        # It has the lease: that is said by the thread that listens, while the other one could fail.
        handed = desk.begin({"a": 2}, 2).stage().finish()
        with pytest.raises(BackendError, match="does not answer"):
            handed.wait()
        assert handed.events == ["began", "failed", "free"]
        assert desk.commit({"a": 3}, 3).seq == 1
    finally:
        desk.close()


# The end


def test_quit_carries_through_what_has_begun(desk, address):
    handed = desk.begin(noise(1), 1).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    assert not desk.saver.quit(0.1)
    handed.stage().finish()
    assert desk.saver.quit(SECONDS_MAX)
    assert handed.receipt.seq == 0
    assert handed.events == ["began", "done", "free"]
    assert not (Path(address) / paths.lease_name("main")).exists()


def test_quit_that_is_not_waited_for_leaves_no_zombie(desk, address):
    desk.commit(noise(1), 1)
    desk.saver.quit(is_waited=False)
    until(lambda: not Path(f"/proc/{desk.saver.pid}").exists(), "the end of the saver")
    assert steps(address) == [1]


def test_many_savers_leave_no_descriptor_thread_or_process(address):
    def count():
        gc.collect()
        return len(links()), threading.active_count()

    SaverHarness(address).close()
    before = count()
    pids = []
    for step in range(2):
        desk = SaverHarness(address)
        desk.commit(noise(step, 1 << 20), step)
        pids.append(desk.saver.pid)
        if step % 2:
            os.kill(desk.saver.pid, signal.SIGKILL)
        desk.close()
        del desk
    until(lambda: all(map(int.__le__, count(), before)), "the end of threads and descriptors")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_many_commits_leave_no_descriptor_in_either_process(desk):
    desk.commit(noise(0, 1 << 20), 0)

    def count():
        gc.collect()
        return len(links()), len(links(desk.saver.pid))

    before = count()
    for step in range(1, 30):
        desk.commit(noise(step, 1 << 20), step)
    # Fewer is well: what earlier tests left may be collected meanwhile. A beat of the lease has one for a moment.
    until(lambda: all(map(int.__le__, count(), before)), "the end of descriptors")


def test_callback_that_raises_is_logged_and_harms_no_commit(desk, caplog):
    def fail():
        raise ValueError("a fault of the caller")

    handed = desk.begin(noise(1), 1, callbacks=lambda given: dataclasses.replace(given, on_began=fail))
    with caplog.at_level(logging.ERROR, "ckstore"):
        handed.stage().finish().wait()
    assert "a fault of the caller" in caplog.text
    assert desk.commit(noise(2), 2).seq == 1


# Forked children


def test_forked_child_cannot_use_the_saver_and_holds_nothing_of_it(desk, tmp_path):
    desk.commit(noise(1), 1)
    told = tmp_path / "held"
    bell = Path(f"/proc/self/fd/{desk.saver.bell}")
    assert bell.exists()

    def child():
        # Other tests may have left eventfds of their own.
        held = [link for link in links() if "arena" in link or "pidfd" in link] + [bell] * bell.exists()
        held += [line for line in Path("/proc/self/maps").read_text().splitlines() if "arena" in line]
        told.write_text(f"{held}, saver alive: {desk.saver.is_alive}")
        if held or desk.saver.is_alive or not desk.saver.quit():
            return 3
        try:
            desk.saver.begin(9, 0, 0, 1, Callbacks(print, print, print))
        except UsageError:
            return 7
        return 4

    _, end = fork(child)
    assert end() == 7, told.read_text()
    assert desk.commit(noise(2), 2).seq == 1


@pytest.mark.usefixtures("never_polled")
def test_forked_child_does_not_hide_the_death_of_the_saver(desk):
    desk.commit(noise(1), 1)
    handed = desk.begin(noise(2), 2).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    _, end = fork(lambda: 0)
    try:
        # The child lives until the test lets it go, so what tells is not the end of a socket.
        os.kill(desk.saver.pid, signal.SIGKILL)
        with pytest.raises(SaverError):
            handed.wait()
    finally:
        end()


# Watching a process


def test_watch_sees_death_by_descriptor_and_by_start_time():
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
        # Not yet waited for: a zombie is dead.
        assert (watch.is_alive, blind.is_alive) == (False, False)
    watch.close()
    wrong.close()
    gone = ProcessWatch(other.pid, started)
    assert not gone.is_alive
    gone.close()


def test_system_without_pidfds_is_watched_all_the_same(address, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    desk = SaverHarness(address)
    try:
        assert desk.commit(noise(1), 1).seq == 0
        handed = desk.begin(noise(2), 2).stage(1)
        assert handed.began.wait(SECONDS_MAX)
        os.kill(desk.saver.pid, signal.SIGKILL)
        with pytest.raises(SaverError):
            handed.wait()
    finally:
        desk.close()
