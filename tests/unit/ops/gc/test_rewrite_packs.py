"""Protects the rewriting of half-empty packs: checkpoints stay equal, bytes are freed, and damage is not copied."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CapacityError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from ckstore.ops.gc import rewrite_packs
from ckstore.ops.gc.policy import Retention
from ckstore.store.refs import load_whole, resolve
from support.gc_histories import (
    HOUR,
    LAST_ONE,
    PLAIN,
    commit_half_needed,
    files_of,
    other_handle,
    packs_in_place,
    parts_state,
)
from support.memory_files import flip
from support.model import difference


@pytest.fixture
def backend(clock):
    return MemoryBackend(clock=clock)


@pytest.fixture
def store(backend, clock):
    with ckstore.open(backend, clock=clock, policy=PLAIN) as opened:
        yield opened


@pytest.fixture
def history(store, clock):
    commit_half_needed(store, clock)
    return store


def restores(store, expected):
    for step, state in expected.items():
        found = difference(store.restore(step), state)
        assert found is None, found


def test_half_empty_pack_is_rewritten_losslessly(history, backend):
    ids = {info.step: info.checkpoint_id for info in history.log()}
    before = sum(filter(None, files_of(backend).values()))
    dry = other_handle(history).gc(Retention(keep_last=2), dry_run=True, now=True)
    (rewrite,) = dry.plan.rewrites
    assert rewrite.packed_nbytes < 0.3 * rewrite.nbytes
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert report.plan == dry.plan
    assert report.done.repacked.nbytes_written == rewrite.packed_nbytes
    assert report.done.repacked.manifests == 1
    assert paths.pack_name(rewrite.pack_id) not in packs_in_place(backend)
    assert before - sum(filter(None, files_of(backend).values())) > 0.6 * rewrite.nbytes
    assert {info.step: info.checkpoint_id for info in history.log()} == {step: ids[step] for step in (1, 2)}
    assert history.info(1).generation == 1
    restores(history, {1: parts_state(1, {1, 2, 3}), 2: parts_state(2, {0, 1, 2, 3})})
    assert history.verify("decode").is_clean
    assert other_handle(history).gc(Retention(keep_last=2), now=True).plan.is_empty


def test_zero_budget_frees_whole_packs_only(history, backend):
    report = other_handle(history).gc(Retention(keep_last=2), now=True, repack_nbytes_max=0)
    assert report.plan.rewrites == ()
    assert history.info(1).generation == 0


def test_budget_and_threshold_bound_what_is_rewritten(history):
    assert other_handle(history).gc(Retention(keep_last=2), dry_run=True, repack_nbytes_max=200_000).plan.rewrites == ()
    assert other_handle(history).gc(Retention(keep_last=2), dry_run=True, waste_max=0.8).plan.rewrites == ()
    assert len(other_handle(history).gc(Retention(keep_last=2), dry_run=True, waste_max=0.7).plan.rewrites) == 1


def test_all_manifests_of_a_pack_are_replaced(history, clock, backend):
    for step in (3, 4):
        history.commit(parts_state(step, {1, 2, 3}), step)
    with ckstore.open(backend, run="other", clock=clock, policy=PLAIN) as other:
        other.commit(parts_state(9, {1, 2, 3}), 9)
        clock.now += 2 * HOUR
        report = other_handle(history).gc(Retention(keep_last=2), now=True)
        assert report.done.repacked.manifests == 3
        restores(other, {9: parts_state(9, {1, 2, 3})})
        restores(history, {3: parts_state(3, {1, 2, 3}), 4: parts_state(4, {1, 2, 3})})
        assert other.verify("decode").is_clean
        (shared,) = {
            manifest.packs[manifest.frames[0].pack].pack_id
            for handle in (history, other)
            for name in repository_of(handle).manifests.listing().names
            if (manifest := repository_of(handle).manifests.load(name))
        }
    assert paths.pack_name(shared) in packs_in_place(backend), "shared chunks are still shared"


def test_pack_of_a_blocked_run_is_not_rewritten(history, backend, clock):
    history.commit(parts_state(3, {1, 2, 3}), 3)
    with ckstore.open(backend, run="other", clock=clock, policy=PLAIN) as other:
        other.commit(parts_state(9, {1, 2, 3}), 9)
        other.commit({"x": np.arange(80_000)}, 10)
        backend.unlink(
            paths.pack_name(repository_of(other).manifests.load(resolve(repository_of(other), 10)).packs[0].pack_id)
        )
    report = other_handle(history).gc(Retention(keep_last=2), now=True, all_runs=True)
    assert report.plan.rewrites == ()
    assert [bool(plan.blocked) for plan in report.runs] == [False, True]


def test_damaged_frame_is_reported_and_its_pack_kept(history, backend):
    (rewrite,) = other_handle(history).gc(Retention(keep_last=2), dry_run=True).plan.rewrites
    path = paths.pack_name(rewrite.pack_id)
    manifest = repository_of(history).manifests.load(resolve(repository_of(history), 1))
    frame = next(f for f in manifest.frames if manifest.packs[f.pack].pack_id == rewrite.pack_id)
    flip(backend, path, frame.offset + 1000)
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert "checksum" in report.done.repacked.troubles[0]
    assert report.done.repacked.pack_ids == []
    assert path in packs_in_place(backend)
    assert history.info(1).generation == 0


def test_full_disk_keeps_the_packs(history, backend, monkeypatch):
    def full(*args, **options):
        raise CapacityError("the disk is full")

    packs = packs_in_place(backend)
    monkeypatch.setattr(backend, "create_pack", full)
    report = other_handle(history).gc(Retention(keep_last=3), now=True, waste_max=0.01)
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert "full" in report.done.repacked.troubles[0]
    assert packs_in_place(backend) == packs
    restores(history, {1: parts_state(1, {1, 2, 3})})


def test_manifest_replaced_by_another_is_not_replaced(history, backend, monkeypatch):
    with_new_locations = rewrite_packs.with_new_locations

    def another_first(manifest, moved):
        monkeypatch.setattr(rewrite_packs, "with_new_locations", with_new_locations)
        other_handle(history).gc(now=True)
        return with_new_locations(manifest, moved)

    monkeypatch.setattr(rewrite_packs, "with_new_locations", another_first)
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert "another writer has published" in report.done.repacked.troubles[0]
    assert history.info(1).generation == 1
    restores(history, {1: parts_state(1, {1, 2, 3}), 2: parts_state(2, {0, 1, 2, 3})})
    assert history.verify("decode").is_clean


def test_checkpoint_dropped_meanwhile_stays_dropped(history, monkeypatch):
    with_new_locations = rewrite_packs.with_new_locations

    def dropped_first(manifest, moved):
        history.delete(1)
        return with_new_locations(manifest, moved)

    monkeypatch.setattr(rewrite_packs, "with_new_locations", dropped_first)
    other_handle(history).gc(Retention(keep_last=2), now=True)
    assert history.steps() == [2]
    other_handle(history).gc(now=True)
    assert history.verify("decode").is_clean


def test_commit_succeeds_after_an_indexed_pack_is_freed(store, clock):
    """A handle remembers where chunks are. These places may be freed between two of its commits."""
    store.commit(parts_state(0, {0, 1, 2, 3}), 0)
    store.commit(parts_state(1, {1, 2, 3}), 1)
    clock.now += 2 * HOUR
    assert other_handle(store).gc(LAST_ONE, now=True).done.repacked.manifests == 1
    store.commit(parts_state(1, {1, 2, 3}), 2)
    restores(store, {1: parts_state(1, {1, 2, 3}), 2: parts_state(1, {1, 2, 3})})
    assert store.verify("decode").is_clean


def test_commit_succeeds_after_its_bases_are_freed(backend, clock):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(100_000).astype(np.float32)
    with ckstore.open(backend, clock=clock) as store:
        for step in range(4):
            store.commit({"w": weights + np.float32(1e-4) * step, "n": step}, step)
        store.delete(3)
        clock.now += 2 * HOUR
        other_handle(store).gc(LAST_ONE, now=True)
        store.commit({"w": weights + np.float32(5e-4), "n": 9}, 9)
        assert store.restore(9)["n"] == 9
        assert store.restore(2)["n"] == 2
        assert store.verify("decode").is_clean


def test_deltas_keep_their_bases(backend, clock):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(100_000).astype(np.float32)
    with ckstore.open(backend, clock=clock) as store:
        states = {}
        for step in range(5):
            weights = weights + np.float32(1e-5) * rng.standard_normal(100_000).astype(np.float32)
            states[step] = {"w": weights, "own": rng.integers(0, 255, 300_000, dtype=np.uint8)}
            store.commit(states[step], step)
        assert store.info(4).depth_max >= 1
        clock.now += 2 * HOUR
        report = other_handle(store).gc(LAST_ONE, now=True)
        assert report.done.repacked.pack_ids, "the base is in a pack whose other frames are not needed"
        restores(store, {4: states[4]})
        assert store.verify("decode").is_clean


def test_reader_of_old_manifest_finds_the_new_one(history, monkeypatch):
    name = resolve(repository_of(history), 1)
    require_packs = type(repository_of(history)).require_packs

    def rewritten_first(parts, manifest):
        monkeypatch.setattr(type(repository_of(history)), "require_packs", require_packs)
        other_handle(history).gc(Retention(keep_last=2), now=True)
        return require_packs(parts, manifest)

    monkeypatch.setattr(type(repository_of(history)), "require_packs", rewritten_first)
    assert load_whole(repository_of(history), name).header.generation == 1


def test_pack_stays_when_generations_run_out(history, monkeypatch):
    monkeypatch.setattr(rewrite_packs, "GENERATION_MAX", 0)
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert report.done.repacked.manifests == 0
    restores(history, {1: parts_state(1, {1, 2, 3})})
