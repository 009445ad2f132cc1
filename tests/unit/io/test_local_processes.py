"""Protects folders against signals and forks, and the meaning of each errno."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from ckstore.errors import BackendError, CapacityError, CkstoreError, UnsupportedError, is_refused
from ckstore.io.backend import ReadRequest
from ckstore.io.buffers import BufferPool
from ckstore.io.engine_choice import choose_engine
from ckstore.io.local import LocalBackend
from ckstore.io.syscalls import medium_error
from support.forked import fork
from support.suites import BLOCK, random_pieces, write_pack


@pytest.fixture(params=["pwrite", "auto"])
def backend(request, tmp_path):
    backend = LocalBackend(tmp_path, engine=request.param)
    yield backend
    backend.close()


def test_signals_do_not_disturb_writing_and_reading(backend):
    ticks = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        wanted = write_pack(backend, "x.pack", random_pieces(9, 200, 2 * BLOCK))
        file = backend.open_read("x.pack")
        content = bytearray(len(wanted))
        with BufferPool(BLOCK, 4) as pool:
            requests = (ReadRequest(file, i, min(BLOCK, len(wanted) - i), i) for i in range(0, len(wanted), BLOCK))
            for result in backend.read_ranges(requests, pool):
                content[result.tag : result.tag + len(result.view)] = result.view
                result.release()
        file.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert content == wanted
    assert ticks


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_uses_its_own_queues(backend):
    write_pack(backend, "before.pack", random_pieces(1, 20, BLOCK))

    def write_and_read():
        wanted = write_pack(backend, "child.pack", random_pieces(2, 20, BLOCK))
        backend.close()
        return backend.read_bytes("child.pack", nbytes_max=1 << 30) == wanted

    check = fork(write_and_read)
    wanted = write_pack(backend, "parent.pack", random_pieces(3, 20, BLOCK))
    assert backend.read_bytes("parent.pack", nbytes_max=1 << 30) == wanted
    check()


class ForkingEngine:
    """An engine that forks a child when a queue is opened. At that time the backend holds its lock."""

    def __init__(self, inner):
        self.inner, self.name = inner, inner.name
        self.act = None
        self.checks = []

    def open_queue(self, **options):
        act, self.act = self.act, None
        if act is not None:
            self.checks.append(fork(act))
        return self.inner.open_queue(**options)


@pytest.fixture(params=["pwrite", "auto"])
def forking(request, tmp_path):
    return ForkingEngine(choose_engine(request.param, str(tmp_path))[0])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_with_a_held_lock_can_write(forking, tmp_path):
    backend = LocalBackend(tmp_path, engine=forking)

    def close_and_write():
        backend.close()
        write_pack(backend, "child.pack", random_pieces(2, 20, BLOCK))
        backend.close()

    forking.act = close_and_write
    write_pack(backend, "parent.pack", random_pieces(1, 20, BLOCK))
    backend.close()
    (check,) = forking.checks
    check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_with_a_held_lock_names_its_engine(forking, tmp_path):
    backend = LocalBackend(tmp_path, engine=forking)
    forking.act = lambda: backend.engine_name in ("uring", "pwrite")
    write_pack(backend, "parent.pack", random_pieces(1, 20, BLOCK))
    backend.close()
    (check,) = forking.checks
    check()


@pytest.mark.parametrize(
    ("number", "kind", "is_transient"),
    [
        (errno.ENOSPC, CapacityError, None),
        (errno.EDQUOT, CapacityError, None),
        (errno.EMFILE, CapacityError, None),
        (errno.ENFILE, CapacityError, None),
        (errno.ENOMEM, CapacityError, None),
        (errno.EFBIG, CapacityError, None),
        (errno.EACCES, BackendError, False),
        (errno.EPERM, BackendError, False),
        (errno.EROFS, BackendError, False),
        (errno.ENOTDIR, BackendError, False),
        (errno.ENOENT, BackendError, False),
        (errno.ENAMETOOLONG, BackendError, False),
        (errno.ELOOP, BackendError, False),
        (errno.ENOTCONN, BackendError, False),
        (errno.EIO, BackendError, False),
        (errno.EAGAIN, BackendError, True),
        (errno.ESTALE, BackendError, True),
        (errno.ETIMEDOUT, BackendError, True),
        (errno.ENOSYS, UnsupportedError, None),
        (errno.EOPNOTSUPP, UnsupportedError, None),
        (errno.ENOLCK, UnsupportedError, None),
    ],
)
def test_each_errno_has_a_meaning(number, kind, is_transient):
    error = medium_error(OSError(number, "x"), where="/place", what="writing")
    assert type(error) is kind
    assert isinstance(error, CkstoreError)
    assert error.todo
    assert "/place" in str(error)
    assert errno.errorcode[number] in str(error)
    assert error.facts.get("is_transient") is is_transient


NUMBERS = [
    *("EACCES", "EPERM", "EROFS", "ENOTDIR", "ENOENT", "ENAMETOOLONG", "ELOOP", "ENOTCONN", "EIO", "ESTALE"),
    *("ETIMEDOUT", "ENOSYS", "ENOLCK", "ENOSPC", "EDQUOT", "EFBIG"),
]


def test_each_errno_has_its_own_message():
    advice = {
        name: medium_error(OSError(getattr(errno, name), "x"), where="/place", what="writing").todo for name in NUMBERS
    }
    assert len(set(advice.values())) == len(NUMBERS)
    assert [name for name, todo in advice.items() if "failing" in todo] == ["EIO"]


def test_permission_error_names_user_and_owner(tmp_path):
    error = medium_error(OSError(errno.EACCES, "x"), where=tmp_path / "gone" / "file", what="reading a file")
    assert is_refused(error)
    assert f"this process runs as user {os.geteuid()}, and {tmp_path} belongs to user {tmp_path.stat().st_uid}" in str(
        error
    )
    assert not is_refused(medium_error(OSError(errno.EROFS, "x"), where=tmp_path, what="writing"))


def test_file_size_limit_is_a_capacity_error(tmp_path):
    code = """
import os, resource, sys
from ckstore.errors import CapacityError
from ckstore.io import local_packs as local_pack
from ckstore.io.local import LocalBackend
from support.suites import write_pack
local_pack.fallocate = lambda fd, offset, nbytes: False
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024 + 512,) * 2)
for engine in ("pwrite", "auto"):
    try:
        write_pack(LocalBackend(sys.argv[1], engine=engine), engine, [bytes(60000)] * 20)
    except CapacityError as error:
        print(error.errno)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.stdout.split() == [str(errno.EFBIG)] * 2, done.stderr
