"""Protects commits against concurrent events: the state changes, another writer commits, a kill, a fork.

No event may lose an acknowledged checkpoint or make a wrong one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ChecksumError, ConflictError, CorruptError
from support.model import difference

SRC = str(Path(ckstore.__file__).parent.parent)


def state_of(seed, count=64):
    source = np.random.default_rng(seed)
    return {
        "model": {"w": source.standard_normal(count).astype(np.float32), "b": source.integers(0, 255, 7, np.uint8)},
        "optimizer": [{"step": seed, "lr": 1e-3, "m": source.standard_normal((3, 5))}],
        "seed": seed,
    }


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("compression", ["none", "fast"])
@pytest.mark.parametrize("verify_encoded", [True, False])
def test_state_changed_during_commit_is_never_wrong(store, sample, compression, verify_encoded):
    array = np.random.default_rng(1).standard_normal(1_500_000).astype(np.float32)
    words = array.view(np.uint32)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            words[::1000] += 1

    policy = ckstore.Policy(compression=compression, verify_encoded=verify_encoded, threads=2)
    messages = []
    thread = threading.Thread(target=change)
    thread.start()
    try:
        least, deadline = sample.count(8, parts=2), time.monotonic() + 60
        for step in itertools.count():
            # Whether a change falls between hashing and encoding is random, so repeat until one does.
            if step >= least and (messages or not verify_encoded or time.monotonic() > deadline):
                break
            before = set(store.steps())
            try:
                store.commit({"w": array}, step, policy=policy)
            except CorruptError as error:
                messages.append(str(error))
                assert set(store.steps()) == before
    finally:
        stop.set()
        thread.join()
    assert messages or not verify_encoded, "no change was noticed"
    assert all("changed while it was being committed" in message for message in messages)
    for step in store.steps():
        if verify_encoded:
            assert store.restore(step)["w"].shape == array.shape
        else:
            with contextlib.suppress(ChecksumError):
                store.restore(step)
    if verify_encoded:
        assert store.verify("decode").is_clean


def test_change_between_hashing_and_copying_is_caught(store, monkeypatch):
    array = np.arange(300_000.0)
    from ckstore.commit.pipeline import ChunkWorker

    original = ChunkWorker.encode

    def change_then_encode(self, plain, chunk, compression):
        array[7] += 1
        return original(self, plain, chunk, compression)

    monkeypatch.setattr(ChunkWorker, "encode", change_then_encode)
    with pytest.raises(CorruptError, match="Do not modify the state"):
        store.commit({"w": array}, 1)
    assert store.steps() == []
    monkeypatch.undo()
    store.commit({"w": array}, 1)
    assert difference(store.restore(), {"w": array}) is None


# Two writers


def test_second_writer_of_run_can_only_read(backend):
    with ckstore.open(backend) as one, ckstore.open(backend) as other:
        one.commit(state_of(1), 1)
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            other.commit(state_of(2), 2)
        assert difference(other.restore(), state_of(1)) is None
        one.commit(state_of(3), 3)
        one.close()
        assert other.commit(state_of(2), 2).seq == 2


def test_writers_of_two_runs_do_not_conflict(backend):
    with ckstore.open(backend, run="a") as one, ckstore.open(backend, run="b") as other:
        one.commit(state_of(1), 1)
        other.commit(state_of(2), 1)
        assert difference(one.restore(), state_of(1)) is None
        assert difference(other.restore(), state_of(2)) is None


def test_two_writers_without_lease_lose_nothing(backend, monkeypatch):
    # The lease informs users; claims guarantee safety.
    from ckstore.store.lease import Lease

    monkeypatch.setattr(Lease, "take", lambda self: None)
    monkeypatch.setattr(Lease, "check", lambda self: None)
    stores = [ckstore.open(backend) for _ in range(3)]
    receipts = []

    def write(number):
        for step in range(8):
            seed = number * 100 + step
            receipts.append((stores[number].commit(state_of(seed), step).seq, seed))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seq for seq, _ in receipts) == list(range(24))
    for seq, seed in receipts:
        assert difference(stores[0].restore(f"seq:{seq}"), state_of(seed)) is None
    assert stores[0].verify("decode").is_clean
    for store in stores:
        store.close()


def test_concurrent_commits_on_one_handle_all_succeed(store):
    receipts = []
    threads = [
        threading.Thread(target=lambda number=number: receipts.append(store.commit(state_of(number), number)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(receipt.seq for receipt in receipts) == list(range(8))
    for receipt in receipts:
        assert difference(store.restore(f"seq:{receipt.seq}"), state_of(receipt.step)) is None


# SIGKILL, Ctrl-C, fork

TRAINER = f"""
import sys
sys.path.insert(0, {SRC!r})
import numpy as np, ckstore
store = ckstore.open(sys.argv[1])
for step in range(int(sys.argv[2]), 10_000):
    store.commit({{"w": np.full(400_000, step), "step": step}}, step)
    print(step, flush=True)
