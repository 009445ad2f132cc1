"""Protects the lease: one living writer per run, a dead holder does not block, and no clock is trusted.

Safety does not depend on the lease. It protects people from training a run twice.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import BackendError, ConflictError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, decode_record, encode_record
from ckstore.io.memory import MemoryBackend
from ckstore.processes import boot_identity, is_stopped, process_started
from ckstore.store.lease import STALE_SECONDS, Lease

SRC = str(Path(ckstore.__file__).parent.parent)
PATH = paths.lease_name("main")


@pytest.fixture
def backend():
    made = MemoryBackend()
    for folder in paths.TOP_FOLDERS:
        made.make_folder(folder)
    return made


def put_holder(backend, **facts):
    """Write the lease of another process."""
    record = {
        "host": "elsewhere",
        "boot_id": "another boot/another namespace",
        "pid": 4711,
        "process_started": "17",
        "token": "ab" * 16,
        "acquired_ns": 1,
        "heartbeat_ns": 1,
        **facts,
    }
    if backend.stat(PATH) is not None:
        backend.unlink(PATH)
    backend.create(PATH, encode_record(LeaseRecord(**record)), sync=False)


def holder_of(backend):
    return decode_record(backend.read_bytes(PATH, nbytes_max=4096), LeaseRecord)


def is_holding(lease):
    try:
        lease.check()
    except ConflictError:
        return False
    return True


def dead_process():
    """Return pid and start time of a process that has just died."""
    with subprocess.Popen(["sleep", "60"]) as process:
        started = process_started(process.pid)
        process.kill()
    assert started is not None
    return process.pid, started


def test_lease_names_this_process(backend, lease):
    lease.take()
    holder = holder_of(backend)
    assert (holder.pid, holder.boot_id) == (os.getpid(), boot_identity())
    assert holder.process_started == process_started(os.getpid())
    assert backend.list_names("tmp") == []


def test_acquiring_again_keeps_the_lease(backend, lease):
    lease.take()
    token = holder_of(backend).token
    lease.take()
    assert holder_of(backend).token == token


def test_acquiring_again_restarts_an_interrupted_heartbeat(lease, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        lease.take()
    monkeypatch.undo()
    assert lease.is_held
    lease.take()
    assert "ckstore-lease" in [thread.name for thread in threading.enumerate()]


def test_heartbeat_advances_while_held(backend, lease, monkeypatch):
    monkeypatch.setattr("ckstore.store.lease.HEARTBEAT_SECONDS", 0.005)
    lease.take()
    seen = [holder_of(backend).heartbeat_ns]
    deadline = time.monotonic() + 30
    while len(seen) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
        if (now := holder_of(backend).heartbeat_ns) != seen[-1]:
            seen.append(now)
    assert len(seen) == 4
    assert seen == sorted(seen)


def test_missing_lease_is_logged_after_two_heartbeats(backend, lease, caplog, monkeypatch):
    lease.take()

    def gone(*given, **named):
        raise FileNotFoundError(2, "No such file or directory", "tmp/x.lease")

    monkeypatch.setattr(backend, "create", gone)
    lease.renew()
    assert caplog.text == ""
    lease.renew()
    assert "could not renew the writer lease" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    lease.renew()
    assert caplog.text == ""


def test_second_handle_is_refused_with_holder(backend, lease):
    lease.take()
    with pytest.raises(ConflictError, match=f"pid {os.getpid()} on host") as caught:
        Lease(backend, "main", SYSTEM_CLOCK).take()
    assert caught.value.pid == os.getpid()
    lease.check()


def test_each_run_has_its_own_lease(backend, lease):
    lease.take()
    other = Lease(backend, "other", SYSTEM_CLOCK)
    other.take()
    lease.check()
    other.check()
    other.release()


def test_released_lease_is_free(backend, lease):
    lease.take()
    lease.release()
    assert backend.stat(PATH) is None
    other = Lease(backend, "main", SYSTEM_CLOCK)
    other.take()
    other.release()


def test_dropped_handle_releases_its_lease(backend):
    forgotten = Lease(backend, "main", SYSTEM_CLOCK)
    forgotten.take()
    del forgotten
    gc.collect()
    other = Lease(backend, "main", SYSTEM_CLOCK)
    other.take()
    other.check()
    other.release()


def test_dead_local_holder_is_replaced_immediately(backend, clock):
    pid, started = dead_process()
    put_holder(backend, boot_id=boot_identity(), pid=pid, process_started=started, heartbeat_ns=clock.now_ns())
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept == 0
    lease.check()
    lease.release()


def test_reused_pid_is_not_the_holder(backend, clock):
    put_holder(backend, boot_id=boot_identity(), pid=os.getppid(), process_started="1")
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept == 0
    lease.release()


def test_zombie_is_dead():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process_started(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_started(process.pid) is None


def test_living_local_holder_keeps_lease_without_heartbeat(backend, clock):
    parent = os.getppid()
    started = process_started(parent)
    put_holder(backend, boot_id=boot_identity(), pid=parent, process_started=started, heartbeat_ns=1)
    with pytest.raises(ConflictError, match=f"pid {parent}"):
        Lease(backend, "main", clock).take()
    assert clock.slept == 0


def test_remote_holder_without_heartbeat_is_replaced(backend, clock, caplog):
    put_holder(backend)
    lease = Lease(backend, "main", clock)
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.take()
    assert STALE_SECONDS <= clock.slept < STALE_SECONDS + 2
    assert "pid 4711 on host elsewhere" in caplog.text
    assert "waiting" in caplog.text
    assert holder_of(backend).pid == os.getpid()
    lease.release()


def test_old_timestamp_alone_does_not_prove_death(backend, clock):
    # Its clock may be wrong. Only a heartbeat that does not change while we watch proves death.
    put_holder(backend, heartbeat_ns=1)
    beats = iter(range(2, 1000))
    clock.on_sleep = lambda: put_holder(backend, heartbeat_ns=next(beats))
    with pytest.raises(ConflictError, match="pid 4711 on host elsewhere") as caught:
        Lease(backend, "main", clock).take()
    assert caught.value.host == "elsewhere"
    assert clock.slept < STALE_SECONDS


def test_released_remote_lease_is_taken_immediately(backend, clock):
    put_holder(backend)
    clock.on_sleep = lambda: backend.stat(PATH) and backend.unlink(PATH)
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept < 2
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 300], ids=["empty", "torn", "zeros"])
def test_unreadable_lease_does_not_block(backend, clock, content):
    backend.create(PATH, content, sync=False)
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept == 0
    lease.check()
    lease.release()


def test_check_detects_takeover(backend, lease):
    lease.take()
    put_holder(backend)
    with pytest.raises(ConflictError, match="taken over by pid 4711 on host elsewhere"):
        lease.check()


def test_release_leaves_the_new_holders_lease(backend, lease):
    lease.take()
    put_holder(backend)
    lease.release()
    assert holder_of(backend).pid == 4711


def test_renewal_changes_only_the_heartbeat(backend, clock):
    lease = Lease(backend, "main", clock)
    lease.take()
    before = holder_of(backend)
    clock.now += 3
    lease.renew()
    after = holder_of(backend)
    assert after.heartbeat_ns > before.heartbeat_ns
    assert (after.token, after.acquired_ns, after.pid) == (before.token, before.acquired_ns, before.pid)
    assert backend.list_names("tmp") == []
    lease.release()


def test_renewal_does_not_touch_another_lease(backend, lease):
    lease.take()
    put_holder(backend)
    lease.renew()
    assert holder_of(backend).pid == 4711


def test_failed_renewal_is_logged_and_retried(backend, lease, monkeypatch, caplog):
    lease.take()

    def fail(*_, **__):
        raise BackendError("writing failed")

    monkeypatch.setattr(backend, "create", fail)
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.renew()
    assert "could not renew" in caplog.text
    lease.check()


@pytest.mark.parametrize("call", ["create", "read_bytes"])
def test_raising_log_filter_does_not_end_the_heartbeat(backend, lease, monkeypatch, call):
    # Other hosts would take over a lease without heartbeats.
    def fail(*_, **__):
        raise BackendError("the medium failed")

    def cannot(record):
        raise ValueError("a filter of the user's")

    lease.take()
    with monkeypatch.context() as broken:
        broken.setattr(backend, call, fail)
        logger = logging.getLogger("ckstore")
        logger.addFilter(cannot)
        try:
            lease.renew()
        finally:
            logger.removeFilter(cannot)
    lease.check()


def test_renewal_does_not_recreate_a_released_lease(backend, lease, monkeypatch):
    lease.take()
    create, is_writing, may_go_on = backend.create, threading.Event(), threading.Event()

    def slow(name, content, *, sync):
        is_writing.set()
        may_go_on.wait(60)
        create(name, content, sync=sync)

    monkeypatch.setattr(backend, "create", slow)
    renewal, release = threading.Thread(target=lease.renew), threading.Thread(target=lease.release)
    renewal.start()
    assert is_writing.wait(60)
    release.start()
    release.join(0.1)
    may_go_on.set()
    renewal.join()
    release.join()
    assert backend.stat(PATH) is None


def test_renewal_writes_the_current_purpose(backend, lease):
    lease.take()
    assert holder_of(backend).purpose == ""
    lease.purpose = "saver:1:2:3"
    lease.renew()
    assert holder_of(backend).purpose == "saver:1:2:3"


def test_concurrent_takeovers_leave_one_holder(backend):
    pid, started = dead_process()
    for _ in range(20):
        put_holder(backend, boot_id=boot_identity(), pid=pid, process_started=started)
        leases = [Lease(backend, "main", SYSTEM_CLOCK) for _ in range(6)]
        barrier = threading.Barrier(len(leases))
        taken = []

        def take(lease, barrier=barrier, taken=taken):
            barrier.wait()
            try:
                lease.take()
                taken.append(lease)
            except ConflictError:
                pass

        threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(is_holding(lease) for lease in taken) == 1
        for lease in leases:
            lease.release()
        assert backend.stat(PATH) is None
        assert backend.list_names("tmp") == []


def test_dead_holder_with_living_child_is_replaced(folder, clock):
    # The child keeps a flock or a pipe open.
    code = f"""
