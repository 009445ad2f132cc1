"""Protects background commits against failures: a full disk, an early exit, signals and races.

Each failure affects at most one commit, is reported, and loses nothing that was promised.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import background_of, saver_of
from ckstore.config import MIB
from ckstore.errors import CapacityError, MalformedError, SaverError
from ckstore.processes import JOB_SIGNALS
from support.fake_saver import state
from support.prepared_trainers import run_trainer
from support.saver_harness import SECONDS_MAX, SOURCE, SaverHarness, noise, until

pytestmark = pytest.mark.usefixtures("quiet_log")

POLICY = ckstore.Policy(saver_nice=0, threads=2)


@pytest.fixture
def store(folder):
    with ckstore.open(folder, policy=POLICY) as opened:
        yield opened


# A full disk


def test_file_size_limit_fails_one_commit(store):
    store.commit_async(noise(1, 2 * MIB), 1).result()
    pid = background_of(store).saver_pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    with pytest.raises(CapacityError):
        store.commit_async(noise(2), 2).result()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert store.commit_async(noise(3), 3).result().step == 3
    assert background_of(store).saver_pid == pid
    assert store.steps() == [1, 3]
    assert np.array_equal(store.restore()["w0"], noise(3)["w0"])
    assert not store.verify("decode").damage


@pytest.fixture
def small_disk(tmp_path, unmount):
    """A file system of 48 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(place)], check=False)
    if made.returncode != 0:
        pytest.skip("this machine mounts no tmpfs")
    yield place
    unmount(place)


@pytest.mark.root
def test_commits_work_after_full_disk_is_freed(small_disk):
    with ckstore.open(small_disk / "store", policy=POLICY) as store:
        store.commit_async(noise(1), 1).result()
        filler = small_disk / "filler"
        left = shutil.disk_usage(small_disk).free
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left - 2 * MIB)
        for step in (2, 3):
            with pytest.raises(CapacityError):
                store.commit_async(noise(step), step).result()
        # The failed commits must not occupy the remaining space.
        until(lambda: shutil.disk_usage(small_disk).free > MIB, "the space of what failed")
        filler.unlink()
        assert store.commit_async(noise(4), 4).result().step == 4
        assert store.steps() == [1, 4]
        assert np.array_equal(store.restore()["w0"], noise(4)["w0"])


@pytest.mark.root
def test_saver_on_full_disk_applies_rules_and_purges(small_disk):
    with ckstore.open(small_disk / "store", policy=POLICY, retention={"keep_last": 1}, gc_every=1000) as store:
        for step in range(3):
            store.commit_async(noise(step), step).result()
        with (small_disk / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - 2 * MIB)
        receipt = store.commit_async(noise(3), 3).result()
        assert "the disk was full" in receipt.warnings[0]
        assert store.steps() == [2, 3]
        assert np.array_equal(store.restore()["w0"], noise(3)["w0"])


# A program that exits right after the call


