"""Protects repack: contents and ids stay equal, the size falls or nothing is done, and other processes continue."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import RepackPolicy
from ckstore._testing import repository_of
from ckstore.errors import CapacityError, ConflictError, CorruptError, UsageError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from support.drop_marks import mark_dropped
from support.faults import Fault, FaultyBackend
from support.memory_files import names_of
from support.model import difference

PLAIN = ckstore.Policy(compression="none", threads=2)
WHOLE = ckstore.Policy(delta=False, threads=2)
DELTAS = ckstore.Policy(threads=2)


def history(count, *, size=30_000, seed=3):
    """Return the states of a drifting run with a constant tensor, a rounded copy, and noise."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(size).astype(np.float32)
    frozen = rng.standard_normal(size).astype(np.float32)
    states = []
    for number in range(count):
        weights = weights + rng.standard_normal(size).astype(np.float32) * np.float32(1e-4)
        states.append(
            {
                "model": weights,
                "half": weights.astype(np.float16),
                "moment": rng.standard_normal(size // 2).astype(np.float32),
                "frozen": frozen,
                "step": np.array([number]),
                "lr": 0.1 * number,
            }
        )
    return states


def filled(backend, states, policy, **options):
    store = ckstore.open(backend, policy=policy, **options)
    for step, state in enumerate(states):
        store.commit(state, step)
    return store


def check(store, states):
    for step, state in enumerate(states):
        assert difference(store.restore(step), state) is None, f"step {step}"
    assert store.verify("decode").damage == []


def actions(report):
    return [(entry.seq, entry.action) for entry in report.entries]


def packs_of(store):
    parts = repository_of(store)
    manifests = [parts.manifests.load(name) for name in parts.manifests.listing().names]
    return {pack.pack_id: pack.nbytes for manifest in manifests for pack in manifest.packs}


@pytest.mark.parametrize("policy", [PLAIN, WHOLE, DELTAS], ids=["plain", "whole", "deltas"])
@pytest.mark.parametrize("keyframes", [0, 1, 2])
def test_every_checkpoint_restores_with_its_id(backend, policy, keyframes):
    states = history(5)
    with filled(backend, states, policy) as store:
        before = {info.seq: (info.checkpoint_id, info.time_ns, info.parent) for info in store.log()}
        store.repack(RepackPolicy(keyframes=keyframes))
        assert {info.seq: (info.checkpoint_id, info.time_ns, info.parent) for info in store.log()} == before
        check(store, states)


def test_newest_becomes_the_keyframe(backend):
    with filled(backend, history(5), PLAIN) as store:
        report = store.repack()
        assert actions(report) == [(4, "keyframe"), (3, "delta"), (2, "delta"), (1, "delta"), (0, "delta")]
        assert all(entry.base_seq > entry.seq for entry in report.entries[1:]), "bases are newer"
        assert store.info(4).depth_max == 0
        assert all(entry.read_after <= 1.6 * report.entries[0].read_after for entry in report.entries)
        assert report.packs_after == sum(packs_of(store).values())
        assert report.packs_after < 0.6 * report.packs_before


def test_pack_of_a_frozen_tensor_is_not_rewritten(backend):
    states = history(4, size=140_000)
    with filled(backend, states, WHOLE) as store:
        report = store.repack()
        # The first commit's pack has the constant tensor, and the newest checkpoint, which stays, needs it there.
        assert actions(report) == [(3, "keep"), (2, "delta"), (1, "delta"), (0, "keep")]
        assert "other checkpoints need its packs" in report.entries[3].reason
        check(store, states)


def test_rounded_tensors_stay_rounded(backend):
    # Tensors below 256 KiB share chunks, and are not stored as roundings.
    states = history(3, size=140_000)
    with filled(backend, states, PLAIN) as store:
        store.repack()
        for step in (1, 2):
            modes = {row.path: row.mode for row in store.coding(step).tensors}
            assert modes["half"] == "derived"


def test_dry_run_reports_the_plan(backend):
    states = history(5)
    with filled(backend, states, WHOLE) as store:
        files = names_of(backend)
        planned = store.repack(dry_run=True)
        assert names_of(backend) == files
        assert planned.is_dry_run
        assert not any(entry.is_done for entry in planned.entries)
        done = store.repack()
        assert [without_estimates(entry) for entry in done.entries] == [
            without_estimates(entry) for entry in planned.entries
        ]
        assert [entry.is_done for entry in done.entries] == [entry.action != "keep" for entry in done.entries]
        assert done.bytes_written == pytest.approx(planned.bytes_written, rel=0.1)
        assert done.packs_after == pytest.approx(planned.packs_after, rel=0.1)


def without_estimates(entry):
    return replace(entry, stored_after=0, read_after=0, is_done=False)


@pytest.mark.parametrize("policy", [PLAIN, WHOLE, DELTAS], ids=["plain", "whole", "deltas"])
def test_second_repack_finds_nothing_to_do(backend, policy):
    with filled(backend, history(5), policy) as store:
        store.repack()
        generations = [info.generation for info in store.log()]
        report = store.repack()
        assert report.rewritten == ()
        assert report.bytes_written == 0
        assert [info.generation for info in store.log()] == generations


def test_too_small_saving_changes_nothing(backend):
    with filled(backend, history(4), WHOLE) as store:
        report = store.repack(RepackPolicy(saving_min=0.6))
        assert report.rewritten == ()
        assert all("would" in entry.reason for entry in report.entries)


def test_new_keyframes_free_the_old_keyframe(backend):
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(40_000).astype(np.float32)
    states = []
    for _ in range(6):
        weights = weights.copy()
        weights[rng.integers(0, weights.size, 100)] += 1
        states.append({"w": weights})
    with filled(backend, states, DELTAS) as store:
        old = packs_of(store)
        assert store.info(5).depth_max > 0
        report = store.repack()
        assert actions(report)[0] == (5, "keyframe")
        assert store.info(5).depth_max == 0
        assert not set(old) & set(packs_of(store)), "no old pack is still needed"
        check(store, states)


def test_frames_of_another_run_stay(backend):
    states = history(3)
    with filled(backend, states, PLAIN) as store, ckstore.open(backend, run="other", policy=PLAIN) as other:
        assert other.commit(states[2], 7).chunks_new == 0
        store.repack()
        check(store, states)
        assert difference(other.restore(), states[2]) is None


def test_next_commit_uses_repacked_bases(backend):
    states = history(6)
    with filled(backend, states[:5], PLAIN) as store:
        store.repack()
        store.commit(states[5], 5, policy=DELTAS)
        assert store.commit(states[4], 6, policy=DELTAS).chunks_new == 0, "repacked frames are in the index"
        check(store, states)


def test_archival_and_damaged_entries_are_skipped(backend):
    states = history(3)
    with filled(backend, states, PLAIN) as store:
        pack = packs_of(store).keys() - {
            pack.pack_id
            for pack in repository_of(store).manifests.load(repository_of(store).manifests.listing().names[-1]).packs
        }
        backend.unlink(paths.pack_name(sorted(pack)[0]))
        before = names_of(backend)
        with pytest.raises(CorruptError):
            store.repack()
        assert [name for name in names_of(backend) if "leases" not in name] == [
            name for name in before if "leases" not in name
        ]


def test_live_writer_is_a_conflict_except_for_dry_run(backend):
    with filled(backend, history(2), PLAIN), ckstore.open(backend) as other:
        assert other.repack(dry_run=True).rewritten
        with pytest.raises(ConflictError, match="being written"):
            other.repack()


def test_reader_continues_during_repack(folder):
    states = history(4)
    with filled(folder, states, PLAIN) as store, ckstore.open(folder) as reader:
        errors, is_done = [], threading.Event()

        def read():
            while not is_done.is_set():
                for step, state in enumerate(states):
                    found = difference(reader.restore(step), state)
                    if found:
                        errors.append(found)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for keyframes in (0, 1, 2, 3):
                store.repack(RepackPolicy(keyframes=keyframes, saving_min=0))
        finally:
            is_done.set()
            thread.join()
        assert errors == []


def test_full_disk_keeps_every_checkpoint():
    states = history(4)
    backend = MemoryBackend()
    filled(backend, states, PLAIN).close()
    used = sum(map(len, backend.files().values()))
    for spare in (20_000, 200_000, 350_000):
        backend.nbytes_max = used + spare
        with ckstore.open(backend, policy=DELTAS) as store:
            with contextlib.suppress(CapacityError):
                store.repack()
            backend.nbytes_max = None
            check(store, states)


def test_packs_of_unpublished_replacement_are_freed():
    states = history(3)
    inner = MemoryBackend()
    filled(inner, states, PLAIN).close()
    backend = FaultyBackend(inner)
    with ckstore.open(backend, policy=DELTAS) as store:
        packs = set(names_of(inner, "packs/"))
        backend.fault = Fault(2, sites=frozenset({"link"}))
        with pytest.raises(ckstore.CkstoreError):
            store.repack()
        backend.fault = None
        assert set(names_of(inner, "packs/")) == packs
        store.repack()
        check(store, states)


def test_checkpoint_dropped_meanwhile_stays_dropped(backend, monkeypatch):
    states = history(4)
    with filled(backend, states, PLAIN) as store:
        parts = repository_of(store)
        publish = parts.manifests.publish

        def drop_then_publish(manifest):
            if manifest.header.seq == 2:
                mark_dropped(parts, 2)
            return publish(manifest)

        monkeypatch.setattr(parts.manifests, "publish", drop_then_publish)
        report = store.repack()
        assert [entry.seq for entry in report.entries if entry.is_done] == [3, 1, 0]
        assert store.steps() == [0, 1, 3]
        for step in (0, 1, 3):
            assert difference(store.restore(step), states[step]) is None


def test_empty_run_has_nothing_to_repack(store):
    report = store.repack()
    assert report.entries == ()
    assert report.bytes_written == 0


@pytest.mark.parametrize(
    "fields", [{"keyframes": -1}, {"compression": "none"}, {"read_amplification_max": 0.5}, {"saving_min": 2}]
)
def test_invalid_policy_is_refused(fields):
    with pytest.raises(UsageError):
        RepackPolicy(**fields)


def test_progress_ends_at_the_total(backend):
    calls = []
    with filled(backend, history(3), PLAIN) as store:
        store.repack(on_progress=lambda done, total: calls.append((done, total)))
    assert calls[:3] == [(1, 3), (2, 3), (3, 3)]
    assert calls[-1][0] == calls[-1][1]
