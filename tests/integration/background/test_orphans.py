"""The trainer dies: what was staged is published, what was not is gone, and nobody is left behind.

A trainer that is started again waits for the saver of the dead one, and says so: no older state is resumed and then
overtaken. A forked child that outlives the trainer hides nothing and keeps nothing.
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

STAGED = "handed.stage().finish(); say('staged')"
STAGING = "handed.stage(3); say('staging')"
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


BEGIN = "handed = desk.begin(noise(1), 1); assert handed.began.wait(60)\n"
STOPPED = BEGIN + "stop(desk.saver.pid)\n" + STAGED
"""All staged, and the saver stopped before it could publish: an orphan in the making."""


# What becomes of the checkpoint


def test_staged_checkpoint_of_a_dead_trainer_is_published_and_the_saver_ends(address, child):
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


def test_tags_of_a_dead_trainer_s_checkpoint_are_set(address, child):
    trainer = child(STOPPED.replace("noise(1), 1", "noise(1), 1, tags=['last']"))
    assert trainer.hear() == "staged"
    trainer.kill()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.tags() == {"last": 0}


def test_half_staged_checkpoint_of_a_dead_trainer_is_never_published(address, child):
    trainer = child("handed = desk.begin(noise(1, 64 << 20), 1); assert handed.began.wait(60)\n" + STAGING)
    assert trainer.hear() == "staging"
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()
    with ckstore.open(address) as store:
        assert store.steps() == []
    assert not [path for path in Path(address).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


def test_staged_bytes_of_a_slot_that_is_not_said_to_be_staged_are_not_published(address, child):
    # Everything lies there, but the guard has not said that nothing changed underneath.
    trainer = child(BEGIN + "handed.stage(); say('there')")
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

handed = desk.begin(noise(1), 1, start_delay_ms=600_000)
until(lambda: unheard() == [0], "an ear for what was begun")
handed.stage()
handed.slot.state = 2
say(len(handed.events))
"""


def staged_and_killed(trainer):
    """Kill a trainer whose saver has not begun what is staged, and wait until that saver has ended."""
    assert trainer.hear() == "0", "nothing has begun"
    trainer.kill()
    trainer.wait_saver()


def test_what_was_staged_while_its_saver_held_back_is_published(address, child):
    # The saver has the lease of the commit before; nobody tells it that all is staged but the slot itself.
    staged_and_killed(child("desk.commit(noise(0), 0)\n" + HELD))
    with ckstore.open(address) as store:
        assert store.steps() == [0, 1]
        assert np.array_equal(store.restore()["w0"], noise(1)["w0"])


def test_what_was_staged_before_its_saver_had_the_run_is_not_published(address, child):
    staged_and_killed(child("assert desk.saver.wait_ready(60)\n" + HELD))
    assert not lease_path(address).exists()
    with ckstore.open(address) as store:
        assert store.steps() == []


def test_checkpoints_before_the_half_staged_one_are_there(address, child):
    trainer = child("desk.commit(noise(0), 0)\n" + BEGIN + "handed.stage(1); say('staging')")
    assert trainer.hear() == "staging"
    trainer.kill()
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == [0]
        assert np.array_equal(store.restore()["w0"], noise(0)["w0"])


def test_saver_of_a_trainer_that_dies_idle_ends_and_gives_up_the_lease(address, child):
    trainer = child("desk.commit(noise(0), 0); say('idle')")
    assert trainer.hear() == "idle"
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()


def test_saver_of_a_trainer_that_dies_immediately_ends(address, child):
    trainer = child("")
    trainer.kill()
    trainer.wait_saver()
    assert not lease_path(address).exists()


def test_trainer_that_ends_by_itself_lets_its_last_checkpoint_be_published(address, child):
    trainer = child(BEGIN + "handed.stage().finish(); sys.exit(0)")
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_error_after_the_trainer_s_death_goes_to_stderr(address, child):
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
def test_forked_child_that_outlives_the_trainer_hides_nothing(address, child, is_staged):
    trainer = child(FORKED + BEGIN + FORKED + (STAGED if is_staged else STAGING))
    loaders = [int(trainer.hear()), int(trainer.hear())]
    try:
        assert trainer.hear() == ("staged" if is_staged else "staging")
        trainer.kill()
        trainer.wait_saver()
        for loader in loaders:
            assert process_started(loader) is not None
            # It keeps no memory of the arena: neither mapped nor by a descriptor.
            until(lambda loader=loader: not holds_arena(loader), "the end of what a data loader holds")
        with ckstore.open(address) as store:
            assert store.steps() == ([1] if is_staged else [])
    finally:
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)


