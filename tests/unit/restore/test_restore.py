"""Protects restore: it returns exactly the committed bits, or an error that names the damage.

Without a reference, restore falls back to an older checkpoint for torn manifests and missing packs. With
``fallback=True`` it also does so for damage found while reading.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import (
    BackendError,
    ChecksumError,
    CorruptError,
    MalformedError,
    MissingChunkError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.io.memory import MemoryBackend
from support.memory_files import edited, flip, swap, truncate
from support.model import difference


def state_of(seed, count=60_000):
    source = np.random.default_rng(seed)
    return {"model": {"w": source.standard_normal(count), "b": source.standard_normal(9)}, "seed": seed}


@pytest.fixture
def run(store):
    """Three checkpoints of different states, steps 10, 20, 30."""
    for number in range(3):
        store.commit(state_of(number), 10 * (number + 1), metrics={"loss": -number})
    return store


def manifest_of(store, seq):
    names = {name.seq: name for name in repository_of(store).manifests.listing().names}
    return repository_of(store).manifests.load(names[seq])


def manifest_name(store, seq):
    return next(name.path for name in repository_of(store).manifests.listing().names if name.seq == seq)


def pack_of(store, seq, number=0):
    pack_id = manifest_of(store, seq).packs[number].pack_id
    return f"packs/{pack_id[:1].hex()}/{pack_id.hex()}.pack"


def frame_of(store, seq, path_index=0):
    return manifest_of(store, seq).frames[path_index]


# Content


def test_restore_without_a_name_returns_the_newest(run):
    assert difference(run.restore(), state_of(2)) is None


def test_restored_tensors_are_writable_copies(run):
    back = run.restore()
    back["model"]["w"][:] = 0
    assert difference(run.restore(), state_of(2)) is None


def test_empty_run_has_nothing_to_restore(store):
    with pytest.raises(NotFoundError, match="no checkpoint"):
        store.restore()
    assert store.latest() is None


def test_restored_names_its_checkpoint(run):
    assert run.restored is None
    run.restore(10)
    restored = run.restored
    assert (restored.step, restored.seq, restored.metrics, restored.parent) == (10, 0, {"loss": 0.0}, None)
    assert restored.fidelity == "exact"
    run.restore()
    assert run.restored.step == 30


def test_only_reads_what_it_needs(run, backend):
    name = pack_of(run, 2)
    frame = max(manifest_of(run, 2).frames, key=lambda frame: frame.stored_nbytes)
    flip(backend, name, frame.offset + FRAME_HEADER_NBYTES + 5000)
    assert run.restore(30, only="seed") == {"seed": 2}
    assert difference(run.restore(30, only="model.b"), {"model": {"b": state_of(2)["model"]["b"]}}) is None
    with pytest.raises(CorruptError, match=r"model\.w"):
        run.restore(30, only="model.*")


def test_only_matching_nothing_is_not_found(run):
    with pytest.raises(NotFoundError):
        run.restore(only="nothing.*")
    with pytest.raises(UsageError):
        run.restore(only=[])


def test_star_matches_dots_and_lists_are_whole(store):
    state = {"a": {"x": {"w": np.ones(3)}, "y": 2}, "l": [np.zeros(2), {"w": 5}], "z": 1}
    store.commit(state, 1)
    assert difference(store.restore(only="a.*w"), {"a": {"x": {"w": np.ones(3)}}}) is None
    assert difference(store.restore(only="*w"), {"a": {"x": {"w": np.ones(3)}}, "l": state["l"]}) is None
    assert difference(store.restore(only=["z", "a.y"]), {"a": {"y": 2}, "z": 1}) is None


def test_shared_memory_is_stored_once_and_shared_again(store):
    base = np.arange(100_000.0)
    receipt = store.commit({"all": base, "part": base[10:20], "again": base}, 1)
    assert receipt.bytes_state == base.nbytes
    back = store.restore()
    assert back["all"] is back["again"]
    back["all"][12] = -1
    assert back["part"][2] == -1


@pytest.mark.parametrize("check", ["blake3", "xxh3"])
def test_both_checks_find_flipped_bits(check):
    backend = MemoryBackend()
    with ckstore.open(backend, policy=ckstore.Policy(verify_restored=check)) as store:
        store.commit(state_of(1), 1)
        assert difference(store.restore(), state_of(1)) is None
        frame = frame_of(store, 0)
        flip(backend, pack_of(store, 0), frame.offset + FRAME_HEADER_NBYTES + 777, mask=16)
        with pytest.raises(CorruptError):
            store.restore()


def test_older_handle_sees_newer_commits(backend):
    with ckstore.open(backend) as reader, ckstore.open(backend) as writer:
        for step in range(3):
            writer.commit({"n": step}, step)
            assert reader.restore() == {"n": step}


def test_restore_during_commits_is_consistent(folder):
    with ckstore.open(folder) as writer, ckstore.open(folder) as reader:
        writer.commit({"w": np.zeros(50_000), "n": 0}, 0)
        stop = threading.Event()

        def write():
            step = 1
            while not stop.is_set():
                writer.commit({"w": np.full(50_000, step), "n": step}, step)
                step += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(15):
                back = reader.restore()
                assert (back["w"] == back["n"]).all()
        finally:
            stop.set()
            thread.join()


# into=


def test_into_fills_existing_arrays(run):
    live = {"model": {"w": np.zeros(60_000), "b": np.zeros(9)}, "seed": None}
    w = live["model"]["w"]
    back = run.restore(20, into=live)
    assert back is live
    assert live["model"]["w"] is w
    assert difference(live, state_of(1)) is None


def test_into_creates_missing_leaves(run):
    live = {"model": {"w": np.zeros(60_000)}}
    assert difference(run.restore(20, into=live), state_of(1)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda live: live["model"].update(w=np.zeros((600, 100))), "model.w"),
        (lambda live: live["model"].update(w=np.zeros(60_000, np.float32)), "model.w"),
        (lambda live: live["model"].update(extra=np.zeros(1)), "model.extra"),
        (lambda live: live.update(model=[1, 2]), "model"),
        (lambda live: live["model"].update(w=np.broadcast_to(0.0, 60_000)), "model.w"),
    ],
    ids=["shape", "dtype", "extra leaf", "structure", "read-only"],
)
def test_misfitting_into_is_refused_before_writing(run, change, says):
    live = {"model": {"w": np.zeros(60_000), "b": np.zeros(9)}, "seed": -1}
    change(live)
    kept = live["model"]["b"] if isinstance(live["model"], dict) else None
    with pytest.raises(UsageError) as caught:
        run.restore(20, into=live)
    assert says in str(caught.value)
    assert live["seed"] == -1
    assert kept is None or not kept.any()
    assert run.restored is None


# Fallback


@pytest.fixture
def warnings(caplog):
    with caplog.at_level(logging.WARNING, "ckstore"):
        yield caplog


def damage_manifest(store, backend, seq):
    with edited(backend, manifest_name(store, seq)) as content:
        content[len(content) // 2] ^= 1


def test_torn_newest_is_skipped_with_a_warning(run, backend, warnings):
    truncate(backend, manifest_name(run, 2), 300)
    assert difference(run.restore(), state_of(1)) is None
    assert "seq 2 (step 30) was skipped" in warnings.text
    assert run.restored.step == 20
    assert any("seq 2" in warning for warning in run.restored.warnings)
    assert run.latest().step == 20


def test_missing_pack_of_newest_is_skipped_with_a_warning(run, backend, warnings):
    name = pack_of(run, 2)
    backend.unlink(name)
    assert difference(run.restore(), state_of(1)) is None
    assert "was skipped" in warnings.text
    assert name in warnings.text


def test_pack_of_another_size_counts_as_missing(run, backend, warnings):
    with edited(backend, pack_of(run, 2)) as content:
        content.extend(bytes(4096))
    assert difference(run.restore(), state_of(1)) is None
    assert "was skipped" in warnings.text


def test_named_restore_never_falls_back(run, backend):
    damage_manifest(run, backend, 2)
    for reference in (30, "30", "seq:2"):
        with pytest.raises(CorruptError):
            run.restore(reference)
    backend.unlink(pack_of(run, 1))
    for reference in (20, "seq:1"):
        with pytest.raises(MissingChunkError):
            run.restore(reference)
    with pytest.raises(CorruptError):
        run.restore("latest")


def test_damage_while_reading_raises_without_fallback(run, backend):
    frame = frame_of(run, 2)
    flip(backend, pack_of(run, 2), frame.offset + FRAME_HEADER_NBYTES + 10)
    with pytest.raises(CorruptError):
        run.restore()
    assert difference(run.restore(20), state_of(1)) is None


def damage_frame(store, backend, seq):
    """Damage a frame of a checkpoint, which is found only when the frame is read."""
    flip(backend, pack_of(store, seq), frame_of(store, seq).offset + FRAME_HEADER_NBYTES + 10)


@pytest.mark.parametrize("reference", [None, "latest", 30])
def test_damage_error_names_repair_and_newest_readable(run, backend, reference):
    damage_frame(run, backend, 2)
    with pytest.raises(ChecksumError, match=r"step 30 \(seq 2\)") as caught:
        run.restore(reference)
    said = str(caught.value)
    assert f"ckstore repair {backend.root}" in said
    assert "is step 20" in said
    assert 'restore("seq:1")' in said
    assert "restore(fallback=True)" in said
    assert (caught.value.whole_step, caught.value.whole_seq) == (20, 1)
    assert caught.value.tensor
    assert difference(run.restore("seq:1"), state_of(1)) is None


def test_named_readable_checkpoint_was_read(run, backend):
    damage_frame(run, backend, 2)
    damage_frame(run, backend, 1)
    with pytest.raises(CorruptError) as caught:
        run.restore()
    assert caught.value.whole_seq == 0
    damage_frame(run, backend, 0)
    with pytest.raises(CorruptError, match=r"no other checkpoint of run main is readable"):
        run.restore()


def test_damage_of_an_older_checkpoint_names_the_newest(run, backend):
    damage_frame(run, backend, 0)
    with pytest.raises(CorruptError) as caught:
        run.restore(10)
    assert caught.value.whole_seq == 2
    assert "fallback=True" not in str(caught.value), "fallback starts only at the newest"


def test_named_torn_checkpoint_error_has_advice(run, backend):
    damage_manifest(run, backend, 2)
    with pytest.raises(CorruptError, match="ckstore repair") as caught:
        run.restore(30)
    assert caught.value.whole_seq == 1
    backend.unlink(pack_of(run, 1))
    with pytest.raises(MissingChunkError, match="ckstore repair") as caught:
        run.restore(20)
    assert caught.value.whole_seq == 0


@pytest.mark.parametrize("reference", [None, "latest"])
def test_fallback_restores_newest_readable_with_warning(run, backend, warnings, reference):
    damage_frame(run, backend, 2)
    damage_frame(run, backend, 1)
    assert difference(run.restore(reference, fallback=True), state_of(0)) is None
    assert "seq 2 was skipped" in warnings.text
    assert "seq 1 (step 20) was skipped" in warnings.text
    assert (run.restored.step, run.restored.seq) == (10, 0)
    assert len(run.restored.warnings) == 2
    assert run.commit(state_of(3), 40).seq == 3
    assert run.info(40).parent == 0


def test_fallback_into_a_live_state_overwrites_it(run, backend):
    damage_frame(run, backend, 2)
    live = run.restore("seq:0")
    run.restore(into=live, fallback=True)
    assert difference(live, state_of(1)) is None


def test_fallback_without_damage_restores_the_newest(run):
    assert difference(run.restore(fallback=True), state_of(2)) is None
    assert run.restored.warnings == ()


def test_fallback_without_readable_raises_newest_error(run, backend):
    for seq in range(3):
        damage_frame(run, backend, seq)
    with pytest.raises(ChecksumError, match="no checkpoint of run 'main' is readable"):
        run.restore(fallback=True)


@pytest.mark.parametrize("reference", [20, "seq:1", "best:loss"])
def test_fallback_with_a_reference_is_refused(run, reference):
    with pytest.raises(UsageError, match="fallback=True"):
        run.restore(reference, fallback=True)


def test_unreadable_pack_is_damage(run, backend, monkeypatch):
    damaged, open_read = pack_of(run, 2), backend.open_read

    def fail(name):
        if name == damaged:
            raise BackendError("open failed (EIO)", errno=errno.EIO)
        return open_read(name)

    monkeypatch.setattr(backend, "open_read", fail)
    with pytest.raises(BackendError, match="ckstore repair") as caught:
        run.restore()
    assert caught.value.whole_seq == 1
    assert difference(run.restore(fallback=True), state_of(1)) is None


def test_run_without_whole_checkpoint_gives_reasons(run, backend):
    for seq in range(3):
        backend.unlink(pack_of(run, seq))
    with pytest.raises(CorruptError, match="none of the 3 checkpoints"):
        run.restore()


def test_newer_manifest_is_not_skipped_silently(run, backend, monkeypatch):
    from ckstore.store.manifests import Manifests

    original = Manifests.load

    def load(self, name):
        if name.seq == 2:
            raise UnsupportedError("a newer ckstore wrote this")
        return original(self, name)

    monkeypatch.setattr(Manifests, "load", load)
    with pytest.raises(UnsupportedError):
        run.restore()


def test_dropped_checkpoints_are_not_used_as_fallback(run, backend):
    run.delete(30)
    run.delete(20)
    assert difference(run.restore(), state_of(0)) is None


# Damage


def test_damage_names_pack_offset_tensor_and_checkpoint(run, backend):
    name = pack_of(run, 2)
    frame = max(manifest_of(run, 2).frames, key=lambda frame: frame.stored_nbytes)
    flip(backend, name, frame.offset + FRAME_HEADER_NBYTES + 4000, mask=64)
    with pytest.raises(ChecksumError) as caught:
        run.restore(30)
    error = caught.value
    assert error.pack_id == name.rsplit("/", 1)[1].removesuffix(".pack")
    assert error.offset == frame.offset
    assert error.tensor == "model.w"
    assert error.chunk_id == frame.chunk_id.hex()
    for fact in (error.pack_id, str(error.offset), "model.w", "step 30", "seq 2", "'main'"):
        assert fact in str(error)
    assert error.exit_code == 12


def test_altered_frame_header_is_refused(run, backend):
    frame = frame_of(run, 2)
    for offset in range(frame.offset, frame.offset + FRAME_HEADER_NBYTES):
        flip(backend, pack_of(run, 2), offset)
        with pytest.raises(CorruptError):
            run.restore(30)
        flip(backend, pack_of(run, 2), offset)
    assert difference(run.restore(30), state_of(2)) is None


def test_swapped_packs_never_return_the_other_state(run, backend):
    one, other = pack_of(run, 1), pack_of(run, 2)
    swap(backend, one, other)
    for reference in (20, 30):
        with pytest.raises(CorruptError):
            run.restore(reference)


def test_swapped_manifests_never_return_the_other_state(run, backend):
    one, other = manifest_name(run, 1), manifest_name(run, 2)
    swap(backend, one, other)
    for reference in (20, 30, "seq:1"):
        with pytest.raises(MalformedError):
            run.restore(reference)
    assert difference(run.restore(), state_of(0)) is None


def test_frames_swapped_within_a_pack_are_found(store, backend):
    store.commit({"a": np.arange(40_000.0), "b": np.arange(40_000.0)[::-1].copy()}, 1,
                 policy=ckstore.Policy(compression="none"))  # fmt: skip
    one, other = manifest_of(store, 0).frames
    length = FRAME_HEADER_NBYTES + one.stored_nbytes
    assert one.stored_nbytes == other.stored_nbytes
    with edited(backend, pack_of(store, 0)) as content:
        first, second = content[one.offset : one.offset + length], content[other.offset : other.offset + length]
        content[one.offset : one.offset + length], content[other.offset : other.offset + length] = second, first
    with pytest.raises(CorruptError, match="another frame"):
        store.restore()


@pytest.mark.parametrize("engine", ["pwrite", "auto"])
def test_flipped_and_truncated_packs_on_disk_are_found(folder, engine):
    with ckstore.open(folder, engine=engine) as store:
        store.commit(state_of(1), 1)
        path = folder / pack_of(store, 0)
        content = bytearray(path.read_bytes())
        path.chmod(0o600)
        content[10_000] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptError):
            store.restore()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(MissingChunkError):
            store.restore(1)


def test_copied_store_is_a_store(folder, tmp_path):
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
    shutil.copytree(folder, tmp_path / "copy")
    with ckstore.open(tmp_path / "copy") as copy:
        assert difference(copy.restore(), state_of(1)) is None
        assert copy.verify("decode").is_clean
        assert copy.commit(state_of(2), 2).seq == 1
