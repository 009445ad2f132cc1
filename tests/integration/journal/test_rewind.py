"""Protects rewinds of a run with a journal: training resumes from the point, and nothing of the history is lost."""

from __future__ import annotations

import json

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run as run_command
from ckstore.errors import ConflictError, UsageError
from ckstore.store import points
from support.journaled_training import JournaledTraining, bits


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def trained(place, last=6, **options):
    """Train and commit the steps up to ``last``."""
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer, **options)
        training.run(store, range(1, last + 1))
    return training


def test_training_resumes_from_the_point(place):
    old = trained(place)
    training = JournaledTraining()
    with ckstore.open(place, create=False) as store:
        info = store.rewind(3)
        assert (info.step, info.form) == (3, "journal, 2 steps after 1")
        assert store.latest() == info
        store.journal(training.optimizer)
        store.restore(into=training.state)
        assert bits(training.state) == old.expected[3]
        training.seed = 1
        training.run(store, [4, 5])
    with ckstore.open(place, create=False) as store:
        assert [each.step for each in store.log()] == [1], "no state was stored whole again"
        assert bits(store.restore()) == bits(store.restore(5)) == training.expected[5] != old.expected[5]
        assert bits(store.restore(6)) == old.expected[6], "what was newer stays in the history"
        assert store.verify("decode").is_clean


def test_a_handle_with_a_journal_rewinds_to_its_own_point(place):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 6))
        at_two = training.expected[2]
        store.rewind(2)
        assert bits(store.restore()) == at_two
        training.run(store, [6])
        assert bits(store.restore()) == training.expected[6]
        assert [each.step for each in store.log()] == [6, 1], "the state in memory did not follow from the point"
        store.rewind(2)
        store.restore(into=training.state)
        training.run(store, [3])
        assert bits(store.restore()) == training.expected[3]
        assert [each.step for each in store.log()] == [6, 1]


@pytest.mark.parametrize("reference", [1, "seq:0"])
def test_commits_after_a_rewind_to_a_checkpoint_are_the_newest(place, reference):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 4))
        store.rewind(reference)
        assert bits(store.restore()) == training.expected[1]
        training.run(store, [4, 5])
        assert bits(store.restore()) == training.expected[5]
        assert bits(store.restore(3)) == training.expected[3]


def test_commits_after_an_import_are_the_newest(place, tmp_path):
    import torch

    training = JournaledTraining()
    torch.save({"x": torch.ones(2)}, tmp_path / "other.pt")
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, [1, 2])
        store.import_from(tmp_path / "other.pt", step=3)
        training.run(store, [4, 5])
        assert bits(store.restore()) == training.expected[5]


def test_a_rewind_to_a_point_survives_a_collection(place):
    old = trained(place, keyframe_every=4)
    with ckstore.open(place, create=False) as store:
        assert [each.step for each in store.log()] == [5, 1]
        store.rewind("2")
        store.gc(ckstore.Retention(keep_last=1), min_age=0)
        assert store.latest().step == 2
        assert bits(store.restore()) == old.expected[2]


def test_a_rewind_while_another_process_trains_is_a_conflict(place, monkeypatch):
    monkeypatch.setattr(points, "WRITER_SECONDS", 0.1)
    trained(place)
    training = JournaledTraining()
    with ckstore.open(place, create=False) as trainer, ckstore.open(place, create=False) as store:
        trainer.journal(training.optimizer)
        trainer.restore(into=training.state)
        training.run(trainer, [7])
        with pytest.raises(ConflictError):
            store.rewind(2)
        assert bits(trainer.restore()) == training.expected[7]
        trainer.commit(training.state, 8)


def test_the_command_line_rewinds_to_points_and_does_not_delete_them(place, capsys):
    old = trained(place)
    assert run_command(["rewind", str(place), "4"]) == 0
    assert capsys.readouterr().out.strip() == (
        "Rewound run main: step 4 (journal, 3 steps after 1) is the newest again."
    )
    assert run_command(["delete", str(place), "3", "--yes"]) == 2
    assert "Points go with their keyframe" in capsys.readouterr().err
    assert run_command(["rewind", str(place), "latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    with ckstore.open(place, create=False) as store:
        assert bits(store.restore()) == old.expected[4]
        with pytest.raises(UsageError, match="step 3 is a point of the journal"):
            store.delete(3)


def test_looking_at_an_old_point_does_not_change_what_the_next_commit_continues(place):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 5))
        assert bits(store.restore(2)) == training.expected[2]
        training.run(store, [5, 6])
        assert bits(store.restore()) == training.expected[6]
        assert [each.step for each in store.log()] == [1]


def test_a_step_means_the_newer_one_of_a_checkpoint_and_a_point(place):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer)
        training.run(store, range(1, 8))
        training.train(8)
        store.commit_async(training.state, 8, tags=("epoch",)).result()
        at_tag = bits(training.state)
        training.run(store, [9])
        assert (store.info(8).form, bits(store.restore(8))) == ("whole", at_tag)
        store.rewind(5)
        store.restore(into=training.state)
        training.seed = 1
        training.run(store, range(6, 10))
    with ckstore.open(place, create=False) as store:
        assert [info.step for info in store.log()] == [8, 1]
        assert bits(store.restore(8)) == training.expected[8] != at_tag
        assert store.info(8).form == "journal, 7 steps after 1"
        assert bits(store.restore("epoch")) == bits(store.restore("seq:1")) == at_tag
        assert store.steps() == list(range(1, 10))
        assert [point.step for point in table_points(place)[0]] == list(range(2, 10))
        store.rewind("epoch")
        assert bits(store.restore(8)) == at_tag, "published again, the checkpoint is newer"


def table_points(place):
    """Return the points that ``ckstore ls`` shows, by the seq of their keyframe."""
    with ckstore.open(place, create=False) as store:
        return points.points_by_keyframe(repository_of(store))


def test_the_first_commit_after_a_restart_may_be_tagged(place):
    trained(place, 3)
    training = JournaledTraining()
    with ckstore.open(place, create=False) as store:
        store.journal(training.optimizer)
        store.restore(into=training.state)
        training.train(4)
        store.commit(training.state, 4, metrics={"loss": 1.0}, tags=["epoch"])
    with ckstore.open(place, create=False) as store:
        assert [info.step for info in store.log()] == [4, 1]
        for ref in ("latest", 4, "best:loss", "epoch"):
            assert (store.info(ref).form, store.info(ref).tags) == ("whole", ("epoch",))
            assert bits(store.restore(ref)) == bits(training.state)
            store.stats(ref)
        assert list(store.restore(4, only="model.*")) == ["model"]
        store.journal(training.optimizer)
        store.restore(into=training.state)
        training.run(store, [5])
        assert [info.step for info in store.log()] == [5, 4, 1], "a checkpoint was restored, and a chain begins"
