"""Whether a process still runs, judged by what it wrote down about itself.

The kernel is asked by pidfd and signal 0, which know the pids of this process's own namespace. What /proc says counts
only where it is the /proc of this pid namespace: nested containers and sandboxes often keep another one's, in which
other processes have the same numbers. A process that another boot or pid namespace started cannot be judged here at
all: two machines of one image may share their host name and their machine id, so neither proves a reboot.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path
from typing import Protocol, TypedDict

from ckstore.ids import new_token

PROC = Path("/proc")

_PID_MAX = (1 << 31) - 1
"""No call takes a higher one."""


class ProcessFacts(Protocol):
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


class Maker(TypedDict):
    """What a record says first: the process that it is made for, and a token of its own."""

    host: str
    boot_id: str
    pid: int
    process_started: str
    token: str


def maker_of(pid: int) -> Maker:
    """Return what a new record for a process of this boot and pid namespace says of it."""
    return Maker(
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


def maker_is_running(maker: ProcessFacts) -> bool | None:
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
