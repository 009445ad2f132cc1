"""Protects two generations in the arena: the last state stays where it was staged, as base of the next one."""

from __future__ import annotations

import functools
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import Policy
from ckstore._testing import saver_of
from ckstore.background.arena import UNIT_NBYTES
from ckstore.config import MIB
from ckstore.format import paths
from support.saver_harness import SECONDS_MAX, SaverHarness, until

KEEPING = Policy(base_cache="memory", threads=2, saver_nice=0, read_amplification_max=8)
"""With a bound that lets every state be coded against the one before it."""
COUNT = 2 * MIB
"""Elements of two chunks of fp32."""
CHUNKS = 2

SLOT_NBYTES = 4 * COUNT + 2 * UNIT_NBYTES
"""What a slot with them takes: samples and the head have units of their own."""


@functools.cache
def noise_of(seed):
    return np.random.default_rng(seed).standard_normal(COUNT, np.float32)


def drifting(step):
    """Return values that change a little with each step, everywhere."""
    return noise_of(0) * np.float32(1 + step * 2**-16)


def walking(step_count):
    """Yield values that each differ a little from those before, everywhere: the previous ones are the best base."""
    values = noise_of(1)
    for step in range(step_count):
        yield values
        values = values + np.float32(1e-3) * noise_of(2 + step)


@pytest.fixture
def keeping_store(folder):
    with ckstore.open(folder, policy=KEEPING) as opened:
        yield opened


# The whole way


def test_last_state_is_the_base_where_it_was_staged_and_two_slots_are_enough(keeping_store):
    store = keeping_store
    taken = []
    for step, values in enumerate(walking(5)):
        receipt = store.commit_async({"w": values}, step).result()
        assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (0, 0), "nothing is copied"
        assert receipt.bytes_bases_staged == 4 * COUNT
        assert receipt.chunks_delta == (CHUNKS if step else 0)
        taken.append(store.arena_nbytes)
    assert 2 * 4 * COUNT <= taken[1] == taken[-1] <= 2 * SLOT_NBYTES
    for step, values in enumerate(walking(5)):
        assert np.array_equal(store.restore(step)["w"], values)
    assert not store.verify("decode").damage


def test_the_same_is_stored_as_when_bases_are_read_back(keeping_store, folder):
    ours, others = [], []
    policy = Policy(threads=2, saver_nice=0, read_amplification_max=8)
    with ckstore.open(folder.with_name("other"), policy=policy) as other:
        for step, values in enumerate(walking(4)):
            state = {"w": values, "frozen": drifting(0), "small": [np.arange(step + 9)] * 3}
            ours.append(keeping_store.commit_async(state, step).result())
            others.append(other.commit_async(state, step).result())
    assert [each.bytes_written for each in ours] == [each.bytes_written for each in others]
    assert [each.chunks_delta for each in ours] == [each.chunks_delta for each in others]
    assert [each.chunks_delta >= CHUNKS for each in ours] == [False, True, True, True]
    assert not any(each.bytes_bases_staged for each in others)


def test_what_does_not_change_moves_on_to_the_newer_slot(keeping_store):
    frozen = drifting(0)
    for step, values in enumerate(walking(4)):
        receipt = keeping_store.commit_async({"frozen": frozen, "w": values}, step).result()
        assert receipt.bytes_bases == receipt.bytes_bases_peak == 0
        assert receipt.bytes_bases_staged == 8 * COUNT
    assert keeping_store.arena_nbytes <= 2 * (SLOT_NBYTES + 4 * COUNT), "two states of two tensors"


def test_bases_come_out_of_the_arena_and_not_off_the_disk(keeping_store, folder):
    keeping_store.commit_async({"w": drifting(0)}, 0).result()
    # Of what it wrote nothing can be read any more; a base that is read back would be told as damaged.
    _ruin(folder)
    receipt = keeping_store.commit_async({"w": drifting(1)}, 1).result()
    assert receipt.chunks_delta == CHUNKS
    assert not receipt.warnings


def test_a_keyframe_that_is_read_back_is_read_back_once(folder):
    # By the default bound a state is soon coded against its keyframe, which was let go of for a newer one.
    policy = Policy(base_cache="memory", threads=2, saver_nice=0)
    with ckstore.open(folder, policy=policy) as store:
        receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in range(4)]
        assert [receipt.bytes_bases for receipt in receipts[2:]] == [4 * COUNT] * 2, "the keyframe"
        assert [receipt.bytes_bases_staged for receipt in receipts[2:]] == [0, 0]
        _ruin(folder)
        for step in (4, 5):
            receipt = store.commit_async({"w": drifting(step)}, step).result()
            assert receipt.chunks_delta == CHUNKS
            assert not receipt.warnings


