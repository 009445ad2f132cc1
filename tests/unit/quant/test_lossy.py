"""Protects lossy commits: restored values have the recorded errors, along every chain and for every way to restore."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Residual
from ckstore._testing import repository_of
from ckstore.errors import BoundError
from ckstore.io.memory import MemoryBackend
from ckstore.quant.error_stats import distance_of
from ckstore.store.refs import resolve
from support.states import difference
from support.synthetic_training import LARGE, AdamRun, M, V, W, leaf, losses, lossy_policy

NEAR = Residual.near()


def manifest_of(store, ref="latest"):
    return repository_of(store).manifests.load(resolve(repository_of(store), ref))


@pytest.fixture
def chain(store):
    """A store with a chain of six checkpoints, and the committed states."""
    run, states = AdamRun(), []
    for step in range(6):
        states.append(run.train().state())
        store.commit(states[-1], step, policy=lossy_policy())
    return store, states


def test_restored_errors_match_the_recorded_ones(chain):
    store, states = chain
    for step in range(1, 6):
        found, recorded = store.restore(step), losses(store, step)
        assert set(recorded) == {W, M, V}
        for path, row in recorded.items():
            made = distance_of(leaf(states[step], path), leaf(found, path))
            assert math.isclose(made.max_abs, row.max_abs, rel_tol=1e-5), path
            assert math.isclose(made.relative, row.rel_rms, rel_tol=1e-5), path
            assert 0 < row.bits < 8
        assert recorded[W].hops == step
        for path in ("model.bias", "optimizer.state.0.step", "rng", "epoch"):
            assert difference(leaf(found, path), leaf(states[step], path)) is None


def test_errors_do_not_accumulate_along_a_chain(store):
    run, recorded = AdamRun(), []
    for step in range(12):
        store.commit(run.train().state(), step, policy=lossy_policy(replace(NEAR, keyframe_every=100)))
        recorded.append(losses(store))
    assert recorded[-1][W].hops == 11
    assert recorded[-1][W].rel_rms < 2 * recorded[1][W].rel_rms


@pytest.mark.parametrize("parts", [{}, {"weights": "exact"}, {"first": "exact", "second": "exact"}])
def test_first_checkpoint_and_keyframes_are_exact(store, parts):
    run, exact = AdamRun(), []
    fidelity = replace(NEAR, tensors=replace(NEAR.tensors, **parts), keyframe_every=3)
    for step in range(7):
        state = run.train().state()
        receipt = store.commit(state, step, policy=lossy_policy(fidelity, read_amplification_max=3))
        exact.append(receipt.fidelity == "exact")
        assert store.info(step).fidelity == receipt.fidelity
        if exact[-1]:
            assert difference(store.restore(step, exact=True), state) is None
            assert "exact as a whole" in store.coding(step).reason
        else:
            assert set(losses(store)) == ({W, M, V} if not parts else {W} if "first" in parts else {M, V})
    assert exact == [True, False, False, True, False, False, True]


def test_one_weight_without_base_makes_no_keyframe(store):
    run, other = AdamRun(), AdamRun(2)
    for step in range(2):
        state = run.train().state()
        if step:
            state["model"]["new"] = other.train().w
        receipt = store.commit(state, step, policy=lossy_policy())
    assert receipt.fidelity == "near"
    assert set(losses(store)) == {W, M, V}
    # A checkpoint in which no weight has a base is a keyframe, and no chain continues in it.
    del state["model"]["new"]
    state["model"] = {"renamed": state["model"].pop("w")}
    assert store.commit(state, 2, policy=lossy_policy()).fidelity == "exact"
    store.restore(exact=True)


def test_residual_report_ignores_partial_keyframes(store):
    run = AdamRun(shape=LARGE)
    for step in range(4):
        store.commit(run.train().state(), step, policy=lossy_policy())
    reason = store.coding("latest").reason
    assert "1 weights as residuals of seq 2, 2 moments quantized; the rest: against the previous" in reason
    assert "a restore reads" not in reason


def test_lossy_checkpoint_is_not_reported_as_exact(chain):
    store, _ = chain
    assert store.info(5).fidelity == "near"
    store.restore(5)
    assert store.restored.fidelity == "near"
    with pytest.raises(BoundError, match="is not exact"):
        store.restore(5, exact=True)
    with pytest.raises(BoundError):
        store.restore(exact=True)
    store.commit(AdamRun(4).state(), 9, policy=Policy())
    assert store.info(9).fidelity == "exact"
    store.restore(9, exact=True)


def test_receipt_reports_the_loss(store):
    run = AdamRun()
    first = store.commit(run.train().state(), 0, policy=lossy_policy())
    assert (first.fidelity, first.lossy_count) == ("exact", 0)
    receipt = store.commit(run.train().state(), 1, policy=lossy_policy())
    worst = max(losses(store).values(), key=lambda row: row.rel_rms)
    assert (receipt.lossy_count, receipt.worst_path) == (3, worst.path)
    assert math.isclose(receipt.worst_rel_rms, worst.rel_rms)
    assert receipt.chunks_lossy == 3
    assert receipt.ratio == receipt.bytes_state / receipt.bytes_written > 4
    assert 0 < receipt.worst_spike < 2
    assert receipt.warnings == ()


def test_verify_accepts_lossy_checkpoints(chain):
    store, _ = chain
    for level in ("quick", "read", "decode"):
        assert store.verify(level).damage == []


def test_all_ways_to_restore_give_the_same_bits(chain, tmp_path):
    store, _ = chain
    first = store.restore(5)
    assert difference(store.restore(5), first) is None
    into = AdamRun(8).state()
    assert difference(store.restore(5, into=into), first) is None
    assert difference(store.restore(5, only=[V])["optimizer"]["state"][0]["exp_avg_sq"], leaf(first, V)) is None
    assert difference(store.restore(5, only=[M])["optimizer"]["state"][0]["exp_avg"], leaf(first, M)) is None


@pytest.mark.parametrize(
    "changes", [{"threads": 1}, {"threads": 5}, {"base_cache": "memory"}, {"verify_encoded": False}]
)
def test_all_ways_to_commit_store_the_same(changes):
    found = []
    for each in (lossy_policy(), replace(lossy_policy(), **changes)):
        with ckstore.open(MemoryBackend()) as store:
            run = AdamRun()
            for step in range(4):
                store.commit(run.train().state(), step, policy=each)
            manifest = manifest_of(store)
            found.append(([chunk.chunk_id for chunk in manifest.chunks], manifest.losses))
            assert store.verify("decode").damage == []
    assert found[0] == found[1]


def test_reopened_store_continues_the_chain(tmp_path):
    run, backend = AdamRun(), MemoryBackend()
    for step in range(4):
        with ckstore.open(backend) as store:
            store.commit(run.train().state(), step, policy=lossy_policy())
            assert losses(store).get(W, None) is None or losses(store)[W].hops == step
    with ckstore.open(backend) as store:
        assert losses(store)[W].hops == 3


def test_exact_and_lossy_commits_can_alternate(store):
    run = AdamRun(shape=LARGE)
    for step, fidelity in enumerate((NEAR, NEAR, "exact", "exact", NEAR, "exact", Residual.small(), NEAR)):
        state = run.train().state()
        store.commit(state, step, policy=lossy_policy(fidelity))
        if fidelity == "exact":
            assert difference(store.restore(exact=True), state) is None
        elif step:
            assert losses(store)[W].hops == {1: 1, 4: 1, 6: 1, 7: 2}[step]
    assert store.verify("decode").damage == []


def test_restored_state_can_be_committed_exactly(store):
    run = AdamRun(shape=LARGE)
    for step in range(3):
        store.commit(run.train().state(), step, policy=lossy_policy())
    state = store.restore()
    receipt = store.commit(state, 6, policy=Policy())
    assert receipt.fidelity == "exact"
    assert receipt.chunks_new <= 1, "the chunk of the reconstruction exists already"
    assert difference(store.restore(exact=True), state) is None


def test_unchanged_state_costs_nothing(store):
    state = AdamRun().train().state()
    for step in range(2):
        store.commit(state, step, policy=lossy_policy())
    receipts = [store.commit(state, step, policy=lossy_policy()) for step in (2, 3)]
    assert receipts[0].chunks_new == receipts[1].chunks_new == 0
    assert np.array_equal(store.restore(only=W)["model"]["w"], state["model"]["w"])


def test_tied_weights_stay_tied(store):
    run = AdamRun()
    for step in range(2):
        state = run.train().state()
        state["model"]["tied"] = state["model"]["w"]
        store.commit(state, step, policy=lossy_policy())
    found = store.restore()["model"]
    assert found["tied"] is found["w"]
    assert set(losses(store)) == {W, M, V}
