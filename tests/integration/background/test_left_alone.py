"""Handles that are closed halfway, or dropped: nothing is lost, nothing stays, and nobody resumes what is older."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import handover
from ckstore.errors import CapacityError
from ckstore.saver import arena as arena_module
from ckstore.saver.arena import Arena, Slot
from ckstore.staging.copying import HostCopy
from ckstore.staging.crew import Crew
from ckstore.store.lease_record import SaverPurpose
from support.fake_saver import OwnerOfAll, slow, state
from support.saver_desk import SECONDS_MAX, noise, stop, until


@pytest.fixture
def no_collector():
    """Trainers turn the collector of reference cycles off, or run it at their own times."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def arenas():
    return Path("/proc/self/maps").read_text().count("ckstore-arena")


def test_commits_in_the_background_leave_nothing_to_the_collector_of_cycles(folder, no_collector):
    with ckstore.open(folder) as store:
        store.commit_async(state(0), 0).result()
        store.wait()
        gc.collect()
        for step in range(1, 5):
            # Copied before the call returns, and behind a guard.
            store._guarded = OwnerOfAll() if step % 2 else None
            store.commit_async(state(step), step).result()
        store._guarded = None
        until(lambda: all(handed.is_over for handed in store._handover._lying.going))
        store.wait()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left = {type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("ckstore")}
        assert not left


class Large(dict):
    """A state that can be watched."""


def test_who_is_told_of_a_failure_is_not_kept_by_it(folder, no_collector):
    def ask(pending):
        here = Large()
        with pytest.raises(ckstore.SaverError):
            pending.result()
        return weakref.ref(here)

    with ckstore.open(folder) as store:
        pending = store.commit_async(state(0), 0)
        os.kill(store._handover.saver_pid, signal.SIGKILL)
        until(lambda: pending.is_done)
        watched = [ask(pending) for _ in range(2)]
        assert [each() for each in watched] == [None, None]
        with pytest.raises(ckstore.SaverError) as first:
            pending.result()
        with pytest.raises(ckstore.SaverError) as second:
            pending.result()
        assert str(first.value) == str(second.value)
        assert first.value is not second.value


def fail(*_):
    raise CapacityError("there is no memory")


@pytest.mark.parametrize(
    ("fails", "is_first"),
    [((Slot, "populate"), True), ((HostCopy, "_copy_stepwise"), True), ((HostCopy, "_copy"), False)],
    ids=["no memory", "fresh memory", "memory that was used"],
)
def test_a_state_that_could_not_be_staged_is_let_go_of(folder, no_collector, monkeypatch, fails, is_first):
    def commit(store):
        large = state(1)
        with monkeypatch.context() as patches:
            patches.setattr(*fails, fail)
            with pytest.raises(CapacityError, match="there is no memory"):
                store.commit_async(large, 1)
        return weakref.ref(large["w"])

    with ckstore.open(folder) as store:
        if not is_first:
            store.commit_async(state(0), 0).result()
        watched = commit(store)
        until(lambda: watched() is None, "the end of the state")
        assert store.commit_async(state(2), 2).result().step == 2


def test_what_fails_when_a_store_is_closed_is_not_to_be_closed_again(savers, folder):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    saver.fail(1, CapacityError("the disk is full", todo="collect"))
    with pytest.raises(CapacityError, match=r"step 1 failed in the background: the disk is full\. Collect$"):
        store.close()


def test_closing_frees_the_arena_at_once_although_nothing_collects_cycles(folder, no_collector):
    before = arenas()
    with ckstore.open(folder) as store:
        store.commit_async(state(0), 0).result()
        assert arenas() > before
    assert arenas() == before


def test_a_dropped_store_frees_its_arena_although_nothing_collects_cycles(folder, no_collector):
    before = arenas()
    store = ckstore.open(folder)
    store.commit_async(state(0), 0).result()
    store.wait()
    assert arenas() > before
    del store
    until(lambda: arenas() == before)


def test_closing_that_is_interrupted_ends_all_the_same_and_keeps_what_was_begun(folder, monkeypatch):
    before = arenas()
    store = ckstore.open(folder)
    pending = store.commit_async(state(0), 0)
    pid = store._handover.saver_pid

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handover.Handover, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    assert pending.result().step == 0
    del store, pending
    until(lambda: not Path(f"/proc/{pid}").exists())
    gc.collect()
    until(lambda: arenas() == before)
    with ckstore.open(folder) as again:
        assert again.commit(state(1), 1).seq == 1


def test_guards_stay_until_what_they_protect_is_copied_when_a_store_is_closed(savers, folder):
    store = ckstore.open(folder)
    calls = []

    class Guards(OwnerOfAll):
        def release(self):
            calls.append(("released", all(handed.is_over for handed in going)))

    store.prewarm(state(0))
    saver = slow(savers)
    store._guarded = Guards()
    pending = store.commit_async(state(0), 0)
    going = list(store._handover._lying.going)
    threading.Timer(0.1, saver.finish, [1]).start()
    store.close()
    assert pending.is_done
    assert calls == [("released", True)]


