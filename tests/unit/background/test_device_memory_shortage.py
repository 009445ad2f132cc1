"""Protects commits without memory for a device's tensors: they fail before a device copies, and later ones work."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.background.arena import FREE, UNIT_NBYTES, Slot
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW
from ckstore.errors import CapacityError
from support.interrupts import RecordingSaver, filled

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.fixture
def shortage(monkeypatch):
    """Return a switch that makes populate fail for device memory. It lists the sizes that were requested while on."""

    class Shortage(list):
        is_on = False

    found, populate = Shortage(), Slot.populate

    def populate_some(slot, offset, nbytes):
        # The head of a state, and its tensors in host memory, take less than one unit here.
        if found.is_on and nbytes >= UNIT_NBYTES:
            found.append(nbytes)
            raise CapacityError("there is no memory for the arena")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", populate_some)
    return found


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY], ids=["before the call returns", "behind a guard"])
def test_commit_fails_before_copies_and_the_next_works(recording_savers, folder, device, memory_kinds, shortage, kind):
    memory_kinds.kind = kind
    state = {"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)}
    with ckstore.open(folder) as store:
        assert store.commit_async(filled(state, 1), 1).result(60).step == 1
        sent = device.sent_count
        shortage.is_on = True
        for step in (2, 3):
            with pytest.raises(CapacityError, match="no memory"):
                store.commit_async(filled(state, step), step)
        assert shortage == [3 * UNIT_NBYTES] * 2
        device.finish()
        assert device.sent_count == sent, "no copy was launched"
        shortage.is_on = False
        assert store.commit_async(filled(state, 4), 4).result(60).step == 4
        store.wait()
        assert {slot.state for slot in recording_savers[0].arena.slots} == {FREE}
    assert RecordingSaver.seen == [(1, {1}), (4, {4})]
