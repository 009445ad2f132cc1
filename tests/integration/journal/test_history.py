"""Protects the history of a run with a journal: what ls, info, latest, steps and verify tell about its points."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import CorruptError, UsageError

STEPS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store with keyframes at the steps 1 and 6, and points at all others."""
    place = tmp_path_factory.mktemp("journal") / "store"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    with ckstore.open(place) as store:
        store.journal(optimizer, keyframe_every=5)
        for step in range(1, STEPS + 1):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model, "optimizer": optimizer}
            store.commit_async(state, step, metrics={"loss": float(step)}).result()
    return place


@pytest.fixture
def store(place):
    with ckstore.open(place, create=False) as opened:
        yield opened


def ckstore_command(*arguments):
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "ckstore", *map(str, arguments)],
        capture_output=True, text=True, env=environment, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_info_of_a_point_names_its_keyframe(store):
    keyframe, point = store.info(6), store.info(8)
    assert (keyframe.form, keyframe.step) == ("whole", 6)
    assert (point.form, point.step, point.seq) == ("journal, 2 steps after 6", 8, keyframe.seq)
    assert point.metrics == {"loss": 8.0}
    assert point.time_ns > keyframe.time_ns
    assert 0 < point.bytes_written < point.bytes_stored
    assert store.info("7").form == "journal, 1 step after 6"
    assert store.info(5).form == "journal, 4 steps after 1"


def test_the_newest_state_is_a_point(store):
    assert store.latest() == store.info("latest") == store.info(STEPS)


def test_all_steps_can_be_restored(store):
    assert store.steps() == list(range(1, STEPS + 1))
    assert [info.step for info in store.log()] == [6, 1]


def test_restored_tells_the_step_of_the_point(store):
    store.restore()
    assert (store.restored.step, store.restored.form) == (8, "journal, 2 steps after 6")
    store.restore(6)
    assert (store.restored.step, store.restored.form) == (6, "whole")


def test_the_best_of_a_metric_may_be_a_point(store):
    assert store.info("best:loss:max").form == "journal, 2 steps after 6"
    store.restore("best:loss:max")
    assert store.restored.step == STEPS
    assert (store.info("best:loss").step, store.info("best:loss").form) == (1, "whole")
    store.restore("best:loss")
    assert store.restored.step == 1
    with pytest.raises(ckstore.NotFoundError, match="Recorded metrics: loss"):
        store.info("best:accuracy")


def test_what_needs_a_checkpoint_refuses_points(store, tmp_path, caplog):
    for act in (
        lambda: store.stats(7),
        lambda: store.diff(6, "best:loss:max"),
        lambda: store.export_safetensors(7, tmp_path / "x.safetensors"),
    ):
        with pytest.raises(UsageError, match=r"is a point of the journal, and .* checkpoint.* Restore the point"):
            act()
    assert store.stats().info.step == 6
    assert "the newest state is step 8" in caplog.text


@pytest.fixture
def tagged(place, tmp_path):
    """A copy of the store, at ``tmp_path / "copy"``, in which a tag is on the point of step 8."""
    with ckstore.open(shutil.copytree(place, tmp_path / "copy"), create=False) as store:
        store.tag(8, "good")
        yield store


@pytest.mark.parametrize("ref", [8, "8", "latest", "best:loss:max"])
def test_a_tag_may_be_on_a_point(tagged, ref):
    tagged.untag("good")
    tagged.tag(ref, "good")
    point = tagged.info("good")
    assert (point.step, point.form, point.tags) == (8, "journal, 2 steps after 6", ("good",))
    assert tagged.tags() == {"good": tagged.info(6).seq}
    assert tagged.info(6).tags == (), "the tag is not on the keyframe"
    assert [info.tags for info in tagged.log()] == [(), ()]


