"""Folders of checkpoints: what training resumes from after every kind of loss, without any framework."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import ckstore
from ckstore.errors import ChecksumError, MalformedError, NotFoundError, UsageError
from ckstore.integrations.checkpoint_folders import CheckpointFolders, clear_folder, read_files
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import POINTER_NAME, read_pointer


class Saved:
    """An output directory with two saved checkpoints."""

    def __init__(self, output_dir):
        self.output_dir = output_dir
        self.pointers = PointerStore(output_dir / "ckstore", background=False, made_by="a test")
        self.folders = CheckpointFolders(output_dir, self.pointers)

    def save(self, step, **more):
        folder = self.folders.of_step(step)
        folder.mkdir(parents=True, exist_ok=True)
        self.pointers.announce(step, folder / POINTER_NAME)
        clear_folder(folder)
        (folder / "adapter").mkdir()
        (folder / "state.json").write_text(json.dumps(step))
        (folder / "adapter/config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        self.pointers.save({"w": float(step), "files": read_files(folder), **more}, step, folder / POINTER_NAME)

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
