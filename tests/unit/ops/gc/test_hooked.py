"""Protects that a store that was opened with rules keeps to them by itself, and that no commit waits for it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError

SECONDS_MAX = 240


def state(step):
    return {"w": np.full(1000, step)}


def wait_until(is_so):
    end = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


@pytest.mark.parametrize("verb", ["commit", "commit_async"])
def test_rules_are_applied_after_every_so_many_commits(folder, verb):
    with ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=4) as store:
        for step in range(1, 5):
            done = getattr(store, verb)(state(step), step)
            if verb == "commit_async":
                done.result()
        store.wait()
        wait_until(lambda: store.steps() == [3, 4])
        assert store.restore()["w"][0] == 4


def test_without_rules_nothing_is_dropped(folder):
    with ckstore.open(folder, gc_every=1) as store:
        for step in range(3):
            store.commit(state(step), step)
        assert store._automatic is None
        assert store.steps() == [0, 1, 2]


def test_a_number_of_commits_is_positive(folder):
    with pytest.raises(UsageError, match="gc_every is a number of commits"):
        ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=0)


def test_short_sessions_collect_too(folder):
    for step in range(1, 5):
        with ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=4) as store:
            store.commit(state(step), step)
    with ckstore.open(folder) as store:
        wait_until(lambda: store.steps() == [3, 4])


def test_rules_may_be_a_mapping(folder):
    with ckstore.open(folder, retention={"keep-last": 1}, gc_every=2) as store:
        store.commit(state(1), 1)
        store.commit(state(2), 2)
        wait_until(lambda: store.steps() == [2])
        store.set_retention({"keep_last": 3, "keep_tag": ["a"]})
        assert store.retention == ckstore.Retention(keep_last=3, keep_tag="a")
        store.commit(state(3), 3)
        assert [verdict.seq for verdict in store.gc({"keep_last": 1}, dry_run=True).runs[0].dropped] == [1]


@pytest.mark.parametrize("given", [3, "keep_last 3", ["keep_last"], ckstore.Retention, {}, {"keep_last": "3"}])
def test_what_is_no_policy_is_refused_before_anything_is_made(tmp_path, given):
    with pytest.raises(UsageError):
        ckstore.open(tmp_path / "new", retention=given)
    assert not (tmp_path / "new").exists()
    with ckstore.open(tmp_path / "store") as store:
        store.commit(state(1), 1)
        for verb in (store.gc, store.set_retention):
            with pytest.raises(UsageError):
                verb(given)
        assert store.retention is None


def test_rule_with_a_typo_names_the_nearest_wherever_it_is_given(folder):
    for make in (ckstore.Retention, lambda **rules: ckstore.open(folder, retention=rules)):
        with pytest.raises(UsageError, match="Did you mean 'keep_last'"):
            make(keep_lats=3)
    with ckstore.open(folder) as store:
        for verb in (store.gc, store.set_retention):
            with pytest.raises(UsageError, match="Did you mean 'keep_last'"):
                verb({"keep_lats": 3})
