"""Protects the history of a run: all entries are listed, ``latest`` is the highest seq, a step is its newest entry."""

from __future__ import annotations

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from support import memory_files


@pytest.fixture
def run(store):
    """Steps 10, 20, 30 and 20 again, each holding its seq."""
    for number, step in enumerate([10, 20, 30, 20]):
        store.commit({"n": number}, step, metrics={"loss": float(number)})
    return store


def seqs(store):
    return [entry.seq for entry in store.log()]


def test_log_lists_every_entry_newest_first(run):
    assert [(entry.seq, entry.step) for entry in run.log()] == [(3, 20), (2, 30), (1, 20), (0, 10)]


def test_steps_are_unique_and_ascending(run):
    assert run.steps() == [10, 20, 30]


def test_latest_is_highest_seq_not_highest_step(run):
    assert (run.latest().seq, run.latest().step) == (3, 20)
    assert run.restore() == {"n": 3}


def test_step_means_newest_entry_and_older_stays(run):
    assert run.restore(20) == {"n": 3}
    assert run.restore("seq:1") == {"n": 1}


def test_entries_have_their_facts(run, clock):
    entry = run.info(30)
    assert (entry.run, entry.metrics, entry.generation, entry.is_archival) == ("main", {"loss": 2.0}, 0, False)
    assert entry.origin_id is None
    assert entry.time_ns > 1_600_000_000 * 10**9
    assert entry == run.log()[1]


def test_time_is_from_the_clock(backend, clock):
    with ckstore.open(backend, clock=clock) as store:
        store.commit({"a": 1}, 1)
        clock.now += 60
        store.commit({"a": 1}, 2)
        newer, older = store.log()
        assert newer.time_ns - older.time_ns == 60 * 10**9


def test_same_state_at_other_step_is_new_checkpoint(store):
    one, other = store.commit({"a": 1}, 1), store.commit({"a": 1}, 2)
    assert one.checkpoint_id != other.checkpoint_id


def test_history_is_the_same_after_reopening(run, backend):
    log = run.log()
    run.close()
    with ckstore.open(backend) as again:
        assert again.log() == log
        assert again.commit({"n": 4}, 40).seq == 4


# Parents


def test_parent_is_last_restored_or_committed(store, backend):
    for step in range(3):
        store.commit({"n": step}, step)
    assert [entry.parent for entry in store.log()] == [1, 0, None]
    store.restore(0)
    assert store.info(f"seq:{store.commit({'n': 3}, 3).seq}").parent == 0
    store.close()
    with ckstore.open(backend) as fresh:
        assert fresh.info(f"seq:{fresh.commit({'n': 4}, 4).seq}").parent is None
        fresh.restore("seq:1")
        assert fresh.info(f"seq:{fresh.commit({'n': 5}, 5).seq}").parent == 1


def test_partial_or_failed_restore_sets_no_parent(run):
    run.restore(10, only="n")
    with pytest.raises(NotFoundError):
        run.restore(99)
    assert run.info(f"seq:{run.commit({'n': 9}, 50).seq}").parent == 3


# Tags


def test_tags_are_shown_with_entries(run):
    run.tag(10, "b")
    run.tag("seq:0", "a")
    assert run.info(10).tags == ("a", "b")
    assert {entry.seq: entry.tags for entry in run.log()} == {3: (), 2: (), 1: (), 0: ("a", "b")}
    assert run.tags() == {"a": 0, "b": 0}
    run.tag("latest", "a")
    assert run.tags() == {"a": 3, "b": 0}
    run.untag("b")
    assert run.tags() == {"a": 3}
    assert run.restore("a") == {"n": 3}


def test_commit_can_tag_itself(store):
    store.commit({"n": 1}, 1, tags=["good", "first"])
    store.commit({"n": 2}, 2, tags=["good"])
    assert store.tags() == {"first": 0, "good": 1}


def test_untag_of_missing_tag_is_not_found(run):
    with pytest.raises(NotFoundError):
        run.untag("nothing")
    with pytest.raises(UsageError):
        run.untag("../x")


def test_tag_on_missing_checkpoint_is_not_found(store, run):
    for reference in (99, "seq:99", "nothing"):
        with pytest.raises(NotFoundError):
            run.tag(reference, "good")
    assert run.tags() == {}


def test_tags_need_no_lease(run, backend):
    with ckstore.open(backend) as other:
        other.tag(10, "good")
        assert run.tags() == {"good": 0}


def test_damaged_tag_does_not_hide_the_history(run, backend):
    run.tag(10, "good")
    run.tag(20, "fine")
    memory_files.flip(backend, "tags/main/good", 5)
    assert len(run.log()) == 4
    assert run.restore() == {"n": 3}
    assert run.latest().seq == 3
    with pytest.raises(CorruptError, match="good"):
        run.info("good")
    assert run.tags() == {"fine": 3}
    with pytest.raises(CorruptError, match="good"):
        run.delete(30)
    assert len(run.log()) == 4, "it may point to anything, so nothing is dropped"
    run.tag(10, "good")
    assert run.tags() == {"fine": 3, "good": 0}
    run.delete(30)


