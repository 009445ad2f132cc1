"""Start children, kill or disturb them by strace at chosen system calls, and count what was done."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[1]
SOURCE = FOLDER.parent / "src"

CALLS = (
    "openat,close,write,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,fchmod,"
    "link,linkat,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "io_uring_setup,io_uring_enter,io_uring_register"
)
"""Every call that changes files, or without which none is changed."""

_LINE = re.compile(r"^(\d+)\s+([a-z_0-9]+)\(")


class ChildServer:
    """One process that forks children ready to run a scenario."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(SOURCE), str(FOLDER)])
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "support.crash_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert self._readline() == "ready"
        except BaseException:
            self.close()
            raise

    def start(self, **job):
        """Fork a child that waits; return its pid."""
        self._writeline(json.dumps(job))
        return int(self._readline())

    def go(self):
        """Let the child run."""
        self._writeline("go")

    def wait(self):
        """Return the child's exit code, negative for a signal."""
        return int(self._readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._process.stdout.close()

    def _writeline(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _readline(self):
        line = self._process.stdout.readline()
        assert line, "the server of children has died"
        return line.strip()


def run_traced(server, job, *, inject=None, trace_path=None):
    """Run one child under strace; return its exit code."""
    command = ["strace", "-f", "-o", str(trace_path or "/dev/null"), "-e", f"trace={CALLS}"]
    if inject is not None:
        command += ["-e", f"inject={inject}"]
    pid = server.start(**job)
    tracer = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    # strace says so when the child is seized and interrupted: from then on no call escapes it.
    attached = tracer.stderr.readline()
    server.go()
    code = server.wait()
    tracer.stderr.read()
    tracer.wait()
    tracer.stderr.close()
    assert "attached" in attached, f"strace did not attach: {attached}"
    return code


def count_calls(trace_path):
    """Return for each call the most entries that one thread made: what ``when=N`` counts."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in Path(trace_path).read_text().splitlines():
        found = _LINE.match(line)
        if found:
            counts[found[1], found[2]] += 1
    most: dict[str, int] = {}
    for (_, call), count in counts.items():
        most[call] = max(most.get(call, 0), count)
    return most


def copy_store(source, target):
    """Copy a store's folder; faster than shutil for hundreds of empty folders."""
    Path(target).mkdir(mode=0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir():
                copy_store(entry.path, f"{target}/{entry.name}")
            else:
                shutil.copy2(entry.path, f"{target}/{entry.name}")


@dataclass
class Tally:
    """Counters of a run, printed so that documents can quote them.

    Attributes:
        points: Children that were started to be disturbed.
        disturbed: Those that were killed, or got an error from a call.
        untouched: The others: they made fewer such calls.
    """

    points: int = 0
    disturbed: int = 0
    untouched: int = 0
    acks: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return (
            f"{self.points} points, {self.disturbed} disturbed, {self.untouched} untouched, "
            f"{self.acks} acknowledged, {len(self.failures)} failures"
        )
