"""Protects checkpoints in replay form in other places: a store in a bucket, a mirror, and a base in a tier."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError, UsageError


def train_until(state, step):
    for number in range(state["step"], step):
        state["w"] *= np.float32(1.01)
        state["w"] += np.float32(number)
    state["step"] = step


def state_of(step):
    state = {"w": np.arange(3000, dtype=np.float32), "step": 0}
    train_until(state, step)
    return state


def filled(place):
    store = ckstore.open(place, policy=ckstore.Policy(threads=1))
    for step in (1, 2, 3):
        store.commit(state_of(step), step)
    return store


def assert_made_again(store, step=2):
    assert np.array_equal(store.restore(step, replay=train_until)["w"], state_of(step)["w"])


def test_a_store_in_a_bucket(address):
    with filled(address) as store:
        store.demote(2, replay=train_until)
        assert [info.form for info in store.log()] == ["whole", "replay, from step 1", "whole"]
        assert_made_again(store)
        with pytest.raises(ConflictError, match="is needed"):
            store.delete(1)
        assert [name.step for name in store.gc({"keep_last": 2}, min_age=0, trash_for=0).done.dropped] == []
        assert_made_again(store)
        store.delete(2)
        assert [name.step for name in store.gc({"keep_last": 1}, min_age=0, trash_for=0).done.dropped] == [1]


def test_a_base_in_a_tier_and_a_mirror(tmp_path):
    with filled(tmp_path / "store") as store:
        store.demote(2, replay=train_until)
        report = store.push(str(tmp_path / "attic"), keep_local=1)
        assert [(entry.step, entry.action) for entry in report.entries] == [(1, "push"), (2, "keep"), (3, "keep")]
        store.gc(min_age=0, trash_for=0)
        assert_made_again(store)
        store.mirror(str(tmp_path / "mirror"))
        store.repack()
        assert_made_again(store)
        assert store.verify("decode", remote=True).is_clean
    with ckstore.open(tmp_path / "mirror", create=False) as copy:
        assert copy.info(2).form == "replay, from step 1"
        assert copy.verify("decode").is_clean
        assert_made_again(copy)
        with pytest.raises(UsageError, match="replay form"):
            copy.restore(2)
