"""Who is to be waited for is seen from the first staged byte on, however long its saver takes to start.

A trainer takes the lease in the name of its saver: a restarted trainer, and any other process, finds it there when the
trainer dies or drops its handle before the saver has looked at the store.
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
from ckstore.errors import BackendError, ConflictError
from ckstore.format import layout
from ckstore.saver.arena import STAGED
from ckstore.store.lease_record import GONE, SaverPurpose
from support.saver_desk import SECONDS_MAX, DeskOf, noise, stop, until

HANDED_TO_ONE_THAT_SLEEPS = """
import gc, ckstore
store = ckstore.open(desk.address)
{before}
if {is_ready}:
    store.prewarm(noise(1))
else:
    # As it is while Python starts.
    from ckstore import handover
    start = handover.Saver.start
    def started(*facts, **words):
        saver = start(*facts, **words)
        stop(saver.pid)
        return saver
    handover.Saver.start = started
    store._handovers()._living_saver(store._policy)
pid = store._handover.saver_pid
stop(pid)
pending = store.commit_async(noise(1), 1)
pending._finish(False)
say(pid)
"""
WAYS = {
    "a first commit": "",
    "after one of the trainer's own": "store.commit(noise(0), 0)",
    "after the lease was given back": "store.commit_async(noise(0), 0).result(); store.commit(noise(0), 0)",
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
    """Restore, which waits until a stopped saver goes on, and see that it has published by then."""
    with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        thread, results = in_thread(store.restore)
        until(lambda: f"waiting for the saver (pid {pid}) of the trainer that died to publish step 1" in caplog.text)
        time.sleep(0.1)
        assert not results, "nothing older is resumed while it may still publish"
        os.kill(pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        assert np.array_equal(results[0]["w0"], noise(1)["w0"])
        store.commit(noise(2), 2)


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_staged_for_a_saver_that_has_not_looked_yet_is_published_when_the_trainer_dies(
    address, child, caplog, way, is_ready
):
    trainer = child(HANDED_TO_ONE_THAT_SLEEPS.format(before=WAYS[way], is_ready=is_ready))
    pid = int(trainer.hear())
    with going_on_at_last(pid):
        trainer.kill()
        assert_waits_for(pid, address, caplog)


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
@pytest.mark.parametrize("way", WAYS)
def test_other_processes_wait_for_the_saver_of_a_dropped_handle_that_has_not_looked_yet(
    address, child, caplog, way, is_ready
):
    dropped = "\npending = None; del store; gc.collect(); say('dropped')"
    trainer = child(HANDED_TO_ONE_THAT_SLEEPS.format(before=WAYS[way], is_ready=is_ready) + dropped)
    pid = int(trainer.hear())
    with going_on_at_last(pid):
        assert trainer.hear() == "dropped"
        assert_waits_for(pid, address, caplog)


def test_a_trainer_that_dies_before_all_was_staged_leaves_nothing_but_the_wait(address, child, caplog):
    code = HANDED_TO_ONE_THAT_SLEEPS.partition("pending =")[0].format(before="", is_ready=True)
    code += "from ckstore.staging.state import Staging\nStaging.copy_now = lambda self: (say(pid), time.sleep(600))\n"
    trainer = child(code + "store.commit_async(noise(1), 1)")
    pid = int(trainer.hear())
    with going_on_at_last(pid):
        trainer.kill()
        with ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
            thread, results = in_thread(store.latest)
            until(lambda: "waiting for the saver" in caplog.text)
            os.kill(pid, signal.SIGCONT)
            thread.join(SECONDS_MAX)
            assert results == [None]
    assert "step 1 was not published" in caplog.text


def test_a_lease_goes_to_the_saver_and_comes_back(folder):
    with ckstore.open(folder) as store:
        holder = store._parts.lease.holder
        for step in range(0, 6, 2):
            store.commit(noise(step), step)
            assert holder().pid == os.getpid()
            pending = store.commit_async(noise(step + 1), step + 1)
            assert holder().pid == store._handover.saver_pid
            token = holder().token
            pending.result(SECONDS_MAX)
            assert holder().token == token, "it is adopted"
            with ckstore.open(folder) as other, pytest.raises(ConflictError, match="the saver of pid"):
                other.commit(noise(9), 9)
        assert store.steps() == list(range(6))
    assert not (Path(folder) / layout.lease_name("main")).exists()


def test_a_saver_to_which_nothing_was_said_gives_back_what_was_lent(folder):
    with ckstore.open(folder) as store:
        store.prewarm(noise(0))
        saver = store._handover._saver
        assert store._parts.lease.lend(saver.pid, 5)
        saver.lease = "it was lent"
        store.commit(noise(1), 1)
        assert store.restore(1)["w0"].size
        assert store._parts.lease.lend(saver.pid, 6)
    assert not (Path(folder) / layout.lease_name("main")).exists()


def test_nothing_is_lent_to_a_saver_that_may_give_it_back_at_any_moment(folder, monkeypatch):
    with ckstore.open(folder) as store:
        store.commit_async(noise(0), 0).result(SECONDS_MAX)
        store.wait()
        saver = store._handover._saver
        assert saver.lease == store._parts.lease.holder().token
        with monkeypatch.context() as patches:
            # Ctrl-C before the answer comes.
            patches.setattr(saver, "wait", lambda *facts, **words: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.commit(noise(1), 1)
        assert saver.lease is None
        assert store.commit_async(noise(2), 2).result(SECONDS_MAX).seq == 1
        assert saver.lease is None
        store.commit(noise(3), 3)
        store.commit_async(noise(4), 4).result(SECONDS_MAX)
        assert saver.lease == store._parts.lease.holder().token


def test_a_lease_that_was_taken_over_is_lent_anew(folder):
    with ckstore.open(folder) as store, ckstore.open(folder) as other:
        store.commit_async(noise(0), 0).result(SECONDS_MAX)
        store.wait()
        pid = store._handover.saver_pid
        (Path(folder) / layout.lease_name("main")).unlink()
        other.commit(noise(1), 1)
        with pytest.raises(ConflictError):
            store.commit_async(noise(2), 2).result(SECONDS_MAX)
        other.close()
        # Its slot is free a moment after its error; stopped before that, the saver would be waited for.
        store.wait()
        stop(pid)
        with going_on_at_last(pid):
            store.commit_async(noise(3), 3)
            holder = store._parts.lease.holder()
            assert (holder.pid, holder.token) == (pid, store._handover._saver.lease)


def begun(server, lease, *, is_lent):
    """Say that a state is begun and staged, by a trainer that has died since, and have it committed."""
    handed = DeskOf(server).begin(noise(1), 1, lease=lease).stage()
    handed.slot.state = STAGED
    server._board.tell_gone()
    assert server._tickets[1].has_lease is is_lent
    server._committer.commit(server._tickets[1])


@pytest.mark.parametrize("lent", ["this", "another", "none"])
def test_a_ticket_that_was_begun_with_the_lease_outlives_a_trainer_that_dies_at_once(
    server, address, monkeypatch, lent
):
    with ckstore.open(address) as store:
        server._committer.open()
        token = store._parts.lease.lend(os.getpid(), 3)
        monkeypatch.setattr(type(server._trainer), "is_alive", property(lambda watch: False))
        begun(server, {"this": token, "another": "ab" * 16, "none": ""}[lent], is_lent=lent == "this")
        assert store._parts.lease.holder() is not None
        server._committer.close()
        assert store._parts.lease.holder() is None
        assert [info.step for info in store.log()] == ([1] if lent == "this" else [])


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_saver_says_of_a_lent_lease_what_its_trainer_has_said(server, address, is_dropped):
    with ckstore.open(address) as store:
        lease = store._parts.lease
        server._committer.open()
        token = lease.lend(os.getpid(), 3)
        if is_dropped:
            lease.disown()
        handed = DeskOf(server).begin(noise(1), 4, lease=token).stage()
        handed.slot.state = STAGED
        server._committer.commit(server._tickets[1])
        holder = lease.holder()
        purpose = SaverPurpose.of(holder.purpose)
        assert (purpose.step, purpose.trainer_started == GONE) == (4, is_dropped)
        assert holder.token == token
        assert holder.heartbeat_ns > holder.acquired_ns
        server._committer.close()


def test_a_first_look_that_is_not_answered_is_told_by_the_commit(folder, monkeypatch):
    with ckstore.open(folder) as store:

        def fail():
            raise BackendError("the medium does not answer")

        monkeypatch.setattr(store._parts, "wait_for_orphan", fail)
        assert store.commit_async(noise(0), 0).result(SECONDS_MAX).seq == 0


def test_a_first_commit_in_the_background_waits_for_an_orphan_before_it_copies_anything(address, child, caplog):
    trainer = child(HANDED_TO_ONE_THAT_SLEEPS.format(before="", is_ready=True))
    pid = int(trainer.hear())
    with going_on_at_last(pid), ckstore.open(address) as store, caplog.at_level(logging.WARNING, "ckstore"):
        trainer.kill()
        thread, results = in_thread(lambda: store.commit_async(noise(2), 2))
        until(lambda: "waiting for the saver" in caplog.text)
        assert store._handover.saver_pid is None
        assert not results
        os.kill(pid, signal.SIGCONT)
        thread.join(SECONDS_MAX)
        assert results[0].result(SECONDS_MAX).seq == 1
        assert store.steps() == [1, 2]
