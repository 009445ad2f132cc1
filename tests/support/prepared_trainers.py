"""Trainers that start in milliseconds: a process that has imported what they need forks them.

The process forks whenever it gets a program, and reports how each fork has ended. A fork runs its program as a script
would: unhandled exceptions and ``atexit`` functions are left to the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FOLDER = Path(__file__).parents[1]
PROGRAM_NBYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 8
SECONDS_MAX = 300.0


class Prepared:
    """The process that forks; make it with ``prepared``.

    Args:
        names: The modules that it imports.
    """

    def __init__(self, names):
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(FOLDER)])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.prepared_trainers", str(theirs.fileno()), *names],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._codes = {}
        self._pids = []
        atexit.register(self._close)

    def start(self, program, out, err, *others):
        """Run a program in a fork whose output goes to two descriptors; return its pid.

        The program finds the numbers of its other descriptors in ``descriptors``.
        """
        socket.send_fds(self._end, [program.encode()], [out, err, *others])
        while not self._pids:
            self._hear()
        return self._pids.pop()

    def wait(self, pid):
        """Return the exit code of a fork, as ``subprocess`` has it, when it has ended."""
        while pid not in self._codes:
            self._hear()
        return self._codes[pid]

    def kill(self, pid, number=signal.SIGKILL):
        """Send a signal to a fork that has not ended."""
        while select.select([self._end], [], [], 0)[0]:
            self._hear()
        if pid not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hear(self):
        assert select.select([self._end], [], [], SECONDS_MAX)[0], "a prepared process says nothing"
        word, *numbers = self._end.recv(100).decode().split()
        if word == "forked":
            self._pids.append(int(numbers[0]))
        else:
            self._codes[int(numbers[0])] = int(numbers[1])

    def _close(self):
        self._end.close()
        self._process.wait(SECONDS_MAX)


@functools.cache
def prepared(*names):
    """Return the process that has imported these modules; one for all tests."""
    return Prepared(names)


def run_trainer(program, *names):
    """Run a program in a fork of the process that has imported these modules, as ``subprocess.run`` would.

    Its output goes to files of no name: savers that outlive it have them too, and hold nobody up.
    """
    with open(os.memfd_create("out"), "r+b") as out, open(os.memfd_create("err"), "r+b") as err:  # noqa: PTH123
        process = prepared(*names)
        code = process.wait(process.start(program, out.fileno(), err.fileno()))
        texts = [os.pread(each.fileno(), PROGRAM_NBYTES_MAX, 0).decode() for each in (out, err)]
    return subprocess.CompletedProcess("<trainer>", code, *texts)


def serve(end):
    """Fork for each program that comes; return None at the end, and in each fork the program and its descriptors."""
    forks = {}
    while True:
        ready, _, _ = select.select([end, *forks], [], [])
        for fd in ready:
            if fd is not end:
                pid = forks.pop(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                end.send(f"ended {pid} {code}".encode())
                continue
            program, fds, _, _ = socket.recv_fds(end, PROGRAM_NBYTES_MAX, DESCRIPTORS_MAX)
            if not program:
                return None
            pid = os.fork()
            if pid == 0:
                for number, theirs in enumerate(fds[:2], 1):
                    os.dup2(theirs, number)
                    os.close(theirs)
                for other in forks:
                    os.close(other)
                end.close()
                return program.decode(), fds[2:]
            for theirs in fds:
                os.close(theirs)
            forks[os.pidfd_open(pid)] = pid
            end.send(f"forked {pid}".encode())


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # What is here stays: a fork that ends would look through it for garbage.
    gc.freeze()
    # Ctrl-C in a terminal is for pytest; a fork has it as a script has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    received = serve(socket.socket(fileno=int(sys.argv[1])))
    if received is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code, descriptors = received
        exec(compile(code, "<trainer>", "exec"), {"__name__": "__main__", "descriptors": descriptors})
