"""Protects background commits of many ranks: like those of one process, they are repeated where that helps."""

from __future__ import annotations

import errno
import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import ckstore
from ckstore.background.saver.committer import Committer
from ckstore.background.saver.job import SaverRank
from ckstore.commit.pipeline import WriteBlocks
from ckstore.concurrency import ThreadLimit, noop
from ckstore.config import MIB, Policy
from ckstore.errors import CapacityError, CkstoreError, ConflictError, SaverError
from ckstore.ranks import work
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.link import listen
from ckstore.ranks.savers import SaverJob, encode_share
from ckstore.results import Stopwatch
from support.rank_jobs import FAST, open_repository


class StagedTicket:
    """A ticket of which everything is staged."""

    def __init__(self, state, step, number, policy):
        self.head = SimpleNamespace(step=step, policy=policy, share=encode_share(state), metrics={})
        self.number = self.job_number = number
        self.may_retain, self.stop_limit = False, None

    def check(self):
        pass

    def wait_whole(self):
        pass

    def when_whole(self, call):
        call()


class SaverJobs:
    """The savers of a job, as threads of this process."""

    def __init__(self, path, world):
        self._listener = listen("127.0.0.1", 0)
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.repositories = [open_repository(path) for _ in range(world)]
        self.savers = [
            SaverRank(
                SaverJob(rank, world, address, "a token of this test", 20.0, "warn").encode(),
                None if rank else self._listener,
                repository,
                ThreadLimit(),
                WriteBlocks(),
            )
            for rank, repository in enumerate(self.repositories)
        ]
        self._captures = [RankCapture(world) for _ in range(world)]
        self._threads = ThreadPoolExecutor(world)
        self._count = 0
        self.promises = []

    def commit(self, states, step, *, parent=None, policy=FAST):
        """Commit the states of all ranks. Return what each gets; an error is a result, too."""
        self._count += 1
        number = self._count
        return list(
            self._threads.map(
                lambda rank: self._commit(rank, states[rank], step, number, parent, policy), range(len(states))
            )
        )

    def _commit(self, rank, state, step, number, parent, policy):
        repository, captured = self.repositories[rank], self._captures[rank].capture(state)

        def take_run():
            repository.prepare_run()
            repository.lease.take()

        try:
            return self.savers[rank].commit(
                StagedTicket(captured, step, number, policy),
                captured.captured,
                parent,
                Stopwatch(repository.clock),
                take_run=take_run,
                on_all_staged=lambda: self.promises.append((rank, step)),
            )
        except CkstoreError as error:
            return error

    def close(self):
        for saver, repository in zip(self.savers, self.repositories, strict=True):
            saver.close()
            repository.close()
        self._threads.shutdown()
        self._listener.close()


@pytest.fixture
def path(tmp_path):
    ckstore.open(tmp_path / "store").close()
    return tmp_path / "store"


@pytest.fixture
def open_job(path):
    made = []

    def make(world):
        made.append(SaverJobs(path, world))
        return made[-1]

    yield make
    for job in made:
        job.close()
    gc.collect()


def states_of(step, world=2):
    source = np.random.default_rng(step)
    weights = source.standard_normal(100_000)
    return [{"w": weights, "own": source.integers(0, 256, 300_000, np.uint8), "rank": rank} for rank in range(world)]


def check(path, steps):
    with ckstore.open(path) as store:
        assert store.steps() == steps
        for step in steps:
            found = store.restore(step)
            for rank, state in enumerate(states_of(step)):
                assert np.array_equal(found["w"], state["w"])
                assert np.array_equal(found["own"][rank], state["own"])
        assert store.verify("decode").is_clean


def same_receipt(answers):
    assert not any(isinstance(each, Exception) for each in answers), answers
    [found] = {(each.seq, each.checkpoint_id) for each in answers}
    return found