def test_a_keyframe_that_is_read_back_is_held_as_far_as_the_bound_allows(folder):
    policy = Policy(base_cache="memory", base_cache_nbytes_max=2 * COUNT, threads=2)
    with ckstore.open(folder, policy=policy) as store:
        for step in range(5):
            receipt = store.commit({"w": drifting(step)}, step)
            assert receipt.bytes_bases_peak <= 2 * COUNT
    assert receipt.bytes_bases == 2 * COUNT
    assert receipt.chunks_delta == CHUNKS


def test_a_store_that_is_closed_holds_no_memory(folder):
    gc.collect()
    gc.disable()
    try:
        before = _mapped_nbytes()
        with ckstore.open(folder, policy=KEEPING) as store:
            for step, values in enumerate(walking(2)):
                pending = store.commit_async({"w": values}, step)
            receipt = pending.result()
            assert receipt.bytes_bases_staged
            assert _mapped_nbytes() > before + 8 * COUNT
        assert _mapped_nbytes() < before + MIB, "the store and the pending commit are still there"
    finally:
        gc.enable()
    assert pending.result() is receipt


def test_policy_without_base_cache_frees_the_bases_that_were_held(folder):
    with ckstore.open(folder, policy=Policy(base_cache="memory", saver_nice=0)) as store:
        receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in range(3)]
        assert receipts[-1].bytes_bases == 4 * COUNT, "the keyframe"
        receipt = store.commit_async({"w": drifting(3)}, 3, policy=Policy(saver_nice=0)).result()
        assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (0, 0)
        assert receipt.chunks_delta == CHUNKS


def test_commit_of_the_trainer_frees_the_slot_that_the_saver_keeps(keeping_store):
    store = keeping_store
    for step in range(0, 6, 2):
        store.commit_async({"w": drifting(step)}, step).result()
        store.commit({"w": drifting(step + 1)}, step + 1)
    assert store.arena_nbytes <= SLOT_NBYTES, "each was staged where the last one was"
    assert store.steps() == list(range(6))


def test_policy_without_base_cache_frees_the_slot_that_the_saver_keeps(keeping_store):
    store = keeping_store
    store.commit_async({"w": drifting(0)}, 0).result()
    receipt = store.commit_async({"w": drifting(1)}, 1, policy=Policy(saver_nice=0)).result()
    assert receipt.bytes_bases_staged == 0
    for step in (2, 3):
        assert store.commit_async({"w": drifting(step)}, step).result().bytes_bases_staged
    assert store.arena_nbytes <= 2 * SLOT_NBYTES, "a third slot was never needed"


@pytest.mark.parametrize("on_busy", ["wait", "replace", "skip"])
def test_states_that_come_too_fast_are_stored_right_beside_a_kept_one(folder, on_busy):
    policy = Policy(base_cache="memory", on_busy=on_busy, saver_nice=0)
    with ckstore.open(folder, policy=policy) as store:
        pendings = [store.commit_async({"w": drifting(step)}, step) for step in range(12)]
        store.wait()
        assert store.arena_nbytes <= 3 * SLOT_NBYTES
        kept = store.steps()
        assert 11 in kept or on_busy == "skip"
        assert all(np.array_equal(store.restore(step)["w"], drifting(step)) for step in kept)
        assert [pending.step for pending in pendings if pending.error_or_none() is None] == kept or on_busy == "skip"


def test_saver_that_dies_while_it_keeps_a_slot_fails_no_commit(keeping_store, caplog):
    store = keeping_store
    store.commit_async({"w": drifting(0)}, 0).result()
    saver = saver_of(store)
    os.kill(saver.pid, signal.SIGKILL)
    until(lambda: not saver.is_alive, "its end")
    assert "before the commit was durable" not in caplog.text
    receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in (1, 2, 3)]
    assert any(receipt.bytes_bases_staged for receipt in receipts)
    assert store.arena_nbytes <= 2 * SLOT_NBYTES, "the slot was taken back"
    assert np.array_equal(store.restore(0)["w"], drifting(0))


