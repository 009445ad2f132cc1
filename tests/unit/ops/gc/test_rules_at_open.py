"""Protects retention rules given to ``open``: checked first, and applied after commits to a store in memory."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError
from support.gc_histories import commit_all


def test_memory_store_is_collected_within_the_commit(backend):
    with ckstore.open(backend, retention={"keep-last": 1}, gc_every=2) as store:
        commit_all(store, [1, 2])
        assert store.steps() == [2]
        commit_all(store, [3])
        assert store.steps() == [2, 3]


def test_without_rules_nothing_is_dropped(backend):
    with ckstore.open(backend, gc_every=1) as store:
        commit_all(store, range(3))
        assert store.steps() == [0, 1, 2]


def test_gc_every_must_be_positive(folder):
    with pytest.raises(UsageError, match="gc_every must be a number of commits"):
        ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=0)


def test_rules_may_be_a_mapping(store):
    commit_all(store, [1, 2])
    store.set_retention({"keep_last": 3, "keep_tag": ["a"]})
    assert store.retention == ckstore.Retention(keep_last=3, keep_tag="a")
    assert [verdict.seq for verdict in store.gc({"keep_last": 1}, dry_run=True).runs[0].dropped] == [0]


@pytest.mark.parametrize("given", [3, "keep_last 3", ["keep_last"], ckstore.Retention, {}, {"keep_last": "3"}])
def test_invalid_policy_is_refused_before_creation(tmp_path, given):
    with pytest.raises(UsageError):
        ckstore.open(tmp_path / "new", retention=given)
    assert not (tmp_path / "new").exists()
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"w": np.zeros(10)}, 1)
        for verb in (store.gc, store.set_retention):
            with pytest.raises(UsageError):
                verb(given)
        assert store.retention is None


def test_misspelled_rule_names_the_nearest(folder):
    for make in (ckstore.Retention, lambda **rules: ckstore.open(folder, retention=rules)):
        with pytest.raises(UsageError, match="Did you mean 'keep_last'"):
            make(keep_lats=3)
    with ckstore.open(folder) as store:
        for verb in (store.gc, store.set_retention):
            with pytest.raises(UsageError, match="Did you mean 'keep_last'"):
                verb({"keep_lats": 3})
