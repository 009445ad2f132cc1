"""Protects a store on a file system that removes old files and empty folders: scratch, a bucket, rclone."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run as ckstore_command
from ckstore.errors import ConflictError, CorruptError, NotFoundError, UnreachableError, UsageError

MONTH = 40 * 86400


def state_of(step):
    return {"x": np.full(50_000, step, np.float32), "frozen": np.arange(70_000, dtype=np.float32)}


@pytest.fixture
def path(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        for step in range(4):
            store.commit(state_of(step), step)
    return tmp_path / "store"


def purge(path, names):
    for name in names:
        (path / name).unlink()


def restored(path):
    with ckstore.open(path, create=False) as store:
        return store.restore()["x"][0]


def identity_of(path):
    return json.loads((path / "store.json").read_bytes())["body"]["store_id"]


# store.json


@pytest.mark.parametrize("command", ["ls", "verify", "init", "doctor", "gc"])
def test_missing_store_file_is_named_with_remedy(path, command, capsys):
    purge(path, ["store.json"])
    code = ckstore_command([command, str(path)])
    output = capsys.readouterr()
    assert "store.json is missing" in output.out + output.err
    assert "repair" in output.out + output.err
    assert code == (0 if command == "doctor" else CorruptError.exit_code)
    with pytest.raises(CorruptError, match="repair"):
        ckstore.open(path)
    assert not (path / "store.json").exists()


def test_repair_restores_store_file_and_identity(path, capsys):
    before = identity_of(path)
    shutil.rmtree(path / "claims")
    purge(path, ["store.json"])
    assert ckstore_command(["repair", str(path)]) == 0
    assert "would be made again" in capsys.readouterr().out
    assert not (path / "store.json").exists()
    assert ckstore_command(["repair", str(path), "--apply"]) == 0
    assert identity_of(path) == before
    with ckstore.open(path, create=False) as store:
        assert store.restore()["x"][0] == 3
        assert store.commit(state_of(4), 4).seq == 4
        assert store.verify().is_clean
    assert ckstore.repair_store(path).is_clean


def test_identity_is_recovered_from_packs(path, tmp_path):
    with ckstore.open(path) as store:
        store.mirror(tmp_path / "copy")
    content = (path / "store.json").read_bytes()
    shutil.rmtree(path / "manifests")
    purge(path, ["store.json"])
    report = ckstore.repair_store(path, dry_run=False, sources=[tmp_path / "copy"])
    assert report.is_identity_made
    assert (path / "store.json").read_bytes() == content


def test_files_of_two_stores_are_not_repaired(path, tmp_path):
    with ckstore.open(tmp_path / "other") as store:
        store.commit(state_of(9), 9)
    manifest = next((tmp_path / "other" / "manifests" / "main").iterdir())
    shutil.copy(manifest, path / "manifests" / "main" / "00000009-000000000009.0.ckm")
    purge(path, ["store.json"])
    with pytest.raises(ConflictError, match="several stores"):
        ckstore.repair_store(path, dry_run=False)
    assert not (path / "store.json").exists()


def test_folders_without_files_can_become_a_store(path):
    for found in list(path.rglob("*")):
        if found.is_file():
            found.unlink()
    with pytest.raises(NotFoundError):
        ckstore.repair_store(path)
    with ckstore.open(path) as store:
        store.commit(state_of(1), 1)
    assert restored(path) == 1


@pytest.mark.parametrize("name", ["reserve", "reserve/00", "reserve/notes.txt"])
def test_foreign_files_in_reserve_folder_are_kept(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="contains 'reserve'"):
        ckstore.open(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


# Empty folders


def remove_empty_folders(path):
    for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


VERBS = {
    "commit": lambda store: store.commit(state_of(9), 9),
    "commit in the background": lambda store: store.commit_async(state_of(9), 9).result(),
    "commit with a tag": lambda store: store.commit(state_of(9), 9, tags=["good"]),
    "tag": lambda store: store.tag("latest", "good"),
    "delete": lambda store: store.delete("seq:0"),
    "rewind": lambda store: store.rewind("seq:1"),
    "gc": lambda store: store.gc({"keep_last": 1}),
    "rules": lambda store: store.set_retention({"keep_last": 1}),
    "repack": lambda store: store.repack(),
    "repair": lambda store: store.repair(dry_run=False),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_vanished_empty_folders_are_recreated(path, verb):
    with ckstore.open(path) as store:
        store.commit(state_of(4), 4)
        remove_empty_folders(path)
        verb(store)
        store.commit(state_of(5), 5)
        assert store.restore()["x"][0] == 5
        assert store.verify().is_clean


@pytest.mark.parametrize("what", ["folder", "store.json"])
def test_vanished_store_is_an_error(path, what):
    with ckstore.open(path) as store:
        store.commit(state_of(4), 4)
        if what == "folder":
            path.rename(path.with_name("away"))
        else:
            purge(path, ["store.json"])
        with pytest.raises((UnreachableError, CorruptError)):
            store.commit(state_of(5), 5)
    assert not (path / "store.json").exists()
    assert path.exists() == (what != "folder")


# Age


def make_old(path):
    old = time.time() - MONTH
    for found in path.rglob("*"):
        os.utime(found, (old, old))


def old_files(path):
    return {found.relative_to(path).parts[0] for found in path.rglob("*") if found.is_file() and is_old(found)}


def is_old(found):
    return time.time() - found.stat().st_mtime > MONTH / 2


def test_commit_refreshes_only_what_it_needs(path):
    with ckstore.open(path) as store:
        store.set_retention({"keep_last": 9})
        store.tag("latest", "good")
    make_old(path)
    with ckstore.open(path) as store:
        store.commit(state_of(4), 4)
    assert old_files(path) == {"packs", "manifests", "claims", "reserve"}, "the reserve is made again where it is gone"
    frozen = [found for found in path.glob("packs/*/*") if not is_old(found)]
    assert len(frozen) == 2, "the new pack, and the one with what is not changed"


def test_purge_by_age_loses_only_older_checkpoints(path):
    make_old(path)
    with ckstore.open(path) as store:
        store.commit(state_of(4), 4)
        for found in [found for found in path.rglob("*") if found.is_file() and is_old(found)]:
            found.unlink()
        remove_empty_folders(path)
        store.commit(state_of(5), 5)
        assert store.restore()["frozen"][-1] == 69_999
    assert restored(path) == 5


def test_doctor_warns_about_old_files(path, capsys):
    make_old(path)
    ckstore_command(["doctor", str(path)])
    out = capsys.readouterr().out
    assert "the oldest file was last changed 40 days ago" in out
