"""Protects that a store that was opened with rules keeps to them by itself, and that no commit waits for it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError

SECONDS_MAX = 60


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