def handed_over_and_dropped(folder, *, has_lease):
    """Have a saver started, stop it, hand it a state, and drop the handle; return the saver's pid."""
    store = ckstore.open(folder)
    if has_lease:
        store.commit_async(noise(0), 0).result()
        # Its slot is free a moment after its receipt; stopped before that, the saver would be waited for by the next.
        store.wait()
    else:
        store.commit(noise(0), 0)
        store.prewarm(noise(1))
    pid = store._handover.saver_pid
    stop(pid)
    try:
        store.commit_async(noise(1), 1)
    except BaseException:
        # Else it would stay for ever, and with it a thread that later tests find.
        os.kill(pid, signal.SIGCONT)
        raise
    return pid


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_handle_opened_in_the_same_process_waits_for_the_saver_of_one_that_was_dropped(folder, caplog, has_lease):
    pid = handed_over_and_dropped(folder, has_lease=has_lease)
    try:
        gc.collect()
        results = []
        with ckstore.open(folder) as again, caplog.at_level(logging.WARNING, "ckstore"):
            thread = threading.Thread(target=lambda: results.append(again.restore()), daemon=True)
            thread.start()
            until(lambda: "waiting for the saver" in caplog.text)
            time.sleep(0.1)
            assert not results, "nothing older is resumed while it may still publish"
            os.kill(pid, signal.SIGCONT)
            thread.join(SECONDS_MAX)
            assert np.array_equal(results[0]["w0"], noise(1)["w0"])
        assert f"the saver (pid {pid}) of a handle that was dropped to" in caplog.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("has_lease", [True, False])
def test_the_next_commit_in_the_background_comes_after_what_a_dropped_handle_has_begun(folder, caplog, has_lease):
    pid = handed_over_and_dropped(folder, has_lease=has_lease)
    try:
        gc.collect()
        with ckstore.open(folder) as again, caplog.at_level(logging.WARNING, "ckstore"):
            let_go = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
            let_go.start()
            assert again.commit_async(noise(2), 2).result(SECONDS_MAX).seq == 2
            assert again.steps() == [0, 1, 2]
        assert f"waiting for the saver (pid {pid})" in caplog.text
    finally:
        let_go.join()


@pytest.mark.parametrize("is_changed", [False, True], ids=["kept", "changed"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["dropped while copied", "dropped when copied"])
def test_what_a_dropped_handle_was_to_compare_is_compared_without_it(
    folder, monkeypatch, caplog, is_copied, is_changed
):
    may_copy, tensors = threading.Event(), noise(1)
    copy, checked = HostCopy._copy_stepwise, []

    def held(self):
        assert may_copy.wait(SECONDS_MAX)
        copy(self)
        checked.append(self.section.unit_count)

    monkeypatch.setattr(HostCopy, "_copy_stepwise", held)
    store = ckstore.open(folder, policy=ckstore.Policy(debug_guard=True))
    store._guarded = OwnerOfAll()
    # The head and what is no tensor are copied before the call returns.
    may_copy.set()
    store.prewarm(tensors)
    store.commit_async(noise(0), 0).result(SECONDS_MAX)
    store.wait()
    checked.clear()
    if not is_copied:
        may_copy.clear()
    store.commit_async(tensors, 1)
    if is_copied:
        until(lambda: any(checked))
    if is_changed:
        tensors["w0"][7] ^= 1
    with caplog.at_level(logging.WARNING, "ckstore"):
        del store
        may_copy.set()
        results = []
        with ckstore.open(folder) as again:
            thread = threading.Thread(target=lambda: results.append(again.restore()), daemon=True)
            thread.start()
            thread.join(SECONDS_MAX)
            assert results, "nobody else could compare it, and whoever opens the run would wait for ever"
            assert again.steps() == ([0] if is_changed else [0, 1])
        if not is_changed:
            assert np.array_equal(results[0]["w0"], tensors["w0"])
    assert ("a tensor was changed between commit_async and the guard" in caplog.text) == is_changed


def test_other_processes_wait_for_a_saver_that_is_told_to_end_while_it_works(desk, backend_of_desk):
    handed = desk.begin(noise(1), 1)
    until(lambda: backend_of_desk() is not None)
    assert SaverPurpose.of(backend_of_desk().purpose).trainer_pid == os.getpid()
    desk.saver.quit(is_waited=False)
    until(lambda: SaverPurpose.of(backend_of_desk().purpose).trainer_started == "gone")
    handed.stage().finish().wait()


@pytest.fixture
def backend_of_desk(desk, address):
    with ckstore.open(address) as store:
        yield store._parts.lease._read


def test_threads_that_a_closed_crew_starts_for_the_rest_end_after_it():
    crew = Crew(2)
    crew.close()
    done = threading.Event()
    before = {thread.name for thread in threading.enumerate()}
    crew.send_one(done.set)
    assert done.wait(SECONDS_MAX)
    until(lambda: {thread.name for thread in threading.enumerate()} <= before)


def test_an_arena_that_cannot_be_made_is_forgotten_with_its_descriptor(monkeypatch):
    before = set(arena_module._arenas)

    def interrupted(self, nbytes):
        raise KeyboardInterrupt

    monkeypatch.setattr(arena_module.Slot, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Arena.create(1)
    assert all(each.fd == -1 for each in set(arena_module._arenas) - before)
