"""Protects trainer and saver against leaks of memory, descriptors, threads and processes over many commits."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore
from ckstore.background import commits
from ckstore.config import MIB
from ckstore.results import Receipt
from support.fake_saver import FakeSaver

SOURCE = Path(ckstore.__file__).parent.parent

PROGRAM = f"""
import gc, json, os, sys
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np
import ckstore
from ckstore._testing import background_of, saver_of

folder, count, every, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def look(pid):
    place = Path(f"/proc/{{pid}}")
    rollup = dict(line.split(":") for line in (place / "smaps_rollup").read_text().splitlines()[1:])
    return {{
        "anonymous": int(rollup["Pss_Anon"].split()[0]) << 10,
        "shared": int(rollup["Pss_Shmem"].split()[0]) << 10,
        "descriptors": len(list((place / "fd").iterdir())),
        "threads": len(list((place / "task").iterdir())),
        "children": len((place / "task" / str(pid) / "children").read_text().split()),
    }}


def numbers():
    # A state without torch, and what changes it.
    state = {{"w": np.random.default_rng(0).standard_normal(60_000).astype(np.float32), "b": [np.zeros(9), 0]}}

    def train(step):
        state["w"][step % 1000 :: 1000] += 1e-3
        state["b"][1] = step

    return state, train


def training(store):
    # The state of a model whose optimizer is attached, and a step of it.
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store.attach(optimizer)

    def train(step):
        optimizer.zero_grad()
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()

    return {{"model": model, "optimizer": optimizer}}, train


policy = ckstore.Policy(
    base_cache="memory" if kind == "memory" else "none", threads=2, saver_nice=0, debug_guard=kind == "checked"
)
store = ckstore.open(folder, policy=policy)
state, train = training(store) if kind in ("guarded", "checked") else numbers()
measured, pids = [], set()
for step in range(count):
    train(step)
    store.commit_async(state, step, metrics={{"loss": 1 / (step + 1)}})
    if kind == "turns" and step % 20 == 19:
        # The trainer takes the lease itself, and lends it to the saver again with the next commit.
        store.wait()
        store.commit(state, step)
    if step % every == every - 1:
        background_of(store).wait_all()
        gc.collect()
        saver = saver_of(store).pid
        pids.add(saver)
        measured.append([look(os.getpid()), look(saver)])
assert len(pids) == 1
store.close()
print(json.dumps(measured))
"""


def measured(folder, count, every, kind):
    """Return the usage of trainer and saver after every ``every``-th of ``count`` commits."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(count), str(every), kind],
        capture_output=True,
        text=True,
        timeout=500,
        # Large blocks that the C library caches would vary by megabytes and hide leaks.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 4)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def growth(samples, name, side):
    """Return the minimum of the last third minus the minimum of the first third: a leak raises the minimum."""
    third = len(samples) // 3
    early, late = samples[:third], samples[-third:]
    return min(sample[side][name] for sample in late) - min(sample[side][name] for sample in early)


def check(samples, anonymous_nbytes):
    for side in (0, 1):
        for name in ("descriptors", "threads", "children"):
            assert growth(samples, name, side) <= 0, (name, samples)
        assert growth(samples, "shared", side) <= MIB // 4, samples
        assert growth(samples, "anonymous", side) <= anonymous_nbytes, samples


COMMITS = {"plain": 1000, "memory": 1000, "guarded": 1000, "turns": 240, "checked": 240}
"""Commits of each kind in a deep run."""
FEW = 60
"""This many show a leak of 60 KiB per commit, or of one descriptor in all; a deep run shows 4 KiB per commit."""
WARM_UP = 100
"""The first commits fill caches; with few commits, the first quarter is ignored."""


@pytest.mark.deep(parts=8)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", COMMITS)
def test_many_commits_leak_nothing(fast_folder, sample, note, kind):
    count = sample.count(COMMITS[kind], parts=COMMITS[kind] // FEW)
    every = max(5, count // 40)
    samples = measured(fast_folder / "store", count, every, kind)
    samples = samples[min(WARM_UP // every, len(samples) // 4) :]
    grown = [growth(samples, "anonymous", side) / MIB for side in (0, 1)]
    note(f"{count} commits ({kind}): trainer {grown[0]:+.2f} MiB, saver {grown[1]:+.2f} MiB")
    check(samples, 3 * MIB)


def test_unrequested_receipts_are_not_kept(folder, monkeypatch):
    FakeSaver.started = []
    monkeypatch.setattr(commits, "Saver", FakeSaver)

    def receipts():
        gc.collect()
        return sum(type(thing) is Receipt for thing in gc.get_objects())

    before = receipts()
    with ckstore.open(folder) as store:
        for step in range(30):
            store.commit_async({"a": step}, step)
            # Only the fake saver keeps these.
            FakeSaver.started[0].begun.clear()
        # The cost estimate of commits uses the last few.
        assert receipts() <= before + 15