def test_packs_that_vanish_during_a_commit_are_written_again(path, open_job):
    job = open_job(2)
    same_receipt(job.commit(states_of(1), 1))
    repository = job.repositories[0]
    rescue, vanished = repository.rescue_local_packs, []

    def lose_once(packs):
        if vanished:
            return rescue(packs)
        vanished.extend(packs)
        return set(vanished[:1])

    repository.rescue_local_packs = lose_once
    same_receipt(job.commit(states_of(2), 2))
    assert vanished
    # The numbers of the commits are still in step.
    same_receipt(job.commit(states_of(3), 3))
    check(path, [1, 2, 3])
    assert sorted(set(job.promises)) == [(rank, step) for rank in range(2) for step in (1, 2, 3)]


def test_packs_that_always_vanish_are_an_error_on_all_ranks(path, open_job):
    job = open_job(2)
    tries = []
    job.repositories[0].rescue_local_packs = lambda packs: tries.append(packs) or set(packs)
    found = job.commit(states_of(1), 1)
    assert all(isinstance(each, ConflictError) for each in found), found
    assert len(tries) == 2


def full_disk(monkeypatch, repository, count):
    """Have the disk be full for so many attempts of one rank."""
    write, left = work.write_unpublished, [None] * count

    def write_if_room(place, *arguments):
        if place is repository and left:
            left.pop()
            raise CapacityError("the disk is full", where="packs", errno=errno.ENOSPC)
        return write(place, *arguments)

    monkeypatch.setattr(work, "write_unpublished", write_if_room)


@pytest.fixture
def trash_nbytes(path):
    """Put a checkpoint into the trash. Return what measures the trash."""
    with ckstore.open(path) as store:
        for step in range(2):
            store.commit({"old": np.random.default_rng(step + 5).integers(0, 256, MIB, np.uint8)}, step)
        store.gc({"keep_last": 1}, min_age=0)

    def measure():
        repository = open_repository(path)
        try:
            return sum(folder.nbytes for folder in repository.trash.contents())
        finally:
            repository.close()

    assert measure() >= MIB
    return measure


def test_a_full_disk_is_given_the_trash(path, open_job, monkeypatch, trash_nbytes):
    job = open_job(2)
    full_disk(monkeypatch, job.repositories[1], 1)
    same_receipt(job.commit(states_of(1), 1))
    assert trash_nbytes() == 0
    same_receipt(job.commit(states_of(2), 2))


def test_a_disk_that_stays_full_is_an_error_on_all_ranks(path, open_job, monkeypatch, trash_nbytes):
    job = open_job(2)
    full_disk(monkeypatch, job.repositories[1], 2)
    found = job.commit(states_of(1), 1)
    assert all(isinstance(each, CapacityError) for each in found), found
    same_receipt(job.commit(states_of(2), 2))


def test_training_that_has_gone_back_continues_from_the_older_checkpoint(open_job):
    job = open_job(1)
    # An old base is no longer known, so the bound on reading forbids to try it.
    policy = Policy(read_amplification_max=100)
    base, other = (np.random.default_rng(seed).standard_normal(MIB // 2).astype(np.float32) for seed in range(2))
    job.commit([{"w": base}], 1, policy=policy)
    job.commit([{"w": other}], 2, parent=0, policy=policy)
    [receipt] = job.commit([{"w": base * np.float32(1.0000001)}], 3, parent=0, policy=policy)
    assert receipt.chunks_delta == receipt.chunks_new == 1


def test_a_promise_outlives_the_trainer_when_its_commit_is_repeated():
    # A private method, because the moment between the two attempts cannot be hit from outside.
    dead = SimpleNamespace(_hold_lease=lambda ticket: False, _trainer=SimpleNamespace(is_alive=False))
    Committer._take_run_of_job(dead, SimpleNamespace(may_outlive_trainer=True, check=noop))


def test_rank_0_takes_no_part_without_its_trainer_even_if_its_death_is_not_noted_yet():
    # The other trainers would be promised a checkpoint that rank 0 gives up as soon as the death is noted.
    dead = SimpleNamespace(_hold_lease=lambda ticket: False, _trainer=SimpleNamespace(is_alive=False))
    ticket = SimpleNamespace(
        may_outlive_trainer=False,
        check=noop,
        given_up_error=lambda: SaverError("the trainer died", todo="commit again"),
    )
    with pytest.raises(SaverError, match="the trainer died"):
        Committer._take_run_of_job(dead, ticket)
    assert not ticket.may_outlive_trainer
