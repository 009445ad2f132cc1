"""Stores for the tests of the command line, and what runs a command in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import ckstore
from ckstore.cli import main

SRC = Path(ckstore.__file__).parent.parent


def environment(**extra):
    """Return an environment in which ``python -m ckstore`` is this source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COLUMNS", "LINES"))}
    return {**kept, "PYTHONPATH": str(SRC), "TZ": "UTC", **extra}


def ckstore_command(*arguments, stdin="", **extra):
    """Run the command line as a user does; return what became of it."""
    return subprocess.run(
        [sys.executable, "-m", "ckstore", *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        env=environment(**extra),
        timeout=300,
    )


def on_terminal(columns, *arguments):
    """Run a command on a terminal of that width, in a forked process; return exit code and what it drew."""
    with warnings.catch_warnings():
        # The child takes no lock that a thread of ours may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid, fd = pty.fork()
    if pid == 0:
        _run_on_terminal(columns, arguments)
    drawn = b""
    try:
        while block := os.read(fd, 65536):
            drawn += block
    except OSError:
        # Linux reports EIO when the other end of a terminal is closed.
        pass
    finally:
        os.close(fd)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), drawn.decode()


def _run_on_terminal(columns, arguments):
    """Do in a forked child what a new process does."""
    code = 70
    try:
        os.environ.update(environment(COLUMNS=str(columns), TERM="xterm"))
        time.tzset()
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
        code = main.run([str(argument) for argument in arguments])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def flip_byte(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def make_store(path, *, steps=(100, 200, 300)):
    """Make a store whose run ``main`` has these steps, of numpy arrays, and a run ``other``."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(50_000, dtype=np.float32)
    head = rng.standard_normal(300, dtype=np.float32)
    with ckstore.open(path) as store:
        for number, step in enumerate(steps):
            head += 1
            state = {
                "model": {"weights": weights, "tied": weights, "head": head},
                "optimizer": [{"lr": 0.5, "moment": np.zeros(7)}],
                "note": "hello",
            }
            tags = ["good"] if number == 1 else []
            store.commit(state, step, metrics={"loss": 3.0 / (number + 1)}, tags=tags)
    with ckstore.open(path, run="other") as store:
        store.commit({"a": np.arange(3)}, 7)
    return path
