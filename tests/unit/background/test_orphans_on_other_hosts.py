"""Protects a trainer that restarts on another node of a shared file system, where /proc does not show its saver.

The lease is read instead. In it a saver records that its trainer is gone, and its own heartbeat.
"""

from __future__ import annotations

import logging
import os
import socket

import pytest
from msgspec.structs import replace

from ckstore._testing import repository_of
from ckstore.errors import BackendError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, encode_record
from ckstore.processes import boot_identity, process_started
from ckstore.store.lease import STALE_SECONDS, Lease
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose

PATH = paths.lease_name("main")
LEFT = LeaseRecord(
    host="node-a",
    boot_id="machine-a/boot/namespace",
    pid=4711,
    process_started="17",
    token="ab" * 16,
    acquired_ns=1,
    heartbeat_ns=1,
    purpose=SaverPurpose(4710, TRAINER_DEAD, 5).text,
)
"""A lease record of a saver on another node whose trainer is gone."""


@pytest.fixture
def run(store, backend, monkeypatch):
    """Return the backend of a run that has a checkpoint and no writer."""
    monkeypatch.setattr("ckstore.store.orphans._silent", {})
    store.commit({"a": 1}, 1)
    repository_of(store).lease.release()
    return backend


def put(backend, record):
    if backend.stat(PATH) is not None:
        backend.unlink(PATH)
    backend.create(PATH, encode_record(record), sync=False)


def test_saver_without_heartbeat_is_awaited_once(run, clock, caplog):
    put(run, LEFT)
    lease = Lease(run, "main", clock)
    with caplog.at_level(logging.WARNING, "ckstore"):
        assert lease.wait_for_orphan()
    assert STALE_SECONDS <= clock.slept < STALE_SECONDS + 2
    assert "waiting for the saver (pid 4711 on host node-a) of the trainer that died to publish step 5" in caplog.text
    assert "the heartbeat of that saver has stopped" in caplog.text
    # A later call, another handle, and taking the lease do not wait for it again.
    slept = clock.slept
    assert not lease.wait_for_orphan()
    lease = Lease(run, "main", clock)
    assert not lease.wait_for_orphan()
    lease.take()
    assert clock.slept == slept
    lease.release()


def test_saver_with_heartbeat_is_awaited_without_limit(run, clock):
    put(run, LEFT)

    def beat():
        if clock.slept > 20 * STALE_SECONDS:
            run.unlink(PATH)
        elif round(clock.slept) % 5 == 0:
            put(run, replace(LEFT, heartbeat_ns=round(clock.slept)))

    clock.on_sleep = beat
    assert Lease(run, "main", clock).wait_for_orphan()
    assert clock.slept > 20 * STALE_SECONDS


def test_transient_read_errors_do_not_end_the_wait(run, clock, monkeypatch):
    put(run, LEFT)
    read, asked = run.read_bytes, []

    def seldom(*words, **more):
        asked.append(clock.slept)
        if clock.slept < STALE_SECONDS / 2 and len(asked) % 3 == 2:
            raise BackendError("a stale file handle")
        return read(*words, **more)

    monkeypatch.setattr(run, "read_bytes", seldom)
    assert Lease(run, "main", clock).wait_for_orphan()
    assert STALE_SECONDS <= clock.slept < STALE_SECONDS + 2


def test_lasting_read_errors_end_the_wait(run, clock, monkeypatch):
    put(run, LEFT)
    lease = Lease(run, "main", clock)
    read = run.read_bytes

    def once(*words, **more):
        if clock.slept:
            raise BackendError("gone")
        return read(*words, **more)

    monkeypatch.setattr(run, "read_bytes", once)
    assert lease.wait_for_orphan()
    assert STALE_SECONDS <= clock.slept < STALE_SECONDS + 2


def test_read_errors_do_not_end_the_wait_for_a_local_orphan(run, clock, monkeypatch):
    # The lease names this process's parent, which lives, as the saver of a dead trainer.
    parent = os.getppid()
    here = {"boot_id": boot_identity(), "pid": parent, "process_started": process_started(parent)}
    put(run, replace(LEFT, **here))
    read = run.read_bytes

    def seldom(*words, **more):
        if 0 < clock.slept < 1:
            raise BackendError("a stale file handle")
        if clock.slept > 2:
            run.unlink(PATH)
        return read(*words, **more)

    monkeypatch.setattr(run, "read_bytes", seldom)
    assert Lease(run, "main", clock).wait_for_orphan()
    assert clock.slept > 2


def test_saver_without_boot_id_does_not_wait_for_itself(run, clock, monkeypatch):
    me = {"host": socket.gethostname(), "pid": os.getpid(), "process_started": process_started(os.getpid())}
    monkeypatch.setattr("ckstore.processes.boot_identity", lambda: "")
    put(run, replace(LEFT, boot_id="", **me))
    assert not Lease(run, "main", clock).wait_for_orphan()
    put(run, replace(LEFT, boot_id=""))
    clock.on_sleep = lambda: run.unlink(PATH)
    assert Lease(run, "main", clock).wait_for_orphan(), "only heartbeats show whether it lives"


def test_resumed_heartbeat_is_awaited_again(run, clock):
    put(run, LEFT)
    lease = Lease(run, "main", clock)
    assert lease.wait_for_orphan()
    put(run, replace(LEFT, heartbeat_ns=2))
    assert lease.wait_for_orphan()


def test_released_lease_ends_the_wait(run, clock):
    put(run, LEFT)
    clock.on_sleep = lambda: run.unlink(PATH)
    assert Lease(run, "main", clock).wait_for_orphan()
    assert clock.slept < 1


def test_lease_of_a_new_writer_ends_the_wait(run, clock):
    put(run, LEFT)
    clock.on_sleep = lambda: put(run, replace(LEFT, token="cd" * 16, purpose=""))
    assert Lease(run, "main", clock).wait_for_orphan()
    assert clock.slept < 1


@pytest.mark.parametrize(
    "facts",
    [
        {"purpose": ""},
        {"purpose": SaverPurpose(4710, "16", 5).text},
        {"boot_id": boot_identity(), "pid": 4_000_000},
    ],
    ids=["trainer", "saver-of-a-trainer-that-is-not-known-to-be-gone", "died-here"],
)
def test_other_holders_are_not_awaited(run, clock, facts):
    put(run, replace(LEFT, **facts))
    assert not Lease(run, "main", clock).wait_for_orphan()
    assert clock.slept == 0


def test_saver_of_same_host_name_and_other_boot_is_awaited(run, clock, monkeypatch):
    # It may be a clone of this machine, made from the same image.
    put(run, LEFT)
    monkeypatch.setattr("socket.gethostname", lambda: "node-a")
    monkeypatch.setattr("ckstore.processes.boot_identity", lambda: "machine-a/later/namespace")
    clock.on_sleep = lambda: run.unlink(PATH)
    assert Lease(run, "main", clock).wait_for_orphan()
