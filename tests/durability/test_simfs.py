"""Protects the simulated disk: it must lose what a real one may lose, or the crash tests prove nothing."""

from __future__ import annotations

import pytest

from ckstore.errors import MalformedError
from ckstore.io.backend import ReadRequest
from ckstore.io.buffers import BufferPool
from support.crash_states import CheckedStates, CrashState, crash_states
from support.simfs import FOLDER, SimFS, Tree


def last_states(disk, *, samples=8):
    return [state.disk for state in crash_states(disk, seed=1, samples=samples, points={len(disk.log)})]


def contents(states, name):
    return {state.read_bytes(name, nbytes_max=1 << 20) if state.stat(name) else None for state in states}


def disk_with(*folders):
    disk = SimFS()
    for folder in folders:
        disk.make_folder(folder)
    return disk.settled()


def test_synced_file_loses_its_name_without_a_folder_sync():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 600, sync=True)
    assert contents(last_states(disk), "f/a") == {None, b"x" * 600}


def test_synced_folder_with_unsynced_file_keeps_name_and_loses_bytes():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 600, sync=False)
    disk.sync_folder("f")
    found = contents(last_states(disk, samples=200), "f/a")
    assert None not in found
    assert {b"", bytes(600), b"x" * 600} < found
    assert b"x" * 512 in found, "torn at a sector"
    assert any(len(each) == 600 and each not in (b"x" * 600, bytes(600)) for each in found), "garbage"


def test_file_and_folder_synced_survives_every_cut():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 600, sync=True)
    disk.sync_folder("f")
    assert contents(last_states(disk), "f/a") == {b"x" * 600}


def test_sync_of_another_folder_does_not_help():
    disk = disk_with("f", "g")
    disk.create("f/a", b"x", sync=True)
    disk.sync_folder("g")
    disk.sync_folder("")
    assert None in contents(last_states(disk), "f/a")


def test_link_without_folder_sync_loses_only_the_new_name():
    disk = disk_with("f", "g")
    disk.create("f/a", b"x", sync=True)
    disk.sync_folder("f")
    disk.link("f/a", "g/b")
    states = last_states(disk)
    assert contents(states, "f/a") == {b"x"}
    assert contents(states, "g/b") == {None, b"x"}


def test_unsynced_unlink_comes_back():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=True)
    disk.sync_folder("f")
    disk.unlink("f/a")
    assert contents(last_states(disk), "f/a") == {None, b"x"}
    disk.sync_folder("f")
    assert contents(last_states(disk), "f/a") == {None}


def test_rename_over_is_old_or_new_and_never_nothing():
    disk = disk_with("f")
    disk.create("f/t", b"old", sync=True)
    disk.create("f/d", b"new", sync=True)
    disk.sync_folder("f")
    disk.rename("f/d", "f/t")
    assert contents(last_states(disk), "f/t") == {b"old", b"new"}
    both = {(state.stat("f/d") is None, state.read_bytes("f/t", nbytes_max=9)) for state in last_states(disk)}
    assert both == {(False, b"old"), (True, b"new")}, "inside one folder a rename is atomic"


@pytest.mark.parametrize("synced", ["f", "g"])
def test_rename_between_folders_is_never_in_neither(synced):
    disk = disk_with("f", "g")
    disk.create("f/a", b"x", sync=True)
    disk.sync_folder("f")
    disk.rename("f/a", "g/a")
    where = {(state.stat("f/a") is not None, state.stat("g/a") is not None) for state in last_states(disk)}
    assert where == {(True, False), (True, True), (False, True)}
    disk.sync_folder(synced)
    where = {(state.stat("f/a") is not None, state.stat("g/a") is not None) for state in last_states(disk)}
    assert (True, False) not in where
    assert (False, False) not in where
    assert ((True, True) in where) == (synced == "g")


def test_folder_whose_parent_was_not_synced_takes_its_files_along():
    disk = SimFS()
    disk.make_folder("f/g")
    disk.create("f/g/a", b"x", sync=True)
    disk.sync_folder("f/g")
    disk.sync_folder("f")
    assert contents(last_states(disk), "f/g/a") == {None, b"x"}
    disk.sync_folder("")
    assert contents(last_states(disk), "f/g/a") == {b"x"}


def test_empty_folder_that_is_durable_can_be_used_after_the_cut():
    disk = SimFS()
    disk.make_folder("f/g")
    disk.sync_folder("")
    disk.sync_folder("f")
    for state in last_states(disk):
        assert state.make_folder("f/g") is False
        state.create("f/g/a", b"", sync=True)


def test_failed_sync_is_not_made_good_by_the_next_one():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 10, sync=False)
    disk.sync_folder("f")
    disk.lose_data("f/a")
    disk.sync_file("f/a")
    assert disk.read_bytes("f/a", nbytes_max=99) == b"x" * 10, "the running process still sees them"
    assert contents(last_states(disk), "f/a") == {b""}


def test_failed_folder_sync_is_not_made_good_by_the_next_one():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=True)
    disk.lose_folder("f")
    disk.create("f/b", b"y", sync=True)
    disk.sync_folder("f")
    states = last_states(disk)
    assert contents(states, "f/a") == {None, b"x"}
    assert contents(states, "f/b") == {b"y"}


