"""Protects staging: a state is copied completely or given up, and its sources live exactly as long as needed.

Also the errors around it: no memory, Ctrl-C, and the guard check.
"""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest

from ckstore.background.arena import STAGED, STAGING, UNIT_NBYTES, Slot
from ckstore.background.arena_layout import LAZY
from ckstore.background.copying import Checksums
from ckstore.codec import chunk_codec, kernels
from ckstore.commit.chunking import plan_commit
from ckstore.config import KIB, MIB, Limits
from ckstore.errors import BackendError, CapacityError, CorruptError
from support.ctrl_c import ctrl_c
from support.saver_harness import until
from support.staged_state import Staged, noise

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.mark.parametrize("width", [2, 4, 8])
def test_samples_equal_those_of_a_commit(arena, crew, width):
    state = [noise(9 * MIB + 3 * width).view(f"f{width}"), noise(700 * KIB, 1).view(f"u{width}")]
    staged = Staged(arena, crew, state)
    staged.staging.copy_now()
    room = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
    sampled = [row for row in staged.stowage.samples if row.width]
    chunks = plan_commit(staged.captured.storages, Limits()).chunks
    assert len(sampled) == len(chunks)
    for row in sampled:
        plain = staged.captured.storages[row.storage].read(row.offset, row.offset + row.nbytes)
        nbytes = chunk_codec.sample_of(plain, row.width, room)
        assert bytes(staged.slot.view(row.place, row.sample_nbytes)) == bytes(room[:nbytes])
    staged.close()


def test_middle_of_possible_roundings_is_copied_first(arena, crew):
    state = {"master": np.arange(500_000, dtype=np.float32), "half": np.arange(500_000, dtype=np.float16)}
    staged = Staged(arena, crew, state)
    staged.staging.copy_now()
    excerpts = [row for row in staged.stowage.samples if not row.width]
    assert {row.storage for row in excerpts} == {0, 1}
    for row in excerpts:
        plain = staged.captured.storages[row.storage].read(row.offset, row.offset + row.nbytes)
        assert bytes(staged.slot.view(row.place, row.nbytes)) == bytes(plain)
        assert row.offset + row.nbytes // 2 == staged.captured.storages[row.storage].nbytes // 2
    staged.close()


def test_guard_returns_after_guarded_memory_is_copied(arena, crew):
    state = [noise(9 * MIB, 1), noise(9 * MIB, 2)]
    before = [bytes(array) for array in state]
    staged = Staged(arena, crew, state, lazy=(1,))
    staged.staging.copy_now()
    state[0][:] = 0
    staged.staging.guard()
    state[1][:] = 0
    staged.staging.finish()
    assert staged.content() == before
    staged.close()


def test_sources_live_until_copied(arena, crew, monkeypatch):
    loop, proceed = kernels.copy_units, threading.Event()

    def slow(*args):
        proceed.wait(60)
        return loop(*args)

    monkeypatch.setattr(kernels, "copy_units", slow)
    array = noise(9 * MIB, 4)
    expected, gone = bytes(array), weakref.ref(array)
    staged = Staged(arena, crew, [array], lazy=(0,))
    staging, slot, place = staged.staging, staged.slot, staged.stowage.places[0]
    staging.copy_now()
    staged.captured = None
    del array
    assert gone() is not None
    proceed.set()
    staging.finish()
    assert bytes(slot.view(place, len(expected))) == expected
    # The copying thread drops its call a moment later.
    until(lambda: gone() is None, "the end of the source")
    staged.close()


def test_no_memory_is_raised_and_fails_the_commit_once(arena, crew, monkeypatch):
    def refuse(slot, offset, nbytes):
        raise CapacityError("no memory")

    monkeypatch.setattr(Slot, "populate", refuse)
    staged = Staged(arena, crew, [noise(9 * MIB), noise(9 * MIB, 1)], lazy=(1,))
    with pytest.raises(CapacityError, match="no memory"):
        staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert [type(each) for each in staged.events] == [CapacityError]
    assert staged.slot.state == STAGING
    staged.staging.finish()
    staged.staging.guard()
    assert len(staged.events) == 1
    staged.close()


def test_no_memory_in_guard_fails_the_commit_not_the_step(arena, crew, monkeypatch):
    populate = Slot.populate

    def refuse(slot, offset, nbytes):
        if offset:
            raise CapacityError("no memory")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", refuse)
    staged = Staged(arena, crew, [noise(1 * MIB), noise(9 * MIB, 1)], lazy=(1,))
    staged.staging.copy_now()
    staged.staging.guard()
    staged.staging.finish()
    assert [type(each) for each in staged.events] == [CapacityError]
    assert staged.slot.state == STAGING
    staged.close()


def test_ctrl_c_while_copying_gives_the_state_up(arena, crew, monkeypatch):
    loop = kernels.copy_units
    staged = Staged(arena, crew, [noise(24 * MIB, 7), noise(9 * MIB)], lazy=(1,))
    with ctrl_c() as interrupt:
        monkeypatch.setattr(kernels, "copy_units", lambda *args: interrupt.send() or loop(*args))
        with pytest.raises(KeyboardInterrupt):
            staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert [type(each) for each in staged.events] == [KeyboardInterrupt]
    assert staged.slot.state == STAGING
    staged.close()


