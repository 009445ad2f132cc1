"""Protects demotion: only checkpoints chosen by a rule or a name become lossy, and all others stay the same."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Residual
from ckstore._testing import repository_of
from ckstore.config import DemotePolicy
from ckstore.errors import CapacityError, ConflictError, NotFoundError, UsageError
from ckstore.io.memory import MemoryBackend
from ckstore.store.tags import Tags
from support.demotion_histories import filled, manifest_of, states, while_coding
from support.drop_marks import mark_dropped
from support.faults import Fault, FaultyBackend
from support.states import difference

WANTED = DemotePolicy(keep_newest=2, keep_every=4)


def check(store, held, exact):
    """Check that these steps are exact, the others within their bounds, and the store clean."""
    for step, state in enumerate(held):
        found, info = store.restore(step), store.info(step)
        assert (info.fidelity == "exact") == (step in exact), step
        if step in exact:
            assert difference(found, state) is None, step
        else:
            assert difference(found["model"]["bias"], state["model"]["bias"]) is None
            assert np.abs(found["model"]["w"] - state["model"]["w"]).max() < 2e-3
            assert found["step"] == step
    assert store.verify("decode").damage == []


def test_newest_every_nth_and_tagged_stay_exact():
    store, held = filled(MemoryBackend())
    store.tag(2, "good")
    before = {info.seq: info for info in store.log()}
    report = store.demote(policy=WANTED)
    assert [(entry.seq, entry.is_done) for entry in report.entries] == [
        *((7, False), (6, False), (5, True), (4, False), (3, True), (2, False), (1, True), (0, False))
    ]
    check(store, held, {0, 2, 4, 6, 7})
    for info in store.log():
        was = before[info.seq]
        assert (info.step, info.metrics, info.time_ns, info.parent) == (was.step, was.metrics, was.time_ns, was.parent)
        if info.fidelity != "exact":
            assert (info.generation, info.origin_id) == (1, was.checkpoint_id)
            assert info.checkpoint_id != was.checkpoint_id
        else:
            assert info == was
    reasons = {entry.seq: entry.reason for entry in report.entries}
    assert "newest 2" in reasons[7]
    assert "seq divisible by 4" in reasons[4]
    assert "'good'" in reasons[2]
    assert store.info("good").step == 2


def test_demoted_checkpoints_are_smaller():
    backend = MemoryBackend()
    store, _ = filled(backend, policy=Policy(delta=False))
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0, fidelity=ckstore.Residual.small()))
    done = [entry for entry in report.entries if entry.is_done]
    assert len(done) == 7
    for entry in done[:-1]:
        assert entry.stored_after * 20 < entry.stored_before
        assert 0 < entry.worst_rel_rms < 2
    assert report.packs_after < report.packs_before / 3
    named = {pack.pack_id for info in store.log() for pack in manifest_of(store, info.seq).packs}
    assert sum(len(backend.read_bytes(f"packs/{p[:1].hex()}/{p.hex()}.pack", nbytes_max=1 << 30)) for p in named) == (
        report.packs_after
    )


def test_dry_run_reports_the_same():
    store, held = filled(MemoryBackend(), 6)
    planned = store.demote(policy=WANTED, dry_run=True)
    assert planned.is_dry_run
    check(store, held, set(range(6)))
    done = store.demote(policy=WANTED)
    assert [entry.action for entry in planned.entries] == [entry.action for entry in done.entries]


def test_second_demotion_finds_nothing_to_do():
    store, held = filled(MemoryBackend(), 6)
    store.demote(policy=WANTED)
    again = store.demote(policy=WANTED)
    assert not any(entry.is_done for entry in again.entries)
    assert again.bytes_written == 0
    check(store, held, {0, 4, 5})


def test_newest_is_demoted_only_by_name():
    store, held = filled(MemoryBackend(), 3)
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert report.entries[0].is_done is False
    report = store.demote("latest", policy=replace(WANTED, fidelity=Residual.near()))
    assert [entry.is_done for entry in report.entries] == [True, False, False]
    assert store.info("latest").fidelity == "near"
    check(store, held, set())
    # The next commit is coded against the demoted form.
    more = states(5)[3:]
    for step, state in enumerate(more, 3):
        store.commit(state, step)
    check(store, [*held, *more], {3, 4})


def test_named_demotion_skips_tagged_checkpoints():
    store, held = filled(MemoryBackend(), 5)
    report = store.demote(1, "seq:3")
    assert [entry.seq for entry in report.entries if entry.is_done] == [3, 1]
    check(store, held, {0, 2, 4})
    store.tag(2, "good")
    with pytest.raises(ConflictError, match="'good'"):
        store.demote(2)
    with pytest.raises(NotFoundError):
        store.demote(77)
    check(store, held, {0, 2, 4})


def test_rewound_run_keeps_its_newest_exact():
    store, held = filled(MemoryBackend(), 4)
    store.rewind(1)
    store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert store.info("latest").fidelity == "exact"
    assert difference(store.restore(exact=True), held[1]) is None
    assert store.info("seq:1").fidelity == "near"


def test_every_nth_of_a_demoted_chain_stays_exact():
    store, held = filled(MemoryBackend(), 7)
    fidelity = Residual.small(keyframe_every=3)
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0, fidelity=fidelity))
    # The first one, of which only the moments are quantized, counts too.
    check(store, held, {2, 5, 6})
    assert "one in 3 stays exact" in next(entry.reason for entry in report.entries if entry.seq == 2)


def test_checkpoint_without_lossy_tensors_stays(store):
    for step in range(4):
        store.commit({"counts": np.arange(9000) + step, "bias": np.arange(40_000, dtype=np.float32) + step}, step)
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert [entry.action for entry in report.entries] == ["keep"] * 4
    assert "none of its tensors" in report.entries[1].reason
    assert report.packs_after == report.packs_before
    assert all(info.generation == 0 for info in store.log())


def test_empty_run_has_nothing_to_demote(store):
    report = store.demote()
    assert report.entries == ()


def test_report_has_the_warnings_of_a_receipt():
    """A diverged run is noticed when it is demoted, even if no tensor could be demoted."""
    held = states(4)
    held[1]["model"]["w"][3, 4] = np.nan
    held[2]["model"]["bias"][7] = np.inf
    store = ckstore.open(MemoryBackend())
    for step, state in enumerate(held):
        store.commit(state, step)
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert report.warnings == (
        "step 1: model.w was stored exactly: it holds NaN or infinity",
        "step 2: model.bias holds NaN or infinity: the run may have diverged",
    )
    found = store.restore(1)
    assert np.isnan(found["model"]["w"][3, 4])
    assert difference(found["model"], held[1]["model"]) is None
    assert store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0)).warnings == ()


def test_unreachable_bounds_keep_the_checkpoint_exact():
    store, held = filled(MemoryBackend(), 3)
    for on_bound in ("raise", "exact"):
        strict = replace(Residual.small(), max_rel_rms=1e-9, on_bound=on_bound)
        report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0, fidelity=strict))
        assert not any(entry.is_done for entry in report.entries)
    check(store, held, {0, 1, 2})


def test_demotion_on_full_disk_breaks_nothing():
    backend = MemoryBackend()
    store, held = filled(backend, 5)
    store.close()
    for at in (1, 2, 4):
        faulty = FaultyBackend(backend, Fault(at, errno.ENOSPC, for_ever=True, sites=frozenset({"pack.write"})))
        with ckstore.open(faulty) as other, contextlib.suppress(CapacityError):
            other.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
        assert len(faulty.calls) > at
        with ckstore.open(backend) as other:
            for step, state in enumerate(held):
                found = other.restore(step)
                if other.info(step).fidelity == "exact":
                    assert difference(found, state) is None
            assert other.verify("decode").damage == []


def test_repack_keeps_demoted_checkpoints():
    store, held = filled(MemoryBackend(), 8)
    store.demote(policy=WANTED)
    ids = [info.checkpoint_id for info in store.log()]
    restored = [store.restore(step) for step in range(8)]
    report = store.repack()
    assert all(entry.action == "keep" for entry in report.entries if entry.seq in (1, 2, 3, 5))
    assert "with a loss" in next(entry.reason for entry in report.entries if entry.seq == 3)
    assert [info.checkpoint_id for info in store.log()] == ids
    for step, state in enumerate(restored):
        assert difference(store.restore(step), state) is None
    check(store, held, {0, 4, 6, 7})


def test_commit_after_demotion_reuses_and_restores(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        held = states(7)
        for step, state in enumerate(held[:5]):
            store.commit(state, step)
        store.demote(policy=WANTED)
        for step, state in enumerate(held[5:], 5):
            store.commit(state, step)
        check(store, held, {0, 3, 4, 5, 6})
    with ckstore.open(tmp_path / "store") as store:
        store.demote(policy=WANTED)
        check(store, held, {0, 4, 5, 6})


def newest_seq(store):
    return store.info("latest").seq


def test_newest_by_deletion_before_intent_stays_exact(monkeypatch):
    """Between the plan and the intent, another process deletes all newer checkpoints."""
    backend = MemoryBackend()
    store, held = filled(backend, 3)
    declare = Tags.declare

    def delete_first(tags, seq, purpose):
        if (seq, purpose) == (1, "demote"):
            with ckstore.open(backend) as other:
                other.delete("seq:2")
        return declare(tags, seq, purpose)

    monkeypatch.setattr(Tags, "declare", delete_first)
    report = store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert newest_seq(store) == 1
    assert store.info("latest").fidelity == "exact"
    assert difference(store.restore(exact=True), held[1]) is None
    assert [entry.reason for entry in report.entries if entry.seq == 1] == ["it is now the newest checkpoint"]
    assert store.info("seq:0").fidelity == "near"


def test_newer_checkpoint_cannot_be_deleted_meanwhile(monkeypatch):
    backend = MemoryBackend()
    store, held = filled(backend, 3)
    refused = []

    def delete_meanwhile():
        with ckstore.open(backend) as other:
            with pytest.raises(ConflictError, match="being demoted"):
                other.delete("seq:2")
            refused.append(other.info("latest").seq)

    while_coding(monkeypatch, backend, 1, delete_meanwhile)
    store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert refused == [2]
    check(store, held, {2})
    store.delete("seq:2")
    assert newest_seq(store) == 1


def test_newest_by_deletion_while_coding_stays_exact(monkeypatch):
    """The drop declared its intent before ours existed, and marks the checkpoints during our coding."""
    backend = MemoryBackend()
    store, held = filled(backend, 3)

    def vanish_meanwhile():
        with ckstore.open(backend) as other:
            mark_dropped(repository_of(other), 2)

    while_coding(monkeypatch, backend, 1, vanish_meanwhile)
    store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0))
    assert (newest_seq(store), store.info("latest").fidelity) == (1, "exact")
    assert difference(store.restore(exact=True), held[1]) is None


def test_policies_are_checked():
    for wrong in (
        {"keep_newest": 0},
        {"keep_every": -1},
        {"fidelity": "exact"},
        {"compression": "none"},
        {"saving_min": 2},
    ):
        with pytest.raises(UsageError, match="DemotePolicy"):
            DemotePolicy(**wrong)
