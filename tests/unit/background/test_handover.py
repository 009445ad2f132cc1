"""Protects what surrounds a background commit; the saver is a pretended one, which ends tickets when it is told."""

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


def test_the_saver_is_started_by_the_first_commit_and_kept(store, savers, folder):
    assert savers == []
    for step in range(3):
        assert store.commit_async(state(step), step, metrics={"loss": 0.5}, tags=["best"]).result().step == step
    (saver,) = savers
    assert saver.options["address"] == str(folder)
    assert saver.options["nice"] == ckstore.Policy().saver_nice
    assert (saver.head(3).step, saver.head(3).metrics, saver.head(3).tags) == (2, {"loss": 0.5}, ["best"])


def test_arguments_are_checked_before_anything_happens(store, savers):
    with pytest.raises(UsageError):
        store.commit_async(state(0), -1)
    with pytest.raises(UsageError):
        store.commit_async(state(0), 1, tags=["no/tag"])
    with pytest.raises(UsageError):
        store.commit_async({"a": object()}, 1)
    assert savers == []


def test_a_pending_commit_tells_how_far_it_is(store, savers):
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


def test_commit_async_waits_by_default_for_the_commit_before(store, savers):
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


def test_no_more_than_two_states_lie_in_the_arena(open_fake_store, savers):
    store = open_fake_store(on_busy="replace")
    store.prewarm(state(0))
    saver = slow(savers)
    for step in range(6):
        store.commit_async(state(step), step)
    assert store.arena_nbytes <= 2 * (5 + 8) * MIB
    saver.finish(1)
    saver.finish(6)


def test_state_beyond_the_bound_is_refused_before_the_saver_hears_of_it(open_fake_store, savers):
    store = open_fake_store(arena_nbytes_max=24 * MIB)
    store.commit_async(state(0), 0).result()
    with pytest.raises(CapacityError, match="the policy allows 25165824"):
        store.commit_async(state(1, 30 * MIB), 1)
    assert store.commit_async(state(2), 2).result().step == 2
    assert "abort" not in savers[0].calls


def test_the_parent_is_what_was_committed_or_restored_last(store, savers):
    store.commit_async(state(0), 0).result()
    store.commit_async(state(1), 1).result()
    receipt = store.commit(state(2), 2)
    store.commit_async(state(3), 3).result()
    assert savers[0].parents == [(None, 0), (101, 0), (receipt.seq, 0)]
    store.restore(f"seq:{receipt.seq}")
    store.commit_async(state(4), 4).result()
    assert savers[0].parents[-1] == (receipt.seq, 0)


# Errors


def test_an_error_is_raised_to_who_asks_and_then_to_nobody_else(store, savers, caplog):
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.fail(1, BackendError("the disk is on fire", is_transient=False))
    assert "step 1 failed in the background: the disk is on fire" in caplog.text
    with pytest.raises(BackendError, match="on fire"):
        pending.result()
    saver.is_quick = True
    assert store.commit_async(state(2), 2).result().step == 2


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_commit_once(store, savers):
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
def test_other_verbs_raise_it_too(savers, folder, verb):
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    saver.fail(1, BackendError("on fire"))
    with pytest.raises(BackendError, match="step 1 failed in the background"):
        getattr(store, verb)(*([state(2), 2] if verb == "commit" else []))
    store.close()


def test_an_error_in_the_block_is_not_hidden_by_that_of_a_commit(savers, folder):
    def train():
        with ckstore.open(folder) as store:
            store.prewarm(state(0))
            saver = slow(savers)
            store.commit_async(state(1), 1)
            saver.fail(1, BackendError("on fire"))
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        train()


def test_a_saver_that_died_fails_its_commit_and_the_next_one_starts_another(store, savers):
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.die()
    with pytest.raises(SaverError, match="was killed"):
        pending.result()
    assert store.commit_async(state(2), 2).result().step == 2
    assert len(savers) == 2
    assert savers[1].content(2) == [state(2)["w"].tobytes()]


@pytest.mark.parametrize("kind", [SaverError, MalformedError])
def test_saver_that_dies_unseen_is_replaced_within_the_commit_whatever_it_died_of(store, savers, monkeypatch, kind):
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


def test_staging_that_fails_is_raised_and_the_ticket_given_up(store, savers, monkeypatch):
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


def test_another_priority_needs_another_saver_and_the_first_ends_before(store, savers):
    store.commit_async(state(0), 0).result()
    store.commit_async(state(1), 1, policy=ckstore.Policy(saver_nice=5)).result()
    assert savers[0].calls[-1] == "quit"
    assert savers[1].options["nice"] == 5


