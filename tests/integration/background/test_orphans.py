"""The trainer dies: what was staged is published, what was not is gone, and nobody is left behind.

A trainer that is started again waits for the saver of the dead one, and says so: no older state is resumed and then
overtaken. A forked child that outlives the trainer hides nothing and keeps nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError
from ckstore.format import layout
from ckstore.format.records import LeaseRecord, encode_record
from ckstore.store.lease import Lease
from ckstore.store.lease_record import SaverPurpose
from ckstore.store.orphans import is_orphan
from ckstore.store.processes import boot_identity, process_started
from support.saver_desk import SECONDS_MAX, Desk, links, noise, until

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
    return Path(address) / layout.lease_name("main")


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


def test_staged_bytes_without_the_last_word_are_not_published(address, child):
    # Everything lies there, but the guard has not said that nothing changed underneath.
    trainer = child(BEGIN + "handed.stage(); say('there')")
    assert trainer.hear() == "there"
    trainer.kill()
    trainer.wait_saver()
    with ckstore.open(address) as store:
        assert store.steps() == []


HELD = """
handed = desk.begin(noise(1), 1, hold_ms=600_000)
time.sleep(0.2)
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


def test_saver_of_a_trainer_that_dies_at_once_ends(address, child):
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

        def restore():
            # What Store.restore() does first when no checkpoint is named.
            was_there = store._parts.lease.wait_for_orphan()
            return was_there, store.restore()

        thread, results = in_thread(restore)
        until(lambda: "waiting for the saver" in caplog.text)
        time.sleep(0.1)
        assert not results, "nothing is restored while the orphan lives"
        os.kill(trainer.saver_pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        was_there, state = results[0]
        assert was_there
        assert np.array_equal(state["w0"], noise(1)["w0"])
        assert store.restored.step == 1
        store.commit(noise(2), 2)
        assert store.steps() == [0, 1, 2]
    expected = f"waiting for the saver (pid {trainer.saver_pid}) of the trainer that died to publish step 1"
    assert caplog.text.count(expected) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["commit", "saver"])
def test_first_commit_waits_for_the_orphan(address, child, is_async):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    if is_async:
        desk = Desk(address)
        handed = desk.begin(noise(2), 2).stage().finish()
        thread, results = in_thread(handed.wait)
    else:
        store = ckstore.open(address)
        thread, results = in_thread(lambda: store.commit(noise(2), 2))
    thread.join(0.7)
    assert not results
    os.kill(trainer.saver_pid, signal.SIGCONT)
    thread.join(SECONDS_MAX)
    assert results[0].seq == 1
    (desk if is_async else store).close()
    with ckstore.open(address) as reader:
        assert [info.step for info in reader.log()] == [2, 1]


def test_orphan_that_is_killed_is_not_waited_for(address, child):
    trainer = child(STOPPED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store:
        thread, results = in_thread(store._parts.lease.wait_for_orphan)
        thread.join(0.2)
        assert not results
        os.kill(trainer.saver_pid, signal.SIGKILL)
        thread.join(SECONDS_MAX)
        assert results == [True]
        assert store.commit(noise(2), 2).seq == 0


def test_saver_of_a_living_trainer_blocks_no_reader_and_no_second_writer_waits(address, child):
    trainer = child("desk.commit(noise(0), 0)\n" + STOPPED)
    assert trainer.hear() == "staged"
    with ckstore.open(address) as store:
        assert not store._parts.lease.wait_for_orphan()
        assert store.restore()["w0"].size
        with pytest.raises(ConflictError, match=f"pid {trainer.saver_pid} .*the saver of pid {trainer.pid}"):
            store.commit(noise(2), 2)


def put_holder(backend, **facts):
    record = {
        "host": os.uname().nodename,
        "boot_id": boot_identity(),
        "pid": os.getppid(),
        "process_started": process_started(os.getppid()),
        "token": "ab" * 16,
        "acquired_ns": 1,
        "heartbeat_ns": 1,
        "purpose": SaverPurpose(4_000_000, "17", 5).text,
        **facts,
    }
    path = layout.lease_name("main")
    if backend.stat(path) is not None:
        backend.unlink(path)
    backend.create(path, encode_record(LeaseRecord(**record)), sync=False)
    return LeaseRecord(**record)


@pytest.mark.parametrize(
    "facts",
    [
        {"purpose": ""},
        {"purpose": "something else"},
        {"purpose": "saver:x:17:5"},
        {"purpose": f"saver:{os.getpid()}:{process_started(os.getpid())}:5"},
        {"pid": 4_000_000},
        {"process_started": "1"},
        {"boot_id": "another/boot/namespace"},
        {"boot_id": ""},
    ],
    ids=["trainer", "other", "garbage", "trainer-lives", "dead", "pid-used-again", "elsewhere", "unknown-boot"],
)
def test_only_a_living_saver_of_a_dead_trainer_on_this_boot_is_an_orphan(store, backend, clock, facts):
    store.commit({"a": 1}, 1)
    store._parts.lease.release()
    assert is_orphan(put_holder(backend))
    assert not is_orphan(put_holder(backend, **facts))
    assert not Lease(backend, "main", clock).wait_for_orphan()
    assert clock.slept == 0


def test_trainer_whose_pid_the_next_one_has_is_said_to_have_died(store, backend, clock, caplog):
    store.commit({"a": 1}, 1)
    store._parts.lease.release()
    # In a container the trainer that is started again often has the pid of the one before.
    put_holder(backend, purpose=SaverPurpose(os.getpid(), "17", 5).text)
    clock.on_sleep = lambda: backend.unlink(layout.lease_name("main"))
    with caplog.at_level(logging.WARNING, "ckstore"):
        assert Lease(backend, "main", clock).wait_for_orphan()
    assert "of the trainer that died to publish step 5" in caplog.text


def test_wait_for_an_orphan_says_so_again_after_a_while(store, backend, clock, caplog):
    store.commit({"a": 1}, 1)
    store._parts.lease.release()
    put_holder(backend)

    def leave_at_last():
        if clock.slept > 25:
            backend.unlink(layout.lease_name("main"))

    clock.on_sleep = leave_at_last
    with caplog.at_level(logging.WARNING, "ckstore"):
        assert Lease(backend, "main", clock).wait_for_orphan()
    assert caplog.text.count("to publish step 5") == 1
    assert caplog.text.count("still waiting for the saver") == 2


def test_purposes_are_read_as_they_were_written():
    for purpose in (SaverPurpose(1, "2", 3), SaverPurpose(1, "2")):
        assert SaverPurpose.of(purpose.text) == purpose
    assert SaverPurpose.of("saver:1:2") is None


def test_lease_taken_after_the_trainer_s_death_makes_no_orphan(address, child):
    # Nobody could have waited for it: a trainer that was started in between may have resumed an older state.
    trainer = child("stop(desk.saver.pid)\nhanded = desk.begin(noise(1), 1)\n" + STAGED)
    assert trainer.hear() == "staged"
    trainer.kill()
    with ckstore.open(address) as store:
        assert not store._parts.lease.wait_for_orphan()
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
