"""Protects process checks: they use the kernel and our own /proc, and never report a living writer as dead."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import dataclass

import pytest

from ckstore import processes
from ckstore.background.protocol import ProcessWatch
from ckstore.background.saver.server import Priority
from ckstore.processes import (
    StopTimer,
    boot_identity,
    is_running,
    is_stopped,
    owner_is_running,
    proc_is_ours,
    process_started,
)

STAT = "{pid} (a) b) {state} " + " ".join(["0"] * 18) + " {started} 0 0\n"


@pytest.fixture
def child():
    """Return a process that runs until it is killed."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def foreign_proc(tmp_path, monkeypatch, request):
    """A /proc of another pid namespace: this process has another number or none, and our pids name other processes."""
    folder = tmp_path / "proc"
    here = folder / "self"
    here.mkdir(parents=True)
    (here / "status").write_text(f"Name:\tpython\nNSpid:\t777\t{os.getpid()}\n")
    (here / "stat").write_text(STAT.format(pid=777, state="R", started=4242))
    for pid in (os.getpid(), os.getppid()):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "stat").write_text(STAT.format(pid=pid, state="Z", started=1))
    monkeypatch.setattr(processes, "PROC", folder)
    return folder


@dataclass(frozen=True)
class Maker:
    boot_id: str
    pid: int
    process_started: str


def test_proc_of_another_namespace_is_detected(foreign_proc, monkeypatch):
    assert not proc_is_ours()
    (foreign_proc / "self/status").write_text(f"NSpid:\t{os.getpid()}\n")
    assert proc_is_ours()
    monkeypatch.undo()
    assert proc_is_ours()


@pytest.mark.parametrize("status", ["", "Name:\tx\n"], ids=["empty", "no NSpid"])
def test_proc_is_checked_by_self_link_without_nspid(foreign_proc, status):
    (foreign_proc / "self/status").write_text(status)
    assert not proc_is_ours()


def test_proc_without_this_process_is_not_ours(foreign_proc):
    (foreign_proc / "self/status").unlink()
    assert not proc_is_ours()


def test_living_process_is_alive_under_foreign_proc(foreign_proc, child):
    for pid in (os.getppid(), child.pid):
        assert is_running(pid, "17") is None
        assert process_started(pid) is None


def test_dead_process_is_dead_under_foreign_proc(foreign_proc):
    process = subprocess.Popen(["true"])
    (foreign_proc / str(process.pid)).mkdir()
    (foreign_proc / str(process.pid) / "stat").write_text(STAT.format(pid=process.pid, state="R", started=17))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(process.pid, "17") is False, "a zombie"
    process.wait()
    assert is_running(process.pid, "17") is False


def test_own_identity_holds_under_any_proc(foreign_proc):
    assert process_started(os.getpid()) == "4242"
    assert is_running(os.getpid(), "4242") is True
    assert is_running(os.getpid(), "4241") is False


def test_process_is_identified_by_pid_and_start(child):
    started = process_started(child.pid)
    assert is_running(child.pid, started) is True
    assert is_running(child.pid, started + "0") is False
    assert is_running(child.pid, "") is None, "the pid may have been reused"
    child.kill()
    child.wait()
    assert is_running(child.pid, started) is False


def test_stopped_process_is_alive():
    with subprocess.Popen(["sleep", "600"]) as process:
        started = process_started(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        assert is_running(process.pid, started) is True
        process.kill()


def test_stops_are_timed():
    with subprocess.Popen(["sleep", "600"]) as process:
        timer = StopTimer(process.pid)
        assert [timer.seconds(now) for now in (0.0, 1.0)] == [0.0, 0.0]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        # From the first call that finds it stopped, and at most a second for each call.
        assert [timer.seconds(now) for now in (2.0, 3.0, 3.1, 4.0, 60.0)] == [0.0, 1.0, 1.0, 2.0, 3.0]
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert timer.seconds(61.0) == 0.0
        process.kill()


@pytest.mark.parametrize("refusal", [PermissionError, OSError, AttributeError])
def test_without_pidfd_a_signal_is_used(monkeypatch, child, refusal):
    def refuse(pid):
        raise refusal(38, "refused")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert is_running(child.pid, process_started(child.pid)) is True
    child.kill()
    child.wait()
    assert is_running(child.pid, "1") is False


def test_hidden_process_is_not_dead(monkeypatch, tmp_path, child):
    # Another user's process, in a /proc that hides it (hidepid=2).
    def refuse(*_):
        raise PermissionError(1, "refused")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert is_running(child.pid, "17") is None
    monkeypatch.undo()


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 40])
def test_invalid_pid_gives_no_answer(pid):
    assert is_running(pid, "17") is None


def test_process_name_in_invalid_utf8_is_read(tmp_path, monkeypatch):
    stat = STAT.format(pid=1, state="T", started=9).encode().replace(b"(a)", b"(\xff\xfe)")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_bytes(stat)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert process_started(os.getpid()) == "9"
    assert is_stopped(os.getpid())


@pytest.mark.parametrize("change", ["another boot", "another namespace", "a twin without a machine id", ""])
def test_maker_of_another_boot_or_namespace_is_unknown(change):
    machine, boot, namespace = boot_identity().split("/")
    other = {
        "another boot": f"{machine}/other/{namespace}",
        "another namespace": f"{machine}/{boot}/pid:[1]",
        "a twin without a machine id": f"/{boot}/{namespace}",
        "": "",
    }[change]
    assert owner_is_running(Maker(other, os.getpid(), "1")) is None
    assert owner_is_running(Maker(boot_identity(), os.getpid(), "1")) is False
    assert owner_is_running(Maker(boot_identity(), os.getpid(), process_started(os.getpid()))) is True


def test_watch_keeps_a_living_process_under_foreign_proc(foreign_proc, child):
    watch = ProcessWatch(child.pid, process_started(child.pid) or "")
    try:
        assert watch.is_alive
        child.kill()
        child.wait()
        assert not watch.is_alive
    finally:
        watch.close()


def test_niceness_changes_no_process_under_foreign_proc(foreign_proc, monkeypatch):
    # There, our thread ids name threads of other processes.
    touched = set()
    monkeypatch.setattr(os, "setpriority", lambda which, who, nice: touched.add(who))
    Priority(5).use_low_priority()
    assert touched == {thread.native_id for thread in threading.enumerate()} | {os.getpid()}
