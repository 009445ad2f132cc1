"""Protects a tier from copies of its store: a copy, or a rolled-back store, changes nothing there until adopted."""

from __future__ import annotations

import shutil

import pytest

import ckstore
from ckstore.cli.main import run as run_command
from ckstore.errors import ConflictError, UnreachableError
from ckstore.io.memory import MemoryBackend
from support.push_states import assert_restores, packs_here, state_of


@pytest.fixture
def tier_folder(tmp_path):
    return tmp_path / "tier_folder"


@pytest.fixture
def original(folder, tier_folder):
    """A store of three checkpoints, all in a tier and none locally."""
    with ckstore.open(folder) as store:
        for step in range(3):
            store.commit(state_of(step), step)
        store.push(str(tier_folder), keep_local=0)
        store.gc(now=True, min_age=0)
    return folder


@pytest.fixture
def copy(original, tmp_path):
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def drop_all_but_the_newest(store):
    store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0)


def test_copy_works_and_removes_nothing_from_the_tier(original, copy):
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


def test_copy_frees_no_packs_that_are_in_the_tier(folder, tier_folder, tmp_path):
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tier_folder), keep_local=0)
        shutil.copytree(folder, tmp_path / "copy")
        before = packs_here(tmp_path / "copy")
        with ckstore.open(tmp_path / "copy") as copied:
            copied.gc(now=True, min_age=0)
        assert packs_here(tmp_path / "copy") == before
        store.gc(now=True, min_age=0)
        assert packs_here(folder) == set()


def test_copy_adopted_as_new_pushes_elsewhere(original, copy, tier_folder, tmp_path):
    with ckstore.open(copy) as store:
        assert store.adopt(is_original=False) == {}
        store.commit(state_of(3), 3)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.push(str(tier_folder), keep_local=0)
        with pytest.raises(ConflictError, match="owned by another folder"):
            store.gc_tier(min_age=0)
        store.push(str(tmp_path / "second"), keep_local=0)
        store.pull("seq:0")
        assert_restores(store, 0, 1, 2, 3)
    with ckstore.open(original) as store:
        store.commit(state_of(9), 9)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 9)


def test_copy_adopted_as_original_owns_the_tier(original, copy, tier_folder):
    with ckstore.open(copy) as store:
        assert store.adopt(is_original=True) == {"remote": str(tier_folder)}
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


def test_rolled_back_store_removes_no_later_pushes(folder, tier_folder):
    """It stays in place, so no inode differs. Its next commits take seqs that exist in the tier."""
    with ckstore.open(folder) as store:
        store.commit(state_of(0), 0)
        store.push(str(tier_folder), keep_local=0)
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
    with ckstore.open(tier_folder) as there:
        assert_restores(there, 1, 2)


def test_moved_folder_is_still_the_original(original, tmp_path, tier_folder):
    original.rename(tmp_path / "moved")
    with ckstore.open(tmp_path / "moved") as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 3)


def test_mirror_is_not_accepted_as_the_tier(original, tier_folder, tmp_path):
    """Both are copies of one store, but data that was freed because of one is missing in the other."""
    with ckstore.open(original) as store:
        store.mirror(str(tmp_path / "mirror"))
        tier_folder.rename(tmp_path / "disk")
        (tmp_path / "mirror").rename(tier_folder)
        store.commit(state_of(3), 3)
        for call in (lambda: store.push(keep_local=0), lambda: store.gc_tier(min_age=0)):
            with pytest.raises(UnreachableError, match="another copy of this store"):
                call()
        assert_restores(store, 0, 1, 2, 3)


def test_tier_of_older_version_gets_an_owner(original, tier_folder):
    (original / "home.json").unlink()
    (tier_folder / "owner.json").unlink()
    with ckstore.open(original) as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
    assert (original / "home.json").exists()
    assert (tier_folder / "owner.json").exists()


def test_removed_tier_name_can_be_reused(original, tmp_path):
    with ckstore.open(original) as store:
        store.pull()
        store.gc(now=True, min_age=0)
        store.forget_tier("remote")
        store.push(str(tmp_path / "second"), tier="remote", keep_local=0)
        assert_restores(store, 0, 1, 2)


def test_push_resumes_after_half_recorded_turn(original, tier_folder):
    before = (tier_folder / "owner.json").read_bytes()
    with ckstore.open(original) as store:
        store.commit(state_of(3), 3)
        store.push(keep_local=0)
        # Pretend that this turn was recorded in one place only.
        (tier_folder / "owner.json").write_bytes(before)
        store.commit(state_of(4), 4)
        store.push(keep_local=0)
        assert_restores(store, 0, 1, 2, 3, 4)


def test_adopting_an_unreachable_tier_changes_nothing(copy, tier_folder):
    before = (copy / "home.json").read_bytes()
    tier_folder.rename(tier_folder.with_name("disk"))
    with ckstore.open(copy) as store, pytest.raises(UnreachableError, match="'remote'"):
        store.adopt(is_original=True)
    assert (copy / "home.json").read_bytes() == before


def test_store_without_inodes_is_identified_by_address(tier_folder):
    with ckstore.open(MemoryBackend()) as store:
        for step in range(2):
            store.commit(state_of(step), step)
            store.push(str(tier_folder), keep_local=0)
        assert_restores(store, 0, 1)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [([], 2, "give either"), (["--as-new", "--as-original"], 2, "give either"), (["--as-new"], 0, "owns no tier"),
     (["--as-original"], 0, "owns remote"), (["--as-original", "--json"], 0, '"remote"')],
)  # fmt: skip
def test_command_reports_the_folder_identity(copy, capsys, options, code, said):
    assert run_command(["adopt", str(copy), *options]) == code
    out, err = capsys.readouterr()
    assert said in out + err
