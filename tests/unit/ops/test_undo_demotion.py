"""Protects undoing a demotion while the exact form is in the trash, and the forecast of a dry run."""

from __future__ import annotations

import pytest

import ckstore
from ckstore import Residual
from ckstore.config import DemotePolicy
from ckstore.errors import ConflictError, NotFoundError
from ckstore.io.memory import MemoryBackend
from support.demotion_histories import filled
from support.gc_histories import replace_by_itself
from support.states import difference

WANTED = DemotePolicy(keep_newest=1, keep_every=0)


@pytest.fixture
def backend():
    return MemoryBackend()


@pytest.fixture
def demoted(backend):
    """An open store of four checkpoints, three of them demoted, and their states."""
    store, held = filled(backend, 4)
    store.demote(policy=WANTED)
    return store, held


def exact_steps(store):
    return sorted(info.step for info in store.log() if info.fidelity == "exact")


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize("kind", ["step", "seq", "id"])
def test_undelete_makes_a_demoted_checkpoint_exact(demoted, kind, is_collected):
    store, held = demoted
    exact_id = store.info(1).origin_id
    if is_collected:
        store.gc(min_age=0)
    info = store.undelete({"step": 1, "seq": "seq:1", "id": f"id:{exact_id[:12]}"}[kind])
    assert (info.step, info.seq, info.fidelity, info.checkpoint_id) == (1, 1, "exact", exact_id)
    assert info.generation == 2
    assert difference(store.restore(1, exact=True), held[1]) is None
    assert exact_steps(store) == [1, 3]
    store.gc(min_age=0, trash_for=0)
    assert difference(store.restore(1, exact=True), held[1]) is None
    assert store.verify("decode").is_clean


def test_tags_and_later_checkpoints_stay_as_they_are(demoted):
    store, held = demoted
    store.tag(0, "good")
    later = {step: store.restore(step) for step in (1, 2)}
    store.undelete(0)
    assert store.info("good").fidelity == "exact"
    assert difference(store.restore("good"), held[0]) is None
    for step, state in later.items():
        assert difference(store.restore(step), state) is None, "coded against the form in the trash"
    store.gc(min_age=0, trash_for=0)
    assert store.verify("decode").is_clean
    assert difference(store.restore(2), later[2]) is None


def test_undone_checkpoint_can_be_demoted_again(demoted):
    store, held = demoted
    store.undelete(2)
    store.demote(policy=WANTED)
    assert exact_steps(store) == [3]
    store.undelete(2)
    assert difference(store.restore(2), held[2]) is None


def test_exact_form_that_was_freed_is_not_found(demoted):
    store, _ = demoted
    store.gc(min_age=0, trash_for=0)
    with pytest.raises(NotFoundError, match="nor its exact form"):
        store.undelete(1)
    with pytest.raises(NotFoundError):
        store.undelete(3)
    assert exact_steps(store) == [3]


def test_dropped_demoted_checkpoint_returns_as_demoted(demoted):
    store, _ = demoted
    lossy = store.restore(1)
    store.delete(1)
    info = store.undelete(1)
    assert (info.seq, info.is_archival, info.generation) == (4, True, 0)
    assert difference(store.restore("seq:4"), lossy) is None


def test_checkpoint_replaced_meanwhile_is_skipped(demoted, backend, monkeypatch):
    store, _ = demoted
    from ckstore.store.manifests import Manifests

    publish = Manifests.publish

    def replace_first(manifests, manifest):
        monkeypatch.setattr(Manifests, "publish", publish)
        with ckstore.open(backend) as other:
            replace_by_itself(other, 1)
        return publish(manifests, manifest)

    monkeypatch.setattr(Manifests, "publish", replace_first)
    with pytest.raises(ConflictError):
        store.undelete(1)
    assert store.info(1).fidelity == "near"
    assert store.verify("decode").is_clean


def test_restoring_a_trash_folder_undoes_its_demotions(demoted):
    store, held = demoted
    folder = next(entry for entry in store.trash() if any(name[1] == 1 for name in entry.manifests))
    assert set(folder.kinds) == {"demoted"}
    restored = store.restore_from_trash(folder.trash_id)
    assert [info.seq for info in restored.exact_again] == [name[1] for name in folder.manifests]
    assert (restored.undeleted, restored.superseded, restored.is_empty) == ((), 0, False)
    assert difference(store.restore(1), held[1]) is None
    kinds = {kind for entry in store.trash() for kind in entry.kinds}
    assert "made exact" in kinds
    lossy = next(entry for entry in store.trash() if "made exact" in entry.kinds)
    again = store.restore_from_trash(lossy.trash_id)
    assert (again.is_empty, again.superseded) == (True, 1)


def test_default_fidelity_is_near():
    assert DemotePolicy().fidelity == Residual.near()


# Dry run


def test_dry_run_matches_the_demotion(backend):
    store, _ = filled(backend, 6)
    files = backend.files()
    planned = store.demote(policy=WANTED, dry_run=True)
    assert backend.files() == files
    assert planned.fidelity == "near"
    done = store.demote(policy=WANTED)
    for expected, found in zip(planned.entries, done.entries, strict=True):
        assert (expected.action, expected.fidelity, expected.reason) == (found.action, found.fidelity, found.reason)
        assert expected.stored_before == found.stored_before
        assert expected.stored_after == pytest.approx(found.stored_after, rel=0.25)
        assert expected.worst_rel_rms == pytest.approx(found.worst_rel_rms, rel=0.25)
    assert sum(entry.is_done for entry in done.entries) == 5


def test_dry_run_names_what_stays_exact(backend):
    store, _ = filled(backend, 6)
    wanted = DemotePolicy(keep_newest=1, keep_every=0, fidelity=Residual.near(keyframe_every=3))
    planned = store.demote(policy=wanted, dry_run=True)
    done = store.demote(policy=wanted)
    assert [entry.action for entry in planned.entries] == [entry.action for entry in done.entries]
    assert [entry.reason for entry in planned.entries] == [entry.reason for entry in done.entries]
    with ckstore.open(MemoryBackend()) as other:
        for step in range(3):
            other.commit({"n": step}, step)
        vain = other.demote(policy=WANTED, dry_run=True).entries[1]
        assert (vain.action, vain.reason) == ("keep", "none of its tensors can be stored with a loss")


def test_long_dry_run_extrapolates_sizes(backend, monkeypatch):
    store, _ = filled(backend, 6)
    monkeypatch.setattr("ckstore.ops.demote._ESTIMATE_NBYTES", 1_500_000)
    planned = [entry for entry in store.demote(policy=WANTED, dry_run=True).entries if entry.action == "demote"]
    done = {entry.seq: entry for entry in store.demote(policy=WANTED).entries}
    for entry in planned:
        assert entry.fidelity == "near"
        assert entry.stored_after == pytest.approx(done[entry.seq].stored_after, rel=0.25)
        assert entry.worst_rel_rms > 0


def test_dry_run_needs_no_space(backend):
    store, _ = filled(backend, 3)
    backend.nbytes_max = sum(len(content) for content in backend.files().values())
    assert store.demote(policy=WANTED, dry_run=True).entries[-1].stored_after > 0
