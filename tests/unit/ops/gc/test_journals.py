"""Protects journals from collections: segments go when no point of a kept keyframe needs them, and not before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import BackendError, ConflictError, UsageError
from ckstore.ops.gc.policy import Retention
from ckstore.store.tags import Tags
from ckstore.store.trash import Trash
from support.journaled_runs import JournaledRun

LAST_ONE = Retention(keep_last=1)


@pytest.fixture
def run(tmp_path):
    made = JournaledRun(tmp_path / "store")
    yield made
    made.stop()
    made.store.close()


@pytest.fixture
def two(run):
    """Two segments with a keyframe each; the second continues the first."""
    run.names = []
    first, last = run.segment(0, 1, 2)
    second, run.last = run.segment(3, 4, 5, previous=last)
    run.names = [first, second]
    run.before = last
    assert run.found() == {0: [1, 2], 1: [4, 5]}
    return run


def damage(run, path):
    with Path(run.repository.backend.location_of(path)).open("r+b") as file:
        file.write(b"damaged")


def collect(run, policy=LAST_ONE, **options):
    return run.store.gc(policy, min_age=0, **options)


def test_segments_go_with_their_keyframe(two):
    report = collect(two)
    assert (report.dropped_count, report.done.moved_segments) == (1, 1)
    assert two.segments() == two.names[1:]
    assert two.found() == {1: [4, 5]}


def test_a_tag_on_a_point_keeps_its_keyframe_and_the_segments_between(run):
    first, last = run.segment(0, 1, 2)
    second = run.start(last)
    third_from = run.points(3, 4)
    third = run.start(third_from)
    run.points(5)
    run.segment(6, 7, previous=run.writer.last)
    run.store.tag(4, "kept")
    collect(run, Retention(keep_last=1, keep_journal=1))
    assert [info.seq for info in run.store.log()] == [1, 0]
    assert run.segments()[:2] == [first, second]
    assert third not in run.segments()
    assert run.found()[0] == [1, 2, 3, 4]
    run.store.untag("kept")
    collect(run, Retention(keep_last=1, keep_journal=1))
    assert run.found() == {1: [7]}


def test_what_a_tag_on_a_point_needs_is_neither_deleted_nor_demoted(two):
    two.store.tag(2, "kept")
    with pytest.raises(ConflictError, match=r"seq 0 \(step 0\) is kept by the tag 'kept'"):
        two.store.delete(0)
    with pytest.raises(ConflictError, match="kept"):
        two.store.demote(0)
    report = collect(two)
    assert any("tag kept" in verdict.reasons for verdict in report.runs[0].kept)
    assert two.found() == {0: [1, 2], 1: [4, 5]}


def test_a_tag_set_after_the_intents_is_refused(two, monkeypatch):
    move = Trash.move_segments

    def tag_first(trash, names):
        with pytest.raises(ConflictError, match="being deleted"):
            two.store.tag(2, "late")
        return move(trash, names)

    monkeypatch.setattr(Trash, "move_segments", tag_first)
    assert collect(two, Retention(keep_last=2, keep_journal=1)).done.moved_segments == 1
    assert two.store.tags() == {}


def test_a_tag_set_before_the_intents_keeps_the_segment(two, monkeypatch):
    declare = Tags.declare_all

    def tag_first(tags, seqs, purpose):
        two.store.tag(2, "kept")
        return declare(tags, seqs, purpose)

    monkeypatch.setattr(Tags, "declare_all", tag_first)
    assert collect(two, Retention(keep_last=2, keep_journal=1)).done.moved_segments == 0
    assert two.found() == {0: [1, 2], 1: [4, 5]}


def test_a_tag_on_a_point_that_is_collected_meanwhile_is_undone(two, monkeypatch):
    """The collection ends between the reading of the point and the writing of the tag."""
    put = Tags.put

    def collect_first(tags, *args, **options):
        collect(two, Retention(keep_last=2, keep_journal=1))
        return put(tags, *args, **options)

    monkeypatch.setattr(Tags, "put", collect_first)
    with pytest.raises(ConflictError, match="being deleted"):
        two.store.tag(2, "late")
    assert two.store.tags() == {}


def test_a_record_is_durable_before_its_tag(two, monkeypatch):
    """Its writer may have been killed between the write and the sync."""
    backend, events = type(two.repository.backend), []
    sync, put = backend.sync_file, Tags.put
    monkeypatch.setattr(backend, "sync_file", lambda self, path: (events.append(path), sync(self, path))[1])
    monkeypatch.setattr(Tags, "put", lambda self, name, **facts: (events.append(name), put(self, name, **facts))[1])
    two.store.tag(2, "kept")
    assert events == [two.names[0].path, "kept"]


def test_a_damaged_tag_stops_the_collection_of_points(two):
    two.store.tag(2, "kept")
    damage(two, "tags/main/kept")
    report = collect(two, Retention(keep_last=1, keep_journal=1))
    assert "a tag cannot be read" in report.runs[0].blocked
    assert two.segments() == two.names


def test_dry_run_tells_what_a_collection_does(two):
    planned = collect(two, dry_run=True)
    assert two.segments() == two.names
    done = collect(two)
    assert [move.name for move in planned.plan.segments] == two.names[:1]
    assert planned.plan.segments_nbytes == done.done.moved_segments_nbytes > 0
    assert planned.later_nbytes >= planned.plan.segments_nbytes


def test_without_rules_points_of_kept_checkpoints_stay(two):
    assert collect(two, None).done.moved_segments == 0
    assert two.segments() == two.names


def test_a_segment_that_holds_the_record_of_a_kept_keyframe_stays(run):
    name = run.start()
    run.keyframe(0)
    run.points(1)
    run.keyframe(2)
    last = run.points(3)
    second = run.start(last)
    run.points(4)
    run.stop()
    collect(run)
    assert run.segments() == [name, second]
    assert run.found() == {1: [3, 4]}


def test_young_segments_stay(two):
    two.store.gc(LAST_ONE)
    assert two.segments() == two.names


def test_a_segment_that_a_writer_holds_stays_with_its_whole_chain(two):
    """Its keyframe may be about to be published."""
    third = two.start()
    two.points(7)
    collect(two)
    assert two.segments() == [two.names[1], third]
    fourth = two.start(two.writer.last)
    two.points(8)
    collect(two)
    assert two.segments() == [two.names[1], third, fourth]
    two.stop()
    collect(two)
    assert two.segments() == [two.names[1]]


def test_the_keyframe_of_the_newest_point_is_not_deleted(two):
    name = two.start(two.before)
    two.points(6)
    two.stop()
    report = collect(two)
    assert report.dropped_count == 0, "the newest point needs the older keyframe"
    assert any("up to step 6" in reason for verdict in report.runs[0].kept for reason in verdict.reasons)
    assert two.segments() == [*two.names, name]
    with pytest.raises(ConflictError, match="up to step 6"):
        two.store.delete(0)
    with pytest.raises(ConflictError, match="up to step 6"):
        two.store.demote(0)
    two.commit(9)
    collect(two)
    assert two.segments() == []
    assert [info.step for info in two.store.log()] == [9]


def test_a_living_writer_keeps_its_keyframe(two):
    """It goes on from an older point, and another process commits a newer checkpoint meanwhile."""
    two.start(two.before)
    two.points(6)
    two.commit(9)
    collect(two)
    assert sorted(info.step for info in two.store.log()) == [0, 9]
    # The older keyframe can serve all points, so none goes.
    assert two.found() == {0: [1, 2, 3, 4, 5, 6]}


def test_keep_journal_keeps_the_points_of_the_newest_keyframes(two):
    report = collect(two, Retention(keep_last=2, keep_journal=1))
    assert (report.dropped_count, report.done.moved_segments) == (0, 1)
    assert two.segments() == two.names[1:]
    assert two.found() == {1: [4, 5]}


def test_keep_journal_alone_deletes_no_checkpoint(two):
    report = collect(two, {"keep_journal": 1})
    assert (report.dropped_count, report.done.moved_segments) == (0, 1)
    assert len(two.store.log()) == 2


def test_keep_journal_is_stored_with_the_store(two):
    two.store.set_retention(Retention(keep_last=2, keep_journal=1))
    assert two.store.retention.keep_journal == 1
    assert collect(two, None).done.moved_segments == 1
    with pytest.raises(UsageError, match="keep_journal"):
        Retention(keep_journal=0)


def test_undelete_brings_the_points_of_a_keyframe_back(two):
    collect(two)
    seq = two.store.undelete(0).seq
    assert two.segments() == two.names
    assert two.found() == {seq: [1, 2], 1: [4, 5]}
    assert collect(two).done.moved_segments == 0


def test_a_folder_of_the_trash_brings_segments_back(two):
    collect(two)
    entry = next(entry for entry in two.store.trash() if entry.segment_count)
    assert entry.nbytes > 0
    assert two.store.restore_from_trash(entry.trash_id).segments == 1
    assert two.segments() == two.names


def test_purge_frees_segments(two):
    collect(two)
    nbytes = sum(entry.nbytes for entry in two.store.trash() if entry.segment_count)
    assert two.store.purge() >= nbytes > 0
    assert two.store.trash() == []
    assert two.found() == {1: [4, 5]}


def test_an_immediate_collection_frees_segments(two):
    report = collect(two, now=True)
    assert report.freed_nbytes >= report.done.moved_segments_nbytes > 0
    assert not any(entry.segment_count for entry in two.store.trash())


def test_a_segment_that_was_continued_before_the_intents_stays(two, monkeypatch):
    """With keep_journal, its keyframe is in place, so a writer may continue it at any time."""
    declare = Tags.declare_all

    def continue_first(tags, seqs, purpose):
        assert list(seqs) == [0]
        two.continue_from(two.before)
        return declare(tags, seqs, purpose)

    monkeypatch.setattr(Tags, "declare_all", continue_first)
    report = collect(two, Retention(keep_last=2, keep_journal=1))
    assert report.done.moved_segments == 0
    two.points(6)
    assert two.found() == {0: [1, 2, 6], 1: [4, 5]}


def test_a_segment_is_not_continued_after_the_intents(two, monkeypatch):
    move = Trash.move_segments

    def continue_first(trash, names):
        with pytest.raises(ConflictError, match="being deleted"):
            two.continue_from(two.before)
        return move(trash, names)

    monkeypatch.setattr(Trash, "move_segments", continue_first)
    report = collect(two, Retention(keep_last=2, keep_journal=1))
    assert report.done.moved_segments == 1
    assert two.segments() == two.names[1:], "the refused writer has removed its segment"
    assert two.repository.tags.intents_on(0) == []


def test_a_keyframe_that_comes_back_while_its_segment_is_moved_brings_it_back(two, monkeypatch, tmp_path):
    """The undelete has looked into the trash before the segment was there."""
    move = Trash.move_segments

    def undelete_first(trash, names):
        with ckstore.open(tmp_path / "store") as other:
            other.undelete(0)
        return move(trash, names)

    monkeypatch.setattr(Trash, "move_segments", undelete_first)
    report = two.store.gc(LAST_ONE, min_age=0)
    assert (report.done.moved_segments, report.done.rescued) == (1, 1)
    assert two.segments() == two.names


def test_a_writer_does_not_continue_what_was_moved(two):
    collect(two, Retention(keep_last=2, keep_journal=1))
    with pytest.raises(ConflictError):
        two.continue_from(two.before)


def test_a_writer_does_not_continue_a_point_whose_keyframe_is_being_deleted(two):
    intent = two.repository.tags.declare(0, "delete")
    with pytest.raises(ConflictError, match="being deleted"):
        two.continue_from(two.before)
    two.repository.tags.retract(intent)
    two.continue_from(two.before)


def test_purge_puts_back_what_a_segment_in_place_continues(two):
    """The collector was killed after it moved the segment, before it read again."""
    name = two.start(two.before)
    two.points(6)
    two.stop()
    two.repository.trash.move_segments(two.names[:1])
    assert two.found() == {1: [4, 5]}
    two.store.purge()
    assert two.segments() == [*two.names, name]
    assert two.found() == {0: [1, 2, 6], 1: [4, 5]}


@pytest.mark.parametrize("count", range(4))
def test_an_interrupted_move_leaves_whole_chains(run, monkeypatch, count):
    """Whichever move fails, points of what is left have their keyframe, and the next collection goes on."""
    names = [run.start()]
    run.keyframe(0)
    for step in (1, 2, 3):
        last = run.points(step)
        names.append(run.start(last))
    run.points(4)
    newest, _ = run.segment(5, 6)
    backend = type(run.repository.backend)
    rename, calls = backend.rename, []

    def fail(self, source, target):
        if source.endswith(".ckj"):
            calls.append(source)
            if len(calls) > count:
                raise BackendError("the disk has failed")
        return rename(self, source, target)

    monkeypatch.setattr(backend, "rename", fail)
    rules = Retention(keep_last=2, keep_journal=1)
    with pytest.raises(BackendError):
        collect(run, rules)
    left = [1, 2, 3, 4][: 4 - count]
    assert run.found() == ({0: left} if left else {}) | {1: [6]}
    monkeypatch.undo()
    collect(run, rules)
    assert run.segments() == [newest]
    assert run.found() == {1: [6]}


def test_nothing_is_moved_while_a_manifest_cannot_be_read(two):
    name = next(name for name in two.repository.manifests.listing().names if name.seq == 0)
    damage(two, name.path)
    report = collect(two)
    assert report.runs[0].blocked
    assert two.segments() == two.names


def test_damaged_segments_stay(two):
    damage(two, two.names[0].path)
    collect(two)
    assert two.segments() == two.names


def test_collections_beside_a_writer_lose_no_point(run, tmp_path):
    """A writer goes on in a new segment at each keyframe, and collections run without a pause."""
    done = threading.Event()

    def collect_all():
        with ckstore.open(tmp_path / "store") as other:
            while not done.is_set():
                other.gc(LAST_ONE, min_age=0, repack_nbytes_max=0)

    with ThreadPoolExecutor(1) as pool:
        collector = pool.submit(collect_all)
        try:
            run.start()
            run.keyframe(0)
            for step in range(1, 60):
                if step % 6 == 0:
                    run.keyframe(step)
                    run.start(run.writer.last)
                last = run.points(step) if step % 6 else run.writer.last
                record = run.journals.read().find(last)
                assert record is not None, step
                assert record.head.step == step
        finally:
            done.set()
        collector.result()
    run.stop()
    found = run.found()
    assert found[max(found)] == [55, 56, 57, 58, 59]
    collect(run)
    assert len(run.segments()) == 2, "that with the record of the newest keyframe, and the one after it"


def test_usage_counts_segments(two):
    sizes = [two.repository.backend.stat(name.path).nbytes for name in two.names]
    kinds = {each.kind: (each.files, each.nbytes) for each in two.store.usage().kinds}
    assert kinds["journals"] == (2, sum(sizes))
    trashed = kinds["trash"]
    collect(two)
    kinds = {each.kind: (each.files, each.nbytes) for each in two.store.usage().kinds}
    assert kinds["journals"] == (1, sizes[1])
    assert kinds["trash"][1] >= trashed[1] + sizes[0]


def test_a_keyframe_that_a_writer_continues_after_the_plan_is_not_deleted(two, monkeypatch):
    declare = Tags.declare_all

    def continue_first(tags, seqs, purpose):
        two.continue_from(two.before)
        two.points(6)
        return declare(tags, seqs, purpose)

    monkeypatch.setattr(Tags, "declare_all", continue_first)
    report = collect(two)
    assert report.done.dropped == []
    assert any("up to step 6" in why for why in report.done.spared.values())
    assert two.found() == {0: [1, 2, 6], 1: [4, 5]}


def test_a_segment_without_records_that_a_writer_holds_stays(two):
    name = two.start()
    collect(two)
    assert two.segments() == [two.names[1], name]


def test_a_segment_with_a_damaged_record_stays(two):
    """What is behind the damage may have a keyframe that cannot be found."""
    record = two.journals.read().records(two.names[0]).records[1]
    with Path(two.repository.backend.location_of(two.names[0].path)).open("r+b") as file:
        file.seek(record.offset)
        file.write(bytes(64))
    collect(two)
    assert two.segments() == two.names
