"""Protects stats and coding: reported sizes are those on disk, and no bound is above the stored size."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.ops.inspect.stats import group_of

RNG = np.random.default_rng(11)
SIZE = 300_000


def states():
    weights = RNG.standard_normal(SIZE).astype(np.float32)
    moment = RNG.standard_normal(SIZE).astype(np.float32)
    later = weights + RNG.standard_normal(SIZE).astype(np.float32) * np.float32(1e-5)
    for number, model in enumerate((weights, later)):
        yield {
            "model": {"w": model, "half": model.astype(np.float16)},
            "optimizer": {"state": {0: {"exp_avg": moment + np.float32(number), "exp_avg_sq": np.zeros(SIZE)}}},
            "tokens": np.arange(SIZE) // 7,
            "step": number,
        }


@pytest.fixture(scope="module")
def filled_store():
    from ckstore.io.memory import MemoryBackend

    with ckstore.open(MemoryBackend()) as store:
        for step, state in enumerate(states()):
            store.commit(state, step)
        yield store


def by_path(rows, coding=lambda row: row.coding):
    return {coding(row).path: row for row in rows}


def test_stored_bytes_match_the_frames(filled_store):
    for step in (0, 1):
        stats, contents = filled_store.stats(step), filled_store.contents(step)
        stored = sum(group.stored_nbytes for group in contents.groups)
        assert stats.total.stored_nbytes == pytest.approx(stored, abs=8)
        assert sum(group.share.stored_nbytes for group in stats.groups) == stats.total.stored_nbytes
        assert stats.total.nbytes == contents.info.bytes_state


def test_modes_match_the_frames(filled_store):
    first, second = by_path(filled_store.stats(0).tensors), by_path(filled_store.stats(1).tensors)
    assert first["model.w"].coding.mode == "full"
    assert first["model.w"].delta_bits is None
    assert second["model.w"].coding.mode == "delta"
    assert second["model.w"].coding.steps == ("delta+planes",)
    assert second["model.w"].coding.depth == 1
    assert second["model.half"].coding.mode == "derived"
    assert second["tokens"].coding.mode == "identical"
    assert second["model.half"].share.bound_bits == 0


def test_samples_are_close_to_all_elements(filled_store):
    sampled, exact = by_path(filled_store.stats(1).tensors), by_path(filled_store.stats(1, exact=True).tensors)
    assert not filled_store.stats(1).is_exact
    for path in ("model.w", "optimizer.state.0.exp_avg"):
        assert sampled[path].share.full_bits == pytest.approx(exact[path].share.full_bits, rel=0.01)
        assert sampled[path].share.bound_bits == pytest.approx(exact[path].share.bound_bits, rel=0.02)


def test_stored_bits_are_close_to_the_bound(filled_store):
    for step in (0, 1):
        row = by_path(filled_store.stats(step, exact=True).tensors)["model.w"].share
        # Separate tables per block may be slightly better than one table per chunk.
        assert row.bound_bits * 0.998 < row.stored_bits < row.bound_bits * 1.03


def test_exact_bound_is_the_byte_plane_entropy(backend):
    values = RNG.integers(0, 200, 5000).astype(np.uint8)
    with ckstore.open(backend) as store:
        store.commit({"a": values}, 1)
        (row,) = store.stats(1, exact=True).tensors
    shares = np.bincount(values, minlength=256)[:200] / values.size
    entropy = -(shares * np.log2(shares)).sum()
    assert row.share.bound_bits == pytest.approx(entropy, abs=0.05)


def test_groups_are_first_keys_and_optimizer_parts(filled_store):
    keys = [group.key for group in filled_store.stats(1).groups]
    assert keys == ["model", "optimizer.state.*.exp_avg", "optimizer.state.*.exp_avg_sq", "tokens"]
    assert group_of(("opt", "state", "layer.weight", "exp_avg")) == "opt.state.*.exp_avg"
    assert group_of(("state", "x")) == "state"
    assert group_of(()) == ""


def test_coding_explains_the_choice(filled_store):
    coding = filled_store.coding(1)
    assert coding.base_seq == 0
    assert coding.reason
    row = by_path(coding.tensors, coding=lambda row: row)["model.w"]
    assert row.full_bits > row.previous_bits > 0
    assert row.stored_bits == pytest.approx(row.previous_bits, rel=0.05)


def test_state_without_tensors_has_stats(backend):
    with ckstore.open(backend) as store:
        store.commit({"lr": 0.5}, 1)
        stats = store.stats()
        assert (stats.tensors, stats.groups, stats.total.nbytes) == ((), (), 0)
        assert store.coding("latest").tensors == ()


def test_shared_memory_is_counted_once(backend):
    weights = RNG.standard_normal(5000).astype(np.float32)
    with ckstore.open(backend) as store:
        store.commit({"a": weights, "tied": weights}, 1)
        assert [row.coding.path for row in store.stats().tensors] == ["a"]


def test_uncompressed_state_is_reported_as_plain(backend):
    with ckstore.open(backend, policy=ckstore.Policy(compression="none")) as store:
        store.commit({"a": RNG.standard_normal(5000)}, 1)
        coding = store.coding(1)
        assert (coding.base, coding.tensors[0].steps, coding.tensors[0].mode) == ("", ("plain",), "full")
        assert store.stats().total.stored_bits == pytest.approx(64, rel=0.01)


def test_empty_tensors_have_stats(backend):
    with ckstore.open(backend) as store:
        store.commit({"a": np.zeros((0, 3)), "b": np.float64(1)}, 1)
        assert store.stats(exact=True).total.nbytes == 0


def test_progress_ends_at_all_bytes(filled_store):
    calls = []
    filled_store.stats(1, on_progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