def test_a_tag_finds_its_point_after_the_step_was_committed_again(tagged, tmp_path):
    at_tag = tagged.restore("good")
    tagged.commit({"other": 1}, 8)
    assert tagged.restore(8) == {"other": 1}
    again = tagged.restore("good")
    assert torch.equal(again["model"]["weight"], at_tag["model"]["weight"])
    assert (tagged.restored.step, tagged.restored.form) == (8, "journal, 2 steps after 6")
    listed = ckstore_command("ls", tmp_path / "copy")
    assert "good (8)" in listed
    assert tagged.rewind("good").step == 8
    assert tagged.latest().form == "journal, 2 steps after 6"


def test_a_tag_moves_between_points_and_checkpoints(tagged):
    tagged.tag(6, "good")
    assert (tagged.info("good").form, tagged.info(6).tags, tagged.info(8).tags) == ("whole", ("good",), ())
    tagged.tag("7", "good")
    assert (tagged.info("good").step, tagged.info(6).tags) == (7, ())


def test_what_needs_a_checkpoint_refuses_a_tag_on_a_point(tagged):
    with pytest.raises(UsageError, match="step 8 is a point of the journal, and this needs a checkpoint"):
        tagged.stats("good")
    with pytest.raises(UsageError, match=r"tag 'good' is on a point of the journal, step 8, and this needs"):
        tagged.verify(ref="good")


def test_a_tag_whose_point_is_gone_is_an_error(tagged, tmp_path):
    for segment in Path(tmp_path, "copy", "journals", "main").iterdir():
        segment.unlink()
    for act in (tagged.restore, tagged.info, tagged.rewind):
        with pytest.raises(CorruptError, match=r"the point of tag 'good', record 8 .* is not there"):
            act("good")
    found = [damage.what for damage in tagged.verify("quick").damage]
    assert found == ["the tag is on the point of step 8, which is not in the journal, or damaged"]


def test_a_mirror_has_tags_on_points(tagged, tmp_path):
    tagged.mirror(tmp_path / "mirror")
    with ckstore.open(tmp_path / "mirror", create=False) as copy:
        assert copy.info("good").form == "journal, 2 steps after 6"
        copy.restore("good")
        assert copy.restored.step == 8


def test_the_command_line_tags_points(tagged, tmp_path):
    assert "Tagged step 7 (journal, 1 step after 6)" in ckstore_command("tag", tmp_path / "copy", 7, "seven")
    listed = ckstore_command("ls", tmp_path / "copy", "--points")
    assert "good (8)" in listed
    assert "seven (7)" in listed
    entries = json.loads(ckstore_command("ls", tmp_path / "copy", "--json"))["runs"][0]["entries"]
    assert [point["tags"] for point in entries[0]["points"]] == [["seven"], ["good"]]
    assert "good" in ckstore_command("show", tmp_path / "copy", "good")


def test_a_part_of_the_newest_state_is_that_of_the_newest_checkpoint(store, caplog):
    assert list(store.restore(only="model.*")) == ["model"]
    assert store.restored.step == 6
    assert "the newest state is the point of step 8" in caplog.text
    with pytest.raises(UsageError, match=r"step 7 is a point .* Leave out only="):
        store.restore(7, only="model.*")


def test_the_command_line_restores_points(place, tmp_path):
    ckstore_command("restore", place, "7", "-o", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    with ckstore.open(place, create=False) as store:
        assert torch.equal(state["model"]["weight"], store.restore(7)["model"]["weight"])


def test_verify_decodes_every_frame(store):
    report = store.verify("decode")
    assert report.is_clean
    assert report.point_count == STEPS
    assert report.frame_count > 0


def test_the_command_line_counts_and_lists_points(place):
    plain = ckstore_command("ls", place)
    assert "6 +2" in plain
    assert "1 +4" in plain
    assert "points after step 6" not in plain
    listed = ckstore_command("ls", place, "--points")
    assert "points after step 6 (seq" in listed
    entries = json.loads(ckstore_command("ls", place, "--json"))["runs"][0]["entries"]
    assert [[point["step"] for point in entry["points"]] for entry in entries] == [[7, 8], [2, 3, 4, 5]]
    assert "journal, 2 steps after 6" in ckstore_command("show", place, 8)
