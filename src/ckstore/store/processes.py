"""Who a process is: what names it for the lifetime of a boot, whether it lives, stands still, or died in a reboot."""

from __future__ import annotations

import socket
from pathlib import Path


def process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None when there is none.

    Together with the pid it names a process for the lifetime of a boot: pids are used again, pairs are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[-1].split()
    # Field 3 is the state, field 22 the start time; a zombie has died.
    return None if fields[0] in {"Z", "X"} else fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and waits for SIGCONT."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[-1].split()[0] in {"T", "t"}


def boot_identity() -> str:
    """Return ``machine id/boot id/pid namespace``; within one of these, pids can be looked up in /proc.

    Empty where the system does not say; then only heartbeats tell.
    """
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{machine}/{boot}/{namespace}"


def has_rebooted(before: str, now: str) -> bool:
    """Whether two identities are those of one machine in different boots: whoever ran before is dead."""
    machine_before, _, rest_before = before.partition("/")
    machine_now, _, rest_now = now.partition("/")
    return bool(machine_now) and machine_before == machine_now and rest_before.split("/")[0] != rest_now.split("/")[0]


def died_in_reboot(host: str, boot_id: str) -> bool:
    """Whether a process was one of this machine, by its host and ``boot_identity``, before the machine was rebooted."""
    return host == socket.gethostname() and has_rebooted(boot_id, boot_identity())