def test_pack_is_durable_only_after_finish_and_its_folder_sync():
    disk = disk_with("packs")
    pool = BufferPool(8192, 1)
    sink = disk.create_pack("packs/p", nbytes_expected=8192)
    buffer = pool.acquire()
    buffer.view[:] = b"z" * 8192
    sink.write(buffer, 8192, 0)
    sink.drain()
    disk.sync_folder("packs")
    assert b"" in contents(last_states(disk), "packs/p")
    sink.finish(4096)
    assert contents(last_states(disk), "packs/p") == {b"z" * 4096}
    file = disk.open_read("packs/p")
    disk.unlink("packs/p")
    results = list(disk.read_ranges([ReadRequest(file, 4000, 200, 7)], pool))
    assert [(result.tag, bytes(result.view)) for result in results] == [(7, b"z" * 96)]


def test_later_change_of_a_name_never_survives_an_earlier_one():
    disk = disk_with("f")
    disk.create("f/a", b"1", sync=True)
    disk.unlink("f/a")
    disk.create("f/a", b"2", sync=True)
    disk.unlink("f/a")
    assert contents(last_states(disk, samples=64), "f/a") == {None, b"1", b"2"}


def test_states_are_reproducible_and_all_different():
    disk = disk_with("f")
    for number in range(3):
        disk.create(f"f/{number}", bytes([number]) * 700, sync=False)
    disk.sync_folder("f")

    def shape(seed):
        return [(state.point, state.label, contents([state.disk], "f/2")) for state in crash_states(disk, seed=seed)]

    assert shape(5) == shape(5)
    assert shape(5) != shape(6)
    labels = [(point, label) for point, label, _ in shape(5)]
    assert len(labels) == len(set(labels))


def test_marks_are_given_from_the_point_they_were_made():
    disk = disk_with("f")
    disk.create("f/a", b"", sync=True)
    disk.note("acknowledged")
    disk.unlink("f/a")
    seen = {state.point: state.marks for state in crash_states(disk, seed=0)}
    at = next(index for index, op in enumerate(disk.log) if op.kind == "note")
    assert all((marks == ("acknowledged",)) == (point > at) for point, marks in seen.items())


def test_state_can_be_written_to_without_changing_its_siblings():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=False)
    first, *others = last_states(disk)
    first.create("f/b", b"new", sync=True)
    first.truncate("f/a", 0)
    assert all(state.stat("f/b") is None for state in others)
    assert contents([disk], "f/a") == {b"x"}
    assert b"x" in contents(others, "f/a")


def test_ordinary_answers_are_those_of_a_file_system():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=False)
    with pytest.raises(FileExistsError):
        disk.create("f/a", b"y", sync=False)
    with pytest.raises(FileExistsError):
        disk.link("f/a", "f/a")
    with pytest.raises(FileNotFoundError):
        disk.create("no/a", b"y", sync=False)
    with pytest.raises(FileNotFoundError):
        disk.unlink("f/b")
    disk.create("f/b", b"y", sync=False)
    with pytest.raises(FileExistsError):
        disk.rename_new("f/a", "f/b")
    with pytest.raises(MalformedError):
        disk.read_bytes("f/a", nbytes_max=0)
    assert disk.make_folder("f") is False
    assert disk.list_names("nowhere") == []
    assert disk.list_names("f") == ["a", "b"]


SEEN = Tree({"": {"f": FOLDER}, "f": {"a": 1}}, {1: b"x"}, {1: 5})


@pytest.mark.parametrize(
    ("tree", "marks"),
    [
        (Tree({"": {"f": FOLDER}, "f": {"b": 1}}, {1: b"x"}, {1: 5}), ()),
        (Tree({"": {"g": FOLDER}, "g": {"a": 1}}, {1: b"x"}, {1: 5}), ()),
        (Tree({"": {"f": FOLDER, "g": FOLDER}, "f": {"a": 1}, "g": {}}, {1: b"x"}, {1: 5}), ()),
        (Tree({"": {"f": FOLDER, "g": 2}, "f": {"a": 1}}, {1: b"x", 2: b""}, {1: 5}), ()),
        (Tree({"": {"f": FOLDER}, "f": {"a": 1, "b": 1}}, {1: b"x"}, {1: 5}), ()),
        (Tree({"": {"f": FOLDER}, "f": {"a": 1}}, {1: b"y"}, {1: 5}), ()),
        (Tree({"": {"f": FOLDER}, "f": {"a": 1}}, {1: b"x"}, {1: 6}), ()),
        (SEEN, ("acknowledged",)),
    ],
)
def test_states_that_differ_in_anything_one_can_see_are_all_checked(tree, marks):
    checked = CheckedStates()
    assert checked.is_new(CrashState(0, "", (), SimFS(SEEN)))
    assert checked.is_new(CrashState(1, "", marks, SimFS(tree)))
    assert len(checked) == 2


def test_states_that_nobody_can_tell_apart_are_checked_once_and_again_for_more():
    checked = CheckedStates()
    other = Tree({"": {"f": FOLDER}, "f": {"a": 7}}, {7: b"x", 8: b"without a name"}, {7: 5})
    assert checked.is_new(CrashState(0, "", (), SimFS(SEEN)))
    assert not checked.is_new(CrashState(1, "", (), SimFS(other)))
    assert checked.is_new(CrashState(1, "", (), SimFS(other)), level=1)
    assert not checked.is_new(CrashState(2, "", (), SimFS(SEEN)), level=1)
    assert not checked.is_new(CrashState(2, "", (), SimFS(SEEN)))
    assert len(checked) == 1


def test_a_state_that_is_written_to_is_not_another_one():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=True)
    checked = CheckedStates()
    states = [state for state in crash_states(disk, seed=1) if checked.is_new(state)]
    for state in states:
        state.disk.create("f/z", b"", sync=True)
    assert not any(checked.is_new(state) for state in crash_states(disk, seed=1))
