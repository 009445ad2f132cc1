"""Protects the fault-injection wrappers: a fault that does not happen would prove nothing."""

from __future__ import annotations

import errno
import threading

import pytest

from ckstore.errors import BackendError, CapacityError
from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import IoRequest, PwriteEngine
from ckstore.io.local import LocalBackend
from support.completions import BadCompletion, FaultyEngine
from support.crash_states import crash_states
from support.faults import WRITE_ERRNOS, Fault, FaultyBackend, SyncSkippingBackend
from support.invariants import order_violations
from support.simfs import SimFS


def disk_with(*folders):
    disk = SimFS()
    for folder in folders:
        disk.make_folder(folder)
    return disk.settled()


def write_pack(backend, name="packs/p", nbytes=4096):
    with BufferPool(8192, 2) as pool:
        sink = backend.create_pack(name, nbytes_expected=nbytes)
        try:
            buffer = pool.acquire()
            buffer.view[:nbytes] = b"z" * nbytes
            sink.write(buffer, nbytes, 0)
            sink.drain()
            sink.finish(nbytes)
        finally:
            sink.close()
            assert pool.free_count == 2, "a buffer was not released"


def test_only_the_selected_call_fails():
    backend = FaultyBackend(disk_with("f"), Fault(at=2, sites=frozenset({"create"})))
    backend.create("f/a", b"", sync=True)
    backend.stat("f/a")
    with pytest.raises(BackendError, match="EIO"):
        backend.create("f/b", b"", sync=True)
    backend.create("f/b", b"", sync=True)
    assert backend.disturbed == ["create f/b"]
    assert backend.calls == ["create", "create sync", "stat", "create", "create", "create sync"]


def test_permanent_fault_stays():
    backend = FaultyBackend(disk_with("f"), Fault(at=2, for_ever=True))
    backend.stat("f/a")
    for _ in range(3):
        with pytest.raises(BackendError):
            backend.stat("f/a")
    assert len(backend.disturbed) == 3


def test_late_fault_executes_the_call():
    backend = FaultyBackend(disk_with("f"), Fault(at=1, sites=frozenset({"link"}), is_late=True))
    backend.create("f/a", b"", sync=True)
    with pytest.raises(BackendError):
        backend.link("f/a", "f/b")
    assert backend.list_names("f") == ["a", "b"]


@pytest.mark.parametrize("number", WRITE_ERRNOS)
def test_errors_match_a_local_folder(number):
    backend = FaultyBackend(disk_with("f"), Fault(at=1, errno=number))
    with pytest.raises((BackendError, CapacityError), match=errno.errorcode[number]) as caught:
        backend.create("f/a", b"", sync=True)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM)
    assert isinstance(caught.value, CapacityError) == is_full
    assert isinstance(caught.value.__cause__, OSError)


def test_failed_sync_loses_data():
    disk = disk_with("f")
    backend = FaultyBackend(disk, Fault(at=1, sites=frozenset({"create sync"})))
    with pytest.raises(BackendError):
        backend.create("f/a", b"bytes", sync=True)
    backend.sync_file("f/a")
    backend.sync_folder("f")
    ends = [state.disk for state in crash_states(disk, seed=0, points={len(disk.log)})]
    assert {end.read_bytes("f/a", nbytes_max=9) for end in ends} == {b""}
    assert any("whose sync failed" in violation for violation in order_violations(disk.log))


@pytest.mark.parametrize("site", ["create_pack", "pack.write", "pack.drain", "pack.finish"])
def test_packs_fail_at_every_site_and_release_buffers(site):
    backend = FaultyBackend(disk_with("packs"), Fault(at=1, sites=frozenset({site})))
    with pytest.raises(BackendError):
        write_pack(backend)
    assert backend.inner.list_names("packs") == []
    write_pack(backend)
    assert backend.stat("packs/p").nbytes == 4096


@pytest.mark.parametrize("kind", ["simulated", "local"])
def test_sync_skipping_pack_is_complete_but_unsynced(kind, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    monkeypatch.setattr("os.fsync", synced.append)
    backend = disk_with("packs") if kind == "simulated" else LocalBackend(tmp_path, engine="pwrite")
    backend.make_folder("packs")
    write_pack(SyncSkippingBackend(backend, ["pack data", "folder packs"]), nbytes=8192)
    SyncSkippingBackend(backend, ["folder packs"]).sync_folder("packs")
    assert backend.read_bytes("packs/p", nbytes_max=9000) == b"z" * 8192
    assert backend.list_names("packs") == ["p"]
    assert not synced
    if kind == "simulated":
        assert {op.kind for op in backend.log} == {"entry", "write"}
    backend.close()


def transfer(engine, kind, fd, view):
    done = threading.Event()
    outcome = []

    def on_done(nbytes, error):
        outcome.extend((nbytes, error))
        done.set()

    queue = engine.open_queue(depth=1)
    queue.submit(IoRequest(kind, fd, view, 0, on_done))
    assert done.wait(60)
    queue.close()
    return outcome


def test_bad_completion_affects_only_its_transfer(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        engine = FaultyEngine(PwriteEngine(), BadCompletion(at=2, errno=errno.EIO))
        block = memoryview(b"x" * 100)
        assert transfer(engine, "write", file.fileno(), block) == [100, None]
        moved, error = transfer(engine, "write", file.fileno(), block)
        assert (moved, error.errno) == (0, errno.EIO)
        assert transfer(engine, "write", file.fileno(), block) == [100, None]
        assert engine.counted == 3


def test_short_completion_moves_only_a_part(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        engine = FaultyEngine(PwriteEngine(), BadCompletion(at=1, errno=0, nbytes=40))
        assert transfer(engine, "write", file.fileno(), memoryview(b"x" * 100)) == [40, None]
        assert (tmp_path / "file").stat().st_size == 40


def test_ordering_rules_detect_each_violation():
    def violations(*actions):
        disk = disk_with("packs", "claims/main", "manifests/main", "tmp")
        for action, *arguments in actions:
            getattr(disk, action)(*arguments[:2], **({"sync": arguments[2]} if action == "create" else {}))
        return " / ".join(order_violations(disk.log))

    draft = ("create", "tmp/d", b"m", True)
    claim = [("create", "claims/main/00000000", b"", False), ("sync_folder", "claims/main")]
    publish = ("link", "tmp/d", "manifests/main/00000000-000000000001.0.ckm")
    synced = ("sync_folder", "manifests/main")
    assert violations(*claim, draft, publish, synced, ("note", "ack")) == ""
    assert "is not durable" in violations(*claim, draft, publish, ("note", "ack"))
    assert "claim" in violations(claim[0], draft, publish, synced)
    assert "before its bytes" in violations(*claim, ("create", "tmp/d", b"m", False), publish)
    unsynced_pack = ("create", "packs/p", b"x", False)
    assert "bytes of packs/p" in violations(unsynced_pack, ("sync_folder", "packs"), draft, publish)
    assert "name packs/p" in violations(("create", "packs/p", b"x", True), draft, publish)
    assert "gets its name by rename" in violations(draft, ("rename", *publish[1:]))
    assert "removed" in violations(*claim, ("unlink", "claims/main/00000000"))
    assert "unlinked in place" in violations(draft, publish, ("unlink", publish[2]))
    assert "replaced" in violations(draft, ("create", "packs/p", b"", True), ("rename", "tmp/d", "packs/p"))
