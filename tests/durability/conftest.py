"""Fixtures that skip tests which this machine cannot run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def strace():
    """Skip where strace is missing or may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")


@pytest.fixture
def loop_devices():
    """Skip where no ext4 image can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("needs root for loop devices and EXT4_IOC_SHUTDOWN")
    missing = [tool for tool in ("mkfs.ext4", "losetup", "mount", "umount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
