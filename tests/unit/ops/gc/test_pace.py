"""Protects commits during a collection: the collector pauses for writers, and syncs and frees in small portions."""

from __future__ import annotations

import os
import socket

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, encode_record
from ckstore.io.local import LocalBackend
from ckstore.ops.gc import run as collection
from ckstore.ops.gc import run as gc_pace
from ckstore.ops.gc.run import ThrottledBackend, someone_writes, throttled
from ckstore.processes import boot_identity, process_started
from support.gc_histories import LAST_ONE, check_restores, commit_all, other_handle


class RecordingClock:
    """A clock that advances with every reading, and records the time slept."""

    def __init__(self, step=0.001):
        self.step, self.now, self.slept = step, 0.0, []

    def now_ns(self):
        return 10**18

    def monotonic(self):
        self.now += self.step
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)


def put_lease(backend, run="main", **changes):
    """Write the lease of a living process: this one's parent."""
    pid = os.getppid()
    facts = {
        "host": socket.gethostname(),
        "boot_id": boot_identity(),
        "pid": pid,
        "process_started": process_started(pid),
        "token": "ab" * 16,
        "acquired_ns": 1,
        "heartbeat_ns": 1,
        "purpose": "",
    }
    name = paths.lease_name(run)
    if backend.stat(name) is not None:
        backend.unlink(name)
    backend.create(name, encode_record(LeaseRecord(**{**facts, **changes})), sync=False)


@pytest.fixture
def backend(folder):
    ckstore.open(folder).close()
    return LocalBackend(folder)


def test_pauses_follow_disk_work_only(backend):
    clock = RecordingClock()
    slow = ThrottledBackend(backend.root, clock)
    slow.create("tmp/a", b"1", sync=False)
    slow.link("tmp/a", "tmp/b")
    slow.rename("tmp/b", "tmp/c")
    assert clock.slept == []
    slow.create("tmp/d", b"1", sync=True)
    slow.sync_file("tmp/a")
    slow.sync_folder("tmp")
    slow.unlink("tmp/a")
    assert clock.slept == pytest.approx([gc_pace.REST * clock.step] * 4)
    with pytest.raises(FileNotFoundError):
        slow.unlink("tmp/a")
    assert len(clock.slept) == 4


def test_pauses_are_bounded(backend, monkeypatch):
    monkeypatch.setattr(gc_pace, "TOTAL_SECONDS_MAX", gc_pace.REST_SECONDS_MAX + 0.05)
    clock = RecordingClock(step=50.0)
    slow = ThrottledBackend(backend.root, clock)
    for _ in range(3):
        slow.sync_folder("tmp")
    assert clock.slept == [gc_pace.REST_SECONDS_MAX, pytest.approx(0.05)]


def test_only_other_living_writers_cause_pauses(backend):
    clock = RecordingClock()
    assert not someone_writes(backend, clock)
    with ckstore.open(backend, run="own") as store:
        commit_all(store, [1])
        assert not someone_writes(backend, clock), "a writer in the collecting process does not count"
        put_lease(backend)
        assert someone_writes(backend, clock)
    put_lease(backend, process_started="1")
    assert not someone_writes(backend, clock)
    put_lease(backend, boot_id="m/b/n", host="elsewhere", heartbeat_ns=clock.now_ns() - 10**9)
    assert someone_writes(backend, clock)
    put_lease(backend, boot_id="m/b/n", host="elsewhere", heartbeat_ns=clock.now_ns() - 10**12)
    assert not someone_writes(backend, clock)
    assert throttled(backend, clock) is backend


def test_gc_during_writing_gives_the_same_result(disk_store, monkeypatch):
    commit_all(disk_store, range(5))
    put_lease(repository_of(disk_store).backend, "other")
    acted = []
    collect = collection.collect
    monkeypatch.setattr(collection, "collect", lambda parts, *rest: acted.append(parts) or collect(parts, *rest))
    done = other_handle(disk_store).gc(LAST_ONE, now=True, min_age=0).done
    assert [type(parts.backend) for parts in acted] == [ThrottledBackend]
    assert len(done.dropped) == 4
    assert done.freed_files >= 7
    check_restores(disk_store, [4])


def test_intents_of_many_drops_are_synced_once(disk_store, monkeypatch):
    commit_all(disk_store, range(20))
    made = []
    create = LocalBackend.create

    def recorded_create(backend, name, content, *, sync):
        made.extend([name] if sync else [])
        create(backend, name, content, sync=sync)

    monkeypatch.setattr(LocalBackend, "create", recorded_create)
    other_handle(disk_store).gc(LAST_ONE, now=True, min_age=0)
    assert len([name for name in made if name.endswith(".intent")]) == 1
    check_restores(disk_store, [19])
    assert not [name for name in repository_of(disk_store).backend.list_names("claims/main") if "intent" in name]
