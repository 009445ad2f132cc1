"""Ranks commit together over real connections, and all of them get one answer."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

import ckstore
from ckstore._testing import repository_of
from ckstore.commit.chunk_writer import ChunkWriter
from ckstore.config import MIB
from ckstore.errors import BackendError, CkstoreError, MalformedError, RankError, UnsupportedError, UsageError
from ckstore.format.wire import SEAL_NBYTES, xxh3_64
from ckstore.ranks import commits
from ckstore.ranks.commits import RankCommits, find_attempt
from ckstore.ranks.part import Part
from ckstore.ranks.work import RankRequest, RankTools, decode_receipt
from ckstore.results import Receipt
from support.fake_ranks import mesh_of, placements_of, rank_of, sharded
from support.rank_jobs import FAST, PlayedJob, open_repository
from support.store_ranks import StoreRanks
from support.thread_ranks import ThreadJob


@pytest.fixture
def path(tmp_path):
    ckstore.open(tmp_path / "store").close()
    return tmp_path / "store"


@pytest.fixture
def job(path):
    job = ThreadJob(path, 4)
    yield job
    job.close()


def states(world=4):
    weights = torch.arange(300_000, dtype=torch.float32)
    return [{"w": weights, "rng": torch.full((10,), rank), "step": 5} for rank in range(world)]


def test_all_ranks_get_the_same_receipt_of_one_checkpoint(job, path):
    found = job.commit(states(), step=5)
    assert all(isinstance(each, Receipt) for each in found), found
    assert len({(each.seq, each.checkpoint_id) for each in found}) == 1
    again = job.commit(states(), step=6)
    assert len({each.seq for each in again}) == 1
    store = ckstore.open(path)
    assert store.steps() == [5, 6]
    assert {rank: int(value[0]) for rank, value in store.restore(6)["rng"].items()} == {0: 0, 1: 1, 2: 2, 3: 3}


def test_different_steps_are_refused_on_all_ranks_and_named(job, path):
    found = job.each(lambda rank: rank.commit(states()[rank.link.rank], 7 if rank.link.rank == 2 else 5))
    assert all(isinstance(each, CkstoreError) for each in found), found
    assert all("5" in str(each) and "7" in str(each) for each in found)
    assert ckstore.open(path).steps() == []


def test_a_state_that_cannot_be_stored_on_one_rank_fails_all_and_names_it(job, path):
    bad = states()
    bad[3]["w"] = object()
    found = job.commit(bad, step=5)
    assert all(isinstance(each, CkstoreError) for each in found), found
    assert all("rank 3" in str(each) for each in found[:3]), [str(each) for each in found]
    assert all(isinstance(each, Receipt) for each in job.commit(states(), step=6))
    assert ckstore.open(path).steps() == [6]


def test_a_rank_that_does_not_commit_is_named(job, path):
    found = job.each(lambda rank: None if rank.link.rank == 1 else rank.commit(states()[rank.link.rank], 5))
    errors = [each for rank, each in enumerate(found) if rank != 1]
    assert all(isinstance(each, RankError) and "rank 1" in str(each) for each in errors), found
    assert ckstore.open(path).steps() == []


def test_packs_of_a_failed_commit_are_removed(job, path):
    job.commit([*states()[:3], {"w": object()}], step=5)
    assert not list((path / "packs").rglob("*.pack"))


def test_ranks_agree_on_a_value(job):
    found = job.each(lambda rank: rank.link.agree("latest", bytes([rank.link.rank]), max))
    assert found == [b"\x03"] * 4


def test_replicas_that_differ_can_be_refused(path):
    job = ThreadJob(path, 2, on_divergence="raise")
    found = job.commit([{"x": torch.zeros(4)}, {"x": torch.ones(4)}], step=1)
    for error in found:
        assert isinstance(error, UsageError), error
        assert "a tensor differs on rank 1 from rank 0, first in bytes 0 to 16: x. Mark it with" in str(error)
    found = job.commit([{"x": ckstore.PerRank(torch.zeros(4))}, {"x": ckstore.PerRank(torch.ones(4))}], step=1)
    assert all(isinstance(each, Receipt) for each in found), found
    job.close()


def test_different_runs_are_refused(path):
    job = ThreadJob(path, 2)
    job.ranks[1].tools.repository.run = "other"
    found = job.commit(states(2), step=1)
    assert all(isinstance(each, UsageError) and "other" in str(each) for each in found), found
    job.close()


def test_handles_that_share_a_connection_commit_in_turn(job, path):
    ckstore.open(path.with_name("other")).close()
    others = [RankTools(open_repository(path.with_name("other")), rank) for rank in range(4)]
    second = [RankCommits(rank.link, tools) for rank, tools in zip(job.ranks, others, strict=True)]

    def commit_to_second(rank, step):
        request = RankRequest(rank.capture.capture(states()[rank.link.rank]), step, FAST)
        return second[rank.link.rank].commit(step, FAST, lambda: request)

    for step in (5, 6):
        assert all(isinstance(each, Receipt) for each in job.commit(states(), step))
        found = job.each(lambda rank, step=step: commit_to_second(rank, step))
        assert all(isinstance(each, Receipt) for each in found), found
    for tools in others:
        tools.repository.close()
    for place in (path, path.with_name("other")):
        assert ckstore.open(place).steps() == [5, 6]


@pytest.mark.parametrize("interrupted", [0, 2])
def test_an_interrupted_rank_fails_the_commit_on_all(job, path, interrupted):
    rank = job.ranks[interrupted]
    wait, calls = rank.link.wait, iter(range(100))

    def interrupt(until, seconds):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return wait(until, seconds)

    def commit(each):
        try:
            return each.commit(states()[each.link.rank], 5)
        except KeyboardInterrupt:
            return "interrupted"

    rank.link.wait = interrupt
    found = job.each(commit)
    assert found.pop(interrupted) == "interrupted"
    assert all(isinstance(each, CkstoreError) and f"rank {interrupted}" in str(each) for each in found), found
    rank.link.wait = wait
    assert all(isinstance(each, Receipt) for each in job.commit(states(), step=6))
    assert ckstore.open(path).steps() == [6]


def test_a_commit_of_a_lost_rank_0_is_found_only_if_it_is_whole(job, path):
    (receipt, *_) = job.commit(states(), step=5)
    rank = job.ranks[1]
    repository, attempt = rank.tools.repository, rank.link.attempt_id(1)
    found = find_attempt(repository, attempt)
    assert decode_receipt(found).checkpoint_id == receipt.checkpoint_id
    assert find_attempt(repository, rank.link.attempt_id(2)) is None
    next((path / "packs").rglob("*.pack")).unlink()
    assert find_attempt(repository, attempt) is None


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_commit_of_a_lost_rank_0_may_be_seen_late(path, monkeypatch, is_in_time):
    job = ThreadJob(path, 2)
    zero = job.ranks[0]
    publish, find, tries = zero.commits._root.publish, commits.find_attempt, []

    def publish_and_end(*arguments):
        published = publish(*arguments)
        zero.link.close()
        return published

    def find_late(repository, attempt):
        tries.append(repository)
        is_seen = repository is zero.tools.repository or (is_in_time and tries.count(repository) == 3)
        return find(repository, attempt) if is_seen else None

    zero.commits._root.publish = publish_and_end
    monkeypatch.setattr(commits, "find_attempt", find_late)
    monkeypatch.setattr(commits, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(commits, "FOUND_SECONDS", 30.0 if is_in_time else 0.1)
    answer = job.commit(states(2), step=5)[1]
    if is_in_time:
        assert isinstance(answer, Receipt)
    else:
        assert isinstance(answer, RankError)
        assert "rank 0" in str(answer)
        assert "not in the store then" in str(answer)
    # No rank has removed its packs.
    restored = ckstore.open(path).restore(5)
    assert torch.equal(restored["w"], states()[0]["w"])
    job.close()


def test_an_error_after_the_manifest_is_visible_keeps_all_packs(job, path):
    repository = job.ranks[0].tools.repository
    rescue = repository.rescue_local_packs

    def fail(packs):
        raise BackendError("no answer", where="packs")

    repository.rescue_local_packs = fail
    found = job.commit(states(), step=5)
    repository.rescue_local_packs = rescue
    assert all(isinstance(each, BackendError) for each in found), found
    restored = ckstore.open(path).restore(5)
    assert torch.equal(restored["w"], states()[0]["w"])


def test_a_rank_that_is_writing_stops_when_the_commit_has_failed(path, monkeypatch):
    job = ThreadJob(path, 2)
    large = [{"own": np.random.default_rng(rank).integers(0, 256, 64 * MIB, np.uint8)} for rank in range(2)]
    link, store_chunk, stored = job.ranks[0].link, ChunkWriter._store_chunk, []

    def store_slowly(writer, *arguments):
        if writer.repository is job.ranks[1].tools.repository:
            raise BackendError("no answer", where="packs")
        # Rank 1 has failed meanwhile.
        while not link._loop.failed:
            time.sleep(0.01)
        stored.append(store_chunk(writer, *arguments))

    monkeypatch.setattr(ChunkWriter, "_store_chunk", store_slowly)
    found = job.commit(large, step=1)
    assert all(isinstance(each, BackendError) and "rank 1" in str(each) for each in found[:1]), found
    assert not stored
    monkeypatch.undo()
    assert not list((path / "packs").rglob("*.pack"))
    assert all(isinstance(each, Receipt) for each in job.commit(states(2), step=2))
    job.close()


def test_packs_that_vanish_during_a_commit_are_written_again(path):
    job = StoreRanks(2)
    job.open(lambda rank: path)
    repository, lost = repository_of(job.stores[0]), []
    rescue = repository.rescue_local_packs
    repository.rescue_local_packs = lambda packs: rescue(packs) if lost else lost.extend(packs) or set(packs)
    found = job.commit(lambda rank: states(2)[rank])
    assert all(isinstance(each, Receipt) for each in found), found
    assert lost
    job.close()


def test_different_tensors_of_two_meshes_under_one_path_are_refused(path):
    def stage(rank, first):
        with rank_of(rank, 4):
            mesh = mesh_of(2, ranks=[0, 1] if rank < 2 else [2, 3])
            return {"layer": sharded(torch.arange(8.0) + first, mesh, [Shard(0)])}

    job = PlayedJob(path, 4)
    with pytest.raises(UsageError, match="different tensors under the same path") as caught:
        job.commit([stage(rank, 0 if rank < 2 else 100) for rank in range(4)], step=1)
    assert "layer" in str(caught.value)
    job.close()


@pytest.mark.parametrize("placements", ["R", "S0"])
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_distributed_tensor_that_a_rank_of_its_mesh_lacks_is_named(path, placements, lacking):
    def state(rank):
        with rank_of(rank, 2):
            tensors = {"w": torch.arange(64.0), "extra": torch.arange(64.0)}
            mesh = mesh_of(2)
            made = {name: sharded(each, mesh, placements_of(placements)) for name, each in tensors.items()}
            return {"w": made["w"]} if rank == lacking else made

    job = PlayedJob(path, 2)
    with pytest.raises(UsageError, match=r"no rank contributes bytes .*: extra\. Let all ranks that hold a part"):
        job.commit([state(rank) for rank in range(2)], step=1)
    job.close()


def test_a_message_that_contradicts_itself_names_the_rank_and_the_remedy(job, monkeypatch):
    encode = Part.encode
    monkeypatch.setattr(
        Part, "encode", lambda part: encode(replace(part, attempt=bytes(16)) if part.rank == 2 else part)
    )
    for error in job.commit(states(), step=5):
        assert isinstance(error, MalformedError)
        assert "the part of rank 2 is missing, is of another attempt" in str(error)
        assert str(error).endswith(". Report this")


def test_a_part_record_of_a_newer_version_is_named_on_all_ranks(job, path, monkeypatch):
    encode = Part.encode

    def newer(part):
        content = encode(part)
        body = content[:8] + (2).to_bytes(2, "little") + content[10:-SEAL_NBYTES]
        return body + xxh3_64(body).to_bytes(SEAL_NBYTES, "little") if part.rank == 2 else content

    monkeypatch.setattr(Part, "encode", newer)
    for error in job.commit(states(), step=5):
        assert isinstance(error, UnsupportedError)
        assert "rank 2 sends a part record of version 2, and this rank reads version 1: rank 0: rank 2. Use" in str(
            error
        )
    assert ckstore.open(path).steps() == []