@pytest.mark.parametrize("lazy", [(), (0,)])
def test_waiter_gives_up_an_interrupted_state(arena, crew, lazy):
    staged = Staged(arena, crew, [noise(9 * MIB, 7)], lazy=lazy)
    # By now the sources may belong to a later step.
    staged.staging.guard()
    staged.staging.finish()
    assert [type(each) for each in staged.events] == [KeyboardInterrupt]
    assert staged.slot.state == STAGING
    staged.close()


def test_interrupted_guard_does_not_stop_copying(arena, crew, monkeypatch):
    loop, is_guarding = kernels.copy_units, threading.Event()
    content = noise(9 * MIB)
    arena.slots[0].reserve(20 * MIB)
    arena.slots[0].populate(0, 20 * MIB)
    staged = Staged(arena, crew, [content], lazy=(0,))
    with ctrl_c() as interrupt:
        # Called by a copying thread, while the guard waits for it.
        monkeypatch.setattr(
            kernels, "copy_units", lambda *args: (is_guarding.wait(60), time.sleep(0.02), interrupt.send(), loop(*args))
        )
        staged.staging.copy_now()
        is_guarding.set()
        with pytest.raises(KeyboardInterrupt):
            staged.staging.guard()
    staged.staging.guard()
    staged.staging.finish()
    assert staged.events == ["staged"]
    assert staged.content() == [content.tobytes()]
    staged.close()


def test_given_up_state_is_not_copied_further(arena, crew, monkeypatch):
    loop, entered, proceed = kernels.copy_units, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        proceed.wait(60)
        return loop(*args)

    monkeypatch.setattr(kernels, "copy_units", slow)
    arena.slots[0].reserve(40 * MIB)
    arena.slots[0].populate(0, 40 * MIB)
    staged = Staged(arena, crew, [noise(24 * MIB, 7)], lazy=(0,))
    staged.staging.copy_now()
    assert entered.wait(60)
    staged.staging.cancel(CapacityError("given up"))
    assert not staged.staging.is_over.is_set()
    proceed.set()
    assert staged.staging.is_over.wait(60)
    assert not staged.slot.marks[: staged.stowage.end // UNIT_NBYTES].any()
    assert [str(each) for each in staged.events] == ["given up"]
    staged.close()


def test_unchanged_checked_state_is_staged_after_compare(arena, crew):
    staged = Staged(arena, crew, {"a": noise(9 * MIB), "b": [noise(5 * MIB, 1)]}, lazy=(0, 1), is_checked=True)
    staged.staging.copy_now()
    staged.wait_copied()
    assert staged.events == []
    assert staged.slot.state == STAGING
    staged.staging.guard()
    assert staged.events == ["staged"]
    assert staged.slot.state == STAGED
    staged.close()


def test_changed_checked_state_fails_by_tensor_name(arena, crew):
    state = {"a": noise(9 * MIB), "b": [noise(5 * MIB, 1), noise(5 * MIB, 2)]}
    staged = Staged(arena, crew, state, lazy=(0, 1, 2), is_checked=True)
    staged.staging.copy_now()
    staged.wait_copied()
    state["b"][1][4_500_000] ^= 1
    staged.staging.guard()
    (error,) = staged.events
    assert isinstance(error, CorruptError)
    assert error.path == ("b", 1)
    assert "b.1" in str(error)
    assert staged.slot.state == STAGING
    staged.staging.finish()
    assert len(staged.events) == 1
    staged.close()


def test_saver_death_ends_the_check(arena, crew):
    staged = Staged(arena, crew, {"a": noise(9 * MIB)}, lazy=(0,), is_checked=True)
    staged.staging.copy_now()
    staged.wait_copied()
    assert not staged.staging.is_over.is_set()
    staged.staging.give_up(BackendError("the saver has died"))
    assert staged.staging.is_over.is_set()
    staged.staging.guard()
    staged.staging.finish()
    assert [str(each) for each in staged.events] == ["the saver has died"]
    staged.close()


def test_waiter_finishes_an_interrupted_failure(arena, crew, monkeypatch):
    staged = Staged(arena, crew, {"a": noise(9 * MIB)}, lazy=(0,), is_checked=True)
    staged.staging.copy_now()
    staged.wait_copied()
    with monkeypatch.context() as context:
        context.setattr(crew, "send_one", interrupt)
        with pytest.raises(KeyboardInterrupt):
            staged.staging.cancel(BackendError("the saver has died"))
    staged.staging.finish()
    assert [str(each) for each in staged.events] == ["the saver has died"]
    assert staged.slot.state == STAGING
    staged.close()


def interrupt(*_):
    raise KeyboardInterrupt


def test_checksums_of_given_up_sources_find_no_change(arena, crew):
    staged = Staged(arena, crew, {"a": noise(9 * MIB)}, lazy=(0,))
    sums = Checksums(staged.stowage.sections[LAZY], staged.slot, staged.captured.storages)
    sums.forget()
    sums.note()
    assert sums.changed() is None
    staged.close()


def test_waiter_does_not_give_up_a_state_being_copied(arena, crew, monkeypatch):
    loop, entered, proceed = kernels.copy_units, threading.Event(), threading.Event()
    monkeypatch.setattr(kernels, "copy_units", lambda *args: entered.set() or (proceed.wait(60) and loop(*args)))
    staged = Staged(arena, crew, [noise(9 * MIB)])
    threads = [threading.Thread(target=each) for each in (staged.staging.copy_now, staged.staging.finish)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    assert staged.events == []
    proceed.set()
    for thread in threads:
        thread.join(60)
    assert staged.events == ["staged"]
    staged.close()
