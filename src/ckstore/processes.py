"""Processes: what forked children must close, how child processes are started, and whether a process is running.

Child processes are started with the same modules, and with job signals blocked. A scheduler sends signals to every
process of a job: a warning before the time limit (SIGUSR1, SIGUSR2, SIGXCPU), the end of a session (SIGHUP), a
cancellation (SIGTERM). Only the trainer reacts to them. A child finishes its work, and ends when that is done or when
its parent has ended.

A process is identified by boot, pid namespace, pid and start time. The kernel is asked by pidfd and signal 0, which use
this process's pid namespace. /proc is used only if it shows the same namespace: in nested containers and sandboxes it
may show another one, where other processes have the same numbers. Processes of another boot or namespace cannot be
checked at all. Two machines of one image may share host name and machine id, so neither proves a reboot.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from ckstore.hashing import new_token

if TYPE_CHECKING:
    import subprocess


class InheritedResource(Protocol):
    """A resource of this process that a forked child must not keep."""

    def close_in_child(self) -> None:
        """Release it in a forked child. Takes no lock, because the thread that holds it does not exist there."""
        ...


_inherited: weakref.WeakSet[InheritedResource] = weakref.WeakSet()


def close_in_children(resource: InheritedResource) -> None:
    """Call ``resource.close_in_child`` in every child that is forked from now on. Does not keep the resource alive."""
    _inherited.add(resource)


def keep_in_children(resource: InheritedResource) -> None:
    """Undo ``close_in_children``, because there is nothing left to close."""
    _inherited.discard(resource)


def _close_in_child() -> None:
    for resource in list(_inherited):
        try:
            resource.close_in_child()
        except Exception as error:
            # Go on with the others. Not logged, because a log handler's lock may be held forever in a forked child.
            sys.stderr.write(f"ckstore: a forked child could not close a {type(resource).__name__}: {error}\n")


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
"""Signals of faults of the process itself, after which it cannot continue."""

_NEVER_HELD = {signal.SIGKILL, signal.SIGSTOP}
"""Signals that cannot be blocked."""

_HARMLESS = {
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
}
"""Signals that do not end a process by default."""

JOB_SIGNALS = frozenset(signal.valid_signals()) - _FAULTS - _NEVER_HELD - _HARMLESS
"""Signals from outside that end a process which does not handle them, real-time signals included."""


def child_environment() -> dict[str, str]:
    """Return an environment in which a child finds the same modules, wherever it is started."""
    package = str(Path(__file__).parents[1])
    found = module_search_path()
    # Threads of numpy's libraries would take memory without any use.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}


def module_search_path() -> list[str]:
    """Return ``sys.path`` with absolute paths."""
    try:
        here = Path.cwd()
    except OSError:
        # The working folder was removed, and with it all modules in it.
        return [entry for entry in sys.path if Path(entry).is_absolute()]
    return [str(here / entry) for entry in sys.path]


def start_python(arguments: Sequence[str], *, fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
    """Start this interpreter with all job signals blocked. The child unblocks those that it handles.

    Args:
        arguments: The command line after the interpreter.
        fds: Descriptors that the child inherits. Their numbers in the child are appended to the arguments.
        options: As for ``subprocess.Popen``.

    Raises:
        OSError: The process cannot be started.
    """
    import subprocess

    # A child inherits the blocked signals, also through exec. So a signal cannot end it at any moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    lifted: list[int] = []
    try:
        # Without standard streams, descriptors may have the numbers 0 to 2, which Popen replaces.
        lifted += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]
        line = [sys.executable, *arguments, *map(str, lifted)]
        # Started in /, so that the working folder is not searched for modules, and its disk can be unmounted.
        return subprocess.Popen(line, cwd="/", env=child_environment(), pass_fds=lifted, **options)
    finally:
        for fd in lifted:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


PROC = Path("/proc")

_PID_MAX = (1 << 31) - 1
"""Largest pid that system calls accept."""

_LOOK_SECONDS, _GAP_SECONDS_MAX = 0.25, 1.0
"""How often a ``StopTimer`` reads /proc, and how much of a longer gap it counts."""


class RecordedProcess(Protocol):
    """The fields of a record that identify the process that wrote it."""

    @property
    def boot_id(self) -> str:
        """``boot_identity()`` of that process."""
        ...

    @property
    def pid(self) -> int:
        """Its pid in its own namespace."""
        ...

    @property
    def process_started(self) -> str:
        """``process_started(pid)`` of that process."""
        ...


class ProcessIdentity(TypedDict):
    """The first fields of a record: the process that owns it, and a random token."""

    host: str
    boot_id: str
    pid: int
    process_started: str
    token: str


def identity_of(pid: int) -> ProcessIdentity:
    """Return the first fields of a new record that a process of this boot and pid namespace owns."""
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=boot_identity(),
        pid=pid,
        process_started=process_started(pid) or "",
        token=new_token(),
    )


def process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot. None: it has ended, or /proc is not usable.

    The pid and the start time together identify a process during one boot, although pids are reused.
    """
    fields = _stat_of(pid)
    return None if fields is None or _has_ended(fields) else fields[19]


