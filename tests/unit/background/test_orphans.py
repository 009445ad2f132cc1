"""Protects which saver a new trainer waits for: a living saver of a trainer that died on this boot, and no other."""

from __future__ import annotations

import logging
import os

import pytest

from ckstore import processes
from ckstore._testing import repository_of
from ckstore.errors import ConflictError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, encode_record
from ckstore.processes import boot_identity, process_started
from ckstore.store.lease import Lease
from ckstore.store.orphans import SaverPurpose, is_orphan


def put_holder(backend, **facts):
    record = {
        "host": os.uname().nodename,
        "boot_id": boot_identity(),
        "pid": os.getppid(),
        "process_started": process_started(os.getppid()),
        "token": "ab" * 16,
        "acquired_ns": 1,
        "heartbeat_ns": 1,
        "purpose": SaverPurpose(4_000_000, "17", 5).text,
        **facts,
    }
    path = paths.lease_name("main")
    if backend.stat(path) is not None:
        backend.unlink(path)
    backend.create(path, encode_record(LeaseRecord(**record)), sync=False)
    return LeaseRecord(**record)


@pytest.mark.parametrize(
    "facts",
    [
        {"purpose": ""},
        {"purpose": "something else"},
        {"purpose": "saver:x:17:5"},
        {"purpose": f"saver:{os.getpid()}:{process_started(os.getpid())}:5"},
        {"pid": 4_000_000},
        {"process_started": "1"},
        {"boot_id": "another/boot/namespace"},
        {"boot_id": ""},
    ],
    ids=["trainer", "other", "garbage", "trainer-lives", "dead", "pid-used-again", "elsewhere", "unknown-boot"],
)
def test_orphan_is_a_living_saver_of_a_dead_local_trainer(store, backend, clock, facts):
    store.commit({"a": 1}, 1)
    repository_of(store).lease.release()
    assert is_orphan(put_holder(backend))
    assert not is_orphan(put_holder(backend, **facts))
    assert not Lease(backend, "main", clock).wait_for_orphan()
    assert clock.slept == 0


def test_trainer_with_a_reused_pid_is_dead(store, backend, clock, caplog):
    store.commit({"a": 1}, 1)
    repository_of(store).lease.release()
    # In a container a restarted trainer often has the pid of the previous one.
    put_holder(backend, purpose=SaverPurpose(os.getpid(), "17", 5).text)
    clock.on_sleep = lambda: backend.unlink(paths.lease_name("main"))
    with caplog.at_level(logging.WARNING, "ckstore"):
        assert Lease(backend, "main", clock).wait_for_orphan()
    assert "of the trainer that died to publish step 5" in caplog.text


def test_wait_for_an_orphan_is_logged_repeatedly(store, backend, clock, caplog):
    store.commit({"a": 1}, 1)
    repository_of(store).lease.release()
    put_holder(backend)

    def leave_at_last():
        if clock.slept > 25:
            backend.unlink(paths.lease_name("main"))

    clock.on_sleep = leave_at_last
    with caplog.at_level(logging.WARNING, "ckstore"):
        assert Lease(backend, "main", clock).wait_for_orphan()
    assert caplog.text.count("to publish step 5") == 1
    assert caplog.text.count("still waiting for the saver") == 2


def test_a_stopped_orphan_is_named_where_others_wait(store, backend, clock, monkeypatch):
    store.commit({"a": 1}, 1)
    repository_of(store).lease.release()
    put_holder(backend)
    monkeypatch.setattr(processes, "is_stopped", lambda pid: True)
    lease = Lease(backend, "main", clock)
    lease.orphans.stopped_seconds_max = 15.0
    with pytest.raises(ConflictError, match="to publish step 5 is stopped") as caught:
        lease.wait_for_orphan()
    assert caught.value.pid == os.getppid()
    assert 15 <= clock.slept <= 17
    # One that is slow is waited for.
    monkeypatch.setattr(processes, "is_stopped", lambda pid: False)
    clock.on_sleep = lambda: clock.slept > 60 and backend.unlink(paths.lease_name("main"))
    assert lease.wait_for_orphan()


def test_purpose_round_trips():
    for purpose in (SaverPurpose(1, "2", 3), SaverPurpose(1, "2")):
        assert SaverPurpose.of(purpose.text) == purpose
    assert SaverPurpose.of("saver:1:2") is None
