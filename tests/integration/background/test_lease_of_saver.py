"""Protects the lease from the first staged byte on, however long the saver takes to start.

A trainer takes the lease in the name of its saver. If the trainer dies or drops its handle before the saver has opened
the store, other processes find this lease and wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import background_of, repository_of, saver_of
from ckstore.errors import ConflictError
from ckstore.format import paths
from support.saver_harness import SECONDS_MAX, noise, stop, until

OPENED = """
import gc, ckstore
from ckstore import _testing
from ckstore.background import commits as handover
store = ckstore.open(folder)
{before}
"""
READY = """
store.prewarm(noise(1))
saver_pid = _testing.saver_of(store).pid
stop(saver_pid)
say(saver_pid)
"""
STARTING = """
# As it is while Python starts.
start = handover.Saver.start
def started(*facts, **words):
    saver = start(*facts, **words)
    stop(saver.pid)
    say(saver.pid)
    return saver
handover.Saver.start = started
"""
SUBMITTED = """
pending = store.commit_async(noise(1), 1)
# All is copied, and nobody waits for the saver.
pending.wait_staged(1e-3)
say("in_flight")
"""
BY_ITSELF = "store.commit(noise(0), 0)"
GIVEN_BACK = "store.commit_async(noise(0), 0).result(); store.commit(noise(0), 0)"
WAYS = {
    "ready, a first commit": OPENED.format(before="") + READY,
    "ready, after one of the trainer's own": OPENED.format(before=BY_ITSELF) + READY,
    "ready, after the lease was given back": OPENED.format(before=GIVEN_BACK) + READY,
    "starting, a first commit": OPENED.format(before="") + STARTING,
    "starting, after one of the trainer's own": OPENED.format(before=BY_ITSELF) + STARTING,
}


def in_thread(step):
    results = []
    thread = threading.Thread(target=lambda: results.append(step()), daemon=True)
    thread.start()
    return thread, results


@contextlib.contextmanager
def going_on_at_last(pid):
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def assert_waits_for(pid, address, caplog):
    """Restore, which must wait until the stopped saver continues and has published."""
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        thread, results = in_thread(store.restore)
        until(lambda: f"waiting for the saver (pid {pid}) of the trainer that died to publish step 1" in caplog.text)
        time.sleep(0.1)
        assert not results, "nothing older is resumed while it may still publish"
        os.kill(pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        assert np.array_equal(results[0]["w0"], noise(1)["w0"])
        store.commit(noise(2), 2)


@pytest.mark.parametrize("way", WAYS)
def test_staged_state_of_starting_saver_is_published(address, child, caplog, way):
    trainer = child(WAYS[way] + SUBMITTED, has_harness=False)
    with going_on_at_last(trainer.saver_pid):
        assert trainer.hear() == "in_flight"
        trainer.kill()
        assert_waits_for(trainer.saver_pid, address, caplog)


@pytest.mark.parametrize("way", WAYS)
def test_others_wait_for_starting_saver(address, child, caplog, way):
    dropped = "pending = None; del store; gc.collect(); say('dropped')"
    trainer = child(WAYS[way] + SUBMITTED + dropped, has_harness=False)
    with going_on_at_last(trainer.saver_pid):
        assert (trainer.hear(), trainer.hear()) == ("in_flight", "dropped")
        assert_waits_for(trainer.saver_pid, address, caplog)


def test_incomplete_state_of_dead_trainer_is_dropped(address, child, caplog):
    code = """
from ckstore.background.staging import Staging
Staging.copy_now = lambda self: (say("copying"), time.sleep(600))
store.commit_async(noise(1), 1)
"""
    trainer = child(WAYS["ready, a first commit"] + code, has_harness=False)
    with going_on_at_last(trainer.saver_pid):
        assert trainer.hear() == "copying"
        trainer.kill()
        with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
            thread, results = in_thread(store.latest)
            until(lambda: "waiting for the saver" in caplog.text)
            os.kill(trainer.saver_pid, signal.SIGCONT)
            thread.join(SECONDS_MAX)
            assert results == [None]
    assert "step 1 was not published" in caplog.text


def test_first_commit_waits_for_orphan_before_copying(address, child, caplog):
    trainer = child(WAYS["ready, a first commit"] + SUBMITTED, has_harness=False)
    pid = trainer.saver_pid
    with going_on_at_last(pid), ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        assert trainer.hear() == "in_flight"
        trainer.kill()
        thread, results = in_thread(lambda: store.commit_async(noise(2), 2))
        until(lambda: "waiting for the saver" in caplog.text)
        assert saver_of(store) is None
        assert not results
        os.kill(pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        assert results[0].result(SECONDS_MAX).seq == 1
        assert store.steps() == [1, 2]


def test_lease_moves_to_the_saver_and_back(folder):
    with ckstore.open(folder) as store:
        holder = repository_of(store).lease.holder
        for step in range(0, 6, 2):
            store.commit(noise(step), step)
            assert holder().pid == os.getpid()
            pending = store.commit_async(noise(step + 1), step + 1)
            assert holder().pid == background_of(store).saver_pid
            token = holder().token
            pending.result(SECONDS_MAX)
            assert holder().token == token, "it is adopted"
            with ckstore.open(folder) as other, pytest.raises(ConflictError, match="the saver of pid"):
                other.commit(noise(9), 9)
        assert store.steps() == list(range(6))
    assert not (Path(folder) / paths.lease_name("main")).exists()


def test_unused_lease_of_saver_is_returned(folder):
    with ckstore.open(folder) as store:
        store.prewarm(noise(0))
        saver, lease = saver_of(store), repository_of(store).lease
        saver.lease = lease.transfer_to(saver.pid, 5)
        assert saver.lease
        store.commit(noise(1), 1)
        assert store.restore(1)["w0"].size
        assert lease.transfer_to(saver.pid, 6)
    assert not (Path(folder) / paths.lease_name("main")).exists()


def test_lease_is_not_given_to_a_releasing_saver(folder, monkeypatch):
    with ckstore.open(folder) as store:
        store.commit_async(noise(0), 0).result(SECONDS_MAX)
        store.wait()
        saver, lease = saver_of(store), repository_of(store).lease
        assert saver.lease == lease.holder().token
        with monkeypatch.context() as patches:
            # Ctrl-C before the answer arrives.
            patches.setattr(saver, "wait", lambda *facts, **words: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.commit(noise(1), 1)
        assert saver.lease is None
        assert store.commit_async(noise(2), 2).result(SECONDS_MAX).seq == 1
        assert saver.lease is None
        store.commit(noise(3), 3)
        store.commit_async(noise(4), 4).result(SECONDS_MAX)
        assert saver.lease == lease.holder().token


def test_lost_lease_is_given_to_the_saver_again(folder):
    with ckstore.open(folder) as store, ckstore.open(folder) as other:
        store.commit_async(noise(0), 0).result(SECONDS_MAX)
        store.wait()
        saver = saver_of(store)
        (Path(folder) / paths.lease_name("main")).unlink()
        other.commit(noise(1), 1)
        with pytest.raises(ConflictError):
            store.commit_async(noise(2), 2).result(SECONDS_MAX)
        other.close()
        # The slot is released a moment after the error; the next commit would wait for a saver that is stopped before
        # that.
        store.wait()
        stop(saver.pid)
        with going_on_at_last(saver.pid):
            store.commit_async(noise(3), 3)
            holder = repository_of(store).lease.holder()
            assert (holder.pid, holder.token) == (saver.pid, saver.lease)
