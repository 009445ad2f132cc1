"""Ctrl-C before each line of the trainer's code that handles a state in device memory.

A device continues its copies after the thread was interrupted. The next state comes from host memory, immediately: it
must not get the part of the arena to which the device still writes.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import background_of
from ckstore.background.arena import UNIT_NBYTES
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, NOW
from support.fake_saver import guard_with
from support.interrupts import check_rounds, commit, filled, interrupt_each_line

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.timeout(300)]

LINES_MIN = 400
"""A commit runs more lines than this; a deep run interrupts all of them."""


def interrupt(folder, memory_kinds, sample, kind, act, guard, *, is_checked=False):
    """Interrupt commits of a state in device memory; after each one commit a state from host memory."""
    far = {"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)}

    def from_device(store, _, step):
        memory_kinds.kind = kind
        act(store, far, step)

    def then_from_host(store, _, step):
        guard(store)
        far["w"][:] = (step + 1) % 251
        memory_kinds.kind = NOW

    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=is_checked)) as store:
        guard_with(store, memory_kinds)
        rounds = interrupt_each_line(store, sample, from_device, after=then_from_host, parts=24)
    check_rounds(rounds)
    assert len(set(rounds.places)) > LINES_MIN or not sample.is_whole


@pytest.mark.deep
def test_interrupted_device_wait_keeps_states_apart(recording_savers, folder, device, memory_kinds, sample):
    interrupt(folder, memory_kinds, sample, DEVICE_NOW, commit, lambda store: None)


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("is_checked", [False, True], ids=["unchecked", "checked"])
def test_interrupted_guarded_device_commit_is_isolated(
    recording_savers, folder, device, memory_kinds, sample, is_checked
):
    def guard(store):
        background_of(store).guard()
        # Work that training submits to the device afterwards is executed after these copies.
        device.wait_for_held_copies()

    def commit_and_guard(store, state, step):
        pending = store.commit_async(filled(state, step), step)
        guard(store)
        state["w"][:] = (step + 1) % 251
        pending.wait_staged()
        pending.result(60)

    interrupt(folder, memory_kinds, sample, DEVICE_LAZY, commit_and_guard, guard, is_checked=is_checked)
