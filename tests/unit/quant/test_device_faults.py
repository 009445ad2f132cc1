"""Protects commits from devices: numbers that are none, bytes that are wrong, and memory that is short."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore.config import KIB
from ckstore.errors import BoundError
from ckstore.testing.trainings import M, V, W, leaf, losses

torch = pytest.importorskip("torch")

from ckstore import lossy_on_device  # noqa: E402 - it imports torch
from ckstore.kernels import on_gpu  # noqa: E402 - it imports torch
from ckstore.quant import on_device  # noqa: E402 - it imports torch
from support import device_trainings  # noqa: E402 - it imports torch
from support.device_trainings import (  # noqa: E402
    COLS,
    COUNT,
    HOST,
    LOSSY,
    NEAR,
    Run,
    alive,
    commit_both,
    entry_of,
    lossy_policy,
    same_bits,
    same_checkpoints,
)  # fmt: skip
from support.small_chunks import open_small  # noqa: E402

device, traffic, stores = device_trainings.device, device_trainings.traffic, device_trainings.stores
kept_there = device_trainings.kept_there

WRONG = {
    "nan": (W, lambda state: state["model"]["w"].view(-1)[7:8].fill_(math.nan)),
    "inf": (M, lambda state: entry_of(state)["exp_avg"].view(-1)[7:8].fill_(-math.inf)),
    "inf squared": (V, lambda state: entry_of(state)["exp_avg_sq"].view(-1)[7:8].fill_(math.inf)),
    "negative": (V, lambda state: entry_of(state)["exp_avg_sq"].view(-1)[7:8].fill_(-1e-9)),
    "denormal": (V, lambda state: entry_of(state)["exp_avg_sq"].mul_(0).add_(1e-40)),
    "beside zeros": (M, lambda state: entry_of(state)["exp_avg_sq"][::2].zero_()),
    "stays": (M, lambda state: entry_of(state)["exp_avg_sq"][:, :140].zero_()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_quantized_is_exact_and_told_of_as_on_the_host(stores, traffic, device, wrong):
    run, (path, spoil) = Run(device=device), WRONG[wrong]
    for step in range(2):
        state = run.train().state()
        if step:
            spoil(state)
        receipt, beside = commit_both(stores, state, step)
    assert receipt.warnings == beside.warnings
    assert any(path in warning for warning in receipt.warnings) or wrong == "stays"
    assert set(losses(stores[0])) == set(losses(stores[1]))
    found = stores[0].restore()
    for each in set(LOSSY) - set(losses(stores[0])):
        assert same_bits(leaf(found, each), leaf(state, each))
    assert receipt.bytes_quantized_on_device == 4 * COUNT * len(losses(stores[0]))
    assert stores[0].verify("decode").damage == []


def test_tiny_second_moments_that_can_be_told_are_quantized_there(stores, traffic, device):
    run = Run(device=device)
    for step in range(2):
        state = run.train().state()
        entry_of(state)["exp_avg_sq"].mul_(1e-24)
        entry_of(state)["exp_avg"].mul_(1e-12)
        receipt, beside = commit_both(stores, state, step)
    assert float(entry_of(state)["exp_avg_sq"].max()) < 1e-28
    assert receipt.warnings == beside.warnings == ()
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert losses(stores[0])[V].rel_rms == pytest.approx(losses(stores[1])[V].rel_rms, rel=0.03)


def test_a_few_second_moments_that_are_too_small_are_noted_as_on_the_host(stores, traffic, device):
    run = Run(device=device, noise=1.0)
    for step in range(2):
        state = run.train().state()
        if step:
            entry_of(state)["exp_avg_sq"][0, :20] = 1e-40
            entry_of(state)["exp_avg"][0, :20] = 0
        receipt, beside = commit_both(stores, state, step)
    assert receipt.warnings == beside.warnings == ()
    assert receipt.bytes_quantized_on_device == 12 * COUNT


def test_what_would_turn_negative_is_looked_at_by_the_host():
    plain = torch.tensor([0.0, 1e-3, 2.0])
    assert lossy_on_device.turns_negative(plain, torch.tensor([-1e-9, 1e-3, 2.0]))
    assert not lossy_on_device.turns_negative(plain, plain)
    assert not lossy_on_device.turns_negative(-plain, -plain)


def flipped(tensor):
    words = on_gpu.words_of(tensor)
    # Not the last bit, which rounding may hide: then nothing is wrong.
    words[words.numel() // 3] ^= 1 << 12
    return tensor


@pytest.mark.parametrize("noise", [0.05, 1.0], ids=["directions", "noise"])
def test_a_device_that_decodes_other_bytes_is_not_believed(stores, traffic, device, noise, monkeypatch):
    run = Run(device=device, noise=noise)
    commit_both(stores, run.train().state(), 0)
    outer, grid = on_device.rebuilt_outer, on_device.rebuilt_grid
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "rebuilt_outer", lambda *given: (flipped(outer(*given)[0]), outer(*given)[1]))
        patch.setattr(on_device, "rebuilt_grid", lambda *given, **kinds: flipped(grid(*given, **kinds)))
        receipt, beside = commit_both(stores, run.train().state(), 1)
    assert len(receipt.warnings) == 1
    assert "other bytes than the host" in receipt.warnings[0]
    assert receipt.bytes_quantized_on_device == receipt.bytes_bases_on_device == 0
    assert losses(stores[0]) == losses(stores[1])
    assert same_checkpoints(stores)
    # What was a mischance is none for ever.
    assert commit_both(stores, run.train().state(), 2)[0].bytes_quantized_on_device == 12 * COUNT
    assert beside.warnings == ()


def test_a_base_that_changed_on_the_device_is_found_out(stores, traffic, device, kept_there):
    run, store = Run(device=device), stores[0]
    for step in range(2):
        commit_both(stores, run.train().state(), step)
    held = alive(kept_there)
    assert [tensor.nbytes for tensor in held] == [4 * COUNT]
    flipped(held.pop())
    receipt = store.commit(run.train().state(), 2, policy=lossy_policy())
    assert "other bytes than the host" in receipt.warnings[0]
    assert receipt.bytes_quantized_on_device == 8 * COUNT
    assert store.verify("decode").damage == []
    assert store.commit(run.train().state(), 3, policy=lossy_policy()).warnings == ()


@pytest.mark.parametrize("name", ["float_changes", "measure_values", "float_quotients"])
def test_a_device_without_memory_leaves_it_to_the_host(stores, traffic, device, name, monkeypatch):
    run = Run(device=device)
    commit_both(stores, run.train().state(), 0)
    tries = []

    def fails(*given):
        tries.append(name)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(on_gpu, name, fails)
        receipt, _ = commit_both(stores, run.train().state(), 1)
    # Two threads may have found it out at once.
    assert 1 <= len(tries) <= 2
    assert receipt.warnings == (
        "a device could not quantize (CUDA out of memory. Tried to allocate 16.00 MiB); "
        "the host has quantized what that concerned",
    )
    assert receipt.bytes_bases_on_device == 0 or name == "float_quotients"
    assert set(losses(stores[0])) == set(LOSSY)
    assert stores[0].verify("decode").damage == []
    assert commit_both(stores, run.train().state(), 2)[0].bytes_quantized_on_device == 12 * COUNT


def test_a_commit_that_fails_leaves_nothing_on_the_device(stores, traffic, device, kept_there):
    run, store = Run(device=device), stores[0]
    store.commit(run.train().state(), 0, policy=lossy_policy())
    with pytest.raises(BoundError):
        store.commit(
            run.train().state(), 1, policy=lossy_policy(replace(NEAR, max_abs=1e-9, on_bound="raise"), threads=1)
        )
    assert kept_there
    assert alive(kept_there) == []
    receipt = store.commit(run.train().state(), 1, policy=lossy_policy())
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert receipt.bytes_bases_on_device == 4 * COUNT


def test_numbers_that_are_none_are_seen_there_in_what_nothing_quantizes(stores, traffic, device):
    run = Run(device=device)
    for step in range(3):
        state = run.train().state()
        if step != 1:
            state["model"]["bias"][3] = math.nan
            state["totals"] = torch.tensor([1.0, -math.inf], dtype=torch.float64, device=device)
        receipt, beside = commit_both(stores, state, step)
        assert receipt.warnings == beside.warnings
        told = ("model.bias, totals hold NaN or infinity: the run may have diverged",)
        assert receipt.warnings == (() if step == 1 else told)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_a_commit_waits_for_what_the_trainer_computes_on_a_stream_of_its_own(stores):
    state = Run(device="cuda").train().state()
    stores[0].commit(state, 0, policy=lossy_policy())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        state["model"]["w"].add_(1)
        receipt = stores[0].commit(state, 1, policy=lossy_policy())
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    off = stores[0].restore()["model"]["w"] - state["model"]["w"].cpu()
    assert float(off.abs().max()) < 0.6


# Roundings beyond the greatest half


def with_rounding(run, change):
    """Return a state of a weight and its rounding to halves, where some of the weight was changed."""
    state = run.train().state()
    del state["optimizer"]
    change(state["model"]["w"])
    return {**state, "half": {"model": {"w": state["model"]["w"].to(torch.float16)}}}


@pytest.mark.parametrize("where", [HOST, {}], ids=["host", "device"])
@pytest.mark.parametrize("row", [3, -1])
def test_a_rounding_that_is_infinite_somewhere_has_its_loss_recorded(traffic, device, tmp_path, where, row):
    run = Run(device=device, shape=(256, 500))

    def change(weight):
        weight[row, 5] = 70_000.0

    with open_small(tmp_path / "store", 256 * KIB) as store:
        for step in range(2):
            state = with_rounding(run, change)
            receipt = store.commit(state, step, policy=lossy_policy(**where))
        assert (receipt.chunks_lossy, receipt.chunks_derived) == (2, 2), "either chunk has its rounding"
        found, made = losses(store)["half.model.w"], store.restore()["half"]["model"]["w"].cpu()
        own = state["half"]["model"]["w"].cpu()
        finite = torch.isfinite(own)
        assert found.max_abs == (made.double() - own.double())[finite].abs().max() > 0
        assert torch.equal(torch.isfinite(made), finite)
        assert any("half.model.w holds NaN or infinity" in warning for warning in receipt.warnings)
        bounded = lossy_policy(replace(NEAR, max_abs=1e-9, on_bound="raise"), **where)
        with pytest.raises(BoundError):
            store.commit(with_rounding(run, change), 2, policy=bounded)


@pytest.mark.parametrize("where", [HOST, {}], ids=["host", "device"])
def test_a_weight_whose_rounding_would_become_infinite_is_stored_exactly(traffic, device, tmp_path, where):
    run = Run(device=device, noise=1.0)
    numbers = torch.Generator().manual_seed(0)

    def change(weight):
        # The least that rounds to infinity is 65520.
        weight[3] = (65_520 + 5 * torch.randn(COLS, generator=numbers)).to(weight.device)

    with ckstore.open(tmp_path / "store") as store:
        for step in range(2):
            state = with_rounding(run, change)
            receipt = store.commit(state, step, policy=lossy_policy(threads=1, **where))
        made = store.restore()
        for part in ("model", "half"):
            own, got = (each["w"] if part == "model" else each["model"]["w"] for each in (state[part], made[part]))
            assert same_bits(own, got)
        assert any("would become infinite" in warning for warning in receipt.warnings)
        assert store.verify("decode").is_clean


def test_values_whose_products_are_too_large_do_not_turn_the_device_off(traffic, device, tmp_path):
    run = Run(device=device)
    with ckstore.open(tmp_path / "store") as store:
        for step in range(2):
            state = run.train().state()
            wild = torch.from_numpy(np.random.default_rng(1).standard_normal((64, 64)) * (1 + 0.5 * step) * 1e14)
            state["model"]["wild"] = wild.float().to(device)
            receipt = store.commit(state, step, policy=lossy_policy())
        assert receipt.warnings == ()
        assert receipt.bytes_quantized_on_device >= 3 * 4 * COUNT
