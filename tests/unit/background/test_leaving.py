"""A saver that a signal has asked to end costs its trainer no commit.

It asks its trainer, who may be about to begin something, and ends when that lets it go, or says nothing for a while.
With real processes and signals: ``tests/integration/background/test_leaving.py``.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.background import protocol
from ckstore.background.client import Callbacks, Tickets
from ckstore.background.protocol import death_of
from ckstore.errors import SaverError
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from support.saver_harness import SECONDS_MAX, noise, until

SMALL = 1 << 20


def state(seed=1):
    return noise(seed, SMALL)


def leavings(served):
    return sum(isinstance(each, protocol.Leaving) for each in served.heard())


def test_saver_that_is_busy_when_a_signal_comes_ends_only_when_nothing_is_left(open_served):
    leave_seconds = 0.1
    served = open_served(leave_seconds=leave_seconds)
    begun = served.begin(state(), 1)
    served.settle()
    served.ask_to_end()
    served.hear(protocol.Leaving)
    asked = time.monotonic()
    until(lambda: time.monotonic() > asked + 3 * leave_seconds, "a trainer that is silent for three times as long")
    served.settle()
    assert not served.has_ended
    finished = time.monotonic()
    begun.stage().finish().wait()
    assert served.code() == 0
    assert time.monotonic() >= finished + leave_seconds
    assert leavings(served) == 1


def test_saver_whose_trainer_says_nothing_ends_after_a_while(open_served):
    leave_seconds = 0.2
    served = open_served(leave_seconds=leave_seconds)
    served.settle()
    asked = time.monotonic()
    served.ask_to_end()
    assert served.code() == 0
    assert time.monotonic() >= asked + leave_seconds
    assert leavings(served) == 1


def test_saver_takes_what_begins_after_a_signal_until_its_trainer_lets_it_go(served):
    served.ask_to_end()
    served.hear(protocol.Leaving)
    assert served.begin(state(), 1).stage().finish().wait().step == 1
    assert not served.has_ended
    served.say(protocol.Quit(is_parting=True))
    assert served.code() == 0


@pytest.mark.parametrize("is_parting", [True, False])
def test_saver_says_in_its_lease_that_the_handle_was_dropped_only_where_it_was(served, is_parting):
    begun = served.begin(state(), 1)
    begun.hear(protocol.Began)
    served.settle()
    served.say(protocol.Quit(is_parting=is_parting))
    # What is said next is not done before that.
    served.settle()
    with ckstore.open(served.address) as store:
        holder = repository_of(store).lease.holder()
        begun.stage().finish().wait()
        assert (SaverPurpose.of(holder.purpose).trainer_started == TRAINER_DEAD) is not is_parting
        assert served.code() == 0
        assert store.steps() == [1]


# What was said by one who dies without reading all


def test_receiver_hears_what_was_said_by_one_who_died_without_reading_all():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        protocol.send(ours, protocol.Staged(1))
        for said in (protocol.Began(1), protocol.SlotFree(1)):
            protocol.send(theirs, said)
        theirs.close()
        heard = [protocol.receive(ours, protocol.TO_TRAINER) for _ in range(3)]
    assert heard == [protocol.Began(1), protocol.SlotFree(1), None]


def test_saver_takes_what_was_said_by_a_trainer_that_died_without_reading_all(served):
    may_go_on, is_waiting = threading.Event(), threading.Event()

    def wait(level):
        is_waiting.set()
        may_go_on.wait(SECONDS_MAX)

    served.commit(state(0), 0)
    served.settle()
    first = served.begin(state(1), 1)
    # On the thread that listens: it hears the rest when the trainer is gone.
    served.priority.on_change = wait
    served.say(protocol.Hurry())
    assert is_waiting.wait(SECONDS_MAX)
    second = served.begin(state(2), 2, slot=1, parent_ticket=2)
    for each in (first, second):
        each.stage().finish()
    assert served.has_word
    served.hang_up()
    may_go_on.set()
    assert served.code() == 0
    with ckstore.open(served.address) as store:
        assert store.steps() == [0, 1, 2]


# What is known of tickets when a saver leaves, and of its death


def nothing(*_):
    """Do nothing."""


def test_tickets_are_closed_only_when_each_was_told_how_it_ended():
    tickets = Tickets()
    callbacks = Callbacks(nothing, nothing, nothing)
    assert tickets.add(1, callbacks)
    assert not tickets.close()
    assert not tickets.is_closed
    tickets.take(protocol.failed_of(1, SaverError("it failed")))
    # Its slot is in use all the same.
    assert tickets.close()
    assert tickets.is_closed
    assert not tickets.add(2, callbacks)
    tickets.take(protocol.SlotFree(1))
    assert tickets.close()


def test_death_says_whether_a_signal_has_asked_for_it():
    error = death_of(12, 0, is_busy=False, was_signalled=True)
    assert str(error).startswith("the saver (pid 12) was asked to end by a signal. Commit again")
    assert "ended with code 0 before the commit" in str(death_of(12, 0, is_busy=True, was_signalled=False))
    assert "was killed by SIGKILL" in str(death_of(12, -9, is_busy=False, was_signalled=True))
