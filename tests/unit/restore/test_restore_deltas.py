"""Protects restores of chunks with bases: they return the committed bits, or an error that names the frame.

The tests choose the bases themselves, so that every shape of chain occurs.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.codec import chunk_codec
from ckstore.codec.byte_codecs import ConstCodec
from ckstore.config import KIB, MIB, Limits, Policy
from ckstore.errors import CorruptError, MissingChunkError
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.paths import pack_name
from ckstore.io.backend import ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from ckstore.restore import reader, restore
from ckstore.store import memory_budget
from ckstore.store.store_config import create_store
from support import memory_files
from support.chains import ChainWriter
from support.model import difference

CHUNK_NBYTES = 64 * KIB
COUNT = 100_000  # Seven chunks of floats.


def trained(array, step):
    """Return an array after a training step: every element changes a little."""
    for number in range(step):
        noise = np.random.default_rng(number).standard_normal(array.size).astype(np.float32)
        array = array + noise * np.float32(1e-4)
    return array


def state_at(step):
    """Return a training state: large and small tensors, a frozen one, and plain values."""
    return copy.deepcopy(made_state(step))


@functools.cache
def made_state(step):
    source = np.random.default_rng(7)
    large, other, frozen = (source.standard_normal(COUNT).astype(np.float32) for _ in range(3))
    small = [trained(np.ones(900 + k, np.float32), step) for k in range(5)]
    return {"w": trained(large, step), "m": {"v": trained(other, step), "small": small}, "frozen": frozen, "n": step}


class Shuffled(MemoryBackend):
    """Return ranges in another order than requested: as many as there are buffers, the last one first."""

    def read_ranges(self, requests, pool):
        held: list[ReadResult] = []
        for request in requests:
            if held and not pool.free_count:
                yield from reversed(held)
                held.clear()
            held.append(next(super().read_ranges([request], pool)))
        yield from reversed(held)


def open_small(backend, **policy):
    """Open a new store of small chunks."""
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=CHUNK_NBYTES))
    return ckstore.open(backend, policy=Policy(**policy))


def commit_chain(store, count):
    """Commit this many states, each based on the previous one."""
    writer = ChainWriter(store)
    for step in range(count):
        writer.commit(state_at(step), step, base=None if step == 0 else -1)


@pytest.fixture(params=["memory", "shuffled", "folder"])
def opened(request, tmp_path):
    """A store of small chunks: in memory with reordered reads, and on disk."""
    makes = {"memory": MemoryBackend, "shuffled": Shuffled, "folder": lambda: LocalBackend(tmp_path / "store")}
    with open_small(makes[request.param](), threads=3) as store:
        yield store


@pytest.fixture
def small_store(backend):
    """A store of small chunks in memory."""
    with open_small(backend) as store:
        yield store


@pytest.fixture
def chain(opened):
    """Four checkpoints, each based on the previous one."""
    commit_chain(opened, 4)
    return opened


def manifest_of(store, seq):
    names = {name.seq: name for name in repository_of(store).manifests.listing().names}
    return repository_of(store).manifests.load(names[seq])


def flip(store, manifest, frame, at=FRAME_HEADER_NBYTES + 20):
    """Flip a bit of a frame in a store in memory."""
    pack = pack_name(manifest.packs[frame.pack].pack_id)
    memory_files.flip(repository_of(store).backend, pack, frame.offset + at, mask=64)


# Content


@pytest.mark.parametrize("step", range(4))
def test_every_depth_is_restored(chain, step):
    assert manifest_of(chain, step).header.depth_max == step
    assert difference(chain.restore(step), state_at(step)) is None


@pytest.mark.parametrize("check", ["blake3", "xxh3"])
@pytest.mark.parametrize("threads", [1, 4])
def test_checks_and_threads_do_not_change_the_result(backend, check, threads):
    with open_small(backend, verify_restored=check, threads=threads, memory_nbytes_max=56 * MIB) as store:
        commit_chain(store, 3)
        assert difference(store.restore(), state_at(2)) is None
        manifest = manifest_of(store, 2)
        flip(store, manifest, max((f for f in manifest.frames if f.depth == 1), key=lambda f: f.stored_nbytes))
        with pytest.raises(CorruptError):
            store.restore()


def test_part_of_a_state_is_read_with_its_bases_only(chain):
    whole = state_at(3)
    assert difference(chain.restore(3, only="m.small*"), {"m": {"small": whole["m"]["small"]}}) is None
    assert difference(chain.restore(3, only=["w", "n"]), {"w": whole["w"], "n": 3}) is None
    if isinstance(repository_of(chain).backend, MemoryBackend):
        manifest = manifest_of(chain, 3)
        for frame in manifest.frames:
            if frame.stored_nbytes > 30_000:
                flip(chain, manifest, frame)
        assert difference(chain.restore(3, only="m.small*"), {"m": {"small": whole["m"]["small"]}}) is None


def test_state_is_filled_in_place(chain):
    live = state_at(0)
    w, small = live["w"], live["m"]["small"][2]
    assert chain.restore(3, into=live) is live
    assert live["w"] is w
    assert live["m"]["small"][2] is small
    assert difference(live, state_at(3)) is None


def test_tensors_of_other_strides_are_filled_wave_by_wave(chain, monkeypatch):
    monkeypatch.setattr(restore, "WAVE_NBYTES", 100_000)
    live = state_at(0)
    for holder, key in ((live, "w"), (live["m"], "v"), (live, "frozen")):
        holder[key] = np.zeros(2 * COUNT, np.float32)[::2]
    chain.restore(3, into=live)
    assert difference({**live, "w": live["w"].copy()}, state_at(3)) is None


def test_equal_tensors_do_not_share_memory(opened):
    def state(step):
        w = state_at(step)["w"]
        return {"a": w, "b": w.copy(), "reversed": w[::-1].copy(), "c": w.copy()}

    writer = ChainWriter(opened)
    for step in range(3):
        writer.commit(state(step), step, base=None if step == 0 else -1)
    back = opened.restore(2)
    assert difference(back, state(2)) is None
    back["a"][:] = 0
    assert difference(back["c"], state(2)["c"]) is None


def test_base_that_is_also_selected_is_kept(opened):
    old, new = state_at(0)["w"], state_at(1)["w"]
    writer = ChainWriter(opened)
    writer.commit({"x": old}, 0)
    writer.commit({"x": new, "ema": old, "same": new.copy()}, 1, base=0)
    assert manifest_of(opened, 1).header.depth_max == 1
    assert difference(opened.restore(1), {"x": new, "ema": old, "same": new}) is None


def test_base_of_all_chunks_is_read_in_portions(opened):
    zeros = {f"t{k}": np.zeros(20_000, np.int32) for k in range(20)}
    counts = {name: np.full(20_000, 1 + k, np.int32) + np.arange(20_000) % 3 for k, name in enumerate(zeros)}
    writer = ChainWriter(opened)
    writer.commit(zeros, 0)
    writer.commit({**counts, "still": np.zeros(20_000, np.int32)}, 1, base=0)
    manifest = manifest_of(opened, 1)
    resting = [frame.base for frame in manifest.frames if frame.base >= 0]
    assert max(resting.count(base) for base in resting) > 12
    assert difference(opened.restore(1), {**counts, "still": zeros["t0"]}) is None


# Roundings


def halves(step):
    """Return a state of masters and their fp16 roundings."""
    masters = {"w": state_at(step)["w"], "v": state_at(step)["m"]["v"][: COUNT // 2]}
    return {"model": {name: master.astype(np.float16) for name, master in masters.items()}, "master": masters}


@pytest.fixture
def rounded(tmp_path, request):
    """Three checkpoints of masters and roundings. Chunks of roundings are half as long."""
    backend = Shuffled()
    with open_small(backend, threads=2) as store:
        writer = ChainWriter(store)
        for step in range(3):
            writer.commit(halves(step), step, base=None if step == 0 else -1)
        yield store


@pytest.mark.parametrize("step", range(3))
def test_roundings_are_made_from_their_masters(rounded, step):
    frames = manifest_of(rounded, step).frames
    assert sum(frame.stored_nbytes == 1 for frame in frames) >= 7
    assert difference(rounded.restore(step), halves(step)) is None


@pytest.mark.parametrize("step", range(3))
def test_roundings_without_masters_use_a_buffer(rounded, step):
    assert difference(rounded.restore(step, only="model.*"), {"model": halves(step)["model"]}) is None


def test_masters_are_kept_until_rounded(rounded, monkeypatch):
    """A destination may not be released before the roundings of its chunks are made."""
    monkeypatch.setattr(restore, "WAVE_NBYTES", 1)
    live = halves(0)
    for part in live.values():
        for name, array in part.items():
            part[name] = np.zeros(2 * array.size, array.dtype)[::2]
    rounded.restore(2, into=live)
    assert difference({part: {name: a.copy() for name, a in live[part].items()} for part in live}, halves(2)) is None


def test_rounding_of_previous_master_uses_a_buffer(small_store):
    """The roundings did not change although their masters did. They still refer to the previous commit's chunks."""
    first = halves(0)
    later = {"model": first["model"], "master": {name: m.copy() for name, m in first["master"].items()}}
    for master in later["master"].values():
        words = master.view(np.uint32)
        words[::7] ^= 1
    writer = ChainWriter(small_store)
    writer.commit(first, 0)
    writer.commit(later, 1, base=0)
    assert manifest_of(small_store, 1).header.chunks_new < 20
    assert difference(small_store.restore(1), later) is None
    assert difference(small_store.restore(1, only="model.w"), {"model": {"w": later["model"]["w"]}}) is None


