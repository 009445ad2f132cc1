"""One state on its way to a slot, for the tests of staging: what was copied where, and what was reported."""

from __future__ import annotations

import os

import numpy as np

from ckstore.background.arena_layout import LAZY, NOW, plan_layout
from ckstore.background.copying import HostCopy
from ckstore.background.device_copy import starts_of
from ckstore.background.staged_head import places_to_sample
from ckstore.background.staging import Staging
from ckstore.config import Limits
from ckstore.state.capture import capture
from support.saver_harness import until


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Staged:
    """One state on its way to a slot, with its events."""

    def __init__(self, arena, crew, state, lazy=(), *, is_checked=False, captured=None, kinds=None, late=None):
        self.captured = captured or capture(state)
        kinds = kinds or [LAZY if index in lazy else NOW for index in range(len(self.captured.storages))]
        sampled = places_to_sample(self.captured.storages, Limits())
        self.stowage = plan_layout(self.captured.storages, kinds, sampled)
        self.slot = arena.slots[0]
        self.slot.reserve(self.stowage.end)
        self.slot.start(1, self.stowage.end)
        self.events = []
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.staging = Staging(
            self.captured,
            self.stowage,
            starts_of(self.captured.storages),
            self.slot,
            crew,
            bell=self.bell,
            is_checked=is_checked,
            on_staged=lambda: self.events.append("staged"),
            on_failed=self.events.append,
            late=None if late is None else lambda: late(self),
        )

    def host_copy(self, kind, on_over=lambda error: None):
        """Return a copy of what is of one kind, apart from the way that this state is on."""
        return HostCopy(
            self.stowage.sections[kind],
            self.slot,
            self.captured.storages,
            starts=starts_of(self.captured.storages),
            bell=-1,
            is_checked=False,
            on_over=on_over,
        )

    def wait_copied(self):
        """Wait until every unit is marked, whatever is still to be compared."""
        until(lambda: self.slot.is_staged(0, self.stowage.end), "the copies")

    def content(self):
        return [
            bytes(self.slot.view(place, storage.nbytes))
            for place, storage in zip(self.stowage.places, self.captured.storages, strict=True)
        ]

    def close(self):
        os.close(self.bell)
