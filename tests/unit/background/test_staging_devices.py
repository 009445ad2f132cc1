"""Protects copies from devices: they are complete, launched immediately, and finished after any error."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest

from ckstore.background.arena import STAGED
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, plan_layout
from ckstore.background.device_copy import copies_of
from ckstore.config import MIB
from ckstore.errors import BackendError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import TensorNode
from ckstore.state.capture import Captured
from support.staged_state import Staged, noise

pytestmark = pytest.mark.usefixtures("no_threads_left")


class DeviceStorage:
    """A storage on a device without streams."""

    is_host, element_width, is_float = False, 4, True

    def __init__(self, content):
        self.content, self.nbytes = content, len(content)
        self.is_broken = False
        self.readers = set()

    def read(self, lo, hi):
        self.readers.add(threading.get_ident())
        if self.is_broken:
            raise BackendError("the device has failed")
        return memoryview(self.content)[lo:hi]


def captured_on_device(*contents):
    storages = [DeviceStorage(bytes(content)) for content in contents]
    specs = [TensorSpec("numpy", "<u1", (each.nbytes,), (1,), index, 0) for index, each in enumerate(storages)]
    return Captured(TensorNode(0), [(index,) for index in range(len(storages))], specs, storages, [])


def test_device_memory_is_read_before_training_continues(arena, crew):
    captured = captured_on_device(noise(9 * MIB), noise(100, 1))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_NOW])
    staged.staging.copy_now()
    assert staged.events == ["staged"]
    assert staged.content() == [storage.content for storage in captured.storages]
    # Another thread may have another current stream, and read values that are not computed yet.
    assert [storage.readers for storage in captured.storages] == [{threading.get_ident()}] * 2
    assert os.eventfd_read(staged.bell) >= staged.stowage.sections[DEVICE_NOW].unit_count, (
        "the saver is woken immediately"
    )
    staged.close()


class RecordedCopies:
    """Copies that record their calls, and check the calling thread."""

    said = ()

    def __init__(self, section, storages, slot):
        self.what = sum(storages[index].nbytes for index in section.storages)
        self.units = range(section.unit_count)

    def say(self, word):
        self.said.append((word, self.what))

    def fence(self):
        assert threading.current_thread() is threading.main_thread(), "others may be on another stream"
        self.say("fence")

    def launch(self):
        self.say("launch")

    def hold(self):
        self.say("hold")

    def wait(self, mark):
        self.say("wait")
        for unit in self.units:
            mark(unit)

    def forget(self):
        self.say("forget")


@pytest.fixture
def recorded_copies(monkeypatch):
    class Copies(RecordedCopies):
        said: ClassVar[list] = []

    monkeypatch.setattr("ckstore.background.device_copy.copies_of", Copies)
    return Copies


def test_all_copies_are_launched_without_waiting(arena, crew, recorded_copies, monkeypatch):
    is_launched = threading.Event()

    def launch(self):
        self.say("launch")
        if self.what == 2 * MIB:
            is_launched.set()

    wait_one = recorded_copies.wait

    def wait(self, mark):
        assert is_launched.wait(60)
        wait_one(self, mark)

    monkeypatch.setattr(recorded_copies, "launch", launch)
    monkeypatch.setattr(recorded_copies, "wait", wait)
    captured = captured_on_device(noise(MIB), noise(2 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert staged.events == ["staged"]
    assert recorded_copies.said[:3] == [("fence", MIB), ("fence", 2 * MIB), ("launch", MIB)]
    assert [each for each in recorded_copies.said[3:] if each[0] != "forget"] == [
        ("launch", 2 * MIB),
        ("wait", MIB),
        ("wait", 2 * MIB),
    ]
    staged.close()


def test_guard_waits_until_all_copies_are_launched(arena, crew, recorded_copies, monkeypatch):
    may_launch, is_launching = threading.Event(), threading.Event()

    def launch(self):
        if self.what == 2 * MIB:
            is_launching.set()
            assert may_launch.wait(60)
        self.say("launch")

    monkeypatch.setattr(recorded_copies, "launch", launch)
    captured = captured_on_device(noise(MIB), noise(2 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    staged.staging.copy_now()
    assert is_launching.wait(60), "and the call has returned"
    guard = threading.Thread(target=staged.staging.guard)
    guard.start()
    guard.join(0.1)
    assert guard.is_alive()
    may_launch.set()
    guard.join(60)
    assert staged.staging.is_over.wait(60)
    assert recorded_copies.said.index(("launch", 2 * MIB)) < recorded_copies.said.index(("hold", 2 * MIB))
    assert recorded_copies.said.count(("launch", 2 * MIB)) == 1
    staged.close()


@pytest.mark.parametrize("missing", [DEVICE_NOW, DEVICE_LAZY])
def test_missing_copies_are_never_reported_as_staged(arena, crew, recorded_copies, monkeypatch, missing):
    wait_one, which = recorded_copies.wait, {DEVICE_NOW: MIB, DEVICE_LAZY: 9 * MIB}[missing]

    def wait(self, mark):
        self.units = self.units[:-1] if self.what == which else self.units
        wait_one(self, mark)

    monkeypatch.setattr(recorded_copies, "wait", wait)
    captured = captured_on_device(noise(MIB), noise(9 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    with contextlib.suppress(BackendError):
        staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert [type(each) for each in staged.events] == [BackendError]
    assert staged.slot.state != STAGED
    staged.close()


def test_ctrl_c_in_launch_is_raised_without_threads(arena, crew, recorded_copies, monkeypatch):
    def launch(self):
        if self.what == 2 * MIB:
            raise KeyboardInterrupt

    monkeypatch.setattr(recorded_copies, "launch", launch)
    captured = captured_on_device(noise(MIB), noise(2 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    with monkeypatch.context() as patch:
        patch.setattr(crew, "send_one", lambda work: work())
        with pytest.raises(KeyboardInterrupt):
            staged.staging.copy_now()
    assert staged.staging.is_over.is_set()
    assert [type(each) for each in staged.events] == [KeyboardInterrupt]
    staged.close()


@pytest.mark.parametrize("is_guarded", [False, True], ids=["nobody guards", "a guard comes"])
def test_failed_launch_fails_the_commit(arena, crew, recorded_copies, monkeypatch, is_guarded):
    def launch(self):
        if self.what == 2 * MIB:
            raise RuntimeError("the device has failed")

    monkeypatch.setattr(recorded_copies, "launch", launch)
    captured = captured_on_device(noise(MIB), noise(2 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    staged.staging.copy_now()
    if is_guarded:
        staged.staging.guard()
    assert staged.staging.is_over.wait(60)
    assert [str(error) for error in staged.events] == ["the device has failed"]
    staged.close()


def test_given_up_state_is_not_launched(arena, crew, recorded_copies, monkeypatch):
    captured = captured_on_device(noise(MIB), noise(2 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_LAZY])
    later = []
    with monkeypatch.context() as patch:
        # All threads are busy until the state was given up. Memory that must be copied now is copied by this thread.
        patch.setattr(crew, "send_one", later.append)
        patch.setattr(crew.device_thread, "send_one", later.append)
        patch.setattr(crew.device_thread, "run_and_wait", lambda step: step())
        staged.staging.copy_now()
    assert len(later) == 2
    staged.staging.give_up(ValueError("not wanted"))
    for work in later:
        work()
    assert ("launch", 2 * MIB) not in recorded_copies.said
    assert [str(error) for error in staged.events] == ["not wanted"]
    staged.close()


@pytest.mark.parametrize("is_far", [False, True], ids=["host", "device"])
def test_state_ends_without_memory_to_release_it(arena, crew, monkeypatch, is_far):
    class Short:
        def __getattr__(self, name):
            return getattr(np, name)

        def zeros(self, *given):
            raise MemoryError("no memory to release the marks")

    captured = captured_on_device(noise(MIB)) if is_far else None
    staged = Staged(arena, crew, [noise(MIB)], captured=captured, kinds=[DEVICE_NOW] if is_far else None)
    monkeypatch.setattr("ckstore.background.device_copy.np" if is_far else "ckstore.background.copying.np", Short())
    with contextlib.suppress(MemoryError):
        staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert len(staged.events) == 1
    monkeypatch.undo()
    staged.close()


def test_finished_copies_keep_no_state(arena):
    captured = captured_on_device(noise(9 * MIB))
    stowage = plan_layout(captured.storages, [DEVICE_NOW], [])
    slot = arena.slots[0]
    slot.reserve(stowage.end)
    copies = copies_of(stowage.sections[DEVICE_NOW], captured.storages, slot)
    marked, storage = [], weakref.ref(captured.storages[0])
    copies.fence()
    copies.launch()
    copies.wait(marked.append)
    copies.forget()
    assert len(marked) == stowage.sections[DEVICE_NOW].unit_count == 3
    del captured
    assert storage() is None, "the cache for the next commit keeps the copies"


def test_only_the_launching_thread_reads_the_device(arena, crew):
    """Its current stream may be another one. It would read values that training has not computed yet."""
    captured = captured_on_device(noise(9 * MIB))
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_LAZY])
    staged.staging.copy_now()
    assert staged.staging.is_over.wait(60)
    assert [(type(each), "a thread that did not launch" in str(each)) for each in staged.events] == [
        (BackendError, True)
    ]
    staged.close()


def test_failing_device_fails_the_commit(arena, crew):
    captured = captured_on_device(noise(9 * MIB), noise(100, 1))
    captured.storages[1].is_broken = True
    staged = Staged(arena, crew, None, captured=captured, kinds=[DEVICE_NOW, DEVICE_NOW])
    with pytest.raises(BackendError):
        staged.staging.copy_now()
    assert [type(each) for each in staged.events] == [BackendError]
    assert staged.staging.is_over.is_set()
    staged.close()
