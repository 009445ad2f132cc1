"""There is no memory for what a device would send: the commit says so before any is told, and the next one works."""

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
    """Begin or end a time in which there is no memory for what devices send; it is what has been asked for in it."""

    class Shortage(list):
        is_on = False

    found, populate = Shortage(), Slot.populate

    def populate_some(slot, offset, nbytes):
        # The head of a state, and what lies in the host, takes less than a unit here.
        if found.is_on and nbytes >= UNIT_NBYTES:
            found.append(nbytes)
            raise CapacityError("there is no memory for the arena")
        populate(slot, offset, nbytes)

    monkeypatch.setattr(Slot, "populate", populate_some)
    return found


@pytest.mark.parametrize("kind", [DEVICE_NOW, DEVICE_LAZY], ids=["before the call returns", "behind a guard"])
def test_nothing_is_sent_and_the_next_commit_works(recording_savers, folder, device, memory_kinds, shortage, kind):
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
        assert device.sent_count == sent, "nobody was told to send"
        shortage.is_on = False
        assert store.commit_async(filled(state, 4), 4).result(60).step == 4
        store.wait()
        assert {slot.state for slot in recording_savers[0].arena.slots} == {FREE}
    assert RecordingSaver.seen == [(1, {1}), (4, {4})]
