"""Protects lease transfer: the trainer writes the lease in its saver's name, and the saver updates and releases it.

A ticket that was begun with the lease survives a trainer that dies before the saver has read anything. A ticket whose
lease is lost is not reported as safe, and is not published after the other writer's commits.
``tests/integration/background`` has tests with real processes.
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


# What the saver does with the lease


@pytest.mark.parametrize("token", ["this", "another", "none"])
def test_ticket_with_lease_survives_immediate_trainer_death(open_served, store, lease, token):
    served = open_served(is_served=False, has_trainer=True)
    tokens = {"this": lease.transfer_to(os.getpid(), 1), "another": "ab" * 16, "none": ""}
    begun = served.begin(state(), 1, lease=tokens[token]).stage()
    begun.slot.state = STAGED
    served.kill_trainer()
    code = served.serve().code()
    assert store.steps() == ([1] if token == "this" else [])
    assert (code == 0) == (token == "this")
    assert not lease_path(served.address).exists(), "released, adopted or not"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_saver_records_what_the_trainer_reported(open_served, lease, is_dropped):
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
def test_saver_releases_an_unused_lease(served, lease, is_asked):
    served.hear(protocol.Ready)
    assert lease.transfer_to(os.getpid(), 5)
    assert lease_path(served.address).exists()
    if is_asked:
        served.release_lease()
    else:
        served.say(protocol.Quit())
        served.code()
    assert not lease_path(served.address).exists()


def test_failed_lease_check_is_raised_by_the_commit(fake_saver_store, monkeypatch):
    def fail():
        raise BackendError("the medium does not answer")

    monkeypatch.setattr(repository_of(fake_saver_store), "wait_for_orphan", fail)
    assert fake_saver_store.commit_async(state(), 1).result().step == 1


# A lost lease


def take_over(address, store):
    """Commit as a writer does that takes the holder of the lease for dead."""
    lease_path(address).unlink()
    store.commit(state(9), 9)


@pytest.mark.parametrize("is_lost", [False, True])
def test_ticket_without_lease_is_not_reported_as_safe(served, store, is_lost):
    served.commit(state(0), 0)
    # Every byte is there. Only the Staged message is missing.
    first = served.begin(state(1), 1).stage()
    first.hear(protocol.Progress)
    served.settle()
    second = served.begin(state(2), 2, slot=1, parent_ticket=2, start_delay_ms=LONG_MS).stage()
    if is_lost:
        take_over(served.address, store)
    # Send nothing: a message would end the delay.
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
def test_orphan_does_not_retake_a_lost_lease(open_served, store, lease, is_lost):
    served = open_served(has_trainer=True)
    served.commit(state(0), 0)
    first, orphan = served.begin(state(1), 1), served.begin(state(2), 2, slot=1).stage()
    # The first ticket is being committed when the lease is lost. The other one waits for its turn.
    first.hear(protocol.Progress)
    orphan.hear(protocol.Began)
    orphan.slot.state = STAGED
    if is_lost:
        # Another trainer considered the saver dead, restored the previous step, continued from there, and ended.
        take_over(served.address, store)
        lease.release()
    served.kill_trainer()
    served.code()
    assert store.steps() == ([0, 9] if is_lost else [0, 2])
    assert first.hear(protocol.Failed).kind == "SaverError"
    answer = orphan.hear((protocol.Done, protocol.Failed))
    assert not is_lost or answer.kind == "ConflictError"
