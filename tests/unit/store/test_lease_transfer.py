"""Protects lease transfer to a saver: the lease always exists, and no other holder's lease is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from ckstore import processes
from ckstore.clock import SYSTEM_CLOCK, SystemClock
from ckstore.errors import BackendError, ConflictError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord, encode_record, with_changes
from ckstore.io.memory import MemoryBackend
from ckstore.processes import boot_identity, is_stopped, process_started
from ckstore.store.lease import Lease
from ckstore.store.orphans import TRAINER_DEAD, SaverPurpose, read_lease

PATH = paths.lease_name("main")


class WatchedBackend(MemoryBackend):
    """Record after each change whether the lease exists, and fail on request."""

    def __init__(self):
        super().__init__()
        self.found, self.is_broken = [], False

    def link(self, source, target):
        super().link(source, target)
        self._look()

    def rename(self, source, target):
        super().rename(source, target)
        self._look()

    def rename_new(self, source, target):
        super().rename_new(source, target)
        self._look()

    def unlink(self, name):
        super().unlink(name)
        self._look()

    def create(self, name, content, *, sync):
        if self.is_broken:
            raise BackendError("the medium does not answer", where=name)
        super().create(name, content, sync=sync)

    def _look(self):
        self.found.append(self.stat(PATH) is not None)


@pytest.fixture
def backend():
    made = WatchedBackend()
    for folder in paths.TOP_FOLDERS:
        made.make_folder(folder)
    return made


@pytest.fixture
def saver():
    """A living process. Its lease record looks like a saver's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def put(backend, pid, **facts):
    """Write the lease of a process of this boot."""
    record = LeaseRecord(
        host=os.uname().nodename, boot_id=boot_identity(), pid=pid, process_started=process_started(pid) or "1",
        token="ab" * 16, acquired_ns=1, heartbeat_ns=1,
    )  # fmt: skip
    backend.create(PATH, encode_record(with_changes(record, **facts)), sync=False)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.001)


def drafts(backend):
    return [name for name in backend.list_names(paths.TMP_FOLDER) if name.endswith(".lease")]


def assert_transferred(backend, saver, step):
    holder = read_lease(backend, "main")
    assert (holder.pid, holder.process_started) == (saver, process_started(saver))
    assert SaverPurpose.of(holder.purpose) == SaverPurpose(os.getpid(), process_started(os.getpid()), step)
    assert drafts(backend) == []


def test_free_lease_is_written_for_the_saver(backend, lease, saver):
    assert lease.transfer_to(saver, 7)
    assert_transferred(backend, saver, 7)
    assert not lease.is_held
    with pytest.raises(ConflictError, match=f"pid {saver} .*the saver of pid {os.getpid()}"):
        Lease(backend, "main", SYSTEM_CLOCK).take()


def test_held_lease_is_transferred_atomically(backend, lease, saver):
    lease.take()
    backend.found.clear()
    assert lease.transfer_to(saver, 7)
    assert_transferred(backend, saver, 7)
    assert all(backend.found)
    # A heartbeat in progress does not write the old lease again.
    lease.renew()
    assert_transferred(backend, saver, 7)


def test_second_transfer_changes_nothing(backend, lease, saver):
    token = lease.transfer_to(saver, 7)
    assert token == read_lease(backend, "main").token
    assert lease.transfer_to(saver, 8) == token
    assert read_lease(backend, "main").token == token
    assert drafts(backend) == []


def test_lease_of_dead_process_is_replaced(backend, lease, saver):
    with subprocess.Popen(["true"]) as dead:
        pass
    put(backend, dead.pid)
    assert lease.transfer_to(saver, 7)
    assert_transferred(backend, saver, 7)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_foreign_lease_is_left_to_the_saver_without_waiting(backend, lease, saver, where, monkeypatch):
    facts = {} if where == "here" else {"host": "elsewhere", "boot_id": "another boot/another namespace"}
    put(backend, os.getppid(), **facts)
    monkeypatch.setattr(SystemClock, "sleep", lambda *_: pytest.fail("it waits"))
    assert not lease.transfer_to(saver, 7)
    assert read_lease(backend, "main").pid == os.getppid()
    assert drafts(backend) == []


def test_lost_lease_is_not_transferred(backend, lease, saver):
    lease.take()
    backend.unlink(PATH)
    put(backend, os.getppid())
    assert not lease.transfer_to(saver, 7)
    assert not lease.is_held
    assert read_lease(backend, "main").pid == os.getppid()


def test_failed_transfer_releases_the_lease(backend, lease, saver):
    lease.take()
    backend.is_broken = True
    assert not lease.transfer_to(saver, 7)
    assert not lease.is_held
    assert read_lease(backend, "main") is None


