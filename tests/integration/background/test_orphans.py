"""Protects checkpoints when the trainer dies: staged states are published, others are dropped, and no process is left.

A restarted trainer waits for the saver of the dead one, and logs that: no older state is resumed and then overtaken. A
forked child that outlives the trainer has no effect.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError
from ckstore.format import paths
from ckstore.processes import process_started
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from support.saver_harness import SECONDS_MAX, SaverHarness, links, noise, until

STAGED = "in_flight.stage().finish(); say('staged')"
STAGING = "in_flight.stage(3); say('staging')"
FORKED = """
loader = os.fork()
if loader == 0:
    # A data loader: it inherits what its parent has, and outlives it.
    os.close(1)
    os.close(2)
    time.sleep(600)
say(loader)
"""


def lease_path(address):
    return Path(address) / paths.lease_name("main")


BEGIN = "in_flight = harness.begin(noise(1), 1); assert in_flight.began.wait(60)\n"
STOPPED = BEGIN + "stop(harness.saver.pid)\n" + STAGED
"""Everything is staged, and the saver is stopped before it can publish."""


# The checkpoint


def test_staged_state_of_dead_trainer_is_published(address, child):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    assert trainer.is_saver_alive
    assert lease_path(address).exists()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    assert not lease_path(address).exists()
    with ckstore.open(address) as store:
        assert store.steps() == [1]
        assert np.array_equal(store.restore()["w0"], noise(1)["w0"])
        store.verify("decode")


def test_tags_of_dead_trainers_commit_are_set(address, child):
    trainer = child(STOPPED.replace("noise(1), 1", "noise(1), 1, tags=['last']"))
    assert trainer.hear() == "staged"
    trainer.kill()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.tags() == {"last": 0}


def test_half_staged_state_is_never_published(address, child):
    trainer = child("in_flight = harness.begin(noise(1, 64 << 20), 1); assert in_flight.began.wait(60)\n" + STAGING)
    assert trainer.hear() == "staging"
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()
    with ckstore.open(address) as store:
        assert store.steps() == []
    assert not [path for path in Path(address).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


def test_unconfirmed_slot_is_not_published(address, child):
    # All bytes are there, but the guard has not confirmed that nothing changed meanwhile.
    trainer = child(BEGIN + "in_flight.stage(); say('there')")
    assert trainer.hear() == "there"
    trainer.kill()
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == []


HELD = """
import fcntl, stat, struct, termios

