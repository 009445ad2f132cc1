"""Savers of many ranks: all get one answer quickly when a rank fails, is late, or has a trainer that does not read."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.background import client
from ckstore.errors import CkstoreError, LeafTypeError, RankError, UsageError
from ckstore.ranks import protocol, savers
from ckstore.ranks.link import listen
from ckstore.ranks.savers import SaverJob, SaverLinks
from ckstore.ranks.world import Listener, Ranks

QUICK_SECONDS = 20.0
"""Well below the 60 s in which a rank may join."""


def in_threads(ranks, act):
    """Call a function for each rank, at the same time. Return the results."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(act, ranks))


@pytest.fixture
def stores(tmp_path):
    """Two ranks of this process, with a saver process each."""
    listener = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    jobs = [Ranks(rank, 2, address, "a token of this test") for rank in range(2)]
    jobs[0]._shared.listener = Listener(listener)
    found = in_threads(jobs, lambda ranks: ckstore.open(tmp_path / "store", ranks=ranks))
    found[1].leave_job = jobs[1].close
    yield found
    in_threads(found, lambda store: store.close())
    for job in jobs:
        job.close()


def state_of(store):
    return {"w": np.arange(1000.0), "rank": repr(store)}


def commit(store, step, state=None, policy=None):
    """Return the receipt of a background commit, or its error."""
    try:
        return store.commit_async(state or state_of(store), step, policy=policy).result(QUICK_SECONDS)
    except (CkstoreError, TimeoutError) as error:
        return error


def seqs_of(answers):
    return [getattr(each, "seq", each) for each in answers]


def test_a_rank_whose_call_fails_is_named_on_the_others_at_once(stores):
    assert seqs_of(in_threads(stores, lambda store: commit(store, 1))) == [0, 0]
    bad = {"w": object()}
    found = in_threads(stores, lambda store: commit(store, 2, bad if store is stores[1] else None))
    assert isinstance(found[1], LeafTypeError)
    assert isinstance(found[0], CkstoreError), found
    assert "rank 1" in str(found[0])
    # The numbers of the commits are still in step.
    assert seqs_of(in_threads(stores, lambda store: commit(store, 3))) == [1, 1]


def test_the_first_call_may_fail_on_rank_0(stores):
    bad = {"w": object()}
    found = in_threads(stores, lambda store: commit(store, 1, bad if store is stores[0] else None))
    assert "rank 0" in str(found[1]), found
    assert seqs_of(in_threads(stores, lambda store: commit(store, 2))) == [0, 0]


def test_a_rank_that_could_skip_commits_is_refused_on_all_ranks(stores):
    skipping = ckstore.Policy(on_busy="replace")
    found = in_threads(stores, lambda store: commit(store, 1, policy=skipping if store is stores[1] else None))
    for error in found:
        assert isinstance(error, UsageError), error
        assert "many ranks cannot commit with on_busy='replace'" in str(error)
    assert "rank 1" in str(found[0])
    assert seqs_of(in_threads(stores, lambda store: commit(store, 2))) == [0, 0]


def test_a_trainer_that_is_lost_after_another_has_begun_is_named_at_once(stores):
    assert seqs_of(in_threads(stores, lambda store: commit(store, 1))) == [0, 0]
    pending = stores[0].commit_async(state_of(stores[0]), 2)
    stores[1].leave_job()
    with pytest.raises(RankError, match="rank 1 has ended or closed its store: the commit of step 2 failed"):
        pending.result(QUICK_SECONDS)


@pytest.mark.deep(parts=8)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_saver_that_ends_before_it_has_joined_is_named_at_once(stores, monkeypatch, rank):
    begin_of = client.Saver.begin

    def begin_and_kill(saver, *arguments, **options):
        begin_of(saver, *arguments, **options)
        os.kill(saver.pid, signal.SIGKILL)

    pending = stores[1 - rank].commit_async(state_of(stores[1 - rank]), 1)
    with monkeypatch.context() as patch:
        patch.setattr(client.Saver, "begin", begin_and_kill)
        with pytest.raises(CkstoreError, match="was killed by SIGKILL"):
            stores[rank].commit_async(state_of(stores[rank]), 1).result(QUICK_SECONDS)
    with pytest.raises(RankError, match=rf"rank {rank} has lost its saver \(.*SIGKILL.* failed on all ranks"):
        pending.result(QUICK_SECONDS)
    # The next commit has another saver.
    assert seqs_of(in_threads(stores, lambda store: commit(store, 2))) == [0, 0]


def test_rank_0_joins_before_its_saver_waits_for_an_orphan(stores):
    # Else the others would take it for absent. The saver waits, and the other ranks for as long as it lives.
    def refuse():
        pytest.fail("the trainer waits for an orphan")

    repository_of(stores[0]).wait_for_orphan = refuse
    assert seqs_of(in_threads(stores, lambda store: commit(store, 1))) == [0, 0]


