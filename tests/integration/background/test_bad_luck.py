"""What else can happen: a full disk, a programme that ends at once, signals and races at bad moments.

Each costs at most the commit that it hits, is told, and leaves everything that was promised.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.config import MIB
from ckstore.errors import CapacityError, MalformedError, SaverError
from ckstore.saver import messages, process, server
from ckstore.saver.arena import Arena
from ckstore.saver.priority import Priority
from ckstore.store.processes import process_started
from support.saver_desk import SECONDS_MAX, SOURCE, Desk, noise, until

pytestmark = pytest.mark.usefixtures("quiet_log")

POLICY = ckstore.Policy(saver_nice=0, threads=2)


@pytest.fixture
def store(folder):
    with ckstore.open(folder, policy=POLICY) as opened:
        yield opened


# A disk that is full


def test_a_saver_that_may_not_write_so_much_costs_one_commit(store):
    store.commit_async(noise(1), 1).result()
    pid = store._handover.saver_pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    with pytest.raises(CapacityError):
        store.commit_async(noise(2), 2).result()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert store.commit_async(noise(3), 3).result().step == 3
    assert store._handover.saver_pid == pid
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
def test_a_full_disk_is_told_and_space_that_comes_back_is_used(small_disk):
    with ckstore.open(small_disk / "store", policy=POLICY) as store:
        store.commit_async(noise(1), 1).result()
        filler = small_disk / "filler"
        left = shutil.disk_usage(small_disk).free
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left - 2 * MIB)
        for step in (2, 3):
            with pytest.raises(CapacityError):
                store.commit_async(noise(step), step).result()
        # Nothing of the failed ones keeps what little space there is.
        until(lambda: shutil.disk_usage(small_disk).free > MIB, "the space of what failed")
        filler.unlink()
        assert store.commit_async(noise(4), 4).result().step == 4
        assert store.steps() == [1, 4]
        assert np.array_equal(store.restore()["w0"], noise(4)["w0"])


# A programme that ends right after the call


PROGRAM = f"""
import os, signal, sys
sys.path[:0] = [{str(SOURCE)!r}, {str(Path(__file__).parents[2])!r}]
import numpy as np
import ckstore
from support.saver_desk import noise
store = ckstore.open(sys.argv[1], policy=ckstore.Policy(saver_nice=0))
"""
TRAINING = """
import torch
parameter = torch.nn.Parameter(torch.from_numpy(noise(1, 48 << 20)["w0"].view(np.float32).copy()))
optimizer = torch.optim.SGD([parameter], lr=0.1)
store.attach(optimizer)
pending = store.commit_async({"w0": parameter}, 1)
"""
PLAIN = """
state = noise(1, 48 << 20)
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
def test_a_programme_that_ends_after_the_call_has_its_checkpoint(folder, beginning, ending):
    code, status = ENDINGS[ending]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + beginning + code, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stderr
    with ckstore.open(folder) as store:
        # Of one that was killed the saver is waited for.
        content = store.restore()["w0"]
        content = content if beginning is PLAIN else content.detach().numpy()
        assert content.tobytes() == noise(1, 48 << 20)["w0"].tobytes()
        assert store.steps() == [1]
        store.commit({"a": 1}, 2)


def test_a_programme_that_is_gone_at_once_leaves_a_whole_checkpoint_or_none(folder):
    for number in range(4):
        code = PROGRAM + PLAIN + "os._exit(7)"
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 7, done.stderr
        with ckstore.open(folder) as store:
            assert not store.verify("decode").damage
            store.commit({"number": number}, 100 + number)
            assert {step for step in store.steps() if step < 100} <= {1}


# Signals at bad moments of the saver


def test_sigterm_before_the_saver_can_hear_it_waits_until_it_can(folder):
    ckstore.open(folder).close()
    desk = Desk(folder)
    try:
        # It has hardly begun to start.
        os.kill(desk.saver.pid, signal.SIGTERM)
        handed = desk.begin(noise(1), 1).stage().finish()
        assert handed.wait().seq == 0
        until(lambda: not desk.saver.is_alive, "the end of the saver")
    finally:
        desk.close()
    with ckstore.open(folder) as store:
        assert store.steps() == [1]


