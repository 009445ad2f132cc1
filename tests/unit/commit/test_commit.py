"""Protects commits: the receipt is correct, every chunk is stored once, and every policy is lossless."""

from __future__ import annotations

import re

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError
from ckstore.io.memory import MemoryBackend
from support.model import difference


def state_of(seed, count=64):
    source = np.random.default_rng(seed)
    return {
        "model": {"w": source.standard_normal(count).astype(np.float32), "b": source.integers(0, 255, 7, np.uint8)},
        "optimizer": [{"step": seed, "lr": 1e-3, "m": source.standard_normal((3, 5))}],
        "seed": seed,
    }


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# The receipt


def test_receipt_reports_the_commit(store):
    receipt = store.commit(state_of(1, 300_000), 7, metrics={"loss": 1.5})
    assert (receipt.step, receipt.seq) == (7, 0)
    assert receipt.bytes_state == 300_000 * 4 + 7 + 15 * 8
    assert receipt.bytes_written > 1_000_000
    assert (receipt.chunks_new, receipt.chunks_reused) == (3, 0)
    assert (receipt.chunks_delta, receipt.chunks_derived) == (0, 0)
    assert re.fullmatch("[0-9a-f]{64}", receipt.checkpoint_id)
    assert {"stage", "plan", "write", "flush", "publish", "verify", "total"} <= set(receipt.seconds)
    stages = sum(seconds for stage, seconds in receipt.seconds.items() if stage != "total")
    assert 0 <= stages <= receipt.seconds["total"]
    assert receipt.warnings == ()


def test_receipt_names_the_engine(folder):
    with ckstore.open(folder, engine="pwrite") as store:
        assert store.commit(state_of(1), 1).engine == "pwrite"


def test_bytes_written_are_the_bytes_of_new_packs(disk_store, folder):
    for step in range(2):
        before = sum(path.stat().st_size for path in folder.rglob("*.pack"))
        receipt = disk_store.commit(state_of(step, 50_000), step)
        after = sum(path.stat().st_size for path in folder.rglob("*.pack"))
        assert receipt.bytes_written == after - before


def test_manifest_of_many_small_tensors_is_small(disk_store, folder):
    count, source = 2000, np.random.default_rng(1)
    state = {
        f"layers.{number // 8}.experts.{number % 8}.weight": source.standard_normal(256).astype(np.float32)
        for number in range(count)
    }
    for step in range(3):
        for tensor in state.values():
            tensor += np.float32(0.001)
        disk_store.commit({"model": state}, step)
    sizes = [path.stat().st_size for path in folder.glob("manifests/*/*.ckm")]
    assert len(sizes) == 3
    assert max(sizes) <= 25 * count
    assert difference(disk_store.restore(2), {"model": state}) is None


# Stored once


def test_unchanged_state_writes_no_pack(disk_store, folder):
    disk_store.commit(state_of(1, 100_000), 1)
    before = files_below(folder / "packs")
    receipt = disk_store.commit(state_of(1, 100_000), 2)
    assert (receipt.bytes_written, receipt.chunks_new, receipt.chunks_reused) == (0, 0, 3)
    assert files_below(folder / "packs") == before
    assert disk_store.verify("decode").is_clean


def test_equal_tensors_within_a_state_are_stored_once(store):
    big = np.arange(200_000.0)
    receipt = store.commit({"a": big, "b": big.copy(), "c": {"d": big.copy()}}, 1)
    assert (receipt.chunks_new, receipt.chunks_reused) == (1, 2)
    assert receipt.bytes_state == 3 * big.nbytes
    back = store.restore()
    assert back["a"] is not back["b"]
    assert difference(back, {"a": big, "b": big, "c": {"d": big}}) is None


def test_only_what_changed_is_written(store):
    state = {"a": np.zeros(200_000), "b": np.ones(200_000)}
    store.commit(state, 1)
    state["b"] = np.full(200_000, 2.0)
    receipt = store.commit(state, 2)
    assert (receipt.chunks_new, receipt.chunks_reused) == (1, 1)


def test_chunks_are_shared_between_runs(backend):
    state = state_of(3, 200_000)
    with ckstore.open(backend, run="first") as one:
        one.commit(state, 1)
    with ckstore.open(backend, run="second") as other:
        receipt = other.commit(state, 1)
        assert receipt.chunks_new == 0
        assert difference(other.restore(), state) is None
        assert other.runs() == ["first", "second"]


def test_chunks_are_reused_after_reopening(backend):
    state = state_of(3, 200_000)
    with ckstore.open(backend) as store:
        store.commit(state, 1)
    with ckstore.open(backend) as store:
        assert store.commit(state, 2).chunks_new == 0


def test_both_versions_of_a_shared_value_are_stored(store):
    for step in range(4):
        store.commit({"n": np.full(10, step % 2)}, step)
    assert [int(store.restore(step)["n"][0]) for step in range(4)] == [0, 1, 0, 1]
    assert store.log()[0].chunks_new == 0


# Policies


@pytest.mark.parametrize("compression", ["none", "fast", "best"])
@pytest.mark.parametrize("verify_encoded", [True, False])
def test_every_policy_is_lossless(store, compression, verify_encoded):
    state = state_of(2, 300_000)
    policy = ckstore.Policy(compression=compression, verify_encoded=verify_encoded, threads=3)
    store.commit(state, 1, policy=policy)
    assert difference(store.restore(), state) is None
    assert store.verify("decode").is_clean


def test_compressing_policies_write_less(backend):
    state = {"w": (np.random.default_rng(1).standard_normal(500_000) / 50).astype(np.float32)}
    written = {}
    for compression in ("none", "fast", "best"):
        with ckstore.open(MemoryBackend(), policy=ckstore.Policy(compression=compression)) as store:
            written[compression] = store.commit(state, 1).bytes_written
    assert written["fast"] < 0.9 * written["none"]
    assert written["best"] <= written["fast"] * 1.01


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "zip"},
        {"fidelity": "lossy"},
        {"verify_restored": "md5"},
        {"threads": 0},
        {"threads": 1000},
        {"memory_nbytes_max": 1000},
    ],
    ids=str,
)
def test_invalid_policy_is_refused(fields):
    with pytest.raises(UsageError):
        ckstore.Policy(**fields)
