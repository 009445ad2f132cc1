"""Protects quantizing on a device under every policy, and in every state that a trainer may be in when it commits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ckstore
from ckstore import Residual
from ckstore.chain_reader import ChainReader
from ckstore.errors import BackendError, CorruptError
from ckstore.lossy_chunks import LossyChunkWriter
from ckstore.testing.trainings import M, V, W, losses

torch = pytest.importorskip("torch")

from support import device_trainings  # noqa: E402 - it imports torch
from support.device_trainings import (  # noqa: E402
    COUNT,
    HOST,
    LOSSY,
    NEAR,
    SMALL,
    Run,
    alive,
    commit_both,
    lossy_policy,
    same_bits,
    same_checkpoints,
)  # fmt: skip

device, traffic, stores = device_trainings.device, device_trainings.traffic, device_trainings.stores
kept_there = device_trainings.kept_there


@pytest.mark.parametrize(
    "changes",
    [
        {"verify_encoded": False},
        {"base_cache": "memory"},
        {"base_cache": "memory", "base_cache_nbytes_max": 1000},
        {"compression": "none"},
        {"compression": "best", "threads": 1},
        {"delta": False},
    ],
    ids=str,
)
def test_every_policy_quantizes_there(stores, traffic, device, changes):
    run = Run(device=device, noise=1.0)
    for step in range(4):
        receipt, beside = commit_both(stores, run.train().state(), step, **changes)
        assert receipt.bytes_quantized_on_device == (12 * COUNT if step else 0)
        assert receipt.warnings == beside.warnings == ()
    rows = [losses(store) for store in stores]
    for path in LOSSY:
        assert rows[0][path].rel_rms == pytest.approx(rows[1][path].rel_rms, rel=0.01)
    assert stores[0].verify("decode").damage == []


def test_a_weight_is_quantized_there_beside_moments_of_the_published_method(stores, traffic, device):
    pruned = Residual.excp().tensors
    mixed = replace(NEAR, tensors=replace(NEAR.tensors, first=pruned.first, second=pruned.second))
    run = Run(device=device, noise=1.0)
    for step in range(3):
        receipt, _ = commit_both(stores, run.train().state(), step, mixed)
    assert receipt.bytes_quantized_on_device == 4 * COUNT
    rows = [losses(store) for store in stores]
    assert rows[0][M].method == rows[0][V].method == "codebook"
    assert rows[0][W].rel_rms == pytest.approx(rows[1][W].rel_rms, rel=0.01)
    assert stores[0].verify("decode").damage == []


@pytest.mark.parametrize("unit", ["row", "chunk"])
def test_grids_without_directions_are_those_of_the_host(stores, traffic, device, unit):
    tensors = NEAR.tensors
    grids = replace(
        tensors,
        weights=replace(tensors.weights, low_rank=None, scale=unit),
        first=replace(tensors.first, low_rank=None),
        second=replace(tensors.second, low_rank=None, form="log"),
    )
    run = Run(device=device)
    for step in range(4):
        receipt, _ = commit_both(stores, run.train().state(), step, replace(NEAR, tensors=grids))
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    rows = [losses(store) for store in stores]
    for path in LOSSY:
        assert rows[0][path].rel_rms == pytest.approx(rows[1][path].rel_rms, rel=1e-4)
        assert rows[0][path].bits == pytest.approx(rows[1][path].bits, rel=1e-3)


def test_a_weight_that_lies_turned_is_quantized_there(stores, traffic, device):
    run = Run(device=device)
    for step in range(3):
        state = run.train().state()
        state["model"]["w"] = state["model"]["w"].t().contiguous().t()
        receipt, beside = commit_both(stores, state, step)
    assert receipt.warnings == beside.warnings == ()
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert stores[0].restore()["model"]["w"].stride() == (1, 300)
    assert losses(stores[0])[W].rel_rms == pytest.approx(losses(stores[1])[W].rel_rms, rel=0.03)


def trained(device):
    """Return a model and its optimizer, both really trained."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 280), torch.nn.Tanh(), torch.nn.Linear(280, 300)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def train(model, optimizer, device):
    for _ in range(5):
        x = torch.randn(16, 300, device=device)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["as it is", "inference", "autocast"])