# Rewind


def test_rewind_republishes_an_entry_as_newest(run):
    entry = run.rewind(10)
    assert (entry.seq, entry.step, entry.metrics) == (4, 10, {"loss": 0.0})
    assert seqs(run) == [4, 3, 2, 1, 0]
    assert run.restore() == {"n": 0}
    assert run.latest().seq == 4
    assert run.info("seq:4").origin_id == run.info("seq:0").checkpoint_id
    assert run.info("seq:4").parent == 0
    assert run.verify("decode").is_clean


def test_rewind_copies_no_bytes(store, backend):
    import numpy as np

    store.commit({"w": np.arange(50_000.0)}, 1)
    store.commit({"w": np.ones(50_000)}, 2)
    before = memory_files.names_of(backend, "packs/")
    assert store.rewind(1).bytes_written == 0
    assert memory_files.names_of(backend, "packs/") == before


def test_commit_after_a_rewind_has_it_as_parent(run):
    run.rewind(10)
    run.commit({"n": 9}, 11)
    assert run.log()[0].parent == 4


def test_rewinding_twice_and_to_a_rewound_entry_works(run):
    run.rewind(10)
    run.rewind("seq:1")
    run.rewind("seq:4")
    assert seqs(run) == [6, 5, 4, 3, 2, 1, 0]
    assert run.restore() == {"n": 0}


def test_rewind_during_other_writer_is_a_conflict(run, backend):
    with ckstore.open(backend) as other, pytest.raises(ConflictError):
        other.rewind(10)
    assert len(run.log()) == 4


def test_rewind_to_a_torn_entry_is_refused(run, backend):
    memory_files.truncate(backend, memory_files.first_of(backend, "manifests/main/00000000-"), 200)
    with pytest.raises(CorruptError):
        run.rewind("seq:0")
    assert run.restore() == {"n": 3}


# Delete


def test_deleting_a_step_drops_every_entry_of_it(run):
    deleted = run.delete(20)
    assert (deleted.seqs, deleted.steps) == ((1, 3), (20,))
    assert seqs(run) == [2, 0]
    assert run.steps() == [10, 30]
    assert run.restore() == {"n": 2}
    with pytest.raises(NotFoundError):
        run.restore(20)


@pytest.mark.parametrize("reference", ["20", 20])
def test_step_as_digits_is_a_step(run, reference):
    assert run.delete(reference).seqs == (1, 3)


def test_deleting_a_seq_drops_one_entry(run):
    assert run.delete("seq:3").seqs == (3,)
    assert run.restore(20) == {"n": 1}


@pytest.mark.parametrize("reference", ["latest", "best:loss:max"])
def test_deleting_by_another_name_drops_one_entry(run, reference):
    assert run.delete(reference).seqs == (3,)
    assert seqs(run) == [2, 1, 0]


def test_deleted_seqs_are_never_reused(run, backend):
    run.delete("seq:3")
    assert run.commit({"n": 4}, 40).seq == 4
    run.delete("seq:4")
    run.close()
    with ckstore.open(backend) as again:
        assert again.commit({"n": 5}, 50).seq == 5


def test_tagged_checkpoint_is_not_deleted(run):
    run.tag("seq:1", "keep")
    with pytest.raises(ConflictError, match="tag 'keep'"):
        run.delete(20)
    assert seqs(run) == [3, 2, 1, 0], "not even the entries of the step that carry no tag"
    run.untag("keep")
    run.delete(20)
    assert seqs(run) == [2, 0]


def test_delete_of_missing_checkpoint_is_not_found(run):
    for reference in (99, "seq:99", "nothing"):
        with pytest.raises(NotFoundError):
            run.delete(reference)
    run.delete(10)
    with pytest.raises(NotFoundError):
        run.delete(10)


def test_run_accepts_commits_after_deleting_everything(run):
    for step in run.steps():
        run.delete(step)
    assert run.log() == []
    assert run.latest() is None
    assert run.commit({"n": 9}, 1).seq == 4


def test_chunks_of_deleted_checkpoint_can_be_reused(store):
    import numpy as np

    store.commit({"w": np.arange(50_000.0)}, 1)
    store.delete(1)
    store.commit({"w": np.arange(50_000.0)}, 2)
    assert store.verify("decode").is_clean
    assert (store.restore()["w"] == np.arange(50_000.0)).all()


def test_deleted_manifest_is_in_the_trash(run, backend):
    run.delete(10)
    assert [name for name in memory_files.names_of(backend, "trash/") if name.endswith(".ckm")]
    assert repository_of(run).tags.intents_on(0) == []


# Damage in others


def test_damaged_header_hides_no_other_checkpoint(run, backend, caplog):
    entries = run.log()
    memory_files.flip(backend, memory_files.first_of(backend, "manifests/main/00000001-"), 20)
    assert run.log() == [entry for entry in entries if entry.seq != 1]
    assert "00000001-" in caplog.text
    assert run.restore() == {"n": 3}
    assert run.restore(30) == {"n": 2}
    assert run.steps() == [10, 20, 30]