@pytest.mark.parametrize("unknown", ["boot_identity", "process_started"])
def test_no_transfer_without_process_identity(backend, lease, saver, monkeypatch, unknown):
    monkeypatch.setattr(processes, unknown, lambda *_: "")
    assert not lease.transfer_to(saver, 7)
    assert read_lease(backend, "main") is None


def test_no_transfer_to_a_dead_saver(backend, lease):
    with subprocess.Popen(["true"]) as dead:
        pass
    assert not lease.transfer_to(dead.pid, 7)
    assert read_lease(backend, "main") is None


# The saver's side


def test_saver_adopts_and_releases_the_lease(backend, lease):
    assert lease.transfer_to(os.getpid(), 7)
    token = read_lease(backend, "main").token
    mine = Lease(backend, "main", SYSTEM_CLOCK)
    assert mine.accept_transfer().token == token
    assert mine.is_held
    assert mine.accept_transfer() is None, "there is nothing to report"
    mine.purpose = "its own"
    mine.renew()
    assert (read_lease(backend, "main").token, read_lease(backend, "main").purpose) == (token, "its own")
    # Acquiring it returns the same lease.
    backend.found.clear()
    mine.take()
    assert backend.found == []
    mine.release()
    assert read_lease(backend, "main") is None


def test_waiting_saver_adopts_a_lease_transferred_meanwhile(backend, lease, clock, monkeypatch):
    put(backend, os.getppid(), host="elsewhere", boot_id="another boot/another namespace")
    mine = Lease(backend, "main", clock)
    rename_new = backend.rename_new

    def vanish_then_transfer(source, target):
        """Remove the other holder's lease before it can be moved away, then transfer ours."""
        try:
            rename_new(source, target)
        except FileNotFoundError:
            assert lease.transfer_to(os.getpid(), 7)
            raise

    monkeypatch.setattr(backend, "rename_new", vanish_then_transfer)
    clock.on_sleep = lambda: backend.unlink(PATH)
    mine.take()
    assert mine.is_held
    assert SaverPurpose.of(read_lease(backend, "main").purpose).step == 7, "it is the transferred lease"
    mine.release()


def test_saver_adopts_again_after_losing_the_lease(backend, lease):
    mine = Lease(backend, "main", SYSTEM_CLOCK)
    mine.take()
    backend.unlink(PATH)
    token = lease.transfer_to(os.getpid(), 7)
    assert mine.accept_transfer().token == token
    mine.check()
    mine.release()
    assert read_lease(backend, "main") is None


def test_lease_held_by_the_saver_is_not_transferred(backend, lease):
    lease.take()
    assert Lease(backend, "main", SYSTEM_CLOCK).accept_transfer() is None
    assert lease.is_held


def test_lease_of_another_saver_is_not_adopted(backend, lease, saver):
    assert lease.transfer_to(saver, 7)
    mine = Lease(backend, "main", SYSTEM_CLOCK)
    assert mine.accept_transfer() is None
    assert not mine.is_held
    mine.release()
    assert_transferred(backend, saver, 7)


def test_transferred_lease_counts_as_orphan_until_saver_writes(backend, lease, saver):
    lease.mark_trainer_dead()
    assert read_lease(backend, "main") is None
    token = lease.transfer_to(saver, 7)
    lease.mark_trainer_dead()
    holder = read_lease(backend, "main")
    assert SaverPurpose.of(holder.purpose) == SaverPurpose(os.getpid(), TRAINER_DEAD, 7)
    # After the saver's own heartbeat its fields count, unless it is stopped.
    for is_still in (False, True):
        backend.unlink(PATH)
        put(backend, saver, heartbeat_ns=2, token=token, purpose=SaverPurpose(os.getpid(), "1", 7).text)
        if is_still:
            stop(saver)
        lease.mark_trainer_dead()
        said = SaverPurpose.of(read_lease(backend, "main").purpose).trainer_started
        assert said == (TRAINER_DEAD if is_still else "1")


def test_lease_of_remote_saver_with_same_pid_stays(backend, lease, saver):
    assert lease.transfer_to(saver, 7)
    backend.unlink(PATH)
    put(backend, saver, host="elsewhere", boot_id="b", purpose=SaverPurpose(os.getpid(), "1", 7).text)
    lease.mark_trainer_dead()
    assert SaverPurpose.of(read_lease(backend, "main").purpose).trainer_started == "1"


@pytest.mark.parametrize("content", [b"", b"{", bytes(100)], ids=["empty", "torn", "zeros"])
def test_unreadable_lease_is_replaced(backend, lease, saver, content):
    backend.create(PATH, content, sync=False)
    assert lease.transfer_to(saver, 7)
    assert_transferred(backend, saver, 7)


def test_failing_backend_does_not_block_release(backend, lease, saver):
    assert lease.transfer_to(saver, 7)
    backend.is_broken = True
    lease.mark_trainer_dead()
    assert_transferred(backend, saver, 7)
