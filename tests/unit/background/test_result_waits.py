"""Protects when a wait hurries the saver: immediately if the receipt is wanted, otherwise after all is copied."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from ckstore.background.copying import HostCopy
from ckstore.background.pending import Pending
from ckstore.results import Receipt
from support.fake_saver import slow
from support.guarded_memory import attach_owner
from support.saver_harness import SECONDS_MAX, until

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def copying(monkeypatch):
    """Return copy threads of guarded memory that wait for an event."""
    work, may_go_on = HostCopy.work, threading.Event()
    entered = set()

    def held(copy):
        if copy.section.unit_count:
            entered.add(threading.get_ident())
            assert may_go_on.wait(SECONDS_MAX)
        work(copy)

    monkeypatch.setattr(HostCopy, "work", held)
    yield entered, may_go_on
    may_go_on.set()


@pytest.fixture
def store(open_fake_store):
    """A store whose crew has four threads."""
    return open_fake_store(staging_threads=4)


@pytest.fixture
def begun(store, copying, monkeypatch):
    """Return a function that begins a fully guarded commit on a machine with so many processors."""
    weights = np.full(64 << 20, 7, np.uint8)
    owner = attach_owner(store, weights)

    def begin(processor_count):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processor_count)))
        return store.commit_async({"w": weights}, 1)

    yield begin
    del owner


def waiting(ask):
    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_result_without_timeout_uses_half_the_threads(begun, savers, copying):
    entered, may_go_on = copying
    pending = begun(4)
    asking = waiting(pending.result)
    until(lambda: "hurry" in savers[-1].calls, "the saver being hurried")
    until(lambda: len(entered) == 2, "half of the threads")
    asking.join(0.2)
    assert (len(entered), savers[-1].calls[-2:]) == (2, ["begin", "hurry"])
    may_go_on.set()
    asking.join(SECONDS_MAX)
    assert pending.result().step == 1


@pytest.mark.parametrize("ask", [Pending.wait_staged, lambda pending: pending.result(SECONDS_MAX)])
def test_wait_with_timeout_copies_with_all_threads_first(begun, savers, copying, ask):
    entered, may_go_on = copying
    pending = begun(4)
    asking = waiting(lambda: ask(pending))
    until(lambda: len(entered) == 4, "all threads")
    assert "hurry" not in savers[-1].calls
    may_go_on.set()
    asking.join(SECONDS_MAX)
    assert pending.result().step == 1


@pytest.mark.parametrize("processor_count", [5, 2], ids=["the whole crew leaves some", "half of the crew leaves none"])
def test_result_uses_all_threads_if_half_frees_no_cpu(begun, savers, copying, processor_count):
    entered, may_go_on = copying
    pending = begun(processor_count)
    asking = waiting(pending.result)
    until(lambda: len(entered) == 4, "all threads")
    assert "hurry" not in savers[-1].calls
    may_go_on.set()
    asking.join(SECONDS_MAX)
    assert pending.result().step == 1


def test_result_does_not_reduce_running_threads(begun, savers, copying):
    entered, may_go_on = copying
    pending = begun(4)
    threads = [waiting(pending.wait_staged)]
    until(lambda: len(entered) == 4, "all threads")
    threads.append(waiting(pending.result))
    threads[1].join(0.2)
    assert "hurry" not in savers[-1].calls
    may_go_on.set()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert pending.result().step == 1


def test_store_wait_requests_receipts(begun, store, savers, copying):
    entered, may_go_on = copying
    begun(4)
    waits = waiting(store.wait)
    until(lambda: "hurry" in savers[-1].calls, "the saver being hurried")
    waits.join(0.2)
    assert len(entered) == 2
    may_go_on.set()
    waits.join(SECONDS_MAX)
    assert not waits.is_alive()


def test_result_of_staged_state_leaves_other_copies_alone(begun, store, savers, copying):
    _, may_go_on = copying
    may_go_on.set()
    store.prewarm({"w": np.zeros(64 << 20, np.uint8)})
    saver = slow(savers)
    pending = begun(4)
    until(lambda: pending.is_staged, "half of the threads")
    asking = waiting(pending.result)
    asking.join(0.2)
    assert "hurry" not in saver.calls
    saver.finish(1)
    asking.join(SECONDS_MAX)
    assert pending.result().step == 1


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda pending: pending.result(), [True]),
        (lambda pending: pending.result(1), [False]),
        (lambda pending: pending.result(0), []),
        (lambda pending: pending.wait_staged(), [False]),
        (lambda pending: pending.wait_staged(0), []),
    ],
)
def test_finish_gets_whether_the_receipt_is_wanted(ask, expected):
    found = []

    def end(*waited_for, is_urgent=False):
        pending.note_done(Receipt(3, 7, "00" * 32, 1, 1, 1, 0, 0, 0, {}, "pwrite", ()))
        return True

    pending = Pending(3, finish=found.append, wait=end)
    ask(pending)
    assert found == expected
