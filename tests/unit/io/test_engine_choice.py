"""Protects the engine choice: refused io_uring is replaced by pwrite, logged once, and writes the same."""

import errno
import logging
import os
import re
import subprocess
import sys
import textwrap

import pytest

from ckstore.errors import UnsupportedError, UsageError
from ckstore.io import engine_choice
from ckstore.io.engine_choice import choose_engine, supports_direct_io

SANDBOX = """
import ctypes, errno, os, resource, struct, sys
def refuse_rings(number):
    # Load the syscall number; if it is 425 (io_uring_setup) return the errno, else allow.
    program = b"".join(struct.pack("HBBI", *each) for each in [
        (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000)])
    keep = ctypes.create_string_buffer(program)
    filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(keep))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0, ctypes.get_errno()
"""
USE = """
import logging
from ckstore.io.local import LocalBackend
from support.suites import random_pieces, write_pack
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
backend = LocalBackend(sys.argv[1])
wanted = write_pack(backend, "x.pack", random_pieces(1, 30, 100000))
assert backend.read_bytes("x.pack", nbytes_max=1 << 30) == wanted
second = LocalBackend(sys.argv[1])
print(second.engine_name, "|", second.engine_reason)
"""

LACKING = """
import sys
from ckstore.io import direct_io as ring_support
ring_support._flags_of = lambda path: frozenset({"avx2", "bmi1", "bmi2", "movbe"})
"""


def run_python(code, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is that of x86-64")
@pytest.mark.uring
@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "ENOMEM"])
def test_refused_io_uring_falls_back_and_logs_once(tmp_path, name):
    lines = run_python(SANDBOX + f"refuse_rings(errno.{name})\n" + USE, tmp_path)
    assert len(lines) == 2
    assert lines[0].startswith("INFO io_uring: ")
    assert f"({name})" in lines[0]
    assert lines[0].endswith("using pwrite")
    assert lines[1].startswith("pwrite | io_uring: ")


def test_missing_library_falls_back_to_pwrite(tmp_path):
    able = "from ckstore.io import direct_io as ring_support\nring_support.require_supported_processor = lambda: None\n"
    lines = run_python("import sys\nsys.modules['liburing'] = None\n" + able + USE, tmp_path)
    assert "liburing is not installed" in lines[0]
    assert lines[1].startswith("pwrite | ")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors have no wheel")
def test_old_processor_uses_pwrite_and_logs_once(tmp_path):
    unloaded = "assert not {'liburing', 'ckstore.io.uring_engine'} & set(sys.modules)\n"
    lines = run_python(LACKING + USE + unloaded, tmp_path)
    trouble = "io_uring: the processor lacks AVX-512, which liburing was compiled for, using pwrite"
    assert lines == [f"INFO {trouble}", f"pwrite | {trouble}"]


def test_refusal_is_raised_if_uring_was_requested(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ckstore.io.uring_engine", raising=False)
    monkeypatch.setattr("ckstore.io.direct_io.NEEDED_FLAGS", ("wings",))
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "x86_64")))
    with pytest.raises(UnsupportedError, match="the processor lacks wings"):
        choose_engine("uring", str(tmp_path))


def test_processor_flags_are_trusted(tmp_path):
    # In a child process, because a wrong answer would kill it. If nothing refuses, rings can be created and closed.
    code = """
from ckstore.io.direct_io import require_supported_processor
try:
    require_supported_processor()
    import liburing
except ImportError:
    sys.exit()
liburing.Iovec([memoryview(bytearray(1))])
liburing.Ring()
"""
    assert run_python("import sys" + code, tmp_path) == []


def test_low_memlock_limit_is_enough(tmp_path):
    limit = "import resource, sys\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    lines = run_python(limit + USE, tmp_path)
    assert lines[-1].split(" | ")[0] in ("uring", "pwrite")


def test_requested_engine_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("ckstore.io.engine_choice.require_supported_processor", lambda: None)
    monkeypatch.setitem(sys.modules, "ckstore.io.uring_engine", None)
    with pytest.raises(UnsupportedError, match="liburing is not installed"):
        choose_engine("uring", str(tmp_path))
    with pytest.raises(UsageError):
        choose_engine("carrier pigeon", str(tmp_path))


@pytest.mark.uring
def test_ring_that_returns_wrong_bytes_is_not_used(tmp_path, monkeypatch, caplog):
    from ckstore.io import uring_engine

    def lie(self, request):
        request.on_done(len(request.buffer), None)

    monkeypatch.setattr(uring_engine.UringQueue, "submit", lie)
    with caplog.at_level(logging.INFO, "ckstore"):
        engine, reason = choose_engine("auto", str(tmp_path))
    assert engine.name == "pwrite"
    assert "failed its probe" in reason
    assert "EIO" in reason


def test_probe_leaves_no_file(tmp_path, monkeypatch):
    choose_engine("auto", str(tmp_path))
    supports_direct_io(str(tmp_path))
    # Where a file cannot be made without a name, one with a name is made and removed.
    real = os.open

    def without_tmpfile(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    choose_engine("auto", str(tmp_path))
    assert supports_direct_io(str(tmp_path)) in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("folder", "pattern"), [("tmp", r"[0-9a-f]{32}\.probe"), ("", r"\.probe-[0-9a-f]{32}")])
def test_killed_probe_leaves_its_file_in_tmp(tmp_path, monkeypatch, folder, pattern):
    real = os.open

    def without_tmpfile(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)

    def killed_before(path):
        raise OSError(errno.EINTR, "it never came to that")

    monkeypatch.setattr(os, "unlink", killed_before)
    (tmp_path / folder).mkdir(exist_ok=True)
    os.close(engine_choice.open_scratch(str(tmp_path), direct=False))
    [left] = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert re.fullmatch(pattern, left.name)
    assert str(left.parent) == (folder or ".")


def test_folder_without_direct_io_is_detected(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert supports_direct_io(str(tmp_path)) is False
    assert supports_direct_io(str(tmp_path / "gone")) is False