MODULES = ("numpy", "support.saver_harness", "ckstore.commit", "ckstore.background.commits")
PROGRAM = """
import os, signal, sys, time
import numpy as np
import ckstore
from support.saver_harness import noise
store = ckstore.open({folder!r}, policy=ckstore.Policy(saver_nice=0))
"""
TRAINING = """
from ckstore.codec import kernels
from support.guarded_memory import attach_owner
state = noise(1)
owner = attach_owner(store, state["w0"])
# The program is at its end before anything is copied.
copy_units = kernels.copy_units
kernels.copy_units = lambda *given: (time.sleep(0.1), copy_units(*given))[1]
pending = store.commit_async(state, 1)
assert not pending.is_staged
"""
PLAIN = """
state = noise(1)
pending = store.commit_async(state, 1)
state["w0"][:] = 0
"""
ENDINGS = {
    "end": ("", 0),
    "exit": ("sys.exit(5)", 5),
    "raise": ("raise RuntimeError('a fault of the loop')", 1),
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "staged": ("assert pending.wait_staged(); os._exit(7)", 7),
    "killed": ("assert pending.wait_staged(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize(
    ("beginning", "ending"),
    [*((PLAIN, ending) for ending in ENDINGS), *((TRAINING, ending) for ending in ("end", "raise", "killed"))],
    ids=lambda value: {PLAIN: "plain", TRAINING: "guarded"}.get(value, value),
)
def test_exit_after_commit_async_keeps_checkpoint(folder, beginning, ending):
    code, status = ENDINGS[ending]
    modules = (*MODULES, "support.guarded_memory") if beginning is TRAINING else MODULES
    done = run_trainer((PROGRAM + beginning + code).format(folder=str(folder)), *modules)
    assert done.returncode == status, done.stderr
    with ckstore.open(folder) as store:
        # A killed program leaves its saver, which is waited for.
        assert store.restore()["w0"].tobytes() == noise(1)["w0"].tobytes()
        assert store.steps() == [1]
        store.commit({"a": 1}, 2)


def test_unclosed_store_keeps_last_commit(folder):
    """As a script, in its own process."""
    program = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np, ckstore
def main():
    store = ckstore.open({str(folder)!r})
    store.commit_async({{"w": np.arange(1 << 20)}}, 7)
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    with ckstore.open(folder) as store:
        assert store.steps() == [7]
        assert np.array_equal(store.restore("latest")["w"], np.arange(1 << 20))


def test_immediate_exit_leaves_complete_or_no_commit(folder):
    for number in range(4):
        done = run_trainer((PROGRAM + PLAIN + "os._exit(7)").format(folder=str(folder)), *MODULES)
        assert done.returncode == 7, done.stderr
        with ckstore.open(folder) as store:
            assert not store.verify("decode").damage
            store.commit({"number": number}, 100 + number)
            assert {step for step in store.steps() if step < 100} <= {1}


# Signals during the start of the saver


def test_sigterm_to_starting_saver_is_deferred(folder):
    ckstore.open(folder).close()
    harness = SaverHarness(folder)
    try:
        # It has hardly begun to start.
        os.kill(harness.saver.pid, signal.SIGTERM)
        in_flight = harness.begin(noise(1), 1).stage().finish()
        assert in_flight.wait().seq == 0
        until(lambda: not harness.saver.is_alive, "the end of the saver")
    finally:
        harness.close()
    with ckstore.open(folder) as store:
        assert store.steps() == [1]


def test_saver_start_keeps_signal_mask_of_trainer(folder):
    ckstore.open(folder).close()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        harness = SaverHarness(folder)
        now = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        harness.saver.wait_ready(SECONDS_MAX)
        blocked = int(next(line.split()[1] for line in status_of(harness.saver.pid) if line.startswith("SigBlk")), 16)
        harness.close()
        assert now == before | {signal.SIGUSR1}
        assert blocked == sum(1 << (number - 1) for number in JOB_SIGNALS - {signal.SIGTERM})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def status_of(pid):
    return Path(f"/proc/{pid}/status").read_text().splitlines()


# How a saver has died


def test_saver_killed_by_bad_message_is_replaced(store, altered):
    altered.run_once("os.write(channel, b'\\xffnonsense'); time.sleep(600)")
    store.prewarm(noise(1))
    saver = saver_of(store)
    until(lambda: not saver.is_alive, "the end of the saver")
    with pytest.raises(MalformedError):
        saver.wait_ready()
    assert saver.quit()
    saver.staged(1)
    saver.abort(1)
    assert saver.release_lease()
    assert store.commit_async(noise(2), 2).result().step == 2
    assert background_of(store).saver_pid != saver.pid


def test_saver_without_listener_is_ended_and_reported(folder, monkeypatch):
    started = []
    popen, start = subprocess.Popen, threading.Thread.start

    class RefusingThread(popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)

    def refuse(thread):
        if thread.name == "ckstore-saver":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(subprocess, "Popen", RefusingThread)
    with ckstore.open(folder) as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(SaverError, match="cannot start a thread that listens to the saver"):
                store.commit_async(state(0), 0)
        assert [process.poll() is not None for process in started] == [True]
        assert store.commit_async(state(0), 0).result(SECONDS_MAX).step == 0
    until(lambda: all(process.poll() is not None for process in started))


def test_on_busy_skip_commits_after_last_receipt(folder):
    with ckstore.open(folder, policy=ckstore.Policy(on_busy="skip", saver_nice=0)) as store:
        for step in range(30):
            assert store.commit_async({"a": np.full(2000, step)}, step).result().step == step


def test_saver_without_memory_for_threads_ends(note):
    program = f"""
import os, resource, sys, threading, time
sys.path.insert(0, {str(SOURCE)!r})
from ckstore.background.saver import __main__ as start
pids, codes = [], []
for pages in range(16):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        start.end_without_threads()
        time.sleep(0.05)
        # Enough for the stack of a thread, and not for what Python wants first.
        taken = int(open("/proc/self/statm").read().split()[0]) * 4096 + (8 << 20) + pages * 4096
        resource.setrlimit(resource.RLIMIT_AS, (taken, taken))
        try:
            threading.Thread(target=int).start()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
deadline = time.monotonic() + 20
for pid in pids:
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.005)
    if not ended[0]:
        os.kill(pid, 9)
    codes.append(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "waits")
print(*codes)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY)),
    )
    codes = done.stdout.split()
    assert len(codes) == 16, done.stderr
    assert "waits" not in codes
    if set(codes) == {"0"}:
        pytest.skip("a thread of this Python begins without any memory but its stack")
    # With too little memory, a thread could not be started.
    assert "1" in codes, codes


def test_dead_saver_of_closed_store_is_harmless(folder):
    with contextlib.suppress(SaverError), ckstore.open(folder, policy=POLICY) as store:
        store.commit_async(noise(1), 1).result()
        os.kill(background_of(store).saver_pid, signal.SIGKILL)
        assert store.commit_async(noise(2), 2)
    with ckstore.open(folder) as store:
        assert store.commit(noise(3), 3).step == 3


def test_saver_freezes_imported_objects_for_gc():
    program = f"""
import gc, os, socket, sys
sys.path.insert(0, {str(SOURCE)!r})
from ckstore.background import protocol as messages
from ckstore.background.saver import __main__ as start

class Looked:
    channel = None
    def __init__(self, *given): pass
    def run(self):
        print(gc.get_freeze_count(), sum(map(gc.is_tracked, gc.get_objects(generation=2))))
        return 0

start.Server = Looked
start.Arena.attach = lambda fd: None
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
messages.send(ours, messages.Hello(b"nowhere", "main", "auto", os.getpid(), "now", 0, 30))
start.main([theirs.detach(), os.eventfd(0), os.memfd_create("arena")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    frozen, looked_through = map(int, done.stdout.split() or (0, 0))
    assert frozen > 10_000, done.stderr
    assert looked_through < 1000
