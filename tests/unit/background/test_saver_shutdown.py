"""Protects the end of a saver after a signal: its trainer loses no commit.

The saver asks its trainer, which may be about to begin something. It ends when the trainer agrees, or does not answer
for a while. ``tests/integration/background`` has tests with real processes and signals.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.background import protocol
from ckstore.background.protocol import death_of
from ckstore.background.tickets import Callbacks, Tickets
from ckstore.errors import SaverError
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from support.saver_harness import SECONDS_MAX, noise, until

SMALL = 1 << 20


def state(seed=1):
    return noise(seed, SMALL)


def count_of_leave_requests(served):
    return sum(isinstance(each, protocol.Leaving) for each in served.heard())


def test_signalled_saver_finishes_its_work_first(open_served):
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
    assert count_of_leave_requests(served) == 1


def test_signalled_saver_ends_if_trainer_is_silent(open_served):
    leave_seconds = 0.2
    served = open_served(leave_seconds=leave_seconds)
    served.settle()
    asked = time.monotonic()
    served.ask_to_end()
    assert served.code() == 0
    assert time.monotonic() >= asked + leave_seconds
    assert count_of_leave_requests(served) == 1


def test_signalled_saver_accepts_begins_until_released(served):
    served.ask_to_end()
    served.hear(protocol.Leaving)
    assert served.begin(state(), 1).stage().finish().wait().step == 1
    assert not served.has_ended
    served.say(protocol.Quit(is_parting=True))
    assert served.code() == 0


@pytest.mark.parametrize("is_parting", [True, False])
def test_lease_records_a_dropped_handle(served, is_parting):
    begun = served.begin(state(), 1)
    begun.hear(protocol.Began)
    served.settle()
    served.say(protocol.Quit(is_parting=is_parting))
    # The next message is processed only after that.
    served.settle()
    with ckstore.open(served.address) as store:
        holder = repository_of(store).lease.holder()
        begun.stage().finish().wait()
        assert (SaverPurpose.of(holder.purpose).trainer_started == TRAINER_DEAD) is not is_parting
        assert served.code() == 0
        assert store.steps() == [1]


# Messages of a sender that died without reading all of its own


def test_messages_of_a_dead_sender_are_received():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        protocol.send(ours, protocol.Staged(1))
        for said in (protocol.Began(1), protocol.SlotFree(1)):
            protocol.send(theirs, said)
        theirs.close()
        heard = [protocol.receive(ours, protocol.TO_TRAINER) for _ in range(3)]
    assert heard == [protocol.Began(1), protocol.SlotFree(1), None]


def test_saver_processes_messages_of_a_dead_trainer(served):
    may_go_on, is_waiting = threading.Event(), threading.Event()

    def wait(level):
        is_waiting.set()
        may_go_on.wait(SECONDS_MAX)

    served.commit(state(0), 0)
    served.settle()
    first = served.begin(state(1), 1)
    # On the receiving thread: it gets the rest after the trainer is gone.
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


# Tickets when a saver ends, and the reason of its death


def nothing(*_):
    """Do nothing."""


def test_close_requires_that_all_tickets_ended():
    tickets = Tickets()
    callbacks = Callbacks(nothing, nothing, nothing)
    assert tickets.add(1, callbacks)
    assert not tickets.close()
    assert not tickets.is_closed
    tickets.take(protocol.failed_of(1, SaverError("it failed")))
    # Its slot is still in use.
    assert tickets.close()
    assert tickets.is_closed
    assert not tickets.add(2, callbacks)
    tickets.take(protocol.SlotFree(1))
    assert tickets.close()


def test_death_message_names_the_signal():
    error = death_of(12, 0, is_busy=False, was_signalled=True)
    assert str(error).startswith("the saver (pid 12) was asked to end by a signal. Commit again")
    assert "ended with code 0 before the commit" in str(death_of(12, 0, is_busy=True, was_signalled=False))
    assert "was killed by SIGKILL" in str(death_of(12, -9, is_busy=False, was_signalled=True))