@pytest.fixture
def links(monkeypatch):
    monkeypatch.setattr(protocol, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(savers, "LEAVE_SECONDS", 0.3)
    listener = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    found = [
        SaverLinks(SaverJob(rank, 3, address, "a token of this test", 30.0, "warn"), listener) for rank in range(3)
    ]
    yield found
    for each in found:
        each.close()
    listener.close()


def test_a_saver_that_is_late_gets_the_error_of_the_connection(links):
    zero, one, two = links
    first = zero.link_for(1)
    one.link_for(1)
    one.close()
    wait_until(lambda: first.is_broken)
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has ended or closed its store"):
        two.link_for(1)
    zero.discard(RankError("rank 1 has failed", rank=1))
    with pytest.raises(RankError, match="rank 1 has failed"):
        two.link_for(1)
    # Rank 0 has begun another commit.
    assert zero.link_for(2) is not first
    with pytest.raises(RankError, match="rank 1 has failed"):
        two.link_for(1)
    two.link_for(2)
    assert time.monotonic() - begun < QUICK_SECONDS


def test_all_savers_connect_again_after_a_loss_between_commits(links):
    before = [each.link_for(1) for each in links]
    links[2].close()
    wait_until(lambda: all(link.is_broken for link in before[:2]))
    after = [each.link_for(2) for each in links]
    assert not any(link.is_broken for link in after)


def begin(links, number):
    """Join a commit; return the link."""
    link = links.link_for(number)
    link.take_number(number)
    link.send(lambda member: member.join(number, 7))
    return link


@pytest.mark.parametrize(("lost", "witness"), [(2, 0), (0, 1)])
def test_a_rank_whose_trainer_is_lost_is_not_waited_for(links, lost, witness):
    for each in links:
        each.link_for(1)
    waiting = [begin(each, 1) for rank, each in enumerate(links) if rank != lost]
    links[witness].note_lost(lost, "has been silent for 15 s")
    for link in waiting:
        finish = link.wait(1, QUICK_SECONDS)
        assert finish.error.what == f"rank {lost} has been silent for 15 s: the commit of step 7 failed on all ranks"


def test_a_lost_saver_is_not_waited_for_in_its_commit_only(links):
    zero, one, two = links
    zero.note_lost(2, "has lost its saver", 2)
    waiting = in_threads([zero, one], lambda each: begin(each, 1))
    for link in waiting:
        assert link.wait(1, QUICK_SECONDS).error.what.startswith("rank 2 has lost its saver")
    for each in (zero, one):
        each.discard(RankError("rank 2 has lost its saver", rank=2))
    waiting = in_threads([zero, one], lambda each: begin(each, 3))
    time.sleep(0.9)
    begin(two, 3)
    assert [link.wait(3, 0.3) for link in waiting] == [None, None]


def test_savers_do_not_wait_for_that_of_rank_0_if_it_is_lost(links):
    _, one, _ = links
    one.note_lost(0, "has lost its saver", 2)
    with pytest.raises(RankError, match=r"rank 0 has lost its saver: the commit failed on all ranks\. Commit again"):
        one.link_for(1)
    # In the next one, it has a new one.
    connected = in_threads(links[:2], lambda each: each.link_for(3))
    assert not any(link.is_broken for link in connected)


def test_a_lost_trainer_is_remembered_for_later_connections(links):
    zero, one, _ = links
    zero.note_lost(2, "has been silent for 15 s")
    waiting = in_threads([zero, one], lambda each: begin(each, 1))
    for link in waiting:
        assert link.wait(1, QUICK_SECONDS).error.what.startswith("rank 2 has been silent for 15 s")


def test_a_saver_does_not_wait_for_that_of_a_stopped_trainer(links):
    # Nobody accepts connections at this socket, which is what a stopped rank 0 does.
    _, one, _ = links
    one.note_lost(0, "has been silent for 15 s")
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 0 has been silent for 15 s, and its saver does not answer"):
        one.link_for(1)
    assert time.monotonic() - begun < QUICK_SECONDS


def wait_until(is_met, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("waiting", [0, 1])
def test_commit_and_commit_async_of_one_step_are_one_error_on_all_ranks(stores, waiting):
    def call(store):
        if store is not stores[waiting]:
            return commit(store, 1)
        try:
            return store.commit(state_of(store), 1)
        except CkstoreError as error:
            return error

    begun = time.monotonic()
    for error in in_threads(stores, call):
        assert isinstance(error, UsageError), error
        text = f"rank {1 - waiting} called commit_async where rank {waiting} called commit for step 1"
        assert text in str(error)
        assert str(error).endswith("Make the same calls in the same order on every rank")
    assert time.monotonic() - begun < QUICK_SECONDS
    # The numbers of the commits are still in step.
    assert seqs_of(in_threads(stores, lambda store: commit(store, 2))) == [0, 0]
    assert seqs_of(in_threads(stores, lambda store: store.commit(state_of(store), 3))) == [1, 1]


def test_all_ranks_make_the_same_last_commit_whatever_their_arenas_hold(stores):
    assert not any(store._job.last_step().is_background for store in stores)
    # The call of rank 1 fails before there is an arena.
    in_threads(stores, lambda store: commit(store, 1, {"w": object()} if store is stores[1] else None))
    assert [store.arena_nbytes > 0 for store in stores] == [True, False]
    assert all(store._job.last_step().is_background for store in stores)


def test_savers_that_lose_one_name_the_remedy_to_commit_again(links):
    first = links[0].link_for(1)
    for each in links[1:]:
        each.link_for(1)
    links[2].close()
    wait_until(lambda: first.is_broken)
    with pytest.raises(RankError, match=r"Commit again; if that fails, too, start the job again$"):
        first.agree("step", b"", max)
