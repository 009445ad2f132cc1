"""Protects the pwrite engine from calls that transfer less than requested."""

import errno
import os
import threading

import pytest

from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import PwriteEngine
from support.forked import fork
from support.suites import move

PAGE = 4096


@pytest.fixture
def queue():
    queue = PwriteEngine().open_queue(depth=2)
    yield queue
    queue.close()


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def block():
    with BufferPool(8 * PAGE, 1) as pool:
        block = pool.acquire()
        block.view[:] = os.urandom(8 * PAGE)
        yield block.view
        block.release()


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 2 * PAGE + 512])
def test_short_writes_are_continued_from_an_aligned_offset(queue, fd, block, monkeypatch, most):
    real = os.pwritev
    offsets = []

    def short(fd, views, offset):
        offsets.append(offset)
        return real(fd, [views[0][:most]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    assert move(queue, [("write", fd, block, 0)]) == [(8 * PAGE, None)]
    assert len(offsets) > 1
    assert all(offset % PAGE == 0 for offset in offsets)
    assert os.pread(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), 8 * PAGE, 0) == block


def test_short_reads_are_continued(queue, fd, block, monkeypatch):
    wanted = bytes(block)
    os.pwritev(fd, [block], 0)
    block[:] = bytes(8 * PAGE)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][: PAGE + 512]], offset))
    assert move(queue, [("read", fd, block, 0)]) == [(8 * PAGE, None)]
    assert block == wanted


def test_writes_without_progress_fail(queue, fd, block, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 0)
    [(moved, error)] = move(queue, [("write", fd, block, 0)])
    assert moved == 0
    assert error.errno == errno.EIO


def test_queue_survives_a_failed_call(queue, fd, block, monkeypatch):
    with monkeypatch.context() as patched:

        def fail(fd, views, offset):
            raise OSError(errno.ENOSPC, "full")

        patched.setattr(os, "pwritev", fail)
        assert move(queue, [("write", fd, block, 0)])[0][1].errno == errno.ENOSPC
    assert move(queue, [("write", fd, block, 0)]) == [(8 * PAGE, None)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_with_a_held_lock_can_close(queue, fd, block, monkeypatch):
    start, checks = threading.Thread.start, []

    def fork_first(thread):
        # A queue starts its threads while it holds its lock.
        checks.append(fork(queue.close, seconds_max=20))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fork_first)
    assert move(queue, [("write", fd, block, 0)]) == [(8 * PAGE, None)]
    (check,) = checks
    check()