def test_a_real_training_is_quantized_there_whatever_its_thread_has_set_up(stores, traffic, device, mode):
    model, optimizer = trained(device)
    for step in range(3):
        train(model, optimizer, device)
        modes = {"inference": torch.inference_mode(), "autocast": torch.autocast(device, dtype=torch.bfloat16)}
        with modes.get(mode, torch.enable_grad()):
            receipt, beside = commit_both(stores, ckstore.TrainState(model, optimizer), step, threads=1)
        assert receipt.warnings == beside.warnings == ()
    assert receipt.bytes_quantized_on_device == 6 * 4 * 300 * 280
    rows = [losses(store) for store in stores]
    for path in rows[0]:
        assert rows[0][path].rel_rms == pytest.approx(rows[1][path].rel_rms, rel=0.03), path
    again, its = trained(device)
    stores[0].restore(into=ckstore.TrainState(again, its))
    train(again, its, device)
    assert stores[0].verify("decode").damage == []


def test_tied_weights_are_quantized_once(stores, traffic, device):
    run = Run(device=device)
    for step in range(2):
        state = run.train().state()
        state["model"]["tied"] = state["model"]["w"]
        receipt, _ = commit_both(stores, state, step)
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    found = stores[0].restore()
    assert found["model"]["tied"].data_ptr() == found["model"]["w"].data_ptr()


def test_a_base_that_cannot_be_read_makes_the_weight_exact_as_on_the_host(stores, traffic, device, monkeypatch):
    run = Run(device=device)
    for step in range(2):
        commit_both(stores, run.train().state(), step)

    def fail(*given, **settings):
        raise CorruptError("it is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(ChainReader, "read", fail)
        state = run.train().state()
        receipt, beside = commit_both(stores, state, 2)
    assert receipt.warnings == beside.warnings
    assert f"{W} was stored exactly: its base could not be read" in receipt.warnings
    assert receipt.bytes_quantized_on_device == 8 * COUNT
    assert same_bits(stores[0].restore()["model"]["w"], state["model"]["w"])
    assert commit_both(stores, run.train().state(), 3)[0].bytes_quantized_on_device == 12 * COUNT
    assert stores[0].verify("decode").damage == []


def test_a_commit_that_is_written_anew_quantizes_anew(stores, traffic, device, monkeypatch):
    run = Run(device=device)
    commit_both(stores, run.train().state(), 0)
    flush, failures = LossyChunkWriter.flush, [BackendError("the disk has failed")]

    def fails_once(writer):
        if failures:
            raise failures.pop()
        return flush(writer)

    monkeypatch.setattr(LossyChunkWriter, "flush", fails_once)
    receipt, beside = commit_both(stores, run.train().state(), 1)
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert receipt.bytes_bases_on_device == 4 * COUNT
    assert receipt.bytes_written == pytest.approx(beside.bytes_written, rel=0.05)
    assert stores[0].verify("decode").damage == []


def test_a_restore_in_between_is_what_the_next_commit_follows(stores, traffic, device):
    run, store = Run(device=device), stores[0]
    for step in range(3):
        store.commit(run.train().state(), step, policy=lossy_policy(SMALL))
    store.restore(1)
    receipt = store.commit(run.train().state(), 3, policy=lossy_policy(SMALL))
    assert receipt.warnings == ()
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    store.rewind(2)
    assert store.commit(run.train().state(), 4, policy=lossy_policy(SMALL)).warnings == ()
    assert store.verify("decode").damage == []


def test_a_closed_handle_keeps_nothing_on_a_device(tmp_path, traffic, device, kept_there):
    run = Run(device=device)
    with ckstore.open(tmp_path / "store", policy=lossy_policy()) as store:
        for step in range(2):
            store.commit(run.train().state(), step)
        assert [tensor.nbytes for tensor in alive(kept_there)] == [4 * COUNT]
    assert alive(kept_there) == []


def test_an_exact_commit_lets_go_of_what_is_kept_there(stores, traffic, device):
    run, store = Run(device=device), stores[0]
    for step in range(2):
        receipt = store.commit(run.train().state(), step, policy=lossy_policy())
    assert receipt.bytes_bases_on_device == 4 * COUNT
    state = run.train().state()
    receipt = store.commit(state, 2, policy=ckstore.Policy())
    assert (receipt.bytes_quantized_on_device, receipt.bytes_bases_on_device) == (0, 0)
    assert same_bits(store.restore()["model"]["w"], state["model"]["w"])


def test_what_both_ways_make_is_the_same_where_the_host_makes_it(stores, traffic, device):
    run = Run(device=device)
    for step in range(2):
        commit_both(stores, run.train().state(), step, **HOST)
    assert same_checkpoints(stores)
    assert losses(stores[0]) == losses(stores[1])
