"""A fake device: a thread that copies what was submitted, in order, with a delay."""

from __future__ import annotations

import queue
import threading
import time

from ckstore.background.arena_layout import NOW
from ckstore.concurrency import Latch

SECONDS_A_UNIT = 0.001
SECONDS_MAX = 30


class MemoryKinds:
    """Says in which memory states are, and when they are copied; also replaces attached optimizers."""

    kind = NOW

    def kinds_of(self, captured, starts, guarded):
        return [self.kind] * len(captured.storages)

    def spans(self):
        # A different span for each kind, because an unchanged span would not be checked again.
        return [(self.kind, self.kind + 1)]

    def release(self):
        """Do nothing."""


class FakeDevice:
    """Replaces a CUDA device; its thread is the stream of copies, the test's thread is the training stream."""

    def __init__(self):
        self._jobs = queue.SimpleQueue()
        self._held = []
        self.sent_count = 0
        self._thread = threading.Thread(target=self._serve, name="played-device")
        self._thread.start()

    def _serve(self):
        while (job := self._jobs.get()) is not None:
            time.sleep(SECONDS_A_UNIT)
            job()

    def submit(self, job):
        self._jobs.put(job)

    def hold(self, events):
        self._held += events

    def wait_for_held_copies(self):
        """Wait for held copies: what training submits afterwards is executed after them."""
        held, self._held = self._held, []
        for event in held:
            assert event.wait(SECONDS_MAX)

    def finish(self):
        """Wait until it has executed everything that was submitted so far."""
        is_sent = Latch()
        self.submit(is_sent.set)
        assert is_sent.wait(SECONDS_MAX)

    def copies_of(self, section, storages, slot):
        return FakeDeviceCopies(self, section, storages, slot)

    def close(self):
        self._jobs.put(None)
        self._thread.join()


class FakeDeviceCopies:
    """Copies of one section: ``staging.devices.DeviceCopies``."""

    def __init__(self, device, section, storages, slot):
        self._device, self._section, self._storages, self._slot = device, section, storages, slot
        self._events = []

    def fence(self):
        """Do nothing: training is never ahead of its own thread."""

    def launch(self):
        for unit in range(self._section.unit_count):
            is_there = Latch()
            self._events.append(is_there)
            self._device.submit(self._sending(unit, self._storages, is_there))

    def _sending(self, unit, storages, is_there):
        def send():
            for index, offset, place, nbytes in self._section.rows_of(unit):
                self._slot.view(place, nbytes)[:] = storages[index].read(offset, offset + nbytes)
            self._device.sent_count += 1
            is_there.set()

        return send

    def hold(self):
        self._device.hold(self._events)

    def wait(self, mark):
        for unit, is_there in enumerate(self._events):
            assert is_there.wait(SECONDS_MAX)
            mark(unit)

    def forget(self):
        self._storages = ()


class SlowDevice:
    """Copies of one section: the source is read at submission, and written when a test says so."""

    may_enqueue: threading.Event
    may_copy: threading.Event

    def __init__(self, section, storages, slot):
        self.section, self.storages, self.slot = section, storages, slot
        self.rows = []

    def fence(self):
        pass

    def launch(self):
        if self.section.unit_count:
            self.may_enqueue.wait(SECONDS_MAX)
        for unit in range(self.section.unit_count):
            for storage, offset, place, nbytes in self.section.rows_of(unit):
                self.rows.append((place, bytes(self.storages[storage].read(offset, offset + nbytes))))

    def hold(self):
        pass

    def wait(self, mark):
        if self.section.unit_count:
            self.may_copy.wait(2 * SECONDS_MAX)
        for place, content in self.rows:
            self.slot.view(place, len(content))[:] = content
        for unit in range(self.section.unit_count):
            mark(unit)

    def forget(self):
        self.storages = ()