def unheard():
    # Of each socket, how much was sent that nobody has received.
    found = []
    for fd in range(64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found += struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
    return found

in_flight = harness.begin(noise(1), 1, start_delay_ms=600_000)
until(lambda: unheard() == [0], "an ear for what was begun")
in_flight.stage()
in_flight.slot.state = 2
say(len(in_flight.events))
"""


def stage_and_kill(trainer):
    """Kill a trainer whose saver has not begun the staged state, and wait until that saver has ended."""
    assert trainer.hear() == "0", "nothing has begun"
    trainer.kill()
    trainer.wait_saver()


def test_state_staged_during_start_delay_is_published(address, child):
    # The saver has the lease of the previous commit; only the slot says that everything is staged.
    stage_and_kill(child("harness.commit(noise(0), 0)\n" + HELD))
    with ckstore.open(address) as store:
        assert store.steps() == [0, 1]
        assert np.array_equal(store.restore()["w0"], noise(1)["w0"])


def test_state_staged_before_lease_is_not_published(address, child):
    stage_and_kill(child("assert harness.saver.wait_ready(60)\n" + HELD))
    assert not lease_path(address).exists()
    with ckstore.open(address) as store:
        assert store.steps() == []


def test_earlier_checkpoints_exist(address, child):
    trainer = child("harness.commit(noise(0), 0)\n" + BEGIN + "in_flight.stage(1); say('staging')")
    assert trainer.hear() == "staging"
    trainer.kill()
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == [0]
        assert np.array_equal(store.restore()["w0"], noise(0)["w0"])


def test_saver_of_idle_dead_trainer_releases_lease(address, child):
    trainer = child("harness.commit(noise(0), 0); say('idle')")
    assert trainer.hear() == "idle"
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()


def test_saver_of_immediately_dead_trainer_ends(address, child):
    trainer = child("")
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()


def test_last_commit_of_exiting_trainer_is_published(address, child):
    trainer = child(BEGIN + "in_flight.stage().finish(); sys.exit(0)")
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_error_after_death_of_trainer_goes_to_stderr(address, child):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    packs = Path(address) / "packs"
    packs.rename(packs.with_name("gone"))
    packs.touch()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    text = trainer.close()
    assert f"ckstore saver (pid {trainer.saver_pid}): the commit of step 1 failed" in text


# Forked children


def holds_arena(pid):
    """Return whether a process has mapped an arena, or has one open."""
    return any("ckstore-arena" in text for text in (*links(pid), Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.parametrize("is_staged", [True, False], ids=["staged", "staging"])
def test_forked_child_does_not_hide_death_of_trainer(address, child, is_staged):
    trainer = child(FORKED + BEGIN + FORKED + (STAGED if is_staged else STAGING))
    loaders = [int(trainer.hear()), int(trainer.hear())]
    try:
        assert trainer.hear() == ("staged" if is_staged else "staging")
        trainer.kill()
        trainer.wait_saver()
        for loader in loaders:
            assert process_started(loader) is not None
            # It has no memory of the arena: neither mapped nor by descriptor.
            until(lambda loader=loader: not holds_arena(loader), "the end of what a data loader holds")
        with ckstore.open(address) as store:
            assert store.steps() == ([1] if is_staged else [])
    finally:
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)


# The restarted trainer


def in_thread(step):
    results = []
    thread = threading.Thread(target=lambda: results.append(step()), daemon=True)
    thread.start()
    return thread, results


def test_restarted_trainer_resumes_orphans_checkpoint(address, child, caplog):
    trainer = child("harness.commit(noise(0), 0)\n" + STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        thread, results = in_thread(store.restore)
        until(lambda: "waiting for the saver" in caplog.text)
        thread.join(0.1)
        assert not results, "nothing is restored while the orphan lives"
        os.kill(trainer.saver_pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        assert np.array_equal(results[0]["w0"], noise(1)["w0"])
        assert store.restored.step == 1
        store.commit(noise(2), 2)
        assert store.steps() == [0, 1, 2]
    expected = f"waiting for the saver (pid {trainer.saver_pid}) of the trainer that died to publish step 1"
    assert caplog.text.count(expected) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["commit", "saver"])
def test_first_commit_waits_for_the_orphan(address, child, caplog, is_async):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    if is_async:
        harness = SaverHarness(address)
        in_flight = harness.begin(noise(2), 2).stage().finish()
        thread, results = in_thread(in_flight.wait)
    else:
        store = ckstore.open(address)
        thread, results = in_thread(lambda: store.commit(noise(2), 2))
    until(lambda: f"waiting for the saver (pid {trainer.saver_pid})" in caplog.text)
    thread.join(0.1)
    assert not results
    os.kill(trainer.saver_pid, signal.SIGCONT)
    thread.join(SECONDS_MAX)
    assert results[0].seq == 1
    (harness if is_async else store).close()
    with ckstore.open(address) as reader:
        assert [info.step for info in reader.log()] == [2, 1]


def test_orphan_that_is_killed_is_not_waited_for(address, child, caplog):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store:
        thread, results = in_thread(repository_of(store).lease.wait_for_orphan)
        until(lambda: "waiting for the saver" in caplog.text)
        thread.join(0.1)
        assert not results
        os.kill(trainer.saver_pid, signal.SIGKILL)
        thread.join(SECONDS_MAX)
        assert results == [True]
        assert store.commit(noise(2), 2).seq == 0


def test_saver_of_living_trainer_is_not_waited_for(address, child):
    trainer = child("harness.commit(noise(0), 0)\n" + STOPPED)
    assert trainer.hear() == "staged"
    with ckstore.open(address) as store:
        assert not repository_of(store).lease.wait_for_orphan()
        assert store.restore()["w0"].size
        with pytest.raises(ConflictError, match=f"pid {trainer.saver_pid} .*the saver of pid {trainer.pid}"):
            store.commit(noise(2), 2)


def test_lease_is_not_taken_after_death_of_trainer(address, child):
    # A trainer that started meanwhile may have resumed an older state, because there was no lease to wait for.
    trainer = child("stop(harness.saver.pid)\nin_flight = harness.begin(noise(1), 1)\n" + STAGED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store:
        assert not repository_of(store).lease.wait_for_orphan()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == []


def test_trainer_that_called_exec_counts_as_dead(address, child):
    # Same pid and start time: the closed socket shows that the trainer is gone.
    becomes = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])"
    trainer = child(BEGIN + "stop(harness.saver.pid)\nin_flight.stage().finish(); say('staged')\n" + becomes)
    assert trainer.hear() == "staged"
    started = process_started(trainer.pid)
    until(lambda: b"time.sleep" in Path(f"/proc/{trainer.pid}/cmdline").read_bytes())
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    assert process_started(trainer.pid) == started
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_failed_orphan_is_reported_with_its_step(address, child, caplog):
    trainer = child("harness.commit(noise(0), 0)\n" + STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        thread, results = in_thread(store.restore)
        until(lambda: "to publish step 1" in caplog.text)
        os.kill(trainer.saver_pid, signal.SIGKILL)
        thread.join(SECONDS_MAX)
        assert np.array_equal(results[0]["w0"], noise(0)["w0"])
        assert store.restored.step == 0
    assert caplog.text.count("step 1 was not published") == 1


# Another node, whose /proc does not list the saver


@pytest.fixture
def on_another_node(monkeypatch):
    """Let this process appear to be on another node than its savers."""
    monkeypatch.setattr("ckstore.processes.boot_identity", lambda: "machine-b/boot/namespace")


@pytest.mark.parametrize("asks", ["restore", "latest", "steps", "commit"])
def test_restart_on_other_node_waits_for_saver(harness, address, caplog, request, asks):
    harness.commit(noise(0), 0)
    in_flight = harness.begin(noise(1), 1)
    assert in_flight.began.wait(SECONDS_MAX)
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        lease = repository_of(store).lease
        harness.saver.quit(is_waited=False)
        until(lambda: SaverPurpose.of(lease.holder().purpose).trainer_started == TRAINER_DEAD)
        request.getfixturevalue("on_another_node")
        calls = {"restore": store.restore, "latest": store.latest, "steps": store.steps}
        thread, results = in_thread(calls.get(asks, lambda: store.commit(noise(2), 2)))
        until(lambda: "waiting for the saver" in caplog.text)
        thread.join(0.1)
        assert not results, "nobody goes on while the saver may still publish"
        in_flight.stage().finish().wait()
        thread.join(SECONDS_MAX)
        assert results
        expected = (
            f"(pid {harness.saver.pid} on host {socket.gethostname()}) of the trainer that died to publish step 1"
        )
        assert expected in caplog.text
        assert store.steps() == ([0, 1, 2] if asks == "commit" else [0, 1])
        if asks == "restore":
            assert np.array_equal(results[0]["w0"], noise(1)["w0"])