def test_delta_on_a_rounding_uses_a_buffer(small_store):
    first = halves(0)
    later = {"model": {"w": (first["model"]["w"].astype(np.float32) * 1.01).astype(np.float16)}}
    writer = ChainWriter(small_store)
    writer.commit(first, 0)
    writer.commit({**later, "z": 1}, 1, base=0)
    assert manifest_of(small_store, 1).header.depth_max == 2
    assert difference(small_store.restore(1), {**later, "z": 1}) is None
    writer.commit({"both": {"x": later["model"]["w"], "y": first["master"]}}, 2)
    assert difference(small_store.restore(2), {"both": {"x": later["model"]["w"], "y": first["master"]}}) is None


encode_delta = chunk_codec.encode_delta


def constant_delta(plain, base, **how):
    """Code a difference that is the same in every byte with the codec for constants, as docs/FORMAT.md allows."""
    step = (plain[0] - base[0]) % 256
    if bytes((byte + step) % 256 for byte in base) != bytes(plain):
        return encode_delta(plain, base, **how)
    words = bytearray(len(plain))
    chunk_codec.subtract_base(plain, base, memoryview(words), width=1, config=chunk_codec.INTEGERS)
    steps = ((chunk_codec.DELTA_ID, chunk_codec.INTEGERS), (ConstCodec.codec_id, b""))
    return chunk_codec.Encoded(steps, [memoryview(words)[:1]], 1)


