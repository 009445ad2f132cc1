"""The lease is lost on the way: nobody is told that a state is safe, and no orphan overtakes who had it meanwhile."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.saver import messages
from support.saver_desk import DeskOf, noise

LONG_MS = 600_000


@pytest.fixture
def committer(server):
    server._committer.open()
    yield server._committer
    server._committer.close()


def heard_of(server):
    """Return what the trainer of a server was told."""
    found = []
    while True:
        try:
            found.append(messages.receive(server.trainers_end, messages.TO_TRAINER))
        except BlockingIOError:
            return found


def take(committer):
    committer._parts.prepare_run()
    committer._lease.take()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lease_that_is_lost_while_a_saver_holds_back_is_not_told_of(server, committer, is_lost):
    take(committer)
    DeskOf(server).begin(noise(1), 1, hold_ms=LONG_MS)
    if is_lost:
        committer._lease.release()
    server._take_held()
    assert heard_of(server) == ([] if is_lost else [messages.Began(1)])
    assert server._tickets[1].has_lease is not is_lost


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_orphan_that_lost_its_lease_does_not_take_it_again(server, committer, address, is_lost):
    with ckstore.open(address) as other:
        other.commit(noise(0), 0)
        other._parts.lease.release()
        take(committer)
        handed = DeskOf(server).begin(noise(1), 1).stage()
        handed.slot.state = 2
        server._board.tell_gone()
        if is_lost:
            # A trainer elsewhere took it for dead, resumed the step before, went on from there, and ended.
            committer._lease.release()
            other.commit(noise(2), 2)
            other._parts.lease.release()
        committer.commit(server._tickets[1])
        told = heard_of(server)[-1]
        assert other.steps() == ([0, 2] if is_lost else [0, 1])
    assert not is_lost or (isinstance(told, messages.Failed) and told.kind == "ConflictError")
