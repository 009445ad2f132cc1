"""Protects background commits end to end, with a real saver: a restore returns what was committed.

A store can alternate between background and synchronous commits: the lease moves to the saver and back, and there is
one history.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckstore
from ckstore._testing import background_of
from ckstore.config import MIB, Policy
from ckstore.errors import ConflictError, SaverError
from support.saver_harness import SECONDS_MAX, stop

pytestmark = pytest.mark.usefixtures("no_threads_left")

SOURCE = str(Path(ckstore.__file__).parent.parent)


@pytest.fixture
def store(folder):
    with ckstore.open(folder, policy=Policy(saver_nice=0)) as opened:
        yield opened


def is_same(one, other):
    """Return whether two state dicts hold the same tensors and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    return one == other


def test_every_commit_of_training_restores_exactly(tmp_path):
    torch.manual_seed(0)
    with ckstore.open(tmp_path / "store") as store:
        train_and_compare(store)


def train_and_compare(store):
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    store.attach(optimizer)
    wanted = {}
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        wanted[step] = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        store.commit_async({"model": model, "optimizer": optimizer}, step, metrics={"loss": 1.0 / (step + 1)})
    store.wait()
    assert store.steps() == list(range(6))
    for step, state in wanted.items():
        assert is_same(store.restore(step), state)
    assert not store.verify("decode").damage


POLICIES = {
    "fast": Policy(saver_nice=0),
    "none": Policy(saver_nice=0, compression="none"),
    "kept bases": Policy(saver_nice=0, base_cache="memory"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_both_kinds_of_commit_store_equal_frames(store, folder, policy):
    torch.manual_seed(0)
    master = torch.randn(800, 800)
    ours, background = [], []
    with ckstore.open(folder.with_name("other")) as other:
        for step in range(3):
            master[:200] += 1e-3 * torch.randn(200, 800)
            state = {"master": master, "weights": master.bfloat16(), "small": [torch.randn(9), torch.arange(99)]}
            ours.append(other.commit(state, step, policy=policy))
            background.append(store.commit_async(state, step, policy=policy).result())
    for one, another in zip(ours, background, strict=True):
        for name in ("bytes_state", "chunks_new", "chunks_reused", "chunks_delta", "chunks_derived"):
            assert getattr(one, name) == getattr(another, name), name
    assert background[-1].chunks_derived == ours[-1].chunks_derived > 0 or policy.compression == "none"


def test_both_kinds_of_commit_share_one_history(store):
    state = {"w": np.arange(2 * MIB, dtype=np.uint32)}
    seqs = []
    for step in range(6):
        state["w"][step] += 1
        if step % 2:
            seqs.append(store.commit(state, step).seq)
        else:
            seqs.append(store.commit_async(state, step).result().seq)
    assert seqs == list(range(6))
    entries = store.log()
    assert [entry.parent for entry in entries] == [4, 3, 2, 1, 0, None]
    store.rewind("seq:2")
    last = store.commit_async(state, 9).result()
    assert store.log()[0].parent == last.seq - 1
    # After a commit of the saver, this process still finds the known chunks.
    assert store.commit(state, 10).chunks_new == 0


def test_tags_are_set_by_the_saver(store):
    store.commit_async({"a": 1}, 5, tags=["good"]).result()
    assert store.tags() == {"good": 0}


def test_other_writer_of_run_is_a_conflict(store, folder):
    with ckstore.open(folder) as other:
        other.commit({"a": 1}, 1)
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            store.commit_async({"a": 2}, 2).result()
    assert store.commit_async({"a": 3}, 3).result().step == 3


@pytest.mark.parametrize("verb", ["restore", "commit", "commit_async"])
def test_forked_child_cannot_use_the_saver(store, verb):
    state = {"w": np.arange(MIB)}
    store.commit_async(state, 0).result()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # The parent waits for this child, so a hang would not end.
            signal.alarm(60)
            if verb == "restore":
                code = 0 if is_same(store.restore(), state) else 2
            else:
                code = 3
                made = getattr(store, verb)(state, 1)
                made.result() if verb == "commit_async" else None
        except ConflictError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    state["w"][0] += 1
    assert store.commit_async(state, 2).result().seq == 1


def test_killed_saver_fails_one_commit(store):
    state = {"w": np.random.default_rng(0).integers(0, 1 << 32, MIB, np.uint32)}
    store.commit_async(state, 0).result()
    # The slot is released a moment after the receipt; the next commit would wait for a saver that is stopped in
    # between.
    store.wait()
    pid = background_of(store).saver_pid
    stop(pid)
    pending = store.commit_async(state, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SaverError, match=rf"pid {pid}.*killed by SIGKILL"):
        pending.result(timeout=SECONDS_MAX)
    state["w"][0] += 1
    receipt = store.commit_async(state, 2).result()
    assert background_of(store).saver_pid != pid
    assert is_same(store.restore(), state)
    assert receipt.step == 2


def test_exit_without_close_keeps_last_commit(folder):
    program = f"""
import sys
sys.path.insert(0, {SOURCE!r})
import numpy as np, ckstore
store = ckstore.open({str(folder)!r})
state = {{"w": np.arange(1 << 20)}}
store.commit_async(state, 1)
store.commit_async(state, 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    with ckstore.open(folder) as store:
        assert store.steps() == [1, 2]
        assert is_same(store.restore(), {"w": np.arange(1 << 20)})


def test_resized_state_is_always_complete(store):
    for step, nbytes in enumerate((1, 9 * MIB, 3 * MIB, 22 * MIB, 100)):
        state = {"w": np.random.default_rng(step).integers(0, 256, nbytes, np.uint8)}
        store.commit_async(state, step).result()
        assert is_same(store.restore(), state)
