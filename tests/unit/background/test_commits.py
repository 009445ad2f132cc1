"""Protects the trainer's side of background commits. The saver is a fake that ends tickets when the test says so."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from pathlib import Path

import pytest

import ckstore
from ckstore._testing import background_of
from ckstore.background import arena
from ckstore.background.arena import Slot
from ckstore.background.pending import Pending
from ckstore.codec import kernels
from ckstore.config import MIB
from ckstore.errors import BackendError, CapacityError, MalformedError, SaverError, UsageError
from support.fake_saver import FakeSaver, slow, state
from support.guarded_memory import attach_owner
from support.saver_harness import until

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def store(fake_saver_store):
    return fake_saver_store


def test_first_commit_starts_the_saver(store, savers, folder):
    assert savers == []
    for step in range(3):
        assert store.commit_async(state(step), step, metrics={"loss": 0.5}, tags=["best"]).result().step == step
    (saver,) = savers
    assert saver.options["address"] == str(folder)
    assert saver.options["nice"] == ckstore.Policy().saver_nice
    assert (saver.head(3).step, saver.head(3).metrics, saver.head(3).tags) == (2, {"loss": 0.5}, ["best"])


def test_arguments_are_checked_first(store, savers):
    with pytest.raises(UsageError):
        store.commit_async(state(0), -1)
    with pytest.raises(UsageError):
        store.commit_async(state(0), 1, tags=["no/tag"])
    with pytest.raises(UsageError):
        store.commit_async({"a": object()}, 1)
    assert savers == []


def test_pending_reports_progress(store, savers):
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(0), 4)
    assert (pending.step, pending.is_done, pending.is_staged, pending.is_skipped) == (4, False, True, False)
    assert pending.wait_staged(0)
    with pytest.raises(TimeoutError, match="step 4"):
        pending.result(timeout=0.01)
    ended = []
    pending.when_done(ended.append)
    saver.finish(1)
    pending.when_done(ended.append)
    assert ended == [pending, pending]
    assert pending.is_done
    assert pending.result().seq == 101
    assert pending.progress == ("write", 1, 2)
    assert pending.stall_seconds > 0


def test_commit_async_waits_for_the_previous_commit(store, savers):
    store.prewarm(state(0))
    saver, waited = slow(savers), []
    first = store.commit_async(state(1), 1)

    def finish_late(doing):
        waited.append(doing)
        time.sleep(0.05)
        saver.finish(1)

    saver.on_wait = finish_late
    second = store.commit_async(state(2), 2)
    assert len(waited) == 1
    assert first.is_done
    assert not second.is_done
    assert second.stall_seconds >= 0.05
    assert {room.index for room, _, _ in saver.begun.values()} == {0}


def test_arena_holds_at_most_two_states(open_fake_store, savers):
    store = open_fake_store(on_busy="replace")
    store.prewarm(state(0))
    saver = slow(savers)
    for step in range(6):
        store.commit_async(state(step), step)
    assert store.arena_nbytes <= 2 * (5 + 8) * MIB
    saver.finish(1)
    saver.finish(6)


def test_too_large_state_is_refused_before_begin(open_fake_store, savers):
    store = open_fake_store(arena_nbytes_max=24 * MIB)
    store.commit_async(state(0), 0).result()
    with pytest.raises(CapacityError, match="the policy allows 25165824"):
        store.commit_async(state(1, 30 * MIB), 1)
    assert store.commit_async(state(2), 2).result().step == 2
    assert "abort" not in savers[0].calls


def test_parent_is_last_committed_or_restored(store, savers):
    store.commit_async(state(0), 0).result()
    store.commit_async(state(1), 1).result()
    receipt = store.commit(state(2), 2)
    store.commit_async(state(3), 3).result()
    assert savers[0].parents == [(None, 0), (101, 0), (receipt.seq, 0)]
    store.restore(f"seq:{receipt.seq}")
    store.commit_async(state(4), 4).result()
    assert savers[0].parents[-1] == (receipt.seq, 0)


# Errors


def test_error_raised_by_result_is_not_raised_again(store, savers, caplog):
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.fail(1, BackendError("the disk is on fire", is_transient=False))
    assert "step 1 failed in the background: the disk is on fire" in caplog.text
    with pytest.raises(BackendError, match="on fire"):
        pending.result()
    saver.is_quick = True
    assert store.commit_async(state(2), 2).result().step == 2


def test_unreported_error_is_raised_by_the_next_commit_once(store, savers):
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    saver.fail(1, CapacityError("the disk is full", where="/store", todo="collect", nbytes=7))
    with pytest.raises(CapacityError, match="step 1 failed in the background: the disk is full") as caught:
        store.commit_async(state(2), 2)
    assert (caught.value.where, caught.value.nbytes, caught.value.todo[-9:]) == ("/store", 7, "repeat it")
    saver.is_quick = True
    assert store.commit_async(state(3), 3).result().step == 3


@pytest.mark.parametrize("verb", ["commit", "wait", "close"])
def test_other_verbs_raise_an_unreported_error(savers, folder, verb):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    saver.fail(1, BackendError("on fire"))
    with pytest.raises(BackendError, match="step 1 failed in the background"):
        getattr(store, verb)(*([state(2), 2] if verb == "commit" else []))
    store.close()


def test_error_in_with_block_is_not_hidden(savers, folder):
    def train():
        with ckstore.open(folder) as store:
            store.prewarm(state(0))
            saver = slow(savers)
            store.commit_async(state(1), 1)
            saver.fail(1, BackendError("on fire"))
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        train()


def test_dead_saver_fails_its_commit_and_is_replaced(store, savers):
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.die()
    with pytest.raises(SaverError, match="was killed"):
        pending.result()
    assert store.commit_async(state(2), 2).result().step == 2
    assert len(savers) == 2
    assert savers[1].content(2) == [state(2)["w"].tobytes()]


def test_the_death_of_a_saver_is_reported_to_the_other_ranks_of_a_job(store, savers):
    store.prewarm(state(0))
    saver, reports = slow(savers), []
    background_of(store).on_saver_lost = lambda *report: reports.append(report)
    pending = store.commit_async(state(1), 1)
    saver.fail(1, SaverError("the disk is full"))
    with pytest.raises(SaverError, match="the disk is full"):
        pending.result()
    assert not reports
    pending = store.commit_async(state(2), 2)
    saver.die()
    with pytest.raises(SaverError, match="the saver was killed"):
        pending.result()
    assert set(reports) == {(0, "has lost its saver (the saver was killed)")}


@pytest.mark.parametrize("kind", [SaverError, MalformedError])
def test_saver_found_dead_is_replaced_in_the_same_commit(store, savers, monkeypatch, kind):
    store.commit_async(state(1), 1).result()
    begin = FakeSaver.begin

    def die_at_first(saver, *args, **options):
        if saver is savers[0]:
            saver.is_alive = False
            raise kind("it is dead")
        return begin(saver, *args, **options)

    monkeypatch.setattr(FakeSaver, "begin", die_at_first)
    assert store.commit_async(state(2), 2).result().step == 2
    assert len(savers) == 2


def test_failed_staging_is_raised_and_aborts_the_ticket(store, savers, monkeypatch):
    store.commit_async(state(0), 0).result()
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if nbytes > MIB:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "populate", refuse)
        with pytest.raises(CapacityError, match="no memory"):
            store.commit_async(state(1, 20 * MIB), 1)
    assert savers[0].aborted == [2]
    assert store.commit_async(state(2, 20 * MIB), 2).result().step == 2


def test_new_priority_replaces_the_saver(store, savers):
    store.commit_async(state(0), 0).result()
    store.commit_async(state(1), 1, policy=ckstore.Policy(saver_nice=5)).result()
    assert savers[0].calls[-1] == "quit"
    assert savers[1].options["nice"] == 5


def test_memory_store_has_no_saver(backend):
    with ckstore.open(backend) as store, pytest.raises(UsageError, match="need a store in a local folder"):
        store.commit_async(state(0), 0)


# Memory and the end


def test_prewarm_takes_memory_of_the_first_commit(store, savers, monkeypatch):
    store.prewarm(state(0, 20 * MIB))
    nbytes = store.arena_nbytes
    assert nbytes >= 20 * MIB
    with monkeypatch.context() as patch:
        # Every function that takes memory, or makes it accessible, calls this.
        patch.setattr(arena.Slot, "_take_memory", None)
        store.commit_async(state(0, 20 * MIB), 0).result()
    assert store.arena_nbytes == nbytes


def test_prewarm_waits_for_the_saver(store, savers):
    store.prewarm(state(0))
    assert savers[0].calls == ["wait ready", "warm"]


@pytest.mark.parametrize("is_guarded", [False, True], ids=["waited for", "behind a guard"])
def test_bell_rings_for_every_copied_unit(store, savers, is_guarded):
    tensors = state(1)
    owner = attach_owner(store, tensors["w"]) if is_guarded else None
    store.commit_async(tensors, 1).result()
    (saver,) = savers
    units = int(saver.slot(1).marks.sum()) - 1  # The head has its own mark, which is set at the start.
    assert os.eventfd_read(saver.bell) == units >= 2
    del owner


def test_finished_pending_holds_no_memory(savers, folder):
    with ckstore.open(folder) as store:
        pending = store.commit_async(state(0), 0)
        pending.result()
    del store
    savers.clear()
    gc.collect()
    assert "ckstore-arena" not in Path("/proc/self/maps").read_text()
    assert pending.result().step == 0


def test_close_waits_for_pending_commits(savers, folder):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.on_wait = lambda doing: saver.finish(1)
    store.close()
    assert pending.is_done
    assert saver.calls[-1] == "quit"
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.commit_async(state(2), 2)


def test_failure_during_another_commit_is_raised_by_the_next(store, savers, monkeypatch):
    """If the other commit consumed the error too early, nobody would report it later."""
    store.prewarm(state(0))
    saver, note = slow(savers), Pending.note_failed
    store.commit_async(state(1), 1)

    def fail_during_check(pending, error):
        background_of(store).raise_unreported(call_did_nothing=True)
        note(pending, error)

    monkeypatch.setattr(Pending, "note_failed", fail_during_check)
    saver.fail(1, BackendError("the disk is gone"))
    with pytest.raises(BackendError, match="step 1 failed in the background: the disk is gone"):
        store.commit_async(state(2), 2)


def test_commit_of_dropped_handle_completes(savers, folder):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert saver.calls == ["wait ready", "warm", "begin", "staged", "quit"]
    saver.finish(1)
    assert pending.result().step == 1


def test_many_commits_leak_no_descriptor_or_thread(store, savers):
    for step in range(5):
        store.commit_async(state(step), step).result()

    def count():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), store.arena_nbytes

    before = count()
    for step in range(60):
        store.commit_async(state(step, MIB), step).result()
    # A lower count is fine: threads of earlier tests may end in the meantime.
    until(lambda: all(map(int.__le__, count(), before)), "the end of descriptors and threads")


def test_warnings_of_a_receipt_are_logged(store, savers, caplog):
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    with caplog.at_level(logging.WARNING):
        saver.finish(1, warnings=["the model did not change"])
    assert "step 1: the model did not change" in caplog.text


def test_verbs_on_the_newest_wait_for_it(store, savers):
    store.commit(state(0), 0)
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.on_wait = lambda doing: saver.finish(1)
    store.restore()
    assert pending.is_done


def test_saver_death_during_begin_loses_no_commit(store, savers, monkeypatch):
    """The saver's death may also be reported for this ticket, just before the send fails."""
    begin = FakeSaver.begin

    def dying(saver, ticket, slot, head_place, head_nbytes, callbacks, **options):
        if saver is savers[0]:
            saver.is_alive = False
            callbacks.on_failed(SaverError("it was killed"))
            callbacks.on_free()
            raise SaverError("it does not listen")
        begin(saver, ticket, slot, head_place, head_nbytes, callbacks, **options)

    monkeypatch.setattr(FakeSaver, "begin", dying)
    assert store.commit_async(state(0), 1).result().step == 1
    assert len(savers) == 2
    store.wait()
    assert store.commit_async(state(1), 2).result().step == 2


def test_abort_is_resent_until_the_saver_gets_it(store, savers, monkeypatch):
    store.prewarm(state(0))
    saver, sent = slow(savers), []
    abort, saver.patience = saver.abort, 0.01

    def fail_to_send(ticket):
        sent.append(ticket)
        if len(sent) > 3:
            abort(ticket)

    def no_memory(*_):
        raise CapacityError("no memory")

    saver.abort = fail_to_send
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "copy_units", no_memory)
        with pytest.raises(CapacityError, match="no memory"):
            store.commit_async(state(0), 1)
    saver.is_quick = True
    assert store.commit_async(state(1), 2).result().step == 2
    assert sent == [1, 1, 1, 1]
