"""Protects unusual states: a tensor that cannot be quantized is stored exactly, with a warning."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ckstore import Residual
from ckstore.config import FirstMomentSettings, TensorSettings
from ckstore.quant.error_stats import distance_of
from support.states import difference
from support.synthetic_training import AdamRun, M, V, W, leaf, losses, lossy_policy

SHAPE = (96, 160)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("path", [W, M, V])
def test_non_finite_tensor_is_exact_with_warning(store, value, path):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, path)[3, 5] = value
    receipt = store.commit(state, 1, policy=lossy_policy())
    found = store.restore()
    assert difference(leaf(found, path), leaf(state, path)) is None
    expected = {path: "it holds NaN or infinity"}
    if path != W:
        expected[V if path == M else M] = f"its {'first' if path == M else 'second'} moment holds NaN or infinity"
    assert set(receipt.warnings) == {f"{where} was stored exactly: {why}" for where, why in expected.items()}
    # Both moments, or none.
    assert set(losses(store)) == ({M, V} if path == W else {W})
    receipt = store.commit(run.train().state(), 2, policy=lossy_policy())
    assert receipt.warnings == () or path == W
    assert store.verify("decode").damage == []


def test_negative_second_moment_is_not_quantized(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, V)[0, 0] = -1e-9
    receipt = store.commit(state, 1, policy=lossy_policy())
    assert set(receipt.warnings) == {
        f"{M} was stored exactly: its second moment is negative somewhere, so it is no second moment",
        f"{V} was stored exactly: it is negative somewhere, so it is no second moment",
    }
    assert difference(store.restore()["optimizer"], state["optimizer"]) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-30, 1e30])
def test_constant_tensors_stay_close(store, value):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, W)[:] = value
    leaf(state, M)[:] = 0
    leaf(state, V)[:] = abs(value) * 1e-8
    store.commit(state, 1, policy=lossy_policy())
    found = store.restore()
    for path, row in losses(store).items():
        assert distance_of(leaf(state, path), leaf(found, path)).max_abs <= row.max_abs * (1 + 1e-6)
    assert np.all(leaf(found, V) >= 0)
    assert np.all(leaf(found, M) == 0)
    assert store.verify("decode").damage == []


def test_denormal_second_moments_stay_positive(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, V)[:] = np.float32(1e-30) * np.exp(run.rng.standard_normal(SHAPE)).astype(np.float32)
    leaf(state, V)[:2] = np.float32(1e-42)
    leaf(state, M)[:] = np.sqrt(leaf(state, V)) * 0.5
    receipt = store.commit(state, 1, policy=lossy_policy())
    found = store.restore()
    assert set(losses(store)) == {W, M, V}
    assert np.all(leaf(found, V) > 0)
    quotient = np.abs(leaf(found, M)) / np.sqrt(leaf(found, V))
    assert quotient.max() < 2
    assert receipt.warnings == ()


@pytest.mark.parametrize("dtype", ["f4", "bfloat16"])
@pytest.mark.parametrize("size", [1e-42, 1e-40])
def test_too_small_moments_are_exact(store, size, dtype):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    spread = np.exp(run.rng.standard_normal(SHAPE))
    entry = state["optimizer"]["state"][0]
    entry["exp_avg_sq"] = (size * spread).astype(np.float32)
    entry["exp_avg"] = (run.rng.standard_normal(SHAPE) * np.sqrt(size * spread) / 3).astype(np.float32)
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = torch.from_numpy(entry[name]).bfloat16()
    receipt = store.commit(state, 1, policy=lossy_policy())
    assert difference(store.restore()["optimizer"], state["optimizer"]) is None
    assert set(losses(store)) == {W}
    reasons = dict(warning.split(" was stored exactly: ") for warning in receipt.warnings)
    assert set(reasons) == {M, V}
    assert reasons[V] == "the second moment is below 1.2e-38 and would be stored as a much larger value"


@pytest.mark.parametrize("residual", [Residual.near(), Residual.small()], ids=["near", "small"])
def test_zero_second_moment_invents_no_step(store, residual):
    """A gradient of 1e-23 has no square in fp32. Its first moment must not get the direction of its row and column."""
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy(residual))
    state = run.train().state()
    leaf(state, V)[::7, ::11] = 0
    leaf(state, M)[::7, ::11] = 1e-24
    receipt = store.commit(state, 1, policy=lossy_policy(residual))
    found = store.restore()
    assert set(losses(store)) == {W, M, V}
    assert receipt.warnings == ()
    assert np.all(leaf(found, V)[::7, ::11] > 0)
    quotient = np.abs(leaf(found, M)) / np.sqrt(leaf(found, V))
    assert quotient[::7, ::11].max() < 1
    assert losses(store)[M].rel_rms < 1


def test_many_zero_second_moments_make_both_exact(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, V)[::2] = 0
    receipt = store.commit(state, 1, policy=lossy_policy())
    assert difference(store.restore()["optimizer"], state["optimizer"]) is None
    assert set(losses(store)) == {W}
    why = "much of the first moment is where the second moment is zero or too small to be represented"
    assert set(receipt.warnings) == {f"{path} was stored exactly: {why}" for path in (M, V)}
    # A policy that drops first moments loses nothing there.
    dropped = replace(Residual.near(), tensors=TensorSettings(first=FirstMomentSettings("dropped")))
    assert store.commit(state, 2, policy=lossy_policy(dropped)).warnings == ()
    assert M in losses(store)


def test_reinitialized_weight_is_exact(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    run.w = (run.rng.standard_normal(SHAPE) * 1e-3).astype(np.float32)
    state = run.state()
    receipt = store.commit(state, 1, policy=lossy_policy())
    why = "it has changed by more than its own size, so its base is of no use"
    assert receipt.warnings == (f"{W} was stored exactly: {why}",)
    assert difference(leaf(store.restore(), W), leaf(state, W)) is None
    receipt = store.commit(run.train(1).state(), 2, policy=lossy_policy())
    assert receipt.warnings == ()
    assert losses(store)[W].hops == 1


def test_empty_and_scalar_tensors_stay_exact(store):
    state = {"empty": np.zeros((0, 7), np.float32), "scalar": np.float32(3), "0-d": np.array(2.5, np.float32)}
    for step in range(2):
        assert store.commit(state, step, policy=lossy_policy()).fidelity == "exact"
    assert difference(store.restore(exact=True), state) is None


def test_two_byte_weights_are_quantized(store):
    run = AdamRun(dtype=np.float16)
    run.sizes *= 1e3
    for step in range(3):
        state = run.train().state()
        store.commit(state, step, policy=lossy_policy())
    assert losses(store)[W].bits < 8
    assert leaf(store.restore(), W).dtype == np.float16
    assert store.verify("decode").damage == []


def test_rounding_follows_the_quantized_weight(store):
    run = AdamRun(shape=(300, 500))
    for step in range(3):
        state = run.train().state()
        state["half"] = {"w": state["model"]["w"].astype(np.float16)}
        receipt = store.commit(state, step, policy=lossy_policy())
        assert receipt.chunks_derived == 1
    found = store.restore()
    assert np.array_equal(found["half"]["w"], found["model"]["w"].astype(np.float16))
    recorded = losses(store)["half.w"]
    assert (recorded.role, recorded.method) == ("rounded", "rounded")
    made = distance_of(state["half"]["w"], found["half"]["w"])
    assert math.isclose(made.max_abs, recorded.max_abs)
    assert store.verify("decode").damage == []


def test_inexact_rounding_is_stored_separately(store):
    run = AdamRun(shape=(300, 500))
    for step in range(2):
        state = run.train().state()
        state["half"] = {"w": state["model"]["w"].astype(np.float16)}
        state["half"]["w"][-1, -1] += 1
        store.commit(state, step, policy=lossy_policy())
    found = store.restore()
    assert np.array_equal(found["half"]["w"], state["half"]["w"])
    assert "half.w" not in losses(store)


def test_changed_shapes_have_no_base(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    other = AdamRun(2, shape=(160, 96)).train().state()
    store.commit(other, 1, policy=lossy_policy())
    # The chunk has as many bytes at the same place, so it is a valid base, but the rows are new.
    wider = AdamRun(3, shape=(100, 170)).train().state()
    store.commit(wider, 2, policy=lossy_policy())
    assert W not in losses(store)
    assert np.array_equal(store.restore(only=W)["model"]["w"], wider["model"]["w"])
    assert store.verify("decode").damage == []


@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg", "exp_avg_sq_row"])
def test_only_weights_of_other_optimizers_are_lossy(store, key):
    run = AdamRun()
    for step in range(2):
        state = run.train().state()
        state["optimizer"]["state"][0] = {"step": 3, key: run.m.copy()}
        store.commit(state, step, policy=lossy_policy())
    found = store.restore()
    assert set(losses(store)) == {W}
    assert difference(found["optimizer"], state["optimizer"]) is None


def test_unrecognized_second_moments_stay_nonnegative(store):
    rng = np.random.default_rng(5)
    for step in range(4):
        state = {"model": {"w": rng.standard_normal(SHAPE).astype(np.float32)}}
        state["squares"] = (rng.standard_normal(SHAPE) ** 4).astype(np.float32)
        store.commit(state, step, policy=lossy_policy(Residual.small()))
    assert store.restore()["squares"].min() >= 0


def test_strided_tensors_have_the_same_errors(store):
    run = AdamRun()
    for step in range(2):
        state = run.train().state()
        state["model"]["w"] = np.asfortranarray(state["model"]["w"])
        state["model"]["cut"] = np.ones((200, 200), np.float32)[:, ::2]
        store.commit(state, step, policy=lossy_policy())
    found = store.restore()
    assert set(losses(store)) == {W, M, V}
    assert distance_of(state["model"]["w"], found["model"]["w"]).max_abs <= losses(store)[W].max_abs * (1 + 1e-6)
    assert np.array_equal(found["model"]["cut"], state["model"]["cut"])
