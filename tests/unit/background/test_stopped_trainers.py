"""Protects a saver of a job whose trainer is stopped: it waits for a slow copy, and not for a stopped one.

The other ranks wait for it. A state that was reported as staged is never given up.
"""

from __future__ import annotations

import numpy as np
import pytest

from ckstore import processes
from ckstore.background.arena import STAGED, Arena
from ckstore.background.saver import staged_state
from ckstore.background.saver.staged_state import StagingMonitor, StopLimit, Ticket
from ckstore.background.staged_head import decode_head
from ckstore.errors import RankError
from support.saver_harness import lay_out, stage_storages

LIMIT = StopLimit(3, 15.0)


class Trainer:
    """A trainer that a test stops, and the clock that its saver reads."""

    def __init__(self):
        self.now, self.is_stopped = 100.0, False

    def monotonic(self):
        return self.now


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(processes, "is_stopped", lambda pid: trainer.is_stopped)
    monkeypatch.setattr(staged_state, "SYSTEM_CLOCK", trainer)
    return trainer


@pytest.fixture
def staging():
    """A ticket of which nothing is staged yet, and what stages it."""
    arena = Arena.create(slot_count=1)
    slot, captured, places, place, nbytes = lay_out(arena, 1, {"w": np.arange(1000)}, 5)
    ticket = Ticket(1, slot, decode_head(bytes(slot.view(place, nbytes)), slot_nbytes=slot.nbytes), StagingMonitor(77))
    ticket.stop_limit = LIMIT

    def stage():
        stage_storages(slot, captured, places)
        slot.state = STAGED

    yield ticket, stage
    ticket.leave()
    arena.close()


def check_for(ticket, trainer, seconds):
    for _ in range(int(2 * seconds)):
        trainer.now += 0.5
        ticket.check()


def test_a_state_whose_trainer_is_stopped_is_given_up(staging, trainer):
    ticket, stage = staging
    trainer.is_stopped = True
    with pytest.raises(
        RankError, match=r"the trainer of rank 3 \(pid 77\) was stopped .* for 15 s .* step 5"
    ) as caught:
        check_for(ticket, trainer, 20)
    assert 115 <= trainer.now <= 116.5
    assert caught.value.rank == 3
    # For good: the other ranks have the error by now.
    trainer.is_stopped = False
    stage()
    ticket.note_staged()
    assert ticket.is_given_up
    ticket.when_whole(lambda: pytest.fail("it is not reported as staged"))


def test_a_slow_copy_is_waited_for(staging, trainer):
    ticket, stage = staging
    check_for(ticket, trainer, 3600)
    stage()
    ticket.wait_whole()


def test_short_stops_are_not_added_up(staging, trainer):
    ticket, _ = staging
    for _ in range(10):
        trainer.is_stopped = True
        check_for(ticket, trainer, 10)
        trainer.is_stopped = False
        check_for(ticket, trainer, 1)


def test_a_job_that_was_suspended_as_a_whole_goes_on(staging, trainer):
    ticket, _ = staging
    trainer.is_stopped = True
    check_for(ticket, trainer, 5)
    # The saver was suspended, too, and is the first to go on.
    trainer.now += 3600
    check_for(ticket, trainer, 5)
    trainer.is_stopped = False
    check_for(ticket, trainer, 60)


def test_a_staged_state_is_kept_whatever_happens_to_its_trainer(staging, trainer):
    ticket, stage = staging
    reports = []
    ticket.when_whole(lambda: reports.append("staged"))
    trainer.is_stopped = True
    check_for(ticket, trainer, 10)
    stage()
    ticket.note_staged()
    check_for(ticket, trainer, 60)
    assert (reports, ticket.is_given_up) == (["staged"], False)


def test_without_a_job_nobody_waits_and_a_stopped_trainer_may_take_its_time(staging, trainer):
    ticket, _ = staging
    ticket.stop_limit = None
    trainer.is_stopped = True
    check_for(ticket, trainer, 3600)
