"""A saver that nobody runs: which priority it takes, when a commit begins, how often it hears the bell."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rig import SECONDS_MAX, noise, until

import ckstore
from ckstore import Policy, chunks
from ckstore.commit import Request
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.lossy_chunks import LossyChunkWriter
from ckstore.saver import committer as saver_committer
from ckstore.saver import messages
from ckstore.saver import server as saver_server
from ckstore.saver.committer import Committer
from ckstore.saver.priority import Priority
from ckstore.testing.trainings import AdamRun, lossy_policy
from ckstore.workers import Headcount

NICE = 7


def test_commits_of_a_saver_follow_the_headcount_of_its_priority(server, monkeypatch):
    asked = []

    def note(parts, request, watch):
        asked.append(request.headcount)
        raise SaverError("seen enough")

    monkeypatch.setattr(saver_committer, "commit", note)
    server._committer.open()
    head = SimpleNamespace(policy=Policy(staging_threads=1), step=1, metrics={}, tags=())
    ticket = SimpleNamespace(
        number=1, head=head, may_keep=False, check=lambda: None, captured=lambda: None, wait_whole=lambda: None
    )
    with pytest.raises(SaverError, match="seen enough"):
        server._committer._committed(ticket, None)
    server._committer.close()
    assert asked == [server._priority.headcount]


class Coming:
    """A ticket, as far as priorities look at it."""

    def __init__(self, *, number=1, threads=2):
        self.number, self.is_coming = number, True
        self.head = SimpleNamespace(policy=ckstore.Policy(staging_threads=threads))
        self.notes = 0

    def note_staged(self):
        self.notes += 1

    def abort(self):
        self.is_coming = False


def test_priority_follows_from_what_there_is_to_do(server):
    ticket = Coming()
    server._tickets[1] = ticket
    server._is_working = True
    server._set_priority()
    ticket.is_coming = False
    server._set_priority()
    server._is_hurried = True
    server._set_priority()
    server._is_hurried = server._is_working = False
    server._set_priority()
    server._is_over = True
    server._set_priority()
    assert server._priority.calls == ["stand aside", "give way", "hurry", "stand aside", "hurry"]


@pytest.fixture
def patient(monkeypatch):
    """Let commits hold back for longer than any test waits, on a machine of two processors."""
    monkeypatch.setattr(saver_server, "HOLD_SECONDS", 20 * SECONDS_MAX)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))


def holding(server, ticket):
    """Return a thread that lets a state be copied first, as soon as it waits for that."""
    thread = threading.Thread(target=server._hold, args=(ticket,), daemon=True)
    thread.start()
    until(lambda: server._is_holding, "a saver that holds back")
    return thread


def assert_goes_on(thread):
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def test_commit_does_not_begin_before_its_state_is_copied(server, patient):
    ticket = server._tickets[1] = Coming()
    server._is_working = True
    thread = holding(server, ticket)
    server._take(messages.Forget())
    thread.join(0.1)
    assert thread.is_alive(), "what else is said does not end the wait"
    assert set(server._priority.calls) == {"stand aside"}
    ticket.is_coming = False
    server._take(messages.Staged(1))
    assert_goes_on(thread)
    assert ticket.notes == 1
    assert server._priority.calls[-1] == "give way"


def test_commit_that_is_given_up_before_it_begins_ends_at_once(server, patient):
    ticket = server._tickets[1] = Coming()
    server._is_working = True
    thread = holding(server, ticket)
    server._take(messages.Abort(1))
    assert_goes_on(thread)
    assert server._priority.calls[-1] == "give way"


def test_commit_that_somebody_waits_for_begins_at_once(server, patient):
    thread = holding(server, Coming())
    server._is_working = True
    server._take(messages.Hurry())
    assert_goes_on(thread)


def test_commit_whose_trainer_dies_goes_on_at_once(server, patient):
    thread = holding(server, Coming())
    server._is_working = True
    server._lose_trainer()
    assert_goes_on(thread)


def test_commit_begins_before_a_state_is_copied_that_takes_long(server, patient, monkeypatch):
    monkeypatch.setattr(saver_server, "HOLD_SECONDS", 0.05)
    begun = time.monotonic()
    server._hold(Coming())
    assert 0.04 < time.monotonic() - begun < SECONDS_MAX


def test_commit_begins_at_once_where_copies_leave_a_processor(server, patient):
    thread = threading.Thread(target=server._hold, args=(Coming(threads=1),), daemon=True)
    thread.start()
    assert_goes_on(thread)


def test_lease_is_held_before_a_commit_holds_back(address):
    """What is staged meanwhile is published if the trainer dies: that is told by the lease."""
    told = []

    def hold(_):
        told.append("held back")
        raise SaverError("far enough")

    hello = messages.Hello(str(address), "main", "auto", os.getpid(), "", NICE, 30)
    committer = Committer(
        hello, lambda *_, **__: True, lambda: told.append(f"lease {committer.holds_lease}"), hold, Headcount()
    )
    committer.open()
    head = SimpleNamespace(step=1)
    ticket = SimpleNamespace(number=1, head=head, parents=(None, 0), is_aborted=False, check=lambda: None, nbytes=0)
    committer.commit(ticket)
    committer.close()
    assert told == ["lease True", "held back"]


def test_hurry_is_for_what_there_was_and_not_for_what_comes_later(server):
    server._last, server._is_working = 4, True
    server._take(messages.Hurry())
    assert server._is_waited_for(Coming(number=4))
    assert not server._is_waited_for(Coming(number=5))
    assert server._is_waited_for(messages.Release(1))


def test_bell_that_rings_for_every_unit_is_heard_once_a_millisecond(server):
    heard = []
    hear = server._hear
    server._hear = lambda: heard.append(time.monotonic()) or hear()
    thread = threading.Thread(target=server._serve, daemon=True)
    thread.start()
    rung = 300
    for _ in range(rung):
        os.eventfd_write(server._bell, 1)
        time.sleep(0.0001)
    server.trainers_end.close()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    most = 1000 * (heard[-1] - heard[0]) / saver_server.BELL_PAUSE_MS
    assert len(heard) <= most + 3, (len(heard), most)


def test_saver_whose_trainer_is_dead_hurries_with_what_is_left(server):
    """Nobody trains any more, and whoever starts the run again waits for it."""
    server._hurry()
    assert server._priority.calls == []
    server._is_working = True
    server._lose_trainer()
    assert set(server._priority.calls) == {"hurry"}


def test_saver_that_is_ending_hurries_though_nothing_is_left(server):
    server._is_ending = True
    server._set_priority()
    server._is_ending = False
    server._lose_trainer()
    assert set(server._priority.calls) == {"hurry"}


def test_a_saver_that_gives_way_leaves_training_one_processor(monkeypatch):
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    for processors, most in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: range(count))
        priority = Priority(NICE)
        priority.give_way()
        assert priority.headcount.most == most
        priority.hurry()
        assert priority.headcount.most is None
        priority.stand_aside()
        assert priority.headcount.most == most
        careless = Priority(0)
        careless.give_way()
        assert careless.headcount.most is None


def noting_threads(monkeypatch, most):
    """Let no more threads of the next commits begin than these; return the set of those that do."""
    headcount, threads = Headcount(), set()
    headcount.most = most
    monkeypatch.setattr("ckstore.commit.Request", partial(Request, headcount=headcount))
    thread_of = chunks.ChunkWriter._thread

    def noting(writer, index):
        threads.add(index)
        return thread_of(writer, index)

    monkeypatch.setattr(chunks.ChunkWriter, "_thread", noting)
    return threads


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_threads_of_a_commit_work_than_may(folder, monkeypatch, most):
    threads = noting_threads(monkeypatch, most)
    with ckstore.open(folder) as store:
        for step in range(3):
            store.commit(noise(step, 24 * MIB), step, policy=Policy(threads=4))
    assert 0 in threads
    assert threads <= set(range(most))


def test_the_headcount_counts_for_what_is_stored_with_a_loss_too(folder, monkeypatch):
    monkeypatch.setattr("ckstore.commit.Request", partial(Request, headcount=Headcount()))
    within, stored = [False], []
    run, store_task = chunks.run_in_turns, LossyChunkWriter._store_task

    def noting_run(*what, may_begin, **options):
        within[0] = True
        run(*what, may_begin=may_begin, **options)
        within[0] = False

    def noting_task(writer, *what):
        stored.append(within[0])
        return store_task(writer, *what)

    monkeypatch.setattr(chunks, "run_in_turns", noting_run)
    monkeypatch.setattr(LossyChunkWriter, "_store_task", noting_task)
    training = AdamRun(shape=(300, 300))
    with ckstore.open(folder) as store:
        for step in range(2):
            receipt = store.commit(training.train(1).state(), step, policy=lossy_policy())
    assert receipt.chunks_lossy
    assert stored
    assert all(stored)


def test_a_thread_that_waits_for_bases_comes_on_top(folder, monkeypatch):
    headcount, admitted = Headcount(), {}
    headcount.most = 1
    monkeypatch.setattr("ckstore.commit.Request", partial(Request, headcount=headcount))
    run = chunks.run_in_turns

    def noting(count, thread_count, step, turns, *, may_begin, **options):
        if count:
            admitted[thread_count] = [may_begin(index) for index in range(thread_count)]
        return run(count, thread_count, step, turns, may_begin=may_begin, **options)

    monkeypatch.setattr(chunks, "run_in_turns", noting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    weights = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    with ckstore.open(folder) as store:
        store.commit({"w": weights}, 0)
        assert admitted == {2: [True, False]}
        receipt = store.commit({"w": weights * np.float32(1 + 2**-12)}, 1)
    assert receipt.chunks_delta
    assert admitted[3] == [True, True, False]
