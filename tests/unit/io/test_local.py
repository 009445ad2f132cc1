"""Protects a folder as a backend: modes, full disks, failing syncs, fallbacks, forks and signals."""

import errno
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from ckstore.errors import BackendError, CapacityError, UsageError
from ckstore.io import local, local_packs
from ckstore.io.backend import ReadRequest
from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import PwriteEngine
from ckstore.io.local import LocalBackend
from support.completions import BadCompletion, FaultyEngine
from support.suites import BLOCK, random_pieces, write_pack

PAGE = 4096


@pytest.fixture(params=["pwrite", "auto"])
def backend(request, tmp_path):
    backend = LocalBackend(tmp_path, engine=request.param)
    yield backend
    backend.close()


def refuse_direct(monkeypatch):
    real = os.open

    def refuse(path, flags, *mode, **others):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, *mode, **others)

    monkeypatch.setattr(os, "open", refuse)


def mode_of(path):
    return stat.S_IMODE(Path(path).lstat().st_mode)


def test_modes_protect_files_and_finished_packs(backend, tmp_path):
    backend.make_folder("a/b")
    backend.create("a/note", b"", sync=False)
    sink = backend.create_pack("a/x.pack", nbytes_expected=PAGE)
    assert mode_of(tmp_path / "a/x.pack") == 0o600
    sink.finish(0)
    assert [mode_of(tmp_path / name) for name in ("a", "a/b", "a/note", "a/x.pack")] == [0o700, 0o700, 0o600, 0o400]


