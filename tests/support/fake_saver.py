"""A fake saver without a process: it keeps what was staged, and ends tickets when a test says so."""

from __future__ import annotations

import os
import threading

import numpy as np

from ckstore._testing import guard_memory
from ckstore.background import copying
from ckstore.background.arena import STAGED
from ckstore.background.staged_head import decode_head
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.results import Receipt


class FakeSaver:
    """What ``saver.client.Saver`` offers to a handover."""

    started: list[FakeSaver]
    """All that were started; a fixture resets it for each test."""

    def __init__(self, arena, options):
        self.arena, self.options = arena, options
        self.pid = os.getpid()
        self.is_alive = True
        self.lease = "lent"  # There is no process that could hold a lease.
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.begun, self.aborted = {}, []
        self.is_quick = True
        self.has_run = True
        self.parents, self.held = [], []
        self.kept = []
        self.retains_slots = False
        self.retained = set()
        self.calls = []
        self.patience = 60.0
        """Seconds after which every wait with a limit ends."""
        self.on_wait = None
        """Called when somebody begins to wait, with what for: so that it comes after that."""

    @property
    def takes_tickets(self):
        return self.is_alive

    @classmethod
    def start(cls, address, run, arena, **options):
        saver = cls(arena, {"address": address, "run": run, **options})
        cls.started.append(saver)
        return saver

    def begin(self, ticket, slot, head_place, head_nbytes, callbacks, **options):
        if not self.is_alive:
            raise SaverError("the saver is dead")
        room = self.arena.slots[slot]
        head = decode_head(room.view(head_place, head_nbytes), slot_nbytes=room.nbytes)
        assert room.ticket == ticket
        assert room.is_staged(head_place, head_place + head_nbytes)
        self.begun[ticket] = (room, head, callbacks)
        self.parents.append((options["parent"], options["parent_ticket"]))
        self.held.append(options["start_delay_ms"])
        self.kept.append(options["may_retain"])
        self.calls.append("begin")
        if self.has_run:
            callbacks.on_began()

    def wait_ready(self, timeout=None):
        self.calls.append("wait ready")
        return True

    def warm(self, block_count, nbytes, timeout=None):
        self.calls.append("warm")
        self.warmed = block_count, nbytes
        return True

    def staged(self, ticket):
        room, head, _ = self.begun[ticket]
        assert room.state == STAGED
        assert all(room.is_staged(row.place, row.place + row.nbytes) for row in head.storages)
        self.calls.append("staged")
        if self.is_quick:
            self.finish(ticket)

    def abort(self, ticket):
        self.aborted.append(ticket)
        self.calls.append("abort")
        if ticket in self.begun:
            self.fail(ticket, SaverError("given up by the trainer"))

    def content(self, ticket):
        """Return the current bytes of each storage in the slot."""
        room, head, _ = self.begun[ticket]
        return [bytes(room.view(row.place, row.nbytes)) for row in head.storages]

    def head(self, ticket):
        return self.begun[ticket][1]

    def is_copied(self, ticket):
        """Whether every byte of a state is marked as copied, whatever is still to be compared."""
        room, head, _ = self.begun[ticket]
        return all(room.is_staged(row.place, row.place + row.nbytes) for row in head.storages if row.nbytes)

    def slot(self, ticket):
        """Return the slot of the arena that a ticket was begun in."""
        return self.begun[ticket][0]

    def finish(self, ticket, warnings=()):
        """End a ticket well."""
        _, head, callbacks = self.begun[ticket]
        receipt = Receipt(head.step, 100 + ticket, "00" * 32, 1, 1, 1, 0, 0, 0, {}, "pwrite", tuple(warnings))
        callbacks.on_began()
        callbacks.on_progress("write", 1, 2)
        callbacks.on_done(receipt)
        if self.retains_slots and self.kept[ticket - 1]:
            self.retained.add(ticket)
            callbacks.on_retained()
        else:
            callbacks.on_free()

    def free(self, ticket):
        """Give back a slot that was kept."""
        self.retained.remove(ticket)
        self.begun[ticket][2].on_free()

    def fail(self, ticket, error):
        """End a ticket with an error."""
        callbacks = self.begun[ticket][2]
        callbacks.on_failed(error)
        callbacks.on_free()

    def die(self):
        """End like a process that was killed."""
        self.is_alive = False
        for ticket in list(self.begun):
            self.fail(ticket, SaverError("the saver was killed"))

    def release_lease(self, timeout=None):
        self.calls.append("release")
        self._free_all()
        return True

    def release_retained(self):
        self.calls.append("forget")
        self._free_all()

    def _free_all(self):
        for ticket in sorted(self.retained):
            self.free(ticket)

    def quit(self, timeout=None, *, is_waited=True):
        self.calls.append("quit")
        self.is_alive = False
        if is_waited:
            self._free_all()
        return True

    def hurry(self):
        self.calls.append("hurry")

    def wait(self, event, timeout, doing, *, is_urgent=False):
        if not event.is_set() and self.on_wait is not None:
            self.on_wait(doing)
        return event.wait(60 if timeout is None else min(timeout, self.patience))


class DelayedCopy:
    """Replaces ``HostCopy.send``: guarded memory is copied only when somebody waits for it.

    A correct state then proves that the guard works, not that copying was fast.
    """

    def __init__(self, monkeypatch):
        self.held = 0
        waiting = threading.local()
        send = copying.HostCopy.send

        def held_send(copy, crew, count):
            if copy.section.unit_count and not getattr(waiting, "is_on", False):
                self.held += 1
                return
            send(copy, crew, count)

        def noted(wait):
            def noted_wait(*given):
                waiting.is_on = True
                try:
                    wait(*given)
                finally:
                    waiting.is_on = False

            return noted_wait

        monkeypatch.setattr(copying.HostCopy, "send", held_send)
        for name in ("join", "wait"):
            monkeypatch.setattr(copying.HostCopy, name, noted(getattr(copying.HostCopy, name)))


def step_without_hooks(optimizer):
    """Take a step that calls no hooks, as one that a CUDA graph replays."""
    type(optimizer).step.__wrapped__(optimizer)


class OwnerOfAll:
    """Replaces attached optimizers: owns all memory."""

    def spans(self):
        return [(0, 1 << 62)]

    def release(self):
        """Do nothing."""


def guard_with(store, owner):
    """Have an owner say which memory is copied behind the guard; no public call attaches memory without tensors."""
    guard_memory(store, owner)


def state(seed, nbytes=5 * MIB):
    return {"w": np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8), "seed": seed}


def slow(savers):
    """Let the last saver end nothing by itself."""
    savers[-1].is_quick = False
    return savers[-1]
