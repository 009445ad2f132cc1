"""Protects cleanup: states, guards and threads that nobody refers to finish their work, and then are freed."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
from torch.utils.hooks import RemovableHandle

import ckstore
from ckstore.background.arena import Slot
from ckstore.background.copying import CopyPool
from ckstore.codec import kernels
from ckstore.errors import CapacityError
from support.fake_saver import slow, state
from support.guarded_memory import Owner, attach_owner
from support.saver_harness import SECONDS_MAX, noise, until

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def no_collector():
    """Disable the collector of reference cycles, as some trainers do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(*_):
    raise CapacityError("there is no memory")


@pytest.mark.usefixtures("no_collector", "savers")
@pytest.mark.parametrize(
    ("fails", "is_first"),
    [((Slot, "populate"), True), ((kernels, "copy_units"), True), ((kernels, "copy_units"), False)],
    ids=["no memory", "fresh memory", "memory that was used"],
)
def test_state_of_failed_staging_is_freed(folder, monkeypatch, fails, is_first):
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


def test_close_that_raises_needs_no_repetition(savers, folder):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    saver.fail(1, CapacityError("the disk is full", todo="collect"))
    with pytest.raises(CapacityError, match=r"step 1 failed in the background: the disk is full\. Collect$"):
        store.close()


def test_guards_of_closed_store_stay_until_copied(savers, folder):
    released = []

    class Handle(RemovableHandle):
        def remove(self):
            released.append(pending.is_done)
            super().remove()

    store, tensors = ckstore.open(folder), state(0)
    store.prewarm(tensors)
    saver = slow(savers)
    owner = Owner([], handle=Handle)
    store.attach(owner)
    pending = store.commit_async(tensors, 0)
    saver.on_wait = lambda doing: saver.finish(1)
    store.close()
    assert pending.is_done
    assert released == [True, True]


@pytest.mark.parametrize("is_changed", [False, True], ids=["kept", "changed"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["dropped while copied", "dropped when copied"])
def test_checked_state_of_dropped_handle_is_compared(savers, folder, monkeypatch, caplog, is_copied, is_changed):
    """Nothing else would compare it: the saver, and a process that opens the run, would wait forever."""
    may_copy, tensors, copy_units = threading.Event(), noise(1), kernels.copy_units
    monkeypatch.setattr(kernels, "copy_units", lambda *given: may_copy.wait(SECONDS_MAX) and copy_units(*given))
    store = ckstore.open(folder, policy=ckstore.Policy(debug_guard=True))
    store.prewarm(tensors)
    owner = attach_owner(store, *tensors.values())
    if is_copied:
        may_copy.set()
    store.commit_async(tensors, 1)
    (saver,) = savers
    if is_copied:
        until(lambda: saver.is_copied(1))
    if is_changed:
        tensors["w0"][7] ^= 1
    assert not {"staged", "abort"} & set(saver.calls)
    with caplog.at_level(logging.WARNING, "ckstore"):
        del store
        may_copy.set()
        until(lambda: {"staged", "abort"} & set(saver.calls), "the end of the comparison")
    assert ("abort" in saver.calls) == is_changed
    assert ("a tensor was changed between commit_async and the guard" in caplog.text) == is_changed
    assert is_changed or saver.content(1) == [tensors["w0"].tobytes()]
    del owner


def test_threads_started_by_a_closed_pool_end():
    crew = CopyPool(2)
    crew.close()
    done = threading.Event()
    before = {thread.name for thread in threading.enumerate()}
    crew.send_one(done.set)
    assert done.wait(SECONDS_MAX)
    until(lambda: {thread.name for thread in threading.enumerate()} <= before)