def test_delta_of_one_byte_is_no_rounding(small_store, monkeypatch):
    monkeypatch.setattr(chunk_codec, "encode_delta", constant_delta)
    writer = ChainWriter(small_store)
    first = np.random.default_rng(1).integers(0, 200, 2 * CHUNK_NBYTES, np.uint8)
    sparse = (np.random.default_rng(2).random(first.size) < 0.01).astype(np.uint8)
    states = [
        {"w": first},
        {"w": first + 1},  # The base is not part of the state.
        {"w": first + 2, "base": first + 1, "root": first},
        {"w": first + 2 + sparse, "base": first + 2},  # An ordinary delta on one of one byte.
        {"w": first + 5 + sparse, "part": (first + 2)[:1000]},
    ]
    for number, state in enumerate(states):
        manifest = writer.commit(state, number, base=None if number == 0 else -1)
        assert number == 0 or any(frame.base >= 0 and frame.stored_nbytes == 1 for frame in manifest.frames)
    for number, state in enumerate(states):
        assert difference(state, small_store.restore(number)) is None
        for name in state:
            part = small_store.restore(number, only=name)
            assert difference({name: state[name]}, part) is None
    assert small_store.verify("decode").is_clean


# Damage


@pytest.mark.parametrize("depth", range(4))
def test_damage_in_a_chain_names_frame_and_dependents(backend, depth, no_threads_left):
    with open_small(backend, threads=2) as store:
        commit_chain(store, 4)
        manifest = manifest_of(store, 3)
        last = next(index for index, frame in enumerate(manifest.frames) if frame.depth == 3)
        links = [manifest.frames[last]]
        while links[-1].base >= 0:
            links.append(manifest.frames[links[-1].base])
        frame = links[3 - depth]
        flip(store, manifest, frame)
        with pytest.raises(CorruptError) as caught:
            store.restore(3)
        error = caught.value
        assert (error.pack_id, error.offset) == (manifest.packs[frame.pack].pack_id.hex(), frame.offset)
        assert error.chunk_id == frame.chunk_id.hex()
        assert error.tensor == "w"
        assert error.chain == tuple(link.chunk_id.hex() for link in links)
        assert error.checkpoints == tuple(f"main/{seq} (step {seq})" for seq in range(3, depth - 1, -1))
        shown = str(error)
        assert " -> base ".join(link.chunk_id.hex()[:16] for link in links) in shown
        for fact in (error.pack_id, f"offset {frame.offset}", "tensor w", "step 3 (seq 3)", "needed by main/3"):
            assert fact in shown
        assert error.exit_code == 12
        for step in range(depth):
            assert difference(store.restore(step), state_at(step)) is None


