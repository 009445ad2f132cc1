"""Folders of checkpoints: what training resumes from after every kind of loss, without any framework."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import ckstore
from ckstore.errors import ChecksumError, MalformedError, NotFoundError, UsageError
from ckstore.integrations.checkpoint_folders import OUTPUT_FILE, CheckpointFolders, read_files
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import POINTER_NAME, is_pointer, read_pointer


class Saved:
    """An output directory with two saved checkpoints."""

    def __init__(self, output_dir, store=None):
        self.output_dir = output_dir
        self.pointers = PointerStore(store or output_dir / "ckstore", background=False, made_by="a test")
        self.folders = CheckpointFolders(output_dir, self.pointers)

    def save(self, step, **more):
        folder = self.folders.of_step(step)
        self.folders.begin(step)
        (folder / "adapter").mkdir()
        (folder / "state.json").write_text(json.dumps(step))
        (folder / "adapter/config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        self.folders.save({"w": float(step), **more}, step, {})
        self.folders.settle()

    def steps(self):
        return sorted(info.step for info in self.pointers.store.log())


@pytest.fixture
def saved(tmp_path):
    found = Saved(tmp_path / "out")
    found.save(1)
    found.save(12)
    yield found
    found.pointers.close()


def test_small_files_are_read(saved):
    assert read_files(saved.folders.of_step(1)) == {"state.json": b"1", "adapter/config.json": b"{}"}


def test_folders_are_in_the_order_of_steps(saved):
    saved.save(2)
    (saved.output_dir / "checkpoint-last").mkdir()
    (saved.output_dir / "checkpoint-3").write_text("a file")
    assert [path.name for path in saved.folders.all()] == ["checkpoint-1", "checkpoint-2", "checkpoint-12"]
    assert CheckpointFolders(saved.output_dir / "none", saved.pointers).all() == []


def test_newest_is_by_seq(saved):
    saved.save(2)
    assert saved.folders.to_resume(True).name == "checkpoint-2"


def test_all_folders_are_laid_again(saved):
    for folder in saved.folders.all():
        shutil.rmtree(folder)
    assert saved.folders.to_resume(True).name == "checkpoint-12"
    assert (saved.output_dir / "checkpoint-1/adapter/config.json").read_text() == "{}"
    assert not (saved.output_dir / "checkpoint-1/model.safetensors").exists()
    times = [path.stat().st_mtime_ns for path in saved.folders.all()]
    assert times == [info.time_ns for info in reversed(saved.pointers.store.log())]


def test_whole_folder_is_not_touched(saved):
    folder = saved.folders.of_step(12)
    os.utime(folder, ns=(5, 5))
    saved.folders.to_resume(True)
    assert folder.stat().st_mtime_ns == 5
    (folder / "state.json").unlink()
    assert saved.folders.to_resume(folder) == folder
    assert (folder / "state.json").read_text() == "12"


def test_removed_folders_take_their_checkpoints_along(saved):
    with saved.folders.mirrored():
        shutil.rmtree(saved.folders.of_step(1))
    assert saved.steps() == [12]
    with pytest.raises(ZeroDivisionError), saved.folders.mirrored():
        raise ZeroDivisionError
    assert saved.steps() == [12]


def test_step_that_was_saved_again(saved):
    saved.pointers.store.commit({"w": 0.0, "files": {"state.json": b"1"}}, 1)
    assert saved.folders.to_resume(True).name == "checkpoint-1"
    assert read_pointer(saved.folders.of_step(1)).seq == 2
    assert saved.steps() == [1, 12]


def test_tagged_checkpoint_stays_when_it_is_replaced(saved):
    saved.pointers.store.tag(1, "mine")
    saved.pointers.store.commit({"w": 0.0, "files": {"state.json": b"1"}}, 1)
    saved.folders.to_resume(True)
    assert saved.steps() == [1, 1, 12]


def test_step_that_killed_processes_have_saved_from_the_start_is_left_once(saved):
    # None of them resumes, and the pointer that the next one replaces knows at most one of their checkpoints.
    for is_durable in (False, True):
        saved.pointers.close()
        killed = Saved(saved.output_dir)
        killed.folders.begin(1)
        if is_durable:
            killed.pointers.store.commit({"files": {}, "output": id_of(saved.output_dir)}, 1)
        killed.pointers.close()
    saved.folders = CheckpointFolders(saved.output_dir, saved.pointers)
    saved.save(1)
    assert saved.steps() == [1, 12]
    assert saved.pointers.newest().seq == 3


def test_step_saved_again_leaves_what_is_tagged_or_not_of_this_directory(saved):
    saved.pointers.store.tag(1, "mine")
    for output in ({}, {"output": "0" * 32}):
        saved.pointers.store.commit({"files": {}, **output}, 1)
    saved.save(20)
    saved.folders = CheckpointFolders(saved.output_dir, saved.pointers)
    saved.save(1)
    assert saved.steps() == [1, 1, 1, 1, 12, 20]


def test_unfinished_folders_are_removed(saved, caplog):
    unfinished, empty, foreign = (saved.output_dir / f"checkpoint-{step}" for step in (20, 21, 22))
    for folder in (unfinished, empty, foreign):
        folder.mkdir()
    saved.pointers.announce(20, unfinished / POINTER_NAME)
    (foreign / "model.safetensors").write_bytes(b"weights")
    assert saved.folders.to_resume(True).name == "checkpoint-12"
    assert [folder.exists() for folder in (unfinished, empty, foreign)] == [False, False, True]
    assert caplog.text.count("did not become durable") == 2


def test_folder_whose_checkpoint_is_gone(saved, caplog):
    saved.pointers.store.delete(1)
    assert saved.folders.to_resume(saved.folders.of_step(1)).name == "checkpoint-12"
    assert "training resumes from" in caplog.text


def test_damaged_pointer_is_named_or_written_again(saved):
    folder = saved.folders.of_step(12)
    intact = (folder / POINTER_NAME).read_bytes()
    (folder / POINTER_NAME).write_bytes(intact.replace(b'"step": 12', b'"step": 13'))
    with pytest.raises(ChecksumError, match=r"checkpoint-12/ckstore\.json. Delete it"):
        saved.folders.to_resume(folder)
    assert saved.folders.to_resume(True) == folder
    assert read_pointer(folder).step == 12


def test_damaged_pointer_to_a_store_that_is_gone_is_named(saved, tmp_path):
    (saved.folders.of_step(12) / POINTER_NAME).write_bytes(b"")
    shutil.rmtree(saved.folders.of_step(1))
    elsewhere = PointerStore(tmp_path / "none", background=False, made_by="a test")
    with pytest.raises(MalformedError, match=r"checkpoint-12/ckstore\.json. Delete it"):
        CheckpointFolders(saved.output_dir, elsewhere).to_resume(True)


def test_missing_folder_by_its_path(saved, monkeypatch):
    shutil.rmtree(saved.folders.of_step(1))
    monkeypatch.chdir(saved.output_dir.parent)
    assert saved.folders.to_resume("out/checkpoint-1").resolve() == saved.folders.of_step(1)
    assert (saved.folders.of_step(1) / "state.json").exists()
    assert saved.folders.to_resume("out/checkpoint-7").name == "checkpoint-12"


def test_references(saved):
    saved.pointers.store.tag(1, "mine")
    for reference in ("mine", "seq:0", "1"):
        assert saved.folders.to_resume(reference).name == "checkpoint-1"
    with pytest.raises(NotFoundError):
        saved.folders.to_resume("seq:9")
    saved.pointers.store.commit({"w": 0.0}, 40)
    with pytest.raises(UsageError, match="not saved by a trainer"):
        saved.folders.to_resume("40")
    assert saved.folders.to_resume(True).name == "checkpoint-12"


def test_folder_of_another_store_is_left_as_it_is(saved, tmp_path):
    other = Saved(tmp_path / "other")
    other.save(3)
    assert saved.folders.to_resume(other.folders.of_step(3)) == other.folders.of_step(3)
    assert saved.pointers.load(other.folders.of_step(3))["w"] == 3.0
    other.pointers.close()


def test_folders_of_the_framework_itself(tmp_path):
    empty = Saved(tmp_path)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        empty.folders.to_resume(True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        empty.folders.to_resume("mine")
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/model.safetensors").write_bytes(b"weights")
    assert empty.folders.to_resume(True).name == "checkpoint-10"
    assert empty.folders.to_resume(tmp_path / "checkpoint-9").name == "checkpoint-9"
    assert not (tmp_path / "ckstore").exists()


@pytest.mark.parametrize("name", ["../out.json", "/etc/out.json", "a/../../out.json", "ckstore.json", ""])
def test_names_that_lead_out_are_refused(tmp_path, name):
    pointers = PointerStore(tmp_path / "ckstore", background=False, made_by="a test")
    pointers.store.commit({"files": {"first.json": b"{}", name: b"x"}}, 1)
    with pytest.raises(MalformedError, match="leads out"):
        CheckpointFolders(tmp_path, pointers).to_resume(True)
    pointers.close()
    assert {path.name for path in tmp_path.iterdir()} == {"ckstore"}


def test_store_of_a_copy_is_enough(saved, tmp_path):
    saved.pointers.close()
    shutil.copytree(saved.output_dir / "ckstore", tmp_path / "new/ckstore")
    copy = PointerStore(tmp_path / "new/ckstore", background=False, made_by="a test")
    assert CheckpointFolders(tmp_path / "new", copy).to_resume(True) == tmp_path / "new/checkpoint-12"
    assert read_pointer(tmp_path / "new/checkpoint-12").store == "../ckstore"
    copy.close()
    with ckstore.open(tmp_path / "new/ckstore") as store:
        assert len(store.log()) == 2


@pytest.fixture
def shared(tmp_path):
    """Two output directories, and a store that is in neither of them."""
    first, second = (Saved(tmp_path / name, tmp_path / "store") for name in ("first", "second"))
    yield first, second
    first.pointers.close()
    second.pointers.close()


def id_of(output_dir):
    return (output_dir / OUTPUT_FILE).read_text().strip()


def test_second_output_directory_of_a_run_is_refused(shared):
    first, second = shared
    first.save(4)
    first.pointers.close()
    with pytest.raises(UsageError, match=rf"its id is {id_of(first.output_dir)}.*second is not set.*run=") as caught:
        second.save(6)
    assert "'latest'" in str(caught.value)
    assert not second.output_dir.exists()
    assert first.steps() == [4]
    assert first.pointers.store.restore(4)["output"] == id_of(first.output_dir)


def test_run_that_another_directory_continued_is_not_resumed(shared):
    first, second = shared
    first.save(4)
    first.pointers.close()
    second.output_dir.mkdir()
    (second.output_dir / OUTPUT_FILE).write_text("0" * 32)
    second.folders._output = "0" * 32
    second.save(6)
    second.pointers.close()
    with pytest.raises(UsageError, match=rf"{'0' * 32}, the id of .*first is {id_of(first.output_dir)}"):
        first.folders.to_resume(True)
    assert [path.name for path in first.folders.all()] == ["checkpoint-4"]
    # By hand: the run belongs to the first directory again. What the second saved is not touched.
    first.save(6)
    first.save(7)
    assert first.folders.to_resume(True).name == "checkpoint-7"
    assert first.steps() == [4, 6, 6, 7]
    with first.folders.mirrored():
        shutil.rmtree(first.folders.of_step(6))
    assert first.steps() == [4, 6, 7]
    first.folders.to_resume(True)
    assert [path.name for path in first.folders.all()] == ["checkpoint-4", "checkpoint-7"]


def test_folder_that_points_to_a_checkpoint_of_another_directory(shared):
    first, second = shared
    first.save(4)
    second.output_dir.mkdir()
    shutil.copytree(first.folders.of_step(4), second.folders.of_step(4))
    (second.output_dir / OUTPUT_FILE).write_text("0" * 32)
    with second.folders.mirrored():
        shutil.rmtree(second.folders.of_step(4))
    assert first.steps() == [4]


def test_checkpoint_without_an_id_is_deleted_with_its_folder(shared):
    first, _ = shared
    first.save(4)
    folder = first.folders.of_step(5)
    folder.mkdir()
    first.pointers.save({"w": 5.0, "files": {"state.json": b"5"}}, 5, folder / POINTER_NAME)
    with first.folders.mirrored():
        shutil.rmtree(folder)
    assert first.steps() == [4]


def test_directory_without_an_id_takes_over_that_of_the_run(shared):
    first, second = shared
    first.save(4)
    first.pointers.close()
    assert second.folders.to_resume(True) == second.folders.of_step(4)
    second.save(6)
    assert id_of(second.output_dir) == id_of(first.output_dir)


def test_directory_with_folders_of_the_framework_takes_nothing_over(shared):
    first, second = shared
    first.save(4)
    first.pointers.close()
    write_native(second.folders.of_step(9))
    for wanted in (True, second.folders.of_step(9), first.folders.of_step(4)):
        with pytest.raises(UsageError, match="another output directory"):
            second.folders.to_resume(wanted)
    assert second.folders.to_resume("latest").name == "checkpoint-4"


def test_damaged_id_counts_as_none(saved):
    saved.pointers.close()
    (saved.output_dir / OUTPUT_FILE).write_text("half")
    again = Saved(saved.output_dir)
    again.save(13)
    assert id_of(saved.output_dir) == again.pointers.store.restore(1)["output"]
    again.pointers.close()


def write_native(folder):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")


def test_folder_of_the_framework_stays_until_its_step_is_durable(tmp_path):
    out = Saved(tmp_path)
    folder, kept = out.folders.of_step(2), tmp_path / ".checkpoint-2.replaced"
    write_native(folder)
    out.folders.begin(2)
    assert [path.name for path in folder.iterdir()] == [POINTER_NAME]
    assert (kept / "model.safetensors").exists()
    out.folders.abandon(2)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    out.folders.settle()
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    out.save(2)
    assert is_pointer(folder)
    assert not kept.exists()
    out.pointers.close()


def test_folder_of_the_framework_comes_back_when_a_commit_fails(tmp_path):
    out = Saved(tmp_path)
    write_native(out.folders.of_step(2))
    out.folders.begin(2)
    out.folders.save({"w": 2.0}, 2, {})
    # As a commit in the background that fails: its pointer is removed.
    (out.folders.of_step(2) / POINTER_NAME).unlink()
    for _ in range(2):
        out.folders.settle()
        assert [path.name for path in out.folders.of_step(2).iterdir()] == ["model.safetensors"]
    out.pointers.close()


@pytest.mark.parametrize("is_durable", [False, True])
def test_folder_of_the_framework_after_a_crash(tmp_path, is_durable):
    write_native(tmp_path / "checkpoint-2")
    killed = Saved(tmp_path)
    killed.folders.begin(2)
    (tmp_path / "checkpoint-2/state.json").write_text("2")
    if is_durable:
        killed.folders.save({"w": 2.0}, 2, {})
    killed.pointers.close()
    again = Saved(tmp_path)
    assert again.folders.to_resume(True) == tmp_path / "checkpoint-2"
    assert is_pointer(tmp_path / "checkpoint-2") == is_durable
    assert (tmp_path / "checkpoint-2/model.safetensors").exists() != is_durable
    assert not (tmp_path / ".checkpoint-2.replaced").exists()
    again.pointers.close()


def test_missing_store_of_a_pointer_is_refused(shared, tmp_path):
    first, _ = shared
    first.save(4)
    first.pointers.close()
    write_native(first.folders.of_step(2))
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(
        NotFoundError, match=rf"no store {tmp_path / 'store'}, .*checkpoint-4/ckstore.json.*Mount its disk"
    ):
        first.folders.to_resume(True)
    assert not (tmp_path / "store").exists()
    assert first.folders.to_resume(first.folders.of_step(2)) == first.folders.of_step(2)
    moved = Saved(first.output_dir, tmp_path / "moved")
    assert moved.folders.to_resume(True) == first.folders.of_step(4)
    moved.pointers.close()


def edit_pointer(folder):
    text = (folder / POINTER_NAME).read_text()
    assert "a test" in text
    (folder / POINTER_NAME).write_text(text.replace("a test", "a user"))
    with pytest.raises(ChecksumError):
        read_pointer(folder)


def test_damaged_pointer_is_written_again(saved, caplog):
    edit_pointer(saved.folders.of_step(1))
    assert saved.folders.to_resume(saved.folders.of_step(12)) == saved.folders.of_step(12)
    assert saved.folders.to_resume(True) == saved.folders.of_step(12)
    assert f"{saved.folders.of_step(1) / POINTER_NAME} is damaged or was edited" in caplog.text
    assert read_pointer(saved.folders.of_step(1)).seq == 0


def test_damaged_pointer_of_no_checkpoint(saved, tmp_path):
    shutil.copytree(saved.folders.of_step(12), tmp_path / "elsewhere/checkpoint-12")
    edit_pointer(tmp_path / "elsewhere/checkpoint-12")
    with pytest.raises(ChecksumError):
        saved.folders.to_resume(tmp_path / "elsewhere/checkpoint-12")
    edit_pointer(saved.folders.of_step(12))
    for step in (1, 12):
        saved.pointers.store.delete(step)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        saved.folders.to_resume(True)
