"""Regression tests: each name says what a user would have lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import ckstore
from ckstore import Policy, UsageError
from ckstore._testing import bases_of
from ckstore.codec import chunk_codec, frame_decoder, kernels
from ckstore.commit import chunk_writer, pipeline
from ckstore.commit.commit import CommitRequest
from ckstore.commit.pipeline import ChunkWorker
from ckstore.errors import BackendError, CapacityError, NotFoundError
from ckstore.format.wire import xxh3_64
from ckstore.hashing import chunk_id_of, new_hasher
from ckstore.io.memory import MemoryBackend
from support.faults import Fault, FaultyBackend


def activate(backend: FaultyBackend, fault: Fault) -> None:
    """Activate the fault, and count its calls from now on."""
    backend.fault, backend._counted = fault, 0


def test_array_with_hundreds_of_fields_is_restored(store):
    dtype = np.dtype([(f"a long name of field {index}", "<f4") for index in range(300)])
    store.commit({"table": np.ones(3, dtype)}, 0)
    assert store.restore()["table"].dtype == dtype
    assert store.verify("decode").is_clean


def test_too_large_metrics_are_refused_first(store, backend):
    with pytest.raises(UsageError, match="bytes of metrics"):
        store.commit({"a": np.ones(1000)}, 0, metrics={f"metric number {index}": 0.5 for index in range(3000)})
    assert store.log() == []


@pytest.mark.parametrize("compression", ["none", "fast"])
@pytest.mark.parametrize("verify_encoded", [True, False])
def test_state_changed_during_commit_corrupts_no_chunk(compression, verify_encoded):
    """The frame of a torn chunk must not be published under the id of its earlier bytes."""
    original = np.random.default_rng(5).standard_normal(1 << 20).astype(np.float32)
    changing = original.copy()
    policy = Policy(compression=compression, verify_encoded=verify_encoded, threads=1)
    backend = MemoryBackend()
    is_done = threading.Event()

    def change() -> None:
        while not is_done.is_set():
            changing[:] += 1
            changing[:] = original

    thread = threading.Thread(target=change)
    thread.start()
    raised = 0
    try:
        with ckstore.open(backend, policy=policy) as store:
            for step in range(12):
                try:
                    store.commit({"w": changing}, step)
                except ckstore.CorruptError:
                    raised += 1
    finally:
        is_done.set()
        thread.join()
    with ckstore.open(backend, policy=policy) as store:
        store.commit({"w": original}, 100)
        assert np.array_equal(store.restore()["w"], original)
        assert store.verify("decode").is_clean, f"{raised} of 12 torn commits were caught"


@pytest.mark.parametrize("verify_encoded", [True, False])
def test_change_and_revert_corrupts_no_chunk(monkeypatch, verify_encoded):
    """Hashing the source again would not detect it: only a decoded frame or a private copy is reliable."""
    original = np.random.default_rng(6).standard_normal(1 << 18).astype(np.float32)
    changing = original.copy()
    encode = ChunkWorker.encode

    def encode_meanwhile(*arguments, **keywords):
        changing[:] += 1
        try:
            encoded = encode(*arguments, **keywords)
            return dataclasses.replace(encoded, parts=[memoryview(bytes(part)) for part in encoded.parts])
        finally:
            changing[:] = original

    backend = MemoryBackend()
    with ckstore.open(backend, policy=Policy(verify_encoded=verify_encoded)) as store:
        with monkeypatch.context() as patched:
            patched.setattr(ChunkWorker, "encode", encode_meanwhile)
            with pytest.raises(ckstore.CorruptError) if verify_encoded else contextlib.nullcontext():
                store.commit({"w": changing}, 0)
        store.commit({"w": original}, 1)
        assert np.array_equal(store.restore()["w"], original)
        assert store.verify("decode").is_clean


@pytest.mark.parametrize("name", ["best", "seq", "id"])
def test_reference_keywords_can_be_tags(store, name):
    store.commit({"a": 1}, 7, tags=[name])
    assert store.info(name).step == 7
    store.untag(name)
    with pytest.raises(NotFoundError):
        store.info(name)


def test_failed_tag_after_commit_is_a_warning():
    faulty = FaultyBackend(MemoryBackend())
    with ckstore.open(faulty) as store:
        store.commit({"a": 1}, 0)
        activate(faulty, Fault(1, errno.ENOSPC, for_ever=True, sites=frozenset({"rename"})))
        receipt = store.commit({"a": 2}, 1, tags=["kept"])
        assert any("'kept' was not set" in warning for warning in receipt.warnings)
        assert store.restore() == {"a": 2}


def test_failed_delete_leaves_no_intent():
    faulty = FaultyBackend(MemoryBackend())
    with ckstore.open(faulty) as store:
        for _ in range(2):
            store.commit({"a": 1}, 5)
        # The second intent cannot be written.
        activate(faulty, Fault(2, errno.ENOSPC, sites=frozenset({"create"})))
        with pytest.raises((CapacityError, BackendError)):
            store.delete(5)
        faulty.fault = None
        store.tag("seq:0", "still-there")


def test_chunks_of_restored_checkpoint_are_reused(store):
    first = np.random.default_rng(1).standard_normal(100_000)
    store.commit({"w": first}, 0)
    for step in range(1, 20):
        store.commit({"w": np.full(100_000, float(step))}, step)
    store.restore(0)
    assert store.commit({"w": first}, 0).chunks_new == 0


def test_chunks_of_latest_run_are_reused(tmp_path):
    weights = np.random.default_rng(1).standard_normal(100_000)
    for number in range(18):
        with ckstore.open(tmp_path / "store", run=f"a{number:02}") as other:
            other.commit({"w": np.full(1000, float(number))}, 0)
    with ckstore.open(tmp_path / "store", run="zz") as newest:
        newest.commit({"w": weights}, 0)
    with ckstore.open(tmp_path / "store", run="mine") as mine:
        assert mine.commit({"w": weights}, 0).chunks_new == 0


def test_missing_pack_names_a_lost_tensor(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"model": {"weight": np.arange(1000.0)}}, 3)
        for pack in (tmp_path / "store" / "packs").rglob("*.pack"):
            pack.unlink()
        with pytest.raises(ckstore.MissingChunkError, match=r"model\.weight") as caught:
            store.restore(3)
    assert caught.value.tensor == "model.weight"


@pytest.mark.parametrize("is_immutable", [True, False])
def test_arena_state_is_hashed_once_and_verified(store, monkeypatch, is_immutable):
    """A checksum verifies the copy, so that nothing is hashed twice."""
    state = {"w": np.random.default_rng(5).integers(0, 256, 9 << 20, np.uint8)}
    request = functools.partial(CommitRequest, source_is_immutable=is_immutable)
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", request)
    monkeypatch.setattr(chunk_writer, "require_identity", lambda *_: pytest.fail("it is hashed again"))
    policy = Policy(compression="none")
    store.commit(state, 1, policy=policy)
    assert np.array_equal(store.restore()["w"], state["w"])
    copy = kernels.copy_bytes

    def faulty(source, destination):
        copy(source, destination)
        destination[len(destination) // 2] ^= 1

    monkeypatch.setattr(chunk_writer.kernels, "copy_bytes", faulty)
    state["w"] += 1
    monkeypatch.setattr(chunk_writer, "require_identity", pipeline.require_identity)
    with pytest.raises(ckstore.CorruptError, match="changed while it was being committed, or memory is faulty"):
        store.commit(state, 2, policy=policy)
    assert store.steps() == [1]


def test_encoded_arena_state_is_verified_by_checksum(store, monkeypatch):
    state = {"w": np.random.default_rng(6).standard_normal(3 << 20).astype(np.float32)}
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", functools.partial(CommitRequest, source_is_immutable=True))
    hashed = []
    take = chunk_writer.identity_and_checksum
    monkeypatch.setattr(chunk_writer, "identity_and_checksum", lambda *args: hashed.append(len(args[0])) or take(*args))
    monkeypatch.setattr(chunk_writer, "require_identity", lambda *_: pytest.fail("it is hashed again"))
    policy = Policy(compression="fast")
    assert store.commit(state, 1, policy=policy).bytes_written < state["w"].nbytes
    assert hashed == [4 << 20] * 3
    assert np.array_equal(store.restore()["w"], state["w"])
    monkeypatch.setattr(chunk_writer, "require_identity", pipeline.require_identity)
    encode = chunk_codec.encode

    def faulty(plain, **options):
        wrong = np.array(plain)
        wrong[len(wrong) // 2] ^= 1
        return encode(memoryview(wrong), **options)

    monkeypatch.setattr(chunk_codec, "encode", faulty)
    state["w"] += 1
    with pytest.raises(ckstore.CorruptError, match="changed while it was being committed, or memory is faulty"):
        store.commit(state, 2, policy=policy)
    assert store.steps() == [1]


def test_hashed_base_is_verified_by_checksum(store, monkeypatch):
    """The base decides what is restored: a base that decodes to other bytes must not be used."""
    state = {"w": np.random.default_rng(7).standard_normal(3 << 20).astype(np.float32)}
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", functools.partial(CommitRequest, source_is_immutable=True))
    policy = Policy(compression="fast", base_cache="none")
    store.commit(state, 1, policy=policy)
    monkeypatch.setattr(frame_decoder, "new_hasher", lambda: pytest.fail("a base is hashed again"))
    state["w"][::1000] += np.float32(1)
    assert store.commit(state, 2, policy=policy).chunks_delta == 3
    monkeypatch.undo()
    assert np.array_equal(store.restore()["w"], state["w"])

    def faulty(payload, steps, *, destination, **options):
        chunk_codec.decode(payload, steps, destination=destination, **options)
        destination[len(destination) // 2] = (destination[len(destination) // 2] + 1) % 256

    proofs = []
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", functools.partial(CommitRequest, source_is_immutable=True))
    monkeypatch.setattr(frame_decoder, "chunk_codec", SimpleNamespace(decode=faulty))
    for name in ("new_xxh3", "new_hasher"):
        make = getattr(frame_decoder, name)
        monkeypatch.setattr(frame_decoder, name, lambda name=name, make=make: proofs.append(name) or make())
    state["w"][::1000] += np.float32(1)
    receipt = store.commit(state, 3, policy=policy)
    assert receipt.chunks_delta == 0
    assert "a base could not be read, so its chunk was stored without one" in receipt.warnings[0]
    assert proofs.count("new_xxh3") == 3
    monkeypatch.setattr(frame_decoder, "chunk_codec", chunk_codec)
    assert np.array_equal(store.restore()["w"], state["w"])


def test_unchanged_chunks_are_only_hashed(store, monkeypatch):
    state = {"w": np.random.default_rng(9).integers(0, 256, 9 << 20, np.uint8)}
    store.commit(state, 1)
    # One byte of the last chunk, behind the bytes that are compared first.
    changed = {"w": state["w"].copy()}
    changed["w"][-1] ^= 1
    with monkeypatch.context() as patched:
        patched.setattr(chunk_writer, "identity_and_checksum", lambda *_: pytest.fail("it is copied and summed up"))
        assert store.commit(state, 2).chunks_new == 0
        with pytest.raises(pytest.fail.Exception):
            store.commit(changed, 3)
    assert store.commit(changed, 3).chunks_new == 1
    assert np.array_equal(store.restore()["w"], changed["w"])
    assert store.verify("decode").is_clean


def test_change_that_is_undone_during_hashing_corrupts_no_chunk(store, monkeypatch):
    """Hash and checksum are computed from one copy: another thread may change the source between them, and back."""
    values = np.zeros(1 << 20, np.uint8)

    class Changing:
        def __init__(self):
            self._hasher = new_hasher()

        def update(self, piece):
            values[5] = 7
            self._hasher.update(piece)
            values[5] = 0

        def digest(self):
            return self._hasher.digest()

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "new_hasher", Changing)
        store.commit({"w": values}, 1)
    assert not store.restore()["w"].any()


def test_change_during_hashing_reaches_neither_id_nor_checksum(monkeypatch):
    """Chunk id and checksum belong to the same bytes, whenever the chunk changes."""
    plain, before = np.zeros(1 << 20, np.uint8), bytes(1 << 20)

    class Changing:
        def __init__(self):
            self._hasher = new_hasher()

        def update(self, piece):
            plain[0] = 7
            self._hasher.update(piece)

        def digest(self):
            return self._hasher.digest()

    monkeypatch.setattr(pipeline, "new_hasher", Changing)
    private = np.empty(pipeline.PIECE_NBYTES, np.uint8).data
    chunk_id, checksum = pipeline.identity_and_checksum(plain.data, private)
    assert plain[0] == 7
    assert (chunk_id, checksum) == (chunk_id_of(before), xxh3_64(before))


def test_failed_commits_leave_no_checksums(store, monkeypatch):
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", functools.partial(CommitRequest, source_is_immutable=True))
    state = {"w": np.random.default_rng(8).integers(0, 256, 9 << 20, np.uint8)}
    store.commit(state, 1, policy=Policy(compression="none"))
    assert len(bases_of(store)._checksums) == 3

    def fail(packer):
        raise BackendError("the disk is gone", where="here")

    monkeypatch.setattr("ckstore.store.pack_writer.PackWriter.finish", fail)
    for step in range(2, 6):
        state["w"] += 1
        with pytest.raises(BackendError, match="the disk is gone"):
            store.commit(state, step, policy=Policy(compression="none"))
    assert len(bases_of(store)._checksums) == 3


def test_wrong_checksum_is_not_used_twice(store, monkeypatch):
    """A retried commit reads the same bases: then BLAKE3 decides, and they are used."""
    monkeypatch.setattr("ckstore.ops.commit.CommitRequest", functools.partial(CommitRequest, source_is_immutable=True))
    state = {"w": np.random.default_rng(9).standard_normal(3 << 20).astype(np.float32)}
    policy = Policy(compression="fast", base_cache="none")
    store.commit(state, 1, policy=policy)
    for chunk_id in bases_of(store)._checksums:
        bases_of(store)._checksums[chunk_id] ^= 1
    state["w"][::1000] += np.float32(1)

    def fail(packer):
        raise BackendError("the disk is gone", where="here")

    with monkeypatch.context() as patch:
        patch.setattr("ckstore.store.pack_writer.PackWriter.finish", fail)
        with pytest.raises(BackendError, match="the disk is gone"):
            store.commit(state, 2, policy=policy)
    receipt = store.commit(state, 2, policy=policy)
    assert receipt.chunks_delta == 3
    assert not receipt.warnings
    assert np.array_equal(store.restore()["w"], state["w"])