def test_a_store_in_memory_has_no_saver(backend):
    with ckstore.open(backend) as store, pytest.raises(UsageError, match="need a store in a local folder"):
        store.commit_async(state(0), 0)


# Memory and the end


def test_prewarm_takes_the_memory_that_the_first_commit_uses(store, savers, monkeypatch):
    store.prewarm(state(0, 20 * MIB))
    nbytes = store.arena_nbytes
    assert nbytes >= 20 * MIB
    with monkeypatch.context() as patch:
        # Whatever takes memory, or makes it accessible, calls this.
        patch.setattr(arena.Slot, "_take_memory", None)
        store.commit_async(state(0, 20 * MIB), 0).result()
    assert store.arena_nbytes == nbytes


def test_prewarm_returns_when_the_saver_listens(store, savers):
    store.prewarm(state(0))
    assert savers[0].calls == ["wait ready", "warm"]


@pytest.mark.parametrize("is_guarded", [False, True], ids=["waited for", "behind a guard"])
def test_bell_of_the_saver_rings_for_every_unit_that_was_copied(store, savers, is_guarded):
    tensors = state(1)
    owner = attach_owner(store, tensors["w"]) if is_guarded else None
    store.commit_async(tensors, 1).result()
    (saver,) = savers
    units = int(saver.slot(1).marks.sum()) - 1  # The head has one of its own, and is there when it begins.
    assert os.eventfd_read(saver.bell) == units >= 2
    del owner


def test_a_pending_commit_that_is_kept_keeps_no_memory(savers, folder):
    with ckstore.open(folder) as store:
        pending = store.commit_async(state(0), 0)
        pending.result()
    del store
    savers.clear()
    gc.collect()
    assert "ckstore-arena" not in Path("/proc/self/maps").read_text()
    assert pending.result().step == 0


def test_closing_waits_for_what_is_pending(savers, folder):
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


def test_failure_that_another_commit_looks_for_right_now_is_raised_by_the_next_one(store, savers, monkeypatch):
    """Whoever took note of it before the pending commit knew would find no error, and nobody would look again."""
    store.prewarm(state(0))
    saver, note = slow(savers), Pending.note_failed
    store.commit_async(state(1), 1)

    def look_and_note(pending, error):
        background_of(store).raise_unreported(call_did_nothing=True)
        note(pending, error)

    monkeypatch.setattr(Pending, "note_failed", look_and_note)
    saver.fail(1, BackendError("the disk is gone"))
    with pytest.raises(BackendError, match="step 1 failed in the background: the disk is gone"):
        store.commit_async(state(2), 2)


def test_a_forgotten_handle_lets_its_commit_be_carried_through(savers, folder):
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


def test_many_commits_leave_no_descriptors_and_no_threads(store, savers):
    for step in range(5):
        store.commit_async(state(step), step).result()

    def count():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), store.arena_nbytes

    before = count()
    for step in range(60):
        store.commit_async(state(step, MIB), step).result()
    # Fewer is well: what earlier tests left may end meanwhile.
    until(lambda: all(map(int.__le__, count(), before)), "the end of descriptors and threads")


def test_warnings_of_a_receipt_are_logged(store, savers, caplog):
    store.prewarm(state(0))
    saver = slow(savers)
    store.commit_async(state(1), 1)
    with caplog.at_level(logging.WARNING):
        saver.finish(1, warnings=["the model did not change"])
    assert "step 1: the model did not change" in caplog.text


def test_verbs_that_look_at_the_newest_wait_for_it(store, savers):
    store.commit(state(0), 0)
    store.prewarm(state(0))
    saver = slow(savers)
    pending = store.commit_async(state(1), 1)
    saver.on_wait = lambda doing: saver.finish(1)
    store.restore()
    assert pending.is_done


def test_a_saver_that_dies_while_it_is_told_of_a_commit_costs_neither_this_one_nor_the_next(store, savers, monkeypatch):
    """Its end may be told of the ticket too, just before the telling fails."""
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


def test_saver_that_did_not_hear_that_a_commit_was_given_up_is_told_again(store, savers, monkeypatch):
    store.prewarm(state(0))
    saver, told = slow(savers), []
    abort, saver.patience = saver.abort, 0.01

    def deaf(ticket):
        told.append(ticket)
        if len(told) > 3:
            abort(ticket)

    def no_memory(*_):
        raise CapacityError("no memory")

    saver.abort = deaf
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "copy_units", no_memory)
        with pytest.raises(CapacityError, match="no memory"):
            store.commit_async(state(0), 1)
    saver.is_quick = True
    assert store.commit_async(state(1), 2).result().step == 2
    assert told == [1, 1, 1, 1]
