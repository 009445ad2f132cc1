"""Protects two states in the arena: the previous state stays where it was staged, as the base of the next one."""

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

CACHING = Policy(base_cache="memory", threads=2, saver_nice=0, read_amplification_max=8)
"""With a read bound that allows every state to be encoded against the previous one."""
COUNT = 2 * MIB
"""Elements of two chunks of fp32."""
CHUNKS = 2

SLOT_NBYTES = 4 * COUNT + 2 * UNIT_NBYTES
"""Size of a slot for them: samples and the head have separate units."""


@functools.cache
def noise_of(seed):
    return np.random.default_rng(seed).standard_normal(COUNT, np.float32)


def drifting(step):
    """Return values that all change slightly with each step."""
    return noise_of(0) * np.float32(1 + step * 2**-16)


def walking(step_count):
    """Yield values that all differ slightly from the previous ones, which are the best base."""
    values = noise_of(1)
    for step in range(step_count):
        yield values
        values = values + np.float32(1e-3) * noise_of(2 + step)


@pytest.fixture
def caching_store(folder):
    with ckstore.open(folder, policy=CACHING) as opened:
        yield opened


# End to end


def test_staged_state_is_base_with_two_slots(caching_store):
    store = caching_store
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


def test_cached_bases_give_the_same_frames(caching_store, folder):
    ours, others = [], []
    policy = Policy(threads=2, saver_nice=0, read_amplification_max=8)
    with ckstore.open(folder.with_name("other"), policy=policy) as other:
        for step, values in enumerate(walking(4)):
            state = {"w": values, "frozen": drifting(0), "small": [np.arange(step + 9)] * 3}
            ours.append(caching_store.commit_async(state, step).result())
            others.append(other.commit_async(state, step).result())
    assert [each.bytes_written for each in ours] == [each.bytes_written for each in others]
    assert [each.chunks_delta for each in ours] == [each.chunks_delta for each in others]
    assert [each.chunks_delta >= CHUNKS for each in ours] == [False, True, True, True]
    assert not any(each.bytes_bases_staged for each in others)


def test_unchanged_storage_moves_to_the_newer_slot(caching_store):
    frozen = drifting(0)
    for step, values in enumerate(walking(4)):
        receipt = caching_store.commit_async({"frozen": frozen, "w": values}, step).result()
        assert receipt.bytes_bases == receipt.bytes_bases_peak == 0
        assert receipt.bytes_bases_staged == 8 * COUNT
    assert caching_store.arena_nbytes <= 2 * (SLOT_NBYTES + 4 * COUNT), "two states of two tensors"


def test_bases_are_read_from_the_arena(caching_store, folder):
    caching_store.commit_async({"w": drifting(0)}, 0).result()
    # The written packs are unreadable now, so a base that is read back would be reported as damaged.
    _ruin(folder)
    receipt = caching_store.commit_async({"w": drifting(1)}, 1).result()
    assert receipt.chunks_delta == CHUNKS
    assert not receipt.warnings


def test_keyframe_is_read_back_once(folder):
    # With the default bound, states are encoded against the keyframe, which was released for a newer one.
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


def test_read_back_keyframe_is_cached_up_to_bound(folder):
    policy = Policy(base_cache="memory", base_cache_nbytes_max=2 * COUNT, threads=2)
    with ckstore.open(folder, policy=policy) as store:
        for step in range(5):
            receipt = store.commit({"w": drifting(step)}, step)
            assert receipt.bytes_bases_peak <= 2 * COUNT
    assert receipt.bytes_bases == 2 * COUNT
    assert receipt.chunks_delta == CHUNKS


def test_closed_store_holds_no_memory(folder):
    gc.collect()
    gc.disable()
    try:
        before = _mapped_nbytes()
        with ckstore.open(folder, policy=CACHING) as store:
            for step, values in enumerate(walking(2)):
                pending = store.commit_async({"w": values}, step)
            receipt = pending.result()
            assert receipt.bytes_bases_staged
            assert _mapped_nbytes() > before + 8 * COUNT
        assert _mapped_nbytes() < before + MIB, "the store and the pending commit are still there"
    finally:
        gc.enable()
    assert pending.result() is receipt


def test_policy_without_cache_frees_cached_bases(folder):
    with ckstore.open(folder, policy=Policy(base_cache="memory", saver_nice=0)) as store:
        receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in range(3)]
        assert receipts[-1].bytes_bases == 4 * COUNT, "the keyframe"
        receipt = store.commit_async({"w": drifting(3)}, 3, policy=Policy(saver_nice=0)).result()
        assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (0, 0)
        assert receipt.chunks_delta == CHUNKS


def test_synchronous_commit_frees_the_retained_slot(caching_store):
    store = caching_store
    for step in range(0, 6, 2):
        store.commit_async({"w": drifting(step)}, step).result()
        store.commit({"w": drifting(step + 1)}, step + 1)
    assert store.arena_nbytes <= SLOT_NBYTES, "each was staged where the last one was"
    assert store.steps() == list(range(6))


def test_policy_without_cache_frees_retained_slot(caching_store):
    store = caching_store
    store.commit_async({"w": drifting(0)}, 0).result()
    receipt = store.commit_async({"w": drifting(1)}, 1, policy=Policy(saver_nice=0)).result()
    assert receipt.bytes_bases_staged == 0
    for step in (2, 3):
        assert store.commit_async({"w": drifting(step)}, step).result().bytes_bases_staged
    assert store.arena_nbytes <= 2 * SLOT_NBYTES, "a third slot was never needed"


