"""A small ext4 on a loop device whose power can be cut: EXT4_IOC_SHUTDOWN, then mount again."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from pathlib import Path

SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2
"""The journal is written out first, as if power went a moment later; or what was not synced is gone."""


class Ext4:
    """A file system in a file; ``folder`` is where it is mounted."""

    def __init__(self, base: Path, *, nbytes: int = 192 << 20) -> None:
        self.folder = base / "mounted"
        self.folder.mkdir()
        self._image = base / "ext4.img"
        with self._image.open("wb") as image:
            image.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-m", "0", str(self._image))
        self._device = _run("losetup", "-f", "--show", str(self._image)).strip()
        self._mount()

    def sync(self) -> None:
        """Make durable all that lies here; ``os.sync`` would wait for all disks, and spoil what others cut."""
        _run("sync", "-f", str(self.folder))

    def cut(self, mode: int) -> None:
        """Cut the power: from now on every access fails."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", mode))
        finally:
            os.close(fd)

    def reboot(self) -> None:
        """Mount again, which plays the journal; nobody may have a file open."""
        self._unmount()
        self._mount()

    def close(self) -> None:
        """Unmount, and detach the device."""
        try:
            self._unmount()
        finally:
            _run("losetup", "-d", self._device)

    def _mount(self) -> None:
        # The journal is written by syncs, and not every five seconds: then slow tests would lose nothing.
        _run("mount", "-t", "ext4", "-o", "commit=600", self._device, str(self.folder))

    def _unmount(self) -> None:
        # A ring keeps the files of a killed process open for a moment.
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", str(self.folder)], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"{self.folder} stays busy"
            time.sleep(0.01)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
