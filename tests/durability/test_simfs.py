"""Protects the simulated disk: it must lose what a real disk may lose, or the crash tests prove nothing."""

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


def test_file_without_folder_sync_loses_its_name():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 600, sync=True)
    assert contents(last_states(disk), "f/a") == {None, b"x" * 600}


def test_unsynced_file_in_synced_folder_loses_bytes():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 600, sync=False)
    disk.sync_folder("f")
    found = contents(last_states(disk, samples=200), "f/a")
    assert None not in found
    assert {b"", bytes(600), b"x" * 600} < found
    assert b"x" * 512 in found, "torn at a sector"
    assert any(len(each) == 600 and each not in (b"x" * 600, bytes(600)) for each in found), "garbage"


def test_synced_file_and_folder_survive_every_cut():
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


def test_unsynced_link_loses_only_the_new_name():
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


def test_replacing_rename_keeps_old_or_new():
    disk = disk_with("f")
    disk.create("f/t", b"old", sync=True)
    disk.create("f/d", b"new", sync=True)
    disk.sync_folder("f")
    disk.rename("f/d", "f/t")
    assert contents(last_states(disk), "f/t") == {b"old", b"new"}
    both = {(state.stat("f/d") is None, state.read_bytes("f/t", nbytes_max=9)) for state in last_states(disk)}
    assert both == {(False, b"old"), (True, b"new")}, "inside one folder a rename is atomic"


@pytest.mark.parametrize("synced", ["f", "g"])
def test_rename_between_folders_never_loses_the_file(synced):
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


def test_folder_with_unsynced_parent_loses_its_files():
    disk = SimFS()
    disk.make_folder("f/g")
    disk.create("f/g/a", b"x", sync=True)
    disk.sync_folder("f/g")
    disk.sync_folder("f")
    assert contents(last_states(disk), "f/g/a") == {None, b"x"}
    disk.sync_folder("")
    assert contents(last_states(disk), "f/g/a") == {b"x"}


def test_durable_empty_folder_is_usable_after_cut():
    disk = SimFS()
    disk.make_folder("f/g")
    disk.sync_folder("")
    disk.sync_folder("f")
    for state in last_states(disk):
        assert state.make_folder("f/g") is False
        state.create("f/g/a", b"", sync=True)


def test_next_sync_does_not_undo_a_failed_sync():
    disk = disk_with("f")
    disk.create("f/a", b"x" * 10, sync=False)
    disk.sync_folder("f")
    disk.lose_data("f/a")
    disk.sync_file("f/a")
    assert disk.read_bytes("f/a", nbytes_max=99) == b"x" * 10, "the running process still sees them"
    assert contents(last_states(disk), "f/a") == {b""}


def test_next_folder_sync_does_not_undo_a_failed_one():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=True)
    disk.lose_folder("f")
    disk.create("f/b", b"y", sync=True)
    disk.sync_folder("f")
    states = last_states(disk)
    assert contents(states, "f/a") == {None, b"x"}
    assert contents(states, "f/b") == {b"y"}


def test_pack_is_durable_after_finish_and_folder_sync():
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


def test_name_changes_survive_in_order():
    disk = disk_with("f")
    disk.create("f/a", b"1", sync=True)
    disk.unlink("f/a")
    disk.create("f/a", b"2", sync=True)
    disk.unlink("f/a")
    assert contents(last_states(disk, samples=64), "f/a") == {None, b"1", b"2"}


def test_states_are_reproducible_and_unique():
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


def test_marks_appear_from_their_point_on():
    disk = disk_with("f")
    disk.create("f/a", b"", sync=True)
    disk.note("acknowledged")
    disk.unlink("f/a")
    seen = {state.point: state.marks for state in crash_states(disk, seed=0)}
    at = next(index for index, op in enumerate(disk.log) if op.kind == "note")
    assert all((marks == ("acknowledged",)) == (point > at) for point, marks in seen.items())


def test_writing_to_a_state_leaves_others_unchanged():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=False)
    first, *others = last_states(disk)
    first.create("f/b", b"new", sync=True)
    first.truncate("f/a", 0)
    assert all(state.stat("f/b") is None for state in others)
    assert contents([disk], "f/a") == {b"x"}
    assert b"x" in contents(others, "f/a")


def test_results_match_a_file_system():
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
def test_visibly_different_states_are_all_checked(tree, marks):
    checked = CheckedStates()
    assert checked.is_new(CrashState(0, "", (), SimFS(SEEN)))
    assert checked.is_new(CrashState(1, "", marks, SimFS(tree)))
    assert len(checked) == 2


def test_equal_states_are_checked_once_per_level():
    checked = CheckedStates()
    other = Tree({"": {"f": FOLDER}, "f": {"a": 7}}, {7: b"x", 8: b"without a name"}, {7: 5})
    assert checked.is_new(CrashState(0, "", (), SimFS(SEEN)))
    assert not checked.is_new(CrashState(1, "", (), SimFS(other)))
    assert checked.is_new(CrashState(1, "", (), SimFS(other)), level=1)
    assert not checked.is_new(CrashState(2, "", (), SimFS(SEEN)), level=1)
    assert not checked.is_new(CrashState(2, "", (), SimFS(SEEN)))
    assert len(checked) == 1


def test_written_state_is_not_a_new_state():
    disk = disk_with("f")
    disk.create("f/a", b"x", sync=True)
    checked = CheckedStates()
    states = [state for state in crash_states(disk, seed=1) if checked.is_new(state)]
    for state in states:
        state.disk.create("f/z", b"", sync=True)
    assert not any(checked.is_new(state) for state in crash_states(disk, seed=1))