@pytest.mark.parametrize("on_busy", ["wait", "replace", "skip"])
def test_fast_commits_work_with_a_retained_slot(folder, on_busy):
    policy = Policy(base_cache="memory", on_busy=on_busy, saver_nice=0)
    with ckstore.open(folder, policy=policy) as store:
        pendings = [store.commit_async({"w": drifting(step)}, step) for step in range(12)]
        store.wait()
        assert store.arena_nbytes <= 3 * SLOT_NBYTES
        kept = store.steps()
        assert 11 in kept or on_busy == "skip"
        assert all(np.array_equal(store.restore(step)["w"], drifting(step)) for step in kept)
        assert [pending.step for pending in pendings if pending.error_or_none() is None] == kept or on_busy == "skip"


def test_death_of_saver_with_retained_slot_is_harmless(caching_store, caplog):
    store = caching_store
    store.commit_async({"w": drifting(0)}, 0).result()
    saver = saver_of(store)
    os.kill(saver.pid, signal.SIGKILL)
    until(lambda: not saver.is_alive, "its end")
    assert "before the commit was durable" not in caplog.text
    receipts = [store.commit_async({"w": drifting(step)}, step).result() for step in (1, 2, 3)]
    assert any(receipt.bytes_bases_staged for receipt in receipts)
    assert store.arena_nbytes <= 2 * SLOT_NBYTES, "the slot was taken back"
    assert np.array_equal(store.restore(0)["w"], drifting(0))


def test_restored_checkpoint_becomes_the_base(caching_store):
    store = caching_store
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


def test_slot_is_released_after_the_next_ticket(address):
    harness = SaverHarness(address, slot_count=2)
    try:
        first = harness.begin({"w": drifting(0)}, 0, policy=CACHING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        assert first.events == ["began", "done", "kept"]
        second = harness.begin({"w": drifting(1)}, 1, slot=1, policy=CACHING, may_retain=True).stage().finish()
        assert second.kept.wait(SECONDS_MAX)
        assert first.events[-1] == "free"
        assert second.receipt.chunks_delta == CHUNKS
        assert harness.saver.release_lease(SECONDS_MAX)
        assert second.events[-1] == "free"
    finally:
        harness.close()


def test_saver_releases_only_the_retained_slot(address):
    harness = SaverHarness(address, slot_count=2)
    try:
        first = harness.begin({"w": drifting(0)}, 0, policy=CACHING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        harness.saver.release_retained()
        assert harness.saver.wait(first.free, SECONDS_MAX, "forget")
        assert (Path(address) / paths.lease_name("main")).exists()
        second = harness.begin({"w": drifting(1)}, 1, policy=CACHING, may_retain=True).stage().finish()
        assert second.kept.wait(SECONDS_MAX)
        assert second.receipt.chunks_delta == CHUNKS, "against what is read back"
    finally:
        harness.close()


def test_aborted_waiting_ticket_ends_first(address):
    harness = SaverHarness(address, slot_count=3)
    try:
        running = harness.begin({"w": drifting(0)}, 0, policy=CACHING).stage(1)
        assert harness.saver.wait(running.began, SECONDS_MAX, "begin")
        waiting = harness.begin({"w": drifting(1)}, 1, slot=1, policy=CACHING).stage().finish()
        assert harness.saver.wait(waiting.began, SECONDS_MAX, "say that it has the run")
        harness.saver.abort(waiting.number)
        assert harness.saver.wait(waiting.free, SECONDS_MAX, "give it up")
        assert waiting.events == ["began", "failed", "free"]
        assert not running.ended.is_set()
        later = harness.begin({"w": drifting(2)}, 2, slot=1, policy=CACHING, parent_ticket=waiting.number)
        later.stage().finish()
        assert running.stage().finish().wait().chunks_new == CHUNKS
        assert later.wait().chunks_delta == CHUNKS
    finally:
        harness.close()
    with ckstore.open(address) as store:
        assert store.steps() == [0, 2]


def test_unretained_slot_is_free_after_commit(harness):
    in_flight = harness.begin({"w": drifting(0)}, 0, policy=CACHING).stage().finish()
    assert in_flight.wait().bytes_bases == 4 * COUNT
    assert "kept" not in in_flight.events


def test_retained_slot_cannot_be_reused(harness):
    in_flight = harness.begin({"w": drifting(0)}, 0, policy=CACHING, may_retain=True).stage().finish()
    assert in_flight.kept.wait(SECONDS_MAX)
    saver = harness.saver
    harness.begin({"w": drifting(1)}, 1, policy=CACHING, may_retain=True)
    until(lambda: not saver.is_alive, "its end")


def test_failed_ticket_keeps_the_retained_slot(address):
    harness = SaverHarness(address, slot_count=2)
    try:
        first = harness.begin({"w": drifting(0)}, 0, policy=CACHING, may_retain=True).stage().finish()
        assert first.kept.wait(SECONDS_MAX)
        second = harness.begin({"w": drifting(1)}, 1, slot=1, policy=CACHING, may_retain=True).stage(1)
        harness.saver.abort(second.number)
        assert harness.saver.wait(second.free, SECONDS_MAX, "give it up")
        assert "free" not in first.events
        third = harness.begin({"w": drifting(2)}, 2, slot=1, policy=CACHING, may_retain=True).stage().finish()
        assert third.kept.wait(SECONDS_MAX)
        assert third.receipt.chunks_delta == CHUNKS
        assert first.events[-1] == "free"
    finally:
        harness.close()
