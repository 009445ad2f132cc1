"""One live writer a run: a living holder is named, a dead one is no obstacle, and nothing hangs on a clock.

Safety never rests on the lease; these tests protect people from running a trainer twice.
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
    """Write the lease of someone else."""
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


def test_taking_again_keeps_what_is_held(backend, lease):
    lease.take()
    token = holder_of(backend).token
    lease.take()
    assert holder_of(backend).token == token


def test_taking_again_lets_a_heart_beat_that_ctrl_c_has_kept_from_it(lease, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        lease.take()
    monkeypatch.undo()
    assert lease.is_held
    lease.take()
    assert "ckstore-lease" in [thread.name for thread in threading.enumerate()]


def test_heartbeat_moves_for_as_long_as_the_lease_is_held(backend, lease, monkeypatch):
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


def test_heart_of_a_store_that_is_being_removed_says_so_only_if_it_is_still_gone_at_the_next_beat(
    backend, lease, caplog, monkeypatch
):
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


def test_second_handle_is_refused_and_told_who_holds_it(backend, lease):
    lease.take()
    with pytest.raises(ConflictError, match=f"pid {os.getpid()} on host") as caught:
        Lease(backend, "main", SYSTEM_CLOCK).take()
    assert caught.value.pid == os.getpid()
    lease.check()


def test_runs_have_leases_of_their_own(backend, lease):
    lease.take()
    other = Lease(backend, "other", SYSTEM_CLOCK)
    other.take()
    lease.check()
    other.check()
    other.release()


def test_released_lease_is_free_at_once(backend, lease):
    lease.take()
    lease.release()
    assert backend.stat(PATH) is None
    other = Lease(backend, "main", SYSTEM_CLOCK)
    other.take()
    other.release()


def test_forgotten_handle_does_not_hold_its_lease(backend):
    forgotten = Lease(backend, "main", SYSTEM_CLOCK)
    forgotten.take()
    del forgotten
    gc.collect()
    other = Lease(backend, "main", SYSTEM_CLOCK)
    other.take()
    other.check()
    other.release()


def test_dead_holder_on_this_host_is_replaced_without_waiting(backend, clock):
    pid, started = dead_process()
    put_holder(backend, boot_id=boot_identity(), pid=pid, process_started=started, heartbeat_ns=clock.now_ns())
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept == 0
    lease.check()
    lease.release()


def test_pid_that_was_given_to_another_process_is_no_holder(backend, clock):
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


def test_living_process_on_this_host_keeps_its_lease_whatever_its_heartbeat(backend, clock):
    parent = os.getppid()
    started = process_started(parent)
    put_holder(backend, boot_id=boot_identity(), pid=parent, process_started=started, heartbeat_ns=1)
    with pytest.raises(ConflictError, match=f"pid {parent}"):
        Lease(backend, "main", clock).take()
    assert clock.slept == 0


def test_holder_on_another_host_is_replaced_when_its_heartbeat_stands_still(backend, clock, caplog):
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
    # Its clock may be wrong: only a heartbeat that stands still while we watch counts.
    put_holder(backend, heartbeat_ns=1)
    beats = iter(range(2, 1000))
    clock.on_sleep = lambda: put_holder(backend, heartbeat_ns=next(beats))
    with pytest.raises(ConflictError, match="pid 4711 on host elsewhere") as caught:
        Lease(backend, "main", clock).take()
    assert caught.value.host == "elsewhere"
    assert clock.slept < STALE_SECONDS


def test_holder_on_another_host_that_leaves_is_replaced_at_once(backend, clock):
    put_holder(backend)
    clock.on_sleep = lambda: backend.stat(PATH) and backend.unlink(PATH)
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept < 2
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 300], ids=["empty", "torn", "zeros"])
def test_unreadable_lease_protects_nobody(backend, clock, content):
    backend.create(PATH, content, sync=False)
    lease = Lease(backend, "main", clock)
    lease.take()
    assert clock.slept == 0
    lease.check()
    lease.release()


def test_check_finds_that_another_took_over(backend, lease):
    lease.take()
    put_holder(backend)
    with pytest.raises(ConflictError, match="taken over by pid 4711 on host elsewhere"):
        lease.check()


def test_lost_lease_is_not_given_up_for_its_new_holder(backend, lease):
    lease.take()
    put_holder(backend)
    lease.release()
    assert holder_of(backend).pid == 4711


def test_renewal_moves_the_heartbeat_and_nothing_else(backend, clock):
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


def test_renewal_leaves_the_lease_of_another_alone(backend, lease):
    lease.take()
    put_holder(backend)
    lease.renew()
    assert holder_of(backend).pid == 4711


def test_renewal_that_fails_is_logged_and_goes_on(backend, lease, monkeypatch, caplog):
    lease.take()

    def fail(*_, **__):
        raise BackendError("writing failed")

    monkeypatch.setattr(backend, "create", fail)
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.renew()
    assert "could not renew" in caplog.text
    lease.check()


@pytest.mark.parametrize("call", ["create", "read_bytes"])
def test_a_log_filter_that_raises_does_not_end_the_heart(backend, lease, monkeypatch, call):
    # A lease without heartbeats looks dead to other hosts, which would take it over.
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


def test_renewal_that_has_begun_does_not_bring_back_what_was_given_up(backend, lease, monkeypatch):
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


def test_renewal_writes_what_the_lease_is_for_now(backend, lease):
    lease.take()
    assert holder_of(backend).purpose == ""
    lease.purpose = "saver:1:2:3"
    lease.renew()
    assert holder_of(backend).purpose == "saver:1:2:3"


def test_many_who_take_over_at_once_leave_one_holder(backend):
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


def test_dead_holder_with_a_living_forked_child_is_replaced_at_once(folder, clock):
    # A flock, or a pipe that closes, would be kept alive by the child.
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
def test_a_twin_in_another_boot_is_judged_by_its_heart(backend, clock, beats):
    # Machines of one image have one host name and one machine id.
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


def test_a_holder_under_anothers_proc_is_judged_by_its_heart(backend, clock, monkeypatch, tmp_path):
    here, parent = boot_identity(), os.getppid()
    started = process_started(parent)
    monkeypatch.setattr("ckstore.processes.proc_is_ours", lambda: False)
    put_holder(backend, boot_id=here, pid=parent, process_started=started)
    clock.on_sleep = lambda: put_holder(
        backend, boot_id=here, pid=parent, process_started=started, heartbeat_ns=clock.now_ns()
    )
    with pytest.raises(ConflictError, match=f"pid {parent}"):
        Lease(backend, "main", clock).take()


def test_stopped_process_is_told_from_one_that_runs():
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
