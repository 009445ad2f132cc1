"""Protects collections: they remove only unreferenced data, after checking everything that could refer to it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import LockHeldError, NotFoundError, UsageError
from ckstore.format import paths
from ckstore.format.records import IntentRecord, decode_record, encode_record
from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from ckstore.ops.gc.policy import Retention
from ckstore.store.reachability import Marker
from support.gc_histories import (
    LAST_ONE,
    check_restores,
    commit_all,
    damage,
    files_of,
    other_handle,
    pack_of,
    packs_in_place,
    replace_by_itself,
)
from support.memory_files import add, truncate

HOUR = 3600


@pytest.fixture
def backend(clock):
    return MemoryBackend(clock=clock)


@pytest.fixture
def store(backend, clock):
    with ckstore.open(backend, clock=clock) as opened:
        yield opened


@pytest.fixture
def history(store, clock):
    """Steps 0 to 5, a minute apart, two hours ago."""
    for step in range(6):
        commit_all(store, [step], metrics={"loss": 1.0 / (step + 1)})
        clock.now += 60
    clock.now += 2 * HOUR
    return store


def test_rules_move_checkpoints_and_packs_to_trash(history, backend):
    before = packs_in_place(backend)
    report = other_handle(history).gc(Retention(keep_last=2, keep_every=3))
    assert [name.step for name in report.done.dropped] == [1, 2]
    check_restores(history, [0, 3, 4, 5])
    gone = before - packs_in_place(backend)
    assert len(gone) == report.done.moved_packs == 2
    assert report.done.freed_nbytes == 0
    assert report.later_nbytes >= report.done.moved_nbytes > 0
    assert history.verify("decode").is_clean


def test_dry_run_plan_equals_the_collection(history, backend):
    before = files_of(backend)
    dry = other_handle(history).gc(Retention(keep_last=2), dry_run=True)
    assert files_of(backend) == before
    assert dry.is_dry_run
    assert dry.done is None
    real = other_handle(history).gc(Retention(keep_last=2))
    assert (real.runs, real.plan) == (dry.runs, dry.plan)
    assert tuple(real.done.dropped) == dry.plan.drops
    assert real.done.moved_packs == len(dry.plan.moves)
    assert real.done.moved_nbytes == dry.plan.moved_nbytes


def test_second_collection_has_nothing_left_to_do(history, backend):
    other_handle(history).gc(Retention(keep_last=2))
    after = files_of(backend)
    report = other_handle(history).gc(Retention(keep_last=2))
    assert report.plan.is_empty
    assert files_of(backend) == after


def nbytes_but_claims(backend):
    return sum(nbytes or 0 for name, nbytes in files_of(backend).items() if not name.startswith("claims/"))


def test_now_frees_immediately(history, backend):
    before = nbytes_but_claims(backend)
    report = other_handle(history).gc(Retention(keep_last=2), now=True)
    assert report.done.freed_nbytes >= report.done.moved_nbytes > 0
    assert before - nbytes_but_claims(backend) == report.done.freed_nbytes
    assert not [name for name in files_of(backend) if name.startswith("trash/")]
    check_restores(history, [4, 5])


def test_without_rules_only_garbage_is_removed(history, backend):
    history.delete(2)
    before = packs_in_place(backend)
    report = other_handle(history).gc()
    assert report.done.dropped == []
    assert len(before - packs_in_place(backend)) == 1
    check_restores(history, [0, 1, 3, 4, 5])


def test_shared_chunks_stay(history, backend):
    shared = pack_of(history, 0)
    other_handle(history).gc(LAST_ONE, now=True, repack_nbytes_max=0)
    assert shared in packs_in_place(backend), "step 5 needs what step 0 wrote"
    check_restores(history, [5])


def test_runs_do_not_evict_each_other(history, backend, clock):
    with ckstore.open(backend, run="other", clock=clock) as other:
        commit_all(other, [7, 8])
        clock.now += 2 * HOUR
        other_handle(history).gc(LAST_ONE, now=True)
        check_restores(other, [7, 8])
        check_restores(history, [5])
        report = other_handle(history).gc(LAST_ONE, all_runs=True, now=True)
        assert [plan.run for plan in report.runs] == ["main", "other"]
        check_restores(other, [8])
        check_restores(history, [5])


def test_packs_of_other_runs_stay(history, backend, clock):
    with ckstore.open(backend, run="other", clock=clock) as other:
        commit_all(other, [3])
        clock.now += 2 * HOUR
        other_handle(history).gc(LAST_ONE, now=True)
        check_restores(other, [3])


def test_young_unreferenced_packs_are_kept(history, backend, clock):
    backend.create("packs/ab/" + "ab" * 16 + ".pack", b"x" * 4096, sync=True)
    report = other_handle(history).gc()
    assert (report.plan.young_nbytes, report.done.moved_packs) == (4096, 0)
    clock.now += HOUR + 1
    assert other_handle(history).gc().done.moved_packs == 1


def test_young_packs_of_dropped_checkpoints_are_removed(store, backend):
    commit_all(store, [0, 1, 2])
    assert other_handle(store).gc(Retention(keep_every=2), now=True).done.moved_packs == 1
    commit_all(store, [3])
    store.delete(2)
    assert other_handle(store).gc(now=True).done.moved_packs == 1, "the trash still has the manifest that names it"
    check_restores(store, [0, 3])


def test_packs_from_the_future_are_removed_eventually(history, backend, clock):
    path = "packs/ab/" + "ab" * 16 + ".pack"
    add(backend, path, b"x" * 4096, modified_ns=clock.now_ns() + 10**6 * 10**9)
    assert other_handle(history).gc().done.moved_packs == 1


def test_referenced_pack_in_the_trash_is_rescued(history, backend):
    path, folder = pack_of(history, 3), repository_of(history).trash.new_packs_folder()
    backend.rename(path, f"trash/{folder}/packs/{path.rsplit('/')[-1]}")
    report = other_handle(history).gc(now=True)
    assert report.done.rescued == 1
    assert report.done.freed_files == 0
    assert path in packs_in_place(backend)


def test_missing_pack_blocks_only_its_run(history, backend, clock):
    with ckstore.open(backend, run="other", clock=clock) as other:
        commit_all(other, [17, 18])
    backend.unlink(pack_of(history, 3))
    clock.now += 2 * HOUR
    report = other_handle(history).gc(LAST_ONE, all_runs=True)
    assert "is missing" in report.runs[0].blocked
    assert [name.run for name in report.done.dropped] == ["other"]
    assert report.done.moved_packs == 1
    assert history.steps() == list(range(6))


def test_unreadable_manifest_keeps_all_packs_and_its_run(history, backend, clock):
    with ckstore.open(backend, run="other", clock=clock) as other:
        commit_all(other, [17, 18])
    clock.now += 2 * HOUR
    damage(backend, next(name for name in files_of(backend) if name.startswith("manifests/main/00000003")))
    packs = packs_in_place(backend)
    report = other_handle(history).gc(LAST_ONE, all_runs=True, now=True)
    assert "cannot be read" in report.runs[0].blocked
    assert "may name any pack" in report.done.stop
    assert ["not collected" in line or "no checkpoint of run main" in line for line in report.obstacles] == [True, True]
    assert [name.run for name in report.done.dropped] == ["other"]
    assert packs_in_place(backend) == packs
    assert report.done.freed_nbytes == 0
    history.delete("seq:3")
    again = other_handle(history).gc(now=True)
    assert again.done.moved_packs > 0, "the damaged manifest was removed by hand"
    assert again.obstacles == ()


def test_manifest_damaged_during_collection_stops_it(history, backend, monkeypatch):
    # A higher generation under the same name may have other bytes, so the second listing reads it again.
    path, packs, looks = replace_by_itself(history, 5), packs_in_place(backend), []
    look = Marker.mark

    def damaging_read(marker):
        looks.append(1)
        if len(looks) == 2:
            truncate(backend, path, -1)
        return look(marker)

    monkeypatch.setattr(Marker, "mark", damaging_read)
    report = other_handle(history).gc(LAST_ONE)
    assert report.plan.stop == "" != report.stop == report.done.stop
    assert "may name any pack" in report.stop
    assert packs_in_place(backend) == packs


def test_damaged_tag_blocks_its_run(history, backend):
    history.tag(1, "good")
    damage(backend, "tags/main/good", at=5)
    report = other_handle(history).gc(LAST_ONE)
    assert "tag" in report.runs[0].blocked
    assert report.done.dropped == []


def test_tagged_checkpoint_stays_with_reason(history):
    history.tag(1, "good")
    report = other_handle(history).gc(LAST_ONE)
    check_restores(history, [1, 5])
    assert next(verdict for verdict in report.runs[0].verdicts if verdict.step == 1).reasons == ("tag good",)


def test_checkpoint_tagged_after_the_plan_is_kept(history, monkeypatch):
    tags = type(repository_of(history).tags)
    declare_all = tags.declare_all

    def tag_first(self, seqs, purpose):
        monkeypatch.setattr(tags, "declare_all", declare_all)
        history.tag(2, "late")
        return declare_all(self, seqs, purpose)

    monkeypatch.setattr(tags, "declare_all", tag_first)
    report = other_handle(history).gc(LAST_ONE, now=True)
    assert [name.step for name in report.done.spared] == [2]
    assert [name.step for name in report.done.dropped] == [0, 1, 3, 4]
    check_restores(history, [2, 5])


def test_newer_entry_of_late_tagged_step_is_kept(store, monkeypatch):
    commit_all(store, [1, 1, 2])
    tags = type(repository_of(store).tags)
    declare_all = tags.declare_all

    def tag_first(self, seqs, purpose):
        monkeypatch.setattr(tags, "declare_all", declare_all)
        store.tag("seq:0", "late")
        return declare_all(self, seqs, purpose)

    monkeypatch.setattr(tags, "declare_all", tag_first)
    report = other_handle(store).gc(LAST_ONE)
    assert report.done.dropped == []
    assert sorted(name.seq for name in report.done.spared) == [0, 1]


def test_more_than_max_delete_is_refused_first(history, backend):
    before = files_of(backend)
    with pytest.raises(UsageError, match="5 checkpoints would be deleted, but max_delete is 4"):
        other_handle(history).gc(LAST_ONE, max_delete=4)
    assert files_of(backend) == before
    assert other_handle(history).gc(LAST_ONE, max_delete=4, dry_run=True).refused
    assert len(other_handle(history).gc(LAST_ONE, max_delete=5).done.dropped) == 5


def test_rules_for_missing_run_are_refused_or_ignored(history, backend):
    assert other_handle(history, run="none").gc(LAST_ONE).runs == ()
    check_restores(history, range(6))
    from ckstore.ops.gc.run import GcLimits, collect_store

    with pytest.raises(NotFoundError, match="no run 'none'"):
        collect_store(repository_of(history), LAST_ONE, runs=["none"], limits=GcLimits(), dry_run=True)


def test_damaged_quarantined_manifest_keeps_its_packs(history, backend):
    name = next(name for name in repository_of(history).manifests.listing().names if name.step == 1)
    pack = pack_of(history, 1)
    content = bytearray(backend.read_bytes(name.path, nbytes_max=1 << 20))
    content[150] ^= 1
    history.delete(1)
    backend.make_folder(paths.quarantine_manifests_folder("main"))
    backend.create(f"{paths.quarantine_manifests_folder('main')}/{name.file}", bytes(content), sync=True)
    other_handle(history).gc(LAST_ONE, now=True, repack_nbytes_max=0)
    assert pack in packs_in_place(backend)
    backend.unlink(f"{paths.quarantine_manifests_folder('main')}/{name.file}")
    other_handle(history).gc(now=True)
    assert pack not in packs_in_place(backend)


def test_old_drafts_are_removed_and_other_files_stay(history, backend, clock):
    old, foreign = "tmp/" + "1" * 32 + ".ckm", "tmp/notes.txt"
    for path in (old, foreign):
        backend.create(path, b"x", sync=True)
    clock.now += 2 * HOUR
    young = "tmp/" + "2" * 32 + ".lease"
    backend.create(young, b"x", sync=True)
    report = other_handle(history).gc()
    assert report.done.drafts == 1
    assert {"tmp/notes.txt", young} <= set(files_of(backend))
    assert old not in files_of(backend)


def test_only_intents_of_dead_makers_are_removed(history, backend):
    mine = repository_of(history).tags.declare(1, "test")
    dead = repository_of(history).tags.declare(2, "test")
    record = decode_record(backend.read_bytes(dead, nbytes_max=4096), IntentRecord)
    backend.overwrite(dead, encode_record(replace(record, process_started="1")))
    assert other_handle(history).gc().done.intents == 1
    assert mine in files_of(backend)
    assert dead not in files_of(backend)


def test_store_without_any_commit_is_collected(store):
    report = other_handle(store).gc(LAST_ONE, all_runs=True)
    assert report.plan.is_empty
    assert report.runs == ()


def test_stored_policy_is_the_default(history, backend):
    handle = other_handle(history)
    assert handle.retention is None
    handle.set_retention(Retention(keep_last=2))
    assert other_handle(history).retention == Retention(keep_last=2)
    other_handle(history).gc()
    check_restores(history, [4, 5])
    other_handle(history).gc(LAST_ONE)
    check_restores(history, [5])
    handle.set_retention(None)
    assert other_handle(history).retention is None
    assert history.verify().is_clean


def test_stored_policy_with_a_typo_is_refused(history, backend):
    from ckstore.format.records import ConfigRecord
    from ckstore.store.store_config import change_config

    change_config(backend, lambda record: ConfigRecord(retention={"keep_lats": 1}))
    with pytest.raises(UsageError, match="Did you mean 'keep_last'"):
        other_handle(history).gc()
    check_restores(history, range(6))


def test_storing_a_policy_keeps_other_settings(history, backend):
    from ckstore.format.records import ConfigRecord
    from ckstore.store.store_config import change_config, read_config

    change_config(backend, lambda record: ConfigRecord(tiers={"cold": "s3://bucket/x"}))
    other_handle(history).set_retention(LAST_ONE)
    assert read_config(backend).tiers == {"cold": "s3://bucket/x"}


@pytest.mark.parametrize(
    "options",
    [{"min_age": "later"}, {"trash_for": -1}, {"waste_max": 0}, {"repack_nbytes_max": -1}, {"max_delete": -1}],
)
def test_invalid_limits_are_refused(history, options):
    with pytest.raises(UsageError):
        other_handle(history).gc(**options)


def test_one_collection_at_a_time(folder, clock):
    with ckstore.open(folder, clock=clock) as store:
        commit_all(store, [1])
        lock = LocalBackend(folder).try_lock("gc.lock")
        with pytest.raises(LockHeldError):
            other_handle(store).gc()
        other_handle(store).gc(dry_run=True)
        lock.close()
        other_handle(store).gc()


def test_packs_stay_in_the_trash_for_trash_for(folder, clock):
    import time

    clock.now = time.time()
    with ckstore.open(folder, clock=clock) as store:
        commit_all(store, [1, 2])
        clock.now += 2 * HOUR
        first = other_handle(store).gc(LAST_ONE)
        assert first.done.freed_nbytes == 0
        assert first.plan.free_ns == pytest.approx(clock.now_ns() + 24 * HOUR * 10**9)
        clock.now += 20 * HOUR
        assert other_handle(store).gc().done.freed_nbytes == 0
        clock.now += 5 * HOUR
        report = other_handle(store).gc()
        assert report.done.freed_nbytes >= first.done.moved_nbytes
        assert other_handle(store).trash() == []
        check_restores(store, [2])


def test_trash_from_the_future_is_not_purged(folder, clock):
    import time

    clock.now = time.time() + 2 * HOUR
    with ckstore.open(folder, clock=clock) as store:
        commit_all(store, [1, 2])
        other_handle(store).gc(LAST_ONE)
        clock.now -= 1000 * HOUR
        assert other_handle(store).gc().done.freed_nbytes == 0
        assert other_handle(store).gc(now=True).done.freed_nbytes > 0
