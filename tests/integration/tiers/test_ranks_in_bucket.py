"""Protects jobs of many ranks whose store is a bucket: one checkpoint, the same receipt for all, or none."""

from __future__ import annotations

import numpy as np

import ckstore
from ckstore.errors import CkstoreError, LeafTypeError
from support.thread_ranks import stores_of_ranks

WORLD = 4


def state_of(rank, step):
    source = np.random.default_rng(step)
    own = np.random.default_rng(1000 * step + rank + 1)
    return {
        "same": source.standard_normal(300_000).astype(np.float32),
        "own": own.standard_normal(50_000).astype(np.float32),
        "layers": {f"layer{rank}": np.full(1000, rank + step)},
        "step": step,
    }


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert np.array_equal(found["same"], wanted["same"])
    assert np.array_equal(found["own"], wanted["own"])
    for name, values in wanted["layers"].items():
        assert np.array_equal(found["layers"][name], values)
    assert found["step"] == wanted["step"]


def test_ranks_commit_and_restore_one_checkpoint(address):
    with stores_of_ranks(address, WORLD) as each:
        for step in (1, 2):
            receipts = each(lambda rank, step=step: rank.store.commit(state_of(rank.rank, step), step))
            assert len({(receipt.checkpoint_id, receipt.seq) for receipt in receipts}) == 1
        assert receipts[0].seq == 1
    with stores_of_ranks(address, WORLD, create=False) as each:
        into = [state_of(rank, 0) for rank in range(WORLD)]
        found = each(lambda rank: rank.store.restore(into=into[rank.rank]))
        for rank in range(WORLD):
            assert_equal(found[rank], state_of(rank, 2))
        assert each(lambda rank: rank.store.latest().step) == [2] * WORLD
    with ckstore.open(address, create=False) as store:
        assert store.steps() == [1, 2]
        assert np.array_equal(store.restore()["own"][3], state_of(3, 2)["own"])
        assert list(store.restore()["layers"]) == [f"layer{rank}" for rank in range(WORLD)]
        assert store.contents(2).world.size == WORLD
        assert store.verify("decode").is_clean


def test_nothing_is_visible_if_one_rank_fails(address):
    with stores_of_ranks(address, WORLD) as each:

        def commit(rank):
            state = state_of(rank.rank, 1)
            return rank.store.commit({**state, "own": object()} if rank.rank == 2 else state, 1)

        errors = each(commit)
        assert isinstance(errors[2], LeafTypeError)
        assert all(isinstance(error, CkstoreError) and "rank 2" in str(error) for error in errors[:2])
        with ckstore.open(address, create=False) as reader:
            assert reader.log() == []
        # The next commit works, and the failed one has left no pack that it needs.
        receipts = each(lambda rank: rank.store.commit(state_of(rank.rank, 2), 2))
        assert {receipt.seq for receipt in receipts} == {receipts[0].seq}
    with ckstore.open(address, create=False) as store:
        assert store.steps() == [2]
        assert store.verify("decode").is_clean
