"""Temporary folders in memory, for tests that make many stores and whose subject is not the disk.

Making a store syncs 256 folders. On a disk that other tests use too, these waits were half of the time of such tests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
FREE_NBYTES_MIN = 1 << 30
"""With less room there, as in most containers, tests use the disk."""

PREFIX = "ckstore-tests-"
LEFT_BEHIND_SECONDS = 3600
"""So old a folder was left behind by tests that were killed."""


@functools.cache
def parent() -> Path | None:
    """Return where folders in memory are made, or None where this machine has too little of it."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return None
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        # It may belong to another user, or be removed by another process meanwhile.
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > LEFT_BEHIND_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    return SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free >= FREE_NBYTES_MIN else None


def new_folder() -> Path:
    """Make a folder, in memory where that can be used; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent()))


@contextlib.contextmanager
def temporary_folder():
    """Yield a folder in memory, or on the disk where memory cannot be used. Remove it at the end.

    Its own name is always the same: ckstore reads steps in the names of folders, and a random name can contain one.
    """
    parent_folder = new_folder()
    folder = parent_folder / "folder"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(parent_folder, ignore_errors=True)


@pytest.fixture
def tmp_path():
    """A temporary folder in memory, for one test."""
    with temporary_folder() as folder:
        yield folder
