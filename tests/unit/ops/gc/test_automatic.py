"""Protects collections that follow commits: they run elsewhere, cost a commit nothing, and tell when they fail."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.automatic_gc import AutomaticGc
from ckstore.errors import UsageError
from ckstore.io.local import LocalBackend
from ckstore.retention.policy import Retention
from support.gc_histories import LAST_ONE, commit_all, keeper


@pytest.fixture
def automatic(disk_store):
    made = AutomaticGc(repository_of(disk_store), LAST_ONE, every=2)
    yield made
    made.wait(240)
    made.close()


def test_every_second_commit_starts_a_collection_in_another_process(disk_store, automatic):
    commit_all(disk_store, [1])
    automatic.after_commit(0)
    assert not automatic.is_running
    commit_all(disk_store, [2])
    automatic.after_commit(1)
    # Asking whether it runs would take note of its end.
    assert automatic._child is not None
    automatic.wait(240)
    assert disk_store.steps() == [2]
    assert disk_store.restore(2)["number"] == 2


def test_every_rule_reaches_the_other_process(disk_store):
    commit_all(disk_store, range(6), metrics={"loss": 1.0})
    disk_store.tag(1, "release-1")
    policy = Retention(
        keep_last=1, keep_every=4, keep_within="1s", keep_daily=1, keep_best=("loss:1", "none:1:max"),
        keep_tag="release-*", time_zone="-03:00",
    )  # fmt: skip
    made = AutomaticGc(repository_of(disk_store), policy)
    made.after_commit(5)
    made.wait(240)
    assert disk_store.steps() == list(range(6)), "none has the metric 'none', so all are kept"
    made = AutomaticGc(repository_of(disk_store), Retention(keep_last=1, keep_every=4, time_zone="-03:00"))
    made.after_commit(5)
    made.wait(240)
    assert disk_store.steps() == [0, 1, 4, 5]
    made.close()


@pytest.fixture
def end_it(automatic, monkeypatch):
    """Let no collection end by itself; return what kills the one that is at work."""
    monkeypatch.setattr(automatic, "_command", lambda root: ("import time; time.sleep(600)", (), b""))

    def end():
        if automatic._child is not None:
            automatic._child.process.kill()
            automatic.wait(240)

    yield end
    end()


def test_commit_does_not_wait_for_a_collection(disk_store, automatic, end_it):
    commit_all(disk_store, [1, 2])
    automatic.after_commit(1)
    assert automatic.is_running
    commit_all(disk_store, [3])
    automatic.after_commit(3)
    # Had anybody waited for it, it would not be at work any more.
    assert automatic.is_running


def test_one_collection_at_a_time_and_none_is_owed(disk_store, automatic, end_it):
    commit_all(disk_store, [1, 2])
    automatic.after_commit(1)
    first = automatic._child
    for seq in (3, 5, 7):
        automatic.after_commit(seq)
        assert automatic._child is first
    end_it()
    assert automatic._child is None
    automatic.after_commit(8)
    assert automatic._child is not None, "what was not begun while one was busy begins with the next commit"


def test_collection_that_fails_is_told_and_raises_nothing(disk_store, automatic, caplog):
    commit_all(disk_store, [1, 2])
    (tag,) = [disk_store.tag(1, "good")] and ["tags/main/good"]
    place = Path(repository_of(disk_store).backend.location_of(tag))
    place.write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        automatic.after_commit(1)
        automatic.wait(240)
    assert "ended with code 12" in caplog.text
    assert "nothing of run main was dropped" in caplog.text
    assert disk_store.steps() == [1, 2]


def test_collection_that_cannot_begin_is_told_and_raises_nothing(disk_store, automatic, monkeypatch, caplog):
    def refused(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr("ckstore.after_commits.subprocess.Popen", refused)
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        automatic.after_commit(1)
    assert "did not begin" in caplog.text


@pytest.mark.parametrize("broken", ["_start", "_reap"])
def test_whatever_goes_wrong_is_told_and_raises_nothing(disk_store, automatic, monkeypatch, caplog, broken):
    def confused(*args):
        raise AttributeError("no such thing")

    with monkeypatch.context() as patches, caplog.at_level(logging.WARNING, logger="ckstore"):
        patches.setattr(automatic, broken, confused)
        automatic.after_commit(1)
    assert "did not begin: AttributeError: no such thing" in caplog.text


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sessions_that_end_early_are_counted_together(disk_store, length):
    """No session makes as many commits as there are from one collection to the next."""
    started = []
    for first in range(0, 24, length):
        made = AutomaticGc(repository_of(disk_store), LAST_ONE, every=4)
        made._start = lambda: started.append(disk_store.log()[0].seq)
        for seq in range(first, first + length):
            commit_all(disk_store, [seq])
            made.after_commit(seq)
        made.close()
    assert {0, 1, 2}.isdisjoint(started)
    assert {3, 7, 11, 15, 19, 23} <= set(started)


def test_collection_that_a_killed_session_owed_is_begun_by_the_next_one(disk_store):
    commit_all(disk_store, range(4))
    made = AutomaticGc(repository_of(disk_store), LAST_ONE, every=4)
    commit_all(disk_store, [4])
    made.after_commit(4)
    assert made._child is not None
    made.wait(240)
    made.close()


def test_seqs_that_were_never_published_hide_no_collection(disk_store):
    commit_all(disk_store, range(3))
    # A writer took the seq of the collection and died.
    repository_of(disk_store).manifests.claim(3)
    made, started = AutomaticGc(repository_of(disk_store), LAST_ONE, every=4), []
    made._start = lambda: started.append(True)
    made.after_commit(4)
    assert started == [True]


def test_busy_collector_elsewhere_is_no_failure(disk_store, automatic, caplog):
    commit_all(disk_store, [1, 2])
    lock = LocalBackend(repository_of(disk_store).backend.root).try_lock("gc.lock")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        automatic.after_commit(1)
        automatic.wait(240)
    lock.close()
    assert caplog.text == ""


def test_store_in_memory_is_collected_at_once(store):
    commit_all(store, [1, 2])
    made = AutomaticGc(repository_of(store), LAST_ONE)
    made.after_commit(1)
    assert not made.is_running
    assert store.steps() == [2]
    made.close()


def test_other_runs_are_left_alone(folder, disk_store):
    commit_all(disk_store, [1, 2])
    with ckstore.open(folder, run="other") as other:
        other.commit({"w": np.arange(4)}, 1)
        other.commit({"w": np.arange(5)}, 2)
        made = AutomaticGc(repository_of(other), LAST_ONE)
        made.after_commit(1)
        made.wait(240)
        made.close()
        assert other.steps() == [2]
        assert disk_store.steps() == [1, 2]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_number_of_commits_is_checked(store, every):
    with pytest.raises(UsageError, match="gc_every"):
        AutomaticGc(repository_of(store), LAST_ONE, every=every)


def test_collection_that_is_let_go_of_ends_by_itself(disk_store):
    commit_all(disk_store, [1, 2])
    made = AutomaticGc(repository_of(disk_store), LAST_ONE)
    made.after_commit(1)
    child = made._child.process
    made.close()
    made.close()
    deadline = time.monotonic() + 240
    while disk_store.steps() != [2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert disk_store.steps() == [2]
    child.returncode = None
    child.wait(240)


def test_handle_collects_after_the_commits_it_is_told_of(disk_store):
    keeping = keeper(disk_store)
    keeping._committed(0)
    keeping._collect_after(LAST_ONE, 3)
    commit_all(disk_store, [1, 2, 3])
    for seq in range(3):
        keeping._committed(seq)
    keeping._automatic.wait(240)
    assert disk_store.steps() == [3]
    keeping.close()
    keeping.close()
