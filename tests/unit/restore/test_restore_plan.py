"""Protects restore plans: bases come first, close frames are read together, unneeded frames are not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import KIB, Limits
from ckstore.errors import MalformedError
from ckstore.restore.plan import GAP_NBYTES_MAX, PLACES_MAX, base_id_of, chain_of, packs_of, plan_restore
from ckstore.store.store_config import create_store
from support.chains import ChainWriter

CHUNK_NBYTES = 64 * KIB
GROUP_NBYTES = CHUNK_NBYTES + 32 * KIB


def state_at(step):
    source = np.random.default_rng(3)
    w = source.standard_normal(100_000).astype(np.float32) + np.float32(step * 1e-4)
    many = {
        f"t{k}": np.full(20_000, k * (step > 0), np.int32) + (np.arange(20_000) % 3) * (step > 0) for k in range(20)
    }
    return {"w": w, "half": w.astype(np.float16), "small": [w[:50] + k for k in range(4)], **many}


@pytest.fixture
def manifests(backend):
    """Three checkpoints, each based on the previous one."""
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=CHUNK_NBYTES))
    with ckstore.open(backend) as store:
        writer = ChainWriter(store)
        yield [writer.commit(state_at(step), step, base=None if step == 0 else -1) for step in range(3)]


def plan_all(manifest, wave_nbytes=None, storages=None):
    storages = range(len(manifest.storages)) if storages is None else storages
    return plan_restore(manifest, storages, group_nbytes_max=GROUP_NBYTES, wave_nbytes=wave_nbytes)


@pytest.mark.parametrize("wave_nbytes", [None, 1, 300_000])
def test_bases_are_planned_first_at_their_destination(manifests, wave_nbytes):
    for manifest in manifests:
        reads = plan_all(manifest, wave_nbytes).reads
        for index, read in enumerate(reads):
            assert read.index == index
            assert read.ref == manifest.frames[read.frame]
            if read.ref.base < 0:
                assert read.needs == -1
                continue
            base = reads[read.needs]
            assert read.needs < index
            assert base.frame == read.ref.base
            if read.master is None:
                assert set(read.places) <= set(base.places)
            else:
                assert read.master == base.places[0]
                assert base.targets


def test_every_target_is_written_once(manifests):
    for manifest in manifests:
        plan = plan_all(manifest)
        targets = [target for read in (*plan.reads, *plan.buffered_reads) for target in read.targets]
        covered = dict.fromkeys(range(len(manifest.storages)), 0)
        for target in targets:
            covered[target.storage] += target.nbytes
        assert covered == {index: storage.nbytes for index, storage in enumerate(manifest.storages)}
        assert len(set(targets)) == len(targets)


def test_no_destination_is_used_twice_at_one_level(manifests):
    for manifest in manifests:
        seen = set()
        for read in plan_all(manifest).reads:
            assert len(read.places) <= PLACES_MAX + 1
            for place in read.places:
                assert (place, read.ref.depth) not in seen
                seen.add((place, read.ref.depth))


def test_groups_are_near_frames_in_pack_order(manifests):
    for manifest in manifests:
        plan = plan_all(manifest)
        keys = [(g.reads[0].ref.depth, g.pack, g.offset) for g in plan.groups]
        assert keys == sorted(keys)
        for group in plan.groups:
            assert group.nbytes <= GROUP_NBYTES
            end = group.offset
            for read in group.reads:
                assert (read.ref.pack, read.ref.depth) == (group.pack, group.reads[0].ref.depth)
                assert 0 <= read.ref.offset - end <= GAP_NBYTES_MAX
                end = read.ref.offset + read.ref.frame_nbytes
            assert end == group.offset + group.nbytes


def test_shared_chunks_use_buffers_only_with_bases(manifests):
    assert plan_all(manifests[0]).buffered_reads == ()
    plan = plan_all(manifests[2])
    assert plan.buffered_reads
    for read in plan.buffered_reads:
        assert all(target.nbytes < read.nbytes for target in read.targets)
        assert [frame.depth for _, frame in chain_of(manifests[2], read.frame)] == [0, 1, 2]
    assert packs_of(manifests[2], plan) == set(range(len(manifests[2].packs)))


def test_selected_part_needs_only_its_chains(manifests):
    manifest = manifests[2]
    (storage,) = {manifest.tensors[index].storage for index, _ in enumerate(manifest.tensors[:1])}
    plan = plan_all(manifest, storages=[storage])
    chunks = {manifest.chunks[piece.chunk].chunk_id for piece in manifest.storages[storage].pieces}
    needed = set()
    for index, frame in enumerate(manifest.frames):
        if frame.chunk_id in chunks:
            needed |= {other.chunk_id for _, other in chain_of(manifest, index)}
    assert {read.ref.chunk_id for read in plan.reads} <= needed


def test_waves_follow_the_order_of_storages(manifests):
    manifest = manifests[2]
    first_of = {}
    for read in plan_all(manifest, wave_nbytes=1).reads:
        for target in read.targets:
            first_of.setdefault(target.storage, read.index)
    alone = [index for index in first_of if index > 6]
    assert [first_of[index] for index in sorted(alone)] == sorted(first_of[index] for index in alone)


def test_delta_of_another_length_is_refused(manifests):
    manifest = manifests[1]
    at = next(index for index, frame in enumerate(manifest.frames) if frame.base >= 0 and frame.stored_nbytes > 999)
    base = manifest.frames[at].base
    other = next(
        index
        for index, frame in enumerate(manifest.frames)
        if index > base and frame.base >= 0 and frame.base != base and frame.stored_nbytes > 9
        and nbytes_of(manifest, index) != nbytes_of(manifest, at)
    )  # fmt: skip
    frames = list(manifest.frames)
    frames[other] = replace(frames[other], base=base)
    with pytest.raises(MalformedError, match="different lengths"):
        plan_all(replace(manifest, frames=tuple(frames)))


def nbytes_of(manifest, frame):
    return next((c.nbytes for c in manifest.chunks if c.chunk_id == manifest.frames[frame].chunk_id), None)


def test_base_ids_are_those_of_the_table(manifests):
    for index, frame in enumerate(manifests[2].frames):
        expected = bytes(32) if frame.base < 0 else manifests[2].frames[frame.base].chunk_id
        assert base_id_of(manifests[2], index) == expected
