"""Protects ``config.json`` from concurrent changes: none is lost, in a folder or in memory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

import ckstore
from ckstore.errors import ConflictError, LockHeldError
from ckstore.format import paths
from ckstore.format.records import ConfigRecord
from ckstore.io.memory import MemoryBackend
from ckstore.io.url import backend_for
from ckstore.store import store_config
from ckstore.store.store_config import change_config, read_config

PROCESSES, CHANGES = 4, 12
PROGRAM = """
import sys
from ckstore.io.url import backend_for
from ckstore.store.tiers import Tiers
tiers = Tiers(backend_for(sys.argv[1]), b"")
for number in range(int(sys.argv[3])):
    tiers.name_for(f"/elsewhere/{sys.argv[2]}/{number}", name=f"tier-{sys.argv[2]}-{number}")
"""


def with_tier(name):
    """Return a change that adds a tier."""
    return lambda record: ConfigRecord(tiers={**record.tiers, name: f"/{name}"}, retention=record.retention)


def while_another_changes(backend, act):
    """Return a change during which another process makes a change."""
    calls = []

    def change(record):
        calls.append(record)
        if len(calls) == 1:
            act(backend)
        return with_tier("ours")(record)

    return change


@pytest.fixture(params=["folder", "memory"])
def backend(request, tmp_path):
    if request.param == "memory":
        backend = MemoryBackend()
        backend.make_folder(paths.TMP_FOLDER)
        return backend
    ckstore.open(tmp_path / "store").close()
    return backend_for(tmp_path / "store")


def test_concurrent_change_is_kept(backend):
    act = while_another_changes(backend, lambda backend: change_config(backend, with_tier("theirs")))
    assert set(change_config(backend, act).tiers) == {"ours", "theirs"}
    assert set(read_config(backend).tiers) == {"ours", "theirs"}


def test_unchanged_config_is_not_written(backend):
    change_config(backend, with_tier("a"))
    before = backend.stat(paths.CONFIG_FILE)
    assert change_config(backend, with_tier("a")).tiers == {"a": "/a"}
    assert backend.stat(paths.CONFIG_FILE) == before


def test_endless_conflicting_changes_raise(backend):
    count = iter(range(1000))

    def change(record):
        change_config(backend, with_tier(f"theirs-{next(count)}"))
        return with_tier("ours")(record)

    with pytest.raises(ConflictError, match=r"keep changing config\.json"):
        change_config(backend, change)


def test_concurrent_processes_lose_no_tier(tmp_path):
    folder = tmp_path / "store"
    ckstore.open(folder).close()
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(number), str(CHANGES)])
        for number in range(PROCESSES)
    ]
    assert [process.wait(300) for process in running] == [0] * PROCESSES
    assert len(read_config(backend_for(folder)).tiers) == PROCESSES * CHANGES


def test_stuck_lock_holder_is_named_and_nothing_changes(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    ckstore.open(folder).close()
    backend = backend_for(folder)
    monkeypatch.setattr(store_config, "LOCK_PATIENCE_SECONDS", 0.05)
    with (
        backend.try_lock(paths.CONFIG_LOCK_FILE),
        pytest.raises(LockHeldError, match=r"has locked config\.json for more than"),
    ):
        change_config(backend, with_tier("ours"))
    assert read_config(backend).tiers == {}
    assert change_config(backend, with_tier("ours")).tiers == {"ours": "/ours"}


# File systems without locks: Lustre mounted without flock, some FUSE


def without_locks(monkeypatch, number=errno.ENOSYS):
    def refuse(fd, operation):
        raise OSError(number, "no flock")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_store_without_locks_warns_and_works(tmp_path, monkeypatch, caplog, number):
    without_locks(monkeypatch, number)
    with ckstore.open(tmp_path / "store", retention={"keep_last": 1}, gc_every=100) as store:
        assert "has no locks (flock)" in caplog.text
        for step in range(3):
            store.commit({"step": step}, step)
        assert store.gc({"keep_last": 1}).dropped_count == 2
        store.set_retention({"keep_last": 2})
        assert store.retention.keep_last == 2
    assert "failing" not in caplog.text
    assert backend_for(tmp_path / "store").list_names(paths.TMP_FOLDER) == []


def test_without_locks_change_waits_for_living_process_only(tmp_path, monkeypatch):
    ckstore.open(tmp_path / "store").close()
    backend = backend_for(tmp_path / "store")
    without_locks(monkeypatch)
    monkeypatch.setattr(store_config, "LOCK_PATIENCE_SECONDS", 0.05)
    stand_in = tmp_path / "store" / "tmp" / "config.lock"
    stand_in.touch()
    with pytest.raises(LockHeldError, match=r"has locked config\.json for more than"):
        change_config(backend, with_tier("a"))
    old = stand_in.stat().st_mtime - store_config.LOCK_AGE_SECONDS_MAX - 5
    os.utime(stand_in, (old, old))
    assert set(change_config(backend, with_tier("a")).tiers) == {"a"}
    assert backend.list_names(paths.TMP_FOLDER) == []


def test_without_locks_no_change_is_lost(tmp_path):
    ckstore.open(tmp_path / "store").close()
    program = "import errno, fcntl\ndef no(*a): raise OSError(errno.ENOSYS, 'no')\nfcntl.flock = no\n" + PROGRAM
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    running = [subprocess.Popen([*command, str(number), "4"]) for number in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(read_config(backend_for(tmp_path / "store")).tiers) == 8
