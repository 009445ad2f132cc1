"""Protects commits that quantize where tensors lie: what is stored is what the host says, or the host has made it."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import Residual
from ckstore.config import KIB
from ckstore.distance import distance_of
from ckstore.errors import BoundError
from ckstore.testing.trainings import M, V, W, leaf, losses

torch = pytest.importorskip("torch")

from support import device_trainings  # noqa: E402 - it imports torch
from support.device_trainings import (  # noqa: E402
    COUNT,
    HOST,
    LOSSY,
    NEAR,
    SMALL,
    Run,
    commit_both,
    lossy_policy,
    numbers,
    same_bits,
    same_checkpoints,
)  # fmt: skip
from support.small_chunks import open_small  # noqa: E402

FACTORS = {"outer", "rank1"}
device, traffic, stores = device_trainings.device, device_trainings.traffic, device_trainings.stores


@pytest.mark.deep(parts=4)
@pytest.mark.parametrize("noise", [0.05, 1.0], ids=["directions", "noise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fidelity", [NEAR, SMALL], ids=["near", "small"])
def test_a_history_is_as_far_off_as_it_says_and_as_on_the_host(stores, traffic, device, fidelity, dtype, noise):
    # Large enough for a block of a pack, and for one direction more or less, to be far less than the bounds below: the
    # two histories differ by what each has rounded, so which directions are just worth it is not the same for both.
    shape = (600, 700)
    count = math.prod(shape)
    run, width = Run(device=device, dtype=dtype, noise=noise, shape=shape), dtype.itemsize
    for step in range(5):
        state = run.train().state()
        receipt, beside = commit_both(stores, state, step, fidelity)
        assert receipt.warnings == beside.warnings == ()
        assert beside.bytes_quantized_on_device == beside.bytes_bases_on_device == 0
        assert receipt.bytes_quantized_on_device == (3 * count * width if step else 0)
        assert receipt.bytes_bases_on_device == (count * width if step else 0)
        if not step:
            continue
        found, (told, theirs) = stores[0].restore(step), (losses(store) for store in stores)
        assert set(told) == set(theirs) == set(LOSSY)
        for path, row in told.items():
            made = distance_of(numbers(leaf(state, path)), numbers(leaf(found, path)))
            assert math.isclose(made.max_abs, row.max_abs, rel_tol=1e-6), path
            assert math.isclose(made.relative, row.rel_rms, rel_tol=1e-6), path
            # Where all may be left over, the last bit of a sum decides whether it is: then both say factors alone.
            is_open = path == V and fidelity is SMALL
            assert row.method == theirs[path].method or (is_open and {row.method, theirs[path].method} == FACTORS), path
            assert row.kept == pytest.approx(theirs[path].kept, rel=0.02)
            assert row.rel_rms == pytest.approx(theirs[path].rel_rms, rel=0.1 if is_open else 0.03), path
            assert row.bits == pytest.approx(theirs[path].bits, rel=0.05), path
            assert row.hops == step or path != W
        if noise == 0.05 and dtype == torch.float32:
            assert told[W].method == "outer"
        assert receipt.worst_spike == pytest.approx(beside.worst_spike, rel=0.05)
        assert receipt.bytes_written == pytest.approx(beside.bytes_written, rel=0.05)
        # What is stored of it, without what fills up blocks.
        assert sum(row.bits for row in told.values()) == pytest.approx(
            sum(row.bits for row in theirs.values()), rel=0.01
        )
    assert stores[0].verify("decode").damage == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_from_one_base_both_ways_store_the_same_but_for_the_last_bits(tmp_path, traffic, device, seed):
    run, policy = Run(seed, device=device, shape=(390, 450)), lossy_policy(SMALL)
    for step in range(5):
        state = run.train().state()
        if step:
            shutil.copytree(tmp_path / "one", tmp_path / f"other{step}")
        with ckstore.open(tmp_path / "one", policy=policy) as store:
            store.commit(state, step)
            told = losses(store)
        if not step:
            continue
        with ckstore.open(tmp_path / f"other{step}", policy=replace(policy, **HOST)) as store:
            receipt = store.commit(state, step)
            theirs = losses(store)
        assert receipt.bytes_quantized_on_device == 0
        assert set(told) == set(theirs) == set(LOSSY)
        for path, row in told.items():
            assert row.bits == pytest.approx(theirs[path].bits, rel=0.01), path
            assert row.rel_rms == pytest.approx(theirs[path].rel_rms, rel=0.005), path
        # Of what is stored of W, a direction is more than this.
        assert sum(row.bits for row in told.values()) == pytest.approx(
            sum(row.bits for row in theirs.values()), rel=0.002
        )


@pytest.mark.parametrize("noise", [0.05, 1.0], ids=["directions", "noise"])
def test_floats_that_were_quantized_are_never_copied_to_the_host(stores, traffic, device, noise):
    run, store = Run(device=device, noise=noise, shape=(1024, 1000)), stores[0]
    store.commit(run.train(2).state(), 0, policy=lossy_policy())
    assert traffic.floats >= 12 * 1024 * 1000
    traffic.reset()
    receipt = store.commit(run.train(2).state(), 1, policy=lossy_policy())
    assert receipt.bytes_quantized_on_device == 12 * 1024 * 1000
    # What is left are a vector, a counter, and marks by which roundings are found.
    assert max(traffic.calls) <= 4 * 1000
    assert traffic.floats < 16_000
    # A byte for each element of a grid, with sums and escapes; less for a product.
    assert traffic.codes < 3 * 1024 * 1000 * (1.1 if noise == 1.0 else 0.7)


def test_a_policy_can_leave_it_to_the_host(stores, traffic, device):
    run = Run(device=device)
    for step in range(3):
        receipts = commit_both(stores, run.train().state(), step, **HOST)
        assert [receipt.bytes_quantized_on_device for receipt in receipts] == [0, 0]
    assert same_checkpoints(stores)
    assert traffic.codes == 0
    with pytest.raises(ckstore.UsageError, match="quantize_on"):
        lossy_policy(quantize_on="gpu")


def test_tensors_in_host_memory_are_quantized_there(stores):
    run = Run()
    for step in range(2):
        receipt = stores[0].commit(run.train().state(), step, policy=lossy_policy())
    assert receipt.chunks_lossy == 3
    assert receipt.bytes_quantized_on_device == 0


@pytest.mark.parametrize("nbytes_max", [None, 0, COUNT])
def test_a_base_that_was_not_kept_on_the_device_is_brought_there_again(tmp_path, stores, traffic, device, nbytes_max):
    run, policy = Run(device=device), lossy_policy(device_bases_nbytes_max=nbytes_max)
    for step in range(4):
        state = run.train().state()
        receipt = stores[0].commit(state, step, policy=policy)
        assert receipt.bytes_bases_on_device == (4 * COUNT if step and nbytes_max is None else 0)
        # A new handle has nothing on any device, as a new process has.
        with ckstore.open(tmp_path / "other", policy=policy) as other:
            beside = other.commit(state, step)
        assert beside.bytes_quantized_on_device == receipt.bytes_quantized_on_device == (12 * COUNT if step else 0)
    assert same_checkpoints(stores)
    assert losses(stores[0]) == losses(stores[1])
    with pytest.raises(ckstore.UsageError, match="device_bases_nbytes_max"):
        lossy_policy(device_bases_nbytes_max=-1)


def test_keyframes_are_exact_and_let_go_of_what_devices_have(stores, traffic, device):
    run, store = Run(device=device), stores[0]
    for step in range(7):
        state = run.train().state()
        policy = lossy_policy(replace(NEAR, keyframe_every=3), read_amplification_max=3)
        receipt = store.commit(state, step, policy=policy)
        is_keyframe = step % 3 == 0
        assert receipt.bytes_quantized_on_device == (0 if is_keyframe else 12 * COUNT)
        assert receipt.bytes_bases_on_device == (0 if is_keyframe else 4 * COUNT)
        if is_keyframe:
            found = store.restore(step, exact=True)
            assert all(same_bits(leaf(found, path), leaf(state, path)) for path in LOSSY)
    assert store.verify("decode").damage == []


def test_a_tensor_of_another_shape_is_exact_once_and_then_quantized_there(stores, traffic, device):
    small, large = Run(device=device), Run(2, device=device, shape=(280, 320))
    for step, run in enumerate((small, small, large, large)):
        receipts = commit_both(stores, run.train().state(), step)
        assert [set(losses(store)) for store in stores] == [set(losses(stores[1]))] * 2
    assert receipts[0].bytes_quantized_on_device == 3 * 4 * 280 * 320
    assert stores[0].verify("decode").damage == []


@pytest.mark.parametrize(
    ("bound", "path"), [({"max_rel_rms": 1e-4}, V), ({"max_abs": 1e-7}, W), ({"bits_per_parameter": 0.01}, W)]
)
def test_bounds_are_held_as_on_the_host(stores, traffic, device, bound, path):
    run = Run(device=device, noise=1.0)
    commit_both(stores, run.train().state(), 0, replace(NEAR, **bound))
    state = run.train().state()
    receipt, beside = commit_both(stores, state, 1, replace(NEAR, **bound))
    failed = [[warning.partition(": it")[0] for warning in each.warnings] for each in (receipt, beside)]
    assert failed[0] == failed[1]
    assert any(warning.startswith(path) for warning in receipt.warnings)
    assert same_bits(leaf(stores[0].restore(), path), leaf(state, path))
    raising = replace(NEAR, on_bound="raise", **bound)
    for store, changes in zip(stores, ({}, HOST), strict=True):
        with pytest.raises(BoundError):
            store.commit(run.train().state(), 2, policy=lossy_policy(raising, **changes))
    assert stores[0].verify("decode").damage == []


def test_a_target_of_bits_is_sought_with_what_the_host_has(stores, traffic, device):
    run, fidelity = Run(device=device, noise=1.0), replace(NEAR, bits_per_parameter=3.0)
    for step in range(2):
        receipt, beside = commit_both(stores, run.train().state(), step, fidelity)
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert receipt.bytes_written == pytest.approx(beside.bytes_written, rel=0.02)
    assert sum(row.bits for row in losses(stores[0]).values()) <= 3.0


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_what_has_not_changed_is_not_changed_there(stores, traffic, device, value):
    run = Run(device=device)
    state = run.train().state()
    state["model"]["w"][:5] = value
    for step in range(3):
        receipt, _ = commit_both(stores, state, step)
    found = stores[0].restore()
    assert same_bits(found["model"]["w"], state["model"]["w"])
    assert receipt.bytes_quantized_on_device >= 8 * COUNT
    assert same_checkpoints(stores, "latest") or set(losses(stores[0])) == {M, V}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_roundings_of_masters_become_those_of_what_the_masters_become(stores, traffic, device, dtype):
    run = Run(device=device)
    for step in range(4):
        state = run.train().state()
        masters = {0: state["model"]["w"]}
        state["model"] = {"w": masters[0].to(dtype)}
        state["optimizer"]["master"] = masters
        traffic.reset()
        receipt, beside = commit_both(stores, state, step)
    assert receipt.bytes_quantized_on_device == 14 * COUNT
    assert receipt.chunks_derived == beside.chunks_derived == 1
    found, told, theirs = stores[0].restore(), losses(stores[0]), losses(stores[1])
    assert told["model.w"].role == "rounded"
    assert torch.equal(found["model"]["w"], found["optimizer"]["master"][0].to(dtype))
    made = distance_of(numbers(state["model"]["w"]), numbers(found["model"]["w"]))
    assert math.isclose(made.max_abs, told["model.w"].max_abs, rel_tol=1e-6)
    assert math.isclose(made.relative, told["model.w"].rel_rms, rel_tol=1e-6)
    assert told["model.w"].rel_rms == pytest.approx(theirs["model.w"].rel_rms, rel=0.03)
    assert told["model.w"].kept == pytest.approx(theirs["model.w"].kept, rel=0.03)
    assert stores[0].verify("decode").damage == []


def test_what_only_looks_like_a_rounding_is_stored_by_itself(stores, traffic, device):
    run = Run(device=device)
    for step in range(2):
        state = run.train().state()
        rounded = state["model"]["w"].to(torch.bfloat16)
        rounded[1, 1] += 1
        state["optimizer"]["master"] = {0: state["model"]["w"]}
        state["model"] = {"w": rounded}
        receipt, beside = commit_both(stores, state, step)
    assert receipt.chunks_derived == beside.chunks_derived == 0
    assert same_bits(stores[0].restore()["model"]["w"], rounded)


@pytest.mark.parametrize(
    "parts", [{"first": "exact"}, {"second": "exact"}, {"weights": "exact"}, {"first": "exact", "second": "exact"}]
)
def test_parts_that_stay_exact_stay_so(stores, traffic, device, parts):
    run = Run(device=device)
    for step in range(3):
        state = run.train().state()
        receipt, beside = commit_both(stores, state, step, replace(NEAR, tensors=replace(NEAR.tensors, **parts)))
    assert receipt.warnings == beside.warnings
    assert set(losses(stores[0])) == set(losses(stores[1]))
    # A first moment is quantized there only beside a second one that is.
    there = set(losses(stores[0])) - ({M} if parts == {"second": "exact"} else set())
    assert receipt.bytes_quantized_on_device == 4 * COUNT * len(there)
    for path in set(LOSSY) - set(losses(stores[0])):
        assert same_bits(leaf(stores[0].restore(), path), leaf(state, path))


def test_first_moments_can_be_dropped_there(stores, traffic, device):
    dropping = replace(NEAR.tensors, first=replace(NEAR.tensors.first, form="dropped", low_rank=None))
    run = Run(device=device)
    for step in range(2):
        receipt, _ = commit_both(stores, run.train().state(), step, replace(NEAR, tensors=dropping))
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert not stores[0].restore()["optimizer"]["state"][0]["exp_avg"].any()
    rows = [losses(store)[M] for store in stores]
    assert rows[0].method == rows[1].method == "dropped"
    assert rows[0].rel_rms == pytest.approx(rows[1].rel_rms)


def test_the_published_method_is_left_to_the_host(stores, traffic, device):
    run = Run(device=device)
    for step in range(3):
        receipts = commit_both(stores, run.train().state(), step, Residual.excp())
        assert [receipt.bytes_quantized_on_device for receipt in receipts] == [0, 0]
    assert same_checkpoints(stores)


def test_a_matrix_of_many_chunks_and_uneven_rows_is_quantized_there(tmp_path, traffic, device):
    run = Run(device=device, noise=1.0, shape=(401, 501))
    with open_small(tmp_path / "one", 256 * KIB) as one, open_small(tmp_path / "other", 256 * KIB) as other:
        for step in range(3):
            receipt, beside = commit_both((one, other), run.train(2).state(), step)
        assert receipt.chunks_lossy == beside.chunks_lossy == 12
        assert receipt.bytes_quantized_on_device == 12 * 401 * 501
        assert losses(one)[W].rel_rms == pytest.approx(losses(other)[W].rel_rms, rel=1e-3)
        assert one.verify("decode").damage == []


def test_numpy_in_the_same_state_goes_its_own_way(stores, traffic, device):
    run, other = Run(device=device), Run(3)
    for step in range(3):
        state = run.train().state()
        state["ema"] = {"weight": np.array(other.train().w, np.float32)}
        receipt, beside = commit_both(stores, state, step)
    assert receipt.bytes_quantized_on_device == 12 * COUNT
    assert receipt.chunks_lossy == beside.chunks_lossy == 4
