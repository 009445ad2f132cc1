"""Protects a saver's priority levels: they follow from the work there is and from who waits for it.

A hurry that is not cleared costs training its processors. One that is cleared too early delays a waiting caller.
"""

from __future__ import annotations

import threading

import pytest

from ckstore.background import protocol
from ckstore.errors import MalformedError, SaverError
from support.saver_harness import SECONDS_MAX, noise, until
from support.served_saver import LONG_MS, Gate

SMALL = 1 << 20


def state(seed=1):
    return noise(seed, SMALL)


@pytest.fixture
def gate(served):
    """Block the saver's commits, even if all is staged, until the test opens it."""
    return Gate(served.priority)


def until_level(served, level):
    until(lambda: served.priority.now == level, f"the level {level!r}")


def test_priority_follows_the_work(served, gate):
    served.settle()
    begun = served.begin(state(), 1).stage()
    begun.hear(protocol.Began)
    served.settle()
    assert served.priority.changes == ["idle"], "without work, and while a state is copied"
    begun.finish()
    until_level(served, "low")
    served.say(protocol.Hurry())
    until_level(served, "full")
    gate.open()
    begun.wait()
    until_level(served, "idle")
    served.say(protocol.Quit())
    assert served.code() == 0
    assert served.priority.changes == ["idle", "low", "full", "idle", "full"]


def test_hurry_without_work_changes_nothing(served):
    served.settle()
    served.say(protocol.Hurry())
    served.settle()
    assert served.priority.changes == ["idle"]


def test_hurry_covers_begun_tickets_only(open_served):
    served = open_served(slot_count=3)
    first, second = served.begin(state(1), 1), served.begin(state(2), 2, slot=1)
    served.say(protocol.Hurry())
    served.settle()
    third = served.begin(state(3), 3, slot=2)
    first.stage().finish().wait()
    served.settle()
    assert served.priority.changes == ["idle", "full"], "the second ticket is awaited too"
    second.stage().finish().wait()
    until_level(served, "idle")
    third.stage().finish().wait()
    served.say(protocol.Quit())
    served.code()
    assert served.priority.changes[2:].count("full") == 1, "not again for the third ticket"


def test_hurry_lasts_until_an_earlier_request_is_answered(served):
    may_go_on = threading.Event()

    def map_slowly():
        may_go_on.wait(SECONDS_MAX)
        yield True

    served.savers_arena.slots[0].map_ahead = map_slowly
    begun = served.begin(state(), 1)
    served.say(protocol.Hurry())
    question = served.ask(protocol.Warm, block_count=3, nbytes=0)
    served.settle()
    try:
        begun.stage().finish().wait()
        served.settle()
        assert served.priority.changes == ["idle", "full"]
    finally:
        may_go_on.set()
    served.hear(protocol.Answer, question=question)
    until_level(served, "idle")


def test_hurry_applies_before_a_delayed_state_begins(served):
    """A thread that wakes in the idle class may hold the interpreter's lock without getting a processor."""
    served.commit(state(0), 0)
    served.settle()
    begun = served.begin(state(1), 1, start_delay_ms=LONG_MS)
    had_begun = []
    # It has the lease, so it reports as soon as it begins.
    served.priority.on_change = lambda level: had_begun.append((level, served.has_word))
    served.heard()
    served.say(protocol.Hurry())
    begun.hear(protocol.Began)
    assert had_begun[0] == ("full", False)
    served.settle()
    assert served.priority.now == "full"
    begun.stage().finish().wait()


def test_hurry_is_cleared_when_a_delayed_begin_fails(served):
    served.settle()
    begun = served.begin_nonsense(start_delay_ms=LONG_MS)
    served.say(protocol.Hurry())
    with pytest.raises(MalformedError, match="cannot be read"):
        begun.wait()
    until_level(served, "idle")
    assert served.priority.changes == ["idle", "full", "idle"]


def test_hurry_is_cleared_when_the_ticket_is_aborted(served):
    for number in range(30):
        begun = served.begin(state(), number)
        served.say(protocol.Hurry())
        begun.abort()
        with pytest.raises(SaverError, match="given up"):
            begun.wait()
        served.settle()
        until_level(served, "idle")


def test_saver_hurries_after_the_trainer_died(served, gate):
    """No training runs, and a restarted run waits for this saver."""
    begun = served.begin(state(), 1)
    begun.hear(protocol.Began)
    begun.stage().finish()
    until_level(served, "low")
    served.hang_up()
    until_level(served, "full")
    gate.open()
    assert served.code() == 0
    assert served.priority.changes[-2:] == ["low", "full"]


@pytest.mark.parametrize("is_quit_sent", [True, False], ids=["quit sent", "trainer dead"])
def test_ending_saver_hurries_without_work(served, is_quit_sent):
    served.settle()
    if is_quit_sent:
        served.say(protocol.Quit())
    else:
        served.hang_up()
    served.code()
    assert served.priority.changes == ["idle", "full"]
