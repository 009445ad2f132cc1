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

import ckstore
from ckstore import Policy, chunks
from ckstore.commit import Request
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.lossy_chunks import LossyChunkWriter
from ckstore.saver import committer as saver_committer
from ckstore.saver import messages
from ckstore.saver import server as saver_server
from ckstore.saver.priority import Priority
from ckstore.testing.trainings import AdamRun, lossy_policy
from ckstore.workers import Headcount
from support.saver_desk import SECONDS_MAX, noise

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
        number=1,
        head=head,
        may_keep=False,
        is_orphan=False,
        check=lambda: None,
        captured=lambda: None,
        wait_whole=lambda: None,
    )
    with pytest.raises(SaverError, match="seen enough"):
        server._committer._committed(ticket, None)
    server._committer.close()
    assert asked == [server._priority.headcount]


class Coming:
    """A ticket, as far as priorities look at it."""

    def __init__(self, *, number=1):
        self.number, self.is_coming = number, True


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


LONG_MS = int(20e3 * SECONDS_MAX)
"""Longer than any test waits."""


@pytest.fixture
def begun(server, monkeypatch):
    """The numbers of the tickets that this server has begun."""
    found = []

    def note(held):
        found.append(held.message.ticket)
        server._jobs.append(messages.Forget())

    monkeypatch.setattr(server, "_begin", note)
    return found


def begin(number=1, hold_ms=LONG_MS):
    return messages.Begin(number, 0, 0, 1, None, 0, False, hold_ms)


def test_nothing_is_done_about_a_state_whose_copies_want_every_processor(server, begun):
    server._take(begin())
    assert begun == []
    assert set(server._priority.calls) == {"stand aside"}
    assert not server._is_idle(), "who ends now would leave it out"


def test_where_copies_leave_a_processor_it_begins_at_once(server, begun):
    server._take(begin(hold_ms=0))
    assert begun == [1]


WORDS = [
    messages.Staged(1),
    messages.Abort(1),
    messages.Hurry(),
    messages.Forget(),
    messages.Release(1),
    messages.Warm(1, 3, 0),
    messages.Quit(),
    begin(2, hold_ms=0),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_whatever_else_is_said_comes_after_what_was_begun(server, begun, monkeypatch, word):
    monkeypatch.setattr(server._committer, "disown", lambda: None)
    server._take(begin())
    server._take(word)
    assert begun == ([1, 2] if isinstance(word, messages.Begin) else [1])
    assert not server._held


def test_two_states_that_wait_begin_in_their_order(server, begun):
    server._take(begin(1))
    server._take(begin(2))
    assert begun == []
    server._take(messages.Hurry())
    assert begun == [1, 2]
    assert server._is_hurried, "for the sake of both"


def serving(server):
    """Let a server serve; return its thread."""
    thread = threading.Thread(target=server._serve, daemon=True)
    thread.start()
    return thread


def test_what_is_held_back_begins_after_its_time_whoever_rings_meanwhile(server, begun):
    heard = []
    hear = server._hear
    server._hear = lambda: heard.append(1) or hear()
    hold_ms = 300
    messages.send(server.trainers_end, begin(hold_ms=hold_ms))
    began = time.monotonic()
    thread = serving(server)
    while not begun:
        assert time.monotonic() < began + SECONDS_MAX
        os.eventfd_write(server._bell, 1)
        count = len(heard)
        time.sleep(0.0001)
    assert time.monotonic() - began > 0.9 * hold_ms / 1e3
    # Twice for what was said, and once at the end: whoever copies rings for each unit, and none of that wakes it.
    assert count <= 5
    server.trainers_end.close()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def test_what_is_held_back_begins_at_once_when_the_trainer_is_gone(server, begun, monkeypatch):
    lost = []
    monkeypatch.setattr(server, "_lose_trainer", lambda: lost.append(list(begun)))
    messages.send(server.trainers_end, begin())
    server.trainers_end.close()
    thread = serving(server)
    thread.join(SECONDS_MAX)
    assert lost == [[1]], "all that it said before counts"


def test_what_comes_to_a_saver_that_is_ending_is_refused_at_once(server, begun):
    server._has_heard = server._is_ending = True
    server._take(begin())
    assert begun == [1]
    server._take(begin(2, hold_ms=0))
    assert begun == [1, 2]


def test_what_came_before_a_saver_was_told_to_end_is_not_too_late(server, monkeypatch):
    held = []
    monkeypatch.setattr(server, "_begin", held.append)
    server._has_heard = True
    server._take(begin())
    server._is_ending = True
    server._take(messages.Staged(1))
    server._take(begin(2, hold_ms=0))
    assert [each.is_late for each in held] == [False, True]


@pytest.mark.parametrize(("threads", "holds"), [(1, False), (2, True), (3, True)])
def test_a_saver_holds_back_where_copies_want_every_processor(
    handing_store, savers, policy, monkeypatch, threads, holds
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    policy(staging_threads=threads)
    handing_store.commit_async(noise(1), 1).result()
    assert (savers[0].held[0] > 0) == holds


def test_hurry_is_for_what_there_was_and_not_for_what_comes_later(server):
    server._last, server._is_working = 4, True
    server._take(messages.Hurry())
    assert server._is_waited_for(Coming(number=4))
    assert not server._is_waited_for(Coming(number=5))
    assert server._is_waited_for(messages.Release(1))


def test_what_was_held_and_is_waited_for_begins_when_the_saver_hurries_already(server, begun, monkeypatch):
    """A thread that wakes in the idle class may take the GIL, and have no processor."""
    begin_one, found = server._begin, []
    monkeypatch.setattr(server, "_begin", lambda held: (found.append(server._priority.calls[-1]), begin_one(held)))
    server._take(begin(number=3))
    server._hurry()
    assert server._is_waited_for(Coming(number=3)), "whatever ends meanwhile"
    server._is_hurried = False
    server._take(messages.Hurry())
    assert (found, begun) == (["hurry"], [3])
    assert server._is_hurried


def test_what_was_held_and_cannot_begin_leaves_no_saver_in_a_hurry(server, monkeypatch):
    monkeypatch.setattr(server, "_begin", lambda held: None)
    server._take(begin(number=1))
    server._take(messages.Hurry())
    assert not server._is_hurried
    assert server._priority.calls[-1] == "stand aside"


def test_a_hurry_for_what_is_given_up_before_its_turn_ends_with_it(server):
    ticket = SimpleNamespace(number=1, is_coming=True, abort=lambda: None, leave=lambda: None)
    server._tickets[1] = ticket
    server._jobs.append(ticket)
    server._last = 1
    server._committer.give_up = lambda given_up: None
    server._take(messages.Hurry())
    assert server._is_hurried
    server._take(messages.Abort(1))
    assert not server._is_hurried
    assert server._priority.calls[-1] == "stand aside"


def test_bell_that_rings_for_every_unit_is_heard_once_a_millisecond(server):
    heard = []
    hear = server._hear
    server._hear = lambda: heard.append(time.monotonic()) or hear()
    thread = serving(server)
    rung = 300
    for _ in range(rung):
        os.eventfd_write(server._bell, 1)
        time.sleep(0.0001)
    server.trainers_end.close()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    most = 1000 * (heard[-1] - heard[0]) / saver_server.BELL_PAUSE_MS
    assert 3 < len(heard) <= most + 3, (len(heard), most)


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
