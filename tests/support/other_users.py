"""Run code as another user, in this process: imported modules stay imported, and nothing needs to be installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAINER, COLLEAGUE, GROUP = 54321, 54322, 54300


def need_root() -> None:
    """Skip where only root can be several users."""
    if os.geteuid() != 0:
        pytest.skip("needs root to work as several users")


@contextlib.contextmanager
def as_user(uid: int, gid: int | None = None, *, umask: int = 0o022) -> Iterator[None]:
    """Be another user, in no further group, while the block runs."""
    before, groups = os.umask(umask), os.getgroups()
    os.setgroups([])
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)


@contextlib.contextmanager
def place_for_all() -> Iterator[Path]:
    """Give a folder that every user may write to."""
    place = Path(tempfile.mkdtemp(prefix="ckstore-users-"))
    place.chmod(0o777)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
