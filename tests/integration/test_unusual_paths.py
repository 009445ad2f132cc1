"""Protects stores with unusual paths: names that are not UTF-8, and a removed working directory."""

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
def non_utf8_path(tmp_path):
    """A path that is not valid UTF-8."""
    return os.fsdecode(os.fsencode(tmp_path) + b"/st\xffore \xe9")


def test_commits_to_non_utf8_path(non_utf8_path):
    with ckstore.open(non_utf8_path) as store:
        store.commit(STATE, 0, tags=["good"])
        assert store.commit_async(STATE, 1).result().step == 1
        assert store.restore("good")["x"][-1] == 19_999
        store.delete("seq:1")
        store.gc({"keep_last": 1})
        store.mirror(non_utf8_path + "2")
        assert store.verify().is_clean
    with ckstore.open(non_utf8_path + "2", create=False) as copy:
        assert copy.steps() == [0]


@pytest.mark.parametrize("command", ["ls", "verify", "doctor", "repair", "gc"])
def test_commands_accept_non_utf8_path(non_utf8_path, command, capsysbinary):
    with ckstore.open(non_utf8_path) as store:
        store.commit(STATE, 0)
    assert ckstore_command([command, non_utf8_path]) == 0
    assert ckstore_command([command, non_utf8_path, "--json"]) == 0
    assert ckstore_command([command, non_utf8_path + "gone"]) == 10
    json.loads(capsysbinary.readouterr().out.splitlines()[-1])


def test_tier_with_non_utf8_path_is_refused(non_utf8_path):
    with ckstore.open(non_utf8_path) as store:
        store.commit(STATE, 0)
        with pytest.raises(UsageError, match="UTF-8"):
            store.push(non_utf8_path + "2")


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
def test_unusable_location_is_named_with_reason(tmp_path, name, capsys):
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
def test_failed_output_is_a_ckstore_error(tmp_path, non_utf8_path, name, capsys):
    with ckstore.open(non_utf8_path) as store:
        store.commit({"x": STATE["x"][:9]}, 0)
    place, _ = places(tmp_path)[name]
    assert ckstore_command(["export", non_utf8_path, "latest", "-o", f"{place}.safetensors"]) in (10, 15)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_output_files_follow_the_umask(tmp_path, non_utf8_path, umask):
    with ckstore.open(non_utf8_path) as store:
        store.commit({"x": STATE["x"][:9]}, 0)
    before = os.umask(umask)
    try:
        for number, command in enumerate(("export", "report", "restore")):
            file = tmp_path / f"{number}{('.safetensors', '.html', '.npz')[number]}"
            arguments = [command, non_utf8_path, *([] if command == "report" else ["latest"]), "-o", str(file)]
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


def test_removed_cwd_affects_only_relative_paths(tmp_path):
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