import os, sys, time
sys.path.insert(0, {SRC!r})
import ckstore
store = ckstore.open(sys.argv[1])
store.commit({{"a": 1}}, 1)
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            with ckstore.open(folder) as store, pytest.raises(ConflictError, match=f"pid {process.pid} "):
                store.commit({"a": 2}, 2)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process_started(child) is not None
            with ckstore.open(folder, clock=clock) as store:
                store.commit({"a": 2}, 2)
                assert store.steps() == [1, 2]
            assert clock.slept == 0
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("beats", [True, False])
def test_cloned_host_is_judged_by_its_heartbeat(backend, clock, beats):
    # Machines cloned from one image share host name and machine id.
    machine, _, namespace = boot_identity().split("/")
    twin = {"host": socket.gethostname(), "boot_id": f"{machine}/another/{namespace}"}
    put_holder(backend, **twin)
    if beats:
        clock.on_sleep = lambda: put_holder(backend, **twin, heartbeat_ns=clock.now_ns())
        with pytest.raises(ConflictError, match="pid 4711"):
            Lease(backend, "main", clock).take()
        return
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept >= STALE_SECONDS
    lease.release()


def test_holder_outside_our_proc_is_judged_by_heartbeat(backend, clock, monkeypatch, tmp_path):
    here, parent = boot_identity(), os.getppid()
    started = process_started(parent)
    monkeypatch.setattr("ckstore.processes.proc_is_ours", lambda: False)
    put_holder(backend, boot_id=here, pid=parent, process_started=started)
    clock.on_sleep = lambda: put_holder(
        backend, boot_id=here, pid=parent, process_started=started, heartbeat_ns=clock.now_ns()
    )
    with pytest.raises(ConflictError, match=f"pid {parent}"):
        Lease(backend, "main", clock).take()


def test_stopped_process_is_distinguished_from_running():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
