"""A hostile store cannot affect files outside its folder: no link below the root is followed for writing.

Each folder of a store is replaced by a link to an outside folder with files of the same names. No operation, successful
or not, may change that folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, UnsupportedError
from ckstore.io.local import LocalBackend
from ckstore.opening import open_existing
from support.memory_folders import PREFIX, parent
from support.memory_folders import tmp_path as tmp_path


def verbs(tier):
    """Yield each operation that writes or removes, as a function."""
    yield "tag", lambda store: store.tag(1, "good")
    yield "untag", lambda store: store.untag("best")
    yield "commit", lambda store: store.commit({"x": np.arange(50_000)}, 9)
    yield "retention", lambda store: store.set_retention({"keep_last": 1})
    yield "undelete", lambda store: store.undelete(0)
    yield "rewind", lambda store: store.rewind(1)
    yield "delete", lambda store: store.delete(1)
    yield "push", lambda store: store.push(str(tier), keep_local=1)
    yield "repack", lambda store: store.repack()
    yield "quarantine", lambda store: store.quarantine(dry_run=False)
    yield "repair", lambda store: store.repair(dry_run=False)
    yield "gc", lambda store: store.gc({"keep_last": 1}, min_age=0)
    yield "purge", lambda store: store.purge()
    yield "gc now", lambda store: store.gc({"keep_last": 1}, min_age=0, now=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with history, a tag, trash, leftovers in ``tmp``, and something in quarantine."""
    root = (parent() or tmp_path_factory.getbasetemp()) / f"{PREFIX}{os.getpid()}-links"
    with ckstore.open(root) as store:
        for step in range(4):
            store.commit({"x": np.full(50_000, step)}, step)
        store.tag(2, "best")
        store.delete(0)
        with open_existing(root) as keeper:
            keeper.gc(min_age=0)
    for kind in ("ckm", "lease"):
        draft = root / "tmp" / f"{'ab' * 16}.{kind}"
        draft.write_bytes(b"left by a process that died")
        os.utime(draft, (1, 1))
    (root / "quarantine/packs").mkdir()
    yield root
    shutil.rmtree(root)


def folders_of(root):
    """Return every folder below a root, but only one of the many pack folders."""
    found = [Path(folder).relative_to(root) for folder, _, _ in os.walk(root)]
    packs = [folder for folder in found if folder.parts[:1] == ("packs",) and len(folder.parts) == 2]
    used = [folder for folder in packs if any((root / folder).iterdir())]
    return [folder for folder in found if folder.parts and (folder not in packs or folder in used[:1])]


def snapshot(folder):
    """Return names, bytes, times and modes of everything below a folder."""
    return {
        path.relative_to(folder): (
            path.lstat().st_mode,
            path.lstat().st_ino,
            path.lstat().st_nlink,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *folder.rglob("*")]
    }


def replaced_by_a_link(original, tmp_path, name):
    """Copy a store, move one of its folders outside and put a link in its place; return both."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(outside, ignore_errors=True)
    shutil.copytree(original, root)
    (root / "leases/main").unlink(missing_ok=True)
    shutil.move(root / name, outside)
    (root / name).symlink_to(outside)
    return root, outside


def test_no_operation_changes_a_link_target(original, tmp_path):
    said = {}
    for name in folders_of(original):
        root, outside = replaced_by_a_link(original, tmp_path, name)
        before = snapshot(outside)
        with ckstore.open(root, create=False) as store:
            for verb, call in verbs(tmp_path / f"tier-{name.name}"):
                try:
                    call(store)
                except CkstoreError as error:
                    # Other errors report that an earlier operation has left nothing to do.
                    if isinstance(error, UnsupportedError):
                        said[name, verb] = str(error)
                assert snapshot(outside) == before, (name, verb)
    assert all("symbolic link" in text and str(tmp_path / "store" / name) in text for (name, _), text in said.items())
    assert {name.parts[0] for name, _ in said} >= {"tmp", "trash", "packs", "manifests", "claims", "leases"}


@pytest.mark.parametrize("target", ["a folder", "nothing", "itself", "the root"])
def test_links_to_anything_are_refused(tmp_path, target):
    backend = LocalBackend(tmp_path / "store")
    backend.make_folder("tmp")
    backend.create("tmp/one", b"1", sync=False)
    (tmp_path / "outside").mkdir()
    place = {"a folder": tmp_path / "outside", "nothing": tmp_path / "no", "itself": "loop", "the root": "."}[target]
    (tmp_path / "store/loop").symlink_to(place)
    calls = [
        lambda: backend.create("loop/two", b"2", sync=False),
        lambda: backend.link("tmp/one", "loop/two"),
        lambda: backend.link("loop/one", "tmp/two"),
        lambda: backend.rename("tmp/one", "loop/two"),
        lambda: backend.rename("loop/one", "tmp/two"),
        lambda: backend.rename_new("tmp/one", "loop/two"),
        lambda: backend.unlink("loop/one"),
        lambda: backend.remove_folder("loop/tmp"),
        lambda: backend.make_folder("loop/new"),
        lambda: backend.make_folder("loop"),
        lambda: backend.create_pack("loop/x.pack", nbytes_expected=0),
        lambda: backend.try_lock("loop/lock"),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="symbolic link"):
            call()
    assert list((tmp_path / "outside").iterdir()) == []
    assert backend.list_names("tmp") == ["one"]
    backend.close()


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    with ckstore.open(tmp_path / "checkpoints/run") as store:
        store.commit({"x": 1}, 1)
        store.gc(now=True)
    assert (tmp_path / "disk/run/store.json").exists()


def test_link_is_removed_but_not_its_target(tmp_path):
    backend = LocalBackend(tmp_path / "store")
    backend.make_folder("tmp")
    (tmp_path / "precious").write_bytes(b"kept")
    (tmp_path / "store/tmp/one").symlink_to(tmp_path / "precious")
    backend.rename("tmp/one", "tmp/two")
    backend.unlink("tmp/two")
    assert (tmp_path / "precious").read_bytes() == b"kept"


def test_failing_calls_leave_no_descriptor_open(tmp_path):
    backend = LocalBackend(tmp_path / "store")
    backend.make_folder("tmp/a/b")
    (tmp_path / "store/loop").symlink_to(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        for name in ("loop/x", "no/x", "tmp/a/b/no", "tmp/a/b/c/d"):
            with pytest.raises((UnsupportedError, FileNotFoundError)):
                backend.unlink(name)
            with pytest.raises((UnsupportedError, FileNotFoundError)):
                backend.rename("tmp/a/b/no", name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
