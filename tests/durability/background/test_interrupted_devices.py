"""Ctrl-C before each line of what the trainer's thread does about a state that lies in a device.

A device goes on sending what it was told, whoever was interrupted. The next state comes from the host's memory, at
once: it must not lie where the device still sends to.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.saver.arena import UNIT_NBYTES
from ckstore.staging.stowage import DEVICE_LAZY, DEVICE_NOW, NOW
from support.interrupts import check_seen, commit, filled, interrupt_each_line

pytestmark = pytest.mark.usefixtures("quiet_log")


def interrupt(folder, lying, kind, act, guard, *, is_checked=False):
    """Interrupt commits of a state that lies in the device, each followed by one from the host; return the places."""
    far = {"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)}

    def from_device(store, _, step):
        lying.kind = kind
        act(store, far, step)

    def then_from_host(store, _, step):
        guard(store)
        far["w"][:] = (step + 1) % 251
        lying.kind = NOW

    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=is_checked)) as store:
        store._guarded = lying
        return interrupt_each_line(store, from_device, after=then_from_host)


def check(places):
    check_seen(places)
    assert {place.partition(":")[0] for place in places} >= {"handover.py", "state.py", "device_copy.py", "crew.py"}


def test_where_a_device_has_sent_all_before_the_call_returns(witnesses, folder, device, lying):
    check(interrupt(folder, lying, DEVICE_NOW, commit, lambda store: None))


@pytest.mark.parametrize("is_checked", [False, True], ids=["unchecked", "checked"])
def test_where_a_device_sends_behind_a_guard(witnesses, folder, device, lying, is_checked):
    def guard(store):
        store._handover.guard()
        # What training tells the device next comes after that.
        device.wait_held()

    def commit_and_guard(store, state, step):
        pending = store.commit_async(filled(state, step), step)
        guard(store)
        state["w"][:] = (step + 1) % 251
        pending.wait_staged()
        pending.result(60)

    check(interrupt(folder, lying, DEVICE_LAZY, commit_and_guard, guard, is_checked=is_checked))
