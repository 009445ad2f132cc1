"""Protects a run whose trainer writes points only: others may read meanwhile, and none may write."""

from __future__ import annotations

import os
import signal
import time

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError
from support.journaled_training import JournaledTraining, bits
from support.prepared_trainers import run_trainer

TRAIN = """
training = JournaledTraining()
store.journal(training.optimizer)
store.restore(into=training.state)
training.train(9)
store.commit_async(training.state, 9).result()
"""


@pytest.fixture
def resumed(tmp_path):
    """A trainer that has resumed from a point, and has written a point since; with its store."""
    first, training = JournaledTraining(), JournaledTraining()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(first.optimizer)
        first.run(store, [1, 2, 3])
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        store.restore(into=training.state)
        training.run(store, [4])
        training.expected |= first.expected
        yield training, store
        training.run(store, [5])
        assert bits(store.restore()) == training.expected[5]


def elsewhere(tmp_path, program):
    """Run a program with ``store``, in another process."""
    head = (
        "import ckstore\nfrom support.journaled_training import JournaledTraining\n"
        f"store = ckstore.open({str(tmp_path / 'store')!r})\n"
    )
    return run_trainer(head + program, "torch", "ckstore.journal.history", "support.journaled_training")


def test_a_reader_does_not_wait_for_the_trainer(resumed, tmp_path):
    done = elsewhere(
        tmp_path, "store.restore(2); print(store.restored.step); store.restore(); print(store.restored.step)"
    )
    assert done.stdout.split() == ["2", "4"], done.stderr


@pytest.mark.parametrize("has_looked_back", [False, True])
def test_a_second_trainer_is_refused(resumed, tmp_path, has_looked_back):
    _, store = resumed
    if has_looked_back:
        # The saver leaves its segment for that.
        store.restore(2)
    begun = time.monotonic()
    done = elsewhere(tmp_path, TRAIN)
    assert "ConflictError" in done.stderr
    assert "writ" in done.stderr.splitlines()[-1]
    assert time.monotonic() - begun < 30, "the error comes without a wait for the other trainer to end"
    assert store.steps() == [1, 2, 3, 4]


def test_a_rewind_by_another_process_is_refused(resumed, tmp_path):
    done = elsewhere(tmp_path, "store.rewind(2)")
    assert "ConflictError" in done.stderr


def test_after_a_collection_the_run_is_still_held(resumed, tmp_path):
    training, store = resumed
    store.gc()
    training.run(store, [5])
    assert "ConflictError" in elsewhere(tmp_path, TRAIN).stderr


def test_a_handle_of_the_same_process_is_refused(resumed, tmp_path):
    with ckstore.open(tmp_path / "store") as other, pytest.raises(ConflictError):
        other.commit({"x": 1}, 7)


def test_another_handle_of_the_process_reads_what_is_there(resumed, tmp_path):
    with ckstore.open(tmp_path / "store") as other:
        begun = time.monotonic()
        other.restore(2)
        assert time.monotonic() - begun < 30
        assert other.restore()["optimizer"]
        assert other.restored.step == 4


def test_the_lease_of_a_dead_saver_is_taken(resumed, tmp_path):
    """Its process id may be that of a saver of this trainer, or of another container's."""
    training, store = resumed
    training.train(5)
    store.commit_async(training.state, 5, tags=["whole"]).result()
    training.expected[5] = bits(training.state)
    saver = store._background._commits._saver
    os.kill(saver.pid, signal.SIGKILL)
    while saver.is_alive:
        time.sleep(0.01)
    training.run(store, [6])
    assert repository_of(store).lease.is_held
    assert "ConflictError" in elsewhere(tmp_path, TRAIN).stderr
