"""How the processes that this one starts for itself are begun: with the same modules, and out of reach of job signals.

A scheduler sends its signals to every process of a job: a warning before the time limit (SIGUSR1, SIGUSR2, SIGXCPU),
the end of a session (SIGHUP), a cancellation (SIGTERM). What they mean is the trainer's affair. A child has work to
finish, and ends by itself when that is done, or when its parent is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FAULTS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""What a process does wrong by itself: it cannot go on."""

_NEVER_HELD = {signal.SIGKILL, signal.SIGSTOP}
"""Neither can be blocked."""

_HARMLESS = {
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
}
"""What ends no process: it does nothing, or stops and continues it."""

JOB_SIGNALS = frozenset(signal.valid_signals()) - _FAULTS - _NEVER_HELD - _HARMLESS
"""Every signal that is sent from outside and would end a process that does not handle it, real-time ones included."""


def environment() -> dict[str, str]:
    """Return an environment in which the same modules are found as here, wherever the process is started."""
    package = str(Path(__file__).parents[1])
    found = module_places()
    # numpy's threads would cost memory, and do nothing there.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}


def module_places() -> list[str]:
    """Return where modules are looked for here, as absolute paths."""
    try:
        here = Path.cwd()
    except OSError:
        # The working folder was removed: what was to be found in it is gone, too.
        return [entry for entry in sys.path if Path(entry).is_absolute()]
    return [str(here / entry) for entry in sys.path]


def start(arguments: Sequence[str], *, fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
    """Start this interpreter with all job signals blocked; the child unblocks those that it handles.

    Args:
        arguments: What follows the interpreter on the command line.
        fds: Descriptors that the child inherits; their numbers there follow the arguments.
        options: As for ``subprocess.Popen``.

    Raises:
        OSError: It cannot be started.
    """
    # A child inherits what is blocked, through exec as well: there is no moment at which a signal could end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    lifted: list[int] = []
    try:
        # Where a process was started without standard streams, new descriptors have their numbers, which are replaced.
        lifted += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]
        line = [sys.executable, *arguments, *map(str, lifted)]
        # Modules are looked for where Python is started; and a child must not keep a disk from being unmounted.
        return subprocess.Popen(line, cwd="/", env=environment(), pass_fds=lifted, **options)
    finally:
        for fd in lifted:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
