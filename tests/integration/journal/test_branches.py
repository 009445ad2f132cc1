"""Protects the keyframes of branches: of checkpoints of one step, each chain keeps and uses its own."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.errors import ConflictError
from support.journaled_training import JournaledTraining, bits


def branch(place, seed, *, is_blocking):
    """Resume from the tag, begin a chain with step 101, and train up to step 104."""
    training = JournaledTraining()
    training.seed = seed
    with ckstore.open(place, create=False) as store:
        store.journal(training.optimizer)
        store.restore("base", into=training.state)
        training.train(101)
        if is_blocking:
            store.commit(training.state, 101)
        else:
            store.commit_async(training.state, 101).result()
        training.run(store, [102, 103, 104])
    return training


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_tag_keeps_the_keyframe_of_its_own_branch(tmp_path, is_blocking):
    place = tmp_path / "store"
    first = JournaledTraining()
    with ckstore.open(place) as store:
        store.commit(first.state, 100, tags=["base"])
    branch(place, 1, is_blocking=is_blocking)
    training = branch(place, 2, is_blocking=is_blocking)
    with ckstore.open(place, create=False) as store:
        store.tag(103, "good")
        assert store.tags()["good"] == 2
        for ref in ("seq:2", 101):
            with pytest.raises(ConflictError):
                store.delete(ref)
        with pytest.raises(ConflictError):
            store.demote("seq:2")
        store.delete("seq:1")
        for ref in (103, "good"):
            assert bits(store.restore(ref)) == training.expected[103]
            assert not store.restored.warnings, "no other keyframe was tried"
