"""Many ranks commit one checkpoint: whole data path without processes or sockets."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

import ckstore
from ckstore import PerRank
from ckstore.config import Limits
from ckstore.ranks import planning
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.merge import Merged
from ckstore.ranks.part import Part, Skeleton
from ckstore.ranks.planning import Holdings, RankContent, plan_ranks
from ckstore.ranks.writing import Share, checks_of_rest
from support.rank_jobs import PlayedJob


@pytest.fixture
def path(tmp_path):
    ckstore.open(tmp_path / "store").close()
    return tmp_path / "store"


def model(seed: int, count: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{index}": torch.randn(700, 1000, generator=generator) for index in range(count)}


def test_equal_states_are_stored_once_and_written_in_equal_shares(path):
    job = PlayedJob(path, 4)
    state = {"model": model(1), "step": torch.tensor(7), "epoch": 3}
    receipt = job.commit([state] * 4, step=7)
    job.close()
    store = ckstore.open(path)
    restored = store.restore(7)
    assert all(torch.equal(restored["model"][name], value) for name, value in state["model"].items())
    assert restored["step"] == 7
    assert restored["epoch"] == 3
    assert receipt.bytes_state == sum(value.nbytes for value in state["model"].values()) + 8
    assert receipt.warnings == ()
    assert [info.step for info in store.log()] == [7]


def test_values_that_differ_are_kept_for_each_rank(path):
    job = PlayedJob(path, 3)
    states = [
        {"rng": torch.full((5000,), rank), "pos": rank, "shared": torch.arange(10), "name": "run"} for rank in range(3)
    ]
    first = job.commit(states, step=1)
    assert any("rng" in warning for warning in first.warnings)
    asked = job.asked_for_more
    assert asked > 0
    again = job.commit(states, step=2)
    assert job.asked_for_more == asked, "what differed before is written by each rank in the first turn"
    assert again.warnings == (), "it was said once"
    job.close()
    restored = ckstore.open(path).restore(2)
    assert {rank: int(value[0]) for rank, value in restored["rng"].items()} == {0: 0, 1: 1, 2: 2}
    assert dict(restored["pos"]) == {0: 0, 1: 1, 2: 2}
    assert torch.equal(restored["shared"], torch.arange(10))


def test_rank_0_keeps_no_part_after_the_merge_and_no_manifest_after_publishing(path, monkeypatch):
    job = PlayedJob(path, 3)
    alive = []
    decode, encode = Part.decode.__func__, Merged.encode

    def decoded(cls, *args, **options):
        part = decode(cls, *args, **options)
        alive.append(weakref.ref(part))
        return part

    def encoded(self, *args, **options):
        assert len(alive) == 3
        assert [each() for each in alive] == [None] * 3
        alive.append(weakref.ref(self))
        return encode(self, *args, **options)

    monkeypatch.setattr(Part, "decode", classmethod(decoded))
    monkeypatch.setattr(Merged, "encode", encoded)
    job.commit([{"w": torch.arange(1000.0)}] * 3, step=1)
    assert alive[3]() is None
    job.close()


@pytest.mark.parametrize("world", [4, 64])
def test_equal_ranks_are_planned_once(world, monkeypatch):
    state = RankCapture(world).capture({"model": model(1), "rng": PerRank(torch.zeros(100))})
    ranks = [RankContent(Skeleton.of(state), Holdings.of(state))] * world
    calls = []
    triples = planning._triples
    monkeypatch.setattr(planning, "_triples", lambda *args: calls.append(args) or triples(*args))
    found = plan_ranks(ranks, Limits(), frozenset())
    assert len(calls) == 2
    names = {index: unit.path[-1] for index, unit in enumerate(state.units)}
    assert all(sum(names[span.unit] == "rng" for span in spans) == 1 for spans in found), "declared PerRank"
    for index, unit in enumerate(state.units):
        written = sorted((span.lo, span.hi) for spans in found for span in spans if span.unit == index)
        copies = world if names[index] == "rng" else 1
        assert sum(hi - lo for lo, hi in written) == copies * unit.nbytes
    # The same plan as for ranks of which rank 0 does not know that they are equal.
    apart = [RankContent(content.skeleton, Holdings.of(state)) for content in ranks]
    assert plan_ranks(apart, Limits(), frozenset()) == found


def test_keys_of_some_ranks_only_are_united(path):
    job = PlayedJob(path, 2)
    job.commit([{"a": torch.zeros(3), "both": 1}, {"b": np.ones(4), "both": 1}], step=1)
    job.close()
    restored = ckstore.open(path).restore(1)
    assert set(restored) == {"a", "b", "both"}


def test_an_unchanged_state_writes_nothing_again(path):
    job = PlayedJob(path, 4)
    state = {"model": model(1)}
    job.commit([state] * 4, step=1)
    again = job.commit([state] * 4, step=2)
    assert again.bytes_written == 0
    assert again.chunks_new == 0
    job.close()


def test_a_changed_state_is_stored_as_differences(path):
    job = PlayedJob(path, 2)
    state = {"model": model(1)}
    whole = job.commit([state] * 2, step=1)
    for value in state["model"].values():
        value += torch.randn(value.shape) * 1e-4
    second = job.commit([state] * 2, step=2)
    assert second.chunks_delta > 0
    assert second.bytes_written < whole.bytes_written
    job.close()
    restored = ckstore.open(path).restore(2)
    assert all(torch.equal(restored["model"][name], value) for name, value in state["model"].items())


def test_a_later_job_continues_from_the_bases_of_an_earlier_one(path):
    state = {"model": model(1)}
    job = PlayedJob(path, 2)
    job.commit([state] * 2, step=1)
    job.close()
    job = PlayedJob(path, 3)
    receipt = job.commit([state] * 3, step=2)
    assert receipt.bytes_written == 0
    job.close()


def test_a_flipped_bit_in_one_replica_is_named(path):
    job = PlayedJob(path, 4)
    states = [{"model": model(1)} for _ in range(4)]
    states[2]["model"]["w1"].view(torch.int32)[5, 7] ^= 1
    receipt = job.commit(states, step=1)
    assert len(receipt.warnings) == 1
    assert "model.w1" in receipt.warnings[0]
    assert "rank 2" in receipt.warnings[0]
    job.close()
    copies = ckstore.open(path).restore(1)["model"]["w1"]
    assert all(torch.equal(copies[rank], states[rank]["model"]["w1"]) for rank in range(4))


def test_a_bit_that_flips_later_in_a_value_that_differs_is_named(path):
    job = PlayedJob(path, 4)
    states = [{"w": torch.arange(10), "count": 5} for _ in range(4)]
    states[1]["w"][3] += 1
    states[1]["count"] = 6
    assert len(job.commit(states, step=1).warnings) == 2
    assert job.commit(states, step=2).warnings == ()
    states[2]["w"][3] += 2
    states[2]["count"] = 7
    tensor, value = job.commit(states, step=3).warnings
    assert tensor.startswith("w: a tensor differs on ranks 1, 2 from ranks 0, 3")
    assert value.startswith("count: differs on ranks 1, 2 from rank 0")
    assert job.commit(states, step=4).warnings == ()
    job.close()


def test_of_declared_replicas_a_sample_is_compared(path):
    job = PlayedJob(path, 2)
    declared = [{"model": ckstore.Replicated(model(1, count=8), check=1 / 2)} for _ in range(2)]
    plain = [{"model": model(1, count=8)} for _ in range(2)]
    sample, every = (sum(check.nbytes for check in checks_of(job, states, 1)) for states in (declared, plain))
    assert 0.3 * every < sample < 0.7 * every
    job.close()


def checks_of(job, states, rank):
    """Return the checks of what a rank would not write."""
    state = job.captures[rank].capture(states[rank])
    share = Share.of(state, {})
    return list(checks_of_rest(state, share.rest, Limits(), turn=3))