def test_going_back_to_an_earlier_checkpoint_codes_against_that_one(keeping_store):
    store = keeping_store
    for step in range(3):
        store.commit_async({"w": drifting(step)}, step).result()
    store.rewind("seq:0")
    store.commit_async({"w": drifting(1)}, 9).result()
    store.commit_async({"w": drifting(2)}, 10).result()
    assert np.array_equal(store.restore(10)["w"], drifting(2))
    assert not store.verify("decode").damage


def _ruin(folder):
    for pack in (folder / "packs").rglob("*.ckpack"):
        pack.write_bytes(b"x" * pack.stat().st_size)


def _mapped_nbytes():
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "ckstore-arena" in line]
    spans = [[int(place, 16) for place in line.split()[0].split("-")] for line in lines]
    return sum(end - begin for begin, end in spans)


# The saver's side


def test_the_saver_gives_a_slot_back_when_the_next_ticket_has_ended(address):
    desk = SaverHarness(address, slot_count=2)
    try:
        first = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        assert first.events == ["began", "done", "kept"]
        second = desk.begin({"w": drifting(1)}, 1, slot=1, policy=KEEPING, may_retain=True).stage().finish()
        assert second.kept.wait(SECONDS_MAX)
        assert first.events[-1] == "free"
        assert second.receipt.chunks_delta == CHUNKS
        assert desk.saver.release_lease(SECONDS_MAX)
        assert second.events[-1] == "free"
    finally:
        desk.close()


def test_the_saver_forgets_what_it_keeps_and_nothing_else(address):
    desk = SaverHarness(address, slot_count=2)
    try:
        first = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        desk.saver.release_retained()
        assert desk.saver.wait(first.free, SECONDS_MAX, "forget")
        assert (Path(address) / paths.lease_name("main")).exists()
        second = desk.begin({"w": drifting(1)}, 1, policy=KEEPING, may_retain=True).stage().finish()
        assert second.kept.wait(SECONDS_MAX)
        assert second.receipt.chunks_delta == CHUNKS, "against what is read back"
    finally:
        desk.close()


def test_a_ticket_that_is_given_up_before_its_turn_ends_before_the_one_that_is_running(address):
    desk = SaverHarness(address, slot_count=3)
    try:
        running = desk.begin({"w": drifting(0)}, 0, policy=KEEPING).stage(1)
        assert desk.saver.wait(running.began, SECONDS_MAX, "begin")
        waiting = desk.begin({"w": drifting(1)}, 1, slot=1, policy=KEEPING).stage().finish()
        assert desk.saver.wait(waiting.began, SECONDS_MAX, "say that it has the run")
        desk.saver.abort(waiting.number)
        assert desk.saver.wait(waiting.free, SECONDS_MAX, "give it up")
        assert waiting.events == ["began", "failed", "free"]
        assert not running.ended.is_set()
        later = desk.begin({"w": drifting(2)}, 2, slot=1, policy=KEEPING, parent_ticket=waiting.number)
        later.stage().finish()
        assert running.stage().finish().wait().chunks_new == CHUNKS
        assert later.wait().chunks_delta == CHUNKS
    finally:
        desk.close()
    with ckstore.open(address) as store:
        assert store.steps() == [0, 2]


def test_slot_that_may_not_be_kept_is_free_when_its_commit_is_done(desk):
    handed = desk.begin({"w": drifting(0)}, 0, policy=KEEPING).stage().finish()
    assert handed.wait().bytes_bases == 4 * COUNT
    assert "kept" not in handed.events


def test_a_slot_that_is_kept_cannot_be_begun_again(desk):
    handed = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_retain=True).stage().finish()
    assert handed.kept.wait(SECONDS_MAX)
    saver = desk.saver
    desk.begin({"w": drifting(1)}, 1, policy=KEEPING, may_retain=True)
    until(lambda: not saver.is_alive, "its end")


def test_a_ticket_that_fails_leaves_what_was_kept_in_its_place(address):
    desk = SaverHarness(address, slot_count=2)
    try:
        first = desk.begin({"w": drifting(0)}, 0, policy=KEEPING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        second = desk.begin({"w": drifting(1)}, 1, slot=1, policy=KEEPING, may_retain=True).stage(1)
        desk.saver.abort(second.number)
        assert desk.saver.wait(second.free, SECONDS_MAX, "give it up")
        assert "free" not in first.events
        third = desk.begin({"w": drifting(2)}, 2, slot=1, policy=KEEPING, may_retain=True).stage().finish()
        assert third.kept.wait(SECONDS_MAX)
        assert third.receipt.chunks_delta == CHUNKS
        assert first.events[-1] == "free"
    finally:
        desk.close()
