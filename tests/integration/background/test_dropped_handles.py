"""Protects handles that are closed early or dropped: nothing is lost, nothing leaks, and no older state is resumed."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import background_of, repository_of
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from support.fake_saver import state
from support.guarded_memory import attach_owner
from support.saver_harness import SECONDS_MAX, noise, stop, until


def opened(folder):
    """Open a store whose saver has normal priority."""
    return ckstore.open(folder, policy=ckstore.Policy(saver_nice=0))


@pytest.fixture
def no_collector():
    """Disable the garbage collector, as many trainers do."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def arenas():
    return Path("/proc/self/maps").read_text().count("ckstore-arena")


def test_background_commits_create_no_cycles(folder, no_collector):
    with opened(folder) as store:
        store.commit_async(state(0), 0).result()
        store.wait()
        gc.collect()
        for step in range(1, 5):
            # Copied before the call returns, and behind a guard.
            tensors = state(step)
            owner = attach_owner(store, tensors["w"]) if step % 2 else None
            store.commit_async(tensors, step).result()
            del owner
        store.wait()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left = {type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("ckstore")}
        assert not left


class Large(dict):
    """A state that can be referenced weakly."""


def test_commit_error_keeps_no_frame_of_the_caller(folder, no_collector):
    def ask(pending):
        here = Large()
        with pytest.raises(ckstore.SaverError):
            pending.result()
        return weakref.ref(here)

    with opened(folder) as store:
        store.prewarm(state(0))
        # A stopped saver cannot finish the commit before it is killed.
        stop(background_of(store).saver_pid)
        pending = store.commit_async(state(0), 0)
        os.kill(background_of(store).saver_pid, signal.SIGKILL)
        until(lambda: pending.is_done)
        watched = [ask(pending) for _ in range(2)]
        assert [each() for each in watched] == [None, None]
        with pytest.raises(ckstore.SaverError) as first:
            pending.result()
        with pytest.raises(ckstore.SaverError) as second:
            pending.result()
        assert str(first.value) == str(second.value)
        assert first.value is not second.value


def test_closed_store_frees_arena_without_gc(folder, no_collector):
    before = arenas()
    with opened(folder) as store:
        store.commit_async(state(0), 0).result()
        assert arenas() > before
    assert arenas() == before


def test_dropped_store_frees_arena_without_gc(folder, no_collector):
    before = arenas()
    store = opened(folder)
    store.commit_async(state(0), 0).result()
    store.wait()
    assert arenas() > before
    del store
    until(lambda: arenas() == before)


def test_interrupted_close_keeps_begun_commits(folder, monkeypatch):
    before = arenas()
    store = opened(folder)
    pending = store.commit_async(state(0), 0)
    pid = background_of(store).saver_pid

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background_of(store), "wait_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    assert pending.result().step == 0
    del store, pending
    until(lambda: not Path(f"/proc/{pid}").exists())
    gc.collect()
    until(lambda: arenas() == before)
    with opened(folder) as again:
        assert again.commit(state(1), 1).seq == 1


def submit_and_drop(folder, *, has_lease):
    """Start a saver, stop it, submit a state, and drop the handle; return the saver's pid."""
    store = opened(folder)
    if has_lease:
        store.commit_async(noise(0), 0).result()
        # The slot is released a moment after the receipt; the next commit would wait for a saver that is stopped before
        # that.
        store.wait()
    else:
        store.commit(noise(0), 0)
        store.prewarm(noise(1))
    pid = background_of(store).saver_pid
    stop(pid)
    try:
        store.commit_async(noise(1), 1)
    except BaseException:
        # Otherwise it would stay stopped, and a thread would be left for later tests.
        os.kill(pid, signal.SIGCONT)
        raise
    return pid


@pytest.mark.parametrize("has_lease", [True, False])
def test_restore_waits_for_saver_of_dropped_handle(folder, caplog, has_lease):
    pid = submit_and_drop(folder, has_lease=has_lease)
    try:
        gc.collect()
        results = []
        with opened(folder) as again, caplog.at_level(logging.WARNING, "ckstore"):
            thread = threading.Thread(target=lambda: results.append(again.restore()), daemon=True)
            thread.start()
            until(lambda: "waiting for the saver" in caplog.text)
            thread.join(0.1)
            assert not results, "nothing older is resumed while it may still publish"
            os.kill(pid, signal.SIGCONT)
            thread.join(SECONDS_MAX)
            assert np.array_equal(results[0]["w0"], noise(1)["w0"])
        assert f"the saver (pid {pid}) of a handle that was dropped to" in caplog.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("has_lease", [True, False])
def test_commit_async_waits_for_dropped_handle(folder, caplog, has_lease):
    pid = submit_and_drop(folder, has_lease=has_lease)

    def is_waited_for():
        return f"waiting for the saver (pid {pid})" in caplog.text

    try:
        gc.collect()
        with opened(folder) as again, caplog.at_level(logging.WARNING, "ckstore"):
            thread = threading.Thread(target=lambda: (until(is_waited_for), os.kill(pid, signal.SIGCONT)))
            thread.start()
            assert again.commit_async(noise(2), 2).result(SECONDS_MAX).seq == 2
            assert again.steps() == [0, 1, 2]
    finally:
        thread.join()


def test_other_process_waits_for_ending_saver(harness, address):
    with ckstore.open(address) as store:
        holder = repository_of(store).lease.holder
        in_flight = harness.begin(noise(1), 1)
        until(lambda: holder() is not None)
        assert SaverPurpose.of(holder().purpose).trainer_pid == os.getpid()
        harness.saver.quit(is_waited=False)
        until(lambda: SaverPurpose.of(holder().purpose).trainer_started == TRAINER_DEAD)
        in_flight.stage().finish().wait()