def test_starting_a_saver_leaves_the_trainer_s_signals_as_they_were(folder):
    ckstore.open(folder).close()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        desk = Desk(folder)
        now = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        desk.saver.wait_ready(SECONDS_MAX)
        blocked = int(next(line.split()[1] for line in status_of(desk.saver.pid) if line.startswith("SigBlk")), 16)
        desk.close()
        assert now == before | {signal.SIGUSR1}
        assert not any(blocked >> (number - 1) & 1 for number in process.HELD_SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def status_of(pid):
    return Path(f"/proc/{pid}/status").read_text().splitlines()


# Races, and what a saver has died of


def test_a_ticket_is_granted_before_it_can_end(folder, monkeypatch):
    """A message of a ticket that comes after its last one makes the trainer kill the saver."""
    ckstore.open(folder).close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arena = Arena.create()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    hello = messages.Hello(str(folder), "main", "auto", os.getpid(), process_started(os.getpid()), 0, 30)
    made = server.Server(theirs, bell, arena, hello, Priority(0))
    told = []

    def tell(message, *, wait_ms=None):
        if isinstance(message, messages.Began):
            # Whoever listens is slow.
            time.sleep(0.2)
        told.append(type(message).__name__)
        return True

    monkeypatch.setattr(made.channel, "tell", tell)
    monkeypatch.setattr(
        made._committer, "commit", lambda ticket: tell(messages.Failed(1, "SaverError", "", None, None, {}))
    )
    monkeypatch.setattr(type(made._committer), "holds_lease", True)
    monkeypatch.setattr(server, "decode_head", lambda content, slot_nbytes: PlainHead())
    monkeypatch.setattr(made._committer, "announce", lambda step: None)
    arena.slots[0].reserve(MIB)
    arena.slots[0].start(1, MIB)
    made._worker.start()
    made._take(messages.Begin(1, 0, 0, 1, None, 0))
    until(lambda: "SlotFree" in told)
    made._finish()
    assert told == ["Began", "Failed", "SlotFree"]
    for end in (ours, theirs):
        end.close()
    os.close(bell)
    made._trainer.close()
    arena.close()


class PlainHead:
    """As much of a head as a ticket looks at."""

    step, storages, samples = 1, (), ()


def test_whatever_a_saver_died_of_it_can_be_ended_and_replaced(store):
    store.commit_async(noise(1), 1).result()
    saver = store._handover._saver
    saver._why = MalformedError("it said what nobody understands")
    os.kill(saver.pid, signal.SIGKILL)
    until(lambda: not saver.is_alive, "the end of the saver")
    assert saver.quit()
    saver.staged(1)
    saver.abort(1)
    assert saver.release_lease()
    assert store.commit_async(noise(2), 2).result().step == 2
    assert store._handover.saver_pid != saver.pid


def test_skip_leaves_nothing_out_once_the_last_receipt_is_there(folder):
    with ckstore.open(folder, policy=ckstore.Policy(on_busy="skip", saver_nice=0)) as store:
        for step in range(30):
            assert store.commit_async({"a": np.full(2000, step)}, step).result().step == step


def test_a_saver_without_memory_for_a_thread_ends_instead_of_waiting_for_ever(tell):
    program = f"""
import os, resource, sys, threading, time
sys.path.insert(0, {str(SOURCE)!r})
from ckstore.saver import start
codes = []
for pages in range(16):
    pid = os.fork()
    if pid == 0:
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
    # Where too little is left, one that could not begin was seen.
    assert "1" in codes, codes


def test_a_saver_that_lacks_memory_says_so():
    failed = messages.failed_of(1, MemoryError())
    assert "no memory" in str(messages.error_of(failed))


def test_a_dead_saver_of_a_dead_trainer_is_no_obstacle(folder):
    with contextlib.suppress(SaverError), ckstore.open(folder, policy=POLICY) as store:
        store.commit_async(noise(1), 1).result()
        os.kill(store._handover.saver_pid, signal.SIGKILL)
        assert store.commit_async(noise(2), 2)
    with ckstore.open(folder) as store:
        assert store.commit(noise(3), 3).step == 3


def test_a_saver_never_looks_through_what_it_imported_for_garbage():
    program = f"""
import gc, os, socket, sys
sys.path.insert(0, {str(SOURCE)!r})
from ckstore.saver import messages, start

class Looked:
    channel = None
    def __init__(self, *given): pass
    def run(self):
        print(gc.get_freeze_count(), sum(map(gc.is_tracked, gc.get_objects(generation=2))))
        return 0

start.Server = Looked
start.Arena.attach = lambda fd: None
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
messages.send(ours, messages.Hello("nowhere", "main", "auto", os.getpid(), "now", 0, 30))
start.main([theirs.detach(), os.eventfd(0), os.memfd_create("arena")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    frozen, looked_through = map(int, done.stdout.split() or (0, 0))
    assert frozen > 10_000, done.stderr
    assert looked_through < 1000
