"""A saver whose trainer has taken the lease in its name says of it what the trainer has said, and gives it back.

A ticket that was begun with the lease outlives a trainer that dies before the saver has looked at anything; one whose
lease is lost on the way is not said to be safe, and overtakes nobody. With real processes:
``tests/integration/background/test_lent_lease.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.background import protocol
from ckstore.background.arena import STAGED
from ckstore.errors import BackendError, ConflictError
from ckstore.format import paths
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose
from support.saver_harness import noise
from support.served_saver import LONG_MS

SMALL = 1 << 20


def state(seed=1):
    return noise(seed, SMALL)


def lease_path(address):
    return Path(address) / paths.lease_name("main")


@pytest.fixture
def store(address):
    """The trainer's handle."""
    with ckstore.open(address) as opened:
        yield opened


@pytest.fixture
def lease(store):
    """The lease as the trainer's handle has it."""
    return repository_of(store).lease


# What was lent


@pytest.mark.parametrize("lent", ["this", "another", "none"])
def test_ticket_that_was_begun_with_the_lease_outlives_a_trainer_that_dies_at_once(open_served, store, lease, lent):
    served = open_served(is_served=False, has_trainer=True)
    tokens = {"this": lease.transfer_to(os.getpid(), 1), "another": "ab" * 16, "none": ""}
    begun = served.begin(state(), 1, lease=tokens[lent]).stage()
    begun.slot.state = STAGED
    served.kill_trainer()
    code = served.serve().code()
    assert store.steps() == ([1] if lent == "this" else [])
    assert (code == 0) == (lent == "this")
    assert not lease_path(served.address).exists(), "given back, whether it was adopted or not"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_saver_says_of_a_lent_lease_what_its_trainer_has_said(open_served, lease, is_dropped):
    served = open_served(is_served=False)
    token = lease.transfer_to(os.getpid(), 3)
    if is_dropped:
        lease.mark_trainer_dead()
    served.begin(state(), 4, lease=token).stage().finish()
    served.serve().hear(protocol.SlotFree, ticket=1)
    holder = lease.holder()
    purpose = SaverPurpose.of(holder.purpose)
    assert (purpose.step, purpose.trainer_started == TRAINER_DEAD) == (4, is_dropped)
    assert holder.token == token, "it was adopted"
    assert holder.heartbeat_ns > holder.acquired_ns


@pytest.mark.parametrize("is_asked", [True, False], ids=["release", "quit"])
def test_saver_gives_back_a_lease_of_which_nothing_was_said(served, lease, is_asked):
    served.hear(protocol.Ready)
    assert lease.transfer_to(os.getpid(), 5)
    assert lease_path(served.address).exists()
    if is_asked:
        served.release_lease()
    else:
        served.say(protocol.Quit())
        served.code()
    assert not lease_path(served.address).exists()


def test_first_look_that_is_not_answered_is_reported_by_the_commit(fake_saver_store, monkeypatch):
    def fail():
        raise BackendError("the medium does not answer")

    monkeypatch.setattr(repository_of(fake_saver_store), "wait_for_orphan", fail)
    assert fake_saver_store.commit_async(state(), 1).result().step == 1


# What was lost


def take_over(address, store):
    """Commit as a writer does that takes the holder of the lease for dead."""
    lease_path(address).unlink()
    store.commit(state(9), 9)


@pytest.mark.parametrize("is_lost", [False, True])
def test_ticket_whose_lease_is_lost_while_the_saver_holds_back_is_not_said_to_be_safe(served, store, is_lost):
    served.commit(state(0), 0)
    # Every byte is there: it waits only for the word that all is.
    first = served.begin(state(1), 1).stage()
    first.hear(protocol.Progress)
    served.settle()
    second = served.begin(state(2), 2, slot=1, parent_ticket=2, start_delay_ms=LONG_MS).stage()
    if is_lost:
        take_over(served.address, store)
    # Nothing is said of it: that would end the time that is held back.
    first.slot.state = STAGED
    first.hear(protocol.SlotFree)
    second.finish()
    if not is_lost:
        assert (first.result().seq, second.wait().seq) == (1, 2)
        assert second.events[0] == "Began"
        return
    for each, problem in ((first, "was taken over"), (second, "is being written by")):
        with pytest.raises(ConflictError, match=problem):
            each.wait()
    assert second.events == ["Failed", "SlotFree"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_orphan_that_has_lost_its_lease_does_not_take_it_again(open_served, store, lease, is_lost):
    served = open_served(has_trainer=True)
    served.commit(state(0), 0)
    first, orphan = served.begin(state(1), 1), served.begin(state(2), 2, slot=1).stage()
    # The first one is being committed when the lease is lost, and the other one waits for its turn.
    first.hear(protocol.Progress)
    orphan.hear(protocol.Began)
    orphan.slot.state = STAGED
    if is_lost:
        # A trainer elsewhere took it for dead, resumed the step before, went on from there, and ended.
        take_over(served.address, store)
        lease.release()
    served.kill_trainer()
    served.code()
    assert store.steps() == ([0, 9] if is_lost else [0, 2])
    assert first.hear(protocol.Failed).kind == "SaverError"
    told = orphan.hear((protocol.Done, protocol.Failed))
    assert not is_lost or told.kind == "ConflictError"
