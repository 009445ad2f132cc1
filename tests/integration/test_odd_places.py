"""Protects stores where processes are odd: paths that are not UTF-8, and a working folder that was removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run as ckstore_command
from ckstore.errors import BackendError, UsageError
from ckstore.processes import module_search_path

STATE = {"x": np.arange(20_000, dtype=np.float32)}


@pytest.fixture
def odd(tmp_path):
    """A path with bytes that are no UTF-8."""
    return os.fsdecode(os.fsencode(tmp_path) + b"/st\xffore \xe9")


def test_path_that_is_not_utf8_is_committed_to_in_the_foreground_and_background(odd):
    with ckstore.open(odd) as store:
        store.commit(STATE, 0, tags=["good"])
        assert store.commit_async(STATE, 1).result().step == 1
        assert store.restore("good")["x"][-1] == 19_999
        store.delete("seq:1")
        store.gc({"keep_last": 1})
        store.mirror(odd + "2")
        assert store.verify().is_clean
    with ckstore.open(odd + "2", create=False) as copy:
        assert copy.steps() == [0]


@pytest.mark.parametrize("command", ["ls", "verify", "doctor", "repair", "gc"])
def test_commands_take_a_path_that_is_not_utf8(odd, command, capsysbinary):
    with ckstore.open(odd) as store:
        store.commit(STATE, 0)
    assert ckstore_command([command, odd]) == 0
    assert ckstore_command([command, odd, "--json"]) == 0
    assert ckstore_command([command, odd + "gone"]) == 10
    json.loads(capsysbinary.readouterr().out.splitlines()[-1])


def test_tier_whose_path_is_not_utf8_is_refused_since_no_record_can_name_it(odd):
    with ckstore.open(odd) as store:
        store.commit(STATE, 0)
        with pytest.raises(UsageError, match="UTF-8"):
            store.push(odd + "2")


def places(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    return {
        "ENOTDIR": (tmp_path / "file" / "store", BackendError),
        "ELOOP": (tmp_path / "loop" / "store", BackendError),
        "ENAMETOOLONG": (tmp_path / ("x" * 300), BackendError),
        "NUL": (f"{tmp_path}/a\0b", UsageError),
        "ENOENT": ("/proc/1/store", BackendError),
    }


@pytest.mark.parametrize("name", ["ENOTDIR", "ELOOP", "ENAMETOOLONG", "NUL", "ENOENT"])
def test_place_that_can_hold_no_store_is_named_with_what_is_wrong_with_it(tmp_path, name, capsys):
    place, kind = places(tmp_path)[name]
    with pytest.raises(kind, match=name) as caught:
        ckstore.open(place)
    assert "failing" not in str(caught.value)
    with pytest.raises(ckstore.CkstoreError):
        ckstore.open(place, create=False)
    for command in ("ls", "doctor", "verify", "repair"):
        assert ckstore_command([command, str(place)]) in (UsageError.exit_code, BackendError.exit_code, 10)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ENOTDIR", "ELOOP", "ENAMETOOLONG", "ENOENT"])
def test_output_that_cannot_be_made_is_an_error_of_ours(tmp_path, odd, name, capsys):
    with ckstore.open(odd) as store:
        store.commit({"x": STATE["x"][:9]}, 0)
    place, _ = places(tmp_path)[name]
    assert ckstore_command(["export", odd, "latest", "-o", f"{place}.safetensors"]) in (10, 15)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_output_files_follow_the_umask(tmp_path, odd, umask):
    with ckstore.open(odd) as store:
        store.commit({"x": STATE["x"][:9]}, 0)
    before = os.umask(umask)
    try:
        for number, command in enumerate(("export", "report", "restore")):
            file = tmp_path / f"{number}{('.safetensors', '.html', '.npz')[number]}"
            arguments = [command, odd, *([] if command == "report" else ["latest"]), "-o", str(file)]
            assert ckstore_command(arguments) == 0
            assert file.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)


REMOVED = """
import os, sys, tempfile
gone = tempfile.mkdtemp()
os.chdir(gone)
os.rmdir(gone)
import numpy as np
import ckstore
from ckstore.errors import UsageError
state = {"x": np.ones(1000, np.float32)}
with ckstore.open(sys.argv[1], retention={"keep_last": 1}, gc_every=1) as store:
    store.commit(state, 0)
    store.commit_async(state, 1).result()
    assert store.restore()["x"][0] == 1
try:
    ckstore.open("relative")
except UsageError as error:
    print(error)
"""


def test_removed_working_folder_hinders_nothing_but_relative_paths(tmp_path):
    places = os.pathsep.join(module_search_path())
    done = subprocess.run(
        [sys.executable, "-P", "-c", REMOVED, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "working directory of this process was removed" in done.stdout
    assert "could not be started" not in done.stderr
