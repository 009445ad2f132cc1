"""Protects automatic collections: a store opened with retention rules applies them in a separate process."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.io.local import LocalBackend
from ckstore.ops.gc.policy import Retention
from ckstore.ops.scheduled import AutomaticGc
from support.demotion_histories import SECONDS_MAX, wait_until
from support.gc_histories import LAST_ONE, commit_all


def state(step):
    return {"w": np.full(1000, step)}


@pytest.mark.parametrize("verb", ["commit", "commit_async"])
def test_rules_are_applied_every_n_commits(folder, verb):
    with ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=4) as store:
        for step in range(1, 5):
            done = getattr(store, verb)(state(step), step)
            if verb == "commit_async":
                done.result()
        store.wait()
        wait_until(lambda: store.steps() == [3, 4])
        assert store.restore()["w"][0] == 4


def test_short_sessions_collect_too(folder):
    for step in range(1, 5):
        with ckstore.open(folder, retention=ckstore.Retention(keep_last=2), gc_every=4) as store:
            store.commit(state(step), step)
    with ckstore.open(folder) as store:
        wait_until(lambda: store.steps() == [3, 4])


def collected(store, policy):
    """Start a collection as after a commit, and wait for its end."""
    automatic = AutomaticGc(repository_of(store), policy)
    automatic.after_commit(store.log()[0].seq)
    assert automatic.child_pid is not None
    automatic.wait(SECONDS_MAX)
    automatic.close()


def test_collection_process_gets_every_rule(disk_store):
    commit_all(disk_store, range(6), metrics={"loss": 1.0})
    disk_store.tag(1, "release-1")
    collected(
        disk_store,
        Retention(
            keep_last=1, keep_every=4, keep_within="1s", keep_daily=1, keep_best=("loss:1", "none:1:max"),
            keep_tag="release-*", time_zone="-03:00",
        ),
    )  # fmt: skip
    assert disk_store.steps() == list(range(6)), "none has the metric 'none', so all are kept"
    collected(disk_store, Retention(keep_last=1, keep_every=4, time_zone="-03:00"))
    assert disk_store.steps() == [0, 1, 4, 5]


def test_failed_collection_is_only_logged(disk_store, caplog):
    commit_all(disk_store, [1, 2])
    disk_store.tag(1, "good")
    Path(repository_of(disk_store).backend.location_of("tags/main/good")).write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        collected(disk_store, LAST_ONE)
    assert "failed with exit code 12" in caplog.text
    assert "no checkpoint of run main was deleted" in caplog.text
    assert disk_store.steps() == [1, 2]


def test_busy_collector_is_no_failure(disk_store, caplog):
    commit_all(disk_store, [1, 2])
    lock = LocalBackend(repository_of(disk_store).backend.root).try_lock("gc.lock")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        collected(disk_store, LAST_ONE)
    lock.close()
    assert caplog.text == ""
    assert disk_store.steps() == [1, 2]


def test_other_runs_are_left_alone(folder, disk_store):
    commit_all(disk_store, [1, 2])
    with ckstore.open(folder, run="other") as other:
        other.commit({"w": np.arange(4)}, 1)
        other.commit({"w": np.arange(5)}, 2)
        collected(other, LAST_ONE)
        assert other.steps() == [2]
        assert disk_store.steps() == [1, 2]
