"""Real jobs in every layout that people use: trained, killed, and resumed with as many ranks, with fewer, with more."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch

import ckstore
from support.forked_ranks import RankProcesses, run_ranks
from support.rank_layouts import LAYOUTS, WORLD, check_same, named, new_model, new_optimizer, resume, train_and_commit


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


def train_and_kill(folder, layouts, seed):
    """Train and commit in some layouts, and kill all ranks at a random time."""
    target = partial(train_and_commit, folder=str(folder), layouts=layouts, job=str(folder / "killed"))
    job = RankProcesses(target, WORLD, folder / "killed")
    try:
        job.wait_for("trained")
        time.sleep(random.Random(seed).uniform(0, 1))
    finally:
        job.kill()


CASES = [
    (("fsdp", "tp"), ("fsdp", "tp")),
    (("tp", "hsdp"), ("tp", "hsdp")),
    (("ddp", "pipeline"), ("plain", "fsdp")),
    (("by_name", "fsdp_tp"), ("plain", "fsdp_tp")),
]
"""Layouts that are trained, and the exchange: from which of them, or a plain model, to which layout."""


@pytest.mark.deep(parts=4)
@pytest.mark.parametrize(("layouts", "exchanged"), CASES, ids=["-".join(layouts) for layouts, _ in CASES])
def test_killed_jobs_resume_bit_for_bit_in_any_world_and_layout(tmp_path, sample, layouts, exchanged):
    plain = commit_plain(tmp_path / "store")
    train_and_kill(tmp_path, layouts, sample.seed(0))
    how = {"folder": str(tmp_path), "layouts": layouts, "exchanged": exchanged}
    run_ranks(partial(resume, **how), WORLD, tmp_path / "four")
    for world, per_rank in sample.part([(2, "own"), (8, "nearest")], parts=2):
        run_ranks(partial(resume, **how, per_rank=per_rank), world, tmp_path / f"world{world}")
    # One process without ranks reads what the layouts have committed.
    source, name = exchanged
    with ckstore.open(tmp_path / "store", run=source) as store:
        want = plain if source == "plain" else store.restore()
    with ckstore.open(tmp_path / "store", run=f"{source}_to_{name}") as store:
        check_same(named(store.restore()), named(want))
        assert store.verify("decode").is_clean


def test_every_layout_is_in_a_case():
    assert {name for layouts, _ in CASES for name in layouts} == set(LAYOUTS)
