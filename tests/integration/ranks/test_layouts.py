"""Real jobs in every layout that people use: trained, killed, and resumed with as many ranks, with fewer, with more."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch

import ckstore
from support.forked_ranks import RankProcesses
from support.rank_layouts import WORLD, check_same, named, new_model, new_optimizer, resume, train_and_commit


def commit_plain(path):
    """Commit a trained model that has no layout; return its state."""
    model = new_model(seed=4)
    optimizer = new_optimizer(model)
    model(torch.randn(4, 70)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with ckstore.open(path, run="plain") as store:
        store.commit(state, 1)
    return state


def train_and_kill(folder, seed):
    """Train and commit in all layouts, and kill all ranks at a random time."""
    target = partial(train_and_commit, folder=str(folder), job=str(folder / "killed"))
    job = RankProcesses(target, WORLD, folder / "killed")
    try:
        job.wait_for("trained")
        time.sleep(random.Random(seed).uniform(0, 1))
    finally:
        job.kill()


def run(target, world, folder):
    job = RankProcesses(target, world, folder)
    try:
        job.wait()
    finally:
        job.kill()


@pytest.mark.deep
def test_killed_jobs_resume_bit_for_bit_in_any_world_and_layout(tmp_path, sample):
    plain = commit_plain(tmp_path / "store")
    train_and_kill(tmp_path, sample.seed(0))
    run(partial(resume, folder=str(tmp_path)), WORLD, tmp_path / "four")
    for world, per_rank in sample.part([(2, "own"), (8, "nearest")], parts=2):
        run(partial(resume, folder=str(tmp_path), per_rank=per_rank), world, tmp_path / f"world{world}")
    # One process without ranks reads what the layouts have committed.
    with ckstore.open(tmp_path / "store", run="plain_to_fsdp_tp") as store:
        check_same(named(store.restore()), named(plain))
    for name in ("fsdp_to_tp", "tp_to_hsdp"):
        with ckstore.open(tmp_path / "store", run=name.partition("_")[0]) as store:
            source = store.restore()
        with ckstore.open(tmp_path / "store", run=name) as store:
            check_same(named(store.restore()), named(source))
            assert store.verify("decode").is_clean
