"""Protects pack I/O in every configuration: each engine, with and without O_DIRECT, on each kind of file system.

Where io_uring is refused, packs are still written, and the log names the replacement once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from support import crash_scenarios
from support.strace_harness import ChildServer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(ChildServer()) as server:
        yield server


@pytest.fixture(params=["disk", "tmpfs", "overlay"])
def folder(request, tmp_path, unmount):
    if request.param == "disk":
        yield tmp_path
    elif request.param == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no /dev/shm")
        place = Path("/dev/shm") / f"ckstore-{time.monotonic_ns()}"
        place.mkdir(mode=0o700)
        yield place
        shutil.rmtree(place)
    else:
        with overlay(tmp_path, unmount) as place:
            yield place


@contextlib.contextmanager
def overlay(base, unmount):
    """Mount an overlay over the folder; skip where that is refused."""
    parts = {name: base / name for name in ("lower", "upper", "work", "merged")}
    for part in parts.values():
        part.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["merged"])]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount an overlay here")
    try:
        yield parts["merged"]
    finally:
        unmount(parts["merged"])


def run_child(server, folder, **job):
    """Commit and restore in a child; return its exit code, the engine used, and its log."""
    acks = folder / f"acks-{time.monotonic_ns()}"
    place = folder / f"store-{time.monotonic_ns()}"
    server.start(scenario="large", place=str(place), acks=str(acks), **job)
    server.go()
    code = server.wait()
    lines = crash_scenarios.read_acks(acks)
    error = Path(f"{acks}.error")
    return (
        code,
        {line.split()[1] for line in lines if line.startswith("engine ")},
        [line for line in lines if line.startswith("log ") and "io_uring" in line],
        error.read_text() if error.exists() else "",
    )


@pytest.mark.parametrize("try_direct", [True, False])
@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_each_engine_round_trip(server, folder, engine, try_direct):
    code, engines, _, error = run_child(server, folder, engine=engine, try_direct=try_direct)
    assert (code, engines) == (0, {engine}), error


@pytest.mark.deep(parts=3)
@pytest.mark.uring
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_refused_ring_is_replaced_by_pwrite_with_log(server, folder, number):
    code, engines, summary, error = run_child(server, folder, engine="auto", refuse=number)
    assert (code, engines) == (0, {"pwrite"}), error
    assert len(summary) == 1
    assert errno.errorcode[number] in summary[0]


def test_refused_explicit_ring_is_an_error(server, tmp_path):
    code, _, _, error = run_child(server, tmp_path, engine="uring", refuse=errno.EPERM)
    assert code == 3
    assert "UnsupportedError" in error


def test_default_memlock_limit_is_enough(server, tmp_path):
    code, engines, summary, error = run_child(server, tmp_path, engine="auto", memlock_nbytes=8 << 20)
    assert code == 0, error
    assert engines == {"uring"} or summary
