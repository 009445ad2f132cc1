"""Protects verify of deltas: each frame is decoded once within bounds, and a damaged base names all that need it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.config import KIB, MIB, Limits, Policy
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.paths import pack_name
from ckstore.ops import verify_packs
from ckstore.store.store_config import create_store
from support.chains import ChainWriter
from support.memory_files import flip

CHUNK_NBYTES = 64 * KIB
COUNT = CHUNK_NBYTES // 4


def state_at(step):
    source = np.random.default_rng(3)
    large = source.standard_normal(2 * COUNT).astype(np.float32)
    noise = np.random.default_rng(100 + step).standard_normal(2 * COUNT).astype(np.float32) * np.float32(1e-3)
    master = large + noise * (step > 0)
    return {"w": master, "half": master.astype(np.float16), "b": master[:50].copy(), "n": step}


@pytest.fixture
def store(backend):
    """A store of small chunks."""
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=CHUNK_NBYTES))
    with ckstore.open(backend, policy=Policy(threads=2)) as opened:
        yield opened


SHAPES = {
    "chain": [None, 0, 1, 2, 3, 4],
    "star": [None, 0, 0, 0, 0, 0],
    "two stars": [None, 0, 0, None, 3, 3],
    "comb": [None, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10],
    "bush": [None, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
}


@pytest.fixture(params=SHAPES)
def tree(request, store):
    """Return a store of checkpoints whose bases form some shape, and the base of each step."""
    writer = ChainWriter(store)
    for step, base in enumerate(SHAPES[request.param]):
        writer.commit(state_at(step), step, base=base)
    return store, SHAPES[request.param]


def manifests_of(store):
    return [repository_of(store).manifests.load(name) for name in repository_of(store).manifests.listing().names]


def frames_of(manifests):
    """Return every frame once: pack and offset, with the frame and its manifest."""
    return {(m.packs[f.pack].pack_id, f.offset): (m, f) for m in manifests for f in m.frames}


def damage(backend, manifest, frame):
    flip(backend, pack_name(manifest.packs[frame.pack].pack_id), frame.offset + FRAME_HEADER_NBYTES)


@pytest.fixture
def decoded(monkeypatch):
    """Count how often each frame is decoded."""
    counts = Counter()
    original = FrameDecoder.check_frame

    def check_frame(self, header, payload, base=None, /):
        counts[header.chunk_id] += 1
        return original(self, header, payload, base)

    monkeypatch.setattr(FrameDecoder, "check_frame", check_frame)
    return counts


def test_frames_are_decoded_about_once(tree, decoded):
    store, shape = tree
    report = store.verify("decode")
    assert report.is_clean, report.damage
    frames = frames_of(manifests_of(store))
    assert report.frame_count == len(frames)
    assert set(decoded) == {frame.chunk_id for _, frame in frames.values()}
    # A frame without dependents is decoded once. A root is decoded once more, to begin its tree.
    based = {frame.chunk_id for _, frame in frames.values() if frame.base >= 0}
    assert sum(decoded[chunk_id] for chunk_id in based) <= 1.3 * len(based)
    assert max(decoded.values()) <= 2 + len(shape) // 3


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("copies", [0, 1])
def test_few_buffers_cost_only_time(tree, decoded, copies, monkeypatch):
    store, _ = tree
    monkeypatch.setattr(verify_packs, "COPIES_MAX", copies)
    monkeypatch.setattr(verify_packs, "NESTED_MAX", 2)
    assert store.verify("decode").is_clean
    frames = frames_of(manifests_of(store))
    assert set(decoded) == {frame.chunk_id for _, frame in frames.values()}
    for number, (manifest, frame) in enumerate(frames.values()):
        if frame.depth and number % 5 == 0:
            damage(repository_of(store).backend, manifest, frame)
            assert len(store.verify("decode").damage) == 1
            damage(repository_of(store).backend, manifest, frame)


def test_damaged_base_is_reported_once_with_dependents(store, backend):
    writer = ChainWriter(store)
    for step in range(4):
        writer.commit(state_at(step), step, base=None if step == 0 else -1)
    manifests = manifests_of(store)
    second = manifests[1]
    frame = next(frame for frame in second.frames if frame.depth == 1 and frame.stored_nbytes > 20_000)
    damage(backend, second, frame)
    for level in ("read", "decode"):
        (found,) = store.verify(level).damage
        assert f"offset {frame.offset}" in found.where
        assert found.checkpoints == tuple(f"main/{seq} (step {seq})" for seq in (1, 2, 3))
        assert "w" in found.tensors
    (found,) = store.verify("decode", ref=3).damage
    assert found.checkpoints == ("main/3 (step 3)",)
    assert set(found.tensors) == {"half", "w"}
    assert store.verify("decode", ref=0).is_clean


def test_missing_base_pack_names_dependent_tensors(store, backend):
    writer = ChainWriter(store)
    for step in range(3):
        writer.commit(state_at(step), step, base=None if step == 0 else -1)
    backend.unlink(pack_name(manifests_of(store)[0].packs[0].pack_id))
    for level in ("quick", "decode"):
        (found,) = store.verify(level, ref=2).damage
        assert found.tensors == ("w", "half", "b")
        (found,) = store.verify(level).damage
        assert len(found.checkpoints) == 3


def test_wrong_delta_is_found_by_decoding(store, backend, monkeypatch):
    """Checksums are right and the base is sound, but the bytes are wrong: the encoder failed at the commit."""
    from ckstore.codec import chunk_codec

    original = chunk_codec.subtract_base

    def wrong(plain, base, planes_out, **named):
        original(plain, base, planes_out, **named)
        planes_out[1] ^= 1

    writer = ChainWriter(store)
    writer.commit(state_at(0), 0)
    with monkeypatch.context() as patched:
        patched.setattr(chunk_codec, "subtract_base", wrong)
        writer.commit(state_at(1), 1, base=0)
    assert store.verify("read").is_clean
    found = store.verify("decode").damage
    assert found
    assert all("other bytes than were committed" in each.what for each in found)
    assert {each.checkpoints for each in found} == {("main/1 (step 1)",)}


def test_progress_reaches_the_total(tree):
    store, _ = tree
    seen = []
    store.verify("decode", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] >= seen[-1][1] * 0.99


def test_internal_failure_is_raised(tree, monkeypatch, no_threads_left):
    store, _ = tree
    original = FrameDecoder.check_frame

    def fail(self, header, payload, base=None, /):
        if base is not None:
            raise RuntimeError("a bug")
        return original(self, header, payload, base)

    monkeypatch.setattr(FrameDecoder, "check_frame", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        store.verify("decode")


def test_verify_obeys_the_memory_bound(tree, monkeypatch):
    store, _ = tree
    pools = []

    class Pool(verify_packs.BufferPool):
        def __init__(self, block_nbytes, count):
            super().__init__(block_nbytes, count)
            pools.append(self.nbytes)

    monkeypatch.setattr(verify_packs, "BufferPool", Pool)
    policy = Policy(threads=64, memory_nbytes_max=56 * MIB)
    with ckstore.open(repository_of(store).backend, create=False, policy=policy) as bounded:
        assert bounded.verify("decode").is_clean
    assert pools
    assert len(pools) * (max(pools) + (verify_packs.COPIES_MAX + 1) * CHUNK_NBYTES) < 56 * MIB
