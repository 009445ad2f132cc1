"""Temporary folders in memory, for tests that make many stores and whose subject is not the disk.

Making a store syncs 256 folders. On a disk that other tests use too, these waits were half of the time of such tests.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
FREE_NBYTES_MIN = 1 << 30
"""With less room there, as in most containers, tests use the disk."""


def parent() -> Path | None:
    """Return where folders in memory are made, or None where this machine has too little of it."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return None
    return SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free >= FREE_NBYTES_MIN else None


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in memory that is removed after the test; the usual one where memory cannot be used."""
    memory = parent()
    if memory is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ckstore-tests-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