def test_symbolic_links_are_not_followed(backend, tmp_path):
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for call in (lambda: backend.read_bytes("link", nbytes_max=9), lambda: backend.open_read("link")):
        with pytest.raises(BackendError):
            call()
    with pytest.raises(FileExistsError):
        backend.create("dangling", b"", sync=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("call", ["make_folder", "create"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_interrupted_walk_closes_no_descriptor_twice(tmp_path, monkeypatch, call, which):
    # A second close of a number could close a file that another thread has opened in between.
    backend = LocalBackend(tmp_path)
    backend.make_folder("a/b/c")
    real, closed = os.close, []

    def close_then_interrupt(fd):
        real(fd)
        closed.append(fd)
        if len(closed) == which + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.make_folder("a/b/c") if call == "make_folder" else backend.create("a/b/c/n", b"", sync=False)
    backend.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("engine", ["pwrite", "auto"])
def test_small_pack_needs_no_space_for_the_expected_size(small_disk, engine):
    backend = LocalBackend(small_disk, engine=engine)
    content = os.urandom(2 * BLOCK)
    with BufferPool(BLOCK, 2) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=1 << 40)
        for index in range(2):
            buffer = pool.acquire()
            buffer.view[:] = content[index * BLOCK : (index + 1) * BLOCK]
            sink.write(buffer, BLOCK, index * BLOCK)
        sink.finish(2 * BLOCK - 7)
    assert backend.read_bytes("x.pack", nbytes_max=2 * BLOCK) == content[:-7]
    assert (small_disk / "x.pack").stat().st_blocks * 512 <= 2 * BLOCK
    backend.close()


def write_blocks(sink, pool, count):
    for index in range(count):
        sink.write(pool.acquire(), BLOCK, index * BLOCK)


@pytest.mark.root
@pytest.mark.parametrize("engine", ["pwrite", "auto"])
def test_too_large_pack_is_a_capacity_error(small_disk, engine, monkeypatch):
    real, reserved = local_packs.fallocate, []

    def recorded_fallocate(fd, offset, nbytes):
        is_able = real(fd, offset, nbytes)
        reserved.append(offset + nbytes)
        return is_able

    monkeypatch.setattr(local_packs, "fallocate", recorded_fallocate)
    backend = LocalBackend(small_disk, engine=engine)
    free = backend.free_nbytes()
    with BufferPool(BLOCK, 4) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=40 << 20)
        with pytest.raises(CapacityError, match="ENOSPC"):
            write_blocks(sink, pool, (40 << 20) // BLOCK)
        assert max(reserved) > free - (1 << 20), "it failed before the disk was full"
        sink.close()
        assert pool.free_count == 4
    assert backend.list_names("") == []
    assert backend.free_nbytes() == free
    backend.close()


def limit_space(monkeypatch, room):
    """Limit reservations to ``room`` bytes, and return the sizes that were tried."""
    steps = []

    def fallocate(fd, offset, nbytes):
        steps.append((offset, nbytes))
        if offset + nbytes > room:
            raise OSError(errno.ENOSPC, "full")
        return True

    monkeypatch.setattr(local_packs, "fallocate", fallocate)
    monkeypatch.setattr(local_packs, "STEP_NBYTES_MIN", 2 * BLOCK)
    return steps


def test_reservations_shrink_on_a_nearly_full_disk(backend, monkeypatch):
    steps = limit_space(monkeypatch, 7 * BLOCK)
    with BufferPool(BLOCK, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=20 * BLOCK)
        assert steps == [(0, 20 * BLOCK), (0, 10 * BLOCK), (0, 5 * BLOCK)]
        steps.clear()
        for index in range(7):
            sink.write(pool.acquire(), BLOCK, index * BLOCK)
        assert steps == [
            (5 * BLOCK, 5 * BLOCK),
            (5 * BLOCK, 2 * BLOCK + BLOCK // 2),
            (5 * BLOCK, BLOCK),
            (6 * BLOCK, BLOCK),
        ]
        with pytest.raises(CapacityError, match="ENOSPC"):
            sink.write(pool.acquire(), BLOCK, 7 * BLOCK)
        sink.close()
    assert backend.list_names("") == []


def test_partly_failed_reservation_is_released(backend, tmp_path, monkeypatch):
    # ext4 and xfs keep the space found before the disk was full. The lease's next heartbeat needs space too.
    def fallocate(fd, offset, nbytes):
        os.ftruncate(fd, max(os.fstat(fd).st_size, min(offset + nbytes, 7 * BLOCK)))
        if offset + nbytes > 7 * BLOCK:
            raise OSError(errno.ENOSPC, "full")
        return True

    monkeypatch.setattr(local_packs, "fallocate", fallocate)
    monkeypatch.setattr(local_packs, "STEP_NBYTES_MIN", 4 * BLOCK)
    with BufferPool(BLOCK, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=12 * BLOCK)
        assert (tmp_path / "x.pack").stat().st_size == 6 * BLOCK
        sink.close()
        sink = backend.create_pack("x.pack", nbytes_expected=9 * BLOCK)
        assert (tmp_path / "x.pack").stat().st_size == 4 * BLOCK + BLOCK // 2
        sink.close()
        sink = backend.create_pack("x.pack", nbytes_expected=100 * BLOCK)
        assert (tmp_path / "x.pack").stat().st_size == 100 * BLOCK // 16 // PAGE * PAGE
        write_blocks(sink, pool, 7)
        sink.finish(7 * BLOCK)
    assert (tmp_path / "x.pack").stat().st_size == 7 * BLOCK


def test_full_disk_is_reported_at_the_first_write(backend, monkeypatch):
    limit_space(monkeypatch, 0)
    with BufferPool(BLOCK, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=1 << 30)
        with pytest.raises(CapacityError, match="ENOSPC"):
            sink.write(pool.acquire(), BLOCK, 0)
        sink.close()
    assert backend.list_names("") == []


def test_failed_reservation_leaves_no_file(backend, monkeypatch):
    def fail(fd, offset, nbytes):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(local_packs, "fallocate", fail)
    with pytest.raises(BackendError, match="EIO"):
        backend.create_pack("x.pack", nbytes_expected=1 << 30)
    assert backend.list_names("") == []


@pytest.mark.parametrize("call", ["ftruncate", "fchmod", "fdatasync"])
def test_close_waits_for_finish_of_another_thread(backend, tmp_path, monkeypatch, call):
    # If the descriptor was closed too early, its number could belong to another file.
    real, closed = getattr(os, call), threading.Event()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"precious")

    def close():
        sink.close()
        closed.set()

    def interrupted(fd, *arguments):
        closer.start()
        assert not closed.wait(0.3)
        return real(fd, *arguments)

    sink = backend.create_pack("x.pack", nbytes_expected=PAGE)
    closer = threading.Thread(target=close)
    monkeypatch.setattr(os, call, interrupted)
    sink.finish(100)
    closer.join(60)
    assert closed.is_set()
    assert (tmp_path / "x.pack").stat().st_size == 100
    assert mode_of(tmp_path / "x.pack") == 0o400


def test_finish_after_close_touches_no_descriptor(backend, monkeypatch):
    sink = backend.create_pack("x.pack", nbytes_expected=PAGE)
    sink.close()
    monkeypatch.setattr(os, "ftruncate", lambda fd, nbytes: pytest.fail("the descriptor is closed"))
    with pytest.raises(UsageError):
        sink.finish(0)
    assert backend.list_names("") == []


def test_space_is_reserved_in_steps_and_truncated(backend, tmp_path, monkeypatch):
    real, steps = local_packs.fallocate, []

    def counted(fd, offset, nbytes):
        steps.append((offset, nbytes))
        return real(fd, offset, nbytes)

    monkeypatch.setattr(local_packs, "fallocate", counted)
    monkeypatch.setattr(local_packs, "STEP_NBYTES_MAX", 8 * BLOCK)
    monkeypatch.setattr(local_packs, "STEP_NBYTES_MIN", 2 * BLOCK)
    with BufferPool(BLOCK, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=11 * BLOCK)
        for index in range(14):
            sink.write(pool.acquire(), BLOCK, index * BLOCK)
        sink.finish(14 * BLOCK - PAGE)
    assert steps == [(0, 8 * BLOCK), (8 * BLOCK, 3 * BLOCK), (11 * BLOCK, 2 * BLOCK), (13 * BLOCK, 2 * BLOCK)]
    found = (tmp_path / "x.pack").stat()
    assert found.st_size == 14 * BLOCK - PAGE
    assert found.st_blocks * 512 <= 14 * BLOCK


def test_small_packs_reserve_little_extra(backend, monkeypatch):
    steps, mib = [], 1 << 20
    monkeypatch.setattr(local_packs, "fallocate", lambda fd, offset, nbytes: steps.append((offset, nbytes)) or True)
    with BufferPool(mib, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=PAGE)
        for index in range(150):
            sink.write(pool.acquire(), mib, index * mib)
        sink.close()
    assert steps[:3] == [(0, PAGE), (PAGE, mib), (PAGE + mib, 2 * mib)]
    assert [nbytes // mib for _, nbytes in steps[1:]] == [1, 2, 4, 8, 16, 32, 64, 64]


def test_folder_without_fallocate_accepts_packs(backend, monkeypatch):
    monkeypatch.setattr(local_packs, "fallocate", lambda fd, offset, nbytes: False)
    wanted = write_pack(backend, "x.pack", random_pieces(4, 30, BLOCK))
    assert backend.read_bytes("x.pack", nbytes_max=1 << 30) == wanted


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failed_write_is_final_and_never_synced(tmp_path, monkeypatch, number):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    engine = FaultyEngine(PwriteEngine(), BadCompletion(at=2, errno=number))
    backend = LocalBackend(tmp_path, engine=engine)
    wanted = BackendError if number == errno.EIO else CapacityError
    with BufferPool(BLOCK, 1) as pool:
        sink = backend.create_pack("x.pack", nbytes_expected=0)
        sink.write(pool.acquire(), BLOCK, 0)
        sink.write(pool.acquire(), BLOCK, BLOCK)
        with pytest.raises(wanted):
            sink.drain()
        with pytest.raises(wanted):
            sink.write(pool.acquire(), BLOCK, 2 * BLOCK)
        for call in (sink.drain, lambda: sink.finish(0)):
            with pytest.raises(wanted):
                call()
        sink.close()
        assert pool.acquire(timeout=60)
    assert synced == []
    assert backend.list_names("") == []
    backend.close()


def test_short_write_is_a_failure(tmp_path):
    engine = FaultyEngine(PwriteEngine(), BadCompletion(at=1, errno=0, nbytes=PAGE))
    backend = LocalBackend(tmp_path, engine=engine)
    with pytest.raises(BackendError):
        write_pack(backend, "x.pack", [bytes(2 * BLOCK)])
    backend.close()


def test_failed_sync_is_never_repeated(backend, monkeypatch):
    count = 0

    def fail_once(fd):
        nonlocal count
        count += 1
        if count == 1:
            raise OSError(errno.EIO, "sync")

    monkeypatch.setattr(os, "fdatasync", fail_once)
    sink = backend.create_pack("x.pack", nbytes_expected=0)
    for _ in range(2):
        with pytest.raises(BackendError):
            sink.finish(0)
    sink.close()
    assert count == 1
    assert backend.stat("x.pack") is None


def read_pages(folder, *, for_ever):
    """Read five pages of a pack while the second read fails, and yield them as they arrive."""
    engine = FaultyEngine(PwriteEngine(), BadCompletion(at=2, errno=errno.EIO, kind="read", for_ever=for_ever))
    backend = LocalBackend(folder, engine=engine)
    wanted = write_pack(backend, "x.pack", random_pieces(8, 10, BLOCK))
    file = backend.open_read("x.pack")
    with BufferPool(BLOCK, 3) as pool:
        try:
            for result in backend.read_ranges((ReadRequest(file, i * PAGE, PAGE, i) for i in range(5)), pool):
                assert result.view == wanted[result.tag * PAGE : (result.tag + 1) * PAGE]
                result.release()
                yield result.tag
        finally:
            assert pool.free_count == 3
            file.close()
            backend.close()


def test_read_error_is_retried_once(tmp_path):
    assert sorted(read_pages(tmp_path, for_ever=False)) == [0, 1, 2, 3, 4]


def test_lasting_read_error_names_its_offset(tmp_path):
    with pytest.raises(BackendError, match=r"4096 bytes at \d+ of .*x\.pack"):
        list(read_pages(tmp_path, for_ever=True))


def test_short_read_within_the_file_is_an_error(tmp_path):
    engine = FaultyEngine(PwriteEngine(), BadCompletion(at=1, errno=0, nbytes=512, kind="read", for_ever=True))
    backend = LocalBackend(tmp_path, engine=engine)
    write_pack(backend, "x.pack", [bytes(BLOCK)])
    file = backend.open_read("x.pack")
    with BufferPool(BLOCK, 1) as pool, pytest.raises(BackendError):
        list(backend.read_ranges([ReadRequest(file, 0, BLOCK, 0)], pool))
    file.close()
    backend.close()


def test_folder_without_direct_io_uses_the_page_cache(backend, monkeypatch):
    refuse_direct(monkeypatch)
    wanted = write_pack(backend, "x.pack", random_pieces(4, 30, BLOCK))
    assert not backend.is_direct
    file = backend.open_read("x.pack")
    assert file.read_at(5, 3 * BLOCK) == wanted[5 : 5 + 3 * BLOCK]
    file.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
@pytest.mark.parametrize("can_be_direct", [True, False])
def test_tmpfs_accepts_packs(monkeypatch, can_be_direct):
    if not can_be_direct:
        refuse_direct(monkeypatch)
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        backend = LocalBackend(folder)
        wanted = write_pack(backend, "x.pack", random_pieces(4, 30, BLOCK))
        file = backend.open_read("x.pack")
        assert file.read_at(0, len(wanted)) == wanted
        with BufferPool(BLOCK, 2) as pool:
            for result in backend.read_ranges([ReadRequest(file, 7, BLOCK - PAGE, 0)], pool):
                assert result.view == wanted[7 : 7 + BLOCK - PAGE]
                result.release()
        file.close()
        backend.close()


def test_name_is_not_replaced_without_renameat2(backend, monkeypatch):
    monkeypatch.setattr(local, "rename_noreplace", lambda *_, **__: False)
    backend.create("one", b"1", sync=False)
    backend.create("two", b"2", sync=False)
    with pytest.raises(FileExistsError):
        backend.rename_new("one", "two")
    backend.rename_new("one", "three")
    assert backend.list_names("") == ["three", "two"]
    assert backend.read_bytes("two", nbytes_max=1) == b"2"
