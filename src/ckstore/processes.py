"""What a forked child must let go of, because it is its parent's: descriptors, memory, ears for signals.

How the processes that this one starts for itself are begun: with the same modules, and out of reach of job signals.

A scheduler sends its signals to every process of a job: a warning before the time limit (SIGUSR1, SIGUSR2, SIGXCPU),
the end of a session (SIGHUP), a cancellation (SIGTERM). What they mean is the trainer's affair. A child has work to
finish, and ends by itself when that is done, or when its parent is gone.

Whether a process still runs, judged by what it wrote down about itself.

The kernel is asked by pidfd and signal 0, which know the pids of this process's own namespace. What /proc says counts
only where it is the /proc of this pid namespace: nested containers and sandboxes often keep another one's, in which
other processes have the same numbers. A process that another boot or pid namespace started cannot be judged here at
all: two machines of one image may share their host name and their machine id, so neither proves a reboot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from ckstore.hashing import new_token


class InheritedResource(Protocol):
    """Something that a process made, and a child of it finds in its memory."""

    def close_in_child(self) -> None:
        """Let go of it, in a forked child; locks may be held there by threads that are not, so none is taken."""
        ...


_inherited: weakref.WeakSet[InheritedResource] = weakref.WeakSet()


def close_in_children(thing: InheritedResource) -> None:
    """Have every child that is forked from now on let go of something, for as long as it is not collected."""
    _inherited.add(thing)


def keep_in_children(thing: InheritedResource) -> None:
    """Take that back: there is nothing left to let go of."""
    _inherited.discard(thing)


def _close_in_child() -> None:
    for thing in list(_inherited):
        try:
            thing.close_in_child()
        except Exception as error:
            # What one cannot let go of must not keep the others; no log, whose locks may be held by nobody here.
            sys.stderr.write(f"ckstore: a forked child could not let go of a {type(thing).__name__}: {error}\n")


os.register_at_fork(after_in_child=_close_in_child)

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


def child_environment() -> dict[str, str]:
    """Return an environment in which the same modules are found as here, wherever the process is started."""
    package = str(Path(__file__).parents[1])
    found = module_search_path()
    # numpy's threads would cost memory, and do nothing there.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}


def module_search_path() -> list[str]:
    """Return where modules are looked for here, as absolute paths."""
    try:
        here = Path.cwd()
    except OSError:
        # The working folder was removed: what was to be found in it is gone, too.
        return [entry for entry in sys.path if Path(entry).is_absolute()]
    return [str(here / entry) for entry in sys.path]


def start_python(arguments: Sequence[str], *, fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
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
        return subprocess.Popen(line, cwd="/", env=child_environment(), pass_fds=lifted, **options)
    finally:
        for fd in lifted:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


PROC = Path("/proc")

_PID_MAX = (1 << 31) - 1
"""No call takes a higher one."""


class RecordedProcess(Protocol):
    """What a record says about the process that wrote it."""

    @property
    def boot_id(self) -> str:
        """What ``boot_identity`` said there."""
        ...

    @property
    def pid(self) -> int:
        """Its pid, in its own namespace."""
        ...

    @property
    def process_started(self) -> str:
        """What ``process_started`` said there."""
        ...


class ProcessIdentity(TypedDict):
    """What a record says first: the process that it is made for, and a token of its own."""

    host: str
    boot_id: str
    pid: int
    process_started: str
    token: str


def identity_of(pid: int) -> ProcessIdentity:
    """Return what a new record for a process of this boot and pid namespace says of it."""
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=boot_identity(),
        pid=pid,
        process_started=process_started(pid) or "",
        token=new_token(),
    )


def process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None: it has ended, or /proc does not say.

    Together with the pid it names a process for the lifetime of a boot: pids are used again, pairs are not.
    """
    fields = _stat_of(pid)
    return None if fields is None or _has_ended(fields) else fields[19]


def is_running(pid: int, started: str) -> bool | None:
    """Whether a process of this pid namespace runs, a stopped one too; None: that cannot be known here.

    Args:
        pid: The process.
        started: What ``process_started`` said of it; empty where it said nothing.
    """
    if not 0 < pid <= _PID_MAX:
        return None
    if not _exists(pid):
        return False
    fields = _stat_of(pid)
    if fields is not None and _has_ended(fields):
        return False
    if fields is None or not started:
        return None
    return fields[19] == started


def owner_is_running(maker: RecordedProcess) -> bool | None:
    """Whether the process that wrote a record runs; None where only its heartbeat, or the record's age, can tell."""
    here = boot_identity()
    if not here or maker.boot_id != here:
        return None
    return is_running(maker.pid, maker.process_started)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and waits for SIGCONT."""
    fields = _stat_of(pid)
    return fields is not None and fields[0] in {"T", "t"}


def proc_is_ours() -> bool:
    """Whether /proc shows the pid namespace of this process."""
    try:
        status = (PROC / "self/status").read_bytes()
    except OSError:
        return False
    for line in status.splitlines():
        # The pids of this process from the namespace of that /proc down to its own (proc(5)): one if both are the same.
        if line.startswith(b"NSpid:"):
            return line.split()[1:] == [b"%d" % os.getpid()]
    with contextlib.suppress(OSError):
        # Linux before 4.1, and sandboxes that have no such line.
        return str((PROC / "self").readlink()) == str(os.getpid())
    return False


def boot_identity() -> str:
    """Return ``machine id/boot id/pid namespace``; within one of these, a pid names one process at a time.

    Empty where the system does not say; then only heartbeats tell.
    """
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{machine}/{boot}/{namespace}"


def _exists(pid: int) -> bool:
    """Whether a process of this pid namespace has this pid and has not ended, as far as the kernel says."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        # Refused in some sandboxes, and unknown before Linux 5.3.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            # There is one, of another user.
            return True
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(fd)


def _stat_of(pid: int) -> list[str] | None:
    """Return the fields of a process's ``stat`` from its state on; None where this /proc does not say."""
    # ``self`` is this process in every /proc that shows it at all; another pid may be another process's there.
    name = "self" if pid == os.getpid() else str(pid)
    if name != "self" and not proc_is_ours():
        return None
    try:
        stat = (PROC / name / "stat").read_text(errors="replace")
    except OSError:
        return None
    # A program's name may hold anything, blanks and parentheses too.
    fields = stat.rsplit(")", 1)[-1].split()
    return fields if len(fields) > 19 else None


def _has_ended(fields: list[str]) -> bool:
    """Whether a process is a zombie, or going."""
    return fields[0] in {"Z", "X"}