"""


@pytest.mark.deep
def test_killed_trainer_loses_no_acknowledged_commit(folder, sample):
    acknowledged = -1
    for delay in sample.part([0.0, 0.01, 0.03, 0.07], parts=2):
        command = [sys.executable, "-c", TRAINER, str(folder), str(acknowledged + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(3)]
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        with ckstore.open(folder) as store:
            newest = store.restore()
            assert newest["step"] in (acknowledged, acknowledged + 1)
            assert (newest["w"] == newest["step"]).all()
            assert set(range(acknowledged + 1)) <= set(store.steps())
            acknowledged = newest["step"]
    with ckstore.open(folder) as store:
        assert store.verify("decode").is_clean


def interrupted(delay, call):
    """Call a function and send Ctrl-C some seconds later; return whether the call ended before it."""

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(delay, interrupt)
    is_done = False
    # The garbage collector may call Python code (hypothesis measures its time) and drops what that raises.
    gc.disable()
    # A shell that starts the suite in the background makes it ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        call()
        is_done = True
        timer.join()
        time.sleep(0.2)
    except KeyboardInterrupt:
        return is_done
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()
    raise AssertionError("the interrupt was swallowed")


@pytest.mark.deep
def test_interrupted_commit_leaves_working_store(folder, no_threads_left, sample):
    array = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)
    outcomes = []
    with ckstore.open(folder, policy=ckstore.Policy(threads=2)) as store:
        store.commit({"n": 0}, 0)
        delays = [0.0, 0.001, 0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08]
        for number, delay in enumerate(sample.part(delays, parts=2), 1):
            array[0::1000] += 1
            outcomes.append(interrupted(delay, lambda n=number: store.commit({"w": array, "n": n}, n)))
            assert store.restore()["n"] in (number - 1, number)
            store.commit({"w": array, "n": number}, number)
            assert store.restore()["n"] == number
        assert not all(outcomes)
        assert store.verify("read").is_clean
        manifests = repository_of(store).manifests
        used = {ref.pack_id.hex() for name in manifests.listing().names for ref in manifests.load(name).packs}
        left = {path.stem for path in folder.rglob("*.pack")}
        assert left == used, "an interrupted commit removes its packs"


def test_interrupted_restore_leaves_working_store(folder, no_threads_left):
    state = {"w": [np.random.default_rng(n).standard_normal(700_000) for n in range(4)]}
    with ckstore.open(folder, policy=ckstore.Policy(threads=2)) as store:
        store.commit(state, 1)
        outcomes = [interrupted(delay, store.restore) for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)]
        assert not all(outcomes)
        assert difference(store.restore(), state) is None


FORKING = f"""
import os, sys
sys.path.insert(0, {SRC!r})
import numpy as np, ckstore
state = {{"w": np.arange(300_000.0)}}
store = ckstore.open(sys.argv[1])
store.commit(state, 1)
store.restore()
print("parent", os.getpid(), flush=True)
child = os.fork()
if child == 0:
    for name, handle in (("old", store), ("new", ckstore.open(sys.argv[1]))):
        back = handle.restore()
        print(name, "reads", bool((back["w"] == state["w"]).all()), handle.verify("decode").is_clean, flush=True)
        try:
            handle.commit(state, 2)
            print(name, "committed", flush=True)
        except ckstore.ConflictError as error:
            print(name, "conflict", error.pid, flush=True)
        handle.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.commit(state, 3)
print("steps", store.steps(), flush=True)
store.close()
child = os.fork()
if child == 0:
    with ckstore.open(sys.argv[1]) as mine:
        mine.commit(state, 4)
        print("steps", mine.steps(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("engine", ["auto", "pwrite"])
def test_forked_child_can_only_read(folder, engine):
    code = FORKING.replace("sys.argv[1])", f"sys.argv[1], engine={engine!r})")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    parent, *lines = done.stdout.splitlines()
    pid = parent.split()[1]
    assert lines == [
        "old reads True True",
        f"old conflict {pid}",
        "new reads True True",
        f"new conflict {pid}",
        "steps [1, 3]",
        "steps [1, 3, 4]",
    ]
