"""Protects a tier from copies of its store: one, or a store that was set back, changes nothing there until adopted."""

from __future__ import annotations

import shutil

import pytest

import ckstore
from ckstore.cli.main import run as run_command
from ckstore.errors import ConflictError, UnreachableError
from ckstore.io.memory import MemoryBackend
from support.push_states import assert_restores, packs_here, state_of


@pytest.fixture
def attic(tmp_path):
    return tmp_path / "attic"


@pytest.fixture
def original(folder, attic):
    """A store of three checkpoints, all in a tier and none here."""
    with ckstore.open(folder) as store:
        for step in range(3):
            store.commit(state_of(step), step)
        store.push(str(attic), keep_local=0)
        store.gc(now=True, min_age=0)
    return folder


@pytest.fixture
def copy(original, tmp_path):
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def drop_all_but_the_newest(store):
    store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0)


def test_copy_reads_and_commits_and_removes_nothing_from_the_tier(original, copy):
    with ckstore.open(copy) as store:
        assert_restores(store, 0, 1, 2)
        store.commit(state_of(3), 3)
        drop_all_but_the_newest(store)
        for call in (lambda: store.gc_tier(min_age=0), lambda: store.push(keep_local=0)):
            with pytest.raises(ConflictError, match=r"is a copy .* adopt --as-original"):
                call()
        assert store.steps() == [3]
    with ckstore.open(original) as store:
        assert_restores(store, 0, 1, 2)
        assert store.verify("quick", remote=True).is_clean
        store.commit(state_of(4), 4)
        store.push(keep_local=0)
        drop_all_but_the_newest(store)
        assert len(store.gc_tier(min_age=0).dropped) == 3


def test_copy_frees_nothing_because_it_lies_in_a_tier_of_another(folder, attic, tmp_path):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(attic), keep_local=0)
        shutil.copytree(folder, tmp_path / "copy")
        before = packs_here(tmp_path / "copy")
        with ckstore.open(tmp_path / "copy") as copied:
            copied.gc(now=True, min_age=0)
        assert packs_here(tmp_path / "copy") == before
        store.gc(now=True, min_age=0)
        assert packs_here(folder) == set()


def test_copy_that_is_adopted_as_new_pushes_elsewhere_only(original, copy, attic, tmp_path):
    with ckstore.open(copy) as store:
        assert store.adopt(is_original=False) == {}
        store.commit(state_of(3), 3)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.push(str(attic), keep_local=0)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.gc_tier(min_age=0)
        store.push(str(tmp_path / "second"), keep_local=0)
        store.pull("seq:0")
        assert_restores(store, 0, 1, 2, 3)
    with ckstore.open(original) as store:
        store.commit(state_of(9), 9)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 9)


def test_copy_that_is_adopted_as_original_owns_the_tier_and_the_other_does_not(original, copy, attic):
    with ckstore.open(copy) as store:
        assert store.adopt(is_original=True) == {"remote": str(attic)}
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
        drop_all_but_the_newest(store)
        assert len(store.gc_tier(min_age=0).dropped) == 3
    with ckstore.open(original) as store:
        store.commit(state_of(4), 4)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.push(keep_local=0)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.gc_tier(min_age=0)


def test_store_that_was_set_back_removes_nothing_that_it_had_pushed_since(folder, attic):
    """In place, so that no inode tells; its own next commits take the seqs of what is in the tier."""
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(attic), keep_local=0)
        saved = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for step in (1, 2):
            store.commit(state_of(step), step)
        store.push(keep_local=0)
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        file.unlink()
    for file, content in saved.items():
        file.write_bytes(content)
    with ckstore.open(folder) as store:
        for step in (1, 2):
            store.commit(state_of(step + 10), step)
        drop_all_but_the_newest(store)
        for call in (lambda: store.gc_tier(min_age=0), lambda: store.push(keep_local=0)):
            with pytest.raises(ConflictError, match="reset to an older state"):
                call()
        store.adopt(is_original=True)
        store.commit(state_of(20), 20)
        store.gc_tier(min_age=0)
    with ckstore.open(attic) as there:
        assert_restores(there, 1, 2)


def test_moved_folder_is_the_original_still(original, tmp_path, attic):
    original.rename(tmp_path / "moved")
    with ckstore.open(tmp_path / "moved") as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 3)


def test_mirror_in_the_place_of_a_tier_is_not_that_tier(original, attic, tmp_path):
    """Both are copies of one store: what is freed for the one is not in the other."""
    with ckstore.open(original) as store:
        store.mirror(str(tmp_path / "mirror"))
        attic.rename(tmp_path / "disk")
        (tmp_path / "mirror").rename(attic)
        store.commit(state_of(3), 3)
        for call in (lambda: store.push(keep_local=0), lambda: store.gc_tier(min_age=0)):
            with pytest.raises(UnreachableError, match="another copy of this store"):
                call()
        assert_restores(store, 0, 1, 2, 3)


def test_tiers_of_older_versions_get_an_owner_by_the_next_push(original, attic):
    (original / "home.json").unlink()
    (attic / "owner.json").unlink()
    with ckstore.open(original) as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
    assert (original / "home.json").exists()
    assert (attic / "owner.json").exists()


def test_name_of_a_forgotten_tier_may_get_another_place(original, tmp_path):
    with ckstore.open(original) as store:
        store.pull()
        store.gc(now=True, min_age=0)
        store.forget_tier("remote")
        store.push(str(tmp_path / "second"), tier="remote", keep_local=0)
        assert_restores(store, 0, 1, 2)


def test_push_that_died_between_the_two_notes_goes_on(original, attic):
    before = (attic / "owner.json").read_bytes()
    with ckstore.open(original) as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
        # As if this turn had been noted here only.
        (attic / "owner.json").write_bytes(before)
        store.commit(state_of(4), 4)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 3, 4)


def test_adoption_of_what_cannot_be_reached_changes_nothing(copy, attic):
    before = (copy / "home.json").read_bytes()
    attic.rename(attic.with_name("disk"))
    with ckstore.open(copy) as store, pytest.raises(UnreachableError, match="'remote'"):
        store.adopt(is_original=True)
    assert (copy / "home.json").read_bytes() == before


def test_store_that_knows_no_inodes_is_told_by_its_address(attic):
    with ckstore.open(MemoryBackend()) as store:
        for step in range(2):
            store.commit(state_of(step), step)
            store.push(str(attic), keep_local=0)
        assert_restores(store, 0, 1)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [([], 2, "give either"), (["--as-new", "--as-original"], 2, "give either"), (["--as-new"], 0, "owns no tier"),
     (["--as-original"], 0, "owns remote"), (["--as-original", "--json"], 0, '"remote"')],
)  # fmt: skip
def test_command_says_what_became_of_the_folder(copy, capsys, options, code, said):
    assert run_command(["adopt", str(copy), *options]) == code
    out, err = capsys.readouterr()
    assert said in out + err