# Who starts again


def in_thread(step):
    results = []
    thread = threading.Thread(target=lambda: results.append(step()), daemon=True)
    thread.start()
    return thread, results


def test_restarted_trainer_waits_for_the_orphan_and_resumes_its_checkpoint(address, child, caplog):
    trainer = child("desk.commit(noise(0), 0)\n" + STOPPED)
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
        desk = SaverHarness(address)
        handed = desk.begin(noise(2), 2).stage().finish()
        thread, results = in_thread(handed.wait)
    else:
        store = ckstore.open(address)
        thread, results = in_thread(lambda: store.commit(noise(2), 2))
    until(lambda: f"waiting for the saver (pid {trainer.saver_pid})" in caplog.text)
    thread.join(0.1)
    assert not results
    os.kill(trainer.saver_pid, signal.SIGCONT)
    thread.join(SECONDS_MAX)
    assert results[0].seq == 1
    (desk if is_async else store).close()
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


def test_saver_of_a_living_trainer_blocks_no_reader_and_no_second_writer_waits(address, child):
    trainer = child("desk.commit(noise(0), 0)\n" + STOPPED)
    assert trainer.hear() == "staged"
    with ckstore.open(address) as store:
        assert not repository_of(store).lease.wait_for_orphan()
        assert store.restore()["w0"].size
        with pytest.raises(ConflictError, match=f"pid {trainer.saver_pid} .*the saver of pid {trainer.pid}"):
            store.commit(noise(2), 2)


def test_lease_taken_after_the_trainer_s_death_makes_no_orphan(address, child):
    # Nobody could have waited for it: a trainer that was started in between may have resumed an older state.
    trainer = child("stop(desk.saver.pid)\nhanded = desk.begin(noise(1), 1)\n" + STAGED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store:
        assert not repository_of(store).lease.wait_for_orphan()
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == []


def test_trainer_that_became_another_program_is_gone_too(address, child):
    # Same pid, same start time: that nobody holds the socket any more is what tells.
    becomes = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])"
    trainer = child(BEGIN + "stop(desk.saver.pid)\nhanded.stage().finish(); say('staged')\n" + becomes)
    assert trainer.hear() == "staged"
    started = process_started(trainer.pid)
    until(lambda: b"time.sleep" in Path(f"/proc/{trainer.pid}/cmdline").read_bytes())
    os.kill(trainer.saver_pid, signal.SIGCONT)
    trainer.wait_saver()
    assert process_started(trainer.pid) == started
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_who_waits_for_an_orphan_in_vain_is_told_which_step_did_not_come(address, child, caplog):
    trainer = child("desk.commit(noise(0), 0)\n" + STOPPED)
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


# On another node, where /proc says nothing of the saver


@pytest.fixture
def on_another_node(monkeypatch):
    """Let this process be on another node than the savers that it starts."""
    monkeypatch.setattr("ckstore.processes.boot_identity", lambda: "machine-b/boot/namespace")


@pytest.mark.parametrize("asks", ["restore", "latest", "steps", "commit"])
def test_who_starts_the_run_again_waits_for_a_saver_that_still_publishes(desk, address, caplog, request, asks):
    desk.commit(noise(0), 0)
    handed = desk.begin(noise(1), 1)
    assert handed.began.wait(SECONDS_MAX)
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        lease = repository_of(store).lease
        desk.saver.quit(is_waited=False)
        until(lambda: SaverPurpose.of(lease.holder().purpose).trainer_started == TRAINER_DEAD)
        request.getfixturevalue("on_another_node")
        calls = {"restore": store.restore, "latest": store.latest, "steps": store.steps}
        thread, results = in_thread(calls.get(asks, lambda: store.commit(noise(2), 2)))
        until(lambda: "waiting for the saver" in caplog.text)
        thread.join(0.1)
        assert not results, "nobody goes on while the saver may still publish"
        handed.stage().finish().wait()
        thread.join(SECONDS_MAX)
        assert results
        expected = f"(pid {desk.saver.pid} on host {socket.gethostname()}) of the trainer that died to publish step 1"
        assert expected in caplog.text
        assert store.steps() == ([0, 1, 2] if asks == "commit" else [0, 1])
        if asks == "restore":
            assert np.array_equal(results[0]["w0"], noise(1)["w0"])
