"""Protects the start delay of a saver: while copies use every processor, it waits until its time or a message.

Also how often a saver reads its bell, which the trainer rings for every unit it copies.
"""

from __future__ import annotations

import os
import time

import pytest

import ckstore
from ckstore.background import protocol
from ckstore.errors import SaverError
from support.saver_harness import SECONDS_MAX, noise
from support.served_saver import LONG_MS

SMALL = 1 << 20


def state(seed=1):
    return noise(seed, SMALL)


class BellRinger:
    """Ring a saver's bell repeatedly, and count how often the saver read it."""

    def __init__(self, served):
        self._served = served
        self.count = self.heard_count = 0
        self._left = served.rings_left

    def ring(self):
        self._served.ring()
        self.count += 1
        left = self._served.rings_left
        self.heard_count += left <= self._left
        self._left = left
        time.sleep(0.0001)


# When a delayed state begins


def test_bell_does_not_shorten_the_delay(served):
    hold_seconds = 0.3
    served.settle()
    said = time.monotonic()
    begun = served.begin(state(), 1, start_delay_ms=round(1e3 * hold_seconds))
    rings = BellRinger(served)
    while time.monotonic() < said + 0.9 * hold_seconds:
        rings.ring()
    # A read may happen as it begins. Copy threads ring for each unit, and this does not wake the saver.
    assert rings.heard_count <= 2 < 20 < rings.count
    begun.hear(protocol.Began)
    assert time.monotonic() >= said + hold_seconds
    assert served.priority.changes == ["idle"]
    begun.stage().finish().wait()


SAID = {
    "hurry": [protocol.Hurry()],
    "forget": [protocol.Forget()],
    "release": [protocol.Release(1)],
    "warm": [protocol.Warm(1, 3, 0)],
    "quit": [protocol.Quit()],
    "parting": [protocol.Quit(is_parting=True)],
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_delayed_state_begins_before_the_next_message(served, said):
    begun = served.begin(state(), 1, start_delay_ms=LONG_MS).stage()
    served.say(*said)
    begun.hear(protocol.Began)
    assert not {protocol.Answer, protocol.Done} & set(map(type, served.heard()))
    begun.finish().wait()
    if hasattr(said[0], "question"):
        served.hear(protocol.Answer)
        kinds = [type(each) for each in served.heard()]
        assert kinds.index(protocol.Done) < kinds.index(protocol.Answer)


def test_fully_staged_state_is_published_without_delay(served):
    assert served.begin(state(), 1, start_delay_ms=LONG_MS).stage().finish().wait().step == 1


def test_aborted_state_fails_without_delay(served):
    begun = served.begin(state(), 1, start_delay_ms=LONG_MS).abort()
    with pytest.raises(SaverError, match="given up by the trainer"):
        begun.wait()
    assert begun.events[-2:] == ["Failed", "SlotFree"]


@pytest.mark.parametrize("second_hold_ms", [LONG_MS, 0], ids=["held", "not held"])
def test_delayed_states_begin_in_order(served, second_hold_ms):
    first = served.begin(state(1), 1, start_delay_ms=LONG_MS)
    second = served.begin(state(2), 2, slot=1, parent_ticket=1, start_delay_ms=second_hold_ms)
    if second_hold_ms:
        served.say(protocol.Hurry())
    second.hear(protocol.Began)
    began = [each.ticket for each in served.heard() if isinstance(each, protocol.Began)]
    assert began == [1, 2]
    for each in (second, first):
        each.stage().finish()
    assert [each.wait().seq for each in (first, second)] == [0, 1]
    assert served.priority.changes.count("full") == bool(second_hold_ms), "one hurry lasts for both"


def test_staged_state_is_published_on_disconnect(served):
    served.commit(state(0), 0)
    served.settle()
    begun = served.begin(state(1), 1, start_delay_ms=LONG_MS).stage()
    begun.slot.state = 2
    served.hang_up()
    assert served.code() == 0
    with ckstore.open(served.address) as store:
        assert store.steps() == [0, 1], "its earlier messages count"


# Begin messages to a saver that is ending


@pytest.mark.parametrize("start_delay_ms", [LONG_MS, 0], ids=["held", "not held"])
def test_ending_saver_refuses_begin_immediately(served, start_delay_ms):
    going = served.begin(state(1), 1)
    going.hear(protocol.Began)
    served.settle()
    served.say(protocol.Quit())
    late = served.begin(state(2), 2, slot=1, start_delay_ms=start_delay_ms)
    with pytest.raises(SaverError, match="the saver is ending"):
        late.wait()
    going.stage().finish().wait()
    assert served.code() == 0


def test_quit_during_delay_keeps_earlier_begins(served):
    served.settle()
    early = served.begin(state(1), 1, start_delay_ms=LONG_MS)
    served.say(protocol.Quit())
    late = served.begin(state(2), 2, slot=1)
    with pytest.raises(SaverError, match="the saver is ending"):
        late.wait()
    assert early.stage().finish().wait().step == 1
    assert served.code() == 0


def test_signal_during_delay_does_not_end_the_saver(open_served):
    served = open_served(leave_seconds=0.05)
    served.settle()
    begun = served.begin(state(), 1, start_delay_ms=400)
    served.ask_to_end()
    begun.hear(protocol.Began)
    begun.stage().finish().wait()
    assert served.code() == 0
    with ckstore.open(served.address) as store:
        assert store.steps() == [1]


# The bell


def test_saver_reads_its_bell_once_a_millisecond(served):
    served.settle()
    began, rings = time.monotonic(), BellRinger(served)
    while rings.count < 300 or rings.heard_count < 5:
        assert time.monotonic() < began + SECONDS_MAX
        rings.ring()
    assert rings.heard_count <= 1000 * (time.monotonic() - began) + 3


# The trainer's side


@pytest.mark.parametrize(("threads", "is_held"), [(1, False), (2, True), (3, True)])
def test_trainer_requests_delay_when_copies_use_all_cpus(open_fake_store, savers, monkeypatch, threads, is_held):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    open_fake_store(staging_threads=threads).commit_async(noise(1), 1).result()
    assert (savers[0].held[0] > 0) == is_held