def test_damage_in_a_buffered_frame_is_named(small_store):
    commit_chain(small_store, 3)
    manifest = manifest_of(small_store, 2)
    shared = next(chunk for chunk in manifest.chunks if chunk.nbytes == 4 * sum(900 + k for k in range(5)))
    last = next(frame for frame in manifest.frames if frame.chunk_id == shared.chunk_id)
    frame = manifest.frames[last.base]
    assert frame.depth == 1
    flip(small_store, manifest, frame)
    with pytest.raises(CorruptError, match=r"m\.small") as caught:
        small_store.restore(2)
    assert caught.value.offset == frame.offset
    assert len(caught.value.chain) == 3


def test_missing_base_pack_is_a_missing_chunk(small_store, backend, caplog):
    commit_chain(small_store, 3)
    backend.unlink(pack_name(manifest_of(small_store, 1).packs[-1].pack_id))
    for step in (1, 2):
        with pytest.raises(MissingChunkError):
            small_store.restore(step)
    assert difference(small_store.restore(), state_at(0)) is None


@pytest.mark.parametrize("at", [20, FRAME_HEADER_NBYTES + 40])
def test_failure_releases_buffered_frames(no_threads_left, at, monkeypatch):
    """Also when waiting frames hold every buffer: finding the damage must not need one."""
    monkeypatch.setattr(memory_budget, "READ_BUFFERS", 4)
    with open_small(Shuffled(), threads=4) as store:
        commit_chain(store, 3)
        manifest = manifest_of(store, 2)
        for number, frame in enumerate(manifest.frames):
            flip(store, manifest, frame, at)
            with pytest.raises(CorruptError):
                store.restore(2)
            flip(store, manifest, frame, at)
            if number == 12:
                break
        assert difference(store.restore(2), state_at(2)) is None


def test_frame_with_other_base_id_is_refused(small_store):
    """Frames of one length can be applied to any base. Only the ids in header and manifest show the mistake."""
    writer = ChainWriter(small_store)
    writer.commit(state_at(0), 0)
    writer.commit(state_at(1), 1, base=0)
    manifest = manifest_of(small_store, 1)
    frames = list(manifest.frames)
    # Two bases come first, then their dependents, so that each dependent may use either base.
    frames.sort(key=lambda frame: frame.depth)
    index_of = {frame.chunk_id: index for index, frame in enumerate(frames)}
    frames = [
        frame if frame.base < 0 else replace(frame, base=index_of[manifest.frames[frame.base].chunk_id])
        for frame in frames
    ]
    one, other = [index for index, frame in enumerate(frames) if frame.depth == 1][:2]
    frames[one], frames[other] = (
        replace(frames[one], base=frames[other].base),
        replace(frames[other], base=frames[one].base),
    )
    swapped = writer.publish_again(manifest, frames)
    with pytest.raises(CorruptError, match="base"):
        small_store.restore(f"seq:{swapped.header.seq}")
    assert not small_store.verify("quick").is_clean


# Bounds


class CountedPool(BufferPool):
    """Record how many of its buffers were in use at the same time."""

    made: list[CountedPool] = []  # noqa: RUF012 - the test reads it

    def __init__(self, block_nbytes, count):
        super().__init__(block_nbytes, count)
        self.made.append(self)
        self.out_max = 0

    def wait_acquire(self, timeout):
        buffer = super().wait_acquire(timeout)
        self.out_max = max(self.out_max, self.count - self.free_count)
        return buffer


@pytest.mark.parametrize("only", [None, "m.small*"])
def test_restore_of_chains_obeys_the_memory_bound(monkeypatch, only):
    CountedPool.made.clear()
    monkeypatch.setattr(reader, "BufferPool", CountedPool)
    with open_small(Shuffled(), threads=64, memory_nbytes_max=56 * MIB) as store:
        commit_chain(store, 4)
        store.restore(3, only=only)
    (pool,) = CountedPool.made
    assert pool.nbytes <= 56 * MIB
    assert pool.free_count == 0
    assert pool.out_max <= pool.count


def test_progress_does_not_count_bases(chain):
    seen = []
    chain.restore(3, on_progress=lambda done, total: seen.append((done, total)))
    total = manifest_of(chain, 3).header.bytes_state
    assert max(seen) == (total, total)
    assert {each[1] for each in seen} == {total}