def is_running(pid: int, started: str) -> bool | None:
    """Whether a process of this pid namespace is running or stopped. None: unknown.

    Args:
        pid: The process.
        started: Its start time from ``process_started``. Empty: unknown.
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


def owner_is_running(record: RecordedProcess) -> bool | None:
    """Whether the process that wrote a record is running. None: unknown; check its heartbeat or the record's age."""
    here = boot_identity()
    if not here or record.boot_id != here:
        return None
    return is_running(record.pid, record.process_started)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal and waits for SIGCONT."""
    fields = _stat_of(pid)
    return fields is not None and fields[0] in {"T", "t"}


class StopTimer:
    """Measures how long another process has been stopped by a signal, without a break.

    Time in which nobody asks does not count: then this process was stopped, too, and perhaps the whole job. Where /proc
    cannot be used, a process is never stopped.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds = 0.0
        self._was_stopped = False
        self._looked_at = -math.inf

    def seconds(self, now: float) -> float:
        """Return how long it has been stopped. Ask about every second; asking more often costs nothing.

        Args:
            now: Monotonic time in seconds.
        """
        elapsed = now - self._looked_at
        if elapsed >= _LOOK_SECONDS:
            self._looked_at = now
            was_stopped, self._was_stopped = self._was_stopped, is_stopped(self._pid)
            is_still_stopped = was_stopped and self._was_stopped
            self._seconds = self._seconds + min(elapsed, _GAP_SECONDS_MAX) if is_still_stopped else 0.0
        return self._seconds


def proc_is_ours() -> bool:
    """Whether /proc shows the pid namespace of this process."""
    try:
        status = (PROC / "self/status").read_bytes()
    except OSError:
        return False
    for line in status.splitlines():
        # The pids of this process, from the namespace of /proc down to its own (proc(5)). One pid: both are the same.
        if line.startswith(b"NSpid:"):
            return line.split()[1:] == [b"%d" % os.getpid()]
    with contextlib.suppress(OSError):
        # Linux before 4.1 and some sandboxes have no such line.
        return str((PROC / "self").readlink()) == str(os.getpid())
    return False


def boot_identity() -> str:
    """Return ``machine id/boot id/pid namespace``. Within it, a pid identifies one process at a time.

    Empty if the system does not provide it. Then only heartbeats show whether a process is running.
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
    """Whether the kernel knows a process with this pid that has not ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        # Some sandboxes refuse pidfds, and Linux before 5.3 has none.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            # It exists and belongs to another user.
            return True
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(fd)


def _stat_of(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on. None: /proc is not usable."""
    # ``self`` is correct in every /proc. Another pid may be another process there.
    name = "self" if pid == os.getpid() else str(pid)
    if name != "self" and not proc_is_ours():
        return None
    try:
        stat = (PROC / name / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The program name before the last parenthesis may contain blanks and parentheses.
    fields = stat.rsplit(")", 1)[-1].split()
    return fields if len(fields) > 19 else None


def _has_ended(fields: list[str]) -> bool:
    """Whether a process is a zombie or is being removed."""
    return fields[0] in {"Z", "X"}
