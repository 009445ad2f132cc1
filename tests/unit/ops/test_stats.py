"""Protects stats and coding: the sizes that are told are those on disk, and no bound lies above what is stored."""

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
def shelf():
    from ckstore.io.memory import MemoryBackend

    with ckstore.open(MemoryBackend()) as store:
        for step, state in enumerate(states()):
            store.commit(state, step)
        yield store


def by_path(rows, coding=lambda row: row.coding):
    return {coding(row).path: row for row in rows}


def test_stored_bytes_of_all_tensors_are_those_of_their_frames(shelf):
    for step in (0, 1):
        stats, contents = shelf.stats(step), shelf.contents(step)
        stored = sum(group.stored_nbytes for group in contents.groups)
        assert stats.total.stored_nbytes == pytest.approx(stored, abs=8)
        assert sum(group.share.stored_nbytes for group in stats.groups) == stats.total.stored_nbytes
        assert stats.total.nbytes == contents.info.bytes_state


def test_modes_are_what_was_stored(shelf):
    first, second = by_path(shelf.stats(0).tensors), by_path(shelf.stats(1).tensors)
    assert first["model.w"].coding.mode == "full"
    assert first["model.w"].delta_bits is None
    assert second["model.w"].coding.mode == "delta"
    assert second["model.w"].coding.steps == ("delta+planes",)
    assert second["model.w"].coding.depth == 1
    assert second["model.half"].coding.mode == "derived"
    assert second["tokens"].coding.mode == "identical"
    assert second["model.half"].share.bound_bits == 0


def test_samples_tell_nearly_what_all_elements_do(shelf):
    sampled, exact = by_path(shelf.stats(1).tensors), by_path(shelf.stats(1, exact=True).tensors)
    assert not shelf.stats(1).is_exact
    for path in ("model.w", "optimizer.state.0.exp_avg"):
        assert sampled[path].share.full_bits == pytest.approx(exact[path].share.full_bits, rel=0.01)
        assert sampled[path].share.bound_bits == pytest.approx(exact[path].share.bound_bits, rel=0.02)


def test_stored_bits_are_close_to_the_bound_and_not_below_it(shelf):
    for step in (0, 1):
        row = by_path(shelf.stats(step, exact=True).tensors)["model.w"].share
        # Blocks of their own tables may beat one table for the chunk by a little.
        assert row.bound_bits * 0.998 < row.stored_bits < row.bound_bits * 1.03


def test_exact_bound_is_the_order_0_entropy_of_byte_planes(backend):
    values = RNG.integers(0, 200, 5000).astype(np.uint8)
    with ckstore.open(backend) as store:
        store.commit({"a": values}, 1)
        (row,) = store.stats(1, exact=True).tensors
    shares = np.bincount(values, minlength=256)[:200] / values.size
    entropy = -(shares * np.log2(shares)).sum()
    assert row.share.bound_bits == pytest.approx(entropy, abs=0.05)


def test_groups_are_first_keys_and_kinds_of_optimizer_state(shelf):
    keys = [group.key for group in shelf.stats(1).groups]
    assert keys == ["model", "optimizer.state.*.exp_avg", "optimizer.state.*.exp_avg_sq", "tokens"]
    assert group_of(("opt", "state", "layer.weight", "exp_avg")) == "opt.state.*.exp_avg"
    assert group_of(("state", "x")) == "state"
    assert group_of(()) == ""


def test_coding_explains_the_choice(shelf):
    coding = shelf.coding(1)
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


def test_tensors_that_share_memory_are_counted_once(backend):
    weights = RNG.standard_normal(5000).astype(np.float32)
    with ckstore.open(backend) as store:
        store.commit({"a": weights, "tied": weights}, 1)
        assert [row.coding.path for row in store.stats().tensors] == ["a"]


def test_uncompressed_state_is_told_as_plain(backend):
    with ckstore.open(backend, policy=ckstore.Policy(compression="none")) as store:
        store.commit({"a": RNG.standard_normal(5000)}, 1)
        coding = store.coding(1)
        assert (coding.base, coding.tensors[0].steps, coding.tensors[0].mode) == ("", ("plain",), "full")
        assert store.stats().total.stored_bits == pytest.approx(64, rel=0.01)


def test_empty_tensors_have_stats(backend):
    with ckstore.open(backend) as store:
        store.commit({"a": np.zeros((0, 3)), "b": np.float64(1)}, 1)
        assert store.stats(exact=True).total.nbytes == 0


def test_progress_ends_at_all_bytes(shelf):
    told = []
    shelf.stats(1, on_progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
