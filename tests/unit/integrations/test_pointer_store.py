"""PointerStore: what a framework sees of a store, and that nothing is deleted before its replacement is durable."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ckstore
from ckstore.errors import CapacityError, CkstoreError, NotFoundError
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import read_pointer


def state(step):
    return {"w": np.arange(8.0) + step, "step": step}


class HeldCommit:
    """A commit in the background that becomes durable, or fails, when the test says so."""

    def __init__(self, commit):
        self.commit = commit
        self.receipt = self.error = None
        self.is_skipped = False
        self.step = 0

    is_done = property(lambda self: self.receipt is not None or self.error is not None)

    def finish(self):
        self.receipt = self.commit()

    def fail(self, error):
        self.error = error

    def result(self):
        if not self.is_done:
            self.finish()
        if self.error is not None:
            raise self.error
        return self.receipt


class HeldStore:
    """A store whose background commits wait for the test."""

    def __init__(self, store):
        self.store = store
        self.commits = []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def commit_async(self, *args, **options):
        self.commits.append(HeldCommit(lambda: self.store.commit(*args, **options)))
        self.commits[-1].step = args[1]
        return self.commits[-1]


@pytest.fixture
def foreground(tmp_path):
    opened = PointerStore(tmp_path / "store", background=False, made_by="a test")
    yield opened
    opened.close()


@pytest.fixture
def held(tmp_path):
    opened = PointerStore(tmp_path / "store", made_by="a test")
    opened._opened = HeldStore(ckstore.open(tmp_path / "store"))
    store = opened.store.store
    yield opened
    store.close()


def steps_in(pointers):
    return [info.step for info in reversed(pointers.store.log())]


def test_saved_state_is_loaded_by_pointer(foreground, tmp_path):
    foreground.save(state(1), 10, tmp_path / "a.ckpt", metrics={"loss": 2.0}, tags=["good"])
    foreground.save(state(2), 20, tmp_path / "b.ckpt")
    assert foreground.load(tmp_path / "a.ckpt")["step"] == 1
    assert foreground.load(tmp_path / "b.ckpt", only="step") == {"step": 2}
    assert foreground.store.info("good").metrics == {"loss": 2.0}
    assert read_pointer(tmp_path / "a.ckpt").made_by == "a test"


def test_real_background_commit(tmp_path):
    pointers = PointerStore(tmp_path / "store", made_by="a test")
    pointers.save(state(1), 10, tmp_path / "a.ckpt")
    assert pointers.load(tmp_path / "a.ckpt")["step"] == 1
    pointers.close()
    assert read_pointer(tmp_path / "a.ckpt").seq == pointers.newest().seq
    pointers.close()


def test_bucket_commits_in_the_foreground():
    assert not PointerStore("s3://bucket/run", made_by="a test").background
    assert PointerStore("file:///tmp/run", made_by="a test").background


def test_asking_creates_no_store(tmp_path):
    pointers = PointerStore(tmp_path / "store", made_by="a test")
    assert pointers.newest() is None
    assert not pointers.exists()
    assert not (tmp_path / "store").exists()


def test_pointer_names_the_seq_once_durable(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    assert read_pointer(tmp_path / "a").seq is None
    held.poll()
    assert read_pointer(tmp_path / "a").seq is None
    held.store.commits[0].finish()
    held.poll()
    assert read_pointer(tmp_path / "a").seq == held.newest().seq
    assert held.is_settled


def test_load_waits_for_its_commit(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    assert held.load(tmp_path / "a")["step"] == 1


def test_removal_waits_until_the_newer_save_is_durable(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.wait()
    held.save(state(2), 20, tmp_path / "b")
    held.remove(tmp_path / "a")
    assert (tmp_path / "a").exists()
    assert steps_in(held) == [10]
    held.store.commits[1].finish()
    held.poll()
    assert not (tmp_path / "a").exists()
    assert steps_in(held) == [20]


def test_failed_save_keeps_what_it_would_replace(held, tmp_path, caplog):
    held.save(state(1), 10, tmp_path / "a")
    held.wait()
    held.save(state(2), 20, tmp_path / "b")
    held.remove(tmp_path / "a")
    held.store.commits[1].fail(CapacityError("the disk is full"))
    with pytest.raises(CapacityError):
        held.poll()
    held.poll()
    assert not (tmp_path / "b").exists()
    assert held.load(tmp_path / "a")["step"] == 1
    assert "is kept" in caplog.text


def test_overwritten_pointer_deletes_its_old_checkpoint_later(held, tmp_path):
    held.save(state(1), 10, tmp_path / "last")
    held.wait()
    held.save(state(2), 20, tmp_path / "last")
    assert steps_in(held) == [10]
    held.wait()
    assert steps_in(held) == [20]
    assert held.load(tmp_path / "last")["step"] == 2


def test_pointer_overwritten_twice_in_flight_leaves_one(held, tmp_path):
    for number in range(3):
        held.save(state(number), 10 * number, tmp_path / "last")
    for commit in held.store.commits:
        commit.finish()
        held.poll()
    assert steps_in(held) == [20]
    assert held.load(tmp_path / "last")["step"] == 2


def test_equal_steps_in_flight_leave_the_later(held, tmp_path):
    for number in (1, 2):
        held.save(state(number), 10, tmp_path / "last")
    held.wait()
    assert held.load(tmp_path / "last")["step"] == 2
    assert steps_in(held) == [10]
    assert held.is_settled


def test_equal_steps_in_flight_of_which_the_first_fails(held, tmp_path):
    held.save(state(0), 10, tmp_path / "last")
    held.wait()
    for number in (1, 2):
        held.save(state(number), 10, tmp_path / "last")
    held.store.commits[1].fail(CapacityError("the disk is full"))
    with pytest.raises(CapacityError):
        held.poll()
    held.wait()
    assert held.load(tmp_path / "last")["step"] == 2
    assert steps_in(held) == [10]


@pytest.mark.parametrize("is_announced", [False, True])
def test_pointer_of_a_lost_commit_is_replaced(held, tmp_path, is_announced):
    """Its step names the new checkpoint as soon as that is durable; it must not be deleted as the old one."""
    held.save(state(1), 10, tmp_path / "a")
    held._in_flight.clear()
    if is_announced:
        held.announce(10, tmp_path / "a")
    held.save(state(2), 10, tmp_path / "a")
    held.wait()
    assert held.load(tmp_path / "a")["step"] == 2


def test_announced_pointer_names_nothing_until_it_is_saved(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.wait()
    held.announce(10, tmp_path / "a")
    with pytest.raises(NotFoundError, match="did not become durable"):
        held.load(tmp_path / "a")
    held.save(state(2), 10, tmp_path / "a")
    held.wait()
    assert held.load(tmp_path / "a")["step"] == 2
    assert steps_in(held) == [10]


def test_announced_while_the_same_path_is_in_flight(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.announce(10, tmp_path / "a")
    held.wait()
    assert read_pointer(tmp_path / "a").seq is None
    held.save(state(2), 10, tmp_path / "a")
    held.wait()
    assert held.load(tmp_path / "a")["step"] == 2
    assert steps_in(held) == [10]


def test_path_saved_again_is_not_removed(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.remove(tmp_path / "a")
    held.save(state(2), 20, tmp_path / "a")
    held.wait()
    assert held.load(tmp_path / "a")["step"] == 2
    assert steps_in(held) == [20]


def test_pointer_to_what_is_durable(foreground, tmp_path):
    foreground.save(state(1), 10, tmp_path / "a")
    foreground.save(state(2), 20, tmp_path / "b")
    foreground.point(tmp_path / "again", foreground.store.info(10))
    assert foreground.load(tmp_path / "again")["step"] == 1
    assert read_pointer(tmp_path / "again").seq == read_pointer(tmp_path / "a").seq


def test_pointer_removed_in_flight_deletes_its_checkpoint(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.save(state(2), 20, tmp_path / "b")
    held.remove(tmp_path / "a")
    held.wait()
    assert not (tmp_path / "a").exists()
    assert steps_in(held) == [20]


def test_tagged_checkpoint_is_kept(foreground, tmp_path):
    foreground.save(state(1), 10, tmp_path / "a", tags=["paper"])
    foreground.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert foreground.store.info("paper").step == 10


def test_link_is_removed_alone(foreground, tmp_path):
    foreground.save(state(1), 10, tmp_path / "a")
    (tmp_path / "last").symlink_to(tmp_path / "a")
    foreground.remove(tmp_path / "last")
    assert foreground.load(tmp_path / "a")["step"] == 1
    assert not (tmp_path / "last").is_symlink()


def test_checkpoint_of_another_store_is_loaded_and_never_deleted(foreground, tmp_path):
    other = PointerStore(tmp_path / "other", background=False, made_by="a test")
    other.save(state(7), 70, tmp_path / "theirs")
    other.close()
    assert foreground.load(tmp_path / "theirs")["step"] == 7
    foreground.remove(tmp_path / "theirs")
    assert steps_in(other) == [70]
    other.close()


def test_missing_pointer(foreground, tmp_path):
    foreground.remove(tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="no pointer"):
        foreground.load(tmp_path / "nothing")


def test_crash_between_deletion_and_pointer_is_reported(foreground, tmp_path):
    foreground.save(state(1), 10, tmp_path / "a")
    foreground.save(state(2), 20, tmp_path / "b")
    foreground.store.delete(10)
    with pytest.raises(NotFoundError, match="newest checkpoint is step 20"):
        foreground.load(tmp_path / "a")


def test_close_raises_what_failed_and_closes(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.store.commits[0].fail(CkstoreError("broken"))
    store = held.store
    with pytest.raises(CkstoreError, match="broken"):
        held.close()
    with pytest.raises(CkstoreError, match="closed"):
        store.latest()


def test_process_that_dies_while_it_overwrites_a_pointer_leaves_the_old_checkpoint(held, tmp_path, caplog):
    held.save(state(1), 10, tmp_path / "last")
    held.wait()
    held.save(state(2), 20, tmp_path / "last")
    held.save(state(3), 30, tmp_path / "last")
    after_death = PointerStore(tmp_path / "store", made_by="a test")
    assert after_death.load(tmp_path / "last")["step"] == 1
    assert "step 30 did not become durable" in caplog.text
    after_death.close()
    held.store.commits[1].finish()
    held.store.commits[2].finish()
    held.wait()
    assert read_pointer(tmp_path / "last").previous_seq is None
    assert steps_in(held) == [30]


def test_process_that_dies_before_it_deletes_what_it_replaced_leaves_that_to_the_next_save(held, tmp_path):
    held.save(state(1), 10, tmp_path / "last")
    held.wait()
    held.save(state(2), 20, tmp_path / "last")
    held.store.commits[1].finish()
    held._in_flight.clear()
    assert steps_in(held) == [10, 20]
    held.save(state(3), 30, tmp_path / "last")
    held.wait()
    assert steps_in(held) == [30]


def test_failed_save_brings_the_old_pointer_back(held, tmp_path):
    held.save(state(1), 10, tmp_path / "last")
    held.wait()
    held.save(state(2), 20, tmp_path / "last")
    held.store.commits[1].fail(CapacityError("the disk is full"))
    with pytest.raises(CapacityError):
        held.wait()
    assert held.load(tmp_path / "last")["step"] == 1


def test_save_to_a_path_that_was_to_be_removed_keeps_the_new_checkpoint(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.wait()
    held.save(state(2), 20, tmp_path / "b")
    held.remove(tmp_path / "a")
    held.save(state(3), 30, tmp_path / "a")
    held.wait()
    assert held.load(tmp_path / "a")["step"] == 3
    assert steps_in(held) == [20, 30]


def test_waiting_save_writes_no_pointer_before_the_checkpoint_is_durable(held, tmp_path):
    result = HeldCommit.result

    def check(commit):
        assert not (tmp_path / "a").exists()
        return result(commit)

    HeldCommit.result = check
    try:
        held.save(state(1), 10, tmp_path / "a", wait=True)
    finally:
        HeldCommit.result = result
    assert held.load(tmp_path / "a")["step"] == 1


def test_other_file_is_replaced_only_when_durable(held, tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"PK the framework's own")
    held.save(state(1), 10, tmp_path / "last.ckpt")
    held.poll()
    assert read_pointer(tmp_path / "last.ckpt").seq is not None


def test_link_to_a_pointer_in_another_folder(foreground, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    foreground.save(state(1), 10, tmp_path / "a" / "b" / "x.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "a" / "b" / "x.ckpt")
    assert PointerStore(tmp_path / "other", made_by="a test").load(tmp_path / "last.ckpt")["step"] == 1


def test_one_process_has_one_object_for_a_run(tmp_path):
    first = PointerStore.at(tmp_path / "store", made_by="a test")
    first.save(state(1), 10, tmp_path / "a")
    second = PointerStore.at(tmp_path / "store", made_by="another", background=False)
    assert second is first
    second.save(state(2), 20, tmp_path / "b")
    assert second.load(tmp_path / "a")["step"] == 1
    assert read_pointer(tmp_path / "b").made_by == "another"
    assert PointerStore.at(tmp_path / "store", run="other", made_by="a test") is not first
    second.close()


def test_second_save_of_a_step_in_flight_never_names_the_first(held, tmp_path):
    held.save(state(1), 10, tmp_path / "a")
    held.save(state(2), 10, tmp_path / "b")
    first = held.store.commits[0]
    first.commit()
    # The process ends here; only the first commit was published.
    after = PointerStore(tmp_path / "store", background=False, made_by="a test")
    assert after.load(tmp_path / "a")["step"] == 1
    with pytest.raises(NotFoundError, match="did not become durable"):
        after.load(tmp_path / "b")
    held.store.commits[1].commit()
    assert after.load(tmp_path / "b")["step"] == 2
    after.close()


def test_skipped_save_drops_its_pointer_and_goes_on(held, tmp_path, caplog):
    held.save(state(1), 10, tmp_path / "a")
    held.wait()
    held.save(state(2), 20, tmp_path / "b")
    held.store.commits[1].is_skipped = True
    held.store.commits[1].fail(CkstoreError("skipped"))
    held.poll()
    assert not (tmp_path / "b").exists()
    assert held.load(tmp_path / "a")["step"] == 1
    assert "step 20 has no checkpoint" in caplog.text


def test_space_of_removed_checkpoints_is_freed(foreground, tmp_path):
    foreground.store.set_trash_for(0)
    rng = np.random.default_rng(1)
    for number in range(12):
        foreground.save({"w": rng.bytes(1 << 16)}, number, tmp_path / f"p{number}")
        if number:
            foreground.remove(tmp_path / f"p{number - 1}")
    foreground.close()
    deadline = time.monotonic() + 60
    # The collection after the tenth commit is a process of its own.
    while stored_nbytes(tmp_path / "store") > 6 * (1 << 16):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def stored_nbytes(folder):
    return sum(path.stat().st_size for path in (folder / "packs").rglob("*.pack") if path.exists())
