"""Protects the memory backend's functions that tests use to copy and damage a store."""

from __future__ import annotations

import pytest

from ckstore.io.memory import MemoryBackend
from support import memory_files


@pytest.fixture
def filled():
    """One file with two names, one with one name, and an empty folder."""
    backend = MemoryBackend()
    backend.make_folder("full")
    backend.make_folder("empty/inner")
    backend.create("full/one", b"first", sync=True)
    backend.link("full/one", "full/two")
    backend.create("alone", b"second", sync=True)
    return backend


def test_files_and_folders_of_a_backend_are_copies(filled):
    files = filled.files()
    assert files == {"alone": b"second", "full/one": b"first", "full/two": b"first"}
    files.clear()
    assert len(filled.files()) == 3
    assert filled.folders() == {"", "full", "empty", "empty/inner"}


def test_clone_of_a_backend_shares_nothing_and_keeps_links(filled):
    copy = filled.clone()
    copy.overwrite("full/one", b"changed", modified_ns=7)
    copy.unlink("alone")
    assert copy.files() == {"full/one": b"changed", "full/two": b"changed"}
    assert copy.stat("full/two").modified_ns == 7
    assert filled.files() == {"alone": b"second", "full/one": b"first", "full/two": b"first"}
    assert copy.folders() == filled.folders()


def test_overwrite_of_a_missing_name_is_refused(filled):
    with pytest.raises(FileNotFoundError):
        filled.overwrite("missing", b"")


def test_copy_with_changes_has_old_and_changed_files(filled):
    copy = memory_files.copy_of(filled, {"alone": None, "full/one": b"x", "new/there": b"y"})
    assert copy.files() == {"full/one": b"x", "full/two": b"x", "new/there": b"y"}
    assert {copy.stat(name).modified_ns for name in copy.files()} == {memory_files.OLD_NS}


def test_damage_changes_only_the_named_file(filled):
    memory_files.flip(filled, "full/two", 0, mask=0x20)
    assert filled.files()["full/one"] == b"First"
    memory_files.truncate(filled, "alone", -2)
    memory_files.swap(filled, "alone", "full/one")
    assert memory_files.files_of(filled, "full/") == {"full/one": b"seco", "full/two": b"seco"}
    assert memory_files.names_of(filled, ("al",)) == ["alone"]
    assert memory_files.first_of(filled, "full/") == "full/one"
    memory_files.remove_empty_folders(filled)
    assert filled.folders() == {"", "full"}
